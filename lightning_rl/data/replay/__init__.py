"""Replay: the buffer, its storage, and sampling."""
