"""Twin Delayed Deep Deterministic policy gradient (Fujimoto et al. 2018, https://arxiv.org/abs/1802.09477).

DDPG (Lillicrap et al. 2016, https://arxiv.org/abs/1509.02971) is `n_critics: 1, policy_delay: 1, target_policy_noise: 0`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.target_update import TargetNetworkUpdate, make_target
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.data.replay_dataset import ReplayDataset, ReplaySettings
from lightning_rl.distributions import check_box_actions
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import as_settings, check_range
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.losses.soft_actor_critic import critic_loss
from lightning_rl.networks.actor import Actor
from lightning_rl.networks.critic import Critic
from lightning_rl.networks.flat import FlatAdam
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.types import Transition, Tree


class TD3(Algorithm):
    """A deterministic policy that follows the gradient of the first of two critics, every other update, and explores with noise.

    Args:
        learning_rate: step size of the optimizers, a number or a schedule.
        net_arch: widths of the hidden layers, [256, 256] unless given, of the policy and of each critic.
        activation: of the hidden layers: tanh, relu, silu, elu, leaky_relu or gelu.
        max_grad_norm: cut gradients to this Euclidean norm; null leaves them.
        buffer_size: how many transitions are remembered.
        batch_size: rows of a batch, with a memory a multiple of its sequence_length.
        learning_starts: environment steps before the first update.
        train_freq: environment steps, counted over all environments, between learning.
        gradient_steps: updates each time; -1 makes as many as there were steps.
        steps_per_iteration: environment steps of an iteration, between which acting and learning take turns.
        n_steps: length of the returns' windows; shorter at the end of an episode.
        warmup: actions before learning starts: `random` or from the `policy`.
        replay: how memories are kept and drawn, see `ReplayConfig`.
        tau: fraction by which the target networks move each time.
        policy_delay: updates of the critics for one of the policy and of the targets.
        n_critics: how many critics; the least of their values is the target.
        action_noise: standard deviation of the noise that explores, for actions in [-1, 1].
        target_policy_noise: standard deviation of the noise on the target's actions in [-1, 1].
        target_noise_clip: that noise is cut to ± this.

    Metrics: `train/critic_loss`, `train/actor_loss`, `train/q_value`, `train/critic_grad_norm` and `train/actor_grad_norm` (before
    clipping), and of the memory `replay/size`, `replay/mean_picks` (how often a memory was drawn) and `replay/age_mean` (transitions of
    its own environment newer than a drawn one, in the last batch).
    """

    losses = ("critic_loss", "actor_loss")
    min_optimizers = 2

    def __init__(
        self,
        env: EnvConfig,
        *,
        learning_rate: ScheduleSetting = 1e-3,
        net_arch: list[int] | None = None,
        activation: str = "relu",
        max_grad_norm: float | None = None,
        buffer_size: int = 1_000_000,
        batch_size: int = 256,
        learning_starts: int = 100,
        train_freq: int = 1,
        gradient_steps: int = 1,
        steps_per_iteration: int = 100,
        n_steps: int = 1,
        warmup: Literal["random", "policy"] = "random",
        replay: ReplayConfig = ReplayConfig(),
        tau: float = 0.005,
        policy_delay: int = 2,
        n_critics: int = 2,
        action_noise: float = 0.1,
        target_policy_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        **common: Any,
    ) -> None:
        net_arch = [256, 256] if net_arch is None else net_arch
        super().__init__(env, learning_rate=learning_rate, net_arch=net_arch, activation=activation, max_grad_norm=max_grad_norm, **common)
        check_box_actions("TD3", self.spaces.action)
        check_range("policy_delay", policy_delay, 1, whole=True)
        check_range("n_critics", n_critics, 1, whole=True)
        check_range("action_noise", action_noise, 0)
        check_range("target_policy_noise", target_policy_noise, 0)
        check_range("target_noise_clip", target_noise_clip, 0)
        self.policy_delay = policy_delay
        self.target_policy_noise, self.target_noise_clip = target_policy_noise, target_noise_clip
        self.replay_config = as_settings("replay", ReplayConfig, replay)
        self.replay_settings = ReplaySettings(
            buffer_size=buffer_size,
            batch_size=batch_size,
            learning_starts=learning_starts,
            train_freq=train_freq,
            gradient_steps=gradient_steps,
            steps_per_iteration=steps_per_iteration,
            n_steps=n_steps,
            warmup=warmup,
            memory=self.memory,
        )
        self.target_update = TargetNetworkUpdate(tau, policy_delay)
        self.network = Actor(self.spaces, "noisy", nn.Tanh(), **self.network_settings)
        self.network.distribution.sigma = action_noise
        actions = self.network.distribution.num_parts
        self.critic = Critic(self.spaces.observation, actions, ensemble=n_critics, **self.critic_settings)
        self.target_network, self.target_critic = make_target(self.network), make_target(self.critic)
        self.target_networks = [(self.network, self.target_network), (self.critic, self.target_critic)]

    def experience(self) -> ReplayDataset:
        return self.replay(self.replay_settings, self.replay_config)

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        critic_optimizer, actor_optimizer = self.raw_optimizers()
        with self.learning():
            for batch in batches:
                obs = self.network.normalizer(batch.obs)
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
        """Draw clip(ε, −c, c) for the target policy, `[B, A]` (alg. 1)."""
        noise = torch.empty_like(batch.action).normal_(generator=self.noise) * self.target_policy_noise
        return noise.clamp(-self.target_noise_clip, self.target_noise_clip)

    def critic_loss(self, batch: Transition, obs: Tree, noise: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """½ (Q(s, a) − y)² with y = r + γ min Q̄(s', π̄(s') + clip(ε, −c, c)) (alg. 1).

        Returns the loss, the error of each row `[B]`, and what is logged.
        """
        with torch.no_grad():
            next_obs = self.network.normalizer(batch.next_obs)
            next_action = (self.target_network(next_obs, batch.memory, batch.episode_start) + noise).clamp(-1, 1)
            next_q = self.target_critic(next_obs, next_action, batch.episode_start)[:, :, 0].amin(0)
            target = batch.reward + batch.discount * batch.follow(next_q)
        q = self.critic(obs, batch.action, batch.episode_start)[:, :, 0]
        loss = mean(critic_loss(q, target), batch.weight)
        taken = q.detach()
        return loss, (taken - target).abs().mean((0, 2)), {"q_value": batch.mean(taken.mean(0))}

    def actor_loss(self, batch: Transition, obs: Tree) -> Tensor:
        """−Q₁(s, π(s)), summed over the reward streams (alg. 1, deterministic policy gradient)."""
        action = self.network(obs, batch.memory, batch.episode_start)
        return -mean(self.critic(obs, action, batch.episode_start)[0, :, 0].sum(-1), batch.weight)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self.with_side_learners(FlatAdam(self.critic), FlatAdam(self.network))
