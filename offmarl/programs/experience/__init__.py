"""The steps that online programs learn from: their buffers and windows."""
