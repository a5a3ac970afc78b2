"""The environment's own reward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_rl.networks.normalization import RunningMeanStd
from lightning_rl.returns import discounted_sum
from lightning_rl.types import Rollout


class Extrinsic(nn.Module):
    """What the environment pays, clipped and scaled for learning; logged returns stay the environment's.

    With `normalize`, rewards are divided by √(var + 1e-8) of the discounted return so far, not centred, and cut to [-10, 10], as
    Stable-Baselines3's VecNormalize and gymnasium's NormalizeReward do (Engstrom et al. 2020).

    Args:
        gamma: discount of this stream.
        scale: factor on the reward.
        clip: cut rewards to [-clip, clip] before anything else; None leaves them.
        normalize: divide by the running standard deviation of the discounted return.
    """

    def __init__(self, gamma: float = 0.99, scale: float = 1.0, clip: float | None = None, normalize: bool = False) -> None:
        super().__init__()
        self.gamma, self.scale = gamma, scale
        self.clip = float("inf") if clip is None else clip
        self.returns = ReturnScale(gamma) if normalize else NoScale()

    @torch.no_grad()
    def forward(self, rollout: Rollout) -> Tensor:
        """Rewards `[T, N, 1]`."""
        reward = rollout.reward.clamp(-self.clip, self.clip) * self.scale
        return self.returns(reward, rollout)


class NoScale(nn.Module):
    """Rewards as they are."""

    def forward(self, reward: Tensor, rollout: Rollout) -> Tensor:
        return reward


class ReturnScale(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return of each environment."""

    def __init__(self, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.gamma, self.clip, self.epsilon = gamma, clip, epsilon
        self.statistics = RunningMeanStd()
        self.running = torch.zeros(0)

    def forward(self, reward: Tensor, rollout: Rollout) -> Tensor:
        flat = reward.squeeze(-1)
        if self.running.shape != flat[0].shape:  # the first rollout of a run
            self.running = torch.zeros_like(flat[0])
        carry = ~(rollout.terminated | rollout.truncated)
        returns = discounted_sum(flat, self.gamma * carry, self.running)
        self.running = returns[-1] * self.gamma * carry[-1]
        self.statistics.update(returns[rollout.valid])
        scale = (self.statistics.var + self.epsilon).rsqrt().float()
        return (reward * scale).clamp(-self.clip, self.clip)
