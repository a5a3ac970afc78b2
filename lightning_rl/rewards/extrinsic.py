"""The environment's own reward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_rl.errors import check_flag, check_range
from lightning_rl.rewards.signal import NoScale, ReturnScale, RewardSignal
from lightning_rl.types import Experience, Rollout


class Extrinsic(RewardSignal):
    """What the environment pays, clipped and scaled for learning; logged returns stay the environment's.

    With `normalize`, rewards are divided by √(var + 1e-8) of the discounted return so far, not centred, and cut to [-10, 10], as
    Stable-Baselines3's VecNormalize and gymnasium's NormalizeReward do (Engstrom et al. 2020).

    Args:
        gamma: discount of this stream.
        scale: factor on the reward, before it is normalized.
        clip: cut rewards to [-clip, clip] before anything else; None leaves them.
        normalize: divide by the running standard deviation of the discounted return.
        strength, ignore_done: see `RewardSignal`.
    """

    sees = False

    def __init__(
        self,
        gamma: float = 0.99,
        scale: float = 1.0,
        clip: float | None = None,
        normalize: bool = False,
        strength: float = 1.0,
        ignore_done: bool = False,
    ) -> None:
        super().__init__(gamma, strength, ignore_done)
        check_range("reward_signals.extrinsic.scale", scale, -1e9, 1e9)
        if clip is not None:
            check_range("reward_signals.extrinsic.clip", clip, 0, open_low=True)
        check_flag("reward_signals.extrinsic.normalize", normalize)
        self.scale, self.clip = scale, clip
        self.returns = ReturnScale(gamma) if normalize else NoScale()

    def forward(self, experience: Experience) -> Tensor:
        reward = self.returns(self._scaled(experience.reward))
        return reward if self.strength == 1 else reward * self.strength

    @torch.no_grad()
    def gather(self, rollout: Rollout) -> None:
        """Merge a rollout's rewards `[T, N, 1]`, each counted once, into the running statistics."""
        self.returns.gather(self._scaled(rollout.reward.squeeze(-1)), rollout)

    def get_state(self) -> dict[str, Any]:
        return self.returns.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.returns.set_state(state)

    def _scaled(self, reward: Tensor) -> Tensor:
        reward = reward if self.clip is None else reward.clamp(-self.clip, self.clip)
        return reward if self.scale == 1 else reward * self.scale
