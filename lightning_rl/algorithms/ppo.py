"""Proximal Policy Optimization (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_rl.actors.config import IN_A_THREAD
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.algorithms.burn_in import end_burn_in
from lightning_rl.data.minibatch import Batch, make_batch, minibatches
from lightning_rl.data.rollout import RolloutDataset, check_n_steps
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_choice, check_flag, check_range
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.flat import FlatAdam
from lightning_rl.returns import explained_variance
from lightning_rl.schedules import ScheduleSetting, make_schedule
from lightning_rl.types import Rollout


class PPO(Algorithm):
    """Collect `n_steps` steps from each environment, then maximize the clipped surrogate for `n_epochs` over minibatches.

    Args:
        n_steps: steps of each environment.
        batch_size: rows of a minibatch; must divide `n_steps * num_envs`, and with a memory be a multiple of its sequence_length.
        n_epochs: passes over a rollout.
        gae_lambda: λ of the generalised advantage estimate.
        clip_range: ε of the clipped surrogate, a number or a schedule.
        clip_range_vf: clip of the value function around its old value, in units of the return; null does not clip.
        normalize_advantage: zero mean and unit variance within each minibatch.
        ent_coef: weight of the entropy bonus, a number or a schedule.
        vf_coef: weight of the value loss.
        target_kl: stop an iteration's epochs when the approximate KL divergence exceeds 1.5 times this; null never does.
        ratio: clip the `joint` probability ratio of an action, that of each part of a Dict or Tuple (`per_part`), or that of each dimension
            or branch (`per_dim`).
        threaded: collect in a thread meanwhile, with a policy one iteration old.
        value_transform: learn h(value).
        value_support: [low, high]: learn it as a histogram over these integers.
        critic_burn_in_steps: environment steps at the start, in whole rollouts, of which only the value function learns (and an encoder it
            shares); those that `normalize_obs: frozen` takes are among them.
        share_encoder: policy and value share encoder and memory; null: if without memory.
        action_dist: for Box actions, `clipped_normal` or `tanh_normal`.
        log_std_init: first log σ of a Box.

    Metrics: `train/policy_gradient_loss`, `train/value_loss`, `train/entropy_loss` (minus the entropy), `train/approx_kl` (of the old
    from the new policy), `train/clip_fraction` (ratios beyond the clip), `train/explained_variance` (of the returns by the values), and for
    each part of a Dict or Tuple action, named by its path such as `arm.gripper`, `train/entropy/<part>` and `train/log_prob/<part>`.
    """

    def __init__(
        self,
        env: EnvConfig,
        *,
        n_steps: int = 128,
        batch_size: int = 256,
        n_epochs: int = 4,
        gae_lambda: float = 0.95,
        clip_range: ScheduleSetting = 0.2,
        clip_range_vf: ScheduleSetting | None = None,
        normalize_advantage: bool = True,
        ent_coef: ScheduleSetting = 0.0,
        vf_coef: float = 0.5,
        target_kl: float | None = None,
        ratio: Literal["joint", "per_part", "per_dim"] = "joint",
        threaded: bool = False,
        value_transform: Literal["identity", "signed_hyperbolic", "symlog"] = "identity",
        value_support: list[int] | None = None,
        critic_burn_in_steps: int = 0,
        share_encoder: bool | None = None,
        action_dist: Literal["clipped_normal", "tanh_normal"] = "clipped_normal",
        log_std_init: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(env, **common)
        check_n_steps(n_steps, self.num_envs)
        check_range("n_epochs", n_epochs, 1, whole=True)
        check_range("gae_lambda", gae_lambda, 0, 1)
        check_range("vf_coef", vf_coef, 0)
        check_range("critic_burn_in_steps", critic_burn_in_steps, 0, whole=True)
        check_flag("threaded", threaded)
        check_choice("ratio", ratio, ("joint", "per_part", "per_dim"))
        if target_kl is not None:
            check_range("target_kl", target_kl, 0, open_low=True)
        if clip_range_vf is not None and (value_transform != "identity" or value_support is not None):
            raise SettingError("clip_range_vf clips values as they are: it does not go with value_transform or value_support")
        check_batch_size(batch_size, n_steps, self.num_envs, 1 if self.memory is None else self.memory.sequence_length)
        self.n_steps, self.batch_size, self.n_epochs = n_steps, batch_size, n_epochs
        self.gae_lambda, self.normalize_advantage = gae_lambda, normalize_advantage
        self.clip_range = make_schedule("clip_range", clip_range)
        self.clip_range_vf = None if clip_range_vf is None else make_schedule("clip_range_vf", clip_range_vf)
        self.ent_coef, self.vf_coef = make_schedule("ent_coef", ent_coef), vf_coef
        self.actors = IN_A_THREAD if threaded else None
        self.target_kl, self.ratio, self.critic_burn_in_steps = target_kl, ratio, critic_burn_in_steps
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
        return self.collect(self.n_steps, actors=self.actors)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        optimizer = self.raw_optimizers()[0]
        batch = make_batch(*self.prepare(rollout), self.gae_lambda, self.network.memory.sequence_length)
        self.record(explained_variance=lambda: explained_variance(batch.value, batch.returns, batch.weight > 0))
        clip_range, ent_coef = self.clip_range(self.progress), self.ent_coef(self.progress)
        clip_range_vf = None if self.clip_range_vf is None else self.clip_range_vf(self.progress)
        policy_coef = float(self.began_at >= self.critic_burn_in_steps)
        epochs = (minibatches(batch, self.batch_size, self.normalize_advantage, self.generator) for _ in range(self.n_epochs))
        with self.learning(alone=self.actors is None):
            for minibatch in chain.from_iterable(epochs):
                loss, metrics = self.loss(minibatch, clip_range, clip_range_vf, ent_coef, policy_coef)
                self.record(loss=loss, **metrics)
                if self.target_kl is not None and self.mean_over_ranks(metrics["approx_kl"]) > 1.5 * self.target_kl:
                    break
                self.record(grad_norm=self.step(loss, optimizer))
                self.end_update(minibatch)
        end_burn_in(self, optimizer)

    def loss(
        self, minibatch: Batch, clip_range: float, clip_range_vf: float | None, ent_coef: float, policy_coef: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """L = L_CLIP + vf_coef · L_VF − ent_coef · H (eq. 9, with its sign turned), and what is logged of it."""
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
        loss = losses.scaled(policy_coef, policy_loss + losses.scaled(ent_coef, entropy_loss)) + self.vf_coef * value_loss

        with torch.no_grad():
            metrics = {
                "policy_gradient_loss": policy_loss,
                "value_loss": value_loss,
                "entropy_loss": entropy_loss,
                "approx_kl": losses.mean(losses.approximate_kl(joint), minibatch.weight),
                "clip_fraction": losses.mean(((ratio - 1).abs() > clip_range).float(), minibatch.weight),
                **self.means_of_parts(minibatch.weight, entropy=entropy, log_prob=log_prob),
            }
        return loss, metrics

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(FlatAdam(self.network, eps=1e-5))


def check_batch_size(batch_size: int, n_steps: int, num_envs: int, sequence_length: int = 1) -> None:
    """Raise `SettingError` unless minibatches of whole sequences fill a rollout evenly, naming the two nearest sizes that do."""
    check_range("batch_size", batch_size, 1, whole=True)
    if sequence_length > batch_size:
        raise SettingError(f"memory.sequence_length {sequence_length} is longer than batch_size {batch_size}; lower it")
    sequence_length = min(sequence_length, n_steps)
    sequences = -(-n_steps // sequence_length) * num_envs
    if batch_size % sequence_length or sequences % (batch_size // sequence_length):
        small = [number for number in range(1, math.isqrt(sequences) + 1) if sequences % number == 0]
        sizes = [number * sequence_length for divisor in small for number in {divisor, sequences // divisor}]
        nearest = sorted(sorted(sizes, key=lambda size: (abs(size - batch_size), size))[:2])
        rows = f"n_steps * num_envs = {n_steps} * {num_envs} = {n_steps * num_envs}"
        if sequence_length > 1:
            rows += f" in sequences of {sequence_length}"
        raise SettingError(f"batch_size {batch_size} does not divide {rows}; use {' or '.join(map(str, nearest))}")
