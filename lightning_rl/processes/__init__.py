"""This process and others: how the program starts, its child processes, and the ranks of a distributed run."""
