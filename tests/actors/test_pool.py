"""A pool of actors in the place of a collector: turns, the age of rollouts, and restarts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_rl import IMPALA, PPO, SAC, EnvConfig, EvolutionStrategies, SettingError
from lightning_rl.actors.actor import BuildActor
from lightning_rl.actors.workers import LocalWorkers
from lightning_rl.training import experience
from tests.command_line import run_python
from tests.fitting import Rows, fit, tiny

LESSONS = [
    {"name": "short", "value": 0.5, "completion_criteria": {"measure": "reward", "threshold": 1e9, "min_lesson_length": 1}},
    {"name": "long", "value": 1.0},
]
"""The first of them is never completed."""


PROGRAM = """
from lightning_rl import IMPALA
from tests.fitting import fit, tiny
fit(tiny(IMPALA, actors={'num_actors': 1}))
"""


def each_iteration(model, watch):
    """Call a function after each iteration of learning."""
    step = model.training_step

    def then(batch, batch_idx):
        step(batch, batch_idx)
        watch(model.collector)

    model.training_step = then


def test_all_actors_take_turns_where_a_batch_has_fewer_rollouts():
    model = tiny(IMPALA, actors={"num_actors": 3, "rollouts_per_batch": 2, "backend": "in_process"})
    steps = []
    each_iteration(model, lambda pool: steps.append([actor.collector.env_steps for actor in pool.workers.workers]))
    fit(model)
    assert steps == [[16, 0, 16], [16, 16, 32], [32, 32, 32]]


def test_actors_begin_new_episodes_on_request():
    model = tiny(IMPALA, actors={"num_actors": 2, "backend": "in_process"})
    begun = []

    def watch(pool):
        begun.append(pool.rollout().episode_start.all(1).tolist())
        pool.restart_episodes()

    each_iteration(model, watch)
    fit(model)
    # episodes of three steps; the step that starts new ones ends none, and the first episode of a run is the same
    assert begun[0] == [True, False, False, True, False, False, True, False]
    assert begun[1] == [False, True, False, False, True, False, False, True]


class LastFirst(LocalWorkers):
    """Workers that answer the last waiting call first."""

    def receive(self):
        self.calls.reverse()
        answer = super().receive()
        self.calls.reverse()
        return answer


@pytest.mark.parametrize("workers", [LocalWorkers, LastFirst])
def test_episodes_of_ordered_actors_are_counted_in_the_order_of_rows_whichever_comes_first(workers, monkeypatch):
    monkeypatch.setattr(experience, "make_workers", lambda build, config, network: workers(build, config.num_actors, network))
    model = tiny(IMPALA, actors={"num_actors": 2, "ordered": True, "backend": "in_process"}, env={"num_envs": 1}, max_env_steps=16)
    seen = []
    each_iteration(model, lambda pool: seen.append((pool.rollout(), list(pool.statistics.returns))))
    fit(model)
    [(rollout, returns)] = seen  # one environment of each actor, its episodes of 3 steps end in rows 2 and 5
    by_rows = [rollout.reward[first : first + 3, env, 0].sum().item() for env in (0, 1) for first in (0, 3)]
    assert returns == pytest.approx(by_rows) and len(set(returns)) == 4


def test_rollouts_are_at_most_as_old_as_the_settings_allow_however_slow_learning_is():
    actors = {"num_actors": 3, "rollouts_per_batch": 1, "queue_factor": 1.0, "backend": "threads"}
    model = tiny(IMPALA, actors=actors, max_env_steps=16 * 12, log_interval=1)

    def until_all_have_acted(pool):
        while pool.workers.num_ready() < pool.requested:
            time.sleep(0.001)

    each_iteration(model, until_all_have_acted)
    rows = Rows()
    fit(model, logger=rows)
    lags = [row["actors/policy_lag_max"] for _, row in rows.rows if "actors/policy_lag_max" in row]
    assert lags[-1] == max(lags) == 4  # queue_factor + num_actors / rollouts_per_batch


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [IMPALA, EvolutionStrategies])
def test_an_environment_with_other_spaces_than_the_model_is_an_error_and_no_process_stays_behind(algorithm):
    model = tiny(algorithm, actors={"num_actors": 1, "backend": "processes"})
    model.env = EnvConfig("tests.environments:ScriptedBox-v0", num_envs=2)
    with pytest.raises(SettingError, match="the environment's spaces differ from those of the model"):
        fit(model)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_a_program_that_trains_as_it_is_imported_gets_one_line(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"
    run = subprocess.run([sys.executable, program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    last = 'SettingError: spawned processes import the program: put the training below `if __name__ == "__main__":`'
    assert run.returncode == 1 and run.stderr.strip().endswith(last) and run.stderr.count("Traceback") == 1


@pytest.mark.thorough
def test_a_restarted_actor_plays_the_current_lesson_in_environments_with_their_own_processes():
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


class Recording(LocalWorkers):
    """Workers that keep the actor, the rewards `[T, N]` and the episode ends of each rollout, in the order of the rollouts."""

    def receive(self):
        answer = super().receive()
        if answer.method == "act":
            vars(self).setdefault("rollouts", []).append((answer.worker, answer.value.experience))
        return answer


@pytest.mark.thorough
def test_normalized_rewards_continue_the_returns_of_each_actor_in_a_resumed_run_too(monkeypatch, tmp_path):
    monkeypatch.setattr(experience, "make_workers", lambda build, config, network: Recording(build, config.num_actors, network))
    actors = {"num_actors": 2, "rollouts_per_batch": 1, "backend": "threads"}
    whole, resumed = (tiny(IMPALA, actors=actors, normalize_reward=True, gamma=0.5) for _ in range(2))
    returns, learned_from = torch.zeros(2, 2), []

    def watch(pool):
        actor, rollout = pool.workers.rollouts[len(learned_from)]
        learned_from.append(actor)
        for reward, over in zip(rollout.reward, rollout.terminated | rollout.truncated, strict=True):
            returns[actor] = 0.5 * (torch.from_numpy(reward).flatten() + returns[actor]) * torch.from_numpy(~over)
        running = whole.reward_signals["extrinsic"].returns.running
        torch.testing.assert_close(running, returns.flatten()[: len(running)])
        if len(learned_from) == 3:
            whole.trainer.save_checkpoint(tmp_path / "last.ckpt")

    each_iteration(whole, watch)
    fit(whole)
    assert learned_from == [0, 1, 0, 0, 1, 0]
    fit(resumed, ckpt_path=tmp_path / "last.ckpt")
    one, other = (model.reward_signals["extrinsic"].returns for model in (whole, resumed))
    assert torch.equal(one.running, other.running) and torch.equal(one.statistics.var, other.statistics.var)


@pytest.mark.thorough
def test_nan_of_an_actor_is_reported_and_counted(capsys):
    rows, kwargs = Rows(), {"door": "observation", "value": float("nan"), "at": 20}
    model = tiny(
        PPO, "tests.poisoned:Poisoned-v0", threaded=True, env={"num_envs": 1, "kwargs": kwargs}, on_nan="skip_update", log_interval=1
    )
    fit(model, logger=rows)
    assert rows.rows[-1][1]["rollout/replaced_steps"] == 1
    assert capsys.readouterr().out.count("observation of environment 0 is nan") == 1


def test_random_steps_of_an_actor_continue_with_the_next_call():
    model = tiny(IMPALA)
    actor = BuildActor(model.env, model.spaces, n_steps=8, seed=0, first=0, next_obs=False)(0, 0, model.network)
    found = [actor.random_steps({}) for _ in range(3)]
    assert [each[1] for each in found] == [16] * 3
    times = np.concatenate([each[0] for each in found])[:, 1].reshape(24, 2)  # each observation holds its step in an episode of three
    np.testing.assert_array_equal(times[:, 0], np.arange(24.0) % 3)
    assert actor.act({}).experience.obs[0, 0, 1] == 0  # then new episodes begin
    actor.close()


def test_actors_warm_up_the_normalizer_for_the_requested_number_of_steps():
    model = tiny(IMPALA, normalize_obs="frozen", normalize_obs_steps=64, actors={"num_actors": 2, "backend": "in_process"})
    fit(model)
    assert model.network.normalizer.statistics[0].count.round() == 64 and model.env_steps == 96


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, SAC])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_run_can_continue_with_a_thread_or_without(algorithm, threaded, tmp_path, capsys):
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
from lightning_rl.actors.config import BuildRegistered
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_env

spec = EnvSpec("ALE/Pong-v5", entry_point="ale_py.env:AtariEnv")
BuildRegistered(lambda *_: make_env(EnvConfig("ALE/Pong-v5")).close(), spec)(0, 0, None)
"""
"""Registers an environment of a package, as the process of an actor does."""


@pytest.mark.thorough
def test_an_actor_prints_nothing_about_environments_that_a_package_registers_too(tmp_path):
    assert run_python(("-c", ALONE), "", tmp_path) == (0, "", "")
