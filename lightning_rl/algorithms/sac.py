"""Soft Actor-Critic (Haarnoja et al. 2018, https://arxiv.org/abs/1801.01290 and, with a learned temperature, 1812.05905).

Discrete actions follow Christodoulou 2019 (https://arxiv.org/abs/1910.07207): expectations over all choices instead of samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.iteration import TargetNetworkUpdate, make_target
from lightning_rl.distributions import SoftActions, SoftSample
from lightning_rl.errors import SettingError
from lightning_rl.losses import soft_actor_critic as losses
from lightning_rl.networks.off_policy import Actor, Critic, Temperature, entropy_targets
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.settings.fields import Range
from lightning_rl.spaces import short
from lightning_rl.training.settings import CriticFields, ReplayFields, StateDependentFields, actor_settings, ensemble_settings
from lightning_rl.types import Transition, Tree


@dataclass(kw_only=True, eq=False, repr=False)
class SAC(CriticFields, ReplayFields, StateDependentFields, Algorithm):
    """Act, store transitions, and after every step improve critics Q, the policy π and the temperature α on a batch from the replay buffer.

    Supports Box, Discrete, MultiDiscrete, MultiBinary, and nested Dict or Tuple spaces. Continuous dimensions are sampled from a squashed
    Gaussian; for discrete ones, every choice is weighted by its probability. Each of the two kinds has its own temperature.

    Metrics: `train/critic_loss`, `train/actor_loss`, `train/ent_coef_loss`, `train/value_loss` (with a value network), `train/q_value`,
    `train/critic_grad_norm` and `train/actor_grad_norm` (before clipping), `train/ent_coef` and `train/entropy` (with two kinds of actions
    `…_continuous` and `…_discrete`), `train/entropy/<part>` for each part of a Dict or Tuple action, named by its path such as
    `arm.gripper`. For the replay buffer `replay/size`, `replay/mean_picks` (how often a transition was sampled, on average) and
    `replay/age_mean` (mean number of newer transitions from the same environment, in the last batch).
    """

    target_update_interval: int = 1
    """Updates between updates of the target critics."""
    policy_delay: Annotated[int, Range(1)] = 1
    """Critic updates per update of the policy and the temperature."""
    adam_beta1: Annotated[float, Range(0, 0.999)] = 0.9
    """β₁, the decay of Adam's mean gradient; for the temperature it is 0.9."""
    ent_coef: float | str = "auto"
    """Temperature α: a number, or `auto` (`auto_0.1` with an initial value) to learn it."""
    target_entropy: float | str | dict[str, float] = "auto"
    """Target of a learned temperature: `auto`, a number, or {continuous: …, discrete: …}. The entropy of continuous actions is that of
    actions in [-1, 1], whatever the bounds of the Box."""
    target_entropy_multiplier: Annotated[float, Range(0)] = 1.0
    """`auto` for continuous actions is minus the number of dimensions, times this factor."""
    target_entropy_scale: Annotated[float, Range(0, 1)] = 0.89
    """`auto` for choices is log n, summed over the branches, times this factor. With action masks, the target for choices shrinks with the
    maximum entropy of the legal choices."""
    value_network: bool = False
    """Learn a state value V with a target network, and two critics without one, as in the first paper (eqs. 5, 7, 8)."""
    critic_obs: list[str] | Literal["all", "state"] | None = None
    """Names of observations that only critics see; with several agents `all` or `state`."""
    log_std_init: Annotated[float, Range(-20, 20)] = -3.0
    """With use_sde: initial log σ."""
    threaded: bool = False
    """Collect the next iteration in a separate thread during updates, with a policy that is one iteration old. Useful for environments that
    wait for something, such as a simulator, or that have their own processes."""

    losses: ClassVar[tuple[str, ...]] = ("critic_loss", "actor_loss", "temperature_loss")
    assignable: ClassVar[tuple[str, ...]] = ("policy_delay",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.target_update = TargetNetworkUpdate(self.tau, self.target_update_interval)
        self.network: Actor = Actor(self.spaces, "squashed_normal", nn.Identity(), **actor_settings(self))
        self.actions = SoftActions(self.network.distribution)
        if self.n_quantiles is not None and self.value_network:
            raise SettingError("n_quantiles cannot be combined with value_network, which learns a mean; leave one out")
        if self.n_quantiles is not None and "discrete" in self.actions.kinds:
            with_quantiles = f"{type(self).__name__} with n_quantiles needs Box actions only, got {short(self.spaces.action)}"
            raise SettingError(f"{with_quantiles}; use SAC without n_quantiles, or DQN with distribution quantiles")
        self.critic = Critic(self.spaces.observation, self.actions.num_actions, self.actions.num_choices, **ensemble_settings(self))
        self.value = Critic(self.spaces.observation, 0, ensemble=1, **self.critic_settings) if self.value_network else None
        self.target = make_target(self.value or self.critic)
        self.target_networks = [(self.value or self.critic, self.target)]
        auto = self.actions.target_entropy(self.target_entropy_multiplier, self.target_entropy_scale)
        self.temperature = Temperature(self.actions.kinds, self.ent_coef, entropy_targets(self.target_entropy, auto))
        self.min_optimizers = 2 + self.temperature.learned
        self.losses = self.losses[: self.min_optimizers]  # type: ignore[misc]  # a temperature that is not learned has none

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        critic_optimizer, actor_optimizer, *temperature_optimizers = self.own_optimizers
        for batch in batches:
            obs = self.network.normalizer(batch.obs)
            policy_is_due = (self.updates + 1) % self.policy_delay == 0
            if policy_is_due or self.value_network:
                noise = self.actions.noise(len(batch.reward), self.noise)
            if self.critic_subset is not None:
                self.critic.estimate.resample(self.noise)
            next_noise = self.actions.noise(len(batch.reward), self.noise)
            loss, errors, metrics = self.critic_loss(batch, obs, next_noise, noise if self.value_network else None)
            self.record(**metrics)
            self.record(critic_grad_norm=self.step(loss, critic_optimizer, "critic_loss"))
            self.update_priorities(batch, errors)
            if policy_is_due:
                loss, entropy, metrics = self.actor_loss(batch, obs, noise)
                self.record(**metrics)
                self.record(actor_grad_norm=self.step(loss, actor_optimizer, "actor_loss"))
                for optimizer in temperature_optimizers:
                    loss = self.temperature_loss(batch, entropy)
                    self.record(ent_coef_loss=loss)
                    self.step(loss, optimizer, "ent_coef_loss")
            self.end_update(batch)

    def policy(self, obs: Tree, action_mask: Tree, batch: Transition, noise: Tensor) -> SoftSample:
        """Return π(·|s): a sample of the continuous dimensions, the probabilities of all choices, and the entropy."""
        return self.actions.evaluate(self.network(obs, batch.memory, batch.episode_start), noise, action_mask)

    def critic_loss(
        self, batch: Transition, obs: Tree, next_noise: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return J(Q) = ½ (Q(s, a) − (r + γ V(s')))² (1801.01290, eqs. 7 and 8), plus J(V) if V has its own network.

        Also return the error of each row `[B]`, and metrics. Actions are sampled with `next_noise` at s', and with `noise` at s for J(V).
        """
        with torch.no_grad():
            target = batch.reward + batch.discount * batch.follow(self.next_value(batch, next_noise), 1)  # [Y, B, S]
        q = self.critic(obs, self.actions.continuous(batch.action), batch.episode_start)
        q = losses.chosen(q, self.actions.choices(batch.action))  # [E · Z, B, S]
        row_losses, errors = self.critic.estimate.loss(q, target)
        loss = (batch.weight * row_losses).sum()
        metrics = {"critic_loss": loss, "q_value": batch.mean(q.detach().mean(0))}
        if noise is not None:
            metrics["value_loss"] = self.value_loss(batch, obs, noise)
            loss = loss + metrics["value_loss"]
        return loss, errors, metrics

    def next_value(self, batch: Transition, noise: Tensor) -> Tensor:
        """Return V(s') = E[min Q̄(s', a) − α log π(a|s')] (1801.01290, eq. 3), or V̄(s'), `[Y, B, S]`."""
        next_obs = self.network.normalizer(batch.next_obs)
        if self.value is not None:
            return self.target(next_obs, None, batch.episode_start)[:, :, 0]
        policy = self.policy(next_obs, batch.next_action_mask, batch, noise)
        q = self.critic.estimate.target(self.target(next_obs, policy.action, batch.episode_start))
        expected = losses.expected(q, policy.probs, self.actions.num_branches)
        return losses.soft_value(expected, policy.entropy, self.temperature())

    def value_loss(self, batch: Transition, obs: Tree, noise: Tensor) -> Tensor:
        """Return J(V) = ½ (V(s) − E[min Q(s, a) − α log π(a|s)])² (1801.01290, eq. 5); for choices min E[Q(s, a)], as in ML-Agents."""
        assert self.value is not None
        with torch.no_grad():
            policy = self.policy(obs, batch.action_mask, batch, noise)
            q = losses.expected(self.critic(obs, policy.action, batch.episode_start), policy.probs, self.actions.num_branches)
            q = self.critic.estimate.target(q)
            target = losses.soft_value(q, policy.entropy, self.temperature())
        return (batch.weight * losses.critic_loss(self.value(obs, None, batch.episode_start)[:, :, 0], target)).sum()

    def actor_loss(self, batch: Transition, obs: Tree, noise: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return J(π) = E[α log π(a|s) − min Q(s, a)] (1812.05905, eq. 7; 1910.07207, eq. 12), the entropies `[B, K]`, and metrics.

        With a value network, Q is that of the first critic.
        """
        policy = self.policy(obs, batch.action_mask, batch, noise)
        q = self.critic(obs, policy.action, batch.episode_start)
        q = self.critic.estimate.policy(q) if self.value is None else q[0]
        expected = losses.expected(q, policy.probs, self.actions.num_branches)
        loss = (batch.weight * losses.actor_loss(expected, policy.entropy, self.temperature())).sum()
        return loss, policy.entropy.detach(), {"actor_loss": loss, **self.actions.metrics(policy, self.temperature(), batch.mean)}

    def temperature_loss(self, batch: Transition, entropy: Tensor) -> Tensor:
        """Return J(α) = E[−log α (log π(a|s) + H̄)] (1812.05905, eq. 18, with log α in place of α as in the authors' code)."""
        target = self.actions.attainable(self.temperature.target, batch.action_mask)
        return (batch.weight * losses.temperature_loss(self.temperature.log_alpha, entropy, target)).sum()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        critics = nn.ModuleList([self.critic] if self.value is None else [self.critic, self.value])
        optimizers = [ScheduledAdam(network, beta1=self.adam_beta1) for network in (critics, self.network)]
        if self.temperature.learned:
            optimizers.append(ScheduledAdam(self.temperature))  # β₁ = 0.9 in CrossQ's code, too
        return self.with_side_learners(*optimizers)
