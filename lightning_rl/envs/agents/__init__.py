"""Environments of several agents: PettingZoo's two APIs, with the agents as rows of a vector environment."""
