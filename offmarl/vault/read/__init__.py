"""Read a vault: manifests, chunks and arrays."""
