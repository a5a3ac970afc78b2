"""A game as an environment of PettingZoo."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.test import api_test, parallel_api_test

from lightning_rl import SettingError
from lightning_rl.envs import games
from lightning_rl.envs.agents.copies import is_packaged
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.one_copy import ParallelGame, TurnGame
from lightning_rl.envs.make import find_user_module, make_env, probe_spaces

PREFIX = "lightning_rl.envs.games."


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("env_id", GAMES)
def test_one_copy_keeps_to_the_interface_of_pettingzoo(env_id, capsys):
    cls = GAMES[env_id]
    if cls.in_turn:
        api_test(type("Official", (TurnGame, AECEnv), {})(cls), 200)
    else:
        parallel_api_test(type("Official", (ParallelGame, ParallelEnv), {})(cls), 20)


@pytest.mark.parametrize("env_id", GAMES)
def test_one_copy_is_drawn_as_text_and_as_a_picture(env_id):
    for mode, kind in (("ansi", str), ("rgb_array", np.ndarray)):
        env = make_env(EnvConfig(env_id, kwargs={"render_mode": mode}))
        env.reset(seed=0)
        env.step(env.unwrapped.random_actions(0))
        picture = env.render()
        assert isinstance(picture, kind)
        if mode == "rgb_array":
            assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3


def test_ids_may_stand_in_checkpoints_and_others_of_the_package_may_not():
    assert all(is_packaged(env_id) and find_user_module(env_id) is None for env_id in GAMES)
    assert set(GAMES) == {f"{PREFIX}{name}" for name, value in vars(games).items() if callable(getattr(value, "func", None))}
    assert not is_packaged(f"{PREFIX}judges") and not is_packaged(f"{PREFIX}tic_tac_toe.x")
    with pytest.raises(SettingError, match=r"there is no 'tictactoe' in .*did you mean tic_tac_toe"):
        probe_spaces(EnvConfig(f"{PREFIX}tictactoe"))
    with pytest.raises(SettingError, match="cannot be built"):
        probe_spaces(EnvConfig(f"{PREFIX}connect_four", kwargs={"height": 8}))


def test_spaces_are_those_of_a_player():
    board, cards = probe_spaces(EnvConfig(f"{PREFIX}connect_four")), probe_spaces(EnvConfig(f"{PREFIX}kuhn_poker"))
    assert board.masked and board.one_learns and board.agents == ("player_0", "player_1") and board.observation.shape == (6, 7, 2)
    assert not cards.masked and cards.action.n == 2 and not probe_spaces(EnvConfig(f"{PREFIX}rock_paper_scissors")).one_learns


@pytest.mark.thorough
def test_pettingzoo_is_not_needed():
    code = "import sys; sys.modules['pettingzoo'] = None\n" + (
        "from lightning_rl.envs.config import EnvConfig; from lightning_rl.envs.make import probe_spaces\n"
        f"print(*[probe_spaces(EnvConfig({PREFIX!r} + name)).action.n for name in ('tic_tac_toe', 'rock_paper_scissors')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "9 3"
