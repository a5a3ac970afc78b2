"""Networks of off-policy actor-critic algorithms: policy, critics and estimates from their values, temperature."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real

import torch
from gymnasium.spaces import Space
from torch import Generator, Tensor, nn

from lightning_rl.distributions import SDE, FeatureHead, make_distribution
from lightning_rl.errors import SettingError, check_range
from lightning_rl.losses.q_learning import quantile_huber
from lightning_rl.losses.soft_actor_critic import critic_loss
from lightning_rl.networks.acting import Perceptron, PolicyNetwork
from lightning_rl.networks.encoders import make_encoder
from lightning_rl.networks.layers import hidden_layers
from lightning_rl.networks.memory import Memory, NoMemory, make_memory
from lightning_rl.networks.mlp import EnsembleLinear, Widths, split_widths
from lightning_rl.networks.normalization import make_normalizer
from lightning_rl.spaces import Spaces, check_observation_space
from lightning_rl.types import Tree


class Actor(PolicyNetwork):
    """π(a|s): normalizer → encoder → memory → hidden layers → head → distribution. Weights have torch's default initialization.

    Args:
        spaces: observation and action space of one environment.
        action_dist: distribution of Box actions; see `distributions.make_distribution`.
        head: a module after the last layer, for instance `nn.Tanh()`.
        critic_obs: names of observations that the policy ignores.
        layers: kind of the hidden layers; see `hidden_layers`.
        log_std_init: initial log σ, if σ does not depend on the observation.
        net_arch: widths of the hidden layers of policy and critics, or `{pi: …, qf: …}`.
        activation, encoder, encoder_features, entities, goals, normalize_obs, memory, sde: as in `ActorCritic`.
    """

    def __init__(
        self,
        spaces: Spaces,
        action_dist: str,
        head: nn.Module,
        *,
        net_arch: Widths = (256, 256),
        activation: str = "relu",
        encoder: str | type[nn.Module] = "auto",
        encoder_features: int = 512,
        entities: Sequence[str] = (),
        goals: Sequence[str] = (),
        normalize_obs: str = "off",
        memory: Memory | None = None,
        critic_obs: Sequence[str] = (),
        layers: str = "plain",
        sde: SDE | None = None,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        check_observation_space(spaces.observation, entities, goals, critic_obs)
        self.critic_obs = list(critic_obs)
        self.normalizer = make_normalizer(normalize_obs, spaces.observation, entities)
        self.encoder = make_encoder(spaces.observation, encoder, encoder_features, entities, goals, critic_obs)
        self.memory = make_memory(memory, self.encoder.num_features, self.encoder.num_goal_features)
        features, (widths, _) = self.memory.num_features, split_widths(net_arch, "qf")
        self.layers = hidden_layers(layers, features, widths, activation, goal=self.memory.goal)
        last = widths[-1] if widths else features
        self.distribution = make_distribution(spaces.action, action_dist, log_std_init, sde, last)
        self.layers.append(nn.Linear(last, self.distribution.num_inputs) if sde is None else FeatureHead(self.distribution, last))
        self.layers.append(head)

    def perceptron(self) -> Perceptron | None:
        """Return the layers from normalized observations to the distribution's input; None for a subclass, which may compute more."""
        return Perceptron(self.encoder, [self.memory], self.layers) if type(self) is Actor else None

    def forward(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None) -> Tensor:
        """Return the distribution's input `[..., num_inputs]` for normalized observations."""
        features = self.encoder(obs)
        if type(self.memory) is not NoMemory:
            features, _ = self.memory(features, memory, episode_start)
        return self.layers(features).float()

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        obs = self.normalizer(obs)
        if type(self.memory) is NoMemory:
            return self(obs), memory
        features, memory = self.memory(self.encoder(obs), memory, episode_start)
        return self.layers(features).float(), memory


