"""Episodes of others to learn from, as Minari datasets: recording, saving and loading them."""
