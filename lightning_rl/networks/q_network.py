"""Action values of the DQN family: the mean, a histogram or quantiles of an action's return."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from lightning_rl.distributions import EpsilonGreedy, make_epsilon_greedy
from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.losses import q_learning as losses
from lightning_rl.networks.acting import Perceptron, PolicyNetwork
from lightning_rl.networks.encoders import make_encoder
from lightning_rl.networks.layers import hidden_layers
from lightning_rl.networks.memory import Memory, NoMemory, make_memory
from lightning_rl.networks.mlp import NoisyLinear, goal_mlp
from lightning_rl.networks.normalization import make_normalizer
from lightning_rl.spaces import Spaces, check_observation_space
from lightning_rl.types import Tree
from lightning_rl.value_transforms import Identity, ValueTransform

IDENTITY = Identity()


class ReturnHead(nn.Module):
    """A model of an action's return, transformed by h, with Z outputs."""

    atoms: int

    def __init__(self, transform: ValueTransform = IDENTITY) -> None:
        super().__init__()
        self.transform = transform

    def mean(self, z: Tensor) -> Tensor:
        """Estimate the expected return, `[..., Z]` to `[...]`."""
        raise NotImplementedError

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return values and probabilities of the atoms, each `[..., Z]`."""
        raise NotImplementedError

    def loss(self, z: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of z against a target's atoms, and the error for priorities, each `[...]`."""
        raise NotImplementedError


