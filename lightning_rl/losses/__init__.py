"""Pure losses, one file per family: tensors in, tensors out, no γ, no modules, no logging."""
