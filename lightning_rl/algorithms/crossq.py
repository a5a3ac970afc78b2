"""CrossQ (Bhatt et al. 2024, https://arxiv.org/abs/1902.05605): SAC without target networks; critics see both states in one batch."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from lightning_rl.algorithms.sac import SAC
from lightning_rl.distributions import SoftSample
from lightning_rl.losses import soft_actor_critic as losses
from lightning_rl.networks.layers import Layers, batch_statistics
from lightning_rl.networks.memory import Memory
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.types import Transition, Tree, tree_map


@dataclass(kw_only=True, eq=False, repr=False)
class CrossQ(SAC):
    """Evaluate (s, a) and (s', a') in one forward pass: batch renormalization sees both, so that the critics need no target networks.

    The policy acts with the running statistics of its training batches.

    Metrics: those of `SAC`.
    """

    learning_rate: ScheduleSetting = 1e-3
    """Step size of the optimizers."""
    batch_size: Annotated[int, Range(2)] = 256
    """Rows of a batch, whose statistics normalize the layers."""
    critic_net_arch: list[int] | None = None
    """Widths of the critics' hidden layers; null: [1024, 1024]."""
    critic_layers: Layers | Literal["batch_renorm"] = "batch_renorm"  # type: ignore[assignment]
    """Hidden layers of the critics: `batch_renorm`, or for comparison `plain`, `layer_norm` or `simba`."""
    actor_layers: Layers | Literal["batch_renorm"] = "batch_renorm"  # type: ignore[assignment]
    """Hidden layers of the policy."""
    policy_delay: Annotated[int, Range(1)] = 3
    """Critic updates per update of the policy and the temperature."""
    adam_beta1: Annotated[float, Range(0, 0.999)] = 0.5
    """β₁, the decay of Adam's mean gradient; for the temperature it is 0.9."""
    tau: float = field(init=False, default=1.0)
    target_update_interval: int = field(init=False, default=1)
    value_network: bool = field(init=False, default=False)
    memory: Memory | None = field(init=False, default=None)  # empty slots of its sequences would enter the statistics

    def __post_init__(self) -> None:
        if self.critic_net_arch is None and not isinstance(self.net_arch, dict):
            self.critic_net_arch = [1024, 1024]
        super().__post_init__()
        self.target_update, self.target_networks = None, []
        del self.target

    def policy(self, obs: Tree, action_mask: Tree, batch: Transition, noise: Tensor) -> SoftSample:
        """Return π(·|s), normalized by the statistics of the batch."""
        with batch_statistics(self.network):
            return super().policy(obs, action_mask, batch, noise)

    def critic_loss(
        self, batch: Transition, obs: Tree, next_noise: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return ½ (Q(s, a) − (r + γ V(s')))², V(s') = E[min Q(s', a') − α log π(a'|s')], all from one forward pass (fig. 2).

        Also return the error of each row `[B]`, and metrics.
        """
        next_obs = self.network.normalizer(batch.next_obs)
        with torch.no_grad():
            next_policy = super().policy(next_obs, batch.next_action_mask, batch, next_noise)
        both = tree_map(lambda now, later: torch.cat([now, later]), obs, next_obs)
        actions = [part for part in (self.actions.continuous(batch.action), next_policy.action) if part is not None]
        with batch_statistics(self.critic):
            q, next_q = self.critic(both, torch.cat(actions) if actions else None).chunk(2, 1)
        expected = losses.expected(self.critic.estimate.target(next_q.detach()), next_policy.probs, self.actions.num_branches)
        target = batch.reward + batch.discount * losses.soft_value(expected, next_policy.entropy, self.temperature())
        q = losses.chosen(q, self.actions.choices(batch.action))
        row_losses, errors = self.critic.estimate.loss(q, target)
        loss = (batch.weight * row_losses).sum()
        return loss, errors, {"critic_loss": loss, "q_value": batch.mean(q.detach().mean(0))}
