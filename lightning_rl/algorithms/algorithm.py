"""The base of every algorithm: what Lightning needs, said once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Generator, Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_rl.algorithms.loading import load, stored_name
from lightning_rl.algorithms.optimization import gradient_step
from lightning_rl.algorithms.settings import complete_settings, plain, remember_arguments
from lightning_rl.callbacks.iteration import CloseEnvironments, EndIteration
from lightning_rl.data.collector import Collector
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.envs.make import make_vector_env, probe_spaces
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.errors import SettingError, check_range
from lightning_rl.rewards.extrinsic import Extrinsic
from lightning_rl.schedules import ScheduleSetting, make_schedule
from lightning_rl.spaces import Spaces, single_spaces
from lightning_rl.spaces import to_plain as space_to_plain
from lightning_rl.types import Rollout, Tree, tree_map

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
        normalize_obs: `running` statistics, `frozen` ones of random steps before learning, or `off`.
        normalize_obs_steps: how many random environment steps `frozen` takes; they count as environment steps.
        normalize_reward: divide rewards by the running standard deviation of the discounted return.
        clip_reward: cut rewards to [-clip_reward, clip_reward] for learning; null leaves them.
        reward_scale: factor on rewards for learning.
        log_interval: environment steps between two rows in the loggers; 1 % of the run unless given.
        spaces: observation and action space; probed from one environment unless given.

    Metrics: `rollout/ep_rew_mean` and `rollout/ep_len_mean` over the last 100 episodes, `time/fps` (environment steps per second since
    the last row), `time/iterations`, `train/n_updates` (gradient steps), `train/learning_rate`, `train/grad_norm` (before clipping).
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
        normalize_obs: str = "off",
        normalize_obs_steps: int = 10_000,
        normalize_reward: bool = False,
        clip_reward: float | None = None,
        reward_scale: float = 1.0,
        log_interval: int | None = None,
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
        self.automatic_optimization = False
        self.env = None if env is None and spaces is not None else as_config(env)
        self.spaces = spaces or probe_spaces(self.env)
        self.max_env_steps = max_env_steps
        self.learning_rate = make_schedule("learning_rate", learning_rate)
        self.max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self.log_interval = log_interval or max(1, max_env_steps // 100)
        self.normalize_obs, self.normalize_obs_steps = normalize_obs, normalize_obs_steps
        self.network_settings: dict[str, Any] = {
            "net_arch": [64, 64] if net_arch is None else net_arch,
            "activation": activation,
            "encoder": encoder,
            "encoder_features": encoder_features,
            "normalize_obs": normalize_obs,
        }
        self.reward_signals = torch.nn.ModuleDict({"extrinsic": Extrinsic(gamma, reward_scale, clip_reward, normalize_reward)})
        self.register_buffer("gamma", torch.tensor([signal.gamma for signal in self.reward_signals.values()]), persistent=False)
        self.save_hyperparameters(plain({**complete_settings(self), "env": self.env}))
        self.env_steps = self.updates = self.episodes = 0
        self.progress = 0.0
        self.collector: Collector | None = None
        self.metrics: dict[str, list[Tensor | Callable[[], Tensor]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = remember_arguments(cls.__init__)  # type: ignore[method-assign]

    # ---------------------------------------------------------------- for algorithms

    network: Any
    gamma: Tensor

    def experience(self) -> RolloutDataset:
        """Which experience: the dataset whose items are iterations."""
        raise NotImplementedError

    def collect(self, n_steps: int, log_probs: bool = True) -> RolloutDataset:
        """Rollouts of `n_steps` steps from the environments, with the newest weights."""
        if self.env is None:
            raise SettingError("this algorithm was loaded without an environment; pass env= to train it")
        if self.collector is None:
            entropy = [torch.initial_seed(), self.global_rank, self.env_steps]  # a continued run draws on, it does not repeat
            self.seed = int(np.random.SeedSequence(entropy).generate_state(1)[0] // 2)
            self.generator = Generator().manual_seed(self.seed)
            stepper = make_stepper(make_vector_env(self.env), self.env if isinstance(self.env, EnvConfig) else None)
            if single_spaces(stepper.envs) != self.spaces:
                stepper.close()
                raise SettingError(f"the environment's spaces are not those of the model, {self.spaces}; load it with its own environment")
            self.collector = Collector(
                stepper, self.spaces, self.network, n_steps, self.seed, log_probs, self.trainer.precision_plugin.forward_context
            )
        steps = n_steps * self.collector.stepper.num_envs * self.trainer.world_size
        return RolloutDataset(self.collector, -(-self.max_env_steps // steps))

    @property
    def num_envs(self) -> int:
        """How many environments step at once."""
        return getattr(self.env, "num_envs", 8)

    def prepare(self, rollout: Rollout) -> tuple[Rollout, Tensor]:
        """Fill the reward streams. Returns the rollout and its discount, γ · bootstrap, both `[T, N, S]`."""
        reward = torch.cat([signal(rollout) for signal in self.reward_signals.values()], -1)
        return rollout._replace(reward=reward), self.gamma * ~rollout.terminated.unsqueeze(-1)

    def raw_optimizers(self) -> list[Optimizer]:
        """The optimizers without Lightning's wrappers, whose every step would count as a `global_step`."""
        optimizers: Any = self.optimizers(use_pl_optimizer=False)
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def step(self, loss: Tensor, optimizer: Optimizer) -> Tensor:
        """One gradient step: backward, the mean over ranks, clipping to `max_grad_norm`. Returns the norm before clipping."""
        return gradient_step(loss, optimizer, self._scaler, self.max_grad_norm, self.trainer.world_size)

    def end_update(self) -> None:
        """Once per joint learning step: count it and tell the callbacks that follow updates."""
        self.updates += 1
        for callback in self._followers:
            callback.on_update_end(self.trainer, self)

    def record(self, **values: Tensor | Callable[[], Tensor]) -> None:
        """Keep metrics of this iteration, logged as `train/<name>`: the mean of all values recorded under a name.

        A function is called only if this iteration is logged.
        """
        for name, value in values.items():
            self.metrics.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def mean_over_ranks(self, value: Tensor) -> float:
        """The mean of a number over all ranks, so that they decide alike."""
        return float(self.trainer.strategy.reduce(value.detach(), reduce_op="mean"))

    @property
    def finished(self) -> bool:
        """Whether the run has had its environment steps."""
        return self.env_steps >= self.max_env_steps

    # ---------------------------------------------------------------- Lightning's hooks, in their order

    def train_dataloader(self) -> RolloutDataset:
        return self.experience()

    def on_train_start(self) -> None:
        assert self.collector is not None
        self._scaler = getattr(self.trainer.precision_plugin, "scaler", None) or GradScaler(enabled=False)
        trainer: Any = self.trainer
        self._followers = [callback for callback in trainer.callbacks if hasattr(callback, "on_update_end")]
        if self.env_steps and self.global_rank == 0:  # continued: one rank brings what all ranks had
            self.collector.env_steps, self.collector.statistics.episodes = self.env_steps, self.episodes
        if self.normalize_obs == "frozen" and not self.env_steps:
            rows = self.collector.random_steps(self.normalize_obs_steps // self.trainer.world_size)
            self.network.normalizer.update(tree_map(lambda leaf: leaf.to(self.device), rows))
            self.env_steps = self._sum_over_ranks(self.collector.env_steps)[0]
        self._started = self._logged_at = time.monotonic()
        self._logged_env_steps = self.env_steps
        self.trainer.should_stop = self.finished

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Count the iteration and its environment steps; from here on all decisions use these numbers."""
        assert self.collector is not None
        self.metrics.clear()
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()  # global_step counts iterations
        self.progress = min(1.0, self.env_steps / self.max_env_steps)
        self.env_steps, self.episodes = self._sum_over_ranks(self.collector.env_steps, self.collector.statistics.episodes)
        rate = self.learning_rate(self.progress)
        for optimizer in self.raw_optimizers():
            for group in optimizer.param_groups:
                group["lr"] = rate

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.env_steps - self._logged_env_steps >= self.log_interval or self.finished:
            self._log()
        if self.finished:
            self.trainer.should_stop = True

    def end_iteration(self, batch: Any) -> None:
        """After learning from a batch and before any callback: from here on acting, judging and saving see the same statistics."""
        self.network.normalizer.gather(batch.obs, batch.valid)

    def transfer_batch_to_device(self, batch: Tree, device: torch.device, dataloader_idx: int) -> Tree:
        return tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch)

    def configure_callbacks(self) -> list[pl.Callback]:
        """What learning itself needs, whatever Trainer runs it."""
        return [CloseEnvironments()]

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        if trainer.precision not in PRECISIONS:
            raise SettingError(f"trainer.precision {trainer.precision}: returns need float32; use one of {', '.join(PRECISIONS)}")
        trainer.callbacks[:] = [EndIteration(), *(each for each in trainer.callbacks if not isinstance(each, EndIteration))]

    def teardown(self, stage: str) -> None:
        if self.collector is not None:
            self.collector.close()
            self.collector = None

    # ---------------------------------------------------------------- saving and loading

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["lightning_rl"] = {
            "algorithm": stored_name(type(self)),
            "spaces": [space_to_plain(space) for space in self.spaces],
            "env_steps": self.env_steps,
            "updates": self.updates,
            "episodes": self.episodes,
        }

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, map_location: Any = "cpu", **overrides: Any) -> Any:  # type: ignore[override]
        """The algorithm of a checkpoint, from the file alone; `overrides` are settings that win over the stored ones."""
        return load(checkpoint_path, cls, Algorithm, map_location, **overrides)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue counting where the checkpoint stood; the environments start new episodes."""
        state = checkpoint["lightning_rl"]
        self.env_steps, self.updates, self.episodes = state["env_steps"], state["updates"], state["episodes"]

    # ---------------------------------------------------------------- inside

    def _sum_over_ranks(self, *numbers: int) -> list[int]:
        if self.trainer.world_size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return [int(number) for number in total]

    def _log(self) -> None:
        """One row in the loggers, at x = env_steps."""
        assert self.collector is not None
        now = time.monotonic()
        metrics = {"env_steps": self.env_steps, **self.collector.statistics.metrics()}
        metrics["time/fps"] = (self.env_steps - self._logged_env_steps) / max(now - self._logged_at, 1e-9)
        metrics["time/time_elapsed"] = now - self._started
        metrics["time/iterations"] = self.trainer.global_step
        metrics["rollout/episodes"] = self.episodes
        metrics["train/n_updates"] = self.updates
        metrics["train/learning_rate"] = self.learning_rate(self.progress)
        for name, values in self.metrics.items():
            metrics[f"train/{name}"] = float(torch.stack([value if isinstance(value, Tensor) else value() for value in values]).mean())
        for logger in self.loggers:
            logger.log_metrics(metrics, step=self.env_steps)
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in metrics.items()})
        self._logged_at, self._logged_env_steps = now, self.env_steps


Algorithm.__init__ = remember_arguments(Algorithm.__init__)  # type: ignore[method-assign]
