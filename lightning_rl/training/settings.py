"""Settings as dataclass fields: ranges, choices, plain data, and the groups that several algorithms share."""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import wraps
from pathlib import PurePath
from textwrap import shorten
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from torch.nn import Module
from torch.optim import Adam, Optimizer

from lightning_rl.data.dataset import ReplaySettings
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.distributions import SDE
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, as_settings, check_choice, check_flag, check_integers, check_range
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.layers import Layers
from lightning_rl.networks.memory import Memory
from lightning_rl.rewards import SignalSettings
from lightning_rl.schedules import BuildSchedule, Schedule, ScheduleSetting, as_points, make_schedule, piecewise
from lightning_rl.setting_names import way_out_of_algorithm
from lightning_rl.spaces import JOINT
from lightning_rl.training.side_learners import CloningConfig

Kind = tuple[object, tuple[object, ...]]
"""A type, with the notes of its annotation."""


@dataclass(frozen=True, repr=False)
class Range:
    """The values of a number, in its annotation: `Annotated[int, Range(1)]`.

    Args:
        low: the least.
        high: the greatest.
        open_low: the least is excluded.
    """

    low: float = -float("inf")
    high: float = float("inf")
    open_low: bool = False

    def __repr__(self) -> str:
        low = f"{'>' if self.open_low else '>='} {self.low:g}"
        return low if self.high == float("inf") else f"{low} and <= {self.high:g}"


