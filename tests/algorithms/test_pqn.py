"""PQN: its returns and values, with numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl import LSTM, PQN, SettingError
from lightning_rl.data.rollout import Batch, make_batch
from lightning_rl.networks.q_network import MaxQNetwork
from lightning_rl.spaces import Spaces
from lightning_rl.types import Rollout
from tests.fitting import fit, tiny

SPACES = Spaces(Box(-1, 1, (1,)), Discrete(2))


def test_the_value_of_an_observation_is_that_of_the_action_whose_streams_sum_to_most():
    network = MaxQNetwork(SPACES, streams=2, net_arch=())
    with torch.no_grad():
        network.head[0].weight.zero_()
        network.head[0].bias.copy_(torch.tensor([5.0, -4.0, 1.0, 1.0]))  # of action 0: 5 and −4; of action 1: 1 and 1
    assert network.value(torch.zeros(3, 1)).tolist() == [[1.0, 1.0]] * 3


def test_returns_mix_what_lies_ahead_with_the_greatest_value():
    flags = torch.zeros(2, 1, dtype=torch.bool)
    value, next_value = torch.tensor([[[9.0]], [[4.0]]]), torch.tensor([[[4.0]], [[2.0]]])
    reward, obs = torch.tensor([[[1.0]], [[3.0]]]), torch.zeros(2, 1, 1)
    rollout = Rollout(obs, torch.zeros(2, 1).long(), (), reward, value, next_value, flags, flags, ~flags, flags)
    batch = make_batch(rollout, torch.full((2, 1, 1), 0.5), gae_lambda=0.25)
    # R₁ = 3 + ½ · 2;  R₀ = 1 + ½ (¾ · 4 + ¼ · 4)
    assert batch.returns.flatten().tolist() == pytest.approx([3.0, 4.0])


def test_the_loss_is_the_squared_distance_to_the_returns():
    model = tiny(PQN, net_arch=[])
    with torch.no_grad():
        model.network.head[0].weight.zero_()
        model.network.head[0].bias.copy_(torch.tensor([1.0, 2.0, 4.0]))
    rows, seen = torch.zeros(2, *model.spaces.observation.shape), torch.zeros(1, 2, dtype=torch.bool)
    returns, weight = torch.tensor([[3.0], [3.0]]), torch.tensor([0.5, 0.5])
    batch = Batch(rows, torch.tensor([0, 2]), (), returns, returns[:, 0], returns, weight, seen)
    loss, metrics = model.loss(batch)
    assert loss.item() == pytest.approx((4 + 1) / 2) and metrics["q_value"].item() == pytest.approx(2.5)


def test_hidden_layers_are_normalized_unless_one_asks_otherwise():
    assert any(isinstance(each, torch.nn.LayerNorm) for each in tiny(PQN).network.modules())
    assert not any(isinstance(each, torch.nn.LayerNorm) for each in tiny(PQN, layer_norm=False).network.modules())


def test_exploration_falls_and_is_that_of_the_step_after_loading():
    model = tiny(PQN, exploration_fraction=1.0, exploration_final_eps=0.0)
    assert model.network.distribution.epsilon == 1.0
    fit(model)
    assert model.network.distribution.epsilon < 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"spaces": SPACES._replace(masked=True)}, "PQN does not support action masks"),
        ({"memory": LSTM(4, 8, burn_in=2)}, "memory.burn_in 2 is for replayed sequences"),
        ({"env": {"id": "Pendulum-v1"}}, "DQN"),
    ],
)
def test_settings_that_pqn_cannot_learn_with_are_reported_in_one_line(settings, message):
    with pytest.raises(SettingError) as raised:
        PQN(**{"env": {"id": "CartPole-v1", "num_envs": 2}} | settings)
    assert message in str(raised.value) and "\n" not in str(raised.value)
