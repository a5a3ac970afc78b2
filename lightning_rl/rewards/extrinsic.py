"""The environment's own reward."""

from __future__ import annotations

from typing import Any

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
        self.gamma, self.scale, self.clip = gamma, scale, clip
        self.returns = ReturnScale(gamma) if normalize else NoScale()

    def forward(self, reward: Tensor) -> Tensor:
        """Rewards as the environment paid them, of any shape, as they are learned from."""
        return self.returns(self._scaled(reward))

    @torch.no_grad()
    def gather(self, rollout: Rollout) -> None:
        """Merge a rollout's rewards `[T, N, 1]`, each counted once, into the running statistics."""
        self.returns.gather(self._scaled(rollout.reward.squeeze(-1)), rollout)

    def get_state(self) -> dict[str, Any]:
        """What belongs to the environments of this rank; the statistics are in the weights."""
        return self.returns.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.returns.set_state(state)

    def _scaled(self, reward: Tensor) -> Tensor:
        reward = reward if self.clip is None else reward.clamp(-self.clip, self.clip)
        return reward if self.scale == 1 else reward * self.scale


class NoScale(nn.Module):
    """Rewards as they are."""

    def forward(self, reward: Tensor) -> Tensor:
        return reward

    def gather(self, reward: Tensor, rollout: Rollout) -> None:
        """Nothing to merge."""

    def get_state(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Nothing to restore."""


class ReturnScale(nn.Module):
    """Divides rewards by the running standard deviation of the discounted return of each environment."""

    def __init__(self, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.gamma, self.clip, self.epsilon = gamma, clip, epsilon
        self.statistics = RunningMeanStd()
        self.running = torch.zeros(0)

    def forward(self, reward: Tensor) -> Tensor:
        scale = (self.statistics.var + self.epsilon).rsqrt().float()
        return (reward * scale).clamp(-self.clip, self.clip)

    def gather(self, reward: Tensor, rollout: Rollout) -> None:
        """Merge the discounted returns so far of rewards `[T, N]`."""
        if self.running.shape != reward[0].shape:  # the first rollout of a run
            self.running = torch.zeros_like(reward[0])
        carry = ~(rollout.terminated | rollout.truncated)
        returns = discounted_sum(reward, self.gamma * carry, self.running)
        self.running = returns[-1] * self.gamma * carry[-1]
        self.statistics.update(returns[rollout.valid])

    def get_state(self) -> dict[str, Any]:
        """The discounted returns of the episodes under way."""
        return {"running": self.running}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse."""
        self.running = torch.from_numpy(state["running"]).to(self.running.device)
