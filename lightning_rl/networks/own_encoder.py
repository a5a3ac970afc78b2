"""Encoders: this package's, or a module of a user's own."""

import importlib
from collections.abc import Sequence
from textwrap import shorten

import torch
from gymnasium.spaces import Space
from torch import Tensor, nn

from lightning_rl.errors import SettingError, closest
from lightning_rl.networks.encoders import TreeEncoder
from lightning_rl.spaces import allocate, observation_leaves
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_torch


def make_encoder(
    space: Space,
    encoder: str | type[nn.Module] = "auto",
    features: int = 512,
    entities: Sequence[str] = (),
    goals: Sequence[str] = (),
    hidden: Sequence[str] = (),
) -> "TreeEncoder | OwnEncoder":
    """Return the encoder of a network.

    Args:
        encoder: a name, see `TreeEncoder`, or a class, itself or its path such as `my_module.MyEncoder`, see `OwnEncoder`.
        space, features, entities, goals, hidden: as in `TreeEncoder`.

    Raises:
        SettingError: there is no such class, it is no module, it cannot be built, it does not turn observations into features, or it shall
            read only some observations.
    """
    if isinstance(encoder, str) and "." not in encoder:
        return TreeEncoder(space, encoder, features, entities, goals, hidden)
    own = find_encoder(encoder) if isinstance(encoder, str) else encoder
    for name, given in {"entities": entities, "goals": goals, "critic_obs": hidden}.items():
        if given:
            raise SettingError(f"encoder {own.__name__} reads all observations in its own way: leave out {name}")
    return OwnEncoder(own, space, features)


class OwnEncoder(nn.Module):
    """A user's module that turns observations `[B, ...]`, a tree like the space, into features `[B, F]`.

    It is built as `MyEncoder(space, encoder_features)`; F is what it returns. Observations come as the environment gives them, images as
    bytes, after `normalize_obs`.
    """

    is_vector = False
    num_goal_features = 0

    def __init__(self, kind: type[nn.Module], space: Space, features: int) -> None:
        super().__init__()
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise SettingError(f"encoder {getattr(kind, '__name__', kind)!s} is not a torch.nn.Module")
        self.dims = len(next(observation_leaves(space)).shape)
        try:
            self.own = kind(space, features)
            with torch.no_grad(), torch.random.fork_rng(devices=()):
                encoded = self.own(tree_to_torch(allocate(space, 2)))
        except Exception as error:  # a user's module may raise anything
            reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
            raise SettingError(
                f"encoder {kind.__name__} cannot be built with (space, {features}) and read observations: {reason}"
            ) from error
        if not (isinstance(encoded, Tensor) and encoded.dim() == 2 and len(encoded) == 2):
            found = list(encoded.shape) if isinstance(encoded, Tensor) else type(encoded).__name__
            raise SettingError(f"encoder {kind.__name__} must turn observations [B, ...] into features [B, F]; of two it made {found}")
        self.num_features = encoded.shape[1]
        self.goal = slice(self.num_features, self.num_features)

    def forward(self, obs: Tree) -> Tensor:
        """Encode observations `[..., *leaf]` as `[..., F]`."""
        first = tree_leaves(obs)[0]
        batch = first.shape[: first.dim() - self.dims]
        rows = tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(batch) :]), obs)
        return self.own(rows).unflatten(0, batch)


def find_encoder(path: str) -> type[nn.Module]:
    """Import the class of a path such as `my_module.MyEncoder`."""
    module, _, name = path.rpartition(".")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a user's module may raise anything as it is imported
        reason = shorten(f"{type(error).__name__}: {error}", 120, placeholder=" …")
        raise SettingError(f"encoder {path!r} cannot be imported: {reason}") from error
    if not hasattr(imported, name):
        raise SettingError(f"encoder {path!r}: there is no {name} in {module}{closest(name, dir(imported))}")
    return getattr(imported, name)
