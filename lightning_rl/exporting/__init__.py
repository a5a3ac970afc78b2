"""Trained policies as files that need no part of this package: graphs from raw observations to environment actions, and bare weights."""
