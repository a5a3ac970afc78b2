"""The base of every algorithm: what Lightning needs, said once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from torch import Generator, Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.algorithms.cloning import CloningConfig, make_cloning
from lightning_rl.algorithms.experience import replay, rollouts
from lightning_rl.algorithms.loading import load, stored_name
from lightning_rl.algorithms.optimization import best_matmul, gradient_step, matmul_precision
from lightning_rl.algorithms.run_log import Metric, RunLog
from lightning_rl.algorithms.run_state import continue_run, run_states
from lightning_rl.algorithms.settings import complete_settings, plain, remember_arguments
from lightning_rl.algorithms.side_learner import SignalLearner
from lightning_rl.callbacks.iteration import CloseEnvironments, EndIteration
from lightning_rl.callbacks.preemption import any_rank_asked, stop_asked
from lightning_rl.callbacks.target_update import TargetNetworkUpdate
from lightning_rl.data.collector import Collector
from lightning_rl.data.dataset import ExperienceDataset
from lightning_rl.data.priorities import sequence_errors
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.data.replay_dataset import ReplayDataset, ReplaySettings
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.distributions import Distribution
from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.envs.make import probe_spaces
from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.guards import ON_NAN, Guard
from lightning_rl.networks.memory import Memory, as_memory
from lightning_rl.rewards.settings import make_signals
from lightning_rl.schedules import ScheduleSetting, make_schedule
from lightning_rl.spaces import Spaces
from lightning_rl.spaces import to_plain as space_to_plain
from lightning_rl.types import Experience, Rollout, Transition, Tree, tree_map

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class Algorithm(pl.LightningModule):
    """A reinforcement-learning algorithm: which networks, which experience, which loss. One batch is one iteration.

    Subclasses build `self.network` in `__init__` and define `experience`, `training_step`, `loss` and `configure_optimizers`.

    Args:
        env: the environment: settings or, from Python, an id, a ready vector environment, or a function that builds one environment.
        max_env_steps: length of the run in environment steps, all ranks together; schedules run over it.
        learning_rate: step size of the optimizer, a number or a schedule.
        gamma: discount of the environment's reward.
        max_grad_norm: cut gradients to this Euclidean norm; null leaves them.
        net_arch: widths of the hidden layers.
        activation: of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu.
        encoder: for images: auto, mlp, simple, nature_cnn, resnet, match3 or fully_connected.
        encoder_features: width of an image encoder's output.
        entities: observations `Box(max_n, features)` that are sets of entities, by name: the path in the observation space such as
            `robot.arm`. An entity whose squares sum to less than 0.01 is padding.
        goals: observations that tell the goal, by name: the last hidden layer gets its weights from them.
        normalize_obs: `running` statistics, `frozen` ones of random steps before learning, or `off`.
        normalize_obs_steps: how many random environment steps `frozen` takes; they count as environment steps.
        normalize_reward: divide rewards by the running standard deviation of the discounted return.
        clip_reward: cut rewards to [-clip_reward, clip_reward] for learning; null leaves them.
        reward_scale: factor on rewards for learning.
        reward_signals: what the policy is paid for, a name → settings each: extrinsic (the environment's reward), curiosity, rnd, gail; see
            `rewards/`. `extrinsic: null` leaves the environment's reward out.
        reward_signal_steps_per_update: environment steps for one update of the signals that learn; one beside each update unless given.
        behavioral_cloning: gradient steps of the policy towards demonstrations beside all that, see `algorithms/cloning.py`.
        memory: what networks remember with, LSTM or GRU, see `networks/memory.py`; nothing unless given.
        log_interval: environment steps between two rows in the loggers; 1 % of the run unless given.
        on_nan: what to do about a number that is none or infinite: `raise`, `skip_update` or `restore_last`, see `guards.py`.
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
        self.on_nan = on_nan
        self.guard = Guard(on_nan)
        self.automatic_optimization = False
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
        self.num_optimizers: int | None = None
        self.env_steps = self.updates = self.episodes = 0
        self.progress, self.began_at = 0.0, 0
        self.dataset: ExperienceDataset | None = None
        self.ranks: list[dict[str, Any]] = []
        self.saves_run = True
        """Whether checkpoints hold the run too, and not only what was learned."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = remember_arguments(cls.__init__)  # type: ignore[method-assign]

    # ---------------------------------------------------------------- for algorithms

    network: Any
    target_update: TargetNetworkUpdate | None = None
    """How target networks follow, if there are any."""
    target_networks: list[tuple[torch.nn.Module, torch.nn.Module]]
    """Pairs of an online network and its target."""
    gamma: Tensor
    ignore_done: Tensor
    generator: Generator
    seed: int
    counter = "env_steps"
    """What a run goes by, up to `max_<counter>`: its schedules, rows, evaluations and checkpoints."""
    without: tuple[str, ...] = ()
    """Settings of this base that mean nothing to a subclass."""

    @property
    def count(self) -> int:
        """How far the run is, all ranks together."""
        return int(getattr(self, self.counter))

    @property
    def length(self) -> int:
        """How far it goes."""
        return int(getattr(self, f"max_{self.counter}"))

    @property
    def counted(self) -> str:
        """What is counted, in words."""
        return self.counter.replace("env_", "environment ")

    def experience(self) -> ExperienceDataset:
        """Which experience: the dataset whose items are iterations."""
        raise NotImplementedError

    def collect(self, n_steps: int, log_probs: bool = True) -> RolloutDataset:
        """On-policy experience: rollouts of `n_steps` steps from each environment, with the newest weights."""
        return rollouts(self, n_steps, log_probs)

    def replay(self, settings: ReplaySettings, config: ReplayConfig) -> ReplayDataset:
        """Off-policy experience: iterations of acting and learning in turn, from a buffer."""
        return replay(self, settings, config)

    @property
    def collector(self) -> Collector | None:
        """What steps the environments of a run."""
        return None if self.dataset is None else self.dataset.collector

    @property
    def num_envs(self) -> int:
        """How many environments step at once."""
        return getattr(self.env, "num_envs", 8)

    def prepare(self, rollout: Rollout) -> tuple[Rollout, Tensor]:
        """Fill the reward streams. Returns the rollout and its discount, γ · bootstrap, both `[T, N, S]`."""
        signals: Any = self.reward_signals.values()
        for signal in signals:
            signal.gather(rollout)
        paid = rollout.reward.squeeze(-1)
        experience = Experience(rollout.obs, rollout.action, rollout.next_obs, paid, rollout.terminated)
        reward = torch.stack([signal(experience) for signal in signals], -1)
        for k, name in enumerate(self.reward_signals if len(signals) > 1 else ()):
            self.record(**{f"rewards/{name}": reward[..., k][rollout.valid].mean()})
        over = rollout.terminated.unsqueeze(-1) & ~self.ignore_done
        return rollout._replace(reward=reward), self.gamma * ~over

    def with_side_learners(self, *optimizers: Optimizer) -> list[Optimizer]:
        """The optimizers of an algorithm, and behind them those of what learns beside it."""
        self.num_optimizers = len(optimizers)
        return [*optimizers, *(each for learner in self.side_learners for each in learner.optimizers(self, list(optimizers)))]

    def raw_optimizers(self) -> list[Optimizer]:
        """The algorithm's optimizers without Lightning's wrappers, whose every step would count as a `global_step`."""
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        return optimizers[: self.num_optimizers]

    def step(self, loss: Tensor, optimizer: Optimizer) -> Tensor:
        """One gradient step: backward, the mean over ranks, clipping to `max_grad_norm`. Returns the norm before clipping.

        Raises:
            NotFiniteError: the loss or the norm is infinite or not a number, unless `on_nan` says to go on without this step.
        """
        guard = self.guard
        norm = gradient_step(loss, optimizer, self._scaler, self.max_grad_norm, self.trainer.world_size, guard.passes)
        if guard.refused:
            at = f"at environment step {self.env_steps:,}, update {self.updates:,}"
            guard.refuse(norm, at, self.log_rows.recorded, getattr(self.dataset, "batch", ()))
        return norm

    def validate(self) -> dict[str, float]:
        """What else to judge with an evaluation, by data that is not learned from; the same on all ranks."""
        return {}

    def in_short(self) -> str:
        """How it goes, for the progress bar."""
        assert self.collector is not None
        mean = self.collector.statistics.metrics().get("rollout/ep_rew_mean")
        return "return –" if mean is None else f"return {mean:.1f}"

    def end_update(self, batch: Any) -> None:
        """Once per joint learning step: count it, let others learn beside it, tell the callbacks that follow updates."""
        self.updates += 1
        for learner in self.side_learners:
            learner.end_update(self, batch)
        for callback in self._followers:
            callback.on_update_end(self.trainer, self)

    def record(self, **values: Metric) -> None:
        """Keep metrics of this iteration, logged as `train/<name>` (or as they are, with a group of their own before a slash): the mean of
        all values recorded under a name.

        A function is called only if this iteration is logged.
        """
        self.log_rows.record(**values)

    def record_parts(self, weight: Tensor, **values: Tensor) -> None:
        """Of a Dict or Tuple action, keep the mean of values `[B, D]`, such as entropies, for each part, as `train/<name>/<part>`."""
        distribution = self.network.distribution
        for k, part in enumerate(distribution.names):
            for name, value in values.items():
                self.record(**{f"train/{name}/{part}": partial(_leaf_mean, distribution, value.detach(), weight, k)})

    def say(self, text: str) -> None:
        """One line for the user, from one rank."""
        if self.global_rank == 0:
            getattr(self.trainer, "say", print)(text)

    def finite(self, name: str, loss: Tensor) -> Tensor:
        """The loss, by its name, on its way to `step`, which does what `on_nan` says if it is infinite or not a number."""
        return self.guard.check_loss(name, loss)

    def learned(self, batch: Transition, errors: Callable[[], Tensor]) -> None:
        """A batch's errors |δ| `[B]`, which only a buffer that draws by them asks for."""
        assert isinstance(self.dataset, ReplayDataset)

        def finite() -> Tensor:
            numbers = errors().nan_to_num(0.0, 0.0, 0.0)
            return sequence_errors(numbers, batch.weight, len(batch.rows)) if len(batch.successor) else numbers

        self.dataset.buffer.update(batch.rows, finite)

    def _unless_given(self, callback: pl.Callback) -> list[pl.Callback]:
        """The callback, unless the Trainer has one of its kind."""
        trainer: Any = self.trainer
        return [] if any(isinstance(each, type(callback)) for each in trainer.callbacks) else [callback]

    def fast_matmul(self) -> AbstractContextManager[None]:
        """A context for updates in which wide layers multiply faster, where this processor loses nothing by it."""
        return matmul_precision(self._matmul)

    def mean_over_ranks(self, value: Tensor) -> float:
        """The mean of a number over all ranks, so that they decide alike."""
        return float(self.trainer.strategy.reduce(value.detach(), reduce_op="mean"))

    @property
    def finished(self) -> bool:
        """Whether the run has its length."""
        return self.count >= self.length

    # ---------------------------------------------------------------- Lightning's hooks, in their order

    def train_dataloader(self) -> ExperienceDataset:
        self.dataset = self.experience()
        for learner in self.side_learners:
            learner.begin(self)
        return self.dataset

    def on_train_start(self) -> None:
        assert self.collector is not None
        self._scaler = getattr(self.trainer.precision_plugin, "scaler", None) or GradScaler(enabled=False)
        trainer: Any = self.trainer
        self.guard = self.collector.guard = Guard(self.on_nan, getattr(trainer, "run_folder", None), trainer.world_size)
        self.guard.begin(self, self.raw_optimizers())
        self._followers = [callback for callback in trainer.callbacks if hasattr(callback, "on_update_end")]
        self._matmul = best_matmul(self.modules(), self.device)
        self.noise = self.generator if self.device.type == "cpu" else Generator(self.device).manual_seed(self.seed)
        self.log_rows.start(self.count)
        if self.count:
            continue_run(self)
        self._counted_rows = self.collector.rows
        if not self.count:
            self.look_around()
        for callback in trainer.callbacks if self.count else []:
            if hasattr(callback, "on_run_continued"):
                callback.on_run_continued(trainer, self)
        trainer.should_stop = self.finished or any_rank_asked(trainer)

    def look_around(self) -> None:
        """Before a run's first iteration: the statistics that `normalize_obs: frozen` keeps, unless another run's came with its weights."""
        if self.normalize_obs == "frozen" and self.network.normalizer.is_new:
            assert self.collector is not None
            steps = self.normalize_obs_steps // self.trainer.world_size
            stop = partial(stop_asked, self.trainer) if self.trainer.world_size == 1 else lambda: False
            self.network.normalizer.update(self.collector.random_steps(steps, stop))
            self._count()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """An iteration begins: everything that is scheduled takes its value for it."""
        assert self.dataset is not None
        self.log_rows.recorded.clear()
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()  # global_step counts iterations
        self.began_at = self.count
        self.progress = min(1.0, self.began_at / self.length)
        self._count()
        rate = self.learning_rate(self.progress)
        for optimizer in self.raw_optimizers():
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.dataset.begin_iteration(self.count, self.progress)

    def end_iteration(self) -> None:
        """After learning and before any callback: from here on logging, acting, judging and saving see the same counts and statistics."""
        assert self.dataset is not None
        for learner in self.side_learners:
            learner.end_iteration(self)
        self._count()
        collector = self.dataset.collector
        rollout = collector.rollout()
        self.network.normalizer.gather(rollout.obs, rollout.valid)
        self.dataset.end_iteration()
        self.guard.end_iteration()
        self._tell_notices()
        if self.log_rows.is_due(self.count) or self.finished:
            metrics = {**collector.metrics(), **self.dataset.metrics(), **self.guard.metrics()}
            metrics |= {"rollout/episodes": self.episodes} if collector.rows else {}
            metrics["train/n_updates"] = self.updates
            metrics["train/learning_rate"] = self.learning_rate(self.progress)
            self.log_rows.write(self.trainer, self, metrics)
        if self.finished:
            self.trainer.should_stop = True

    def transfer_batch_to_device(self, batch: Tree, device: torch.device, dataloader_idx: int) -> Tree:
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, batch)

    def configure_callbacks(self) -> list[pl.Callback]:
        """What learning itself needs, whatever Trainer runs it."""
        target_updates = [] if self.target_update is None else self._unless_given(self.target_update)
        return [*self._unless_given(CloseEnvironments()), *target_updates]

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        if trainer.precision not in PRECISIONS:
            raise SettingError(f"trainer.precision {trainer.precision}: returns need float32; use one of {', '.join(PRECISIONS)}")
        trainer.callbacks[:] = [EndIteration(), *(each for each in trainer.callbacks if not isinstance(each, EndIteration))]

    def teardown(self, stage: str) -> None:
        if self.dataset is not None:
            self._tell_notices()
            self.dataset.collector.close()
            self.dataset = None

    # ---------------------------------------------------------------- saving and loading

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lightning_rl"] = {
            "format_version": 1,
            "algorithm": stored_name(type(self)),
            "spaces": [space_to_plain(space) for space in self.spaces[:2]],
            "masked": self.spaces.masked,
            "env_steps": self.env_steps,
            "updates": self.updates,
            "episodes": self.episodes,
            "signal_updates": self.signal_learner.updates,
            "ranks": run_states(self) if self.saves_run and self.dataset is not None else [],
        }

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, map_location: Any = "cpu", **overrides: Any) -> Any:  # type: ignore[override]
        """The algorithm of a checkpoint, from the file alone; `overrides` are settings that win over the stored ones."""
        return load(checkpoint_path, cls, Algorithm, map_location, **overrides)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Count on where the checkpoint stood; a Trainer that continues its run gets everything else too, when training starts."""
        state = checkpoint["lightning_rl"]
        self.env_steps, self.updates, self.episodes = state["env_steps"], state["updates"], state["episodes"]
        self.signal_learner.updates = state.get("signal_updates", 0)
        self.ranks = [] if self._trainer is None else state.get("ranks", [])

    @property
    def own_state(self) -> dict[str, Any] | None:
        """What the checkpoint that is continued holds of this rank; None if it holds nothing, or has other ranks or environments."""
        fits = len(self.ranks) == self.trainer.world_size and self.ranks[self.global_rank]["num_envs"] == self.num_envs
        return self.ranks[self.global_rank] if fits else None

    # ---------------------------------------------------------------- inside

    def _tell_notices(self) -> None:
        """What befell the environments, and numbers that were none."""
        assert self.collector is not None
        for notice in (*self.collector.take_notices(), *self.guard.notices):
            self.say(notice)
        self.guard.notices.clear()

    def _count(self) -> None:
        """The counts of all ranks together, where there is something new; all decisions use these numbers."""
        assert self.collector is not None
        if self.collector.rows == self._counted_rows:  # on all ranks alike
            return
        self._counted_rows = self.collector.rows
        counts = self.collector.env_steps, self.collector.statistics.episodes
        if self.trainer.world_size > 1:
            total = torch.tensor([*counts, self.guard.error is not None], dtype=torch.float64, device=self.device)
            torch.distributed.all_reduce(total)
            self.guard.agree(bool(total[2]))
            counts = int(total[0]), int(total[1])
        self.env_steps, self.episodes = counts


def _leaf_mean(distribution: Distribution, value: Tensor, weight: Tensor, k: int) -> Tensor:
    """The mean over rows of leaf k of values `[B, D]`."""
    return (weight * distribution.leaf_sums(value)[:, k]).sum()


Algorithm.__init__ = remember_arguments(Algorithm.__init__)  # type: ignore[method-assign]
