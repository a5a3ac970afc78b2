"""Save and load checkpoints: two generations of each, with replay buffers in segments next to them."""