def settings_of(cls: type) -> dict[str, inspect.Parameter]:
    """Return all settings of a class, with those that `**common` passes on to its bases."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        own = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        parameters |= {p.name: p for p in own if p.name not in parameters and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return parameters


def check_arguments(cls: type, args: tuple[object, ...], given: Mapping[str, object]) -> None:
    """Raise `SettingError` for a setting that a class does not have, for a wrong one of an `__init__` of its own, for one that a subclass
    sets without being a dataclass, for a module, and for arguments that must have names.
    """
    check_decorated(cls)
    names = settings_of(cls)
    for name in given:
        if name not in names:
            hint = way_out_of_algorithm(name, names, in_python=True) or f"; help({cls.__name__}) shows all"
            raise SettingError(f"{name} is not a setting of {cls.__name__}{hint}")
        if isinstance(given[name], Module) and "__dataclass_fields__" in vars(cls):
            instead = "; give its class" if name == "encoder" else ""
            raise SettingError(f"{name} must be plain data, which a checkpoint can hold, got a {type(given[name]).__name__}{instead}")
        if name not in {each.name for each in fields(cls)}:
            read_value(name, given[name], list(_alternatives(names[name].annotation)))
    kinds = [each.kind for each in inspect.signature(cls.__init__).parameters.values()][1:]  # type: ignore[misc]
    by_place = math.inf if inspect.Parameter.VAR_POSITIONAL in kinds else kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if args and isinstance(args[0], str) and args[0].endswith("Policy"):
        write = f"write {cls.__name__}('CartPole-v1', …)"
        raise SettingError(f"{args[0]!r} is not an environment: {write}; the spaces choose the network, or encoder and net_arch do")
    if len(args) > by_place:
        got = ", ".join(shorten(repr(each), 30) for each in args)
        raise SettingError(f"{cls.__name__}({got}): only the environment has no name; write setting=value for the others")


def check_decorated(cls: type) -> None:
    """Raise `SettingError` for a setting in the body of a class that is no dataclass, where it would be none."""
    for base in cls.__mro__:
        if is_dataclass(base) and "__dataclass_fields__" not in vars(base):
            annotated = {name for name, hint in inspect.get_annotations(base).items() if _is_setting(hint)}
            for name in sorted(vars(base).keys() & {each.name for each in fields(base)} | annotated):
                decorate = "decorate the class with @dataclass(kw_only=True, eq=False, repr=False)"
                raise SettingError(f"{base.__name__}.{name}: {name} is a setting; {decorate}")


def _is_setting(hint: object) -> bool:
    """Return whether an annotation has a note that only settings have."""
    return any(isinstance(note, Range | BuildSchedule) for _, notes in _alternatives(hint) for note in notes)


def read_fields(instance: Any) -> dict[str, Schedule]:
    """Check each field by its annotation, and convert it, see `read_value`. Return the schedules."""
    schedules: dict[str, Schedule] = {}
    for name, kinds in _kinds_of(type(instance)).items():
        value, schedule = read_value(name, getattr(instance, name), kinds)
        setattr(instance, name, value)
        if schedule is not None:
            schedules[name] = schedule
    return schedules


def read_value(name: str, value: Any, kinds: list[Kind]) -> tuple[Any, Schedule | None]:
    """Check a setting by the types that it may have. Return it, 1e6 as an integer and a schedule as its first value, and its schedule.

    Raises:
        SettingError: a value outside its `Range`, not in its `Literal`, or not a flag.
    """
    schedule = None
    if value is None and (NoneType, ()) in kinds:
        return None, None
    if any(kind is int for kind, _ in kinds):
        value = as_integer(value)
    (kind, notes), *others = [each for each in kinds if each[0] is not NoneType]
    for note in notes:
        if isinstance(note, Range):
            check_range(name, value, note.low, note.high, open_low=note.open_low, whole=kind is int)
        elif isinstance(note, BuildSchedule):
            schedule = make_schedule(name, value)
            value = schedule(0.0)
    if kind is bool and not others:
        check_flag(name, value)
    elif get_origin(kind) is Literal and not others:
        check_choice(name, value, get_args(kind))
    elif kind == list[int] and not others:
        check_integers(name, value)
    return value, schedule


def _kinds_of(cls: Any) -> dict[str, list[Kind]]:
    """Return the types that each field of a dataclass may have."""
    kinds = {each.name: list(_alternatives(each.type)) for each in fields(cls) if each.init}
    for name, found in kinds.items():
        if any(isinstance(kind, str) for kind, _ in found):
            raise SettingError(f"{cls.__name__}.{name}: its annotation is a string; leave out `from __future__ import annotations`")
    return kinds


def _alternatives(hint: object) -> Iterator[Kind]:
    """Yield the types of a union."""
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from _alternatives(each)
    elif get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        yield kind, tuple(notes)
    else:
        yield hint, ()


def as_integer(value: Any) -> Any:
    """Convert a whole float such as 1e6, or a numpy integer, to an integer; return anything else unchanged."""
    whole = isinstance(value, float) and value.is_integer()
    return int(value) if whole or isinstance(value, np.integer) else value


def convert_integers(parameters: Mapping[str, inspect.Parameter], given: Mapping[str, object]) -> dict[str, object]:
    """Convert the values of parameters that are annotated as integers."""
    kinds = {name: [kind for kind, _ in _alternatives(each.annotation)] for name, each in parameters.items()}
    return {name: as_integer(value) if {int, "int", "int | None"} & {*kinds.get(name, ())} else value for name, value in given.items()}


def with_integers(init: Callable[..., None]) -> Callable[..., None]:
    """Make an `__init__` of a user's class accept 1e6 as an integer; annotate its `env`, which the command line builds by its type."""
    init.__annotations__.setdefault("env", EnvConfig)
    parameters = inspect.signature(init).parameters

    @wraps(init)
    def converting(self: object, *args: object, **kwargs: object) -> None:
        init(self, *args, **convert_integers(parameters, kwargs))

    return converting


def complete_settings(algorithm: Any) -> dict[str, object]:
    """Return the arguments an algorithm was built with, and the defaults of the others, but for `spaces`, which are stored separately."""
    args, kwargs = algorithm.given_arguments
    cls, parameters = type(algorithm), settings_of(type(algorithm))
    defaults = {name: default_of(cls, each) for name, each in parameters.items() if each.default is not each.empty}
    settings = defaults | convert_integers(parameters, dict(zip(parameters, args, strict=False)) | kwargs)
    scheduled = {
        name for name, kinds in _kinds_of(cls).items() if any(isinstance(note, BuildSchedule) for _, notes in kinds for note in notes)
    }
    for name in scheduled & settings.keys():
        if callable(function := settings[name]):
            settings[name] = as_points(name, function)
    if isinstance(encoder := settings.get("encoder"), type):  # a checkpoint holds its path
        settings["encoder"] = f"{encoder.__module__}.{encoder.__qualname__}"
    return {name: value for name, value in settings.items() if name != "spaces"}


