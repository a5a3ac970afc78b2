"""Compare runs by what they wrote into their folders."""
