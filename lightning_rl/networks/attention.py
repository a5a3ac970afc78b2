"""Attention over sets of entities, whatever their number and order.

Self-attention (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762) over what an agent sees around it (Baker et al. 2020,
https://arxiv.org/abs/1909.07528), in the shape that ML-Agents gave it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from lightning_rl.spaces import Leaf

SIZE = 128
"""Width of an entity's embedding."""

HEADS = 4

PADDING = 0.01
"""An entity whose squares sum to less is padding."""


class EntityAttention(nn.Module):
    """Sets of entities `[..., max_n, features]`, beside what else is observed, as one vector `[..., 128]`.

    e = norm(silu(L(entity ⊕ silu(L(others))))),  z = norm(out(softmax(q kᵀ / √128) v) + e),  and the mean of z over all entities of all
    sets. Padding is no key and not in the mean; nothing but padding gives zeros. Weights start as N(0, 0.125 / 128) (T-Fixup, Huang et
    al. 2020), biases at 0.

    Args:
        sets: the leaves, each with an embedding of its own.
        num_others: features of all other observations together; 0 if there are none.
    """

    num_features = SIZE

    def __init__(self, sets: Sequence[Leaf], num_others: int) -> None:
        super().__init__()
        self.scales = [leaf.scale for leaf in sets]
        self.others = _linear(num_others) if num_others else None
        self.embeddings = nn.ModuleList([_linear(leaf.shape[1] + (SIZE if num_others else 0)) for leaf in sets])
        self.query, self.value, self.out = (_linear(SIZE) for _ in range(3))
        self.key = _linear(SIZE, bias=False)  # a bias would fall out of the softmax
        self.norm = nn.LayerNorm(SIZE, elementwise_affine=False)

    def forward(self, sets: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        padded = torch.cat([entities.float().square().sum(-1) < PADDING for entities in sets], -1)
        x = self.norm(self.embed(sets, others))
        query, key, value = (layer(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for layer in (self.query, self.key, self.value))
        scores = (query @ key.mT).float() / math.sqrt(SIZE)  # [..., heads, n, n]
        weights = scores.masked_fill(padded[..., None, None, :], -1e6).softmax(-1).to(value.dtype)
        z = self.norm(self.out((weights @ value).transpose(-2, -3).flatten(-2)) + x)
        there = ~padded.unsqueeze(-1)
        return (z * there).sum(-2) / there.sum(-2).clamp(min=1)

    def embed(self, sets: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """The entities of all sets, one after the other, `[..., n, 128]`."""
        own = [silu(self.others(torch.cat(list(others), -1))).unsqueeze(-2)] if self.others else []
        embedded = []
        for entities, scale, embedding in zip(sets, self.scales, self.embeddings, strict=True):
            x = entities if entities.is_floating_point() else entities.float() * scale
            embedded.append(silu(embedding(torch.cat([x, *(each.expand(*x.shape[:-1], SIZE) for each in own)], -1))))
        return torch.cat(embedded, -2)


def _linear(num_inputs: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(num_inputs, SIZE, bias)
    nn.init.normal_(layer.weight, std=math.sqrt(0.125 / SIZE))
    if bias:
        nn.init.zeros_(layer.bias)
    return layer