def default_of(cls: Any, parameter: inspect.Parameter) -> object:
    """Return the default of a setting."""
    factories = {each.name: each.default_factory for each in fields(cls) if each.default_factory is not MISSING}
    is_made = repr(parameter.default) == "<factory>"  # as dataclasses write it in a signature
    return factories[parameter.name]() if is_made else parameter.default


def plain(value: object) -> Any:
    """Convert settings to plain data: arrays to lists, paths to texts, and keys, but for whole numbers, to texts.

    Ready environments, functions and demonstrations, which are not stored, become None; so does an `EnvConfig` that holds such things,
    since without them it would be another environment.
    """
    if isinstance(value, Mapping):
        keys = [key.item() if isinstance(key, np.generic) else key for key in value]
        return {key if isinstance(key, int) else str(key): plain(child) for key, child in zip(keys, value.values(), strict=True)}
    if isinstance(value, Memory):
        return value.settings
    if is_dataclass(value) and not isinstance(value, type):
        stored = {each.name: plain(getattr(value, each.name)) for each in fields(value)}
        return None if isinstance(value, EnvConfig) and any(loses(getattr(value, name), stored[name]) for name in stored) else stored
    if isinstance(value, list | tuple):
        return None if any(hasattr(child, "_fields") for child in value) else [plain(child) for child in value]
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Enum):
        return plain(value.value) if isinstance(value, str | int) else None
    return value if isinstance(value, str | int | float | bool) else None


