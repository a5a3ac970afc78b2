"""Encoders, memory, normalization, and the networks that act and judge. No Lightning here: actors need none."""
