"""Settings that several algorithms share."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from lightning_rl.algorithms.cloning import CloningConfig
from lightning_rl.algorithms.settings import Range
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.data.replay_dataset import ReplaySettings
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.rewards.settings import SignalSettings
from lightning_rl.schedules import ScheduleSetting


@dataclass(kw_only=True, eq=False, repr=False)
class ReplayFields:
    """When to act and when to learn, and how memories are kept."""

    buffer_size: Annotated[int, Range(1)] = 1_000_000
    """How many transitions are remembered."""
    batch_size: Annotated[int, Range(1)] = 256
    """Rows of a batch, with a memory a multiple of its sequence_length."""
    learning_starts: Annotated[int, Range(0)] = 100
    """Environment steps before the first update."""
    train_freq: Annotated[int, Range(1)] = 1
    """Environment steps, counted over all environments, between learning."""
    gradient_steps: Annotated[int, Range(-1)] = 1
    """Updates each time; -1 makes as many as there were steps."""
    steps_per_iteration: Annotated[int, Range(1)] = 100
    """Environment steps of an iteration, between which acting and learning take turns."""
    n_steps: Annotated[int, Range(1)] = 1
    """Length of the returns' windows; shorter at the end of an episode."""
    warmup: Literal["random", "policy"] = "random"
    """Actions before learning starts: `random` or from the `policy`."""
    replay: ReplayConfig = ReplayConfig()
    """How memories are kept and drawn, see `ReplayConfig`."""


def replay_settings(algorithm: Any) -> ReplaySettings:
    """Return when an algorithm with `ReplayFields` acts and learns."""
    names = [each.name for each in fields(ReplayFields) if each.name != "replay"]
    return ReplaySettings(**{name: getattr(algorithm, name) for name in names}, memory=algorithm.memory)


def replay_updates(algorithm: Any) -> int:
    """Return how many updates the run of an algorithm with `ReplayFields` will make."""
    steps = max(0, algorithm.max_env_steps - algorithm.learning_starts)
    return int(steps if algorithm.gradient_steps == -1 else steps // algorithm.train_freq * algorithm.gradient_steps)


@dataclass(kw_only=True, eq=False, repr=False)
class ActorCriticFields:
    """Losses and network of the actor-critic family."""

    ent_coef: ScheduleSetting = 0.0
    """Weight of the entropy bonus."""
    vf_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the value loss."""
    value_transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity"
    """Learn h(value)."""
    value_support: list[int] | None = None
    """[low, high]: learn it as a histogram over these integers."""
    critic_burn_in_steps: Annotated[int, Range(0)] = 0
    """First environment steps, from which only the value learns."""
    share_encoder: bool | None = None
    """Policy and value share encoder and memory; null: without a memory."""
    action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """Of Box actions."""
    log_std_init: float = 0.0
    """First log σ of a Box."""


def make_actor_critic(algorithm: Any) -> ActorCritic:
    """Build the network of an algorithm with `ActorCriticFields`."""
    names = ("share_encoder", "action_dist", "log_std_init", "value_transform", "value_support")
    own = {name: getattr(algorithm, name) for name in names}
    return ActorCritic(algorithm.spaces, **algorithm.network_settings, **own, streams=len(algorithm.reward_signals))


@dataclass(kw_only=True, eq=False, repr=False)
class NoRewardFields:
    """Takes away the settings of rewards from an algorithm that learns no values."""

    normalize_reward: bool = field(init=False, default=False)
    clip_reward: float | None = field(init=False, default=None)
    reward_scale: float = field(init=False, default=1.0)
    reward_signals: SignalSettings = field(init=False, default_factory=dict)
    reward_signal_steps_per_update: float | None = field(init=False, default=None)
    behavioral_cloning: CloningConfig | None = field(init=False, default=None)
