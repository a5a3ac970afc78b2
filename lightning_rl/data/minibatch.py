"""From a rollout to minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lightning_rl.returns import gae
from lightning_rl.types import Rollout, Tree, flatten_time, tree_map


class Batch(NamedTuple):
    """Rows of on-policy experience, `[B, ...]`.

    log_prob: `[B, D]`, of the policy that acted, part by part.  value, returns: `[B, S]`.  advantage: `[B]`, summed over S.
    weight: `[B]`, the same for all rows that are experience, 0 for the others; sums to 1 over a minibatch.
    """

    obs: Tree
    action: Tree
    log_prob: Tree
    value: Tensor
    advantage: Tensor
    returns: Tensor
    weight: Tensor
    action_mask: Tree = ()


def make_batch(rollout: Rollout, discount: Tensor, gae_lambda: float) -> Batch:
    """Advantages and returns of a rollout, flattened to `B = T * N` rows.

    Args:
        rollout: with its reward streams filled.
        discount: γ · bootstrap, `[T, N, S]`.
        gae_lambda: λ of the generalised advantage estimate; 1 gives n-step returns.
    """
    carry = ~(rollout.terminated | rollout.truncated).unsqueeze(-1)
    advantage = gae(rollout.reward, discount, rollout.value, rollout.next_value, carry, gae_lambda)
    returns = advantage + rollout.value
    valid = rollout.valid.to(advantage.dtype)
    weight = valid / valid.sum().clamp(min=1)
    rows = Batch(rollout.obs, rollout.action, rollout.log_prob, rollout.value, advantage.sum(-1), returns, weight, rollout.action_mask)
    return flatten_time(rows)


def minibatches(batch: Batch, batch_size: int, normalize_advantage: bool, generator: Generator) -> Iterator[Batch]:
    """All rows once, in random order, `batch_size` at a time; advantages normalized within each minibatch on request."""
    rows = len(batch.weight)
    order = torch.randperm(rows, generator=generator).to(batch.weight.device)
    batch = tree_map(lambda leaf: leaf[order].unflatten(0, (-1, batch_size)), batch)
    weight = batch.weight / batch.weight.sum(1, keepdim=True).clamp(min=1e-12)
    advantage = normalize(batch.advantage, weight) if normalize_advantage else batch.advantage
    batch = batch._replace(weight=weight, advantage=advantage)
    for k in range(rows // batch_size):
        yield tree_map(lambda leaf, k=k: leaf[k], batch)


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    """(x − mean) / (std + 1e-8) over the last dimension, unbiased, over rows that count; x itself where fewer than two do."""
    count = (weight > 0).sum(-1, keepdim=True)
    mean = (weight * x).sum(-1, keepdim=True)
    variance = (weight * (x - mean).square()).sum(-1, keepdim=True) * count / (count - 1).clamp(min=1)
    return torch.where(count > 1, (x - mean) / (variance.sqrt() + 1e-8), x)
