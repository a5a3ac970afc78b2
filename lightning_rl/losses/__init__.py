"""Losses as pure functions of tensors, one file per family: no γ, no modules, no logging."""
