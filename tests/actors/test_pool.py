"""Actors in the place of a collector: whose turn it is, how old rollouts are, and what actors that are started anew must know."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from lightning_rl import IMPALA, PPO, SAC, EnvConfig, SettingError
from lightning_rl.actors.actor import BuildActor
from lightning_rl.actors.processes import _open
from lightning_rl.actors.workers import InTurn
from lightning_rl.training import experience
from tests.command_line import run_python
from tests.fitting import Rows, fit, tiny

LESSONS = [
    {"name": "short", "value": 0.5, "completion_criteria": {"measure": "reward", "threshold": 1e9, "min_lesson_length": 1}},
    {"name": "long", "value": 1.0},
]
"""Of which the first is never learned."""


PROGRAM = """
from lightning_rl import IMPALA
from tests.fitting import fit, tiny
fit(tiny(IMPALA, actors={'num_actors': 1}))
"""


def each_iteration(model, watch):
    """Have something done after each iteration of learning."""
    step = model.training_step

    def then(batch, batch_idx):
        step(batch, batch_idx)
        watch(model.collector)

    model.training_step = then


def test_all_actors_have_their_turn_where_a_batch_has_fewer_rollouts():
    model = tiny(IMPALA, actors={"num_actors": 3, "rollouts_per_batch": 2, "backend": "in_process"})
    steps = []
    each_iteration(model, lambda pool: steps.append([actor.collector.env_steps for actor in pool.workers.workers]))
    fit(model)
    assert steps == [[16, 0, 16], [16, 16, 32], [32, 32, 32]]


class LastFirst(InTurn):
    """Of the calls that wait, the last one is answered first."""

    def receive(self):
        self.calls.reverse()
        answer = super().receive()
        self.calls.reverse()
        return answer


@pytest.mark.parametrize("workers", [InTurn, LastFirst])
def test_episodes_of_ordered_actors_are_counted_in_the_order_of_rows_whoever_comes_first(workers, monkeypatch):
    monkeypatch.setattr(experience, "make_workers", lambda build, config, network: workers(build, config.num_actors, network))
    model = tiny(IMPALA, actors={"num_actors": 2, "ordered": True, "backend": "in_process"}, env={"num_envs": 1}, max_env_steps=16)
    seen = []
    each_iteration(model, lambda pool: seen.append((pool.rollout(), list(pool.statistics.returns))))
    fit(model)
    [(rollout, returns)] = seen  # one environment of each actor, its episodes of 3 steps end in rows 2 and 5
    by_rows = [rollout.reward[first : first + 3, env, 0].sum().item() for env in (0, 1) for first in (0, 3)]
    assert returns == pytest.approx(by_rows) and len(set(returns)) == 4


def test_rollouts_are_at_most_as_old_as_the_settings_say_however_slow_learning_is():
    actors = {"num_actors": 3, "rollouts_per_batch": 1, "queue_factor": 1.0, "backend": "threads"}
    model = tiny(IMPALA, actors=actors, max_env_steps=16 * 12, log_interval=1)

    def until_all_have_acted(pool):
        while pool.workers.num_ready() < pool.under_way:
            time.sleep(0.001)

    each_iteration(model, until_all_have_acted)
    rows = Rows()
    fit(model, logger=rows)
    lags = [row["actors/policy_lag_max"] for _, row in rows.rows if "actors/policy_lag_max" in row]
    assert lags[-1] == max(lags) == 4  # queue_factor + num_actors / rollouts_per_batch


def test_an_actor_with_an_environment_of_other_spaces_is_refused_and_nothing_stays_behind():
    model = tiny(IMPALA, actors={"num_actors": 1})
    model.env = EnvConfig("tests.environments:ScriptedBox-v0", num_envs=2)
    with pytest.raises(SettingError, match="the environment's spaces are not those of the model"):
        fit(model)
    assert not multiprocessing.active_children() and not list(_open)


@pytest.mark.slow
def test_a_program_that_trains_as_it_is_imported_is_told_so(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run([sys.executable, program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    last = 'SettingError: processes of actors import the program: let it train below `if __name__ == "__main__":`'
    assert run.returncode == 1 and run.stderr.strip().endswith(last) and run.stderr.count("Traceback") == 1


def test_an_actor_that_is_started_anew_plays_the_lesson_of_now_in_environments_with_processes_of_their_own():
    env = {"num_envs": 1, "vectorization": "async", "max_episode_steps": 4, "parameters": {"length": {"curriculum": LESSONS}}}
    model = tiny(IMPALA, "CartPole-v1", env=env, actors={"num_actors": 1}, max_env_steps=8 * 8)
    played, killed = [], []

    def watch(pool):
        played.extend(dict(episode.lessons) for episode in pool.statistics.finished)
        if not killed:
            killed.append(pool.workers.processes[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)
        assert pool.workers.restarts <= 1

    each_iteration(model, watch)
    fit(model)
    assert len(played) >= 10 and all(lessons == {"length": 0} for lessons in played)


def test_bad_numbers_that_an_actor_met_are_told_and_counted(capsys):
    rows, kwargs = Rows(), {"door": "observation", "value": float("nan"), "at": 20}
    model = tiny(
        PPO, "tests.poisoned:Poisoned-v0", threaded=True, env={"num_envs": 1, "kwargs": kwargs}, on_nan="skip_update", log_interval=1
    )
    fit(model, logger=rows)
    assert rows.rows[-1][1]["rollout/replaced_steps"] == 1
    assert capsys.readouterr().out.count("observation of environment 0 is nan") == 1


def test_random_steps_of_an_actor_come_by_the_rollout_and_go_on_where_they_were():
    model = tiny(IMPALA)
    actor = BuildActor(model.env, model.spaces, n_steps=8, seed=0, first=0, on_nan="raise", next_obs=False)(0, 0, model.network)
    found = [actor.random_steps({}) for _ in range(3)]
    assert [steps for _, steps in found] == [16] * 3
    times = np.concatenate([rows for rows, _ in found])[:, 1].reshape(24, 2)  # each observation tells its step in an episode of three
    np.testing.assert_array_equal(times[:, 0], np.arange(24.0) % 3)
    assert actor.act({}).unroll.obs[0, 0, 1] == 0  # then new episodes begin
    actor.close()


def test_actors_look_around_for_as_many_steps_as_asked():
    model = tiny(IMPALA, normalize_obs="frozen", normalize_obs_steps=64, actors={"num_actors": 2, "backend": "in_process"})
    fit(model)
    assert model.network.normalizer.statistics[0].count.round() == 64 and model.env_steps == 96


@pytest.mark.parametrize("algorithm", [PPO, SAC])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_run_continues_with_a_thread_or_without_whatever_it_began_with(algorithm, threaded, tmp_path, capsys):
    model = tiny(algorithm, threaded=not threaded, max_env_steps=48)
    each_iteration(model, lambda _: model.trainer.save_checkpoint(tmp_path / "last.ckpt"))
    fit(model)
    again = tiny(algorithm, threaded=threaded)
    fit(again, ckpt_path=tmp_path / "last.ckpt")
    said = "0 actors, not 1" if threaded else "those of actors"
    assert f"environments start new episodes: the checkpoint holds {said}" in capsys.readouterr().out
    assert again.env_steps == 96 and torch.isfinite(next(again.network.parameters())).all()


ALONE = """
from gymnasium.envs.registration import EnvSpec
from lightning_rl.actors.config import WithRegistration
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_env

spec = EnvSpec("ALE/Pong-v5", entry_point="ale_py.env:AtariEnv")
WithRegistration(lambda *_: make_env(EnvConfig("ALE/Pong-v5")).close(), spec)(0, 0, None)
"""
"""What the process of an actor does before it acts."""


def test_an_actor_says_nothing_of_environments_that_a_package_registers_there_too(tmp_path):
    assert run_python(("-c", ALONE), "", tmp_path) == (0, "", "")


def test_actors_know_an_environment_that_a_script_registered():
    gym.register("OnlyHere-v0", "tests.environments:Scripted")
    model = tiny(IMPALA, "OnlyHere-v0", actors={"num_actors": 1}, max_env_steps=16)
    fit(model)
    del gym.registry["OnlyHere-v0"]
    assert model.env_steps == 16
