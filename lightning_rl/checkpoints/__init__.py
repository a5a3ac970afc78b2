"""Save and load checkpoints: two generations of each, with replay buffers and snapshots of self-play in files next to them."""
