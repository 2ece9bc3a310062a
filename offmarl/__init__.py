"""Offline multi-agent RL datasets and replay in JAX."""
