"""Scenes of Unity ML-Agents: their protocol, players, and agents as rows."""
