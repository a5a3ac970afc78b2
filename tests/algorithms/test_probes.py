"""Every algorithm on every probe: environments so small that the right numbers are known (after Andy Jones and rejax).

A probe names the bug: a wrong constant is the value loss, a wrong discount the returns, a wrong action the policy loss, and so on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from lightning_rl import A2C, PPO
from tests.environments import ConstantReward, DelayedReward, Endless, ObservedAction, ObservedReward
from tests.fitting import ON_POLICY, fit, tiny

GAMMA = 0.9
ACTIONS = ("discrete", "box")
LEARNING = {
    PPO: {"batch_size": 32, "n_epochs": 4, "learning_rate": 0.01},
    A2C: {"learning_rate": 0.01, "use_rms_prop": False},
}


class Probe(NamedTuple):
    """An environment, and what must be learned of it in `env_steps`: the values at `obs`, or the best actions there."""

    env: type
    obs: list[float]
    values: list[float] | None = None
    actions: dict[str, list[float]] | None = None
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    settings: dict[str, Any] = {}  # noqa: RUF012
    env_steps: int = 4_000


PROBES = {
    "the value of a constant reward": Probe(ConstantReward, [0], [1]),
    "the discount of a reward one step later": Probe(DelayedReward, [0, 1], [GAMMA, 1]),
    "a value for each observation": Probe(ObservedReward, [-1, 1], [-1, 1]),
    "an action for each observation": Probe(ObservedAction, [-1, 1], actions={"discrete": [0, 1], "box": [-0.5, 0.5]}, env_steps=10_000),
    # 1 + γ + γ² + … = 1 / (1 - γ)
    "the value beyond a time limit": Probe(Endless, [0], [10], env_steps=10_000),
    # after 8 steps nothing follows; all times look alike, so the value is the mean of (1 - γᵏ) / (1 - γ) over k = 1 … 8
    "no value beyond a termination": Probe(Endless, [0], [3.5928], kwargs={"ending": "termination"}, settings={"gae_lambda": 1.0}),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_what_a_probe_teaches(algorithm, name, action):
    probe = PROBES[name]
    settings = {"gamma": GAMMA, "n_steps": 8, "max_env_steps": probe.env_steps, "net_arch": [16]}
    env = {"num_envs": 4, "kwargs": {"action": action, **probe.kwargs}}
    model = tiny(algorithm, f"tests.environments:{probe.env.__name__}-v0", env=env, **(settings | LEARNING[algorithm] | probe.settings))
    fit(model)
    obs = torch.tensor(probe.obs).float().unsqueeze(-1)
    if probe.values is not None:
        assert model.network.value(obs).flatten().tolist() == pytest.approx(probe.values, abs=0.02 * max(probe.values))
    if probe.actions is not None:
        actions = model.network.distribution.to_env(model.network.act(obs, deterministic=True).action.numpy())
        assert np.ravel(actions) == pytest.approx(probe.actions[action], abs=0.1)
