"""How a vault is laid out: names, records, encodings and tables."""
