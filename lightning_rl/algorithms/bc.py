"""Behavioural cloning: learning to act from demonstrations, by supervision (Pomerleau 1989, ALVINN)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.experience import demonstrations
from lightning_rl.algorithms.imitation import imitate
from lightning_rl.data.demonstration_dataset import DemonstrationDataset, DemonstrationSettings
from lightning_rl.data.demonstrations import DemonstrationBatch
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_choice, check_range
from lightning_rl.losses.policy_gradient import mean, scaled
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.flat import FlatAdam
from lightning_rl.schedules import ScheduleSetting, make_schedule
from lightning_rl.spaces import short


class BehavioralCloning(Algorithm):
    """Make what demonstrations did likely. The environment is only for evaluation; a run counts updates.

    The network is that of PPO and A2C, so that they can begin with it (`--init_from`); its value function does not learn here. Each
    evaluation also judges the demonstrations that are held back.

    Args:
        dataset: demonstrations by their name, such as `cartpole/expert-v0`; from Python also a list of them.
        max_updates: length of the run in gradient steps; schedules, rows, evaluations and checkpoints go by them.
        batch_size: rows of a minibatch, with a memory in sequences of its sequence_length; all where there are fewer.
        updates_per_iteration: gradient steps between two looks at whether to log, evaluate, save or stop.
        learning_rate: step size of the optimizer, a number or a schedule.
        max_grad_norm: cut gradients to this Euclidean norm; null leaves them.
        loss: of Box actions: `nll`, −log π(a|s), or `mse`, the squared error of the mean, which leaves σ; choices have cross-entropy.
        label_smoothing: share of a demonstrated choice's probability that is spread evenly over all legal choices.
        ent_coef: weight of the entropy bonus, a number or a schedule.
        validation_fraction: the most of all steps that is held back for validation, in whole episodes.
        split_seed: of the draw of these episodes.
        normalize_obs: by the statistics of what is learned from: `running` and `frozen` alike; or `off`.
        share_encoder: policy and value share encoder and memory; null: if without memory.
        action_dist: for Box actions, `clipped_normal` or `tanh_normal`.
        log_std_init: first log σ of Box actions.

    Metrics: `train/loss`, `train/entropy`, of choices `train/accuracy` (the most likely one is the demonstrated one) and
    `train/action_rank` (choices more likely than that, 0 is best), with more than 10 of them `train/top_5_accuracy`, with more than 20
    `train/top_10_accuracy`, of Box actions `train/mean_abs_deviation` (of the mean, in the environment's units), `train/epochs`, for each
    part of a Dict or Tuple action `train/loss/<part>`, and with each evaluation the first ones as `val/…`. `time/fps` counts updates.
    """

    dataset: DemonstrationDataset
    counter = "updates"
    without = (
        *("max_env_steps", "gamma", "normalize_obs_steps", "normalize_reward", "clip_reward", "reward_scale"),
        *("reward_signals", "reward_signal_steps_per_update", "behavioral_cloning"),
    )

    def __init__(
        self,
        env: EnvConfig,
        *,
        dataset: str,
        max_updates: int = 10_000,
        batch_size: int = 100,
        updates_per_iteration: int = 50,
        learning_rate: ScheduleSetting = 1e-3,
        max_grad_norm: float | None = None,
        loss: Literal["nll", "mse"] = "nll",
        label_smoothing: float = 0.0,
        ent_coef: ScheduleSetting = 0.0,
        validation_fraction: float = 0.2,
        split_seed: int = 0,
        share_encoder: bool | None = None,
        action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal",
        log_std_init: float = 0.0,
        **common: Any,
    ) -> None:
        check_range("max_updates", max_updates, 1, 2**53, whole=True)
        super().__init__(
            env,
            max_env_steps=max_updates,
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
            gamma=0.0,
            normalize_obs_steps=1,
            normalize_reward=False,
            clip_reward=None,
            reward_scale=1.0,
            reward_signals=None,
            reward_signal_steps_per_update=None,
            behavioral_cloning=None,
            **common,
        )
        check_choice("loss", loss, ("nll", "mse"))
        check_range("label_smoothing", label_smoothing, 0, 1)
        length = 1 if self.memory is None else self.memory.sequence_length
        self.settings = DemonstrationSettings(batch_size, updates_per_iteration, max_updates, validation_fraction, split_seed, length)
        self.source, self.max_updates = dataset, max_updates
        self.box_loss, self.label_smoothing, self.ent_coef = loss, label_smoothing, make_schedule("ent_coef", ent_coef)
        self.network = ActorCritic(
            self.spaces, **self.network_settings, share_encoder=share_encoder, action_dist=action_dist, log_std_init=log_std_init
        )
        if loss == "mse" and all(leaf.sizes for leaf in self.network.distribution.leaves()):
            raise SettingError(f"loss mse is for Box actions, not for {short(self.spaces.action)}; leave it out")

    @property
    def num_envs(self) -> int:
        """None is stepped: the state of a run does not depend on it."""
        return 1

    def experience(self) -> DemonstrationDataset:
        return demonstrations(self, self.source, self.settings)

    def look_around(self) -> None:
        self.network.normalizer.update(self.dataset.learned.rows.obs)

    def training_step(self, batches: Iterator[DemonstrationBatch], batch_idx: int) -> None:
        optimizer = self.raw_optimizers()[0]
        with self.learning():
            for batch in batches:
                loss, metrics = self.loss(batch, self.ent_coef(self.progress))
                self.record(grad_norm=self.step(loss, optimizer))
                self.record(**{f"train/{name}": value for name, value in metrics.items()})
                self.end_update(batch)

    def loss(self, batch: DemonstrationBatch, ent_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        """L = Σ over parts of −log π(a|s), or (μ − a)² of Box, − ent_coef · H, the mean over rows, and what is logged of it."""
        x, _ = self.network.policy(batch.obs, (), batch.episode_start)
        distribution = self.network.distribution
        cost, near = imitate(distribution, x, batch.action, batch.action_mask, self.box_loss, self.label_smoothing)
        _, entropy = distribution.evaluate(x, batch.action, batch.action_mask)
        parts = dict(zip((f"loss/{name}" for name in distribution.names), distribution.leaf_sums(cost).unbind(-1), strict=False))
        metrics = {name: mean(each, batch.weight) for name, each in {"entropy": entropy.sum(-1), **near, **parts}.items()}
        loss = mean(cost.sum(-1), batch.weight) - scaled(ent_coef, metrics["entropy"])
        return loss, {"loss": loss, **metrics}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """The same of the demonstrations that are held back, as `val/<name>`."""
        total: dict[str, float] = defaultdict(float)
        for count, batch in self.dataset.validation():
            for name, value in self.loss(batch, self.ent_coef(self.progress))[1].items():
                total[f"val/{name}"] += float(value) * count / self.dataset.held.num_rows
        return dict(total)

    def in_short(self) -> str:
        losses: Any = self.log_rows.recorded.get("train/loss")
        return f"loss {float(losses[-1]):.3g}" if losses else "loss –"

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(FlatAdam(self.network))
