"""Experience: stepping environments with a policy, and the datasets that hand it to Lightning."""
