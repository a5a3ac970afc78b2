"""threaded: act while the learner learns, with the policy of the iteration before."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_rl import PPO, SAC, SettingError
from tests.fitting import Rows, fit, tiny


def test_ppo_learns_from_the_policy_of_one_iteration_before():
    logger = Rows()
    fit(tiny(PPO, threaded=True, learning_rate=0.01, n_epochs=1), logger=logger)
    lags = [row["actors/policy_lag_max"] for _, row in logger.rows if "actors/policy_lag_max" in row]
    assert lags == [0.0, *[1.0] * 5]  # the first rollout is made for the first iteration


def test_the_ratio_is_one_in_the_first_iteration_only():
    model = tiny(PPO, threaded=True, learning_rate=0.05, batch_size=16, n_epochs=1)
    off, loss = [], model.loss

    def watch(minibatch, *scheduled):
        log_prob, _, _ = model.network.evaluate(minibatch.obs, minibatch.action, minibatch.memory, minibatch.episode_start)
        off.append(float((log_prob.detach() - minibatch.log_prob).abs().max()))
        return loss(minibatch, *scheduled)

    model.loss = watch
    fit(model)
    assert off[0] < 1e-6 and min(off[1:]) > 1e-4


def test_values_are_those_of_the_newest_weights():
    model = tiny(PPO, threaded=True, learning_rate=0.05)
    off, prepare = [], model.prepare

    def watch(rollout):
        with torch.no_grad():
            off.append(float((model.network.value(rollout.obs) - rollout.value).abs().max()))
        return prepare(rollout)

    model.prepare = watch
    fit(model)
    assert len(off) == 6 and max(off) < 1e-6


@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_all_steps_are_learned_from_once_and_a_run_has_its_length(algorithm):
    model = tiny(algorithm, threaded=True)
    assert fit(model).global_step == 6 and model.env_steps == 96
    if algorithm is SAC:
        assert model.updates == 20  # as in turn


def test_sac_keeps_the_steps_of_the_thread_in_order():
    model, kept = tiny(SAC, threaded=True, env={"num_envs": 1}), []
    model.on_train_end = lambda: kept.append(model.dataset.buffer.layout.row.observation.obs[:96].copy())
    fit(model)
    steps = np.arange(96)
    np.testing.assert_array_equal(kept[0], np.stack([steps // 3, steps % 3], 1))  # the episode and the step that each row was


def test_nan_in_a_thread_ends_the_run():
    with pytest.raises(SettingError, match="reward of environment 0 is nan"):
        fit(tiny(PPO, "tests.poisoned:Poisoned-v0", threaded=True, env={"kwargs": {"door": "reward", "value": math.nan, "at": 20}}))


def test_threaded_is_true_or_false():
    with pytest.raises(SettingError, match=r"^threaded must be true or false, got 1$"):
        tiny(PPO, threaded=1)