def loses(value: object, stored: Any) -> bool:
    """Return whether `plain` left out a part of a value, or turned an object of somebody else's class into a dict."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if is_dataclass(value):
        parts = [(getattr(value, each.name), stored and stored[each.name]) for each in fields(value)]
        return not type(value).__module__.startswith("lightning_rl.") or any(loses(*part) for part in parts)
    if isinstance(value, Mapping):
        return any(map(loses, value.values(), stored.values()))
    if isinstance(value, list | tuple):
        return stored is None or any(map(loses, value, stored))
    return stored is None and value is not None


@dataclass(kw_only=True, eq=False, repr=False)
class ReplayFields:
    """When to act and when to learn, and how experience is stored."""

    buffer_size: Annotated[int, Range(1)] = 1_000_000
    """Transitions in the replay buffer."""
    batch_size: Annotated[int, Range(1)] = 256
    """Rows of a batch, with a memory a multiple of its sequence_length."""
    learning_starts: Annotated[int, Range(0)] = 100
    """Environment steps before the first update."""
    train_freq: Annotated[int, Range(1)] = 1
    """Environment steps, counted over all environments, between learning."""
    gradient_steps: Annotated[int, Range(-1)] = 1
    """Updates each time; -1: as many as steps."""
    steps_per_iteration: Annotated[int, Range(1)] = 100
    """Environment steps of an iteration, in which acting and learning alternate."""
    n_steps: Annotated[int, Range(1)] = 1
    """Length of the returns' windows; shorter at the end of an episode."""
    warmup: Literal["random", "policy"] = "random"
    """Actions before learning starts: `random` or from the `policy`."""
    replay: ReplayConfig = ReplayConfig()
    """How transitions are stored and sampled, see `ReplayConfig`."""

    def __post_init__(self: Any) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the algorithm
        self.replay = as_settings("replay", ReplayConfig, self.replay)
        names = [each.name for each in fields(ReplayFields) if each.name != "replay"]
        self.replay_settings = ReplaySettings(**{name: getattr(self, name) for name in names}, memory=self.memory)

    @property
    def planned_updates(self: Any) -> int:
        steps = max(0, self.max_env_steps - self.learning_starts)
        return int(steps if self.gradient_steps == -1 else steps // self.train_freq * self.gradient_steps)

    def experience(self: Any) -> Any:
        """Return iterations of acting and learning in turn, from the replay buffer."""
        return self.replay_experience(self.replay_settings, self.replay)


@dataclass(kw_only=True, eq=False, repr=False)
class CriticFields:
    """The critics of an off-policy algorithm with an actor, and the hidden layers of both."""

    activation: str = "relu"
    """Of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = None
    """Cut gradients to this Euclidean norm; null leaves them."""
    tau: float = 0.005
    """Fraction by which the target networks move each time."""
    n_critics: Annotated[int, Range(1)] = 2
    """How many critics; the lowest of their values counts."""
    critic_subset: Annotated[int, Range(1)] | None = None
    """The lowest of this many critics, drawn for each update, is the target, and the policy maximizes the mean of all (REDQ; in
    `TD3` the first critic)."""
    n_quantiles: Annotated[int, Range(1)] | None = None
    """Critics learn this many quantiles of the return instead of its mean (TQC)."""
    drop_quantiles: Annotated[int, Range(0)] = 0
    """How many of the greatest quantiles, for each critic, the target leaves out."""
    critic_net_arch: list[int] | None = None
    """Widths of the critics' hidden layers; null: net_arch."""
    critic_layers: Layers = "plain"
    """Of the critics: `plain`, `layer_norm`, or the residual blocks of `simba`."""
    critic_dropout: Annotated[float, Range(0, 0.99)] = 0.0
    """Share of the outputs of the critics' hidden layers set to 0 (DroQ: 0.01, with layer_norm)."""
    actor_layers: Layers = "plain"
    """Of the policy."""

    def __post_init__(self: Any) -> None:
        self.net_arch = [256, 256] if self.net_arch is None else self.net_arch
        super().__post_init__()  # type: ignore[misc]  # of the algorithm

    @property
    def critic_settings(self: Any) -> dict[str, Any]:
        """Return the settings of a critic, with its own hidden layers."""
        arch = self.net_arch if self.critic_net_arch is None else self.critic_net_arch
        settings = super().critic_settings  # type: ignore[misc]  # of the algorithm
        return {**settings, "net_arch": arch, "layers": self.critic_layers, "dropout": self.critic_dropout}


def ensemble_settings(algorithm: Any) -> dict[str, Any]:
    """Return the settings of all its critics together: how many there are, and how they are read."""
    names = {"ensemble": "n_critics", "subset": "critic_subset", "quantiles": "n_quantiles", "dropped": "drop_quantiles"}
    return algorithm.critic_settings | {name: getattr(algorithm, setting) for name, setting in names.items()}


@dataclass(kw_only=True, eq=False, repr=False)
class ExplorationFields:
    """Random actions, ε-greedy: their share falls during the run, and is that of its step when a run is loaded."""

    exploration_fraction: Annotated[float, Range(0, 1)] = 0.1
    """Part of the run over which the share of random actions falls linearly."""
    exploration_initial_eps: Annotated[float, Range(0, 1)] = 1.0
    """Share of random actions at the start."""
    exploration_final_eps: Annotated[float, Range(0, 1)] = 0.05
    """Share of random actions from then on."""

    def exploration(self, progress: float) -> float:
        """Return ε, the share of random actions; `progress` goes from 0 to 1."""
        return piecewise([[0, self.exploration_initial_eps], [self.exploration_fraction, self.exploration_final_eps]])(progress)

    def schedule(self: Any, progress: float) -> None:
        super().schedule(progress)  # type: ignore[misc]  # of the algorithm
        self.network.distribution.epsilon = self.exploration(progress)

    def load_run(self: Any, checkpoint: dict[str, Any]) -> None:
        super().load_run(checkpoint)  # type: ignore[misc]
        self.network.distribution.epsilon = self.exploration(min(1.0, self.env_steps / self.max_env_steps))


@dataclass(kw_only=True, eq=False, repr=False)
class StateDependentFields:
    """Exploration of Box actions by a function of the state (gSDE), see distributions/state_dependent.py."""

    use_sde: bool = False
    """Explore by noise that is a function of the state for some steps (gSDE), not drawn at each one."""
    sde_sample_freq: Annotated[int, Range(-1)] = -1
    """Steps of each environment with one such function; -1: those of a rollout, or train_freq."""
    use_expln: bool = False
    """With use_sde: σ grows slowly above 1."""
    full_std: bool = True
    """With use_sde: each action has its own σ of each feature."""


def sde_settings(algorithm: Any, steps: int, learn_features: bool) -> SDE | None:
    """Return the settings of state-dependent exploration; None where it is off.

    Args:
        algorithm: with `StateDependentFields`.
        steps: of each environment with one function, unless sde_sample_freq says otherwise.
        learn_features: the noise shapes the features.

    Raises:
        SettingError: a frequency of 0, or a setting of exploration that is off.
    """
    if algorithm.sde_sample_freq == 0:
        raise SettingError("sde_sample_freq 0 would never draw the noise; use a number of steps, or -1")
    if not algorithm.use_sde:
        for each in fields(StateDependentFields):
            if getattr(algorithm, each.name) != each.default:
                raise SettingError(f"{each.name} is a setting of use_sde, which is false; remove it")
        return None
    freq = steps if algorithm.sde_sample_freq == -1 else algorithm.sde_sample_freq
    return SDE(freq, algorithm.use_expln, algorithm.full_std, learn_features)


@dataclass(kw_only=True, eq=False, repr=False)
class ActorCriticFields(StateDependentFields):
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
    """Environment steps at the start of a run from which only the value learns."""
    share_encoder: bool | None = None
    """Policy and value share encoder and memory; null: without a memory."""
    critic_obs: list[str] | Literal["all", "state"] | None = None
    """Observations for the value function alone; of several agents `all` or `state`."""
    action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """Distribution of Box actions."""
    log_std_init: float = 0.0
    """First log σ of Box actions."""
    ortho_init: bool = True
    """Orthogonal first weights."""


def make_actor_critic(algorithm: Any) -> ActorCritic:
    """Build the network of an algorithm with `ActorCriticFields`."""
    return ActorCritic(algorithm.spaces, **actor_critic_settings(algorithm))


def actor_critic_settings(algorithm: Any) -> dict[str, Any]:
    """Return the settings of an actor-critic network."""
    names = ("share_encoder", "action_dist", "log_std_init", "ortho_init", "value_transform", "value_support")
    own = {name: getattr(algorithm, name) for name in names}
    streams, hidden = len(algorithm.reward_signals), hidden_observations(algorithm.critic_obs)
    sde = sde_settings(algorithm, algorithm.n_steps, learn_features=False)
    return {**algorithm.network_settings, **own, "sde": sde, "streams": streams, "critic_obs": hidden}


def hidden_observations(critic_obs: list[str] | str | None) -> list[str]:
    """Return the names of the observations that only critics get."""
    return [JOINT] if isinstance(critic_obs, str) else critic_obs or []


@dataclass(kw_only=True, eq=False, repr=False)
class NoRewardFields:
    """Remove the settings of rewards from an algorithm that learns no values."""

    normalize_reward: bool = field(init=False, default=False)
    clip_reward: float | None = field(init=False, default=None)
    reward_scale: float = field(init=False, default=1.0)
    reward_signals: SignalSettings = field(init=False, default_factory=dict)
    reward_signal_steps_per_update: float | None = field(init=False, default=None)
    behavioral_cloning: CloningConfig | None = field(init=False, default=None)


def end_burn_in(algorithm: Any, optimizer: Optimizer) -> None:
    """Reset Adam after learning if the burn-in of the value function ends with this iteration.

    Adam corrects the bias of its moments by one count of steps for all parameters (Kingma and Ba 2015, alg. 1). Those of the policy were 0
    until now: after a long burn-in its first steps would be up to (1 − 0.9ᵏ) / √(1 − 0.999ᵏ) = 6.6 (k = 12) times as long as the learning
    rate, and could undo the initial policy in one rollout. RMSprop corrects nothing and continues.
    """
    if isinstance(optimizer, Adam) and algorithm.began_at < algorithm.critic_burn_in_steps <= algorithm.env_steps:
        optimizer.state.clear()
