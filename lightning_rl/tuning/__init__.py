"""Search for hyperparameters: search spaces, studies of trials, populations, and Ray for many machines."""
