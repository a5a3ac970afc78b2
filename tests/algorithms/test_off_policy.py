"""What holds of every algorithm that replays; among it a test for each of eight faults of soft actor-critic elsewhere."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from lightning_rl import DQN, SAC, TD3, load_policy
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.iteration import make_target
from lightning_rl.data.collector import Collector
from lightning_rl.networks.off_policy import Critic
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.rewards.signal import Extrinsic
from tests.fitting import OFF_POLICY, Rows, fit, tiny, twins_slow, weights

every_algorithm = pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
every_autoreset = pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP", "DISABLED"])


def after(model: Any, look: Any) -> Any:
    """What a function sees of the model at the end of its run, while its memory is there."""
    seen = []
    model.on_train_end = lambda: seen.append(look(model))
    fit(model)
    return seen[0]


def at_updates(model: Any, look: Any, **arguments: Any) -> list[Any]:
    """What a function sees of the model after each update, the targets moved."""
    seen, end_update = [], model.end_update
    model.end_update = lambda batch: (end_update(batch), seen.append(look(model)))
    fit(model, **arguments)
    return seen


def vector(*modules: nn.Module) -> torch.Tensor:
    """All parameters, one after the other."""
    return torch.cat([parameter.detach().flatten() for module in modules for parameter in module.parameters()])


def everything(model: Any) -> list[torch.Tensor]:
    """All that a checkpoint holds of the networks and statistics."""
    return [value.clone() for value in model.state_dict().values()]


def rows_of(model: Any) -> tuple[np.ndarray, ...]:
    """All rows of a memory that is not full: obs, action, reward, next_obs, discount."""
    buffer, dataset = model.dataset.buffer, model.dataset
    rows = buffer.locate(np.arange(buffer.ready))
    row, following = buffer.layout.read(rows, rows)
    return row.observation.obs, row.action, row.reward, following.obs, dataset.discounts[np.where(row.terminated, 0, 1), 0]


# ---------------------------------------------------------------- eight faults of soft actor-critic elsewhere


@pytest.mark.parametrize("replay", [{}, {"optimize_memory_usage": True}], ids=["stored", "derived"])
@every_autoreset
def test_the_row_of_a_reset_is_no_transition(autoreset, replay):
    model = tiny(SAC, env={"autoreset": autoreset}, replay=replay, max_env_steps=48)
    obs, action, reward, next_obs, _ = after(model, rows_of)
    assert len(obs) == model.env_steps == 48
    assert {tuple(row) for row in obs} == {(e, t) for e in range(8) for t in range(3)}  # (episode, t) in each environment
    np.testing.assert_array_equal(next_obs - obs, np.tile([0, 1], (48, 1)))  # the same episode, one step later
    np.testing.assert_allclose(reward, 10 * obs[:, 0] + obs[:, 1] + action / 10, rtol=1e-6)


@pytest.mark.parametrize("replay", [{}, {"optimize_memory_usage": True}], ids=["stored", "derived"])
@every_autoreset
def test_the_final_observation_of_a_truncated_episode_is_what_came_next(autoreset, replay):
    model = tiny(SAC, env={"autoreset": autoreset, "kwargs": {"endings": ["truncation"]}}, replay=replay, max_env_steps=48)
    obs, _, _, next_obs, _ = after(model, rows_of)
    last = obs[:, 1] == 2
    assert last.sum() == 16
    np.testing.assert_array_equal(next_obs[last, 0], obs[last, 0])
    assert (next_obs[last, 1] == 3).all()


@every_autoreset
def test_the_end_by_a_time_limit_is_no_termination(autoreset):
    model = tiny(SAC, env={"autoreset": autoreset}, max_env_steps=48)
    obs, _, _, _, discount = after(model, rows_of)
    ended = np.isin(obs[:, 0] % 3, [0, 2]) & (obs[:, 1] == 2)  # episodes end by termination, by truncation, and by both
    np.testing.assert_array_equal(discount, np.where(ended, 0.0, 0.99).astype(np.float32))


@every_algorithm
def test_the_observation_normalizer_counts_each_frame_once_and_rests_while_gradients_step(algorithm):
    model = tiny(algorithm, normalize_obs="running", normalize_reward=True, gradient_steps=3)
    counts = at_updates(
        model, lambda model: (model.network.normalizer.statistics[0].count.item(), signal(model).returns.statistics.count.item())
    )
    seen = [(float(steps),) * 2 for steps in (16, 32, 48, 64, 80) for _ in range(4 * 3)]
    assert [pytest.approx(count, abs=1e-3) for count in counts] == seen
    assert signal(model).returns.statistics.count == pytest.approx(96, abs=1e-3)


def signal(model: Any) -> Any:
    return model.reward_signals["extrinsic"]


@pytest.mark.thorough
@every_algorithm
@pytest.mark.parametrize("num_envs", [1, 2, 8])
def test_an_environment_step_brings_an_update_whatever_the_number_of_environments(algorithm, num_envs):
    model = tiny(algorithm, env={"num_envs": num_envs}, train_freq=1)
    fit(model)
    assert (model.env_steps, model.updates) == (96, 80)


# library bug (data/dataset.py): rewards are multiplied inside the autocast of the training step and come out as bfloat16
@every_algorithm
@pytest.mark.parametrize("n_steps", [1, 3])
def test_discounts_and_rewards_are_not_rounded_where_networks_compute_in_bfloat16(algorithm, n_steps):
    kwargs = {"action": "box" if algorithm is TD3 else "discrete", "reward": 1.2345678}
    model = tiny(algorithm, "tests.environments:Anything-v0", env={"kwargs": kwargs}, max_env_steps=32, n_steps=n_steps)
    batches, end_update = [], model.end_update
    model.end_update = lambda batch: (batches.append(batch), end_update(batch))
    fit(model, precision="bf16-mixed")
    assert weights(model).dtype == torch.float32 and len(batches) == 4
    assert all(batch.discount.dtype == batch.reward.dtype == torch.float32 for batch in batches)
    discounts, rewards = (torch.cat(leaves).flatten().tolist() for leaves in zip(*((b.discount, b.reward) for b in batches), strict=True))
    assert set(discounts) == {0.0, float(np.float32(0.99**n_steps))}
    sums = [1.2345678 * sum(0.99**i for i in range(k)) for k in range(1, n_steps + 1)]  # of windows that an end cuts short too
    assert all(min(abs(reward - total) for total in sums) < 1e-6 for reward in rewards)


@every_algorithm
def test_a_row_can_be_logged_before_any_episode_has_ended(algorithm):
    logger = Rows()
    fit(tiny(algorithm, env={"kwargs": {"period": 1_000}}, log_interval=1), logger=logger)
    assert [step for step, _ in logger.rows] == [16, 32, 48, 64, 80, 96]
    assert all("rollout/ep_rew_mean" not in metrics and metrics["rollout/episodes"] == 0 for _, metrics in logger.rows)
    assert "replay/age_mean" not in logger.rows[0][1] and logger.rows[0][1]["replay/size"] == 16


# ---------------------------------------------------------------- the rhythm of acting and learning


@pytest.mark.parametrize("algorithm", [DQN, *(pytest.param(each, marks=pytest.mark.slow) for each in (SAC, TD3))])
@pytest.mark.parametrize(
    "num_envs, train_freq, gradient_steps, learning_starts, updates",
    [
        (1, 1, 1, 0, 96),
        (4, 1, 1, 16, 80),
        (4, 4, 1, 16, 20),
        (2, 4, -1, 16, 80),
        (2, 3, 1, 16, 26),  # 80 / 3, rounded down
        (2, 8, 4, 20, 36),  # 76 / 8 = 9, four each
        (8, 20, 1, 0, 4),
        (2, 200, 1, 16, 0),
        (2, 1, 1, 96, 0),
    ],
)
def test_updates_are_counted_by_environment_steps(algorithm, num_envs, train_freq, gradient_steps, learning_starts, updates):
    settings = {"train_freq": train_freq, "gradient_steps": gradient_steps, "learning_starts": learning_starts}
    model = tiny(algorithm, env={"num_envs": num_envs}, **settings)
    trainer = fit(model)
    assert (trainer.global_step, model.env_steps, model.updates) == (6, 96, updates)


@pytest.mark.thorough
def test_environments_that_do_not_divide_an_iteration_shorten_it():
    model = tiny(SAC, env={"num_envs": 3}, train_freq=1, learning_starts=15)
    assert fit(model).global_step == 7  # of 15 environment steps
    assert (model.env_steps, model.updates) == (105, 90)


@pytest.mark.thorough
@every_algorithm
def test_every_step_is_made_with_the_newest_weights(algorithm, monkeypatch):
    settings = {"exploration_initial_eps": 0.0, "exploration_final_eps": 0.0} if algorithm is DQN else {}
    model, seen = tiny(algorithm, env={"num_envs": 1}, train_freq=1, learning_starts=8, warmup="policy", **settings), []
    act, end_update = Collector.act, model.end_update

    def watched(collector, random_steps):
        action = act(collector, random_steps)
        t, actor = collector.t, collector._actor
        with torch.no_grad():
            obs = torch.from_numpy(collector._obs_rows[t])
            x = model.network.value(obs).sum(-1) if algorithm is DQN else model.network(obs)
        expected = model.network.distribution.draw(x.numpy(), actor.noise[t])
        np.testing.assert_allclose(actor.taken[-1], expected, rtol=1e-4, atol=1e-5)
        seen.append("step")
        return action

    monkeypatch.setattr(Collector, "act", watched)
    model.end_update = lambda batch: (seen.append("update"), end_update(batch))
    before = weights(model)
    fit(model)
    assert seen == ["step"] * 8 + ["step", "update"] * 88 and not torch.equal(weights(model), before)


@every_algorithm
def test_a_continued_run_fills_its_memory_again_and_makes_nothing_up(algorithm, tmp_path):
    fit(tiny(algorithm), max_steps=2).save_checkpoint(tmp_path / "a.ckpt")
    model = tiny(algorithm)
    steps = at_updates(model, lambda model: model.collector.env_steps, ckpt_path=tmp_path / "a.ckpt")
    assert steps == list(range(52, 97, 4))  # 32 steps were made, 16 more fill the memory


@pytest.mark.parametrize("warmup", ["random", "policy"])
def test_who_acts_before_learning_starts(warmup, monkeypatch):
    assert acting(tiny(SAC, warmup=warmup, max_env_steps=32), monkeypatch) == [warmup] * 8 + ["policy"] * 8


# library bug (data/dataset.py): `random_until` does not count the steps of the statistics, so that the policy acts at once
def test_random_actions_come_after_the_steps_of_frozen_statistics_too(monkeypatch):
    model = tiny(SAC, normalize_obs="frozen", normalize_obs_steps=20, max_env_steps=52)
    assert acting(model, monkeypatch) == ["random"] * 8 + ["policy"] * 8


def acting(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who made each step of a run."""
    seen, act = [], Collector.act

    def watched(collector, random_steps):
        action = act(collector, random_steps)
        seen.append("random" if collector._taken is getattr(collector._random, "taken", [None])[-1] else "policy")
        return action

    monkeypatch.setattr(Collector, "act", watched)
    fit(model)
    return seen


