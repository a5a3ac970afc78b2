"""State-dependent exploration (gSDE): numbers by hand, and noise that is a function of the state for some steps of an environment."""

from __future__ import annotations

import math
from copy import deepcopy

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl import A2C, CQL, IMPALA, LSTM, POCA, PPO, SAC, TQC, TRPO, CrossQ, SettingError, export_policy, load_policy
from lightning_rl.data.collector import Collector
from lightning_rl.distributions import SDE, Exploration, make_distribution, state_dependent
from lightning_rl.distributions.state_dependent import expln
from lightning_rl.types import tree_leaves
from tests.exporting.exported import play_both, save
from tests.fitting import fit, tiny

BOX = Box(-2.0, 2.0, (2,), np.float32)
SIGMA = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
X = torch.tensor([[0.5, -1.0, 1.0, 2.0]])
"""Two means, and two features."""
BOX_ENV = "tests.environments:ScriptedBox-v0"


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def two_by_two(action_dist="clipped_normal", sigma=SIGMA, **settings):
    distribution = make_distribution(BOX, action_dist, 0.0, SDE(**settings), num_features=2)
    distribution.log_std.data = sigma.log()
    return distribution


def test_density_and_entropy_by_hand():
    # variances 1² · 0.1² + 2² · 0.3² = 0.37 and 1² · 0.2² + 2² · 0.4² = 0.68
    log_prob, entropy = two_by_two().evaluate(X, torch.tensor([[1.1, -0.2]]))
    assert log_prob[0].tolist() == pytest.approx([-0.9083, -1.1967], abs=1e-4)
    assert entropy[0].tolist() == pytest.approx([0.9218, 1.2261], abs=1e-4)


