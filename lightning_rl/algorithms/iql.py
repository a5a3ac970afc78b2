"""Implicit Q-Learning (Kostrikov et al. 2021, https://arxiv.org/abs/2110.06169): offline, evaluating only actions in the data."""

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
class IQL(CriticFields, OfflineFields, Algorithm):
    """Learn V as an expectile of Q over the actions in the data, Q from V, and a policy of the actions that were better than V.

    Supports all action spaces: critics get choices one-hot. Learns from the dataset only; with `online`, also from the environment's steps.

    Metrics: `train/value_loss`, `train/critic_loss`, `train/actor_loss`, `train/value`, `train/advantage`, `train/epochs` (how often all
    transitions were learned from), and gradient norms before clipping.
    """

    expectile: Annotated[float, Range(0.5, 1)] = 0.7
    """V is this expectile of Q over actions: 0.5 is the mean, near 1 the best action in the data (antmaze: 0.9)."""
    beta: Annotated[float, Range(0)] = 3.0
    """The weight of an action in the policy's loss is exp(beta · advantage). 0 clones the data (antmaze: 10)."""
    max_weight: Annotated[float, Range(0, open_low=True)] = 100.0
    """The greatest such weight."""
    log_std_init: Annotated[float, Range(-20, 2)] = 0.0
    """First log σ of Box actions."""

    losses = ("value_loss", "critic_loss", "actor_loss")
    min_optimizers = 3
    assignable: ClassVar[tuple[str, ...]] = ("expectile", "beta", "max_weight")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target_update = TargetNetworkUpdate(self.tau, 1)
        settings = {**self.network_settings, "layers": self.actor_layers, "log_std_init": self.log_std_init}
        self.network: Actor = Actor(self.spaces, "unit_normal", nn.Identity(), **settings)
        actions = self.network.distribution.num_features
        self.critic = Critic(self.spaces.observation, actions, **ensemble_settings(self))
        self.value = Critic(self.spaces.observation, 0, ensemble=1, **self.critic_settings)
        self.target = make_target(self.critic)
        self.target_networks = [(self.critic, self.target)]

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        value_optimizer, critic_optimizer, actor_optimizer = self.own_optimizers
        for batch in batches:
            obs, next_obs = self.network.normalizer(batch.obs), self.network.normalizer(batch.next_obs)
            action = self.network.distribution.features(batch.action)
            if self.critic_subset is not None:
                self.critic.estimate.resample(self.noise)
            with torch.no_grad():
                next_value = batch.follow(self.value(next_obs, None, batch.episode_start)[0, :, 0])
            loss, advantage = self.value_loss(batch, obs, action)
            self.record(value_loss=loss, advantage=batch.mean(advantage), value=batch.mean(next_value))
            self.record(value_grad_norm=self.step(loss, value_optimizer, "value_loss"))
            loss, errors = self.critic_loss(batch, obs, action, next_value)
            self.record(critic_loss=loss, critic_grad_norm=self.step(loss, critic_optimizer, "critic_loss"))
            self.update_priorities(batch, errors)
            loss = self.actor_loss(batch, obs, advantage)
            self.record(actor_loss=loss, actor_grad_norm=self.step(loss, actor_optimizer, "actor_loss"))
            self.end_update(batch)

    def value_loss(self, batch: Transition, obs: Tree, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return L(V) = |τ − 1(A < 0)| A² with the advantages A = min Q̄(s, a) − V(s) (eq. 5), and A `[B, S]`."""
        with torch.no_grad():
            q = self.critic.estimate.target(self.target(obs, action, batch.episode_start)[:, :, 0]).mean(0)
        value = self.value(obs, None, batch.episode_start)[0, :, 0]
        return mean(losses.expectile_loss(value, q, self.expectile), batch.weight), q - value.detach()

    def critic_loss(self, batch: Transition, obs: Tree, action: Tensor, next_value: Tensor) -> tuple[Tensor, Tensor]:
        """Return L(Q) = ½ (Q(s, a) − (r + γ V(s')))² (eq. 6), and the error of each row `[B]`."""
        target = batch.reward + batch.discount * next_value
        q = self.critic(obs, action, batch.episode_start)[:, :, 0]
        row_losses, errors = self.critic.estimate.loss(q, target.unsqueeze(0))
        return mean(row_losses, batch.weight), errors

    def actor_loss(self, batch: Transition, obs: Tree, advantage: Tensor) -> Tensor:
        """Return L(π) = −exp(β A) log π(a|s), with a weight of at most `max_weight` (eq. 7)."""
        x = self.network(obs, batch.memory, batch.episode_start)
        log_prob = self.network.distribution.evaluate(x, batch.action, batch.action_mask)[0].sum(-1)
        return mean(policy_gradient(log_prob, losses.advantage_weight(advantage, self.beta, self.max_weight)), batch.weight)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledAdam(self.value), ScheduledAdam(self.critic), ScheduledAdam(self.network))
