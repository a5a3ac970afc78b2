"""The base of every algorithm: its settings, and what its losses and updates are made with. What Lightning calls is in `run.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.algorithms.cloning import CloningConfig, make_cloning
from lightning_rl.algorithms.experience import replay, rollouts
from lightning_rl.algorithms.loading import load
from lightning_rl.algorithms.optimization import gradient_step, matmul_precision
from lightning_rl.algorithms.run import Run
from lightning_rl.algorithms.run_log import Metric, RunLog
from lightning_rl.algorithms.settings import complete_settings, plain, remember_arguments
from lightning_rl.algorithms.side_learner import SignalLearner
from lightning_rl.data.priorities import sequence_errors
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.data.replay_dataset import ReplayDataset, ReplaySettings
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.envs.make import probe_spaces
from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.guards import ON_NAN, Guard
from lightning_rl.networks.flat import FlatOptimizer
from lightning_rl.networks.memory import Memory, as_memory
from lightning_rl.ranks import mean_over_ranks
from lightning_rl.rewards.settings import make_signals
from lightning_rl.schedules import ScheduleSetting, make_schedule
from lightning_rl.spaces import Spaces
from lightning_rl.types import Experience, Rollout, Transition


class Algorithm(Run):
    """A reinforcement-learning algorithm: which networks, which experience, which loss. One batch is one iteration.

    Subclasses build `self.network` in `__init__` and define `experience`, `training_step`, `loss` and `configure_optimizers`.

    Args:
        env: the environment: settings or, from Python, an id, a ready vector environment, or a function that builds one environment.
        max_env_steps: environment steps of the run, all ranks together; schedules run over it.
        learning_rate: step size of the optimizer, a number or a schedule.
        gamma: discount of the environment's reward.
        max_grad_norm: cut gradients to this Euclidean norm, or null.
        net_arch: widths of the hidden layers.
        activation: of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu.
        encoder: for images: auto, mlp, simple, nature_cnn, resnet, match3 or fully_connected.
        encoder_features: width of an image encoding.
        entities: observations `Box(max_n, features)` that are sets of entities, by name: the path in the observation space such as
            `robot.arm`. An entity whose squares sum to less than 0.01 is padding.
        goals: observations that tell the goal, by name: the last hidden layer gets its weights from them.
        normalize_obs: `running` statistics, `frozen` ones of random steps before learning, or `off`.
        normalize_obs_steps: random environment steps that `frozen` takes; they count.
        normalize_reward: divide rewards by the running standard deviation of the discounted return.
        clip_reward: cut rewards to this size for learning; null leaves them.
        reward_scale: factor on rewards.
        reward_signals: what the policy is paid for, a name → settings each: extrinsic (the environment's reward), curiosity, rnd, gail; see
            `rewards/`. null leaves a signal out, `extrinsic: null` the environment's reward.
        reward_signal_steps_per_update: environment steps for one update of the signals that learn; one beside each update unless given.
        behavioral_cloning: gradient steps of the policy towards demonstrations beside all that, see `algorithms/cloning.py`.
        memory: what networks remember with, LSTM or GRU, see `networks/memory.py`; nothing unless given.
        log_interval: environment steps between logged rows; 1 % of the run unless given.
        on_nan: what to do about NaN or infinity: `raise`, `skip_update` or `restore_last`, see `guards.py`.
        compile: `auto` computes losses of small networks in numpy, `true` compiles them, which takes seconds, `false` does neither.
        spaces: observation and action space, and whether the environment masks actions; probed from one environment unless given.

    Metrics: `rollout/ep_rew_mean` and `rollout/ep_len_mean` over the last 100 episodes, `time/fps` (environment steps per second since
    the last row), `time/iterations`, `train/n_updates` (gradient steps), `train/learning_rate`, and norms of gradients before clipping.
    """

    def __init__(
        self,
        env: EnvConfig,
        *,
        max_env_steps: int = 1_000_000,
        learning_rate: ScheduleSetting = 3e-4,
        gamma: float = 0.99,
        max_grad_norm: float | None = 0.5,
        net_arch: list[int] | None = None,
        activation: str = "tanh",
        encoder: str = "auto",
        encoder_features: int = 512,
        entities: list[str] | None = None,
        goals: list[str] | None = None,
        normalize_obs: str = "off",
        normalize_obs_steps: int = 10_000,
        normalize_reward: bool = False,
        clip_reward: float | None = None,
        reward_scale: float = 1.0,
        reward_signals: dict[str, Any] | None = None,
        reward_signal_steps_per_update: float | None = None,
        behavioral_cloning: CloningConfig | None = None,
        memory: Memory | None = None,
        log_interval: int | None = None,
        on_nan: Literal["raise", "skip_update", "restore_last"] = "raise",
        compile: bool | Literal["auto"] = "auto",
        spaces: Spaces | None = None,
    ) -> None:
        super().__init__()
        check_range("max_env_steps", max_env_steps, 1, whole=True)
        check_range("gamma", gamma, 0, 1)
        check_range("normalize_obs_steps", normalize_obs_steps, 1, whole=True)
        for name, value in {"max_grad_norm": max_grad_norm, "clip_reward": clip_reward, "log_interval": log_interval}.items():
            if value is not None:
                check_range(name, value, 0, open_low=True)
        check_range("reward_scale", reward_scale, -1e9, 1e9)
        check_choice("on_nan", on_nan, ON_NAN)
        if compile != "auto" and not isinstance(compile, bool):
            raise SettingError(f"compile must be auto, true or false, got {compile!r}")
        if compile is True and memory is not None:
            raise SettingError(
                "compile does not go with memory: its sequences are cut where episodes begin, each time elsewhere; leave one out"
            )
        self.compiles, self.on_nan = compile, on_nan
        self.guard = Guard(on_nan)
        self.env = None if env is None and spaces is not None else as_config(env)
        self.spaces = spaces or probe_spaces(self.env)
        self.max_env_steps = max_env_steps
        self.learning_rate = make_schedule("learning_rate", learning_rate)
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self.log_rows = RunLog(log_interval or max(1, max_env_steps // 100))
        self.normalize_obs, self.normalize_obs_steps = normalize_obs, normalize_obs_steps
        self.memory = as_memory(memory)
        self.network_settings: dict[str, Any] = {
            "net_arch": [64, 64] if net_arch is None else net_arch,
            "activation": activation,
            "encoder": encoder,
            "encoder_features": encoder_features,
            "entities": [] if entities is None else entities,
            "goals": [] if goals is None else goals,
            "normalize_obs": normalize_obs,
            "memory": self.memory,
        }
        if reward_signal_steps_per_update is not None:
            check_range("reward_signal_steps_per_update", reward_signal_steps_per_update, 0, open_low=True)
        extrinsic = {"gamma": gamma, "scale": reward_scale, "clip": clip_reward, "normalize": normalize_reward}
        signals = make_signals(reward_signals, extrinsic, self.spaces, lambda: self.network.distribution)
        self.reward_signals = torch.nn.ModuleDict(signals)
        critic: dict[str, Any] = {name: value for name, value in self.network_settings.items() if name != "normalize_obs"}
        self.critic_settings = {**critic, "streams": len(signals)}
        self.register_buffer("gamma", torch.tensor([signal.gamma for signal in signals.values()]), persistent=False)
        self.register_buffer("ignore_done", torch.tensor([signal.ignore_done for signal in signals.values()]), persistent=False)
        self.save_hyperparameters(plain({**complete_settings(self), "env": self.env, "memory": self.memory}))
        self.signal_learner = SignalLearner(signals, reward_signal_steps_per_update)
        self.side_learners = [self.signal_learner, make_cloning(behavioral_cloning)]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = remember_arguments(cls.__init__)  # type: ignore[method-assign]

    target_networks: list[tuple[torch.nn.Module, torch.nn.Module]]
    """Pairs of an online network and its target."""
    gamma: Tensor
    ignore_done: Tensor
    losses: tuple[str, ...] = ("loss",)
    """The methods that `compile` compiles, in the order of their optimizers."""
    without: tuple[str, ...] = ()
    """Settings of this base that mean nothing to a subclass."""

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, map_location: Any = "cpu", **overrides: Any) -> Any:  # type: ignore[override]
        """The algorithm of a checkpoint, from the file alone; `overrides` are settings that win over the stored ones."""
        return load(checkpoint_path, cls, Algorithm, map_location, **overrides)

    def collect(self, n_steps: int, log_probs: bool = True, actors: ActorsConfig | None = None) -> RolloutDataset:
        """On-policy experience: rollouts of `n_steps` steps from each environment, with the newest weights or those that actors have."""
        return rollouts(self, n_steps, log_probs, actors)

    def replay(self, settings: ReplaySettings, config: ReplayConfig, actors: ActorsConfig | None = None) -> ReplayDataset:
        """Off-policy experience: iterations of acting and learning in turn, from a buffer; an actor may act meanwhile."""
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
        return rollout._replace(reward=reward), self.gamma * ~over

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
        norm = gradient_step(loss, optimizer, self._scaler, self.max_grad_norm, self.trainer.world_size, guard.passes)
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


Algorithm.__init__ = remember_arguments(Algorithm.__init__)  # type: ignore[method-assign]
