"""Creating vaults and appending to them, alone or together."""
