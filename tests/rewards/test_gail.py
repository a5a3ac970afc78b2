"""Imitation by a discriminator: its reward, its loss, and what it learns from demonstrations."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl import PPO, Demonstration, SettingError
from lightning_rl.distributions import make_distribution
from lightning_rl.rewards.gail import GAIL, discriminator_loss, gradient_penalty, kl_divergence
from lightning_rl.spaces import Spaces
from tests.fitting import TINY, fit, tiny
from tests.rewards.test_intrinsic import MIXED, actions_of, learn, mixed, shown, vectors

SPACES = Spaces(Box(-1, 1, (2,), np.float32), Discrete(3))


def test_the_reward_of_imitation_is_minus_log_one_minus_d():
    signal = GAIL(SPACES, actions_of(SPACES), "none")
    torch.nn.init.zeros_(signal.head.weight)  # D = σ(0)
    assert signal(vectors(0.0)).tolist() == pytest.approx([0.693147] * 64, abs=1e-5)


def test_the_loss_of_a_discriminator():
    assert discriminator_loss(torch.tensor([0.8]), torch.tensor([0.3])).item() == pytest.approx(0.579818, abs=1e-5)


def test_the_information_of_two_codes():
    ones = torch.ones(3, 4)
    assert kl_divergence(ones, ones, torch.ones(4)).tolist() == pytest.approx([4.0] * 3)  # 1 for each dimension
    assert kl_divergence(0 * ones, 0 * ones, torch.ones(4)).tolist() == [0.0] * 3


def test_the_price_of_information_rises_above_its_bound():
    signal = GAIL(SPACES, actions_of(SPACES), "none", use_vail=True)
    priced, _ = signal.bottleneck.price(torch.tensor(2.5))
    assert priced.item() == 0 and signal.bottleneck.beta.item() == pytest.approx(5e-4 * 2)
    priced, beta = signal.bottleneck.price(torch.tensor(0.0))
    assert priced.item() == pytest.approx(1e-3 * -0.5) and beta.item() == pytest.approx(1e-3)
    signal.bottleneck.price(torch.tensor(-1e6))
    assert signal.bottleneck.beta.item() == 0


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{}, {"use_actions": True}, {"use_vail": True}, {"normalize": True}])
def test_a_discriminator_learns_to_recognize_demonstrations(settings):
    torch.manual_seed(0)
    expert, own = vectors(0.5), vectors(-0.5)
    signal = shown(GAIL(SPACES, actions_of(SPACES), "none", **settings), expert)
    metrics = learn(signal, own, 150)
    sure = 0.05 if "use_vail" in settings else 0.2  # the bottleneck lets little through
    assert metrics["expert_estimate"] > 0.5 + sure > 0.5 - sure > metrics["policy_estimate"]
    assert signal(expert).mean() > (1.3 if "use_vail" in settings else 3) * signal(own).mean()


def test_a_discriminator_without_actions_ignores_them():
    expert = vectors(0.0)
    for use_actions in (False, True):
        signal = shown(GAIL(SPACES, actions_of(SPACES), "none", use_actions=use_actions), expert)
        other = expert._replace(action=torch.zeros_like(expert.action))
        assert torch.equal(signal(expert), signal(other)) is not use_actions


def test_the_gradient_penalty_has_one_draw_a_row_over_all_inputs():
    torch.manual_seed(0)
    signal = GAIL(MIXED, actions_of(MIXED), "none", use_actions=True, encoding_size=4)
    own, expert = signal.inputs(mixed(3)), signal.inputs(mixed(3))
    u = torch.tensor([0.2, 0.5, 0.9])
    penalty = gradient_penalty(lambda inputs: signal.discriminate(inputs)[0], own, expert, u)
    for k in range(3):
        row = [(u[k] * x[k : k + 1] + (1 - u[k]) * e[k : k + 1]).detach().requires_grad_() for x, e in zip(own, expert, strict=True)]
        gradients = torch.autograd.grad(signal.discriminate(row)[0].sum(), row)
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert penalty[k].item() == pytest.approx((norm.item() - 1) ** 2, abs=1e-4)
    assert len(own) == 4 and own[0].max() <= 1  # three observations, bytes scaled, and the action


def test_actions_are_compared_on_the_environments_scale():
    spaces = Spaces(SPACES.observation, Box(-2, 4, (1,), np.float32))
    distribution = make_distribution(spaces.action)
    # PPO keeps what it drew; the environment gets it cut to [-2, 4]
    assert distribution.features(torch.tensor([[-7.0], [1.0], [4.0], [9.0]])).flatten().tolist() == [-1, 0, 1, 1]
    half = make_distribution(Box(np.float32([-2, 0, -np.inf]), np.float32([4, np.inf, np.inf])))
    assert half.features(torch.tensor([[9.0, -5.0, 7.0], [1.0, 5.0, -7.0]])).tolist() == [[1, 0, 7], [0, 5, -7]]
    squashed = make_distribution(spaces.action, "tanh_normal")
    assert squashed.features(torch.tensor([[0.0], [100.0]])).flatten().tolist() == [0, 1]
    hybrid = make_distribution(MIXED.action)
    features = hybrid.features({"choice": torch.tensor([1]), "turn": torch.tensor([[1.0, -5.0]])})
    assert features.tolist() == [[0, 1, 0.5, -1]]


def test_a_demo_path_must_be_a_name():
    with pytest.raises(SettingError, match=r"^reward_signals\.gail\.demo_path must be the name of a dataset, got 3$"):
        fit(tiny(PPO, reward_signals={"gail": {"demo_path": 3}}))


class Drawn(gym.Env):
    """Ten random observations of a space."""

    def __init__(self, space):
        self.observation_space, self.action_space = space, Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == 10, {}


@pytest.mark.thorough
@pytest.mark.parametrize("use_actions", [False, True])
@pytest.mark.parametrize("space", [Box(-1, 1, (3,), np.float64), Box(-1, 1, (), np.float32)])
def test_demonstrations_may_have_numbers_of_64_bits_and_observations_without_a_dimension(space, use_actions):
    obs = np.stack([space.sample() for _ in range(11)])
    ended = np.arange(10) == 9
    shown = Demonstration(obs, np.zeros((10, 2), np.float32), np.ones(10), np.zeros(10, bool), ended)
    gail = {"demo_path": [shown], "use_actions": use_actions}
    model = PPO(lambda: Drawn(space), net_arch=[8], max_env_steps=96, reward_signals={"gail": gail}, **TINY[PPO])
    before = model.reward_signals["gail"].head.weight.detach().clone()
    fit(model)
    assert not torch.equal(model.reward_signals["gail"].head.weight, before)