@pytest.mark.thorough
@pytest.mark.parametrize("replay", [{}, {"prioritized": True}], ids=["uniform", "prioritized"])
@every_algorithm
def test_learning_waits_for_the_first_complete_window(algorithm, replay):
    model = tiny(algorithm, learning_starts=0, train_freq=1, n_steps=3, env={"kwargs": {"period": 50}}, replay=replay)
    fit(model)
    assert weights(model).isfinite().all() and model.updates == 92  # in two steps of two environments no window is complete


# ---------------------------------------------------------------- targets


@pytest.mark.parametrize(
    "algorithm, settings, moves",
    [
        (SAC, {"tau": 0.25}, range(1, 21)),
        (SAC, {"tau": 0.25, "target_update_interval": 3, "value_network": True}, range(3, 21, 3)),
        (DQN, {"tau": 1.0, "target_update_interval": 4}, range(4, 21, 4)),
        (TD3, {"tau": 0.25, "policy_delay": 3}, range(3, 21, 3)),
    ],
)
def test_targets_move_by_tau_exactly_and_in_time(algorithm, settings, moves):
    model, moved = tiny(algorithm, **settings), []
    before = [vector(target) for _, target in model.target_networks]

    def look(model):
        for i, (online, target) in enumerate(model.target_networks):
            now, expected = vector(target), before[i].lerp(vector(online), settings["tau"])
            if not torch.equal(now, before[i]):
                torch.testing.assert_close(now, expected, rtol=0, atol=1e-6)
                moved.append((model.updates, i))
            before[i] = now

    at_updates(model, look)
    assert moved == [(update, i) for update in moves for i in range(len(model.target_networks))]


