"""Online training, and the recording of policies in environments."""
