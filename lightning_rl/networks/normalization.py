"""Running statistics, which are updated between rollouts and fixed in losses and evaluation, and evaluation mode."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from gymnasium.spaces import Space
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_rl.errors import check_choice
from lightning_rl.processes.ranks import sum_over_ranks
from lightning_rl.spaces import observation_leaves
from lightning_rl.types import Tree, flatten_time, tree_index, tree_leaves, tree_map


class RunningMeanStd(nn.Module):
    """Count, mean and variance of a stream, merged batch by batch (Chan et al. 1979); equal on all ranks.

    Initial values are those of Stable-Baselines3: count 1e-4, mean 0, variance 1. Moments are float64 in every precision of the run.
    """

    count: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(1e-4, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))

    @torch.no_grad()
    def update(self, batch: Tensor) -> None:
        """Merge the rows of a batch `[B, *shape]` of all ranks."""
        batch = batch.to(self.mean) - self.mean  # centered, so that squares do not cancel
        sums = batch.sum(0).flatten(), batch.square().sum(0).flatten()
        flat = sum_over_ranks(torch.cat([batch.new_full((1,), len(batch)), *sums]))
        count, (total, squares) = flat[0], flat[1:].view(2, *self.mean.shape)
        if count > 0:
            shift = total / count
            self.merge(count, self.mean + shift, (squares / count - shift.square()).clamp(min=0))

    def merge(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        """Merge another stream's count, mean and (biased) variance."""
        total, delta = self.count + count, mean - self.mean
        spread = self.var * self.count + var * count + delta.square() * self.count * count / total
        self.mean.add_(delta * count / total)
        self.var.copy_(spread / total)
        self.count.copy_(total)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the network to another device, but keep the precision; torch has no public way to exempt a buffer from a cast."""
        moments = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, moment in moments.items():
            setattr(self, name, moment.to(getattr(self, name).device))
        return self


class ObservationNormalizer(nn.Module):
    """clip((x − mean) / √(var + 1e-8), −10, 10) for the float vectors of an observation. Other leaves and `entities` are not changed.

    Args:
        frozen: keep the statistics from before training; rollouts do not change them.
        entities: names of leaves that are sets of entities.
    """

    clip, epsilon = 10.0, 1e-8
    statistics: Sequence[nn.Module]

    def __init__(self, space: Space, frozen: bool = False, entities: Sequence[str] = ()) -> None:
        super().__init__()
        self.frozen = frozen
        kinds = [(leaf, leaf.kind == "vector" and leaf.scale == 1 and leaf.name not in entities) for leaf in observation_leaves(space)]
        modules = [RunningMeanStd(leaf.shape) if is_normalized else nn.Identity() for leaf, is_normalized in kinds]
        self.statistics = nn.ModuleList(modules)  # type: ignore[assignment]

    def forward(self, obs: Tree) -> Tree:
        statistics = iter(self.statistics)
        return tree_map(lambda leaf: self._normalize(leaf, next(statistics)), obs)

    def _normalize(self, leaf: Tensor, statistics: nn.Module) -> Tensor:
        if not isinstance(statistics, RunningMeanStd):
            return leaf
        shift, scale = self.shift_and_scale(statistics)
        leaf = leaf.to(shift) if leaf.dtype == torch.bool else leaf  # torch cannot subtract from bools
        return ((leaf - shift) * scale).clamp(-self.clip, self.clip)

    def shift_and_scale(self, statistics: RunningMeanStd) -> tuple[Tensor, Tensor]:
        """Return the mean and the inverse standard deviation, in float32."""
        return statistics.mean.float(), (statistics.var + self.epsilon).rsqrt().float()

    @property
    def is_new(self) -> bool:
        """Return whether no row has been counted yet."""
        return all(part.count < 1 for part in self.statistics if isinstance(part, RunningMeanStd))

    def gather(self, obs: Tree, valid: Tensor) -> None:
        """Merge the valid rows of a rollout `[T, N, ...]` after an update on it, unless the statistics are frozen."""
        if not self.frozen:
            self.update(tree_index(flatten_time(obs), valid.flatten()))

    def update(self, obs: Tree) -> None:
        """Merge the rows of an observation batch `[B, ...]`."""
        for leaf, statistics in zip(tree_leaves(obs), self.statistics, strict=True):
            if isinstance(statistics, RunningMeanStd):
                statistics.update(leaf)


class NoNormalizer(nn.Identity):
    """A normalizer that changes nothing."""

    def gather(self, obs: Tree, valid: Tensor) -> None:
        """Do nothing."""

    def update(self, obs: Tree) -> None:
        """Do nothing."""


def make_normalizer(normalize_obs: str, space: Space, entities: Sequence[str] = ()) -> ObservationNormalizer | NoNormalizer:
    """Return the normalizer for a setting: `off`, `running` or `frozen`."""
    check_choice("normalize_obs", normalize_obs, ("off", "running", "frozen"))
    return NoNormalizer() if normalize_obs == "off" else ObservationNormalizer(space, normalize_obs == "frozen", entities)


TWO_MODES = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU
"""Layers of torch without statistics that compute another result in evaluation mode."""


def depends_on_mode(part: nn.Module) -> bool:
    """Return whether a module that is not this package's may compute another result in evaluation mode, as dropout and BatchNorm do."""
    if type(part).__module__.startswith("torch."):
        has_statistics, drops = getattr(part, "track_running_stats", False), bool(getattr(part, "dropout", 0))  # as LSTM's
        has_old_norm = any(isinstance(hook, SpectralNorm) for hook in vars(part)["_forward_pre_hooks"].values())
        is_spectral = has_old_norm or type(part).__name__ == "_SpectralNorm"  # these make power iterations in training mode
        return has_statistics or drops or is_spectral or isinstance(part, TWO_MODES)
    return not any(cls.__module__.startswith("lightning_rl.") for cls in type(part).__mro__)


@contextmanager
def eval_mode(parts: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, not those in them, and restore the mode of each afterwards."""
    modes = [(part, part.training) for part in parts]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, was_training in modes:
            part.training = was_training
