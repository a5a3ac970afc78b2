"""Intrinsic rewards: curiosity (Pathak et al. 2017, https://arxiv.org/abs/1705.05363) and random network distillation
(Burda et al. 2018, https://arxiv.org/abs/1810.12894).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_rl.distributions import Distribution, make_distribution
from lightning_rl.errors import check_flag
from lightning_rl.losses.policy_gradient import mean
from lightning_rl.networks.encoders import TreeEncoder
from lightning_rl.networks.mlp import mlp
from lightning_rl.rewards.signal import LearnedSignal, ReturnScale
from lightning_rl.spaces import Spaces
from lightning_rl.types import Experience, Rollout, Tree, flatten_time

HIDDEN = 256


class Curiosity(LearnedSignal):
    """Rewards prediction errors: ½ ‖φ(s') − f(φ(s), a)‖², at most 1 / strength, and 0 before the first update.

    φ learns what actions influence, by predicting actions from their effects (the inverse model), and what is predictable.
    Loss: 10 · (0.2 · L_forward + 0.8 · L_inverse).

    Args:
        spaces: spaces of the environment.
        actions: returns the policy's distribution, after it is built.
        learning_rate: learning rate of Adam.
        encoding_size: width of φ.
        encoder: image encoder, as for the algorithm.
        normalize: normalize observations by running statistics.
        gamma, strength, ignore_done: see `RewardSignal`.
    """

    def __init__(
        self,
        spaces: Spaces,
        actions: Callable[[], Distribution],
        gamma: float = 0.99,
        strength: float = 0.02,
        ignore_done: bool = True,
        learning_rate: float = 3e-4,
        encoding_size: int = 128,
        encoder: str = "auto",
        normalize: bool = False,
    ) -> None:
        super().__init__(spaces, gamma, strength, ignore_done, learning_rate, encoding_size, normalize)
        self.actions = actions
        leaves = TreeEncoder(spaces.observation, encoder, encoding_size)
        self.encode = nn.Sequential(leaves, *mlp(leaves.num_features, [encoding_size, encoding_size], "silu"))
        width = make_distribution(spaces.action).num_features
        self.forward_model = mlp(encoding_size + width, [HIDDEN], "silu").append(nn.Linear(HIDDEN, encoding_size))
        self.inverse_model = mlp(2 * encoding_size, [HIDDEN], "silu").append(nn.Linear(HIDDEN, width))
        self.register_buffer("learned", torch.zeros((), dtype=torch.bool))

    learned: Tensor

    def reward(self, experience: Experience) -> Tensor:
        code, next_code = self._codes(experience)
        limit = 1 / self.strength if self.strength > 0 else float("inf")
        return self._forward_error(code, next_code, experience).clamp(max=limit) * self.learned

    def loss(self, experience: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        code, next_code = self._codes(experience)
        forward_loss = mean(self._forward_error(code, next_code, experience), experience.weight)
        predicted = self.inverse_model(torch.cat([code, next_code], -1)).float()
        inverse_loss = mean(self.actions().prediction_loss(predicted, experience.action), experience.weight)
        self.learned.fill_(True)
        loss = 10 * (0.2 * forward_loss + 0.8 * inverse_loss)
        return loss, {"forward_loss": forward_loss, "inverse_loss": inverse_loss}

    @torch.no_grad()
    def gather(self, rollout: Rollout) -> None:
        self.normalizer.gather(rollout.obs, rollout.valid)

    def _codes(self, experience: Experience) -> tuple[Tensor, Tensor]:
        return self.encode(self.normalizer(experience.obs)), self.encode(self.normalizer(experience.next_obs))

    def _forward_error(self, code: Tensor, next_code: Tensor, experience: Experience) -> Tensor:
        action = self.actions().features(experience.action)
        predicted = self.forward_model(torch.cat([code, action], -1))
        return 0.5 * (next_code - predicted).float().square().sum(-1)


class RND(LearnedSignal):
    """Rewards novel observations, for which a network f̂ does not predict the output of a fixed random network f: mean (f̂(s') − f(s'))².

    Observations are normalized by running statistics, and rewards are divided by the running standard deviation of their discounted
    return, as in the paper; both can be turned off.

    Args:
        spaces: spaces of the environment.
        learning_rate: learning rate of Adam.
        encoding_size: width of the outputs of both networks.
        encoder: image encoder, as for the algorithm.
        normalize: normalize observations by running statistics.
        normalize_reward: divide rewards by the running standard deviation of the return of this stream.
        gamma, strength, ignore_done: see `RewardSignal`.
    """

    def __init__(
        self,
        spaces: Spaces,
        gamma: float = 0.99,
        strength: float = 0.01,
        ignore_done: bool = True,
        learning_rate: float = 1e-4,
        encoding_size: int = 128,
        encoder: str = "auto",
        normalize: bool = True,
        normalize_reward: bool = True,
    ) -> None:
        super().__init__(spaces, gamma, strength, ignore_done, learning_rate, encoding_size, normalize)
        check_flag("reward_signals.rnd.normalize_reward", normalize_reward)
        self.predictor, self.target = (self._network(spaces, encoder, encoding_size) for _ in range(2))
        self.target.requires_grad_(False)
        if normalize_reward:
            self.returns = ReturnScale(gamma)

    @staticmethod
    def _network(spaces: Spaces, encoder: str, encoding_size: int) -> nn.Sequential:
        leaves = TreeEncoder(spaces.observation, encoder, encoding_size)
        layers = mlp(leaves.num_features, [encoding_size], "silu")
        return nn.Sequential(leaves, *layers, nn.Linear(encoding_size, encoding_size))

    def reward(self, experience: Experience) -> Tensor:
        novelty = self._novelty(experience.next_obs)
        return novelty if self.returns is None else self.returns(novelty)

    def loss(self, experience: Experience) -> tuple[Tensor, dict[str, Tensor]]:
        loss = mean(self._novelty(experience.next_obs), experience.weight)
        return loss, {"loss": loss}

    @torch.no_grad()
    def gather(self, rollout: Rollout) -> None:
        self.normalizer.gather(rollout.next_obs, rollout.valid)
        if self.returns is not None:
            self.returns.gather(self._novelty(flatten_time(rollout.next_obs)).view_as(rollout.terminated), rollout)

    def _novelty(self, obs: Tree) -> Tensor:
        obs = self.normalizer(obs)
        return (self.predictor(obs) - self.target(obs)).float().square().mean(-1)