class ValueEstimate(nn.Module):
    """Estimates the return from the outputs of E critics with Z values each, `atoms`."""

    atoms = 1

    def target(self, q: Tensor) -> Tensor:
        """Return the target values of the target critics' outputs, `[E · Z, B, ...]` to `[Y, B, ...]`."""
        raise NotImplementedError

    def policy(self, q: Tensor) -> Tensor:
        """Return the value that the policy maximizes, `[E · Z, B, ...]` to `[B, ...]`."""
        raise NotImplementedError

    def loss(self, q: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of values `[E · Z, B, S]` against a target `[Y, B, S]`, and the error for priorities, each `[B]`."""
        raise NotImplementedError

    def resample(self, generator: Generator) -> None:
        """Sample what is random in the next update, if anything."""


class LeastValue(ValueEstimate):
    """One value per critic, Z = 1, of which the minimum is used (Fujimoto et al. 2018, TD3)."""

    def target(self, q: Tensor) -> Tensor:
        return q.amin(0, keepdim=True)

    def policy(self, q: Tensor) -> Tensor:
        return q.amin(0)

    def loss(self, q: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return critic_loss(q, target), (q.detach() - target).abs().mean((0, 2))


class SubsetValue(ValueEstimate):
    """The target is the minimum of M random critics out of E; the policy maximizes the mean of all (Chen et al. 2021, REDQ, alg. 1)."""

    subset: Tensor

    def __init__(self, ensemble: int, subset: int) -> None:
        super().__init__()
        check_range("critic_subset", subset, 1, ensemble, whole=True)
        self.ensemble = ensemble
        self.register_buffer("subset", torch.arange(subset), persistent=False)

    def target(self, q: Tensor) -> Tensor:
        return q[self.subset].amin(0, keepdim=True)

    def policy(self, q: Tensor) -> Tensor:
        return q.mean(0)

    loss = LeastValue.loss

    def resample(self, generator: Generator) -> None:
        order = torch.rand(self.ensemble, generator=generator, device=generator.device).argsort()
        self.subset.copy_(order[: len(self.subset)])


class QuantileValue(ValueEstimate):
    """Z quantiles of the return per critic; the target is the quantiles of all E critics without the largest (Kuznetsov et al. 2020).

    Args:
        ensemble: E.
        atoms: Z, at the fractions (i + ½) / Z.
        dropped: number of largest quantiles to drop per critic.
    """

    fraction: Tensor

    def __init__(self, ensemble: int, atoms: int, dropped: int) -> None:
        super().__init__()
        check_range("n_quantiles", atoms, 1, whole=True)
        check_range("drop_quantiles", dropped, 0, atoms - 1, whole=True)
        self.atoms, self.kept = atoms, ensemble * (atoms - dropped)
        self.register_buffer("fraction", (torch.arange(atoms) + 0.5) / atoms, persistent=False)

    def target(self, q: Tensor) -> Tensor:
        return q.sort(0).values[: self.kept]

    def policy(self, q: Tensor) -> Tensor:
        return q.mean(0)

    def loss(self, q: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        z = q.unflatten(0, (-1, self.atoms)).transpose(0, 1)  # [Z, E, B, S]
        loss = quantile_huber(z, self.fraction, target.unsqueeze(1)).mean((0, 2)) / self.atoms
        return loss, (z.detach().mean(0) - target.mean(0)).abs().mean((0, 2))


def make_estimate(ensemble: int, subset: int | None = None, quantiles: int | None = None, dropped: int = 0) -> ValueEstimate:
    """Return the estimate from an ensemble's values. Raises `SettingError`: settings are out of range, or exclude each other."""
    if quantiles is None:
        if dropped:
            raise SettingError(f"drop_quantiles {dropped} needs n_quantiles, such as 25")
        return LeastValue() if subset is None else SubsetValue(ensemble, subset)
    if subset is not None:
        raise SettingError("critic_subset cannot be combined with n_quantiles, whose drop_quantiles keep the target low; leave one out")
    return QuantileValue(ensemble, quantiles, dropped)


class Critic(nn.Module):
    """Q(s, a) of an ensemble: encoder → memory → concatenated with the continuous action → hidden layers, E in one product → heads.

    Observations are normalized by the actor. Weights have torch's default initialization. A memory is empty at the start of each sequence:
    critics do not run while experience is collected.

    Args:
        space: observation space.
        num_actions: A, the continuous dimensions of an action; 0 for a value of only the observation.
        num_choices: M, the number of values for each observation.
        ensemble: E, the number of critics; they share the image encoder and the memory.
        streams: S, the number of reward streams.
        layers, dropout: of the hidden layers; see `hidden_layers`.
        subset, quantiles, dropped: the estimate from the ensemble; see `make_estimate`.
        net_arch: as in `Actor`.
        activation, encoder, encoder_features, entities, goals, memory: as in `ActorCritic`.
    """

    def __init__(
        self,
        space: Space,
        num_actions: int,
        num_choices: int = 1,
        *,
        ensemble: int = 2,
        streams: int = 1,
        layers: str = "plain",
        dropout: float = 0.0,
        subset: int | None = None,
        quantiles: int | None = None,
        dropped: int = 0,
        net_arch: Widths = (256, 256),
        activation: str = "relu",
        encoder: str | type[nn.Module] = "auto",
        encoder_features: int = 512,
        entities: Sequence[str] = (),
        goals: Sequence[str] = (),
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        self.encoder = make_encoder(space, encoder, encoder_features, entities, goals)
        self.memory = make_memory(memory, self.encoder.num_features, self.encoder.num_goal_features)
        self.estimate = make_estimate(ensemble, subset, quantiles, dropped)
        self.heads = (self.estimate.atoms, num_choices, streams)
        num_inputs = self.memory.num_features + num_actions
        goal, (_, widths) = self.memory.goal, split_widths(net_arch, "qf")
        self.layers = hidden_layers(layers, num_inputs, widths, activation, ensemble=ensemble, dropout=dropout, goal=goal)
        self.layers.append(EnsembleLinear(ensemble, widths[-1] if widths else num_inputs, math.prod(self.heads)))

    def forward(self, obs: Tree, action: Tensor | None = None, episode_start: Tensor | None = None) -> Tensor:
        """Return Q `[E · Z, B, M, S]` (see `estimate`) for observations `[B, ...]` and the continuous dimensions of actions `[B, A]`."""
        x = self.encoder(obs)
        if type(self.memory) is not NoMemory:
            x, _ = self.memory(x, (), episode_start)
        q = self.layers(x if action is None else torch.cat([x, action], -1)).float().unflatten(-1, self.heads)
        return q.movedim(2, 1).flatten(0, 1)


class Temperature(nn.Module):
    """α > 0 `[K]`, one for each kind of action, stored as log α.

    Args:
        kinds: the kinds of actions.
        ent_coef: α as a number, or `auto` or `auto_<initial value>` to learn it.
        target: the target entropy of a learned α, for each kind.
    """

    target: Tensor

    def __init__(self, kinds: Sequence[str], ent_coef: float | str, target: Sequence[float] = ()) -> None:
        super().__init__()
        self.kinds = list(kinds)
        self.register_buffer("target", torch.tensor(target), persistent=False)
        self.learned = isinstance(ent_coef, str)
        alpha = _first_alpha(ent_coef) if isinstance(ent_coef, str) else ent_coef
        check_range("ent_coef", alpha, 0, open_low=self.learned)
        log_alpha = torch.full((len(self.kinds),), math.log(alpha) if alpha > 0 else -math.inf)
        self.log_alpha = nn.Parameter(log_alpha, requires_grad=self.learned)
        if not self.learned:
            self.register_load_state_dict_pre_hook(keep_alpha)

    def forward(self) -> Tensor:
        """Return α, without gradient."""
        return self.log_alpha.detach().exp()


def keep_alpha(temperature: Temperature, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
    """Keep an α that is set as a number: the setting overrides the value in a checkpoint."""
    state_dict[f"{prefix}log_alpha"] = temperature.log_alpha.detach()


def _first_alpha(ent_coef: str) -> float:
    name, _, value = ent_coef.partition("_")
    try:
        if name == "auto":
            return 1.0 if ent_coef == "auto" else float(value)
    except ValueError:
        pass
    raise SettingError(f"ent_coef {ent_coef!r} must be a number, auto, or auto_<initial value> such as auto_0.1")


def entropy_targets(setting: float | str | Mapping[str, float], auto: dict[str, float]) -> list[float]:
    """Return the target entropy for each kind of action.

    Raises `SettingError`: the setting is not `auto`, a number for a single kind, or a mapping with the kinds as keys.
    """
    if isinstance(setting, Mapping):
        for kind in setting.keys() - auto.keys():
            raise SettingError(f"target_entropy.{kind}: the actions are {' and '.join(auto)}")
        for kind, value in setting.items():
            check_range(f"target_entropy.{kind}", value, -1e9, 1e9)
        return [float({**auto, **setting}[kind]) for kind in auto]
    if setting == "auto":
        return list(auto.values())
    if not isinstance(setting, Real) or isinstance(setting, bool) or len(auto) > 1:
        raise SettingError(f"target_entropy {setting!r} must be auto, or a number for each kind of action: {{{': …, '.join(auto)}: …}}")
    check_range("target_entropy", float(setting), -1e9, 1e9)
    return [float(setting)]
