"""TD3+BC (Fujimoto and Gu 2021, https://arxiv.org/abs/2106.06860): offline TD3 with a policy that stays close to the data."""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from lightning_rl.algorithms.td3 import TD3
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.schedules import ScheduleSetting
from lightning_rl.settings.fields import Range
from lightning_rl.training.settings import OfflineFields
from lightning_rl.types import Transition, Tree


@dataclass(kw_only=True, eq=False, repr=False)
class TD3BC(OfflineFields, TD3):
    """Maximize the first critic, scaled by its mean absolute value, and clone the data. Box actions only.

    Learns from the dataset only; with `online`, also from the environment's steps.

    Metrics: those of `TD3`, and `train/epochs` (passes over all transitions).
    """

    learning_rate: ScheduleSetting = 3e-4
    """Step size of the optimizers."""
    normalize_obs: str = "frozen"
    """Normalize observations by the statistics of the dataset: `frozen`, or `running`, which `online` continues; or `off`."""
    alpha: Annotated[float, Range(0)] = 2.5
    """Weight of the critic relative to cloning; 0 only clones the data."""

    def actor_loss(self, batch: Transition, obs: Tree) -> Tensor:
        """Return −λ Q₁(s, π(s)) + (π(s) − a)² with λ = α / mean |Q₁(s, π(s))| (eqs. 3 and 5), for actions in [-1, 1]."""
        action = self.network(obs, batch.memory, batch.episode_start)
        q = self.critic(obs, action, batch.episode_start)[: self.critic.estimate.atoms, :, 0].mean(0).sum(-1)
        scale = self.alpha / mean(q.detach().abs(), batch.weight).clamp(min=1e-8)
        return mean((action - batch.action).square(), batch.weight) - scale * mean(q, batch.weight)
