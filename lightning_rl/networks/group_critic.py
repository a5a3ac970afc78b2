"""The critic of MA-POCA for groups of any number of agents (Cohen et al. 2021, https://arxiv.org/abs/2111.05992)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import Perceptron
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.encoders import HEADS, attend, t_fixup
from lightning_rl.networks.mlp import mlp, orthogonal, split_widths
from lightning_rl.spaces import Spaces
from lightning_rl.types import Tree


class GroupCritic(nn.Module):
    """V of a group's present agents, and for each agent j the baseline b_j: the value of the group independent of j's action.

    V({g(o_i)}) and b_j({g(o_j)} ∪ {f(o_i, a_i): i ≠ j}) are one network. g embeds an agent's observation, f its observation and action.
    Then follow attention among present agents, the mean over them, their number n out of A as 2 n / A − 1, hidden layers, and a head.

    Args:
        num_features: width of an agent's observation features.
        num_actions: width of an agent's action features.
        size: width of an embedded agent.
        net_arch, activation: of the hidden layers.
        num_outputs: outputs of the head.
    """

    def __init__(self, num_features: int, num_actions: int, size: int, net_arch: Sequence[int], activation: str, num_outputs: int) -> None:
        super().__init__()
        if size % HEADS:
            raise SettingError(f"attention_size {size} must be a multiple of {HEADS}, the heads of the attention")
        self.embed_obs = mlp(num_features, [size], activation)
        self.embed_obs_action = mlp(num_features + num_actions, [size], activation)
        self.query, self.key, self.value, self.out = (t_fixup(nn.Linear(size, size)) for _ in range(4))
        self.norm = nn.LayerNorm(size, elementwise_affine=False)
        self.head = mlp(size + 1, net_arch, activation)
        self.head.append(orthogonal(nn.Linear(net_arch[-1] if net_arch else size + 1, num_outputs), 1.0))

    def forward(self, features: Tensor, present: Tensor, actions: Tensor | None = None) -> Tensor:
        """Return V and, if there are actions, the baselines: `[..., 1, outputs]` or `[..., 1 + A, outputs]`.

        features: `[..., A, num_features]`.  present: `[..., A]`.  actions: `[..., A, num_actions]`.
        """
        members = self.embed_obs(features).unsqueeze(-3)
        if actions is not None:  # A encodings instead of A²: each of the 1 + A outputs selects one of two embeddings of each agent
            alone = torch.eye(present.shape[-1], dtype=torch.bool, device=present.device)
            alone = torch.cat([torch.ones_like(alone[:1]), alone]).unsqueeze(-1)
            members = torch.where(alone, members, self.embed_obs_action(torch.cat([features, actions], -1)).unsqueeze(-3))
        present = present.unsqueeze(-2)
        mean = attend(self, self.norm(members), present)
        number = 2 * present.sum(-1, keepdim=True) / present.shape[-1] - 1
        return self.head(torch.cat([mean, number.expand(*mean.shape[:-1], 1).to(mean.dtype)], -1))


class GroupActorCritic(ActorCritic):
    """A policy for each agent, and a critic of groups of A agents. Each row is an agent; rows are in the order of their groups.

    Args:
        spaces: spaces of one agent, with the names of all agents, and their groups.
        attention_size: width of an embedded agent in the critic.
        settings: settings of `ActorCritic`.
    """

    def __init__(self, spaces: Spaces, *, attention_size: int = 64, **settings: Any) -> None:
        super().__init__(spaces, **settings)
        self.group_size = spaces.group_size
        outputs, hidden = settings["streams"] * self.value_head.atoms, split_widths(settings["net_arch"], "vf")[1]
        seen, done = self.critic_memory.num_features, self.distribution.num_features
        self.critic = GroupCritic(seen, done, attention_size, hidden, settings["activation"], outputs)  # type: ignore[assignment]

    def perceptron(self) -> Perceptron | None:
        return Perceptron(self.actor_encoder, [self.memory] if self.shares else [self.memory, self.critic_memory], self.actor)

    def in_groups(self, x: Tensor) -> Tensor:
        """Reshape rows `[..., E · A, F]` to groups `[..., E, A, F]`."""
        return x.unflatten(-2, (-1, self.group_size))

    def value(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None, present: Tensor | None = None) -> Tensor:
        """Return V of each group `[..., E, S]`; `present [..., E, A]`: which agents are present, None: all."""
        features, _ = self._encode(self.normalizer(obs), memory, episode_start, for_critic=True)
        return self.value_head.value(self._criticize(features, present)).squeeze(-2)

    def evaluate(
        self,
        obs: Tree,
        action: Tree,
        memory: Tree = (),
        episode_start: Tensor | None = None,
        action_mask: Tree = (),
        present: Tensor | None = None,
        baselines: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probability of an action and the entropy `[..., D]` of each row, and the critic's output for `value_head`.

        Its shape is `[..., E, 1 + A, outputs]`, for V and then the A baselines, or `[..., E, 1, outputs]` without `baselines`.
        """
        obs = self.normalizer(obs)
        features, _ = self._encode(obs, memory, episode_start)
        log_prob, entropy = self.distribution.evaluate(self.actor(features).float(), action, action_mask)
        if not self.shares:
            features, _ = self._encode(obs, memory, episode_start, for_critic=True)
        return log_prob, entropy, self._criticize(features, present, action if baselines else None)

    def _criticize(self, features: Tensor, present: Tensor | None, action: Tree = None) -> Tensor:
        """Return the critic's output for the features of rows, and their actions if given."""
        features = self.in_groups(features)
        present = torch.ones_like(features[..., 0], dtype=torch.bool) if present is None else present
        done = None if action is None else self.in_groups(self.distribution.features(action))
        return self.critic(features, present, done).float()
