"""The policy of off-policy algorithms: an actor without a value."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Generator, Tensor, nn

from lightning_rl.distributions import make_distribution
from lightning_rl.networks.encoders import TreeEncoder
from lightning_rl.networks.goal import goal_mlp
from lightning_rl.networks.memory import Memory, make_memory
from lightning_rl.networks.normalization import make_normalizer
from lightning_rl.networks.policy import Perceptron, PolicyNetwork
from lightning_rl.spaces import Spaces, check_observation_space
from lightning_rl.types import Tree


class Actor(PolicyNetwork):
    """π(a|s): normalizer → encoder → memory → hidden layers → head → distribution. Weights start as torch's own layers do.

    Args:
        spaces: observation and action space of one environment.
        action_dist: for Box actions, see `distributions.make_distribution`.
        head: what follows the last layer, for instance `nn.Tanh()`.
        net_arch: widths of the hidden layers.
        activation: of the hidden layers.
        encoder: for images, see `networks/encoders.py`.
        encoder_features: width of the image encoder's output.
        entities: names of observations that are sets of entities, see `networks/attention.py`.
        goals: names of observations that generate the last hidden layer, see `networks/goal.py`.
        normalize_obs: `off`, `running` or `frozen`.
        memory: what the policy remembers with.
    """

    def __init__(
        self,
        spaces: Spaces,
        action_dist: str,
        head: nn.Module,
        *,
        net_arch: Sequence[int] = (256, 256),
        activation: str = "relu",
        encoder: str = "auto",
        encoder_features: int = 512,
        entities: Sequence[str] = (),
        goals: Sequence[str] = (),
        normalize_obs: str = "off",
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        check_observation_space(spaces.observation, entities, goals)
        self.normalizer = make_normalizer(normalize_obs, spaces.observation, entities)
        self.encoder = TreeEncoder(spaces.observation, encoder, encoder_features, entities, goals)
        self.memory = make_memory(memory, self.encoder.num_features, self.encoder.num_goal_features)
        self.distribution = make_distribution(spaces.action, action_dist)
        features = self.memory.num_features
        self.layers = goal_mlp(features, net_arch, activation, nn.Linear, self.memory.goal)
        self.layers.append(nn.Linear(net_arch[-1] if net_arch else features, self.distribution.num_inputs)).append(head)

    def perceptron(self) -> Perceptron | None:
        """What turns normalized observations into the distribution's input; a subclass may compute something else."""
        return Perceptron(self.encoder, [self.memory], self.layers) if type(self) is Actor else None

    def forward(self, obs: Tree, memory: Tree = (), episode_start: Tensor | None = None) -> Tensor:
        """The distribution's input at normalized observations, `[..., num_inputs]`."""
        return self.layers(self.memory(self.encoder(obs), memory, episode_start)[0]).float()

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        features, memory = self.memory(self.encoder(self.normalizer(obs)), memory, episode_start)
        return self.layers(features).float(), memory
