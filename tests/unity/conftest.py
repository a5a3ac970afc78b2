"""Scenes that tests open."""

import json

import pytest

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import probe_spaces
from lightning_rl.envs.stepping import make_agent_stepper
from lightning_rl.envs.unity.scene import find_groups
from lightning_rl.training.behaviors import find_teams
from tests.unity.scenes import PUSH, build, find_players


@pytest.fixture
def opened(tmp_path):
    """Open a scene whose messages are listed, or another one, and return its stepper; close it afterwards, and look for processes."""
    steppers = []

    def open_(*messages, arguments=(), by_group=False, teams=None, **settings):
        listed = [message if isinstance(message, dict) else {PUSH: message} for message in messages]
        arguments = arguments or ("--scene", "listed", "--script", json.dumps(listed))
        kwargs = {"log_folder": str(tmp_path), **settings.pop("kwargs", {})}
        config = EnvConfig(f"unity:{build(tmp_path, *arguments)}", **{"num_envs": 1, **settings}, kwargs=kwargs)
        spaces = probe_spaces(config)
        spaces = find_groups(config, spaces) if by_group else spaces
        steppers.append(make_agent_stepper(config, spaces if teams is None else spaces._replace(teams=find_teams(teams, spaces.agents)), 0))
        return steppers[-1]

    yield open_
    for stepper in steppers:
        stepper.close()
    assert find_players(tmp_path / "Player-0.log") == []
