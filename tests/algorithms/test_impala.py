"""IMPALA: V-trace of rollouts of older policies, and batches of several actors."""

from __future__ import annotations

import pytest
import torch

from lightning_rl import GRU, IMPALA, LSTM, SettingError
from lightning_rl.actors.config import ActorsConfig
from lightning_rl.types import tree_map
from tests.fitting import Rows, fit, tiny

IN_TURN = {"num_actors": 2, "backend": "in_process"}


def watched(model):
    """Return a list that collects copies of the rollouts that a model learns from, with their discounts."""
    seen, loss = [], model.loss

    def watch(rollout, discount, *scheduled):
        seen.append((tree_map(torch.clone, rollout), discount.clone()))
        return loss(rollout, discount, *scheduled)

    model.loss = watch
    return seen


@pytest.mark.variants
@pytest.mark.parametrize(
    ("env_id", "settings"),
    [
        ("Scripted-v0", {}),
        ("ScriptedBox-v0", {"normalize_obs": "running"}),
        ("ScriptedDict-v0", {"memory": LSTM(4, 8)}),
        ("Scripted-v0", {"memory": GRU(4, 3)}),  # rollouts of 8 steps in sequences of 3
        ("Choosy-v0", {"env": {"kwargs": {"action": "nested"}}}),
        ("Scripted-v0", {"env": {"autoreset": "NEXT_STEP"}, "memory": LSTM(4, 4)}),
    ],
)
@pytest.mark.parametrize("actors", [None, IN_TURN])
def test_all_importance_weights_of_the_newest_policy_are_one(env_id, settings, actors):
    model = tiny(IMPALA, f"tests.environments:{env_id}", actors=actors, learning_rate=0.01, **settings)
    ratios, evaluate = [], model.evaluate

    def watch(rollout):
        evaluated = evaluate(rollout)
        ratios.append((evaluated[0].detach() - rollout.log_prob)[rollout.valid].abs().max())
        return evaluated

    model.evaluate = watch
    fit(model)
    assert len(ratios) >= 3 and max(ratios) < 1e-5


@pytest.mark.parametrize("memory", [None, LSTM(4, 3), LSTM(4, 8)])
def test_values_in_sequences_equal_those_of_the_whole_rollout(memory):
    model = tiny(IMPALA, memory=memory)
    seen = watched(model)
    fit(model, max_epochs=1, limit_train_batches=1)
    ((rollout, _),) = seen
    again = tiny(IMPALA, memory=memory)  # as it was when it acted
    _, _, value = again.evaluate(rollout)
    torch.testing.assert_close(value, rollout.value)


def test_the_loss_of_an_older_policy_has_truncated_importance_weights():
    model = tiny(IMPALA, n_steps=2, env={"num_envs": 1}, gamma=0.9, ent_coef=0.0, vf_coef=1.0)
    seen = watched(model)
    fit(model, max_epochs=1, limit_train_batches=1)
    rollout, _ = seen[0]
    model = tiny(IMPALA, n_steps=2, env={"num_envs": 1}, gamma=0.9, ent_coef=0.0, vf_coef=1.0)
    log_prob, _, value = model.evaluate(rollout)
    ratio = torch.tensor([0.5, 1.5]).view(2, 1, 1)
    older = rollout._replace(
        log_prob=log_prob.detach() - ratio.log(),
        reward=torch.tensor([1.0, 2.0]).view(2, 1, 1),
        value=torch.tensor([0.5, 0.4]).view(2, 1, 1),
        next_value=torch.tensor([0.7, 0.3]).view(2, 1, 1),
        terminated=torch.tensor([[False], [False]]),
        truncated=torch.tensor([[True], [False]]),
    )
    # spec: targets 1.065 and 2.27, advantages 0.565 and 1.87 where the first step was truncated
    loss, _ = model.loss(older, torch.full((2, 1, 1), 0.9), 0.0, 1.0)
    policy = -(log_prob.flatten() * torch.tensor([0.565, 1.87])).mean()
    values = 0.5 * ((value.flatten() - torch.tensor([1.065, 2.27])) ** 2).mean()
    torch.testing.assert_close(loss, policy + values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip_rho", 3.0), ("clip_rho", None), ("clip_c", 0.1), ("clip_pg_rho", None), ("clip_pg_rho", 0.5), ("lambda_", 0.5)],
)
def test_each_threshold_changes_the_loss_of_an_older_policy(name, value):
    models = [tiny(IMPALA, learning_rate=0.01), tiny(IMPALA, **{name: value})]
    seen = watched(models[0])
    fit(models[0])
    rollout, discount = seen[0]
    older = rollout._replace(log_prob=rollout.log_prob - torch.linspace(-1, 2, rollout.log_prob.numel()).view_as(rollout.log_prob))
    losses = [model.loss(older, discount, 0.0, 1.0)[0] for model in (tiny(IMPALA), models[1])]
    assert losses[0].isfinite() and not torch.equal(*losses)


