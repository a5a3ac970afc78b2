"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)."""

from dataclasses import dataclass
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lightning_rl.actors.config import IN_A_THREAD
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.rollout import Batch, RolloutDataset, make_batch, minibatches
from lightning_rl.errors import SettingError
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.processes.ranks import mean_over_ranks
from lightning_rl.returns import explained_variance
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import ActorCriticFields, check_minibatches, check_n_steps, end_burn_in, make_actor_critic
from lightning_rl.types import Rollout


@dataclass(kw_only=True, eq=False, repr=False)
class PPO(ActorCriticFields, Algorithm):
    """Collect `n_steps` steps from each environment, then maximize the clipped surrogate for `n_epochs` over minibatches.

    Metrics: `train/policy_gradient_loss`, `train/value_loss`, `train/entropy_loss` (negative entropy), `train/approx_kl` (estimate of
    KL(π_old ‖ π)), `train/clip_fraction` (fraction of clipped ratios), `train/explained_variance` (of the returns by the values). For each
    part of a Dict or Tuple action, named by its path such as `arm.gripper`, also `train/entropy/<part>` and `train/log_prob/<part>`.
    """

    n_steps: Annotated[int, Range(1)] = 128
    """Steps per environment in a rollout."""
    batch_size: Annotated[int, Range(1)] = 256
    """Rows of a minibatch: a divisor of `n_steps * num_envs`; with a memory, a multiple of its sequence_length."""
    n_epochs: Annotated[int, Range(1)] = 4
    """Passes over a rollout."""
    gae_lambda: Annotated[float, Range(0, 1)] = 0.95
    """λ of generalized advantage estimation; 1 gives n-step returns."""
    clip_range: ScheduleSetting = 0.2
    """Clip range ε of the surrogate."""
    clip_range_vf: ScheduleSetting | None = None
    """Clip range of the value function around its old value; null: no clipping."""
    normalize_advantage: bool = True
    """Normalize advantages to zero mean and unit variance within each minibatch."""
    target_kl: Annotated[float, Range(0, open_low=True)] | None = None
    """Stop an iteration's epochs when the approximate KL divergence exceeds 1.5 times this; null: never."""
    ratio: Literal["joint", "per_part", "per_dim"] = "joint"
    """Clip the probability ratio of an action, of each part of a Dict or Tuple, or of each dimension or branch."""
    threaded: bool = False
    """Collect the next rollout in a thread during updates, with a policy that is one iteration old."""

    assignable: ClassVar[tuple[str, ...]] = ("n_epochs", "gae_lambda", "normalize_advantage", "target_kl")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_n_steps(self.n_steps, self.num_envs)
        if self.clip_range_vf is not None and (self.value_transform != "identity" or self.value_support is not None):
            raise SettingError("clip_range_vf cannot be combined with value_transform or value_support")
        check_minibatches(self)
        self.actors = IN_A_THREAD if self.threaded else None
        self.network = make_actor_critic(self)

    @property
    def planned_updates(self) -> int:
        return self.max_env_steps * self.n_epochs // self.batch_size

    def experience(self) -> RolloutDataset:
        return self.collect(self.n_steps, actors=self.actors)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        optimizer = self.own_optimizers[0]
        batch = make_batch(*self.prepare(rollout), self.gae_lambda, self.network.memory.sequence_length)
        self.record(explained_variance=lambda: explained_variance(batch.value, batch.returns, batch.weight > 0))
        policy_learns = self.began_at >= self.critic_burn_in_steps
        epochs = (minibatches(batch, self.batch_size, self.normalize_advantage, self.noise) for _ in range(self.n_epochs))
        for minibatch in chain.from_iterable(epochs):
            loss, metrics = self.loss(minibatch, self.clip_range, self.clip_range_vf, self.ent_coef, policy_learns)
            self.record(loss=loss, **metrics)
            if self.target_kl is not None and mean_over_ranks(metrics["approx_kl"]) > 1.5 * self.target_kl:
                break
            self.record(grad_norm=self.step(loss, optimizer))
            self.end_update(minibatch)
        if self.critic_burn_in_steps:
            end_burn_in(self, optimizer)

    def loss(
        self, minibatch: Batch, clip_range: float, clip_range_vf: float | None, ent_coef: float, policy_learns: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return L = L_CLIP + vf_coef · L_VF − ent_coef · H (eq. 9, negated), and metrics."""
        log_prob, entropy, z = self.network.evaluate(
            minibatch.obs, minibatch.action, minibatch.memory, minibatch.episode_start, minibatch.action_mask
        )
        log_ratio = log_prob - minibatch.log_prob  # [B, D]
        joint = log_ratio.sum(-1, keepdim=True)
        if self.ratio == "per_part":
            log_ratio = self.network.distribution.leaf_sums(log_ratio)
        ratio = (joint if self.ratio == "joint" else log_ratio).exp()

        policy_loss = losses.mean(losses.clipped_surrogate(ratio, minibatch.advantage.unsqueeze(-1), clip_range), minibatch.weight)
        if clip_range_vf is None:
            value_loss = self.network.value_head.loss(z, minibatch.returns)
        else:
            value_loss = losses.clipped_value_loss(z, minibatch.value, minibatch.returns, clip_range_vf)
        value_loss = losses.mean(value_loss, minibatch.weight)
        entropy_loss = -losses.mean(entropy.sum(-1), minibatch.weight)
        actor_loss = policy_loss + losses.scaled(ent_coef, entropy_loss) if policy_learns else 0.0
        loss = actor_loss + self.vf_coef * value_loss

        with torch.no_grad():
            metrics = {
                "policy_gradient_loss": policy_loss,
                "value_loss": value_loss,
                "entropy_loss": entropy_loss,
                "approx_kl": losses.mean(losses.approximate_kl(joint), minibatch.weight),
                "clip_fraction": losses.mean(((ratio - 1).abs() > clip_range).float(), minibatch.weight),
            }
        if self.network.distribution.names:
            metrics |= self.network.distribution.means_of_parts(minibatch.weight, entropy=entropy, log_prob=log_prob)
        return loss, metrics

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledAdam(self.network, eps=1e-5))
