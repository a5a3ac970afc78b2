"""Behavioural cloning: learning to act from demonstrations, by supervision (Pomerleau 1989, ALVINN)."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.demonstrations import DemonstrationBatch, DemonstrationDataset, DemonstrationSettings
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.errors import SettingError
from lightning_rl.losses.policy_gradient import mean, scaled
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.optimization import FlatAdam
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.spaces import short
from lightning_rl.training.arguments import Range, as_integer
from lightning_rl.training.experience import demonstrations
from lightning_rl.training.settings import NoRewardFields
from lightning_rl.training.side_learners import imitate


@dataclass(kw_only=True, eq=False, repr=False)
class Imitation(NoRewardFields, Algorithm):
    """A policy that is shown what to do, and the loss of doing something else: of `BehavioralCloning` and `DAgger`.

    The network is that of PPO and A2C, so that they can begin with it (`--init_from`); its value function does not learn here.

    Metrics: `train/loss`, `train/entropy`, of choices `train/accuracy` (the most likely one is the demonstrated one) and
    `train/action_rank` (choices more likely than that, 0 is best), with more than 10 of them `train/top_5_accuracy`, with more than 20
    `train/top_10_accuracy`, of Box actions `train/mean_abs_deviation` (of the mean, in the environment's units), for each part of a Dict or
    Tuple action `train/loss/<part>`.
    """

    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = None
    """Cut gradients to this Euclidean norm; null leaves them."""
    loss: Literal["nll", "mse"] = "nll"
    """Of Box actions: `nll`, −log π(a|s), or `mse`, the squared error of the mean, which leaves σ; choices have cross-entropy."""
    label_smoothing: Annotated[float, Range(0, 1)] = 0.0
    """Share of a demonstrated choice's probability that is spread evenly over all legal choices."""
    ent_coef: ScheduleSetting = 0.0
    """Weight of the entropy bonus."""
    share_encoder: bool | None = None
    """Policy and value share encoder and memory; null: if without memory."""
    action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """For Box actions, `clipped_normal` or `tanh_normal`."""
    log_std_init: float = 0.0
    """First log σ of Box actions."""

    gamma: float = field(init=False, default=0.0)
    self_play: SelfPlayConfig | None = field(init=False, default=None)

    losses = ("imitation_loss",)

    def __post_init__(self) -> None:
        super().__post_init__()
        own: dict[str, Any] = {"share_encoder": self.share_encoder, "action_dist": self.action_dist, "log_std_init": self.log_std_init}
        self.network = ActorCritic(self.spaces, **self.network_settings, **own)
        if self.loss == "mse" and all(leaf.sizes for leaf in self.network.distribution.leaves()):
            raise SettingError(f"loss mse is for Box actions, not for {short(self.spaces.action)}; leave it out")

    def learn(self, batch: DemonstrationBatch) -> None:
        """Make a gradient step."""
        loss, metrics = self.imitation_loss(batch, self.ent_coef)
        self.record(grad_norm=self.step(loss, self.own_optimizers[0]))
        self.record(**{f"train/{name}": value for name, value in metrics.items()})
        self.end_update(batch)

    def imitation_loss(self, batch: DemonstrationBatch, ent_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return L = Σ over parts of −log π(a|s), or (μ − a)² of Box, − ent_coef · H, the mean over rows, and metrics."""
        x, _ = self.network.policy(batch.obs, (), batch.episode_start)
        distribution = self.network.distribution
        cost, near = imitate(distribution, x, batch.action, batch.action_mask, self.loss, self.label_smoothing)
        _, entropy = distribution.evaluate(x, batch.action, batch.action_mask)
        parts = dict(zip((f"loss/{name}" for name in distribution.names), distribution.leaf_sums(cost).unbind(-1), strict=False))
        metrics = {name: mean(each, batch.weight) for name, each in {"entropy": entropy.sum(-1), **near, **parts}.items()}
        loss = mean(cost.sum(-1), batch.weight) - scaled(ent_coef, metrics["entropy"])
        return loss, {"loss": loss, **metrics}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(FlatAdam(self.network))


@dataclass(kw_only=True, eq=False, repr=False)
class BehavioralCloning(Imitation):
    """Make what demonstrations did likely. The environment is only for evaluation; a run counts updates.

    Each evaluation also judges the demonstrations that are held back.

    Metrics: `train/loss`, `train/entropy`, of choices `train/accuracy` (the most likely one is the demonstrated one) and
    `train/action_rank` (choices more likely than that, 0 is best), with more than 10 of them `train/top_5_accuracy`, with more than 20
    `train/top_10_accuracy`, of Box actions `train/mean_abs_deviation` (of the mean, in the environment's units), `train/epochs`, for each
    part of a Dict or Tuple action `train/loss/<part>`, and with each evaluation the first ones as `val/…`. `time/fps` counts updates.
    """

    dataset: str  # type: ignore[assignment]  # and the demonstrations themselves while a run lasts
    """Demonstrations by their name, such as `cartpole/expert-v0`; from Python also a list of them."""
    max_updates: Annotated[int, Range(1, 2**53)] = 10_000
    """Length of the run in gradient steps; schedules, rows, evaluations and checkpoints go by them."""
    batch_size: int = 100
    """Rows of a minibatch, with a memory in sequences of its sequence_length; all where there are fewer."""
    updates_per_iteration: int = 50
    """Gradient steps between two looks at whether to log, evaluate, save or stop."""
    learning_rate: ScheduleSetting = 1e-3
    """Step size of the optimizer."""
    validation_fraction: float = 0.2
    """The most of all steps that is held back for validation, in whole episodes."""
    split_seed: int = 0
    """Of the draw of these episodes."""
    normalize_obs: str = "off"
    """By the statistics of what is learned from: `running` and `frozen` alike; or `off`."""

    max_env_steps: int = field(init=False)
    normalize_obs_steps: int = field(init=False, default=1)

    counter = "updates"

    def __post_init__(self) -> None:
        self.source, self.max_env_steps = self.dataset, as_integer(self.max_updates)
        super().__post_init__()
        length = 1 if self.memory is None else self.memory.sequence_length
        self.settings = DemonstrationSettings(
            self.batch_size, self.updates_per_iteration, self.max_updates, self.validation_fraction, self.split_seed, length
        )

    @property
    def num_envs(self) -> int:
        """Return 1: no environment is stepped."""
        return 1

    @property
    def planned_updates(self) -> int:
        return self.max_updates

    def experience(self) -> DemonstrationDataset:
        return demonstrations(self, self.source, self.settings)

    def warm_up(self) -> None:
        data: Any = self.dataset
        self.network.normalizer.update(data.learned.rows.obs)

    def training_step(self, batches: Iterator[DemonstrationBatch], batch_idx: int) -> None:
        for batch in batches:
            self.learn(batch)

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return the metrics of demonstrations that are held back, as `val/<name>`."""
        total: dict[str, float] = defaultdict(float)
        data: Any = self.dataset
        for count, batch in data.validation():
            for name, value in self.imitation_loss(batch, self.ent_coef)[1].items():
                total[f"val/{name}"] += float(value) * count / data.held.num_rows
        return dict(total)
