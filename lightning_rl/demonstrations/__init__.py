"""Demonstrations as Minari datasets: recording, saving and loading."""