# ---------------------------------------------------------------- what must change nothing


@pytest.mark.thorough
@every_algorithm
def test_evaluation_changes_nothing_that_is_learned(algorithm):
    def run(callbacks: list[pl.Callback]) -> list[torch.Tensor]:
        model = tiny(algorithm, normalize_obs="running", normalize_reward=True)
        fit(model, callbacks=callbacks)
        return everything(model)

    plain = run([])
    for deterministic in (True, False):
        judged = run([RolloutEvaluator(every_n_env_steps=16, episodes=2, num_envs=2, deterministic=deterministic)])
        assert all(map(torch.equal, judged, plain))


@every_algorithm
def test_a_checkpoint_brings_targets_and_temperature_back_for_the_next_run(algorithm, tmp_path):
    model = tiny(algorithm, normalize_obs="running")
    trainer = fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    continued = tiny(algorithm, normalize_obs="running", seed=1, max_env_steps=112)
    seen = []
    continued.on_train_start = lambda: (seen.append(everything(continued)), type(continued).on_train_start(continued))
    fit(continued, tmp_path / "a.ckpt")
    assert all(map(torch.equal, seen[0], everything(model)))
    optimizers = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"]
    assert [int(state["state"][0]["step"]) for state in optimizers] == {SAC: [20, 20, 20], DQN: [20], TD3: [20, 10]}[algorithm]


