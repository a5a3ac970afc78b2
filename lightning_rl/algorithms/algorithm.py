"""The base of every algorithm: its settings, and what its losses and updates are made with. What Lightning calls is in `run.py`."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.data.dataset import ReplayDataset, ReplaySettings, RolloutDataset
from lightning_rl.data.replay.sampling import sequence_errors
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.distributed import mean_over_ranks
from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.envs.make import probe_spaces
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.memory import Memory, as_memory
from lightning_rl.optimization import FlatOptimizer, gradient_step, matmul_precision
from lightning_rl.rewards.settings import SignalSettings, make_signals
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.spaces import Spaces
from lightning_rl.training.experience import replay, rollouts
from lightning_rl.training.loading import load
from lightning_rl.training.run import Run
from lightning_rl.training.settings import Range, complete_settings, plain, read_fields, with_integers
from lightning_rl.training.side_learners import CloningConfig, SignalLearner, make_cloning
from lightning_rl.training.state import Metric, RunLog
from lightning_rl.types import Experience, Rollout, Transition


@dataclass(kw_only=True, eq=False, repr=False)
class Algorithm(Run):
    """A reinforcement-learning algorithm: which networks, which experience, which loss. One batch is one iteration.

    Subclasses build `self.network` in `__post_init__` and define `experience`, `training_step`, `loss` and `configure_optimizers`.

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
    compile: bool | Literal["auto"] = "auto"
    """Compile losses; `auto`: where a run is long enough."""
    spaces: Spaces = None  # type: ignore[assignment]
    """Observation and action space, and whether the environment masks actions; null: probed from one environment."""

    losses: ClassVar[tuple[str, ...]] = ("loss",)
    """The methods that `compile` compiles."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("__eq__", "__hash__", "__repr__"):  # those of a module, also where a user's dataclass would replace them
            if name not in vars(cls):
                setattr(cls, name, getattr(cls, name))
        if "__init__" in vars(cls):
            cls.__init__ = with_integers(cls.__init__)  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        settings = complete_settings(self)
        read_fields(self)
        super().__init__()
        if self.compile != "auto" and not isinstance(self.compile, bool):
            raise SettingError(f"compile must be auto, true or false, got {self.compile!r}")
        if self.compile is True and self.memory is not None:
            raise SettingError(
                "compile does not go with memory: its sequences are cut where episodes begin, each time elsewhere; leave one out"
            )
        self.guard = Guard(self.on_nan)
        self.env = None if self.env is None and self.spaces is not None else as_config(self.env)  # type: ignore[assignment]
        self.spaces = self.spaces or probe_spaces(self.env)
        self.log_rows = RunLog(self.log_interval or max(1, self.max_env_steps // 100))
        self.memory = as_memory(self.memory)
        self.save_hyperparameters(plain({**settings, "env": self.env, "memory": self.memory}))
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

    @property
    def planned_updates(self) -> int:
        """How many updates the run will make, by its settings; 0 where that is not known."""
        return 0

    @property
    def network_settings(self) -> dict[str, Any]:
        """The settings of a policy network."""
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
        """The settings of a critic, which is given normalized observations."""
        settings = {name: value for name, value in self.network_settings.items() if name != "normalize_obs"}
        return {**settings, "streams": len(self.reward_signals)}

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, map_location: Any = "cpu", **overrides: Any) -> Any:  # type: ignore[override]
        """The algorithm of a checkpoint, from the file alone; `overrides` are settings that win over the stored ones."""
        return load(checkpoint_path, cls, Algorithm, map_location, **overrides)

    def collect(self, n_steps: int, log_probs: bool = True, actors: ActorsConfig | None = None) -> RolloutDataset:
        """On-policy experience: rollouts of `n_steps` steps from each environment, with the newest weights or those that actors have."""
        return rollouts(self, n_steps, log_probs, actors)

    def replay_experience(self, settings: ReplaySettings, config: ReplayConfig, actors: ActorsConfig | None = None) -> ReplayDataset:
        """Return off-policy experience: iterations of acting and learning in turn, from a buffer; an actor may act meanwhile."""
        return replay(self, settings, config, actors)

    def prepare(self, rollout: Rollout) -> tuple[Rollout, Tensor]:
        """Fill the reward streams. Returns the rollout and its discount, γ · bootstrap, both `[T, N, S]`."""
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

    def with_side_learners(self, *optimizers: Optimizer) -> list[Optimizer]:
        """Return the optimizers of an algorithm, followed by those of what learns in addition to it.

        A `FlatOptimizer` has no learning rate of its own: it follows `learning_rate`, or a scheduler that begins with it.
        """
        self.num_optimizers = len(optimizers)
        for optimizer in optimizers:
            if isinstance(optimizer, FlatOptimizer):
                optimizer.param_groups[0]["lr"] = self.learning_rate(0.0)
        return [*optimizers, *(each for learner in self.side_learners for each in learner.optimizers(self, list(optimizers)))]

    def step(self, loss: Tensor, optimizer: Optimizer, name: str = "loss") -> Tensor:
        """Make one gradient step: backward, the mean over ranks, clipping to `max_grad_norm`. Returns the norm before clipping.

        Args:
            loss: a scalar.
            optimizer: whose parameters get gradients, and no others.
            name: what an error calls the loss.

        Raises:
            NotFiniteError: the loss or the norm is NaN or infinite, unless `on_nan` says to go on without this step.
        """
        guard = self.guard
        loss = guard.check_loss(name, loss)
        max_norm = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = gradient_step(loss, optimizer, self._scaler, max_norm, self.trainer.world_size, guard.passes)
        if guard.refused:
            at = f"at environment step {self.env_steps:,}, update {self.updates:,}"
            guard.refuse(norm, at, self.log_rows.recorded, getattr(self.dataset, "batch", ()))
        return norm

    def end_update(self, batch: Any) -> None:
        """Count an update, once per joint learning step; let reward signals and cloning learn, and call `on_update_end` of callbacks."""
        self.updates += 1
        for learner in self.side_learners:
            learner.end_update(self, batch)
        for callback in self._followers:
            callback.on_update_end(self.trainer, self)

    def record(self, **values: Metric) -> None:
        """Keep metrics of this iteration, logged as `train/<name>` (or as they are, with a group of their own before a slash): the mean of
        all values recorded under a name.

        A function is called only if this iteration may be logged.
        """
        self.log_rows.record(**values)

    def means_of_parts(self, weight: Tensor, **values: Tensor) -> dict[str, Tensor]:
        """Return the mean of values `[B, D]`, such as entropies, for each part of a Dict or Tuple action, as `train/<name>/<part>`."""
        distribution = self.network.distribution
        if not distribution.names:
            return {}
        means = {name: (weight.unsqueeze(-1) * distribution.leaf_sums(value.detach())).sum(0) for name, value in values.items()}
        return {f"train/{name}/{part}": mean[k] for name, mean in means.items() for k, part in enumerate(distribution.names)}

    def update_priorities(self, batch: Transition, errors: Tensor) -> None:
        """Hand the errors |δ| `[B]` of a batch to its buffer, which draws by them if it is prioritized."""
        assert isinstance(self.dataset, ReplayDataset)

        def finite() -> Tensor:
            numbers = errors.nan_to_num(0.0, 0.0, 0.0)
            return sequence_errors(numbers, batch.weight, len(batch.rows)) if len(batch.successor) else numbers

        self.dataset.buffer.update(batch.rows, finite)

    @contextmanager
    def learning(self, alone: bool = True) -> Iterator[None]:
        """Enter a context for updates, in which wide layers multiply faster where this processor loses no precision by it.

        Args:
            alone: whether no thread acts meanwhile, which would share that.
        """
        with matmul_precision(self._matmul) if alone else nullcontext():
            yield

    def mean_over_ranks(self, value: Tensor) -> float:
        """The mean of a number over all ranks, so that they decide alike."""
        return float(mean_over_ranks(value.detach()))
