"""Reward signals: the interface, the running scale of returns, and the environment's reward."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from lightning_rl.errors import check_flag, check_range
from lightning_rl.networks.normalization import RunningMeanStd, make_normalizer
from lightning_rl.optimization import ScheduledAdam, trainable
from lightning_rl.returns import discounted_sum
from lightning_rl.spaces import Spaces
from lightning_rl.types import Experience, Rollout, State


class RewardSignal(nn.Module):
    """A stream of rewards with its own discount, value head and weight, as in ML-Agents.

    Args:
        gamma: discount factor of this stream.
        strength: factor on its rewards; 0 keeps the value head, with rewards of 0.
        ignore_done: bootstrap from the next value at terminations too, so that survival is not rewarded in itself.
    """

    sees = True
    """Whether it needs more than the environment's reward."""

    def __init__(self, gamma: float = 0.99, strength: float = 1.0, ignore_done: bool = False) -> None:
        super().__init__()
        name = type(self).__name__.lower()
        check_range(f"reward_signals.{name}.gamma", gamma, 0, 1)
        check_range(f"reward_signals.{name}.strength", strength, -1e9, 1e9)
        check_flag(f"reward_signals.{name}.ignore_done", ignore_done)
        self.gamma, self.strength, self.ignore_done = gamma, strength, ignore_done
        self.returns: ReturnScale | None = None
        """Divides its rewards by the scale of their returns; None: no scaling."""

    def forward(self, experience: Experience) -> Tensor:
        """Return the stream's rewards `[...]`, multiplied by `strength`."""
        raise NotImplementedError

    def gather(self, rollout: Rollout) -> None:
        """Merge a rollout `[T, N]` into running statistics; called once per rollout."""

    def begin_episodes(self) -> None:
        """Forget the current episodes: all environments have started new ones."""
        if self.returns is not None:
            self.returns.begin_episodes()

    def get_state(self) -> State:
        """Return the state of this rank's environments; statistics and networks are in the weights."""
        return {} if self.returns is None else self.returns.get_state()

    def set_state(self, state: State) -> None:
        """Restore what `get_state` returned."""
        if self.returns is not None:
            self.returns.set_state(state)


class LearnedSignal(RewardSignal):
    """A signal with networks that are trained by Adam during the run; `normalize`: normalize observations by running statistics."""

    def __init__(
        self, spaces: Spaces, gamma: float, strength: float, ignore_done: bool, learning_rate: float, encoding_size: int, normalize: bool
    ) -> None:
        super().__init__(gamma, strength, ignore_done)
        name = f"reward_signals.{type(self).__name__.lower()}"
        check_range(f"{name}.learning_rate", learning_rate, 0)
        check_range(f"{name}.encoding_size", encoding_size, 1, whole=True)
        check_flag(f"{name}.normalize", normalize)
        self.learning_rate = learning_rate
        self.normalizer = make_normalizer("running" if normalize else "off", spaces.observation)

    @torch.no_grad()
    def forward(self, experience: Experience) -> Tensor:
        return self.reward(experience) * self.strength

    def reward(self, experience: Experience) -> Tensor:
        """Return the reward of each step, `[...]`, before `strength`."""
        raise NotImplementedError

    def loss(self, experience: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss over steps `[B]`, and metrics by name."""
        raise NotImplementedError

    def configure_optimizer(self) -> Optimizer:
        """Return the optimizer of its networks."""
        return ScheduledAdam(trainable(self))


class ReturnScale(nn.Module):
    """Divides rewards by √(var + 1e-8), with the running variance of the environments' discounted returns, and clips them to [-10, 10].

    A rollout of an actor continues the returns of this actor's last one that was learned from.
    """

    def __init__(self, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.statistics = RunningMeanStd()
        self.running = torch.zeros(0)
        """γ times the current return of each environment, actor after actor."""

    def forward(self, reward: Tensor) -> Tensor:
        scale = (self.statistics.var + 1e-8).rsqrt().float()
        return (reward * scale).clamp(-10.0, 10.0)

    def gather(self, reward: Tensor, rollout: Rollout) -> None:
        """Merge the discounted returns of rewards `[T, N]` up to each step."""
        actors = rollout.actors.tolist() if len(rollout.actors) else [0]
        num = reward.shape[1] // len(actors)
        unknown = max(0, num * (1 + max(actors)) - len(self.running))  # their first rollout
        self.running = pad(self.running.to(reward.device), (0, unknown))  # a checkpoint's is on the CPU
        carry, start = ~(rollout.terminated | rollout.truncated), rollout.episode_start
        carry[:-1] &= ~start[1:]  # an abandoned episode does not carry over to the next one
        reward = reward * rollout.valid
        returns = torch.empty_like(reward)
        for part, actor in enumerate(actors):
            at, envs = slice(part * num, (part + 1) * num), slice(actor * num, (actor + 1) * num)
            returns[:, at] = discounted_sum(reward[:, at], self.gamma * carry[:, at], self.running[envs] * ~start[0, at])
            self.running[envs] = returns[-1, at] * self.gamma * carry[-1, at]
        self.statistics.update(returns[rollout.valid])

    def begin_episodes(self) -> None:
        """Forget the current returns."""
        self.running = torch.zeros(0, device=self.running.device)

    def get_state(self) -> State:
        return {"running": self.running}

    def set_state(self, state: State) -> None:
        self.running = torch.from_numpy(state["running"])
        if self.running.dim() != 1:
            raise ValueError(f"returns of environments have shape {tuple(self.running.shape)}")


class Extrinsic(RewardSignal):
    """The environment's reward, clipped and scaled for learning; logged returns are the environment's own.

    With `normalize`, rewards are divided by √(var + 1e-8) of the running discounted return, without centering, and clipped to [-10, 10], as
    in Stable-Baselines3's VecNormalize and gymnasium's NormalizeReward (Engstrom et al. 2020).

    Args:
        gamma: discount factor of this stream.
        scale: factor on the reward, before it is normalized.
        clip: clip rewards to [-clip, clip] before anything else; None: no clipping.
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
        if normalize:
            self.returns = ReturnScale(gamma)

    def forward(self, experience: Experience) -> Tensor:
        reward = experience.reward if self.clip is None else experience.reward.clamp(-self.clip, self.clip)
        reward = reward if self.scale == 1 else reward * self.scale
        reward = reward if self.returns is None else self.returns(reward)
        return reward if self.strength == 1 else reward * self.strength

    @torch.no_grad()
    def gather(self, rollout: Rollout) -> None:
        """Merge a rollout's rewards `[T, N, 1]`, each counted once, into the running statistics."""
        if self.returns is not None:
            reward = rollout.reward.squeeze(-1)
            self.returns.gather((reward if self.clip is None else reward.clamp(-self.clip, self.clip)) * self.scale, rollout)
