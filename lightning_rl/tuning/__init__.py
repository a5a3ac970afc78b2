"""Search for settings: spaces to draw them from, studies of trials, and Ray for many machines."""
