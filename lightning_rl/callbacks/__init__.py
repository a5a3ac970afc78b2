"""Callbacks around learning: evaluation, checkpoints, curricula, self-play, recordings, progress and stopping."""
