"""Experience: stepping environments with a policy, and the datasets that pass it to Lightning."""