def test_a_draw_by_hand():
    # θ = σ · [[1, -1], [0.5, 2]] = [[0.1, -0.2], [0.15, 0.8]], and θᵀ [1, 2] = [0.4, 1.4]
    distribution = two_by_two()
    distribution.exploration = torch.tensor([[[1.0, -1.0], [0.5, 2.0]]])
    assert distribution.sample(X)[0].tolist() == pytest.approx([0.9, 0.4])
    squashed = two_by_two("squashed_normal")
    squashed.exploration = distribution.exploration
    assert squashed.sample(X)[0].tolist() == pytest.approx([math.tanh(0.9), math.tanh(0.4)])
    assert distribution.mode(X)[0].tolist() == [0.5, -1.0]
    assert squashed.mode(X)[0].tolist() == pytest.approx([math.tanh(0.5), math.tanh(-1.0)])


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal", "squashed_normal"])
def test_draws_of_all_matrices_have_the_density_that_losses_know(action_dist):
    distribution = two_by_two(action_dist)
    rows = 100_000
    distribution.exploration = torch.randn(rows, 2, 2, generator=seeded())
    smooth = distribution.sample(X.expand(rows, -1))
    distribution.exploration = None
    alone = distribution.sample(X.expand(rows, -1), (), seeded(1))
    for action in (smooth, alone):
        u = action.atanh() if action_dist == "squashed_normal" else action
        assert u.mean(0).tolist() == pytest.approx([0.5, -1.0], abs=0.02)
        assert u.var(0).tolist() == pytest.approx([0.37, 0.68], rel=0.02)
    log_prob, entropy = distribution.evaluate(X.expand(rows, -1), smooth)
    torch.testing.assert_close(-log_prob.mean(0), entropy.mean(0), atol=0.02, rtol=0)


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal", "squashed_normal"])
def test_densities_and_the_noise_of_a_draw_are_not_rounded_where_networks_compute_in_bfloat16(action_dist):
    distribution = make_distribution(BOX, action_dist, 0.0, SDE(), num_features=64)
    x = torch.randn(9, 66, generator=seeded())
    action = distribution.sample(x, (), seeded()).detach()
    distribution.exploration = torch.randn(9, 64, 2, generator=seeded())
    exact = *distribution.moments(x), distribution.sample(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = *distribution.moments(x), distribution.sample(x)
        log_prob = distribution.evaluate(x, action)[0]
    torch.testing.assert_close(rounded, exact, rtol=1e-6, atol=1e-6)
    assert log_prob.dtype == torch.float32


def test_the_mean_of_soft_actor_critic_stays_within_reach_of_the_noise():
    assert two_by_two("squashed_normal").mode(torch.tensor([[9.0, -9.0, 1.0, 1.0]]))[0].tolist() == pytest.approx(
        [math.tanh(2), -math.tanh(2)]
    )


def test_a_positive_function_grows_slowly_above_one():
    assert expln(torch.tensor([-1.0, 0.0, 1.0])).tolist() == pytest.approx([math.exp(-1), 1.0, 1 + math.log(2)])
    x = torch.tensor([-90.0, 90.0], requires_grad=True)
    expln(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([0.0, 1 / 91])


def test_one_deviation_for_all_actions_is_a_column():
    distribution = two_by_two(sigma=torch.tensor([[0.1], [0.3]]), full_std=False)
    _, log_std = distribution.moments(X)
    assert log_std.exp()[0].tolist() == pytest.approx([0.37**0.5] * 2, abs=1e-5)
    distribution.exploration = torch.ones(1, 2, 2)
    assert distribution.sample(X)[0].tolist() == pytest.approx([1.2, -0.3])


@pytest.mark.parametrize(("learns", "gradient"), [(False, False), (True, True)])
def test_gradients_of_the_deviation_reach_the_features_only_where_they_are_learned(learns, gradient):
    x = X.clone().requires_grad_()
    log_prob, _ = two_by_two(learn_features=learns).evaluate(x, torch.tensor([[1.1, -0.2]]))
    log_prob.sum().backward()
    assert x.grad[0, :2].abs().min() > 0 and bool(x.grad[0, 2:].abs().max() > 0) == gradient


def test_each_environment_keeps_its_own_function_for_some_steps():
    distribution = two_by_two(sample_freq=3)
    exploration = Exploration([distribution], 4, seeded())
    noise = []
    for _ in range(7):
        with exploration.step():
            noise.append(distribution.sample(X.expand(4, -1)))
    for first, last in ((0, 2), (3, 5)):
        assert torch.equal(noise[first], noise[last])
    assert not torch.equal(noise[2], noise[3]) and not torch.equal(noise[5], noise[6])
    assert len(noise[0][:, 0].unique()) == 4
    assert distribution.exploration is None
    other = two_by_two(sample_freq=3)
    again = Exploration([other], 4, seeded())
    assert again.set_state(exploration.get_state())
    with exploration.step(), again.step():
        assert torch.equal(distribution.sample(X.expand(4, -1)), other.sample(X.expand(4, -1)))
    for wrong in (None, {"steps": 1, "draws": []}, {"steps": 1, "draws": [np.zeros((3, 2, 2), np.float32)]}):
        assert not again.set_state(wrong)


def test_of_a_tree_of_actions_the_boxes_explore_and_the_features_are_their_own():
    space = Dict(jump=Discrete(3), left=BOX, right=Box(-1.0, 1.0, (1,), np.float32))
    distribution = make_distribution(space, "clipped_normal", -1.0, SDE(), num_features=4)
    assert [leaf.log_std.shape for leaf in state_dependent(distribution)] == [(4, 2), (4, 1)]
    assert distribution.num_inputs == 3 + (2 + 4) + (1 + 4)


@pytest.mark.variants
@pytest.mark.parametrize("action", ["box", "hybrid", "nested"])
@pytest.mark.parametrize("memory", [None, LSTM(8, 4)])
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP"])
def test_the_ratio_is_one_before_the_first_step(autoreset, memory, action):
    ratios = []

    class Watching(PPO):
        def loss(self, minibatch, *scheduled):
            found = self.network.evaluate(minibatch.obs, minibatch.action, minibatch.memory, minibatch.episode_start, minibatch.action_mask)
            ratios.append((found[0] - minibatch.log_prob).sum(-1)[minibatch.weight > 0].exp().detach())
            return super().loss(minibatch, *scheduled)

    settings = {"use_sde": True, "sde_sample_freq": 3, "memory": memory, "n_epochs": 1, "batch_size": 16, "learning_rate": 0.01}
    env = {"autoreset": autoreset, "kwargs": {"action": action}}
    fit(tiny(Watching, "tests.environments:Anything-v0" if action != "nested" else "tests.environments:Choosy-v0", env=env, **settings))
    assert len(ratios) >= 6 and all((ratio - 1).abs().max() <= 1e-5 for ratio in ratios)  # float32 sums


@pytest.mark.variants
@pytest.mark.parametrize(
    ("algorithm", "settings", "steps"),
    [
        (PPO, {}, 8),
        (PPO, {"sde_sample_freq": 3}, 3),
        (A2C, {}, 8),
        (TRPO, {}, 8),
        (POCA, {}, 8),
        (SAC, {"train_freq": 6}, 3),
        (TQC, {"train_freq": 1}, 1),
        (CrossQ, {"sde_sample_freq": 5}, 5),
    ],
)
def test_functions_are_drawn_by_default_for_a_rollout_or_the_steps_between_updates(algorithm, settings, steps, monkeypatch):
    seen = []
    step = Exploration.step

    def watched(self):
        found = step(self)
        seen.append(self)
        return found

    monkeypatch.setattr(Exploration, "step", watched)
    model = tiny(algorithm, BOX_ENV, use_sde=True, **settings)
    fit(model)
    (leaf,) = state_dependent(model.network.distribution)
    assert leaf.sde.sample_freq == steps and len(seen) > 10
    assert leaf.sde.learn_features == (algorithm in (SAC, TQC, CrossQ))


@pytest.mark.parametrize("settings", [{"threaded": True}, {"threaded": True, "memory": LSTM(8, 4)}])
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_actors_explore_with_matrices_of_their_own(algorithm, settings):
    model = tiny(algorithm, BOX_ENV, use_sde=True, **settings)
    fit(model)
    assert model.updates > 0


def test_several_actors_explore(monkeypatch):
    seen = []
    begin = Exploration.__init__
    monkeypatch.setattr(Exploration, "__init__", lambda self, *arguments: (seen.append(self), begin(self, *arguments))[1])
    fit(tiny(IMPALA, BOX_ENV, use_sde=True, actors={"num_actors": 2, "backend": "in_process"}))
    first, second = (each.draws[0] for each in seen)
    assert first.shape == second.shape == (2, 8, 2) and not torch.equal(first, second)


@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_exploration_is_smooth_while_a_state_stays_and_its_mean_acts_when_asked(algorithm, tmp_path):
    model = tiny(algorithm, "Pendulum-v1", use_sde=True)
    fit(model)
    path = save(model, tmp_path / "a.ckpt")
    policy = load_policy(path)
    obs = np.array([1.0, 0.0, 0.5], np.float32)
    assert policy.act(obs)[0] == policy.act(obs)[0]
    drawn = np.concatenate([policy.act(obs, deterministic=False)[0] for _ in range(20)])
    assert len(np.unique(drawn)) == 20  # each call is a function of its own


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["onnx", "torch"])
@pytest.mark.parametrize(("algorithm", "action"), [(PPO, "box"), (SAC, "hybrid")])
def test_an_exported_file_does_the_same_as_the_policy(algorithm, action, format, tmp_path):
    model = tiny(algorithm, "tests.environments:Anything-v0", env={"kwargs": {"action": action}}, use_sde=True, max_env_steps=32)
    path = export_policy(save(model, tmp_path / "a.ckpt"), format=format)
    difference, others = play_both(tmp_path / "a.ckpt", path, rows=20, steps=10)
    assert difference <= 1e-4 and others == 0


@pytest.mark.parametrize("algorithm", [PPO, SAC])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env_id": "CartPole-v1", "use_sde": True}, "use_sde adds noise to Box actions"),
        ({"use_sde": True, "sde_sample_freq": 0}, "sde_sample_freq 0 would never sample"),
        ({"sde_sample_freq": 4}, "sde_sample_freq is a setting of use_sde, which is false"),
        ({"full_std": False}, "full_std is a setting of use_sde"),
    ],
)
def test_settings_that_do_not_fit_are_refused(algorithm, settings, message):
    with pytest.raises(SettingError, match=message):
        tiny(algorithm, **{"env_id": BOX_ENV, **settings})


