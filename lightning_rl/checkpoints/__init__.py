"""What a run leaves on disk and finds again: checkpoints in two generations, and replay buffers in segments beside them."""
