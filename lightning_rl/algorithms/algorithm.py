"""The base of every algorithm: its settings, and what its losses and updates are made with. `training/run.py` holds the run around it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from inspect import currentframe
from types import FrameType
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Generator, Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.callbacks.curriculum import Curriculum, make_curriculum
from lightning_rl.callbacks.iteration import GRADIENT_HOOKS, UNUSED_HOOKS, TargetNetworkUpdate, gradient_hooks, overrides
from lightning_rl.callbacks.stopping import must_stop
from lightning_rl.compiling import CompiledLoss, compiled_losses
from lightning_rl.data.dataset import ReplayDataset, ReplaySettings
from lightning_rl.data.replay.sampling import sequence_errors
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.distributed import mean_over_ranks
from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.envs.make import probe_spaces
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.memory import Memory, as_memory
from lightning_rl.optimization import FlatOptimizer, best_matmul, check_optimizers, first_rate, gradient_step
from lightning_rl.rewards.settings import SignalSettings, make_signals
from lightning_rl.schedules import Schedule, ScheduleSetting
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.spaces import to_plain as space_to_plain
from lightning_rl.training.experience import load_buffer, replay, rollouts
from lightning_rl.training.loading import load, stored_name
from lightning_rl.training.run import Run
from lightning_rl.training.settings import Range, check_names, complete_settings, plain, read_fields, with_integers
from lightning_rl.training.side_learners import CloningConfig, SignalLearner, make_cloning
from lightning_rl.types import Experience, Rollout, State, Transition, Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch

Metric = Tensor | Callable[[], Tensor]


@dataclass(kw_only=True, eq=False, repr=False)
class Algorithm(Run):
    """A reinforcement-learning algorithm: which networks, which experience, which loss.

    Subclasses build `self.network` in `__post_init__` and define `experience`, `training_step`, `loss` and `configure_optimizers`. A
    setting that follows a schedule, such as `learning_rate`, has its value for the current iteration.

    Metrics: `rollout/ep_rew_mean` and `rollout/ep_len_mean` over the last 100 episodes, `time/fps` (environment steps per second since
    the last row), `time/iterations`, `train/n_updates` (gradient steps), `train/learning_rate`, and norms of gradients before clipping.
    """

    env: EnvConfig = field(kw_only=False)
    """The environment: settings or, from Python, an id, a ready vector environment, or a function that builds one environment."""
    max_env_steps: Annotated[int, Range(1)] = 1_000_000
    """Environment steps of the run, all ranks together."""
    learning_rate: ScheduleSetting = 3e-4
    """Step size of the optimizer."""
    gamma: Annotated[float, Range(0, 1)] = 0.99
    """Discount of the environment's reward."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = 0.5
    """Cut gradients to this Euclidean norm, or null."""
    net_arch: list[int] | None = None
    """Widths of hidden layers; null: [64, 64], SAC and TD3 [256, 256]."""
    activation: str = "tanh"
    """Of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu."""
    encoder: str = "auto"
    """For images: auto, mlp, simple, nature_cnn, resnet, match3 or fully_connected."""
    encoder_features: int = 512
    """Width of an image encoding."""
    entities: list[str] | None = None
    """Observations `Box(max_n, features)` that are sets of entities, by paths such as `robot.arm`; zeros are padding."""
    goals: list[str] | None = None
    """Observations of the goal, by name, which generate the weights of the last hidden layer."""
    normalize_obs: str = "off"
    """`running` statistics, `frozen` ones of random steps, or `off`."""
    normalize_obs_steps: Annotated[int, Range(1)] = 10_000
    """Random steps for `frozen`; they count."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""
    clip_reward: Annotated[float, Range(0, open_low=True)] | None = None
    """Cut rewards to this size; null leaves them."""
    reward_scale: Annotated[float, Range(-1e9, 1e9)] = 1.0
    """Factor on rewards."""
    reward_signals: SignalSettings = field(default_factory=dict)  # a class attribute would hide the module
    """Settings of extrinsic (the environment's reward), curiosity, rnd, gail by name; null leaves one out."""
    reward_signal_steps_per_update: Annotated[float, Range(0, open_low=True)] | None = None
    """Environment steps for an update of signals that learn; null: with each update."""
    behavioral_cloning: CloningConfig | None = None
    """Gradient steps of the policy towards demonstrations too."""
    memory: Memory | None = None
    """LSTM or GRU; null remembers nothing."""
    log_interval: Annotated[int, Range(0, open_low=True)] | None = None
    """Environment steps between rows; null: 1 % of the run."""
    on_nan: Literal["raise", "skip_update", "restore_last"] = "raise"
    """What to do about NaN or infinity, see `nan_policy.py`."""
    compile: bool | Literal["auto"] = "auto"  # type: ignore[assignment]
    """Compile losses; `auto`: where a run is long enough."""
    spaces: Spaces = None  # type: ignore[assignment]
    """Observation and action space, and whether the environment masks actions; null: probed from one environment."""

    losses: ClassVar[tuple[str, ...]] = ("loss",)
    """The methods that `compile` compiles."""
    min_optimizers = 1
    """How many optimizers the updates need."""

    # ---------------------------------------------------------------- settings and networks

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        check_names(cls, kwargs)
        algorithm = super().__new__(cls)
        object.__setattr__(algorithm, "given_arguments", (args, kwargs))
        return algorithm

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("__eq__", "__hash__", "__repr__"):  # those of a module, also where a user's dataclass would replace them
            if name not in vars(cls):
                setattr(cls, name, getattr(cls, name))
        if "__init__" in vars(cls):
            cls.__init__ = with_integers(cls.__init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        settings = complete_settings(self)
        super().__init__()
        self.schedules: dict[str, Schedule] = read_fields(self)
        if self.compile != "auto" and not isinstance(self.compile, bool):
            raise SettingError(f"compile must be auto, true or false, got {self.compile!r}")
        if self.compile is True and self.memory is not None:
            raise SettingError(
                "compile does not go with memory: its sequences are cut where episodes begin, each time elsewhere; leave one out"
            )
        self.env = None if self.env is None and self.spaces is not None else as_config(self.env)  # type: ignore[assignment]
        self.spaces = self.spaces or probe_spaces(self.env)
        self.memory = as_memory(self.memory)
        self.save_hyperparameters(plain({**settings, "env": self.env, "memory": self.memory}))
        self.guard = Guard(self.on_nan)
        self.num_optimizers: int | None = None
        self.counted_rows = 0
        self.recorded: dict[str, list[float | Tensor]] = {}
        """Metrics of the current iteration."""
        self.compiled: dict[str, CompiledLoss] = {}
        """Losses that stand in place of methods while the run lasts."""
        self.target_update: TargetNetworkUpdate | None = None
        """How target networks follow, if there are any."""
        self.network: Any  # of a subclass
        self.own_optimizers: list[Optimizer]
        """The algorithm's, in the order of `configure_optimizers`, while a run lasts."""
        self.discounts: Tensor
        self.ignore_done: Tensor
        self.seed: int
        self.generator: Generator
        """Of this rank's draws while it learns, on the CPU."""
        self._make_signals()

    def _make_signals(self) -> None:
        """Build the reward signals, and what learns in addition to the algorithm."""
        extrinsic = {"gamma": self.gamma, "scale": self.reward_scale, "clip": self.clip_reward, "normalize": self.normalize_reward}
        signals = make_signals(self.reward_signals, extrinsic, self.spaces, lambda: self.network.distribution)
        self.reward_signals = torch.nn.ModuleDict(signals)
        self.register_buffer("discounts", torch.tensor([signal.gamma for signal in signals.values()]), persistent=False)
        self.register_buffer("ignore_done", torch.tensor([signal.ignore_done for signal in signals.values()]), persistent=False)
        self.signal_learner = SignalLearner(signals, self.reward_signal_steps_per_update)
        self.side_learners = [self.signal_learner, make_cloning(self.behavioral_cloning)]
        self.active_learners = [learner for learner in self.side_learners if learner.learns]

    @property
    def network_settings(self) -> dict[str, Any]:
        """Return the settings of a policy network."""
        return {
            "net_arch": [64, 64] if self.net_arch is None else self.net_arch,
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
        """Return the settings of a critic, which is given normalized observations."""
        settings = {name: value for name, value in self.network_settings.items() if name != "normalize_obs"}
        return {**settings, "streams": len(self.reward_signals)}

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = "cpu", hparams_file: None = None, strict: bool = True, **overrides: Any
    ) -> Any:
        """Load the algorithm of a checkpoint, from the file alone; `overrides` are settings that win over the stored ones.

        Lightning's `weights_only` changes nothing: our checkpoints hold plain data only.
        """
        if hparams_file is not None or strict is False:
            raise SettingError(
                "load_from_checkpoint: a checkpoint holds its settings and all weights; trainer.fit(init_from=…) takes what fits"
            )
        overrides.pop("weights_only", None)
        return load(checkpoint_path, cls, Algorithm, map_location, **overrides)

    def save_hyperparameters(self, *args: object, frame: FrameType | None = None, **kwargs: object) -> None:
        """Save more than the settings, which are saved in any case, also those of a subclass; as Lightning does, but as plain data."""
        more = [each for each in args if not (isinstance(each, str) and each in self.hparams)]
        if more:
            super().save_hyperparameters(*more, frame=frame or currentframe().f_back, **kwargs)  # type: ignore[arg-type, union-attr]
            self.hparams.update(plain(dict(self.hparams)))

    @torch.no_grad()
    def forward(self, obs: Tree, action_mask: Tree = ()) -> Tree:
        """Return the deterministic actions of the environment, as arrays, for observations `[N, ...]` as it returns them.

        A policy with a memory acts as at the beginning of an episode; `lightning_rl.Policy` remembers.
        """
        num = len(tree_leaves(obs)[0])
        rows = allocate(self.spaces.observation, num)
        tree_map(partial(np.copyto, casting="unsafe"), rows, tree_to_numpy(obs))
        start = torch.ones(num, dtype=torch.bool, device=self.device)
        memory, mask = tree_to_torch(self.network.initial_memory(num), self.device), tree_to_torch(action_mask, self.device)
        action, _ = self.network.sample(tree_to_torch(rows, self.device), memory, start, mask, deterministic=True)
        return self.network.distribution.to_env(tree_to_numpy(action))

    # ---------------------------------------------------------------- experience

    def collect(self, n_steps: int, log_probs: bool = True, actors: ActorsConfig | None = None) -> RolloutDataset:
        """Return on-policy experience: rollouts of `n_steps` steps of each environment, with the newest weights or those of actors."""
        return rollouts(self, n_steps, log_probs, actors)

    def replay_experience(self, settings: ReplaySettings, config: ReplayConfig, actors: ActorsConfig | None = None) -> ReplayDataset:
        """Return off-policy experience: iterations of acting and learning in turn, from a buffer; an actor may act meanwhile."""
        return replay(self, settings, config, actors)

    def count_steps(self) -> None:
        """Add up the counts of all ranks, where there is something new; all decisions use these numbers.

        Raises:
            NotFiniteError: an environment of any rank returned NaN or infinity, and `on_nan` says to stop.
        """
        assert self.dataset is not None
        collector = self.dataset.collector
        if collector.rows == self.counted_rows:  # on all ranks alike
            return
        self.counted_rows = collector.rows
        self.env_steps, self.episodes = collector.env_steps, collector.statistics.episodes
        if self.trainer.world_size > 1:
            counts = [self.env_steps, self.episodes, collector.guard.error is not None]
            total = torch.tensor(counts, dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(total)
            collector.guard.agree(bool(total[2]))
            self.env_steps, self.episodes = int(total[0]), int(total[1])

    def prepare(self, rollout: Rollout) -> tuple[Rollout, Tensor]:
        """Fill the reward streams. Return the rollout and its discount, γ · bootstrap, both `[T, N, S]`."""
        signals: Any = self.reward_signals.values()
        for signal in signals:
            signal.gather(rollout)
        paid = rollout.reward.squeeze(-1)
        experience = Experience(rollout.obs, rollout.action, rollout.next_obs, paid, rollout.terminated)
        reward = torch.stack([signal(experience) for signal in signals], -1)
        for k, name in enumerate(self.reward_signals if any(signal.sees for signal in signals) else ()):
            self.record(**{f"rewards/{name}": reward[..., k][rollout.valid].mean()})
        over = rollout.terminated.unsqueeze(-1) & ~self.ignore_done
        return rollout._replace(reward=reward), self.discounts * ~over

    # ---------------------------------------------------------------- updates

    def with_side_learners(self, *optimizers: Optimizer) -> list[Optimizer]:
        """Return the optimizers of an algorithm, followed by those of what learns in addition to it.

        A `FlatOptimizer` has no learning rate of its own: it follows `learning_rate`, or a scheduler that begins with it.
        """
        self.num_optimizers = len(optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, FlatOptimizer):
                optimizer.param_groups[0]["lr"] = self.learning_rate
        return [*optimizers, *(each for learner in self.side_learners for each in learner.optimizers(self, list(optimizers)))]

    def all_optimizers(self) -> list[Optimizer]:
        """Return all optimizers without Lightning's wrappers, whose every step would count as a `global_step`."""
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def step(self, loss: Tensor, optimizer: Optimizer, name: str = "loss") -> Tensor:
        """Make one gradient step: backward, the mean over ranks, clipping to `max_grad_norm`. Return the norm before clipping.

        Args:
            loss: a scalar.
            optimizer: whose parameters get gradients, and no others.
            name: what an error calls the loss.

        Raises:
            NotFiniteError: the loss or the norm is NaN or infinite, unless `on_nan` says to go on without this step.
        """
        max_norm = math.inf if self.max_grad_norm is None else self.max_grad_norm
        norm, finite = gradient_step(loss, optimizer, self.scaler, max_norm, self.trainer.world_size, self.hooks)
        if finite:
            self.guard.bad_updates[name] = 0
        else:
            at = f"at environment step {self.env_steps:,}, update {self.updates:,}"
            self.guard.refuse(name, loss, norm, at, self.recorded, getattr(self.dataset, "batch", ()))
        return norm

    def end_update(self, batch: Any) -> None:
        """Count an update, once per joint learning step; let reward signals and cloning learn, and call `on_update_end` of callbacks."""
        self.updates += 1
        for learner in self.active_learners:
            learner.end_update(self, batch)
        for callback in self.followers:
            callback.on_update_end(self.trainer, self)

    def update_priorities(self, batch: Transition, errors: Tensor) -> None:
        """Hand the errors |δ| `[B]` of a batch to its buffer, which draws by them if it is prioritized."""
        assert isinstance(self.dataset, ReplayDataset)

        def finite() -> Tensor:
            numbers = errors.nan_to_num(0.0, 0.0, 0.0)
            return sequence_errors(numbers, batch.weight, len(batch.rows)) if len(batch.successor) else numbers

        self.dataset.buffer.update(batch.rows, finite)

    def mean_over_ranks(self, value: Tensor) -> float:
        """Return the mean of a number over all ranks, so that they decide alike."""
        return float(mean_over_ranks(value.detach()) if self.trainer.world_size > 1 else value)

    # ---------------------------------------------------------------- metrics

    @torch.no_grad()
    def record(self, **values: Metric) -> None:
        """Keep metrics of this iteration, logged as `train/<name>` (or as they are, with a group of their own before a slash): the mean of
        all values recorded under a name. A function is called only if this iteration may be logged.
        """
        if not self.log_rows.keeps:  # the newest values alone, to be named if they are not finite
            self.recorded |= {name: [value.detach()] for name, value in values.items() if isinstance(value, Tensor)}
            return
        for name, value in values.items():
            found = value.detach() if isinstance(value, Tensor) else value()
            found = found.float().mean() if found.dim() else found
            # small tensors that outlive an update break up the memory that the large ones of the next could take again
            self.recorded.setdefault(name, []).append(found.item() if found.is_cpu else found)

    def means_of_parts(self, weight: Tensor, **values: Tensor) -> dict[str, Tensor]:
        """Return the mean of values `[B, D]`, such as entropies, for each part of a Dict or Tuple action, as `train/<name>/<part>`."""
        distribution = self.network.distribution
        if not distribution.names:
            return {}
        means = {name: (weight.unsqueeze(-1) * distribution.leaf_sums(value.detach())).sum(0) for name, value in values.items()}
        return {f"train/{name}/{part}": mean[k] for name, mean in means.items() for k, part in enumerate(distribution.names)}

    # ---------------------------------------------------------------- what its run asks

    @property
    def length(self) -> int:
        return int(getattr(self, f"max_{self.counter}"))

    @property
    def num_envs(self) -> int:
        return getattr(self.env, "num_envs", 8)

    @property
    def log_every(self) -> int:
        return int(self.log_interval or super().log_every)

    @property
    def planned_updates(self) -> int:
        """Return how many updates the run will make, by its settings; 0 where that is not known."""
        return 0

    @cached_property
    def curriculum(self) -> list[Curriculum]:
        """The lessons of its environments, which another `fit` continues."""
        return make_curriculum(self.env) if self.counter == "env_steps" else []

    def learning_callbacks(self) -> list[pl.Callback]:
        return [*self.curriculum, *([] if self.target_update is None else [self.target_update])]

    def begin_learning(self) -> None:
        assert self.collector is not None
        trainer: Any = self.trainer
        self.counted_rows = 0
        for learner in self.side_learners:
            if learner.learns and self.num_optimizers is None:
                raise SettingError(f"{type(self).__name__}.configure_optimizers must return self.with_side_learners(optimizer, …)")
            learner.begin(self)
        self.own_optimizers = self.all_optimizers()[: self.num_optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        name, rate = type(self).__name__, self.hparams["learning_rate"]
        if unused := check_optimizers(self.own_optimizers, schedulers, self.min_optimizers, name, rate):
            self.say(unused)
        self.scaler = getattr(trainer.precision_plugin, "scaler", None) or GradScaler(enabled=False)
        folder = trainer.strategy.broadcast(getattr(trainer, "run_folder", None))
        self.guard = self.collector.guard = Guard(self.on_nan, folder, trainer.world_size)
        self.guard.begin(self, self.all_optimizers())
        self.followers = self._callbacks_with("on_update_end")
        self.hooks = gradient_hooks(trainer, self)
        for hook in UNUSED_HOOKS:
            if overrides(self, hook):
                self.say(f"{name}.{hook} is not called: `step` makes the gradient step, with its hooks {', '.join(GRADIENT_HOOKS)}")
        self.matmul_before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(best_matmul(self.modules(), self.device))
        self.compiled = {name: loss for name, loss in compiled_losses(self).items() if name not in vars(self)}  # else it was replaced
        vars(self).update(self.compiled)  # in place of the methods
        self.noise = self.generator if self.device.type == "cpu" else Generator(self.device).manual_seed(self.seed)

    def warm_up(self) -> None:
        """Gather the statistics that `normalize_obs: frozen` keeps, unless another run's came with its weights."""
        if self.normalize_obs == "frozen" and self.network.normalizer.is_new:
            assert self.collector is not None
            steps = self.normalize_obs_steps // self.trainer.world_size
            stop = partial(must_stop, self.trainer) if self.trainer.world_size == 1 else lambda: False
            self.network.normalizer.update(self.collector.random_steps(steps, stop))

    def schedule(self, progress: float) -> None:
        self.recorded.clear()
        for name, schedule in self.schedules.items():
            setattr(self, name, schedule(progress))
        theirs = [config.scheduler.optimizer for config in self.trainer.lr_scheduler_configs]  # a user's scheduler decides there
        for optimizer in self.own_optimizers:
            if isinstance(optimizer, FlatOptimizer) and optimizer not in theirs:
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate

    def finish_learning(self) -> None:
        assert self.collector is not None
        for learner in self.active_learners:
            learner.end_iteration(self)
        rollout = self.collector.rollout()
        self.network.normalizer.gather(rollout.obs, rollout.valid)
        self.guard.end_iteration()

    def learning_metrics(self) -> dict[str, float]:
        means = {
            name if "/" in name else f"train/{name}": float(torch.stack([torch.as_tensor(each) for each in values]).mean())
            for name, values in self.recorded.items()
            if values
        }
        rate = first_rate(self.own_optimizers)
        return {**self.guard.metrics(), **means, **({} if rate is None else {"train/learning_rate": rate})}

    def take_notices(self) -> list[str]:
        assert self.collector is not None
        notices = [*self.collector.take_notices(), *self.guard.notices]
        self.guard.notices.clear()
        return notices

    def describe(self) -> dict[str, Any]:
        spaces = [space_to_plain(space) for space in self.spaces[:2]]
        return {"algorithm": stored_name(type(self)), "spaces": spaces, "masked": self.spaces.masked}

    def get_learning_state(self) -> State:
        beside = [learner.get_state() for learner in self.side_learners]
        generators = {"learning": self.generator.get_state(), "noise": self.noise.get_state()}
        return {"guard": self.guard.get_state(), "beside": beside, **generators}

    def set_learning_state(self, state: State) -> None:
        for learner, own in zip(self.side_learners, state["beside"], strict=True):
            if (new := learner.set_state(own)) is not None:
                self.say(new)
        self.guard.set_state(state["guard"])
        self.generator.set_state(torch.from_numpy(state["learning"]))
        self.noise.set_state(torch.from_numpy(state["noise"]))

    def load_buffer(self, continues: bool = True) -> None:
        load_buffer(self, continues)

    def end_learning(self) -> None:
        while self.compiled:
            delattr(self, self.compiled.popitem()[0])
        if hasattr(self, "matmul_before"):
            torch.set_float32_matmul_precision(self.matmul_before)
