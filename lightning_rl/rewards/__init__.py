"""Reward signals: each fills one reward stream of a rollout, with its own discount."""