class ScalarReturn(ReturnHead):
    """The mean, Z = 1 (Mnih et al. 2015)."""

    atoms = 1

    def mean(self, z: Tensor) -> Tensor:
        return self.transform.inverse(z).squeeze(-1)

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z, torch.ones_like(z)

    def loss(self, z: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        return losses.huber(z, target).squeeze(-1), (z.detach() - target).squeeze(-1).abs()


class CategoricalReturn(ReturnHead):
    """C51: a histogram over `atoms` values from v_min to v_max (Bellemare et al. 2017). The error is the loss, as in Rainbow."""

    support: Tensor

    def __init__(self, atoms: int = 51, v_min: float = -10.0, v_max: float = 10.0, transform: ValueTransform = IDENTITY) -> None:
        super().__init__(transform)
        check_range("n_atoms", atoms, 2, whole=True)
        if not v_min < v_max:
            raise SettingError(f"v_min {v_min} must be below v_max {v_max}")
        self.atoms = atoms
        self.register_buffer("support", torch.linspace(v_min, v_max, atoms), persistent=False)

    def mean(self, z: Tensor) -> Tensor:
        return (z.softmax(-1) * self.transform.inverse(self.support)).sum(-1)

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.support.expand_as(z), z.softmax(-1)

    def loss(self, z: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses.cross_entropy(z, losses.project(target, probs, self.support))
        return loss, loss.detach()


class QuantileReturn(ReturnHead):
    """QR-DQN: `atoms` quantiles (Dabney et al. 2018). The error is the loss."""

    fraction: Tensor

    def __init__(self, atoms: int = 50, transform: ValueTransform = IDENTITY) -> None:
        super().__init__(transform)
        check_range("n_quantiles", atoms, 1, whole=True)
        self.atoms = atoms
        self.register_buffer("fraction", (torch.arange(atoms) + 0.5) / atoms, persistent=False)

    def mean(self, z: Tensor) -> Tensor:
        return self.transform.inverse(z).mean(-1)

    def distribution(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return z, torch.full_like(z, 1 / self.atoms)

    def loss(self, z: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses.quantile_huber(z.movedim(-1, 0), self.fraction, target.movedim(-1, 0))
        return loss, loss.detach()


def make_return_head(
    distribution: str, n_atoms: int, v_min: float, v_max: float, n_quantiles: int, transform: ValueTransform = IDENTITY
) -> ReturnHead:
    """Build the head for a setting of DQN: `none`, `c51` or `quantiles`."""
    check_choice("distribution", distribution, ("none", "c51", "quantiles"))
    if distribution == "none":
        return ScalarReturn(transform)
    return CategoricalReturn(n_atoms, v_min, v_max, transform) if distribution == "c51" else QuantileReturn(n_quantiles, transform)


class QNetwork(PolicyNetwork):
    """Q(s, ·) of finitely many actions, each a number or a distribution over returns. Weights have torch's default initialization.

    Args:
        spaces: observation and action space of one environment.
        returns: the model of an action's return; default: its mean.
        dueling: Q = V + A − mean A, with separate hidden layers for V and A (Wang et al. 2016, eq. 9).
        noisy: noisy linear layers after the encoder (Fortunato et al. 2018).
        streams: S, the number of reward streams.
        layers: kind of the hidden layers, see `hidden_layers`; noisy layers must be plain.
        net_arch, activation, encoder, encoder_features, entities, goals, normalize_obs, memory: as in `ActorCritic`.

    Raises:
        SettingError: the action space is not Discrete.
    """

    distribution: EpsilonGreedy

    def __init__(
        self,
        spaces: Spaces,
        returns: ReturnHead | None = None,
        *,
        dueling: bool = False,
        noisy: bool = False,
        streams: int = 1,
        layers: str = "plain",
        net_arch: Sequence[int] = (64, 64),
        activation: str = "relu",
        encoder: str | type[nn.Module] = "auto",
        encoder_features: int = 512,
        entities: Sequence[str] = (),
        goals: Sequence[str] = (),
        normalize_obs: str = "off",
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        check_observation_space(spaces.observation, entities, goals)
        self.distribution = make_epsilon_greedy(spaces.action)
        self.normalizer = make_normalizer(normalize_obs, spaces.observation, entities)
        self.encoder = make_encoder(spaces.observation, encoder, encoder_features, entities, goals)
        self.memory = make_memory(memory, self.encoder.num_features, self.encoder.num_goal_features)
        self.returns = ScalarReturn() if returns is None else returns
        self.outputs = (self.distribution.num_inputs, streams, self.returns.atoms)
        layer = NoisyLinear if noisy else nn.Linear
        features = self.memory.num_features

        def head(actions: int) -> nn.Sequential:
            if layers == "plain":
                hidden = goal_mlp(features, net_arch, activation, layer, self.memory.goal)
            else:
                hidden = hidden_layers(layers, features, net_arch, activation, goal=self.memory.goal)
            return hidden.append(layer(net_arch[-1] if net_arch else features, actions * streams * self.returns.atoms))

        actions = self.distribution.num_inputs
        self.head = DuelingHead(head(1), head(actions), actions) if dueling else head(actions)
        self.noisy_layers = [module for module in self.modules() if isinstance(module, NoisyLinear)]

    def perceptron(self) -> Perceptron | None:
        """Return the layers from normalized observations to one value per action; None if the network is more complex."""
        plain = type(self) is QNetwork and not self.noisy_layers and self.outputs[1:] == (1, 1)
        return Perceptron(self.encoder, [self.memory], self.head) if plain and isinstance(self.head, nn.Sequential) else None

    def forward(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None) -> Tensor:
        """Return z `[..., n, S, Z]` of each action for normalized observations; see `ReturnHead`."""
        features = self.encoder(obs)
        return self._z(features if type(self.memory) is NoMemory else self.memory(features, memory, episode_start)[0])

    def _z(self, features: Tensor) -> Tensor:
        return self.head(features).float().unflatten(-1, self.outputs)

    def resample(self, generator: Generator | None = None) -> None:
        """Sample new noise for noisy layers."""
        for layer in self.noisy_layers:
            layer.resample(generator)

    def value(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None) -> Tensor:
        """Return the expected return of each action for unnormalized observations, `[..., n, S]`."""
        return self.returns.mean(self(self.normalizer(obs), memory, episode_start))

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        if self.training:
            self.resample(generator)
        obs = self.normalizer(obs)
        if type(self.memory) is NoMemory:
            return self.returns.mean(self(obs)).sum(-1), memory
        features, memory = self.memory(self.encoder(obs), memory, episode_start)
        return self.returns.mean(self._z(features)).sum(-1), memory


class MaxQNetwork(QNetwork):
    """Q(s, ·) whose `value` is that of the best action, from which the returns of rollouts bootstrap."""

    def value(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None) -> Tensor:
        """Return Q(s, argmax Q) of each reward stream for unnormalized observations, `[..., S]`."""
        q = super().value(obs, memory, episode_start)
        best = q.sum(-1).argmax(-1)[..., None, None]
        return q.gather(-2, best.expand(*best.shape[:-1], q.shape[-1])).squeeze(-2)


class DuelingHead(nn.Module):
    """Q = V + A − mean A over the `actions`."""

    def __init__(self, value: nn.Module, advantage: nn.Module, actions: int) -> None:
        super().__init__()
        self.value, self.advantage, self.actions = value, advantage, actions

    def forward(self, features: Tensor) -> Tensor:
        advantage = self.advantage(features).unflatten(-1, (self.actions, -1))
        return (self.value(features).unsqueeze(-2) + advantage - advantage.mean(-2, keepdim=True)).flatten(-2)
