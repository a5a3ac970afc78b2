"""Reward signals: each fills one stream of a rollout, with its own discount."""
