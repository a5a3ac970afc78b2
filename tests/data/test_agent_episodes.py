"""Whole episodes of several agents with a fixed policy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rl import GRU, PPO, EnvConfig
from lightning_rl.data.agent_episodes import AgentEpisodePlayer
from lightning_rl.data.episodes import Episode
from lightning_rl.data.players import make_player
from lightning_rl.distributions import Categorical
from lightning_rl.errors import NotFiniteError, RunStoppedError
from lightning_rl.spaces import Discrete
from lightning_rl.types import tree_leaves
from tests.agents import InTurn, Mortal, Together
from tests.fitting import tiny


class Always(nn.Module):
    """Takes the first action that is legal, and remembers how often it was asked since the beginning of an episode."""

    def __init__(self, num_actions=2):
        super().__init__()
        self.distribution, self.unused, self.seen = Categorical(Discrete(num_actions)), nn.Parameter(torch.zeros(())), []

    def initial_memory(self, num):
        return torch.zeros(num, 1)

    def sample(self, obs, memory, starts, mask, *, deterministic, generator):
        memory = torch.where(starts[:, None], 0, memory) + 1
        self.seen += (
            [(int(each), int(m)) for each, m in zip(tree_leaves(obs)[-1].reshape(len(starts), -1)[:, 0], memory, strict=True)]
            if deterministic
            else []
        )
        return (mask.float().argmax(1) if len(mask) else torch.zeros(len(starts), dtype=torch.long)), memory


def play(env, episodes=1, seed=0, num_envs=1, network=None, limit=None, on_nan="raise", deterministic=True):
    config = EnvConfig(f"tests.agents.{env}") if isinstance(env, str) else env
    player = make_player(config, num_envs, limit)
    assert isinstance(player, AgentEpisodePlayer)
    player.on_nan = on_nan
    try:
        return player.play(network or Always(), episodes, seed, deterministic)
    finally:
        player.close()


def test_the_return_is_the_mean_of_the_agents_and_the_length_that_of_the_episode():
    # a: 0 + 1 + 2 + 3, b: 10 + 11; success: a yes, b no
    assert play("Mortal", 2) == [Episode(0, 13.5, 4, 0.5), Episode(1, 13.5, 4, 0.5)]
    assert play("Teams") == [Episode(0, (2 + 2 - 4) / 3, 2, pytest.approx(1 / 3))]


def test_an_agent_that_was_never_there_is_not_in_the_mean():
    assert play("Haunted")[0].return_ == 13.5


def test_an_agent_that_comes_twice_has_one_return_and_begins_without_memory():
    network = Always()
    assert play("Visited", network=network)[0].return_ == (15 + 11 + 12 + 14 + 15) / 2
    assert [memory for agent, memory in network.seen if agent == 1] == [1, 2, 1, 2]
    assert [memory for agent, memory in network.seen if agent == 0] == [1, 2, 3, 4, 5, 6]


def test_the_longest_episode_ends_it_and_successes_of_the_dead_count():
    assert play("Mortal", limit=3) == [Episode(0, (3 + 21) / 2, 3, 0.0)]
    config = EnvConfig("tests.agents.Mortal", max_episode_steps=3)
    assert play(config)[0].length == 3


@pytest.mark.parametrize("env", ["Mortal", "Nested", "MaskedTogether", "InTurn", "Elimination", "MaskedInfo", "MaskedInTurn"])
def test_episodes_are_the_same_with_any_number_of_environments(env):
    network = Always(3 if env.startswith("Masked") else 2)
    one = play(env, 7, 5, 1, network)
    assert [each.seed for each in one] == list(range(5, 12)) and len(one) == 7
    assert one == play(env, 7, 5, 3, network) == play(env, 7, 5, 20, network)


def test_in_games_of_turns_the_seat_is_that_of_the_seed_and_the_return_its_own():
    network = Always()
    episodes = play("InTurn", 6, 3, network=network)
    assert [each.seed for each in episodes] == [3, 4, 5, 6, 7, 8]
    assert [each.length for each in episodes] == [6] * 6
    # p0: replies to both of its moves; p1: 2 x 100 and both replies; p2: 2 x 200 and the reply to its first move
    assert [each.return_ for each in episodes] == [2, 202, 401] * 2
    assert {agent for agent, _ in network.seen} == {0, 1, 2} and len(network.seen) == 12


def test_a_game_is_over_with_the_learner():
    assert [each.length for each in play("Elimination", 3, 0)] == [6, 3, 6]


class Watched(InTurn):
    """Notes the moves of all; p0 alone reports its success."""

    moves: list

    def __init__(self):
        super().__init__()
        self.moves = []

    def reset(self, seed=None, options=None):
        Watched.last = self
        return super().reset(seed, options)

    def pay(self, mover, action):
        self.moves.append(int(action))
        return super().pay(mover, action)

    def tell(self, agent):
        return {"is_success": agent == "p0"}


def test_the_opponents_moves_are_random_and_those_of_the_seed():
    play(Watched, 8, 2)
    moves = Watched.last.moves
    play(Watched, 8, 2)
    assert Watched.last.moves == moves
    others = [move for k, move in enumerate(moves) if k % 6 % 3 != (2 + k // 6) % 3]
    assert 0.2 < np.mean(others) < 0.8 and len(moves) == 48


def test_only_the_learners_success_counts_in_turn():
    assert [each.success for each in play(Watched, 3)] == [1, 0, 0]


class Bad(Together):
    """b sees or gets a bad number at its second move, or in its last observation."""

    value, door = math.nan, "observation"

    def observe(self, agent):
        seen = super().observe(agent)
        if agent == "b" and self.t == {"observation": 1, "final": 4}.get(self.door):
            seen[1] = self.value
        return seen

    def pay(self, agent, action):
        return self.value if self.door == "reward" and agent == "b" and self.t == 1 else super().pay(agent, action)


@pytest.mark.parametrize(("door", "step"), [("observation", 1), ("reward", 2), ("final", 4)])
def test_numbers_that_are_not_finite_end_an_evaluation_or_are_replaced(door, step, monkeypatch):
    monkeypatch.setattr(Bad, "door", door)
    what = "reward" if door == "reward" else "observation"
    with pytest.raises(NotFiniteError, match=rf"{what} is nan of b in evaluation, at step {step} of the episode with seed 0"):
        play(Bad)
    network = Always()
    b = 10 + 0 + 12 + 13 if door == "reward" else 46
    assert play(Bad, network=network, on_nan="skip_update")[0].return_ == (6 + b) / 2


def test_what_was_seen_before_stands_in_for_a_bad_observation():
    class Seeing(Always):
        def sample(self, obs, *rest, **settings):
            times.append(obs[:, 1].tolist())
            return super().sample(obs, *rest, **settings)

    times = []
    play(Bad, network=Seeing(), on_nan="skip_update")
    assert times == [[0, 0], [1, 0], [2, 2], [3, 3]]


def test_an_evaluation_can_be_stopped():
    player = make_player(Mortal, 2, None)
    with pytest.raises(RunStoppedError):
        player.play(Always(), 3, 0, True, lambda: True)
    player.close()


@pytest.mark.parametrize("env", ["Nested", "MaskedInfo"])
def test_a_policy_with_a_memory_plays_and_keeps_its_modes(env):
    model = tiny(PPO, f"tests.agents.{env}", memory=GRU(8, 4))
    model.network.train()
    first, again = (play(env, 5, 1, num, model.network, deterministic=True) for num in (1, 2))
    assert [each[0::2] for each in first] == [each[0::2] for each in again]
    assert [each.return_ for each in first] == pytest.approx([each.return_ for each in again])
    assert model.network.training
