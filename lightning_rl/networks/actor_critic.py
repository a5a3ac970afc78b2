"""The network of the actor-critic family: a policy, and a value for each reward stream."""

from collections.abc import Sequence

import torch
from torch import Generator, Tensor, nn

from lightning_rl.distributions import SDE, FeatureHead, make_distribution
from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.losses.policy_gradient import value_loss
from lightning_rl.networks.acting import Perceptron, PolicyNetwork
from lightning_rl.networks.encoders import make_encoder
from lightning_rl.networks.memory import Memory, NoMemory, make_memory
from lightning_rl.networks.mlp import Widths, goal_mlp, orthogonal, orthogonal_linear, split_widths
from lightning_rl.networks.normalization import make_normalizer
from lightning_rl.spaces import Spaces, check_observation_space
from lightning_rl.types import Step, Tree
from lightning_rl.value_transforms import ValueTransform, make_value_transform, scalar_to_support, support_to_scalar


class ScalarValue(nn.Module):
    """A scalar h(V) with the squared error. h is the identity if there is no transform."""

    atoms = 1

    def __init__(self, transform: ValueTransform | None) -> None:
        super().__init__()
        self.transform = transform

    def value(self, z: Tensor) -> Tensor:
        """Return V `[..., S]` for the critic's output."""
        return z if self.transform is None else self.transform.inverse(z)

    def loss(self, z: Tensor, returns: Tensor) -> Tensor:
        """Return the loss of each row and reward stream `[..., S]`."""
        return value_loss(z, returns if self.transform is None else self.transform(returns))


class TwoHotValue(nn.Module):
    """A histogram of h(V) over the integers low … high, with the cross-entropy to the two-hot target (Schrittwieser et al. 2020, app. F).

    Returns outside the range are clipped.
    """

    def __init__(self, transform: ValueTransform, low: int, high: int) -> None:
        super().__init__()
        self.transform, self.low, self.high, self.atoms = transform, low, high, high - low + 1

    def value(self, z: Tensor) -> Tensor:
        """Return V `[..., S]` for the critic's output `[..., S · Z]`."""
        return self.transform.inverse(support_to_scalar(z.unflatten(-1, (-1, self.atoms)), self.low, self.high))

    def loss(self, z: Tensor, returns: Tensor) -> Tensor:
        target = scalar_to_support(self.transform(returns), self.low, self.high)
        return -(target * z.unflatten(-1, (-1, self.atoms)).log_softmax(-1)).sum(-1)


def make_value_head(value_transform: str, value_support: Sequence[int] | None) -> ScalarValue | TwoHotValue:
    """Make the value head for the settings of an algorithm.

    Raises `SettingError`: the transform is unknown, or the support is not two integers in increasing order.
    """
    if value_support is None and value_transform == "identity":
        return ScalarValue(None)
    transform = make_value_transform(value_transform)
    if value_support is None:
        return ScalarValue(transform)
    if len(value_support) != 2:
        raise SettingError(f"value_support must be two integers, low and high, got {list(value_support)}")
    for bound in value_support:
        check_range("value_support", bound, -100_000, 100_000, whole=True)
    low, high = value_support
    if low >= high:
        raise SettingError(f"value_support: low {low} must be below high {high}")
    return TwoHotValue(transform, low, high)


def by_rows(layers: nn.Module, features: Tensor) -> Tensor:
    """Apply layers to features `[T, N, F]` as rows `[B, F]`: BatchNorm would take another dimension for the features."""
    return layers(features.flatten(0, -2)).unflatten(0, features.shape[:-1])


