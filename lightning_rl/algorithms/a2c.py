"""Advantage Actor-Critic, the synchronous form of A3C (Mnih et al. 2016, https://arxiv.org/abs/1602.01783)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.burn_in import end_burn_in
from lightning_rl.data.minibatch import Batch, make_batch, normalize
from lightning_rl.data.rollout import RolloutDataset, check_n_steps
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import check_range
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.flat import FlatAdam, FlatRMSprop
from lightning_rl.returns import explained_variance
from lightning_rl.schedules import ScheduleSetting, make_schedule
from lightning_rl.types import Rollout


class A2C(Algorithm):
    """Collect a few steps from each environment, then one gradient step on all of them.

    Args:
        learning_rate: step size of the optimizer, a number or a schedule.
        n_steps: steps of each environment in a rollout.
        gae_lambda: λ of the generalised advantage estimate; 1 gives n-step returns.
        normalize_advantage: zero mean and unit variance over a rollout.
        ent_coef: weight of the entropy bonus, a number or a schedule.
        vf_coef: weight of the value loss.
        use_rms_prop: RMSprop as in the paper, else Adam.
        rms_prop_eps: ε of RMSprop, added outside its square root.
        value_transform: learn h(value).
        value_support: [low, high]: learn it as a histogram over these integers.
        critic_burn_in_steps: environment steps at the start, in whole rollouts, of which only the value function learns (and an encoder it
            shares); those that `normalize_obs: frozen` takes are among them.
        share_encoder: policy and value share encoder and memory; null: if without memory.
        action_dist: for Box actions, `clipped_normal` or `tanh_normal`.
        log_std_init: first log σ of Box actions.

    Metrics: `train/policy_loss`, `train/value_loss`, `train/entropy_loss` (minus the entropy), `train/explained_variance` (of the returns
    by the values), and for each part of a Dict or Tuple action, named by its path such as `arm.gripper`, `train/entropy/<part>` and
    `train/log_prob/<part>`.
    """

    def __init__(
        self,
        env: EnvConfig,
        *,
        learning_rate: ScheduleSetting = 7e-4,
        n_steps: int = 5,
        gae_lambda: float = 1.0,
        normalize_advantage: bool = False,
        ent_coef: ScheduleSetting = 0.0,
        vf_coef: float = 0.5,
        use_rms_prop: bool = True,
        rms_prop_eps: float = 1e-5,
        value_transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity",
        value_support: list[int] | None = None,
        critic_burn_in_steps: int = 0,
        share_encoder: bool | None = None,
        action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal",
        log_std_init: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(env, learning_rate=learning_rate, **common)
        check_n_steps(n_steps, self.num_envs)
        check_range("gae_lambda", gae_lambda, 0, 1)
        check_range("vf_coef", vf_coef, 0)
        check_range("rms_prop_eps", rms_prop_eps, 0, open_low=True)
        check_range("critic_burn_in_steps", critic_burn_in_steps, 0, whole=True)
        self.n_steps, self.gae_lambda, self.normalize_advantage = n_steps, gae_lambda, normalize_advantage
        self.ent_coef, self.vf_coef = make_schedule("ent_coef", ent_coef), vf_coef
        self.use_rms_prop, self.rms_prop_eps, self.critic_burn_in_steps = use_rms_prop, rms_prop_eps, critic_burn_in_steps
        self.network = ActorCritic(
            self.spaces,
            **self.network_settings,
            share_encoder=share_encoder,
            action_dist=action_dist,
            log_std_init=log_std_init,
            streams=len(self.reward_signals),
            value_transform=value_transform,
            value_support=value_support,
        )

    def experience(self) -> RolloutDataset:
        return self.collect(self.n_steps, log_probs=False)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        optimizer = self.raw_optimizers()[0]
        batch = make_batch(*self.prepare(rollout), self.gae_lambda, self.network.memory.sequence_length)
        self.record(explained_variance=lambda: explained_variance(batch.value, batch.returns, batch.weight > 0))
        if self.normalize_advantage:
            batch = batch._replace(advantage=normalize(batch.advantage, batch.weight))
        policy_coef = float(self.began_at >= self.critic_burn_in_steps)
        with self.learning():
            loss, metrics = self.loss(batch, self.ent_coef(self.progress), policy_coef)
            self.record(loss=loss, **metrics)
            self.record(grad_norm=self.step(loss, optimizer))
            self.end_update(batch)
        end_burn_in(self, optimizer)

    def loss(self, batch: Batch, ent_coef: float, policy_coef: float) -> tuple[Tensor, dict[str, Tensor]]:
        """L = −log π(a|s) A + vf_coef · (R − V)² − ent_coef · H (alg. S3, all in one step), and what is logged of it."""
        log_prob, entropy, z = self.network.evaluate(batch.obs, batch.action, batch.memory, batch.episode_start, batch.action_mask)
        policy_loss = losses.mean(losses.policy_gradient(log_prob.sum(-1), batch.advantage), batch.weight)
        value_loss = losses.mean(self.network.value_head.loss(z, batch.returns), batch.weight)
        entropy_loss = -losses.mean(entropy.sum(-1), batch.weight)
        loss = losses.scaled(policy_coef, policy_loss + losses.scaled(ent_coef, entropy_loss)) + self.vf_coef * value_loss
        parts = self.means_of_parts(batch.weight, entropy=entropy, log_prob=log_prob)
        return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy_loss": entropy_loss, **parts}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.use_rms_prop:
            return self.with_side_learners(FlatRMSprop(self.network, eps=self.rms_prop_eps))
        return self.with_side_learners(FlatAdam(self.network, eps=1e-5))
