"""Settings that several algorithms share, as groups of dataclass fields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from torch.optim import Adam, Optimizer

from lightning_rl.actors.config import IN_A_THREAD, ActorsConfig
from lightning_rl.data.dataset import ReplayDataset, ReplaySettings, SampledDataset
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.distributions import SDE
from lightning_rl.errors import SettingError, check_range
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.layers import Layers
from lightning_rl.networks.mlp import NetArch
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.rewards import SignalSettings
from lightning_rl.schedules import ScheduleSetting, piecewise
from lightning_rl.settings.fields import OrPlain, Range, as_settings
from lightning_rl.spaces import JOINT
from lightning_rl.training.learning import LearningModule
from lightning_rl.training.replay import make_offline
from lightning_rl.training.side_learners import CloningConfig

MAX_ROWS = 10**8
"""Maximum rows of a rollout: with four numbers per observation they take 3 GB."""

if TYPE_CHECKING:

    class AlgorithmPart(LearningModule):
        """What groups of settings use of the algorithm that they are part of."""

        net_arch: NetArch | None
        n_steps: int
        batch_size: int

        def __post_init__(self) -> None: ...
        def replay_experience(
            self, settings: ReplaySettings, config: ReplayConfig, actors: ActorsConfig | None = None
        ) -> ReplayDataset: ...
        @property
        def network_settings(self) -> dict[str, Any]: ...
        @property
        def critic_settings(self) -> dict[str, Any]: ...

    class ExploringPart(AlgorithmPart):
        network: QNetwork

    class ActorCriticPart(AlgorithmPart):
        network: ActorCritic

else:
    AlgorithmPart = ExploringPart = ActorCriticPart = object


@dataclass(kw_only=True, eq=False, repr=False)
class ReplayFields(AlgorithmPart):
    """Settings of acting, learning and the replay buffer."""

    buffer_size: Annotated[int, Range(1)] = 1_000_000
    """Capacity of the replay buffer, in transitions."""
    batch_size: Annotated[int, Range(1)] = 256
    """Rows of a batch; with a memory, a multiple of its sequence_length."""
    learning_starts: Annotated[int, Range(0)] = 100
    """Environment steps before the first update."""
    train_freq: Annotated[int, Range(1)] = 1
    """Environment steps, counted over all environments, between updates."""
    gradient_steps: Annotated[int, Range(-1)] = 1
    """Updates every `train_freq` steps; -1: one per environment step."""
    steps_per_iteration: Annotated[int, Range(1)] = 100
    """Environment steps of an iteration, in which acting and learning alternate."""
    n_steps: Annotated[int, Range(1)] = 1
    """Steps of n-step returns, fewer at the end of an episode."""
    warmup: Literal["random", "policy"] = "random"
    """Actions before learning starts: `random` or from the `policy`."""
    replay: OrPlain[ReplayConfig] = ReplayConfig()
    """Storage and sampling of transitions; see `ReplayConfig`."""

    threaded = False  # a setting of SAC

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replay = as_settings("replay", ReplayConfig, self.replay)
        names = [setting.name for setting in fields(ReplayFields) if setting.name != "replay"]
        self.replay_settings = ReplaySettings(**{name: getattr(self, name) for name in names}, memory=self.memory)

    @property
    def planned_updates(self) -> int:
        if self.counter == "updates":
            return self.length
        steps = max(0, self.max_env_steps - self.learning_starts)
        return int(steps if self.gradient_steps == -1 else steps // self.train_freq * self.gradient_steps)

    def experience(self) -> SampledDataset:
        """Return iterations that alternate acting and learning, or act in a thread, from the replay buffer."""
        return self.replay_experience(self.replay_settings, self.replay, IN_A_THREAD if self.threaded else None)


@dataclass(kw_only=True, eq=False, repr=False)
class OfflineFields(ReplayFields):
    """Learn from a dataset only, for `max_updates` updates, or with `online` also from the environment's steps."""

    dataset: OrPlain[str | None] = None  # type: ignore[assignment]  # during a run, the experience itself
    """Name of the dataset, such as `pendulum/medium-v0`; in Python also a list of demonstrations."""
    max_updates: Annotated[int, Range(1, 2**53)] = 1_000_000
    """Length of a run without `online`; schedules, rows of metrics, evaluations and checkpoints follow the count of updates."""
    updates_per_iteration: Annotated[int, Range(1)] = 100
    """Without `online`: updates per iteration, after which the run may log, evaluate, save or stop."""
    online: bool = False
    """Step the environment for `max_env_steps`, as SAC does, with the dataset in the replay buffer from the start. Use it to fine-tune a
    policy that was trained offline (`--init_from`)."""
    warmup: Literal["random", "policy"] = "policy"
    """With `online`: actions before learning starts, `random` or from the `policy`."""
    self_play: OrPlain[SelfPlayConfig | None] = field(init=False, default=None)

    counter = "updates"

    def __post_init__(self) -> None:
        self.source = self.dataset
        if self.online:
            self.counter = "env_steps"
        super().__post_init__()
        check_offline(self)
        if self.online and self.source is not None:
            self.replay = replace(self.replay, demonstrations=self.source)

    def experience(self) -> SampledDataset:
        """Return batches of the dataset, or with `online` iterations that alternate acting and learning."""
        return super().experience() if self.online else make_offline(self)

    def warm_up(self) -> None:
        """Collect the statistics of the dataset's observations, unless they were loaded with another run's weights."""
        if self.source is None:
            super().warm_up()
        elif self.normalize_obs != "off" and self.network.normalizer.is_new:
            data: Any = self.dataset
            for obs in data.observations():
                self.network.normalizer.update(obs)


