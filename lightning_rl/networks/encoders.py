"""Encoders from an observation tree to a feature vector, with attention over sets of entities; also the user's own encoders."""

import importlib
import math
from collections.abc import Sequence
from contextlib import nullcontext
from textwrap import shorten
from typing import Protocol

import numpy as np
import torch
from gymnasium.spaces import Space
from torch import Tensor, nn
from torch.nn.functional import silu

from lightning_rl.errors import SettingError, check_choice, check_range, closest
from lightning_rl.networks.mlp import orthogonal
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.settings.dotted_paths import check_module
from lightning_rl.spaces import Leaf, allocate, is_part_of, observation_leaves
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_torch

CONVOLUTIONS = {
    "simple": ((16, 8, 4), (32, 4, 2)),
    "nature_cnn": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    "match3": ((35, 3, 1), (144, 3, 1)),
    "fully_connected": (),
}
"""Output channels, kernel and stride of each layer."""
MIN_SIDE = {"nature_cnn": 36, "simple": 20, "resnet": 15, "match3": 5, "fully_connected": 1}
"""Minimum image side of each encoder; `auto` takes the first that fits."""
ENCODERS = ("auto", "mlp", *MIN_SIDE)
MAX_IMAGES_AT_ONCE = 64
"""Without gradients on a CPU, images are encoded in groups of this size: the activations of a whole rollout would not fit its caches."""
ENTITY_SIZE = 128
"""Width of an entity's embedding."""
HEADS = 4
MAX_PADDING = 0.01
"""An entity is padding if the sum of its squares is below this."""


