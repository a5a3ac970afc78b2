"""Behavioral cloning: supervised learning of a policy from demonstrations (Pomerleau 1989, ALVINN)."""

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
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import OrPlain, Range, as_integer
from lightning_rl.spaces import short
from lightning_rl.training.experience import demonstrations
from lightning_rl.training.settings import NoRewardFields
from lightning_rl.training.side_learners import imitate


@dataclass(kw_only=True, eq=False, repr=False)
class Imitation(NoRewardFields, Algorithm):
    """The policy and the imitation loss that `BehavioralCloning` and `DAgger` share.

    The network is the same as for PPO and A2C, which can start from its weights (`--init_from`); its value function is not trained here.

    Metrics: `train/loss`, `train/entropy`. For choices `train/accuracy` (the most likely one is the demonstrated one) and
    `train/action_rank` (number of choices more likely than that, 0 is best), with more than 10 choices `train/top_5_accuracy`, and with
    more than 20 `train/top_10_accuracy`. For Box actions `train/mean_abs_deviation` (of the mean, in the environment's units). For each
    part of a Dict or Tuple action `train/loss/<part>`.
    """

    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = None
    """Clip gradients to this Euclidean norm; null: no clipping."""
    loss: Literal["nll", "mse"] = "nll"
    """Loss of Box actions: `nll`, −log π(a|s), or `mse`, squared error of the mean, which does not train σ. Choices use cross-entropy."""
    label_smoothing: Annotated[float, Range(0, 1)] = 0.0
    """Fraction of a demonstrated choice's probability that is spread evenly over all legal choices."""
    ent_coef: ScheduleSetting = 0.0
    """Weight of the entropy bonus."""
    share_encoder: bool | None = None
    """Share encoder and memory between policy and value; null: yes, unless there is a memory."""
    action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal"
    """Distribution of Box actions: `clipped_normal` or `tanh_normal`."""
    log_std_init: float = 0.0
    """Initial log σ of Box actions."""

    gamma: float = field(init=False, default=0.0)
    self_play: OrPlain[SelfPlayConfig | None] = field(init=False, default=None)

    losses = ("imitation_loss",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.network: ActorCritic = ActorCritic(
            self.spaces,
            **self.network_settings,
            share_encoder=self.share_encoder,
            action_dist=self.action_dist,
            log_std_init=self.log_std_init,
        )
        if self.loss == "mse" and all(leaf.sizes for leaf in self.network.distribution.leaves()):
            raise SettingError(f"loss mse is for Box actions, not for {short(self.spaces.action)}; leave it out")

    def learn(self, batch: DemonstrationBatch) -> None:
        """Make a gradient step."""
        loss, metrics = self.imitation_loss(batch, self.ent_coef)
        self.record(grad_norm=self.step(loss, self.own_optimizers[0]))
        self.record(**{f"train/{name}": value for name, value in metrics.items()})
        self.end_update(batch)

    def imitation_loss(self, batch: DemonstrationBatch, ent_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return L = Σ over parts of −log π(a|s), or (μ − a)² for Box, − ent_coef · H, averaged over rows, and metrics."""
        x, _ = self.network.policy(batch.obs, (), batch.episode_start)
        distribution = self.network.distribution
        cost, near = imitate(distribution, x, batch.action, batch.action_mask, self.loss, self.label_smoothing)
        _, entropy = distribution.evaluate(x, batch.action, batch.action_mask)
        parts = dict(zip((f"loss/{name}" for name in distribution.names), distribution.leaf_sums(cost).unbind(-1), strict=False))
        metrics = {name: mean(values, batch.weight) for name, values in {"entropy": entropy.sum(-1), **near, **parts}.items()}
        loss = mean(cost.sum(-1), batch.weight) - scaled(ent_coef, metrics["entropy"])
        return loss, {"loss": loss, **metrics}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledAdam(self.network))


@dataclass(kw_only=True, eq=False, repr=False)
class BehavioralCloning(Imitation):
    """Maximize the likelihood of demonstrated actions. The environment is only used for evaluation; a run counts updates.

    Each evaluation also computes the loss on the demonstrations held out for validation.

    Metrics: `train/loss`, `train/entropy`. For choices `train/accuracy` (the most likely one is the demonstrated one) and
    `train/action_rank` (number of choices more likely than that, 0 is best), with more than 10 choices `train/top_5_accuracy`, and with
    more than 20 `train/top_10_accuracy`. For Box actions `train/mean_abs_deviation` (of the mean, in the environment's units). For each
    part of a Dict or Tuple action `train/loss/<part>`. With each evaluation, the same metrics of held-out demonstrations as `val/…`.
    `train/epochs` counts passes over the demonstrations; `time/fps` counts updates.
    """

    dataset: OrPlain[str]  # type: ignore[assignment]  # during a run, the demonstrations themselves
    """Name of the demonstrations, such as `cartpole/expert-v0`; in Python also a list of demonstrations."""
    max_updates: Annotated[int, Range(1, 2**53)] = 10_000
    """Length of the run in gradient steps; schedules, rows of metrics, evaluations and checkpoints follow this count."""
    batch_size: int = 100
    """Rows of a minibatch, or all if there are fewer; with a memory, they form sequences of its sequence_length."""
    updates_per_iteration: int = 50
    """Gradient steps per iteration, after which the run may log, evaluate, save or stop."""
    learning_rate: ScheduleSetting = 1e-3
    """Step size of the optimizer."""
    validation_fraction: float = 0.2
    """Maximum fraction of all steps that is held out for validation, in whole episodes."""
    split_seed: int = 0
    """Seed of the choice of these episodes."""
    normalize_obs: str = "off"
    """Normalize observations by the statistics of the training demonstrations (`running` and `frozen` are the same here), or `off`."""

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
        """Return the metrics of held-out demonstrations, as `val/<name>`."""
        total: dict[str, float] = defaultdict(float)
        data: Any = self.dataset
        for count, batch in data.validation():
            for name, value in self.imitation_loss(batch, self.ent_coef)[1].items():
                total[f"val/{name}"] += float(value) * count / data.held.num_rows
        return dict(total)
