"""Action values of off-policy algorithms with an actor."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from gymnasium.spaces import Space
from torch import Tensor, nn

from lightning_rl.networks.encoders import TreeEncoder
from lightning_rl.networks.goal import goal_mlp
from lightning_rl.networks.memory import Memory, make_memory
from lightning_rl.networks.mlp import EnsembleLinear
from lightning_rl.types import Tree


class Critic(nn.Module):
    """Q(s, a) of an ensemble: encoder → memory → beside the continuous action → hidden layers, E of them in one batched product → heads.

    Observations come normalized: the normalizer is the actor's. Weights start as torch's own layers do. A memory begins empty with each
    sequence: a critic is not asked while its experience is made.

    Args:
        space: observation space.
        num_actions: A, continuous dimensions of an action; 0 for a value of the observation alone.
        num_choices: M, values for each observation.
        ensemble: E, how many critics; an image encoder and a memory are shared by all.
        streams: S, the number of reward streams.
        net_arch, activation, encoder, encoder_features, entities, goals, memory: as in `Actor`.
    """

    def __init__(
        self,
        space: Space,
        num_actions: int,
        num_choices: int = 1,
        *,
        ensemble: int = 2,
        streams: int = 1,
        net_arch: Sequence[int] = (256, 256),
        activation: str = "relu",
        encoder: str = "auto",
        encoder_features: int = 512,
        entities: Sequence[str] = (),
        goals: Sequence[str] = (),
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        self.encoder = TreeEncoder(space, encoder, encoder_features, entities, goals)
        self.memory = make_memory(memory, self.encoder.num_features, self.encoder.num_goal_features)
        self.heads = (num_choices, streams)
        layer = partial(EnsembleLinear, ensemble)
        num_inputs = self.memory.num_features + num_actions
        self.layers = goal_mlp(num_inputs, net_arch, activation, layer, self.memory.goal)
        self.layers.append(layer(net_arch[-1] if net_arch else num_inputs, num_choices * streams))

    def forward(self, obs: Tree, action: Tensor | None = None, episode_start: Tensor | None = None) -> Tensor:
        """Q `[E, B, M, S]` of observations `[B, ...]` and the continuous dimensions of actions `[B, A]`."""
        x, _ = self.memory(self.encoder(obs), (), episode_start)
        return self.layers(x if action is None else torch.cat([x, action], -1)).float().unflatten(-1, self.heads)
