"""Environments of several agents: PettingZoo's two forms, and their agents as rows of a vector environment."""