def check_offline(algorithm: OfflineFields) -> None:
    """Raise `SettingError` for settings that need steps of the environment without `online`, and for two datasets."""
    if algorithm.online:
        if algorithm.source is not None and algorithm.replay.demonstrations is not None:
            raise SettingError("dataset and replay.demonstrations have the same meaning here: use only dataset")
        return
    if algorithm.replay.demonstrations is not None or algorithm.replay.demonstration_share is not None:
        name = "demonstrations" if algorithm.replay.demonstrations is not None else "demonstration_share"
        raise SettingError(f"replay.{name} needs online, which also steps the environment; name the data in dataset")
    if algorithm.normalize_reward:
        raise SettingError("normalize_reward needs online: a dataset gives no running returns; use reward_scale")
    for name in algorithm.reward_signals:
        if name != "extrinsic":
            raise SettingError(f"reward_signals.{name} needs online, which steps the environment; leave it out")


@dataclass(kw_only=True, eq=False, repr=False)
class CriticFields(AlgorithmPart):
    """Settings of the critics of an off-policy actor-critic algorithm, and of all hidden layers."""

    activation: str = "relu"
    """Activation of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = None
    """Clip gradients to this Euclidean norm; null: no clipping."""
    tau: float = 0.005
    """Fraction by which the target networks move each time they are updated."""
    n_critics: Annotated[int, Range(1)] = 2
    """Number of critics; the minimum of their values is used."""
    critic_subset: Annotated[int, Range(1)] | None = None
    """Number of random critics per update whose minimum is the target; the policy maximizes the mean of all critics (REDQ), in `TD3` the
    first critic."""
    n_quantiles: Annotated[int, Range(1)] | None = None
    """Quantiles of the return per critic, instead of the mean (TQC)."""
    drop_quantiles: Annotated[int, Range(0)] = 0
    """Number of largest quantiles per critic to drop from the target."""
    critic_net_arch: list[int] | None = None
    """Widths of the critics' hidden layers; null: those in net_arch."""
    critic_layers: Layers = "plain"
    """Hidden layers of the critics: `plain`, `layer_norm`, or the residual blocks of `simba`."""
    critic_dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """Dropout rate of the critics' hidden layers (DroQ: 0.01, with layer_norm)."""
    actor_layers: Layers = "plain"
    """Hidden layers of the policy."""

    def __post_init__(self) -> None:
        self.net_arch = [256, 256] if self.net_arch is None else self.net_arch
        super().__post_init__()
        if self.critic_net_arch is not None and isinstance(self.net_arch, dict):
            raise SettingError("critic_net_arch and qf in net_arch are the same widths: set one of them")
        for width in self.critic_net_arch or ():
            check_range("critic_net_arch", width, 1, whole=True)

    @property
    def critic_settings(self) -> dict[str, Any]:
        """Return the settings of a critic, with its own hidden layers."""
        arch = self.net_arch if self.critic_net_arch is None else self.critic_net_arch
        settings = super().critic_settings
        return {**settings, "net_arch": arch, "layers": self.critic_layers, "dropout": self.critic_dropout}


