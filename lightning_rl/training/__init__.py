"""Training with Lightning: the run, its state and folder, and the Trainer."""
