"""Jobs have the same result whichever evaluator does them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl.actors.evaluator import BuildEvaluator, Generation
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import probe_spaces
from lightning_rl.errors import SettingError
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.memory import LSTM

CARTPOLE = EnvConfig("CartPole-v1")
FIRST = Generation(seed=3, number=0, sigma=0.5)


def evaluator(env=CARTPOLE, num_envs=2, stochastic=False, on_nan="raise", network=None, **settings: Any):
    spaces = probe_spaces(env)
    torch.manual_seed(1)
    network = network or ActorCritic(spaces, net_arch=[8], **settings)
    names = tuple(name for name, _ in network.named_parameters() if not name.startswith(("critic.", "distribution.")))
    built = BuildEvaluator(env, num_envs, spaces, stochastic, on_nan)(0, 0, network)
    evaluate = built.evaluate
    built.evaluate = lambda generation, *jobs, **watched: evaluate(generation._replace(names=names), *jobs, **watched)
    return built


def summary(played):
    """Return of each episode, in the order of jobs: its job, sign, return, length and signs."""
    rows = [(each.job, each.sign, each.finished.return_, each.finished.length, each.signs) for each in played]
    return sorted(rows, key=lambda row: (row[0], -row[1]))


def test_noise_follows_from_its_numbers_in_all_versions():
    assert FIRST.noise(5, 4).tolist() == Generation(3, 0, 9.0).noise(5, 4).tolist()
    assert FIRST.noise(0, 3).tolist() == pytest.approx(NOISE, abs=1e-6)
    assert FIRST.noise(0, 3).dtype == np.float32


NOISE = [1.7305270, -1.0721536, -2.1191585]
"""Fixed, so that runs continue with the noise that they began with."""


def test_noise_of_jobs_generations_and_runs_is_independent():
    size = 10_000
    others = [FIRST, Generation(3, 1, 1.0), Generation(4, 0, 1.0)]
    noise = np.stack([each.noise(job, size) for each in others for job in range(4)])
    close = 5 / np.sqrt(size)
    assert np.abs(noise.mean(1)).max() < close and np.abs(noise.std(1) - 1).max() < close
    assert np.abs(np.corrcoef(noise) - np.eye(len(noise))).max() < close
    seeds = [each.episode_seed(job) for each in others for job in range(1000)]
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**31


@pytest.mark.variants
@pytest.mark.parametrize("settings", [{}, {"memory": LSTM(4, 4)}, {"stochastic": True}])
def test_a_job_has_the_same_result_whichever_evaluator_does_it_and_whatever_it_does_at_once(settings):
    expected = summary(evaluator(**settings).evaluate(FIRST, range(6)))
    assert [row[:2] for row in expected] == [(job, sign) for job in range(6) for sign in (1, -1)]
    assert len({row[2] for row in expected}) > 3
    for num_envs in (1, 5, 20):
        assert summary(evaluator(num_envs=num_envs, **settings).evaluate(FIRST, range(6))) == expected
    again = evaluator(num_envs=3, **settings)
    assert summary([*again.evaluate(FIRST, [5, 1]), *again.evaluate(FIRST, [4, 0, 3, 2])]) == expected


def test_generations_differ():
    here = evaluator()
    assert summary(here.evaluate(FIRST, range(3))) != summary(here.evaluate(Generation(3, 1, 0.5), range(3)))


@pytest.mark.parametrize("stochastic", [False, True])
def test_both_episodes_of_a_job_have_the_same_seed(stochastic):
    still = Generation(3, 0, sigma=0.0)
    played = summary(evaluator(stochastic=stochastic).evaluate(still, range(4)))
    returns = np.array([row[2] for row in played]).reshape(4, 2)
    assert (returns[:, 0] == returns[:, 1]).all() and len(set(returns[:, 0])) > 1


def test_actions_are_drawn_only_if_stochastic():
    deterministic, drawn = (summary(evaluator(stochastic=each).evaluate(FIRST, range(4))) for each in (False, True))
    assert deterministic != drawn


def test_the_network_keeps_its_weights():
    network = ActorCritic(probe_spaces(CARTPOLE))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    evaluator(network=network).evaluate(FIRST, range(2))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_observations_are_returned_of_watched_jobs():
    played = evaluator().evaluate(FIRST, range(3), watched=[1])
    assert [len(each.obs) for each in played if each.job != 1] == [0] * 4
    for each in (each for each in played if each.job == 1):
        assert each.obs.shape == (each.finished.length, 4) and np.abs(each.obs[0]).max() <= 0.05
    first, second = (each.obs for each in played if each.job == 1)
    assert (first[0] == second[0]).all() and (first[1] != second[1]).any()


@pytest.mark.parametrize("longest, length", [(None, 200), (30, 30), (1000, 200)])
def test_episodes_end_at_the_environments_limit_or_earlier(longest, length):
    played = evaluator(EnvConfig("Pendulum-v1")).evaluate(FIRST._replace(longest=longest), [0])
    assert [each.finished.length for each in played] == [length] * 2


def test_the_signs_of_rewards_are_summed_too():
    played = evaluator(EnvConfig("Pendulum-v1", max_episode_steps=7)).evaluate(FIRST, [0])
    assert [each.signs for each in played] == [-7.0, -7.0] and -7.0 < played[0].finished.return_ < 0.0


def test_environments_play_the_lessons_of_a_generation():
    lessons = {"curriculum": [{"value": 1.0, "completion_criteria": {"threshold": 1}}, {"value": 2.0}]}
    env = EnvConfig("CartPole-v1", parameters={"length": lessons})
    given = {"length": {"values": [1.0], "replay": 0.0, "first": 0}}
    for generation, lesson, length in ((FIRST, 1, 2.0), (FIRST._replace(lessons=given), 0, 1.0)):
        (played, _) = evaluator(env).evaluate(generation, [0])
        assert played.finished.lessons == {"length": lesson} and played.finished.parameters == {"length": length}


@pytest.mark.parametrize("way", ["info", "key", "method"])
@pytest.mark.parametrize("stochastic", [False, True])
def test_illegal_actions_are_not_taken(way, stochastic):
    env = EnvConfig("tests.environments:Choosy-v0", kwargs={"way": way, "period": 10})
    played = evaluator(env, stochastic=stochastic).evaluate(FIRST, range(3))  # it raises at an illegal action
    assert {each.finished.length for each in played} == {10}


def test_nan_is_replaced_and_reported():
    env = EnvConfig("tests.poisoned:Poisoned-v0", kwargs={"door": "reward", "value": float("nan"), "at": 3})
    for on_nan in ("raise", "skip_update"):  # the run's guard decides
        played = evaluator(env, num_envs=1, on_nan=on_nan).evaluate(FIRST, [0])
        assert [(each.finished.return_, each.replaced) for each in played] == [(4.0, 1), (5.0, 0)]  # reward 0 once
        bad = played[0].bad
        assert bad is not None and bad.line.startswith("reward is nan in a generation, at step 3 of the episode with seed")
        assert bad.batch["obs"][0] == np.float32(0.4) and bad.batch["next_obs"][0] == np.float32(0.6) and np.isnan(bad.batch["reward"])


def test_an_environment_with_other_spaces_than_the_model_is_an_error():
    build = BuildEvaluator(EnvConfig("Pendulum-v1"), 1, probe_spaces(CARTPOLE), False, "raise")
    with pytest.raises(SettingError, match="the environment's spaces differ from those of the model"):
        build(0, 0, torch.nn.Linear(1, 1))
