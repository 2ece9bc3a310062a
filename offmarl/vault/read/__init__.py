"""Read a vault: manifests, chunks, arrays and indices."""
