"""Advantage Actor-Critic, the synchronous form of A3C (Mnih et al. 2016, https://arxiv.org/abs/1602.01783)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.rollout import Batch, RolloutDataset, make_batch, normalize
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.optimization import ScheduledAdam, ScheduledRMSprop
from lightning_rl.returns import explained_variance
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import ActorCriticFields, check_n_steps, end_burn_in, make_actor_critic
from lightning_rl.types import Rollout


@dataclass(kw_only=True, eq=False, repr=False)
class A2C(ActorCriticFields, Algorithm):
    """Collect a few steps from each environment, then make one gradient step on all of them.

    Metrics: `train/policy_loss`, `train/value_loss`, `train/entropy_loss` (negative entropy), `train/explained_variance` (of the returns
    by the values). For each part of a Dict or Tuple action, named by its path such as `arm.gripper`, also `train/entropy/<part>` and
    `train/log_prob/<part>`.
    """

    learning_rate: ScheduleSetting = 7e-4
    """Step size of the optimizer."""
    n_steps: Annotated[int, Range(1)] = 5
    """Steps per environment in a rollout."""
    gae_lambda: Annotated[float, Range(0, 1)] = 1.0
    """λ of generalized advantage estimation; 1 gives n-step returns."""
    normalize_advantage: bool = False
    """Normalize advantages to zero mean and unit variance over a rollout."""
    use_rms_prop: bool = True
    """Use RMSprop, as in the paper; otherwise Adam."""
    rms_prop_eps: Annotated[float, Range(0, open_low=True)] = 1e-5
    """ε of RMSprop, added outside its square root."""

    assignable: ClassVar[tuple[str, ...]] = ("gae_lambda", "normalize_advantage")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_n_steps(self.n_steps, self.num_envs)
        self.network = make_actor_critic(self)

    @property
    def planned_updates(self) -> int:
        return self.max_env_steps // (self.n_steps * self.num_envs)

    def experience(self) -> RolloutDataset:
        return self.collect(self.n_steps, log_probs=False)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        optimizer = self.own_optimizers[0]
        batch = make_batch(*self.prepare(rollout), self.gae_lambda, self.network.memory.sequence_length)
        self.record(explained_variance=lambda: explained_variance(batch.value, batch.returns, batch.weight > 0))
        if self.normalize_advantage:
            batch = batch._replace(advantage=normalize(batch.advantage, batch.weight))
        policy_learns = self.began_at >= self.critic_burn_in_steps
        loss, metrics = self.loss(batch, self.ent_coef, policy_learns)
        self.record(loss=loss, **metrics)
        self.record(grad_norm=self.step(loss, optimizer))
        self.end_update(batch)
        if self.critic_burn_in_steps:
            end_burn_in(self, optimizer)

    def loss(self, batch: Batch, ent_coef: float, policy_learns: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return L = −log π(a|s) A + vf_coef · (R − V)² − ent_coef · H (alg. S3, in a single step), and metrics."""
        log_prob, entropy, z = self.network.evaluate(batch.obs, batch.action, batch.memory, batch.episode_start, batch.action_mask)
        policy_loss = losses.mean(losses.policy_gradient(log_prob.sum(-1), batch.advantage), batch.weight)
        value_loss = losses.mean(self.network.value_head.loss(z, batch.returns), batch.weight)
        entropy_loss = -losses.mean(entropy.sum(-1), batch.weight)
        actor_loss = policy_loss + losses.scaled(ent_coef, entropy_loss) if policy_learns else 0.0
        loss = actor_loss + self.vf_coef * value_loss
        parts = self.network.distribution.means_of_parts(batch.weight, entropy=entropy, log_prob=log_prob)
        return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy_loss": entropy_loss, **parts}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.use_rms_prop:
            return self.with_side_learners(ScheduledRMSprop(self.network, eps=self.rms_prop_eps))
        return self.with_side_learners(ScheduledAdam(self.network, eps=1e-5))