def ensemble_settings(algorithm: CriticFields) -> dict[str, Any]:
    """Return the settings of an algorithm's ensemble of critics: their number, and the estimate from their values."""
    names = {"ensemble": "n_critics", "subset": "critic_subset", "quantiles": "n_quantiles", "dropped": "drop_quantiles"}
    return algorithm.critic_settings | {name: getattr(algorithm, setting) for name, setting in names.items()}


@dataclass(kw_only=True, eq=False, repr=False)
class ExplorationFields(ExploringPart):
    """Settings of ε-greedy exploration; ε falls during the run, and a loaded run has the ε of its step."""

    exploration_fraction: Annotated[float, Range(0, 1)] = 0.1
    """Fraction of the run over which the share of random actions falls linearly."""
    exploration_initial_eps: Annotated[float, Range(0, 1)] = 1.0
    """Initial share of random actions."""
    exploration_final_eps: Annotated[float, Range(0, 1)] = 0.05
    """Final share of random actions."""

    assignable: ClassVar[tuple[str, ...]] = ("exploration_fraction", "exploration_initial_eps", "exploration_final_eps")

    def exploration(self, progress: float) -> float:
        """Return ε, the share of random actions; `progress` goes from 0 to 1."""
        return piecewise([[0, self.exploration_initial_eps], [self.exploration_fraction, self.exploration_final_eps]])(progress)

    def schedule(self, progress: float) -> None:
        super().schedule(progress)
        self.network.distribution.epsilon = self.exploration(progress)

    def set_counts(self, counts: Mapping[str, Any]) -> None:
        super().set_counts(counts)
        self.network.distribution.epsilon = self.exploration(min(1.0, self.env_steps / self.max_env_steps))


@dataclass(kw_only=True, eq=False, repr=False)
class StateDependentFields:
    """Settings of state-dependent exploration (gSDE) for Box actions; see distributions/state_dependent.py."""

    use_sde: bool = False
    """Explore by noise that is a fixed function of the state for several steps (gSDE), instead of new noise in each step."""
    sde_sample_freq: Annotated[int, Range(-1)] = -1
    """Steps per environment until the function is sampled again; -1: once per rollout, or every train_freq steps."""
    use_expln: bool = False
    """With use_sde: σ grows slowly above 1."""
    full_std: bool = True
    """With use_sde: a separate σ of each feature for each action dimension."""


def sde_settings(algorithm: StateDependentFields, steps: int, learn_features: bool) -> SDE | None:
    """Return the settings of state-dependent exploration; None if it is off.

    Args:
        algorithm: an algorithm with `StateDependentFields`.
        steps: the value for sde_sample_freq -1.
        learn_features: propagate gradients of the noise to the features.

    Raises:
        SettingError: sde_sample_freq is 0, or a setting of exploration is set while use_sde is false.
    """
    if algorithm.sde_sample_freq == 0:
        raise SettingError("sde_sample_freq 0 would never sample the noise; use a number of steps, or -1")
    if not algorithm.use_sde:
        for setting in fields(StateDependentFields):
            if getattr(algorithm, setting.name) != setting.default:
                raise SettingError(f"{setting.name} is a setting of use_sde, which is false; remove it")
        return None
    freq = steps if algorithm.sde_sample_freq == -1 else algorithm.sde_sample_freq
    return SDE(freq, algorithm.use_expln, algorithm.full_std, learn_features)


