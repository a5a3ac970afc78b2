"""Demonstrations: episodes of an expert, from files and into them."""
