"""Save runs and find them again: checkpoints in two generations, with replay buffers in segments next to them."""