class ActorCritic(PolicyNetwork):
    """π(a|s) and V(s): normalizer → encoder → memory → hidden layers → heads, shared up to the memory or separate.

    Rows have the shape `[N, …]` (one step of N environments), `[T, N, …]` (time-major), or are flat with `episode_start [T, N]`. `memory`
    is the memory before the first row.

    Initial weights are orthogonal, with gain √2 in hidden layers, 0.01 in the policy's head, and 1 in the value head.

    Args:
        spaces: observation and action space of one environment.
        net_arch: widths of the hidden layers, for the policy and the value function each, or `{pi: …, vf: …}`.
        activation: activation of the hidden layers.
        encoder: image encoder; see `networks/encoders.py`.
        encoder_features: width of the image encoder's output.
        entities: names of observations that are sets of entities; see `networks/encoders.py`.
        goals: names of observations that generate the last hidden layer; see `networks/mlp.py`.
        share_encoder: share one encoder and memory between policy and value; default: yes, unless there is a memory.
        normalize_obs: `off`, `running` or `frozen` (statistics of random steps at the start of the run).
        action_dist: distribution of Box actions, `clipped_normal` or `tanh_normal`.
        log_std_init: initial log σ of Box actions.
        ortho_init: initialize hidden layers and heads orthogonally; otherwise as in `nn.Linear`.
        sde: state-dependent exploration of Box actions.
        streams: S, the number of reward streams.
        value_transform: learn h(value): `identity`, `signed_hyperbolic` or `symlog`.
        value_support: lowest and highest integer of a histogram of h(value); None: learn h(value) as a number.
        memory: the recurrent memory; None: no memory.
        critic_obs: names of observations that only the value function sees; nothing is shared then.

    Raises:
        SettingError: the memory has a burn-in, which is for replayed sequences.
    """

    def __init__(
        self,
        spaces: Spaces,
        *,
        net_arch: Widths = (64, 64),
        activation: str = "tanh",
        encoder: str | type[nn.Module] = "auto",
        encoder_features: int = 512,
        entities: Sequence[str] = (),
        goals: Sequence[str] = (),
        share_encoder: bool | None = None,
        normalize_obs: str = "off",
        action_dist: str = "clipped_normal",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        sde: SDE | None = None,
        streams: int = 1,
        value_transform: str = "identity",
        value_support: Sequence[int] | None = None,
        memory: Memory | None = None,
        critic_obs: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_observation_space(spaces.observation, entities, goals, critic_obs)
        if share_encoder and critic_obs:
            raise SettingError("share_encoder true would show critic_obs to the policy: leave it out")
        check_range("log_std_init", log_std_init, -20, 20)
        check_choice("action_dist", action_dist, ("clipped_normal", "tanh_normal"))
        if memory is not None and memory.burn_in:
            raise SettingError(f"memory.burn_in {memory.burn_in} is for replayed sequences; rollouts store the memory itself: set it to 0")
        self.normalizer = make_normalizer(normalize_obs, spaces.observation, entities)
        self.critic_obs = list(critic_obs)
        self.shares = (memory is None if share_encoder is None else share_encoder) and not critic_obs
        observed = (spaces.observation, encoder, encoder_features, entities, goals)
        self.actor_encoder = make_encoder(*observed, critic_obs)
        self.critic_encoder = self.actor_encoder if self.shares else make_encoder(*observed)
        actor, critic = self.actor_encoder, self.critic_encoder
        self.memory = make_memory(memory, actor.num_features, actor.num_goal_features)
        self.critic_memory = self.memory if self.shares else make_memory(memory, critic.num_features, critic.num_goal_features)
        features, goal = self.memory.num_features, self.memory.goal
        pi, vf = split_widths(net_arch, "vf")
        last = pi[-1] if pi else features
        self.distribution = make_distribution(spaces.action, action_dist, log_std_init, sde, last)
        layer = orthogonal_linear if ortho_init else nn.Linear
        self.actor = goal_mlp(features, pi, activation, layer, goal=goal)
        head = nn.Linear(last, self.distribution.num_inputs) if sde is None else FeatureHead(self.distribution, last)
        self.actor.append(orthogonal(head, 0.01) if ortho_init else head)
        seen = self.critic_memory.num_features
        self.critic = goal_mlp(seen, vf, activation, layer, goal=self.critic_memory.goal)
        self.value_head = make_value_head(value_transform, value_support)
        value = nn.Linear(vf[-1] if vf else seen, streams * self.value_head.atoms)
        self.critic.append(orthogonal(value, 1.0) if ortho_init else value)

    def perceptron(self) -> Perceptron | None:
        # a subclass may compute something else
        memories = [self.memory] if self.shares else [self.memory, self.critic_memory]
        return Perceptron(self.actor_encoder, memories, self.actor) if type(self) is ActorCritic else None

    def initial_memory(self, num: int) -> Tree:
        if self.shares:
            return self.memory.initial(num)
        return self.memory.initial(num), self.critic_memory.initial(num)

    def _encode(self, obs: Tree, memory: Tree, episode_start: Tensor | None, for_critic: bool = False) -> tuple[Tensor, Tree]:
        """Return the features of normalized observations, and the new memory of the policy or the value function."""
        if not self.shares:
            memory = memory[for_critic] if memory else ()
        encoder, layer = (self.critic_encoder, self.critic_memory) if for_critic else (self.actor_encoder, self.memory)
        features = encoder(obs)
        return (features, memory) if type(layer) is NoMemory else layer(features, memory, episode_start)

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        obs = self.normalizer(obs)
        features, after = self._encode(obs, memory, episode_start)
        if not self.shares:
            critic_memory = memory[1] if memory else ()
            after = after, self.critic_memory.after(lambda: self.critic_encoder(obs), critic_memory, episode_start)
        x = self.actor(features) if features.dim() <= 2 else by_rows(self.actor, features)
        return x.float(), after

    def value(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None) -> Tensor:
        """Return V(s) `[..., S]`."""
        features, _ = self._encode(self.normalizer(obs), memory, episode_start, for_critic=True)
        z = self.critic(features) if features.dim() <= 2 else by_rows(self.critic, features)
        return self.value_head.value(z.float())

    def log_prob(self, obs: Tree, action: Tree, memory: Tree = (), episode_start: Tensor | None = None, action_mask: Tree = ()) -> Tensor:
        """Return the log-probability of an action `[..., D]`."""
        x, _ = self.policy(obs, memory, episode_start)
        return self.distribution.evaluate(x, action, action_mask)[0]

    def log_prob_and_value(
        self, obs: Tree, action: Tree, memory: Tree = (), episode_start: Tensor | None = None, action_mask: Tree = ()
    ) -> tuple[Tensor, Tensor]:
        if not self.shares or getattr(self.policy, "__func__", None) is not ActorCritic.policy:
            return super().log_prob_and_value(obs, action, memory, episode_start, action_mask)
        features, _ = self._encode(self.normalizer(obs), memory, episode_start)
        rows, shape = features.flatten(0, -2), features.shape[:-1]  # as `by_rows` does
        x = self.actor(rows[: -shape[-1]]).unflatten(0, (-1, shape[-1]))
        return self.distribution.evaluate(x.float(), action, action_mask)[0], self.value_head.value(
            self.critic(rows).unflatten(0, shape).float()
        )

    def evaluate(
        self, obs: Tree, action: Tree, memory: Tree = (), episode_start: Tensor | None = None, action_mask: Tree = ()
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probability of an action and the entropy `[..., D]`, and the critic's output for `value_head`."""
        is_own = getattr(self.policy, "__func__", None) is not ActorCritic.policy  # a user's
        normalized = self.normalizer(obs)
        features, _ = self._encode(normalized, memory, episode_start)
        x = self.policy(obs, memory, episode_start)[0] if is_own else self.actor(features).float()
        log_prob, entropy = self.distribution.evaluate(x, action, action_mask)
        if not self.shares:
            features, _ = self._encode(normalized, memory, episode_start, for_critic=True)
        return log_prob, entropy, self.critic(features).float()

    @torch.no_grad()
    def act(
        self,
        obs: Tree,
        memory: Tree = (),
        episode_start: Tensor | None = None,
        action_mask: Tree = (),
        *,
        deterministic: bool = False,
        generator: Generator | None = None,
    ) -> Step:
        """Act on N observations: return the action as sampled, its joint log-probability, the values, and the new memory."""
        action, after = self.sample(obs, memory, episode_start, action_mask, deterministic=deterministic, generator=generator)
        log_prob, _, z = self.evaluate(obs, action, memory, episode_start, action_mask)
        return Step(action, log_prob.sum(-1), self.value_head.value(z), after)
