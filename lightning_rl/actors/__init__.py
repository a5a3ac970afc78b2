"""Actors: environments and policies that act in this process, in threads, in other processes, or on other machines."""
