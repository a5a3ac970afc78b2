"""Twin Delayed Deep Deterministic policy gradient (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477).

DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971) is `n_critics: 1, policy_delay: 1, target_policy_noise: 0`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.iteration import TargetNetworkUpdate, make_target
from lightning_rl.distributions import NoisyAction, check_box_actions
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.networks.off_policy import Actor, Critic
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import CriticFields, ReplayFields, ensemble_settings
from lightning_rl.types import Transition, Tree


@dataclass(kw_only=True, eq=False, repr=False)
class TD3(CriticFields, ReplayFields, Algorithm):
    """Train a deterministic policy on the gradient of the first of two critics, every other update, and explore with noise.

    Metrics: `train/critic_loss`, `train/actor_loss`, `train/q_value`, `train/critic_grad_norm` and `train/actor_grad_norm` (before
    clipping). For the replay buffer `replay/size`, `replay/mean_picks` (how often a transition was sampled, on average) and
    `replay/age_mean` (mean number of newer transitions from the same environment, in the last batch).
    """

    learning_rate: ScheduleSetting = 1e-3
    """Step size of the optimizers."""
    policy_delay: Annotated[int, Range(1)] = 2
    """Critic updates per update of the policy and the targets."""
    action_noise: Annotated[float, Range(0)] = 0.1
    """Standard deviation of the exploration noise, for actions in [-1, 1]."""
    target_policy_noise: Annotated[float, Range(0)] = 0.2
    """Standard deviation of the noise on the target policy's actions in [-1, 1]."""
    target_noise_clip: Annotated[float, Range(0)] = 0.5
    """Clip the target policy's noise to ± this value."""

    losses = ("critic_loss", "actor_loss")
    min_optimizers = 2
    assignable: ClassVar[tuple[str, ...]] = ("target_policy_noise", "target_noise_clip")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_box_actions(type(self).__name__, self.spaces.action)
        self.target_update = TargetNetworkUpdate(self.tau, self.policy_delay)
        self.network: Actor = Actor(self.spaces, "noisy", nn.Tanh(), **self.network_settings, layers=self.actor_layers)
        assert isinstance(self.network.distribution, NoisyAction)
        self.network.distribution.sigma = self.action_noise
        actions = self.network.distribution.num_parts
        self.critic = Critic(self.spaces.observation, actions, **ensemble_settings(self))
        self.target_network, self.target_critic = make_target(self.network), make_target(self.critic)
        self.target_networks = [(self.network, self.target_network), (self.critic, self.target_critic)]

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        critic_optimizer, actor_optimizer = self.own_optimizers
        for batch in batches:
            obs = self.network.normalizer(batch.obs)
            if self.critic_subset is not None:
                self.critic.estimate.resample(self.noise)
            loss, errors, metrics = self.critic_loss(batch, obs, self.smoothing_noise(batch))
            self.record(critic_loss=loss, **metrics)
            self.record(critic_grad_norm=self.step(loss, critic_optimizer, "critic_loss"))
            self.update_priorities(batch, errors)
            if (self.updates + 1) % self.policy_delay == 0:
                loss = self.actor_loss(batch, obs)
                self.record(actor_loss=loss)
                self.record(actor_grad_norm=self.step(loss, actor_optimizer, "actor_loss"))
            self.end_update(batch)

    def smoothing_noise(self, batch: Transition) -> Tensor:
        """Sample clip(ε, −c, c) for the target policy, `[B, A]` (alg. 1)."""
        noise = torch.empty_like(batch.action).normal_(generator=self.noise) * self.target_policy_noise
        return noise.clamp(-self.target_noise_clip, self.target_noise_clip)

    def critic_loss(self, batch: Transition, obs: Tree, noise: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return ½ (Q(s, a) − y)² with y = r + γ min Q̄(s', π̄(s') + clip(ε, −c, c)) (alg. 1).

        Also return the error of each row `[B]`, and metrics.
        """
        with torch.no_grad():
            next_obs = self.network.normalizer(batch.next_obs)
            next_action = (self.target_network(next_obs, batch.memory, batch.episode_start) + noise).clamp(-1, 1)
            next_q = self.critic.estimate.target(self.target_critic(next_obs, next_action, batch.episode_start)[:, :, 0])
            target = batch.reward + batch.discount * batch.follow(next_q, 1)  # [Y, B, S]
        q = self.critic(obs, batch.action, batch.episode_start)[:, :, 0]  # [E · Z, B, S]
        row_losses, errors = self.critic.estimate.loss(q, target)
        return mean(row_losses, batch.weight), errors, {"q_value": batch.mean(q.detach().mean(0))}

    def actor_loss(self, batch: Transition, obs: Tree) -> Tensor:
        """Return −Q₁(s, π(s)), summed over the reward streams (alg. 1, deterministic policy gradient)."""
        action = self.network(obs, batch.memory, batch.episode_start)
        first = self.critic(obs, action, batch.episode_start)[: self.critic.estimate.atoms, :, 0].mean(0)
        return -mean(first.sum(-1), batch.weight)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(ScheduledAdam(self.critic), ScheduledAdam(self.network))
