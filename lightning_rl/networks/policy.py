"""What every network that acts has in common."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Generator, Tensor, nn

from lightning_rl.distributions import Distribution
from lightning_rl.types import Tree, tree_index


class Perceptron(NamedTuple):
    """The parts of a network that is as plain as this: encoder → memory → linear layers and activations in turn.

    memories: that of the policy, and any that only have to be kept up to date.
    """

    encoder: Any
    memories: list[Any]
    layers: nn.Sequential


class PolicyNetwork(nn.Module):
    """A network with a distribution of actions, conditioned on what `policy` makes of observations."""

    distribution: Distribution
    memory: Any
    """What the policy remembers with, see `networks/memory.py`."""

    def initial_memory(self, num: int) -> Tree:
        """The memory of `num` environments at the start of an episode."""
        return self.memory.initial(num)

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        """The distribution's input `[..., num_inputs]` at observations as they are, and the new memory."""
        raise NotImplementedError

    def judge(
        self, obs: Tree, action: Tree, memory: Tree = (), episode_start: Tensor | None = None, action_mask: Tree = ()
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of T steps' actions `[T, N, D]`, and V(s) `[T + 1, N, S]` of what was seen before, between and after them."""
        network: Any = self
        start = None if episode_start is None else episode_start[:-1]
        log_prob = network.log_prob(tree_index(obs, slice(-1)), action, memory, start, action_mask)
        return log_prob, network.value(obs, memory, episode_start)

    def sample(
        self,
        obs: Tree,
        memory: Tree = (),
        episode_start: Tensor | None = None,
        action_mask: Tree = (),
        *,
        deterministic: bool = False,
        generator: Generator | None = None,
    ) -> tuple[Tree, Tree]:
        """Only what stepping an environment needs: the action and the new memory."""
        x, memory = self.policy(obs, memory, episode_start, generator)
        if deterministic:
            return self.distribution.mode(x, action_mask), memory
        return self.distribution.sample(x, action_mask, generator), memory
