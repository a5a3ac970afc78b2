"""Updates equal those of sb3-contrib's TQC and CrossQ, from the same weights, batches and noise."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import sb3_contrib
import torch
from stable_baselines3.common.logger import configure
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from torch import Tensor, nn

from lightning_rl import SAC, TQC, CrossQ
from lightning_rl.data.dataset import ReplayDataset
from lightning_rl.networks.layers import BatchRenorm
from lightning_rl.networks.mlp import EnsembleLinear
from lightning_rl.types import Transition
from tests.fitting import fit

UPDATES, ROWS = 7, 64
SETTINGS: dict[str, Any] = {"batch_size": ROWS, "gradient_steps": UPDATES, "learning_rate": 3e-4}
OURS = {"env": "Pendulum-v1", "max_env_steps": 40, "steps_per_iteration": 40, "learning_starts": 20, "train_freq": 20}
ALGORITHMS: list[tuple[type[SAC], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (TQC, {"net_arch": [8, 8]}, {"top_quantiles_to_drop_per_net": 2}, {"net_arch": [8, 8], "n_quantiles": 25}),
    (
        TQC,
        {"net_arch": [8], "n_critics": 5, "n_quantiles": 7, "drop_quantiles": 3},
        {"top_quantiles_to_drop_per_net": 3},
        {"net_arch": [8], "n_critics": 5, "n_quantiles": 7},
    ),
    (CrossQ, {"net_arch": [8, 8], "critic_net_arch": [12]}, {}, {"net_arch": {"pi": [8, 8], "qf": [12]}}),
]


def batches() -> list[tuple[Tensor, ...]]:
    """Draw experience: observations, actions in [-1, 1], next observations, terminations, rewards."""
    generator = torch.Generator().manual_seed(1)

    def draw(size: int) -> Tensor:
        return torch.randn(ROWS, size, generator=generator)

    return [(draw(3), draw(1).tanh(), draw(3), (draw(1) > 1).float(), draw(1)) for _ in range(UPDATES)]


def parts(network: nn.Module) -> list[Any]:
    """Return the layers with weights, in order."""
    return [each for each in network.modules() if not list(each.children()) and list(each.parameters())]


def give(model: SAC, other: Any) -> None:
    """Copy the weights and statistics of a model into those of sb3-contrib."""
    *hidden, mean, log_std = [part for each in (other.actor.latent_pi, other.actor.mu, other.actor.log_std) for part in parts(each)]
    *ours, last = parts(model.network.layers)
    for own, theirs in zip(ours, hidden, strict=True):
        copy(own, theirs)
    for theirs, half in ((mean, slice(1)), (log_std, slice(1, 2))):
        theirs.load_state_dict({"weight": last.weight[half], "bias": last.bias[half]})
    for member, network in enumerate(getattr(other.critic, "q_networks", None) or other.critic.quantile_critics):
        for own, theirs in zip(parts(model.critic.layers), parts(network), strict=True):
            copy(own, theirs, member)


def copy(own: Any, theirs: nn.Module, member: int = 0) -> None:
    """Copy a layer, or that of a member of an ensemble."""
    if isinstance(own, BatchRenorm):
        names = {"scale": own.scale, "bias": own.shift, "ra_mean": own.mean, "ra_var": own.var}
        state = {name: value.flatten(1)[min(member, len(value) - 1)] if value.dim() > 2 else value[0] for name, value in names.items()}
        theirs.load_state_dict({**state, "steps": own.batches})
    elif isinstance(own, EnsembleLinear):
        theirs.load_state_dict({"weight": own.weight[member].T, "bias": own.bias[member, 0]})
    else:
        theirs.load_state_dict({"weight": own.weight, "bias": own.bias})


@pytest.mark.parametrize(("algorithm", "ours", "theirs", "policy"), ALGORITHMS, ids=["TQC", "TQC of five critics", "CrossQ"])
def test_updates_equal_those_of_sb3_contrib(algorithm, ours, theirs, policy, monkeypatch):
    torch.manual_seed(0)
    model = algorithm(**OURS, **SETTINGS, **ours)
    kind = getattr(sb3_contrib, algorithm.__name__)
    other = kind("MlpPolicy", gym.make("Pendulum-v1"), **SETTINGS, **theirs, policy_kwargs=policy, device="cpu")
    give(model, other)
    if hasattr(other, "critic_target"):
        other.critic_target.load_state_dict(other.critic.state_dict())
    due = [(update + 1) % model.policy_delay == 0 for update in range(UPDATES)]
    generator = torch.Generator().manual_seed(2)
    now, later = torch.randn(2, UPDATES, ROWS, 1, generator=generator)

    train_ours(model, monkeypatch, [each for k in range(UPDATES) for each in ([now[k]] if due[k] else []) + [later[k]]])
    first = (lambda k: [later[k], now[k]]) if algorithm is CrossQ else (lambda k: [now[k], later[k]])
    train_theirs(other, monkeypatch, [each for k in range(UPDATES) for each in (first(k) if due[k] else [later[k]])])

    found = deepcopy(other)
    give(model, found)
    for own, expected in ((found.actor, other.actor), (found.critic, other.critic)):
        torch.testing.assert_close(own.state_dict(), expected.state_dict(), atol=1e-5, rtol=1e-5)
    assert model.temperature().item() == pytest.approx(other.log_ent_coef.exp().item(), abs=1e-5) != 1


def train_ours(model: SAC, monkeypatch: pytest.MonkeyPatch, noise: list[Tensor]) -> None:
    """Make all updates, on the batches."""
    drawn, noises, weight = iter(batches()), iter(noise), torch.full((ROWS,), 1 / ROWS)

    def sample(dataset: ReplayDataset) -> Transition:
        obs, action, next_obs, done, reward = next(drawn)
        return Transition(obs, action, reward, 0.99 * (1 - done), next_obs, weight, np.arange(ROWS))

    monkeypatch.setattr(ReplayDataset, "sample", sample)
    monkeypatch.setattr(model.actions, "noise", lambda num, generator: next(noises))
    fit(model)
    assert model.updates == UPDATES and next(noises, None) is None


def train_theirs(other: Any, monkeypatch: pytest.MonkeyPatch, noise: list[Tensor]) -> None:
    """Make all updates of sb3-contrib, on the same batches."""
    drawn, noises = iter(batches()), iter(noise)
    monkeypatch.setattr(other.replay_buffer, "sample", lambda *_, **__: ReplayBufferSamples(*next(drawn)))
    monkeypatch.setattr(torch.distributions.Normal, "rsample", lambda self: self.loc + self.scale * next(noises))
    other.set_logger(configure(format_strings=[]))
    other.train(UPDATES, ROWS)
    assert next(noises, None) is None
