"""Conservative Q-Learning (Kumar et al. 2020, https://arxiv.org/abs/2006.04779): offline SAC with pessimistic critics."""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lightning_rl.algorithms.sac import SAC
from lightning_rl.distributions import check_box_actions
from lightning_rl.losses.offline import conservative_gap
from lightning_rl.networks.memory import Memory
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import OfflineFields
from lightning_rl.types import Transition, Tree, tree_map


@dataclass(kw_only=True, eq=False, repr=False)
class CQL(OfflineFields, SAC):
    """Lower Q of random actions and of the policy's actions, and raise Q of actions in the data. Box actions only.

    Learns from the dataset only; with `online`, also from the environment's steps.

    Metrics: those of `SAC`, `train/conservative_gap` (log ∫ exp Q minus Q of the data, for each critic), and `train/epochs` (passes over
    all transitions).
    """

    cql_alpha: Annotated[float, Range(0)] = 5.0
    """Weight of the conservative gap, added to the squared error; 0 gives SAC."""
    cql_actions: Annotated[int, Range(1)] = 10
    """Number of actions of each kind that estimate the integral: random ones, the policy's at s, and the policy's at s'."""
    backup_entropy: bool = False
    """Include the policy's entropy in targets, as SAC does."""
    value_network: bool = field(init=False, default=False)
    threaded: bool = field(init=False, default=False)
    n_quantiles: int | None = field(init=False, default=None)
    drop_quantiles: int = field(init=False, default=0)
    memory: Memory | None = field(init=False, default=None)  # sampled actions in a sequence's slots would need its features separately

    losses = ("conservative_loss", "actor_loss", "temperature_loss")
    assignable: ClassVar[tuple[str, ...]] = ("cql_alpha", "cql_actions")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_box_actions("CQL", self.spaces.action)

    def critic_loss(
        self, batch: Transition, obs: Tree, next_noise: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return ½ [(Q(s, a) − y)² + α (log ∫ exp Q(s, ·) − Q(s, a))], y = r + γ min Q̄(s', a') (eq. 4; half the authors' code).

        Also return the error of each row `[B]`, and metrics.
        """
        next_obs = self.network.normalizer(batch.next_obs)
        with torch.no_grad():
            target = batch.reward + batch.discount * self.next_value(batch, next_noise)
            near, next_near = self.draws(obs), self.draws(next_obs)
            uniform = torch.empty_like(near[0]).uniform_(-1, 1, generator=self.noise)
            density = torch.full_like(near[1], -math.log(2) * uniform.shape[-1])
            actions, log_prob = torch.cat([uniform, near[0], next_near[0]]), torch.cat([density, near[1], next_near[1]])
        return self.conservative_loss(batch, obs, target, actions, log_prob)

    def next_value(self, batch: Transition, noise: Tensor) -> Tensor:
        """Return min Q̄(s', a') for an action of the policy, or V(s') as in `SAC` with `backup_entropy`, `[1, B, S]`."""
        if self.backup_entropy:
            return super().next_value(batch, noise)
        next_obs = self.network.normalizer(batch.next_obs)
        policy = self.policy(next_obs, batch.next_action_mask, batch, noise)
        return self.critic.estimate.target(self.target(next_obs, policy.action)[:, :, 0])

    def draws(self, obs: Tree) -> tuple[Tensor, Tensor]:
        """Sample K actions of the policy for each observation, `[K, B, A]`, with their log-probabilities `[K, B]`."""
        x = self.network(obs)
        x = x.expand(self.cql_actions, *x.shape).flatten(0, 1)
        policy = self.actions.evaluate(x, self.actions.noise(len(x), self.noise))
        assert policy.action is not None and policy.log_prob is not None
        return policy.action.unflatten(0, (self.cql_actions, -1)), policy.log_prob.sum(-1).unflatten(0, (self.cql_actions, -1))

    def conservative_loss(
        self, batch: Transition, obs: Tree, target: Tensor, actions: Tensor, log_prob: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return `critic_loss` for targets `[1, B, S]` and sampled actions `[3 K, B, A]`; the gap uses Q summed over reward streams."""
        q = self.critic(obs, batch.action)[:, :, 0]
        repeated = tree_map(lambda leaf: leaf.expand(len(actions), *leaf.shape).flatten(0, 1), obs)
        drawn = self.critic(repeated, actions.flatten(0, 1))[:, :, 0].sum(-1).unflatten(1, (len(actions), -1))
        gap = conservative_gap(drawn, log_prob, q.sum(-1))
        row_losses, errors = self.critic.estimate.loss(q, target)
        loss = (batch.weight * (row_losses + 0.5 * self.cql_alpha * gap)).sum()
        metrics = {"critic_loss": loss, "q_value": batch.mean(q.detach().mean(0)), "conservative_gap": batch.mean(gap.detach() / len(q))}
        return loss, errors, metrics