class TreeEncoder(nn.Module):
    """Encodes each leaf of an observation and concatenates the results: `[..., *leaf]` to `[..., num_features]`.

    Args:
        space: the observation space.
        encoder: image encoder; `auto` takes the first that fits the image, `mlp` flattens images without parameters.
        features: width of an image encoder's dense layer.
        entities: names of leaves that are sets of entities.
        goals: names of leaves that describe the goal; `goal` is the slice of their features, which come last.
        hidden: names of leaves, or of parts that contain leaves, to ignore.
    """

    def __init__(
        self,
        space: Space,
        encoder: str = "auto",
        features: int = 512,
        entities: Sequence[str] = (),
        goals: Sequence[str] = (),
        hidden: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_choice("encoder", encoder, ENCODERS)
        check_range("encoder_features", features, 1, whole=True)
        leaves = list(observation_leaves(space))
        read = [i for i, leaf in enumerate(leaves) if not is_part_of(leaf.name, hidden)]
        encoders = {i: _leaf_encoder(leaves[i], encoder, features) for i in read if leaves[i].name not in entities}
        self.leaves = nn.ModuleList([encoders[i] if i in encoders else nn.Identity() for i in range(len(leaves))])
        self.sets = [i for i in read if i not in encoders]
        self.order = sorted(encoders, key=lambda i: leaves[i].name in goals)
        num_others = sum(part.num_features for part in encoders.values())
        self.attention = EntityAttention([leaves[i] for i in self.sets], num_others) if self.sets else None
        self.num_features = num_others + (ENTITY_SIZE if self.sets else 0)
        self.num_goal_features = sum(part.num_features for i, part in encoders.items() if leaves[i].name in goals)
        self.goal = slice(self.num_features - self.num_goal_features, self.num_features)
        self.is_vector = [(leaf.kind, len(leaf.shape)) for leaf in leaves] == [("vector", 1)]

    def forward(self, obs: Tree) -> Tensor:
        encoded = [encoder(leaf) for encoder, leaf in zip(self.leaves, tree_leaves(obs), strict=True)]
        features = [encoded[i] for i in self.order]
        if self.attention is not None:
            features.insert(0, self.attention([encoded[i] for i in self.sets], features))
        return features[0] if len(features) == 1 else torch.cat(features, -1)


class FloatVector(TreeEncoder):
    """A `TreeEncoder` of one vector of floats, which are its features."""

    forward = nn.Identity.forward  # type: ignore[assignment]


class VectorEncoder(nn.Module):
    """A Box or MultiBinary leaf as a flat vector."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.dims, self.scale, self.num_features = len(leaf.shape), leaf.scale, math.prod(leaf.shape)

    def forward(self, obs: Tensor) -> Tensor:
        obs = obs if obs.is_floating_point() else obs.float() * self.scale
        return obs if self.dims == 1 else obs.flatten(-self.dims) if self.dims else obs.unsqueeze(-1)


class OneHotEncoder(nn.Module):
    """A Discrete or MultiDiscrete leaf as concatenated one-hot vectors."""

    first: Tensor

    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.dims, self.num_features = len(leaf.shape), sum(leaf.sizes)
        first = torch.tensor([0, *leaf.sizes[:-1]]).cumsum(0) - torch.tensor(leaf.starts)
        self.register_buffer("first", first, persistent=False)

    def forward(self, obs: Tensor) -> Tensor:
        index = (obs.flatten(-self.dims) if self.dims else obs.unsqueeze(-1)).long() + self.first
        return torch.zeros(*index.shape[:-1], self.num_features, device=obs.device).scatter(-1, index, 1.0)


class ImageEncoder(nn.Module):
    """An image leaf, HWC or CHW, or a stack of images: convolutions, then a dense layer with `num_features` outputs.

    Images, but not weights, use the channels-last memory format, which makes convolutions faster.
    """

    def __init__(self, leaf: Leaf, encoder: str, num_features: int) -> None:
        super().__init__()
        self.num_features, self.scale, self.dims = num_features, leaf.scale, len(leaf.shape)
        shape, self.channels_last = leaf.shape[-3:], leaf.channels_last
        channels, height, width = (shape[2], *shape[:2]) if self.channels_last else shape
        channels *= leaf.shape[0] if self.dims == 4 else 1
        side = min(height, width)
        if encoder == "auto":
            encoder = next(name for name, minimum in MIN_SIDE.items() if side >= minimum)
        minimum = MIN_SIDE[encoder]
        if side < minimum:
            raise SettingError(f"encoder {encoder} reads images from {minimum} x {minimum}, got {height} x {width}; use encoder auto")
        self.body = nn.Sequential(*_convolutions(channels, encoder), nn.Flatten())
        with torch.no_grad():
            num_inputs = self.body(torch.zeros(1, channels, height, width)).shape[1]
        self.linear = orthogonal(nn.Linear(num_inputs, num_features))

    def forward(self, obs: Tensor) -> Tensor:
        batch = obs.shape[: -self.dims]
        if torch.jit.is_tracing() and len(batch) == 1 and self.dims == 3:
            return self._trace(obs)
        image = obs.flatten(0, len(batch) - 1) if len(batch) != 1 else obs
        if self.channels_last:
            image = image.movedim(-1, -3)
        if self.dims == 4:
            image = image.flatten(1, 2)
        whole = torch.is_grad_enabled() or image.device.type != "cpu" or torch.compiler.is_compiling()
        encoded = self.encode(image) if whole else torch.cat([self.encode(part) for part in image.split(MAX_IMAGES_AT_ONCE)])
        return encoded.unflatten(0, batch)

    def _trace(self, obs: Tensor) -> Tensor:
        """Encode images `[B, *shape]` in operations that every opset of ONNX has."""
        image = obs.permute(0, 3, 1, 2) if self.channels_last else obs
        return self.linear(self.body(image.float() * self.scale)).relu()

    def encode(self, image: Tensor) -> Tensor:
        """Encode images `[B, C, H, W]` as `[B, num_features]`."""
        channels_last = image.movedim(-3, -1).contiguous().movedim(-1, -3)  # while they are bytes
        return self.linear(self.body(channels_last.to(torch.float32, copy=True).mul_(self.scale))).relu()


def _leaf_encoder(leaf: Leaf, encoder: str, features: int) -> OneHotEncoder | VectorEncoder | ImageEncoder:
    if leaf.kind == "one_hot":
        return OneHotEncoder(leaf)
    return VectorEncoder(leaf) if leaf.kind == "vector" or encoder == "mlp" else ImageEncoder(leaf, encoder, features)


class Residual(nn.Module):
    """x + conv(silu(conv(silu(x))))."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = (_convolution(channels, channels, 3, padding=1) for _ in range(2))
        self.body = nn.Sequential(*(layer for convolution in convolutions for layer in (nn.SiLU(), convolution)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


def _convolutions(channels: int, encoder: str) -> list[nn.Module]:
    layers: list[nn.Module] = []
    if encoder == "resnet":
        for out in (16, 32, 32):
            layers += [_convolution(channels, out, 3, padding=1), nn.MaxPool2d(3, 2), Residual(out), Residual(out)]
            channels = out
        return [*layers, nn.SiLU()]
    for out, kernel, stride in CONVOLUTIONS[encoder]:
        layers += [_convolution(channels, out, kernel, stride), nn.ReLU(inplace=True)]
        channels = out
    return layers


def _convolution(channels: int, out: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, math.sqrt(2))
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return layer


class EntityAttention(nn.Module):
    """Encodes sets of entities `[..., max_n, features]`, and the features of all other observations, as one vector `[..., 128]`.

    e = norm(silu(L(entity ⊕ silu(L(others))))),  z = norm(out(softmax(q kᵀ / √128) v) + e); the output is the mean of z over all entities
    of all sets. Padding is excluded from keys and mean; if all entities are padding, the output is zero. Weights are initialized as
    N(0, 0.125 / 128) (T-Fixup, Huang et al. 2020), biases as 0.

    Args:
        sets: the leaves, each with its own embedding.
        num_others: total features of all other observations; 0 if there are none.
    """

    def __init__(self, sets: Sequence[Leaf], num_others: int) -> None:
        super().__init__()
        self.scales = [leaf.scale for leaf in sets]
        self.others = _linear(num_others) if num_others else None
        self.embeddings = nn.ModuleList([_linear(leaf.shape[1] + (ENTITY_SIZE if num_others else 0)) for leaf in sets])
        self.query, self.value, self.out = (_linear(ENTITY_SIZE) for _ in range(3))
        self.key = _linear(ENTITY_SIZE, bias=False)  # a bias would cancel in the softmax
        self.norm = nn.LayerNorm(ENTITY_SIZE, elementwise_affine=False)

    def forward(self, sets: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        padded = torch.cat([entities.float().square().sum(-1) < MAX_PADDING for entities in sets], -1)
        return attend(self, self.norm(self.embed(sets, others)), ~padded)

    def embed(self, sets: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Embed the entities of all sets, concatenated, as `[..., n, 128]`."""
        context = [silu(self.others(torch.cat(list(others), -1))).unsqueeze(-2)] if self.others else []
        embedded = []
        for entities, scale, embedding in zip(sets, self.scales, self.embeddings, strict=True):
            x = entities if entities.is_floating_point() else entities.float() * scale
            embedded.append(silu(embedding(torch.cat([x, *(vector.expand(*x.shape[:-1], ENTITY_SIZE) for vector in context)], -1))))
        return torch.cat(embedded, -2)


class Attention(Protocol):
    """The layers of `attend`."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    out: nn.Linear
    norm: nn.LayerNorm


def attend(layers: Attention, x: Tensor, present: Tensor) -> Tensor:
    """Return the mean over members of z = norm(out(softmax(q kᵀ / √size) v) + x), from sets of members `[..., n, size]` to `[..., size]`.

    Members that are not `present [..., n]` are excluded from keys and mean; a set without present members gives zeros. `layers` has the
    linear layers query, key, value and out, and norm.
    """
    query, key, value = (layer(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for layer in (layers.query, layers.key, layers.value))
    scores = (query @ key.transpose(-2, -1)).float() / math.sqrt(x.shape[-1])  # [..., heads, n, n]
    weights = scores.masked_fill(~present[..., None, None, :], -1e6).softmax(-1).to(value.dtype)
    z = layers.norm(layers.out((weights @ value).transpose(-2, -3).flatten(-2)) + x)
    real = present.unsqueeze(-1).float()
    return (z * real).sum(-2) / real.sum(-2).clamp(min=1)


def _linear(num_inputs: int, bias: bool = True) -> nn.Linear:
    return t_fixup(nn.Linear(num_inputs, ENTITY_SIZE, bias))


def t_fixup(layer: nn.Linear) -> nn.Linear:
    """Initialize an attention layer with weights N(0, 0.125 / size) and bias 0 (Huang et al. 2020)."""
    nn.init.normal_(layer.weight, std=math.sqrt(0.125 / layer.out_features))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


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
        encoder: a name (see `TreeEncoder`), or a class or its path, such as `my_module.MyEncoder` (see `OwnEncoder`).
        space, features, entities, goals, hidden: as in `TreeEncoder`.

    Raises:
        SettingError: the class does not exist, is not a module, cannot be built, or does not turn observations into features; or a class
            is combined with settings that select observations.
    """
    if isinstance(encoder, str) and "." not in encoder:
        obs = allocate(space)
        passes = isinstance(obs, np.ndarray) and obs.ndim == 1 and obs.dtype == np.float32 and not (entities or hidden)
        return (FloatVector if passes else TreeEncoder)(space, encoder, features, entities, goals, hidden)
    cls = find_encoder(encoder) if isinstance(encoder, str) else encoder
    for name, given in {"entities": entities, "goals": goals, "critic_obs": hidden}.items():
        if given:
            raise SettingError(f"encoder {cls.__name__} is your own and reads all observations: leave out {name}")
    return OwnEncoder(cls, space, features)


class OwnEncoder(nn.Module):
    """A user's module that turns observations `[B, ...]`, a tree like the space, into features `[B, F]`.

    It is built as `MyEncoder(space, encoder_features)`; F is the width of its output. It gets observations as the environment returns
    them, with images as bytes, after `normalize_obs`.
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
            with (
                torch.no_grad(),
                torch.random.fork_rng(devices=()),
                eval_mode(self.own.modules()),
            ):  # else BatchNorm would learn from the zeros
                encoded = self.own(tree_to_torch(allocate(space, 2)))
        except Exception as error:  # a user's module may raise anything
            reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
            raise SettingError(
                f"encoder {kind.__name__} cannot be built with (space, {features}) and read observations: {reason}"
            ) from error
        if not (isinstance(encoded, Tensor) and encoded.dim() == 2 and len(encoded) == 2):
            shape = list(encoded.shape) if isinstance(encoded, Tensor) else type(encoded).__name__
            raise SettingError(f"encoder {kind.__name__} must turn observations [B, ...] into features [B, F]; for two it returned {shape}")
        self.num_features = encoded.shape[1]
        self.goal = slice(self.num_features, self.num_features)

    def forward(self, obs: Tree) -> Tensor:
        """Encode observations `[..., *leaf]` as `[..., F]`."""
        first = tree_leaves(obs)[0]
        batch = first.shape[: first.dim() - self.dims]
        rows = tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(batch) :]).clone(), obs)  # the module may modify its input
        with nullcontext() if torch.is_grad_enabled() else eval_mode(self.own.modules()):
            features = self.own(rows)
        return features if len(batch) == 1 else features.unflatten(0, batch)


def find_encoder(path: str) -> type[nn.Module]:
    """Import a class by its path, such as `my_module.MyEncoder`."""
    module, _, name = path.rpartition(".")
    check_module(f"encoder {path!r}", module)
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # importing a user's module may raise anything
        reason = shorten(f"{type(error).__name__}: {error}", 120, placeholder=" …")
        raise SettingError(f"encoder {path!r} cannot be imported: {reason}") from error
    if not hasattr(imported, name):
        raise SettingError(f"encoder {path!r}: there is no {name} in {module}{closest(name, dir(imported))}")
    return getattr(imported, name)
