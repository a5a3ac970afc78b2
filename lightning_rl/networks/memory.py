"""What a policy remembers. One signature: `(features [T, N, F], memory, episode_start [T, N]) -> (features, memory)`."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_rl.types import Tree


class NoMemory(nn.Module):
    """A policy that sees one observation at a time: the features pass, the memory is empty."""

    def forward(self, features: Tensor, memory: Tree, episode_start: Tensor | None) -> tuple[Tensor, Tree]:
        return features, memory

    def initial(self, num: int) -> Tree:
        """The memory of `num` environments at the start of an episode."""
        return ()