@dataclass(kw_only=True, eq=False, repr=False)
class ActorCriticFields(StateDependentFields, ActorCriticPart):
    """Settings of losses and network of the actor-critic family."""

    ent_coef: ScheduleSetting = 0.0
    """Weight of the entropy bonus."""
    vf_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the value loss."""
    value_transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity"
    """Learn h(value) instead of the value."""
    value_support: list[int] | None = None
    """[low, high]: learn h(value) as a histogram over these integers."""
    critic_burn_in_steps: Annotated[int, Range(0)] = 0
    """Environment steps at the start of a run in which only the value function learns."""
    share_encoder: bool | None = None
    """Share encoder and memory between policy and value; null: yes, unless there is a memory."""
    critic_obs: list[str] | Literal["all", "state"] | None = None
    """Names of observations that only the value function sees; with several agents `all` or `state`."""
    action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """Distribution of Box actions."""
    log_std_init: float = 0.0
    """Initial log σ of Box actions."""
    ortho_init: bool = True
    """Initialize weights orthogonally."""

    assignable: ClassVar[tuple[str, ...]] = ("vf_coef",)


def actor_settings(algorithm: Any) -> dict[str, Any]:
    """Return the settings of SAC's policy. Raises `SettingError`: a setting of `use_sde` is set while it is false."""
    if not algorithm.use_sde and algorithm.log_std_init != type(algorithm).log_std_init:
        raise SettingError("log_std_init is a setting of use_sde, which is false; remove it")
    sde = sde_settings(algorithm, max(1, algorithm.train_freq // algorithm.num_envs), learn_features=True)
    specific = {"critic_obs": hidden_observations(algorithm.critic_obs), "layers": algorithm.actor_layers}
    return {**algorithm.network_settings, **specific, "sde": sde, "log_std_init": algorithm.log_std_init}


def make_actor_critic(algorithm: ActorCriticFields) -> ActorCritic:
    """Build the network of an algorithm with `ActorCriticFields`."""
    return ActorCritic(algorithm.spaces, **actor_critic_settings(algorithm))


def actor_critic_settings(algorithm: ActorCriticFields) -> dict[str, Any]:
    """Return the settings of an actor-critic network."""
    names = ("share_encoder", "action_dist", "log_std_init", "ortho_init", "value_transform", "value_support")
    specific = {name: getattr(algorithm, name) for name in names}
    streams, hidden = len(algorithm.reward_signals), hidden_observations(algorithm.critic_obs)
    sde = sde_settings(algorithm, algorithm.n_steps, learn_features=False)
    return {**algorithm.network_settings, **specific, "sde": sde, "streams": streams, "critic_obs": hidden}


def hidden_observations(critic_obs: list[str] | str | None) -> list[str]:
    """Return the names of the observations that only critics see."""
    return [JOINT] if isinstance(critic_obs, str) else critic_obs or []


@dataclass(kw_only=True, eq=False, repr=False)
class NoRewardFields:
    """Removes the settings of rewards, for algorithms that learn no values."""

    normalize_reward: bool = field(init=False, default=False)
    clip_reward: float | None = field(init=False, default=None)
    reward_scale: float = field(init=False, default=1.0)
    reward_signals: SignalSettings = field(init=False, default_factory=dict)
    reward_signal_steps_per_update: float | None = field(init=False, default=None)
    behavioral_cloning: OrPlain[CloningConfig | None] = field(init=False, default=None)


def end_burn_in(algorithm: ActorCriticFields, optimizer: Optimizer) -> None:
    """Reset Adam after an iteration in which the burn-in of the value function ends.

    Adam corrects the bias of its moments by one step count for all parameters (Kingma and Ba 2015, alg. 1). The policy's moments were 0
    until now: after a long burn-in, the policy's first steps would be up to (1 − 0.9ᵏ) / √(1 − 0.999ᵏ) = 6.6 (k = 12) times the learning
    rate, and could destroy the initial policy in one rollout. RMSprop has no bias correction and continues.
    """
    if isinstance(optimizer, Adam) and algorithm.began_at < algorithm.critic_burn_in_steps <= algorithm.env_steps:
        optimizer.state.clear()


def check_n_steps(n_steps: int, num_envs: int) -> None:
    """Raise `SettingError` unless rollouts of this size fit."""
    check_range("n_steps", n_steps, 1, whole=True)
    if n_steps * num_envs > MAX_ROWS:
        raise SettingError(
            f"n_steps * num_envs = {n_steps} * {num_envs} rows are more than a rollout can hold, {MAX_ROWS:,}; lower n_steps"
        )


def check_minibatches(algorithm: AlgorithmPart) -> None:
    """Raise `SettingError` unless minibatches of whole sequences divide an algorithm's rollouts evenly; name the two nearest valid sizes.

    An algorithm that was loaded only to act has no environment, and so no rollouts.
    """
    if algorithm.env is None:
        return
    check_range("batch_size", algorithm.batch_size, 1, whole=True)
    length = 1 if algorithm.memory is None else algorithm.memory.sequence_length
    if length > algorithm.batch_size:
        raise SettingError(f"memory.sequence_length {length} is longer than batch_size {algorithm.batch_size}; lower it")
    n_steps, num_envs, agents = algorithm.n_steps, algorithm.num_envs, algorithm.spaces.rows
    factors = f"num_envs * agents = {n_steps} * {num_envs // agents} * {agents}" if agents > 1 else f"num_envs = {n_steps} * {num_envs}"
    check_divides(algorithm, num_envs, f"n_steps * {factors} = {n_steps * num_envs}")


def check_groups(algorithm: AlgorithmPart) -> None:
    """Raise `SettingError` unless an algorithm has groups of agents, and minibatches that fill its rollouts evenly."""
    name, spaces = type(algorithm).__name__, algorithm.spaces
    env = getattr(algorithm.env, "id", "the environment")
    if not spaces.agents:
        raise SettingError(f"{name} is for groups of agents, but {env} has one agent; use PPO")
    if getattr(algorithm.env, "is_unity", False) and not spaces.groups:
        raise SettingError(f"{name} needs the groups of {env}: leave spaces out, and give a Behavior the class, or a partial of it")
    if algorithm.self_play is not None and spaces.one_learns:
        raise SettingError(
            f"self_play of {name} needs self_play.teams, a pattern of agents for each team such as [red_*, blue_*]; or use PPO"
        )
    if spaces.one_learns:
        raise SettingError(f"{name} is for agents that move at the same time, but those of {env} move in turn; use PPO")
    if algorithm.env is not None:  # else it was loaded only to act
        n_steps, groups = algorithm.n_steps, algorithm.num_envs // spaces.group_size
        factor = "groups" if spaces.groups else "env.num_envs"
        check_divides(algorithm, groups, f"n_steps * {factor} = {n_steps} * {groups} = {n_steps * groups} steps of groups")


def check_divides(algorithm: AlgorithmPart, num: int, rows: str) -> None:
    """Raise `SettingError` unless minibatches of whole sequences divide rollouts with `num` rows at a time, which are `rows` in words."""
    batch_size, n_steps, memory = algorithm.batch_size, algorithm.n_steps, algorithm.memory
    length = min(1 if memory is None else memory.sequence_length, n_steps)
    sequences = -(-n_steps // length) * num
    if batch_size % length or sequences % (batch_size // length):
        rows += f" in sequences of {length}" if length > 1 else ""
        raise SettingError(f"batch_size {batch_size} does not divide {rows}; use {nearest_sizes(batch_size, sequences, length)}")


def nearest_sizes(batch_size: int, sequences: int, length: int) -> str:
    """Return as text the two minibatch sizes nearest to a wanted one that divide the sequences of this length evenly."""
    small = [number for number in range(1, math.isqrt(sequences) + 1) if sequences % number == 0]
    sizes = [number * length for divisor in small for number in {divisor, sequences // divisor}]
    return " or ".join(map(str, sorted(sorted(sizes, key=lambda size: (abs(size - batch_size), size))[:2])))