def test_a_batch_holds_the_rollouts_of_all_actors_side_by_side():
    model = tiny(IMPALA, actors=IN_TURN | {"rollouts_per_batch": 4}, max_env_steps=128)
    seen = watched(model)
    fit(model)
    assert [rollout.reward.shape for rollout, _ in seen] == [(8, 8, 1)] * 2  # 4 rollouts of 2 environments
    assert model.env_steps == 128 and model.global_step == 2
    times = seen[0][0].obs[:, :, 1]  # each observation tells its step in an episode of three
    first, second = times[:, :2], times[:, 2:4]  # of one actor: eight steps, and the eight that follow
    assert torch.equal(first[:, 0], torch.arange(8.0) % 3) and torch.equal(second[:, 0], torch.arange(8.0, 16.0) % 3)


def test_actors_in_turn_have_the_newest_policy():
    model = tiny(IMPALA, actors=IN_TURN)
    logger = Rows()
    fit(model, logger=logger)
    assert {row["actors/policy_lag_max"] for _, row in logger.rows if "actors/policy_lag_max" in row} == {0.0}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clip_rho": 0.5}, "clip_c 1.0 must not be greater than clip_rho 0.5"),
        ({"clip_c": None}, "clip_c null must not be greater than clip_rho 1.0"),
        ({"actors": {"num_actor": 2}}, "actors.num_actor is not a setting; did you mean num_actors?"),
        ({"actors": {"num_actors": 0}}, "actors.num_actors must be >= 1, got 0"),
        ({"actors": {"backend": "rey"}}, "actors.backend must be one of in_process, threads, processes, ray, got 'rey'; did you mean ray?"),
        (
            {"actors": IN_TURN | {"timeout": 1.0}},
            "actors.timeout is for backends processes and ray, not for in_process; remove it",
        ),
        (
            {"actors": {"ordered": True, "max_policy_lag": 3}},
            "actors.max_policy_lag has no effect on ordered actors, which always have the newest policy; remove it",
        ),
        (
            {"actors": IN_TURN | {"queue_factor": 0.5}},
            "actors.queue_factor has no effect on ordered actors, which always have the newest policy; remove it",
        ),
        ({"actors": {"address": "auto"}}, "actors.address is for backend ray, not for processes; remove it"),
    ],
)
def test_invalid_settings_are_one_line(settings, said):
    with pytest.raises(SettingError) as error:
        tiny(IMPALA, **settings)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({"num_actors": 4, "rollouts_per_batch": 2}, 6),
        ({"num_actors": 2, "rollouts_per_batch": 8}, 10),
        ({"num_actors": 2, "queue_factor": 0.0}, 2),
        ({"num_actors": 2, "rollouts_per_batch": 3, "queue_factor": 0.5}, 4),
    ],
)
def test_number_of_rollouts_requested_at_once(settings, ahead):
    assert ActorsConfig(**settings).ahead == ahead
