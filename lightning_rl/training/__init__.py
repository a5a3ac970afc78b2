"""What Lightning drives: the run, its state, its folder, and the Trainer."""
