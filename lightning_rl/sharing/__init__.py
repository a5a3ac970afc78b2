"""Agents of others: a file format without code, the hub they are kept on, and those of Stable-Baselines3."""
