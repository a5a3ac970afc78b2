"""Saving and restoring the state of environments."""
