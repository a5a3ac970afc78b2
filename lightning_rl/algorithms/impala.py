"""Importance Weighted Actor-Learner Architecture, with V-trace (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lightning_rl.actors.config import ActorsConfig
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.rollout import RolloutDataset, in_sequences, in_time
from lightning_rl.errors import SettingError
from lightning_rl.losses import policy_gradient as losses
from lightning_rl.optimization import ScheduledAdam, ScheduledRMSprop
from lightning_rl.returns import explained_variance, vtrace
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import OrPlain, Range, as_settings
from lightning_rl.training.settings import ActorCriticFields, check_n_steps, end_burn_in, make_actor_critic
from lightning_rl.types import Rollout, flatten_time

ROUNDING = 1e-5
"""Tolerance for the importance weight of an unchanged policy, which is 1."""


@dataclass(kw_only=True, eq=False, repr=False)
class IMPALA(ActorCriticFields, Algorithm):
    """Collect rollouts with actors whose policy may be a few updates old, and make one V-trace-corrected gradient step on each batch.

    Metrics: `train/policy_loss`, `train/value_loss`, `train/entropy_loss` (negative entropy), `train/explained_variance` (of the targets
    by the values), `train/rho_mean` (mean importance weight) and `train/rho_clip_fraction` (fraction of weights above ρ̄ by more than
    rounding). For each part of a Dict or Tuple action `train/entropy/<part>` and `train/log_prob/<part>`. With actors
    `actors/policy_lag_mean` and `actors/policy_lag_max` (updates between acting and learning), `env/rollouts_dropped`,
    `env/actor_restarts`, `time/rollouts_waiting` (rollouts that are ready in addition to a batch), `time/waiting_for_actors` and
    `time/rollout` (seconds).
    """

    learning_rate: ScheduleSetting = 6e-4
    """Step size of the optimizer."""
    max_grad_norm: Annotated[float, Range(0, open_low=True)] | None = 40.0
    """Clip gradients to this Euclidean norm; null: no clipping."""
    n_steps: Annotated[int, Range(1)] = 20
    """Steps per environment in a rollout."""
    actors: OrPlain[ActorsConfig | None] = None
    """Number and kind of actors, see `actors/config.py`; null: no actors, `env.num_envs` environments alternate with updates and always
    use the newest policy."""
    clip_rho: Annotated[float, Range(0, open_low=True)] | None = 1.0
    """ρ̄, the maximum importance weight of temporal differences, which determines what the values converge to; null: no clipping."""
    clip_c: Annotated[float, Range(0, open_low=True)] | None = 1.0
    """c̄, the maximum weight of the trace along a rollout, which determines how fast the values converge; at most ρ̄."""
    clip_pg_rho: Annotated[float, Range(0, open_low=True)] | None = 1.0
    """Maximum importance weight in the policy gradient; null: no clipping."""
    lambda_: Annotated[float, Range(0, 1)] = 1.0
    """λ, an additional factor of the trace."""
    ent_coef: ScheduleSetting = 0.01
    """Weight of the entropy bonus."""
    use_rms_prop: bool = True
    """Use RMSprop, as in the paper; otherwise Adam."""
    rms_prop_eps: Annotated[float, Range(0, open_low=True)] = 0.01
    """ε of RMSprop, added outside its square root."""

    assignable: ClassVar[tuple[str, ...]] = ("clip_rho", "clip_c", "clip_pg_rho", "lambda_")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_rho is not None and (self.clip_c is None or self.clip_c > self.clip_rho):
            raise SettingError(f"clip_c {'null' if self.clip_c is None else self.clip_c} must not be greater than clip_rho {self.clip_rho}")
        self.actors = None if self.actors is None else as_settings("actors", ActorsConfig, self.actors)
        check_n_steps(self.n_steps, self.num_envs)
        self.network = make_actor_critic(self)

    @property
    def num_envs(self) -> int:
        """Return the number of environments in a batch."""
        return super().num_envs * (1 if self.actors is None else self.actors.batch)

    @property
    def planned_updates(self) -> int:
        return self.max_env_steps // (self.n_steps * self.num_envs)

    def experience(self) -> RolloutDataset:
        return self.collect(self.n_steps, actors=self.actors)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        optimizer = self.own_optimizers[0]
        policy_learns = self.began_at >= self.critic_burn_in_steps
        loss, metrics = self.loss(*self.prepare(rollout), self.ent_coef, policy_learns)
        self.record(loss=loss, **metrics)
        self.record(grad_norm=self.step(loss, optimizer))
        self.end_update(rollout)
        if self.critic_burn_in_steps:
            end_burn_in(self, optimizer)

    def loss(self, rollout: Rollout, discount: Tensor, ent_coef: float, policy_learns: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Return L = −A log π(a|s) + vf_coef · ½ (v − V)² − ent_coef · H (sec. 4.2), with v and A by V-trace, and metrics."""
        log_prob, entropy, z = self.evaluate(rollout)
        log_rho = (log_prob.detach() - rollout.log_prob).sum(-1, keepdim=True)
        carry = ~(rollout.terminated | rollout.truncated).unsqueeze(-1)
        clips = self.clip_rho, self.clip_c, self.clip_pg_rho, self.lambda_
        target, advantage = vtrace(log_rho, rollout.reward, discount, rollout.value, rollout.next_value, carry, *clips)

        weight = (rollout.valid / rollout.valid.sum().clamp(min=1)).flatten()
        log_prob, entropy, z, log_rho, target, advantage = flatten_time((log_prob, entropy, z, log_rho, target, advantage))
        policy_loss = losses.mean(losses.policy_gradient(log_prob.sum(-1), advantage.sum(-1)), weight)
        value_loss = 0.5 * losses.mean(self.network.value_head.loss(z, target), weight)
        entropy_loss = -losses.mean(entropy.sum(-1), weight)
        actor_loss = policy_loss + losses.scaled(ent_coef, entropy_loss) if policy_learns else 0.0
        loss = actor_loss + self.vf_coef * value_loss

        rho = log_rho.squeeze(-1).exp()
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy_loss": entropy_loss,
            "rho_mean": (weight * rho).sum(),
            "rho_clip_fraction": (weight * (rho > (self.clip_rho or float("inf")) * (1 + ROUNDING))).sum(),
            "explained_variance": explained_variance(flatten_time(rollout.value), target, weight > 0),
            **self.network.distribution.means_of_parts(weight, entropy=entropy, log_prob=log_prob),
        }
        return loss, metrics

    def evaluate(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluate the network like `ActorCritic.evaluate`, `[T, N, ...]`, in sequences that start with the actor's memory."""
        (steps, num), length = rollout.valid.shape, min(self.network.memory.sequence_length, self.n_steps)
        obs, action, mask, start = in_sequences((rollout.obs, rollout.action, rollout.action_mask, rollout.episode_start), length)
        evaluated = self.network.evaluate(obs, action, flatten_time(rollout.memory), start.unflatten(0, (length, -1)), mask)
        return in_time(evaluated, length, steps, num)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.use_rms_prop:
            return self.with_side_learners(ScheduledRMSprop(self.network, eps=self.rms_prop_eps))
        return self.with_side_learners(ScheduledAdam(self.network, eps=1e-5))
