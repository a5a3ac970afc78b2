"""When CartPole-v1 counts as solved."""

from __future__ import annotations

from collections.abc import Collection

THRESHOLD, EPISODES = 475.0, 100


def solved(returns: Collection[float]) -> bool:
    """Whether the last 100 episodes, all of them, had the mean return that the environment asks for."""
    return len(returns) >= EPISODES and sum(returns) / len(returns) >= THRESHOLD
