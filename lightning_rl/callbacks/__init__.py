"""Everything around learning: evaluation, checkpoints, progress, stopping."""
