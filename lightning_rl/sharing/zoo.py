"""Trained agents that come with this package: `zoo:ALGORITHM/ENVIRONMENT`, named as the config that trained each."""

from pathlib import Path

from lightning_rl.errors import SettingError, nearest
from lightning_rl.sharing.agent import agent_of
from lightning_rl.startup import packaged_agents

PREFIX = "zoo:"


def packaged_agent(address: str | Path) -> Path:
    """Return the weights behind an address. Raises `SettingError`: there is no such agent."""
    name, known = str(address).removeprefix(PREFIX), packaged_agents()
    agent = agent_of(known[name]) if name in known else None
    if agent is None:
        raise SettingError(f"{address} is none of the agents that come with this package{nearest(name, known)}")
    return agent
