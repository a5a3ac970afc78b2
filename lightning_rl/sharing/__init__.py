"""Share agents: a file format without code, the hub, and agents of Stable-Baselines3."""
