"""A run: its directory, data, updates and evaluations, and what it has trained."""