# ---------------------------------------------------------------- spaces


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm, observation, action",
    [
        *((algorithm, observation, None) for algorithm in OFF_POLICY for observation in ("image", "one-hot", "bits", "dict")),
        *((SAC, "vector", action) for action in ("discrete", "multi-discrete", "multi-binary", "box", "hybrid", "nested", "wrapped")),
        (SAC, "dict", "nested"),
        (DQN, "vector", "discrete"),
        (TD3, "vector", "box"),
    ],
)
def test_every_space_is_learned_in_and_its_policy_acts(algorithm, observation, action, tmp_path):
    action = action or ("discrete" if algorithm is DQN else "box")
    kwargs = {"observation": observation, "action": action}  # the environment refuses actions that are not legal
    model = tiny(algorithm, "tests.environments:Anything-v0", env={"kwargs": kwargs}, max_env_steps=48, encoder_features=8)
    before = weights(model)
    trainer = fit(model)
    losses = [float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")]
    assert model.updates == 8 and np.isfinite(losses).all() and not torch.equal(before, weights(model))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    policy = load_policy(tmp_path / "a.ckpt")
    for deterministic in (True, False):
        act, _ = policy.act(model.spaces.observation.sample(), deterministic=deterministic)
        legal = int(act) if action == "discrete" else act
        assert model.spaces.action.contains(legal)


# ---------------------------------------------------------------- soft actor-critic


# ---------------------------------------------------------------- what is asked of all of them


@pytest.mark.variants
@every_algorithm
def test_two_streams_of_reward_are_learned_side_by_side(algorithm):
    settings = {"gamma": 0.9, "learning_rate": 0.02, "batch_size": 32, "max_env_steps": 1_200, "buffer_size": 2_000, "net_arch": [16]}
    soft = {"ent_coef": 1e-4} if algorithm is SAC else {}
    kwargs = {"action": "discrete" if algorithm is DQN else "box"}
    model = tiny(algorithm, "tests.environments:DelayedReward-v0", env={"kwargs": kwargs}, **settings, **soft)
    model.reward_signals["second"] = Extrinsic(gamma=0.5, scale=3.0)
    arch = {"net_arch": [16], "streams": 2}
    if algorithm is DQN:
        model.network = QNetwork(model.spaces, **arch)
        model.target = make_target(model.network)
        model.target_networks = [(model.network, model.target)]
    else:
        model.critic = Critic(model.spaces.observation, 1, **arch)
        name = "target" if algorithm is SAC else "target_critic"
        setattr(model, name, make_target(model.critic))
        model.target_networks[-1] = (model.critic, getattr(model, name))
    model.target_update.tau = 1.0 if algorithm is DQN else 0.2
    fit(model)
    obs = torch.tensor([[0.0], [1.0]])
    with torch.no_grad():
        q = model.network.value(obs).amax(1) if algorithm is DQN else model.critic(obs, model.network.sample(obs, deterministic=True)[0])
    expected = torch.tensor([[0.9, 1.5], [1.0, 3.0]])  # γ · 1 and 0.5 · 3, a step before 1 and 3
    torch.testing.assert_close(q.reshape(-1, 2, 2).mean(0), expected, rtol=0, atol=0.1)


@every_algorithm
def test_the_metrics_that_a_docstring_names_are_logged(algorithm):
    names = re.findall(r"`((?:train|rollout|replay)/\w+)`", algorithm.__doc__.partition("Metrics:")[2])
    model = tiny(algorithm, **({"value_network": True} if algorithm is SAC else {}))
    assert len(names) >= 6 - 2 * (algorithm is DQN)
    assert set(names) - set(fit(model).callback_metrics) == set()


def test_acting_and_learning_draw_different_numbers():
    model, seeds = tiny(SAC, "tests.environments:ScriptedBox-v0", warmup="policy"), []
    training_step = model.training_step

    def watched(batches, batch_idx):
        training_step(batches, batch_idx)
        seeds.append((model.dataset.collector.generator.initial_seed(), model.noise.initial_seed(), model.generator.initial_seed()))

    model.training_step = watched
    fit(model, max_steps=1)
    acting, learning, shuffling = seeds[0]
    assert acting != learning == shuffling
