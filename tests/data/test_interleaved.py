"""Players of a scene of Unity are served in turns."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import lightning_rl as lrl
from lightning_rl.data.collector import Collector
from lightning_rl.data.interleaved import PlayerCollector
from lightning_rl.envs.agents.stepper import RowStepper
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.envs.unity.player import Player
from lightning_rl.errors import NotFiniteError
from lightning_rl.nan_policy import Guard
from lightning_rl.training.experience import make_interleaved_collector
from lightning_rl.types import tree_map
from tests.unity.scenes import build, find_players

STEPS, SEED = 60, 7
"""An episode of the scene has at most 50 steps."""


@pytest.fixture
def make(tmp_path):
    """Make an algorithm and the collector of its players; close them afterwards, and look for processes."""
    collectors = []

    def make_(*arguments, num_envs=2, steps=STEPS, memory=None):
        torch.manual_seed(1)
        scene = f"unity:{build(tmp_path, '--scene', 'reach', '--count', 3, *arguments)}"
        env = EnvConfig(scene, num_envs=num_envs, kwargs={"log_folder": str(tmp_path)})
        algorithm = lrl.PPO(env, n_steps=steps, batch_size=num_envs * 3 * 20, memory=memory)
        collectors.append(make_interleaved_collector(algorithm, steps, SEED, True))
        return algorithm, collectors[-1]

    yield make_
    for collector in collectors:
        collector.close()
    assert [find_players(log) for log in tmp_path.glob("Player-*.log")] == [[]] * len(list(tmp_path.glob("Player-*.log")))


@pytest.mark.thorough
@pytest.mark.parametrize("memory", [None, lrl.LSTM(8, sequence_length=20)])
def test_each_player_makes_the_rows_that_it_makes_alone(make, memory):
    algorithm, collector = make(memory=memory)
    rollouts = [tree_map(torch.clone, collector.collect()) for _ in range(2)]
    for k, part in enumerate(collector.parts):
        one = replace(algorithm.env, num_envs=1)
        alone = Collector(make_fitting_stepper(one, algorithm.spaces, k), algorithm.spaces, algorithm.network, STEPS, part.seed)
        for rollout in rollouts:
            rows = tree_map(lambda leaf, k=k: leaf[:, 3 * k : 3 * k + 3], rollout)
            tree_map(lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6), rows, alone.collect())
        alone.close()
    assert rollouts[0].truncated.any()


def test_a_player_gets_its_next_actions_before_the_next_one_is_waited_for(make, monkeypatch):
    calls = []

    def note(name):
        whole = getattr(Player, name)

        def noted(self, *arguments):
            calls.append((name, self.port))
            return whole(self, *arguments)

        monkeypatch.setattr(Player, name, noted)

    note("start")
    note("finish")
    _, collector = make(steps=20)
    collector.collect()
    calls.clear()
    collector.collect()
    one, two = (part.world.scenes[0].player.port for part in collector.parts)
    turn = [("finish", one), ("start", one), ("finish", two), ("start", two)]
    assert calls == [("start", one), ("start", two), *19 * turn, ("finish", one), ("finish", two)]


@pytest.mark.thorough
def test_steps_and_episodes_of_all_players_count(make):
    _, collector = make()
    collector.collect()
    valid = int(collector.rollout().valid.sum())
    assert collector.env_steps == collector.steps_made == valid and collector.rows == STEPS * 6
    ended = int((collector.rollout().terminated | collector.rollout().truncated).sum())
    assert collector.statistics.episodes == len(collector.statistics.finished) == ended > 0
    assert len(collector.statistics.running_return) == collector.num_envs == 6
    of_scenes = [value for part in collector.parts for value in part.world.reported["scene/arrives"]]
    assert of_scenes[: len(of_scenes) // 2] * 2 == of_scenes  # both report to one list
    assert collector.metrics()["scene/arrives"] == np.mean(of_scenes)
    state = collector.get_state()
    collector.collect()
    assert collector.env_steps > valid
    assert collector.set_state(state).endswith("cannot be saved in the middle of an episode")
    assert collector.env_steps == valid and not collector.statistics.running_return.any()


@pytest.mark.thorough
def test_a_player_that_ends_is_started_again_and_named(make):
    _, collector = make("--crash-at", 40)
    for _ in range(2):
        collector.collect()
    notices = collector.take_notices()
    for k in (0, 1):
        assert any(line.startswith(f"player {k} of unity:") and "was restarted" in line for line in notices), notices
    assert collector.metrics()["env/worker_restarts"] == len(notices)


@pytest.mark.thorough
def test_random_steps_and_new_episodes_concern_all_players(make):
    _, collector = make()
    seen = collector.random_steps(20)
    assert len(seen) == collector.env_steps >= 20
    collector.collect()
    collector.restart_episodes()
    collector.collect()
    assert not collector.rollout().valid[0].any() and collector.rollout().valid[1].all()
    collector.reset()
    assert not collector.parts[1].statistics.running_return.any()


@pytest.mark.thorough
def test_steps_of_an_iteration_that_an_error_ends_count(make, monkeypatch):
    _, collector = make()
    collector.collect()
    before, episodes, stored = collector.env_steps, collector.statistics.episodes, []
    store = PlayerCollector.store

    def fail(self, step):
        stored.append(step)
        if len(stored) == 80:
            raise ValueError("broken")
        return store(self, step)

    monkeypatch.setattr(PlayerCollector, "store", fail)
    with pytest.raises(ValueError, match="broken"):
        collector.collect()
    for _ in range(2):  # as of a run that fails again while it saves
        collector.interrupt()
        assert collector.env_steps == collector.steps_made == before + sum(int(step.valid.sum()) for step in stored[:-1])
        assert collector.rows == 3 * (2 * STEPS + 79)
        assert collector.statistics.episodes == episodes + sum(len(step.ended) for step in stored[:-1])
    monkeypatch.undo()
    collector.collect()
    assert all(part.world.scenes[0].player.requests.empty() for part in collector.parts), "each answer belongs to its step"


@pytest.mark.thorough
def test_bad_steps_in_a_row_are_those_of_a_player(make, monkeypatch):
    _, collector = make(steps=80)
    collector.guard = Guard("skip_update")
    bad, wait = [collector.parts[0]], RowStepper.step

    def step(self, action):
        result = wait(self, action)
        if self in [part.stepper for part in bad]:
            result.reward[0] = np.nan
        return result

    monkeypatch.setattr(RowStepper, "step", step)
    collector.collect()
    assert [part.bad_steps for part in collector.parts] == [80, 0]
    bad.append(collector.parts[1])
    with pytest.raises(NotFiniteError, match="for 100 steps in a row"):
        collector.collect()
    assert collector.parts[1].bad_steps == 19  # the first player was served before it
