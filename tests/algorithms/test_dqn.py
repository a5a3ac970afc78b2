"""DQN: its streams of return, and its exploration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from lightning_rl import DQN
from lightning_rl.types import Transition
from lightning_rl.value_transforms import SymLog
from tests.fitting import fit, tiny


@pytest.mark.parametrize("double", [False, True])
def test_dqn_adds_the_returns_of_its_streams_after_inverting_the_value_transform(double):
    # true returns (100, 0) and (40, 40): the first action is better by 20, though symlog values would add up to less
    streams = {"extrinsic": {"gamma": 0.5}, "rnd": {"gamma": 0.5}}
    model = tiny(DQN, net_arch=[], value_transform="symlog", double=double, reward_signals=streams)
    values = SymLog()(torch.tensor([[100.0, 0.0], [40.0, 40.0], [0.0, 0.0]]))
    for network in (model.network, model.target):
        layer = network.head[-1]
        nn.init.zeros_(layer.weight)
        with torch.no_grad():
            layer.bias.copy_(values.flatten())
    obs = torch.zeros(1, *model.spaces.observation.shape)
    model.network.distribution.epsilon = 0.0
    assert model.network.eval().sample(obs)[0].item() == 0
    batch = Transition(obs, torch.tensor([0]), torch.zeros(1, 2), torch.full((1, 2), 0.5), obs, torch.ones(1), np.arange(1))
    # h(0.5 · 100) is 0.683 below h(100), the second stream is 0 either way: the mean of ½ · 0.683² and 0
    assert model.loss(batch)[0].item() == pytest.approx(0.25 * math.log(101 / 51) ** 2, rel=1e-4)


def test_exploration_falls_with_environment_steps():
    rates = {}
    for num_envs in (1, 8):
        model = tiny(DQN, env={"num_envs": num_envs}, exploration_fraction=0.5, exploration_initial_eps=0.9, exploration_final_eps=0.1)
        seen, training_step = [], model.training_step

        def watched(batches, batch_idx, model=model, seen=seen, training_step=training_step):
            seen.append(model.network.distribution.epsilon)
            training_step(batches, batch_idx)

        model.training_step = watched
        fit(model)
        rates[num_envs] = seen
    assert rates[1] == rates[8] == pytest.approx([0.9, 0.9 - 0.8 / 3, 0.9 - 1.6 / 3, 0.1, 0.1, 0.1])
