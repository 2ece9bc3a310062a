"""Where a vault lies, and the key-value store in it."""
