"""Reading vaults: ours and foreign ones, through memory maps where that can be."""
