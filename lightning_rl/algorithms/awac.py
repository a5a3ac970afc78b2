"""Advantage Weighted Actor-Critic (Nair et al. 2020, https://arxiv.org/abs/2006.09359): offline first, then online with the same losses."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.iteration import TargetNetworkUpdate, make_target
from lightning_rl.losses import offline as losses
from lightning_rl.losses.policy_gradient import mean, policy_gradient
from lightning_rl.networks.off_policy import Actor, Critic
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import CriticFields, OfflineFields, ensemble_settings
from lightning_rl.types import Transition, Tree


@dataclass(kw_only=True, eq=False, repr=False)
class AWAC(CriticFields, OfflineFields, Algorithm):
    """Learn critics of the policy, and make actions more likely that did better than the policy.

    Supports all action spaces: critics get choices one-hot. Learns from the dataset only; with `online`, also from the environment's steps.

    Metrics: `train/critic_loss`, `train/actor_loss`, `train/q_value`, `train/advantage`, `train/epochs` (how often all transitions were
    learned from), and gradient norms before clipping.
    """

    beta: Annotated[float, Range(0)] = 1.0
    """1/λ. The weight of an action in the policy's loss is exp(beta · advantage). 0 clones the data."""
    max_weight: Annotated[float, Range(0, open_low=True)] = 100.0
    """The greatest such weight."""
    log_std_init: Annotated[float, Range(-20, 2)] = 0.0
    """First log σ of Box actions."""

    losses = ("critic_loss", "actor_loss")
    min_optimizers = 2
    assignable: ClassVar[tuple[str, ...]] = ("beta", "max_weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target_update = TargetNetworkUpdate(self.tau, 1)
        settings = {**self.network_settings, "layers": self.actor_layers, "log_std_init": self.log_std_init}
        self.network: Actor = Actor(self.spaces, "unit_normal", nn.Identity(), **settings)
        self.critic = Critic(self.spaces.observation, self.network.distribution.num_features, **ensemble_settings(self))
        self.target = make_target(self.critic)
        self.target_networks = [(self.critic, self.target)]

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        critic_optimizer, actor_optimizer = self.own_optimizers
        for batch in batches:
            obs, next_obs = self.network.normalizer(batch.obs), self.network.normalizer(batch.next_obs)
            action = self.network.distribution.features(batch.action)
            own_action, next_action = self.draw(batch, obs, batch.action_mask), self.draw(batch, next_obs, batch.next_action_mask)
            if self.critic_subset is not None:
                self.critic.estimate.resample(self.noise)
            loss, errors, metrics = self.critic_loss(batch, obs, action, next_obs, next_action)
            self.record(critic_loss=loss, **metrics)
            self.record(critic_grad_norm=self.step(loss, critic_optimizer, "critic_loss"))
            self.update_priorities(batch, errors)
            loss, metrics = self.actor_loss(batch, obs, action, own_action)
            self.record(actor_loss=loss, **metrics)
            self.record(actor_grad_norm=self.step(loss, actor_optimizer, "actor_loss"))
            self.end_update(batch)

    @torch.no_grad()
    def draw(self, batch: Transition, obs: Tree, mask: Tree) -> Tensor:
        """Sample an action of the policy for each row, in the form for critics, `[B, A]`."""
        distribution = self.network.distribution
        x = self.network(obs, batch.memory, batch.episode_start)
        return distribution.features(distribution.sample(x, mask, self.noise))

    def critic_loss(
        self, batch: Transition, obs: Tree, action: Tensor, next_obs: Tree, next_action: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return ½ (Q(s, a) − (r + γ min Q̄(s', a')))² with a' of the policy (alg. 1), the error of each row `[B]`, and metrics."""
        with torch.no_grad():
            next_q = self.critic.estimate.target(self.target(next_obs, next_action, batch.episode_start)[:, :, 0])
            target = batch.reward + batch.discount * batch.follow(next_q, 1)  # [Y, B, S]
        q = self.critic(obs, action, batch.episode_start)[:, :, 0]  # [E · Z, B, S]
        row_losses, errors = self.critic.estimate.loss(q, target)
        return mean(row_losses, batch.weight), errors, {"q_value": batch.mean(q.detach().mean(0))}

    def actor_loss(self, batch: Transition, obs: Tree, action: Tensor, own_action: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return −exp(A / λ) log π(a|s) with A = min Q(s, a) − min Q(s, π(s)) (eq. 13), and metrics."""
        with torch.no_grad():
            q, own_q = (
                self.critic.estimate.target(self.critic(obs, taken, batch.episode_start)[:, :, 0]).mean(0) for taken in (action, own_action)
            )
            weight = losses.advantage_weight(q - own_q, self.beta, self.max_weight)
        x = self.network(obs, batch.memory, batch.episode_start)
        log_prob = self.network.distribution.evaluate(x, batch.action, batch.action_mask)[0].sum(-1)
        return mean(policy_gradient(log_prob, weight), batch.weight), {"advantage": batch.mean(q - own_q)}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledAdam(self.critic), ScheduledAdam(self.network))
