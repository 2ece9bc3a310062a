"""The parts of transforms: what they take of their sources, change and record."""
