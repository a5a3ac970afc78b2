"""MA-POCA, posthumous credit for groups of agents (Cohen et al. 2021, https://arxiv.org/abs/2111.05992), and MAPPO with group returns."""

from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.groups import (
    GroupBatch,
    GroupDataset,
    GroupRollout,
    group_minibatches,
    group_returns,
    make_group_batch,
)
from lightning_rl.errors import SettingError
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.networks.group_critic import GroupActorCritic
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.processes.ranks import mean_over_ranks
from lightning_rl.returns import explained_variance
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import ActorCriticFields, actor_critic_settings, check_groups, check_n_steps, end_burn_in


@dataclass(kw_only=True, eq=False, repr=False)
class POCA(ActorCriticFields, Algorithm):
    """PPO for a group of agents with a shared reward, one policy for all agents, and a critic that sees all active agents.

    An agent's advantage is the return of the group minus a baseline that knows the observations of all agents and the actions of the
    others, but not the agent's own action. The return continues after an agent has died, so that it gets credit for later rewards of the
    group. All agents of a behavior in one copy of the environment form a group, whose reward is the sum of theirs.

    Metrics: `train/policy_gradient_loss`, `train/value_loss`, `train/baseline_loss`, `train/entropy_loss` (negative entropy),
    `train/approx_kl` (estimate of KL(π_old ‖ π)), `train/clip_fraction` (fraction of clipped ratios),
    `train/explained_variance` and `train/baseline_explained_variance` (of the group's returns by its values and by the baselines),
    `rollout/group_ep_rew_mean` (sum of the rewards of all agents, over the last 100 group episodes). For each part of a Dict or Tuple
    action, named by its path such as `arm.gripper`, also `train/entropy/<part>` and `train/log_prob/<part>`.
    """

    ortho_init: bool = field(init=False, default=True)
    n_steps: Annotated[int, Range(1)] = 128
    """Steps per copy of the environment in a rollout."""
    batch_size: Annotated[int, Range(1)] = 128
    """Group steps in a minibatch, each with all agents: a divisor of `n_steps * env.num_envs`; with a memory, a multiple of its
    sequence_length."""
    n_epochs: Annotated[int, Range(1)] = 4
    """Passes over a rollout."""
    gae_lambda: Annotated[float, Range(0, 1)] = 0.95
    """λ of the group's return; 1 gives n-step returns."""
    clip_range: ScheduleSetting = 0.2
    """Clip range ε of the surrogate."""
    clip_range_vf: ScheduleSetting | None = None
    """Clip range of value and baselines around their old values; null: no clipping."""
    normalize_advantage: bool = True
    """Normalize advantages to zero mean and unit variance within each minibatch, over the active agents."""
    target_kl: Annotated[float, Range(0, open_low=True)] | None = None
    """Stop an iteration's epochs when the approximate KL divergence exceeds 1.5 times this; null: never."""
    ratio: Literal["joint", "per_part", "per_dim"] = "joint"
    """Clip the probability ratio of an action, of each part of a Dict or Tuple, or of each dimension or branch."""
    counterfactual: bool = True
    """Use advantages R − b; false: R − V without baselines, which is MAPPO with the group's return."""
    baseline_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the baselines' loss, relative to the value loss."""
    group_reward: Literal["sum", "mean"] = "sum"
    """Reward of a group: the `sum` of the rewards of its active agents, or their `mean`, for environments that give all the same reward."""
    attention_size: Annotated[int, Range(4)] = 64
    """Width of the attention over agents in the critic, a multiple of 4."""

    learns_in_groups: ClassVar[bool] = True
    assignable: ClassVar[tuple[str, ...]] = ("n_epochs", "gae_lambda", "normalize_advantage", "baseline_coef")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_n_steps(self.n_steps, self.num_envs)
        check_groups(self)
        if self.clip_range_vf is not None and (self.value_transform != "identity" or self.value_support is not None):
            raise SettingError("clip_range_vf cannot be combined with value_transform or value_support")
        self.network: GroupActorCritic = GroupActorCritic(self.spaces, attention_size=self.attention_size, **actor_critic_settings(self))

    @property
    def planned_updates(self) -> int:
        return self.max_env_steps * self.n_epochs // (self.batch_size * self.spaces.group_size)

    def experience(self) -> GroupDataset:
        return GroupDataset(self.collect(self.n_steps), self.counterfactual)

    def training_step(self, groups: GroupRollout, batch_idx: int) -> None:
        optimizer = self.own_optimizers[0]
        batch = self.make_batch(groups)
        self.record(explained_variance=lambda: explained_variance(batch.value, batch.returns, batch.group_weight > 0))
        if self.counterfactual:
            self.record(baseline_explained_variance=lambda: self.explain_by_baselines(batch))
        policy_learns = self.began_at >= self.critic_burn_in_steps
        epochs = (group_minibatches(batch, self.batch_size, self.normalize_advantage, self.noise) for _ in range(self.n_epochs))
        for minibatch in chain.from_iterable(epochs):
            loss, metrics = self.loss(minibatch, self.clip_range, self.clip_range_vf, self.ent_coef, policy_learns)
            self.record(loss=loss, **metrics)
            if self.target_kl is not None and mean_over_ranks(metrics["approx_kl"]) > 1.5 * self.target_kl:
                break
            self.record(grad_norm=self.step(loss, optimizer))
            self.end_update(minibatch)
        if self.critic_burn_in_steps:
            end_burn_in(self, optimizer)

    def make_batch(self, groups: GroupRollout) -> GroupBatch:
        """Return group steps with λ-returns R, and advantages A_j = R − b_j, or R − V (sec. 4)."""
        rows, _ = self.prepare(groups.rows)
        present = groups.present.unsqueeze(-1)
        reward = (rows.reward.unflatten(1, groups.present.shape[1:]) * present).sum(2)  # [T, E, S]
        if self.group_reward == "mean":
            reward = reward / present.sum(2).clamp(min=1)
        returns = group_returns(groups, reward, self.discounts, self.ignore_done, self.gae_lambda)
        baseline = groups.baseline if self.counterfactual else groups.value.unsqueeze(2)
        advantage = ((returns.unsqueeze(2) - baseline) * present).sum(-1)  # [T, E, A]
        return make_group_batch(groups, returns, advantage, self.network.memory.sequence_length)

    def explain_by_baselines(self, batch: GroupBatch) -> Tensor:
        """Return the variance of the returns that the baselines explain, as a fraction."""
        returns = batch.returns.unsqueeze(1).expand_as(batch.baseline)
        return explained_variance(batch.baseline.flatten(0, 1), returns.flatten(0, 1), batch.flat("weight") > 0)

    def loss(
        self, minibatch: GroupBatch, clip_range: float, clip_range_vf: float | None, ent_coef: float, policy_learns: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return L = L_CLIP + vf_coef · (L_V + baseline_coef · L_b) − ent_coef · H, and metrics."""
        obs, action, memory, start, mask, weight, advantage, old_log_prob = map(
            minibatch.flat, ("obs", "action", "memory", "episode_start", "action_mask", "weight", "advantage", "log_prob")
        )
        log_prob, entropy, z = self.network.evaluate(obs, action, memory, start, mask, minibatch.present, self.counterfactual)
        log_ratio = log_prob - old_log_prob  # [B · A, D]
        joint = log_ratio.sum(-1, keepdim=True)
        if self.ratio == "per_part":
            log_ratio = self.network.distribution.leaf_sums(log_ratio)
        ratio = (joint if self.ratio == "joint" else log_ratio).exp()

        policy_loss = losses.mean(losses.clipped_surrogate(ratio, advantage.unsqueeze(-1), clip_range), weight)
        value_loss = losses.mean(self.value_loss(z[:, 0], minibatch.value, minibatch.returns, clip_range_vf), minibatch.group_weight)
        critic_loss, metrics = value_loss, {}
        if self.counterfactual:
            returns = minibatch.returns.unsqueeze(1).expand_as(minibatch.baseline)
            baseline_loss = self.value_loss(z[:, 1:], minibatch.baseline, returns, clip_range_vf).flatten(0, 1)
            metrics["baseline_loss"] = losses.mean(baseline_loss, weight)
            critic_loss = value_loss + self.baseline_coef * metrics["baseline_loss"]
        entropy_loss = -losses.mean(entropy.sum(-1), weight)
        actor_loss = policy_loss + losses.scaled(ent_coef, entropy_loss) if policy_learns else 0.0
        loss = actor_loss + self.vf_coef * critic_loss

        with torch.no_grad():
            metrics |= {
                "policy_gradient_loss": policy_loss,
                "value_loss": value_loss,
                "entropy_loss": entropy_loss,
                "approx_kl": losses.mean(losses.approximate_kl(joint), weight),
                "clip_fraction": losses.mean(((ratio - 1).abs() > clip_range).float(), weight),
            }
        if self.network.distribution.names:
            metrics |= self.network.distribution.means_of_parts(weight, entropy=entropy, log_prob=log_prob)
        return loss, metrics

    def value_loss(self, z: Tensor, old_value: Tensor, returns: Tensor, clip_range_vf: float | None) -> Tensor:
        """Return the loss of the critic's output for each row and reward stream."""
        if clip_range_vf is None:
            return self.network.value_head.loss(z, returns)
        return losses.clipped_value_loss(z, old_value, returns, clip_range_vf)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledAdam(self.network, eps=1e-5))
