"""Environments of several agents that are named by their path: what is said of a wrong one, how a run in them goes on, and commands."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_rl import PPO, EvolutionStrategies, Trainer
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_env
from lightning_rl.envs.snapshot.state import choose_way
from lightning_rl.errors import SettingError
from tests.command_line import run
from tests.fitting import fit, tiny
from tests.videos import read

PAGE = Path(__file__).parents[3] / "docs" / "several_agents.md"
HIDING = """
from my_game import Meeting


class Fixed:
    '''Has the space of all agents as an attribute.'''

    metadata = {}
    possible_agents = ["a", "b"]
    observation_space = action_space = None


class Hiding(Meeting):
    '''Has a part of its state where nobody finds it.'''

    def reset(self, seed=None, options=None):
        self.hide(0)
        return super().reset(seed, options)

    def step(self, actions):
        self.hide(self.hidden() + sum(map(int, actions.values())))
        obs, reward, *others = super().step(actions)
        return obs, {agent: each + 0.01 * self.hidden() for agent, each in reward.items()}, *others

    def hide(self, value):
        self.hidden = lambda: value


class Saved(Hiding):
    '''Hands out its state itself.'''

    def get_state(self):
        return [self.agents, self.place, self.steps, self.hidden(), self.random.bit_generator.state]

    def set_state(self, state):
        self.agents, self.place, self.steps, hidden, self.random.bit_generator.state = state
        self.hide(hidden)


class Nothing:
    '''Is no environment.'''
"""


@pytest.fixture
def my_game(folder, monkeypatch):
    """A folder with the environment of the page on several agents, and with some made of it."""
    (folder / "my_game.py").write_text(re.search(r"```python\n(# my_game\.py.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1])
    (folder / "hiding.py").write_text(HIDING)
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.mark.parametrize(
    ("env_id", "says"),
    [
        ("mpe2.simple_spred_v3", "env.id 'mpe2.simple_spred_v3': there is no 'simple_spred_v3' in mpe2; did you mean simple_spread_v3?"),
        ("pettingzoo.classic.tictactoe_v9", "there is no 'tictactoe_v9' in pettingzoo.classic; did you mean tictactoe_v3?"),
        (
            "pettingzoo.butterfly.pistonball_v1",
            "env.id 'pettingzoo.butterfly.pistonball_v1': this version is not installed; name pettingzoo.butterfly.pistonball_v6",
        ),
        ("my_game.Meetin", "env.id 'my_game.Meetin': there is no 'Meetin' in my_game; did you mean Meeting?"),
        ("your_game.Meeting", "env.id 'your_game.Meeting': there is no module 'your_game'"),
        (
            "hiding.Nothing",
            "hiding.Nothing builds Nothing, which is neither a gymnasium.Env nor a PettingZoo environment",
        ),
        (
            "my_game:Meeting",
            "is not a registered environment; register it with gymnasium, or name it my_game.Meeting if it has several agents",
        ),
        ("hiding.Fixed", "hiding.Fixed builds Fixed, whose observation_space is not a method: PettingZoo calls observation_space(agent)"),
        (
            "mpe2.simple_tag_v3",
            "adversary_0 and agent_0 differ; one policy needs equal spaces; for several policies use MultiAgent",
        ),
    ],
)
def test_a_path_that_leads_nowhere_is_reported_in_one_line(my_game, env_id, says):
    with pytest.raises(SettingError) as error:
        PPO(env_id)
    assert str(error.value).endswith(says) and "\n" not in str(error.value)


def test_a_vector_environment_that_is_named_with_a_colon_is_not_called_one_of_several_agents(my_game):
    (my_game / "vectors.py").write_text("from gymnasium.vector import VectorEnv\n\n\nclass Many(VectorEnv): ...\n")
    with pytest.raises(SettingError, match=r"'vectors:Many' is not a registered environment$"):
        PPO("vectors:Many")


@pytest.mark.parametrize(
    ("module", "env_id", "says"),
    [
        (
            "pettingzoo",
            "pettingzoo.classic.tictactoe_v3",
            'the package pettingzoo, which is not installed; run: pip install "lightning_rl[pettingzoo]"',
        ),
        ("mpe2", "mpe2.simple_spread_v3", 'the package mpe2, which is not installed; run: pip install "lightning_rl[pettingzoo]"'),
        ("pygame", "mpe2.simple_spread_v3", 'the package pygame-ce, which is not installed; run: pip install "lightning_rl[pettingzoo]"'),
        ("rlcard", "pettingzoo.classic.leduc_holdem_v4", "the package rlcard, which is not installed"),
    ],
)
def test_a_missing_package_is_named_with_its_extra_where_it_has_one(monkeypatch, module, env_id, says):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pettingzoo", "mpe2", module)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SettingError) as error:
        make_env(EnvConfig(env_id))
    assert str(error.value) == f"{env_id} needs {says}"


WAYS = {"my_game.Meeting": "attributes", "hiding.Hiding": "replay", "hiding.Saved": "own", "pettingzoo.classic.tictactoe_v3": "attributes"}


@pytest.mark.thorough
@pytest.mark.parametrize(("env_id", "way"), WAYS.items())
def test_a_resumed_run_continues_in_the_middle_of_episodes(my_game, env_id, way, capsys):
    assert choose_way(partial(make_env, EnvConfig(env_id), 0)) == way

    def trained(name, steps, ckpt_path=None):
        model = tiny(PPO, env_id, encoder="mlp", max_env_steps=160)
        trainer = Trainer(
            default_root_dir=name, run_name="run", max_steps=steps, evaluation=None, enable_progress_bar=False, accelerator="cpu"
        )
        trainer.fit(model, ckpt_path=ckpt_path)
        return model.state_dict()

    whole = trained("whole", 5)
    trained("parts", 3)
    capsys.readouterr()
    parts = trained("parts", 5, "last")
    assert "start new episodes" not in "".join(capsys.readouterr())
    assert all(torch.equal(parts[name], value) for name, value in whole.items())


@pytest.mark.thorough
@pytest.mark.parametrize(("env_id", "fewest"), [("mpe2.simple_spread_v3", 26), ("pettingzoo.classic.tictactoe_v3", 6)])
def test_a_video_shows_every_step_and_what_is_not_possible_is_refused(folder, capfd, env_id, fewest):
    fit(tiny(PPO, env_id, encoder="mlp", max_env_steps=16)).save_checkpoint(folder / "a.ckpt")
    status, out, err = run("record --ckpt_path a.ckpt --seed 3", capfd)
    assert (status, err) == (0, "")
    (video,) = (folder / "videos").iterdir()
    assert len(read(video)[1]) == int(re.search(r"length (\d+)", out)[1]) + 1 >= fewest
    status, _, err = run("collect --ckpt_path a.ckpt --dataset several/agents-v0", capfd)
    assert (status, err.count("\n")) == (2, 1) and "collect records environments of one agent" in err
    with pytest.raises(SettingError, match="EvolutionStrategies does not support multi-agent environments such as"):
        tiny(EvolutionStrategies, env_id, encoder="mlp")
