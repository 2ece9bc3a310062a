"""Create, append, share and compact vaults."""
