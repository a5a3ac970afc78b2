"""Base class of all algorithms: settings, networks and experience. Updates are in `training/learning.py`, the run in `training/run.py`."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Signature, currentframe, signature
from types import FrameType
from typing import Annotated, Any, ClassVar, Literal, Self

import pytorch_lightning as pl
import torch

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.callbacks.curriculum import Curriculum, make_curriculum
from lightning_rl.callbacks.iteration import match_target
from lightning_rl.data.dataset import ReplayDataset, ReplaySettings
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.config import EnvSetting, as_config, count_envs
from lightning_rl.envs.make import probe_spaces
from lightning_rl.envs.unity.scene import find_groups, find_roles
from lightning_rl.errors import SettingError, check_choice
from lightning_rl.networks.changes import structure_of
from lightning_rl.networks.memory import Memory, as_memory
from lightning_rl.networks.mlp import NetArch
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.rewards import SignalSettings, make_signals
from lightning_rl.schedules import Schedule, ScheduleSetting
from lightning_rl.settings.fields import OrPlain, Range, read_fields
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.spaces import Spaces, add_hidden, as_rows, describe_space, is_batch_of
from lightning_rl.spaces import to_plain as space_to_plain
from lightning_rl.training.arguments import check_arguments, complete_settings, plain, with_integers
from lightning_rl.training.behaviors import make_opponent, prepare_self_play
from lightning_rl.training.experience import rollouts
from lightning_rl.training.learner import Learner
from lightning_rl.training.learning import LearningModule
from lightning_rl.training.loading import stored_name
from lightning_rl.training.replay import replay
from lightning_rl.training.run import Run
from lightning_rl.training.side_learners import CloningConfig, SignalLearner, make_cloning
from lightning_rl.training.state import is_packaged, note_attributes
from lightning_rl.types import Tree, tree_leaves, tree_to_numpy, tree_to_torch

RESERVED = {
    *("run", "learner", "count", "counted", "length", "updates", "env_steps", "episodes", "began_at", "generator", "noise", "seed"),
    "recorded",
}
"""Names that a run uses itself: a setting or attribute with one of these names would shadow it."""
MOVED = {
    *("start_run", "end_run", "end_iteration", "close_iteration", "check_experience", "interrupt", "log_row", "begin_task", "in_short"),
    *("save_run", "load_run", "get_results", "set_results", "own_callbacks"),
    *("join", "build_side", "begin_turn", "begin_acting", "begin_learning", "begin_iteration", "finish_learning", "end_learning"),
    *("learning_metrics", "recorded_metrics", "clear_metrics", "get_learning_state", "set_learning_state", "set_acting_state"),
    *("take_notices", "load_buffer", "continue_counts", "read_steps", "refuse", "all_optimizers"),
}
"""Methods that algorithms had before they had a `run` and a `learner`, which have them now: nothing would call an override."""


class MarkBuilt(type):
    """Set `built`, the structure of an instance, when its constructor, also that of a subclass, has returned, and note its attributes."""

    @property
    def __signature__(cls) -> Signature:  # otherwise that of `__call__`
        init = signature(cls.__init__)  # type: ignore[misc]
        return init.replace(parameters=list(init.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = super().__call__(*args, **kwargs)
        for networks in instance.target_networks:
            match_target(*networks)  # a subclass may have changed the online one
        vars(instance)["built"] = structure_of(instance, is_packaged)
        note_attributes(instance)
        return instance


@dataclass(kw_only=True, eq=False, repr=False)
class Algorithm(LearningModule, metaclass=MarkBuilt):
    """A reinforcement-learning algorithm: its networks, experience and loss.

    Subclasses build `self.network` in `__post_init__` and define `experience`, `training_step`, `loss` and `configure_optimizers`. A
    setting that follows a schedule, such as `learning_rate`, holds the value of the current iteration.

    Metrics: `rollout/ep_rew_mean` and `rollout/ep_len_mean` over the last 100 episodes, `time/fps` (environment steps per second since
    the last row), `time/iterations`, `train/n_updates` (gradient steps), `train/learning_rate`, and gradient norms before clipping.
    """

    env: EnvSetting = field(kw_only=False)
    """The environment: settings or, in Python, an id, a ready vector environment, or a function that builds one environment."""
    max_env_steps: Annotated[int, Range(1)] = 1_000_000
    """Environment steps of the run, summed over all ranks."""
    learning_rate: ScheduleSetting = 3e-4
    """Step size of the optimizer."""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount factor of the environment's reward."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = 0.5
    """Clip gradients to this Euclidean norm; null: no clipping."""
    net_arch: NetArch | None = None
    """Widths of hidden layers, or `{pi: […], vf: […]}` (qf off-policy); null: [64, 64], SAC and TD3 [256, 256]."""
    activation: str = "tanh"
    """Activation of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu."""
    encoder: str = "auto"
    """Image encoder: auto, mlp, simple, nature_cnn, resnet, match3 or fully_connected; or your own class, see docs/your_own.md."""
    encoder_features: int = 512
    """Width of an encoded image."""
    entities: list[str] | None = None
    """Observations that are sets of entities, `Box(max_n, features)`, by paths such as `robot.arm`; zeros are padding."""
    goals: list[str] | None = None
    """Names of goal observations, which generate the weights of the last hidden layer."""
    normalize_obs: str = "off"
    """Normalize observations by `running` statistics, by `frozen` statistics of random steps, or not at all (`off`)."""
    normalize_obs_steps: Annotated[int, Range(1)] = 10_000
    """Random steps for `frozen`; they count as environment steps."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    clip_reward: Annotated[float, Range(0, open_low=True)] | None = None
    """Clip rewards to ± this value; null: no clipping."""
    reward_scale: Annotated[float, Range(-1e9, 1e9)] = 1.0
    """Factor on rewards."""
    reward_signals: SignalSettings = field(default_factory=dict)  # a class attribute would hide the module
    """Settings of reward signals by name: extrinsic (the environment's reward), curiosity, rnd, gail; null removes one."""
    reward_signal_steps_per_update: Annotated[float, Range(0, open_low=True)] | None = None
    """Environment steps per update of learned reward signals; null: one with each update of the algorithm."""
    behavioral_cloning: OrPlain[CloningConfig | None] = None
    """Also train the policy to imitate demonstrations."""
    self_play: OrPlain[SelfPlayConfig | None] = None
    """Play a game against past selves; null: the newest weights."""
    memory: Memory | None = None
    """Recurrent memory: LSTM or GRU; null: none."""
    log_interval: Annotated[int, Range(0, open_low=True)] | None = None
    """Environment steps between rows of metrics; null: 1 % of the run."""
    on_nan: Literal["raise", "skip_update", "restore_last"] = "raise"
    """What to do about NaN or infinity; see `nan_policy.py`."""
    compile: bool | Literal["auto"] = "auto"
    """Compile losses (`auto`: in long runs), and record steps of environments on a GPU as CUDA graphs."""
    spaces: Spaces = None  # type: ignore[assignment]
    """Observation and action space, and whether the environment masks actions; null: read from one environment."""

    losses: ClassVar[tuple[str, ...]] = ("loss",)
    """The methods that `compile` compiles, in the order of the optimizers that step on them."""

    # ---------------------------------------------------------------- settings and networks

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        check_arguments(cls, args, kwargs)
        algorithm = super().__new__(cls)
        object.__setattr__(algorithm, "given_arguments", (args, kwargs))
        return algorithm

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for name in RESERVED & (vars(cls).keys() | vars(cls).get("__annotations__", {}).keys()):
            if not isinstance(vars(cls).get(name), property):
                raise SettingError(f"{cls.__name__}.{name}: every run already has a {name}; choose another name")
        for name in MOVED & vars(cls).keys():
            raise SettingError(f"{cls.__name__}.{name} is not called, since an algorithm is not its run; override one of Lightning's hooks")
        for name in ("__eq__", "__hash__", "__repr__"):  # keep those of a module, even if a user's dataclass would replace them
            if name not in vars(cls):
                setattr(cls, name, getattr(cls, name))
        if "__init__" in vars(cls):
            cls.__init__ = with_integers(cls.__init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        settings = complete_settings(type(self), *self.given_arguments)
        super().__init__()
        self.learner = Learner(self)
        self.run = Run(self, {"": self.learner})
        self.schedules: dict[str, Schedule] = read_fields(self)
        self.net_arch = [64, 64] if self.net_arch is None else self.net_arch
        if self.compile != "auto" and not isinstance(self.compile, bool):
            raise SettingError(f"compile must be auto, true or false, got {self.compile!r}")
        if self.compile is True and self.memory is not None:
            raise SettingError(
                "compile does not support memory: its sequences are split at episode starts, so shapes change; remove one of them"
            )
        self.env = None if self.env is None and self.spaces is not None else as_config(self.env)
        joint = getattr(self, "critic_obs", None)
        if isinstance(joint, str):
            check_choice("critic_obs", joint, ("all", "state"))
        is_scene = self.spaces is None and getattr(self.env, "is_unity", False)
        self.spaces = self.spaces or probe_spaces(self.env, joint if isinstance(joint, str) else "")
        if is_scene and self.learns_in_groups:
            self.spaces = find_groups(self.env, self.spaces)
        for name, value in find_roles(self.env).items() if is_scene else ():
            setattr(self, name, value if getattr(self, name) is None else getattr(self, name))
        if isinstance(joint, str) and self.spaces.joint != joint:
            raise SettingError(
                f"critic_obs {joint} is not in the given spaces; a Behavior takes it from partial(PPO, critic_obs={joint!r})"
            )
        if self.self_play is not None:
            self.self_play, self.spaces = prepare_self_play(self.self_play, self.spaces, self.env)
        self.memory = as_memory(self.memory)
        built = {"env": self.env, "memory": self.memory, "self_play": self.self_play}
        built |= {"entities": self.entities, "goals": self.goals} if is_scene else {}
        self.save_hyperparameters(plain({name: built.get(name, value) for name, value in settings.items()}))
        self.learner.settings = deepcopy(dict(self.hparams))
        extrinsic = {"gamma": self.gamma, "scale": self.reward_scale, "clip": self.clip_reward, "normalize": self.normalize_reward}
        signals = make_signals(self.reward_signals, extrinsic, self.spaces, lambda: self.network.distribution)
        self.reward_signals = torch.nn.ModuleDict(signals)
        self.learner.signals = {name: (signal.gamma, signal.ignore_done) for name, signal in signals.items()}
        self.register_buffer("discounts", torch.tensor([signal.gamma for signal in signals.values()]), persistent=False)
        self.register_buffer("ignore_done", torch.tensor([signal.ignore_done for signal in signals.values()]), persistent=False)
        self.signal_learner = SignalLearner(signals, self.reward_signal_steps_per_update)
        self.side_learners = [self.signal_learner, make_cloning(self.behavioral_cloning)]
        self.active_learners = [learner for learner in self.side_learners if learner.learns]

    @property
    def network_settings(self) -> dict[str, Any]:
        """Return the settings of a policy network."""
        return {
            "net_arch": self.net_arch,
            "activation": self.activation,
            "encoder": self.encoder,
            "encoder_features": self.encoder_features,
            "entities": [] if self.entities is None else self.entities,
            "goals": [] if self.goals is None else self.goals,
            "normalize_obs": self.normalize_obs,
            "memory": self.memory,
        }

    @property
    def critic_settings(self) -> dict[str, Any]:
        """Return the settings of a critic, whose observations are normalized already."""
        settings = {name: value for name, value in self.network_settings.items() if name != "normalize_obs"}
        return {**settings, "streams": len(self.reward_signals)}

    def save_hyperparameters(self, *args: object, frame: FrameType | None = None, **kwargs: object) -> None:
        """Save hyperparameters as Lightning does, but as plain data. All settings, also of a subclass, are saved anyway."""
        more = [argument for argument in args if not (isinstance(argument, str) and argument in self.hparams)]
        if more:
            super().save_hyperparameters(*more, frame=frame or currentframe().f_back, **kwargs)  # type: ignore[arg-type, union-attr]
            self.hparams.update(plain(dict(self.hparams)))

    @torch.no_grad()
    def forward(self, obs: Tree, action_mask: Tree = ()) -> Tree:
        """Return deterministic actions, as the environment takes them, for observations `[N, ...]` as the environment returns them.

        A policy with memory acts as at the start of an episode; use `lightning_rl.Policy` to carry the memory along.
        """
        obs = add_hidden(self.spaces.observation, obs, getattr(self.network, "critic_obs", ()))
        if not is_batch_of(self.spaces.observation, obs):
            space = describe_space(self.spaces.observation)
            raise SettingError(f"observations must be a batch, [N, ...] of {space}; pass obs[None], or use lightning_rl.load_policy")
        rows = as_rows(self.spaces.observation, tree_to_numpy(obs))
        num = len(tree_leaves(rows)[0])
        start = torch.ones(num, dtype=torch.bool, device=self.device)
        memory, mask = tree_to_torch(self.network.initial_memory(num), self.device), tree_to_torch(action_mask, self.device)
        with eval_mode(self.network.modules()):
            action, _ = self.network.sample(tree_to_torch(rows, self.device), memory, start, mask, deterministic=True)
        return self.network.distribution.to_env(tree_to_numpy(action))

    # ---------------------------------------------------------------- experience

    def collect(self, n_steps: int, log_probs: bool = True, actors: ActorsConfig | None = None) -> RolloutDataset:
        """Return on-policy experience: rollouts of `n_steps` steps per environment, by the newest policy or by actors."""
        return rollouts(self, n_steps, log_probs, actors)

    def replay_experience(self, settings: ReplaySettings, config: ReplayConfig, actors: ActorsConfig | None = None) -> ReplayDataset:
        """Return off-policy experience: iterations that alternate acting and learning from a buffer, or act concurrently with actors."""
        return replay(self, settings, config, actors)

    # ---------------------------------------------------------------- called by the run

    @property
    def length(self) -> int:
        """Return the count at which the run ends."""
        return int(getattr(self, f"max_{self.counter}"))

    @property
    def num_envs(self) -> int:
        """Return the number of parallel environments of this rank; 1 if the run counts updates and steps none."""
        return count_envs(self.env) * self.spaces.rows if self.counter == "env_steps" else 1

    @cached_property
    def curriculum(self) -> list[Curriculum]:
        """The curriculum of its environments, which the next `fit` continues."""
        return make_curriculum(self.env) if self.counter == "env_steps" else []

    def make_opponent(self, name: str, num_rows: int) -> Opponent:
        """Return an opponent by name for `num_rows` rows of the game; see `training/behaviors.py`."""
        if not self.spaces.agents:
            raise SettingError(f"opponent {name}: this environment has no seats for opponents; leave it out")
        if not (self.behavior or self.spaces.one_learns or self.spaces.teams):
            raise SettingError(f"opponent {name}: all agents of this environment learn, so there are no seats for it; add self_play")
        return make_opponent(name, self.spaces, num_rows)

    def learning_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that learning needs; a user's callback of the same class replaces one."""
        return [*self.curriculum, *self.past_selves, *([] if self.target_update is None else [self.target_update])]

    def describe(self) -> Plain:
        """Return the plain data with which a checkpoint can rebuild this module."""
        spaces = self.spaces
        agents = {"agents": list(spaces.agents), "in_turn": spaces.one_learns, "joint": spaces.joint} if spaces.agents else {}
        agents |= {"groups": spaces.groups} if spaces.groups else {}
        plain_spaces = [space_to_plain(space) for space in spaces[:2]]
        return {"algorithm": stored_name(type(self)), "spaces": plain_spaces, "masked": spaces.masked, **agents}
