"""Compare runs by the files in their folders."""
