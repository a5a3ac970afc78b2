"""One program for each library: `python -m peers.NAME CASE`, as `throughput.py` runs them."""