@pytest.mark.parametrize("algorithm", [SAC, TQC, CrossQ, CQL])
def test_a_first_deviation_that_nothing_would_have_is_refused(algorithm):
    with pytest.raises(SettingError, match=r"^log_std_init is a setting of use_sde, which is false; remove it$"):
        tiny(algorithm, BOX_ENV, log_std_init=-1.0)


def test_unbounded_boxes_are_explored_at_random_too():
    distribution = make_distribution(Box(-np.inf, np.inf, (2,), np.float32), "clipped_normal", 0.0, SDE(), num_features=3)
    action = distribution.random(torch.zeros(1000, distribution.num_inputs), (), seeded())
    assert action.shape == (1000, 2) and float(action.std()) == pytest.approx(1.0, abs=0.1)
    bounded = two_by_two().random(torch.zeros(1000, 4), (), seeded())
    assert bounded.shape == (1000, 2) and float(bounded.abs().max()) <= 2


def test_the_collector_draws_matrices_in_the_middle_of_a_period_again_from_its_state():
    def collector():
        model = tiny(PPO, BOX_ENV, use_sde=True, sde_sample_freq=5, n_steps=8)
        return model.collect(8).collector

    first, second = collector(), collector()
    assert isinstance(first, Collector)
    first.collect()
    state = deepcopy(first.get_state())
    assert state["episodes"]["exploration"]["steps"] == 8
    assert second.set_state({**state, "generator": state["generator"].numpy()}) is None
    for one, two in zip(tree_leaves(first.collect()), tree_leaves(second.collect()), strict=True):
        assert torch.equal(one, two)
