"""Where a vault is stored: files, archives, drivers and commits."""
