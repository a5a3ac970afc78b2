"""Encoders, memory, normalization, policies and critics. No Lightning here: actor processes do not import it."""
