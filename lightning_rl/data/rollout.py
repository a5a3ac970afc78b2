"""On-policy experience: unrolls, values and log-probabilities for them, minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from lightning_rl.distributed import sum_over_ranks
from lightning_rl.returns import gae
from lightning_rl.types import Experience, Rollout, Tree, flatten_time, tree_index, tree_leaves, tree_map, tree_to_torch


class Ends(NamedTuple):
    """What was seen last in K episodes whose last value counts. K may be 0; then obs and memory are ().

    step, env: `[K]` arrays, where they ended.  obs: `[K, ...]` tree.  memory: the policy's after the step, `[K, ...]` tree.
    """

    step: np.ndarray
    env: np.ndarray
    obs: Tree = ()
    memory: Tree = ()


class Unroll(NamedTuple):
    """Experience of N environments over T steps as it was made, on the CPU, without values. Slots are those of `Rollout`, except:

    obs: `[T + 1, N, ...]` tree.  episode_start: `[T + 1, N]`.  log_prob: of the policy that acted; () where it was not asked.
    """

    obs: Tree
    action: Tree
    log_prob: Tree
    reward: Any
    terminated: Any
    truncated: Any
    valid: Any
    episode_start: Any
    action_mask: Tree
    memory: Tree
    next_obs: Tree
    ends: Ends

    def rollout(self) -> Rollout:
        """With empty slots for what a network adds."""
        obs, start = tree_index((self.obs, self.episode_start), slice(-1))
        none, flags = torch.zeros(0), (self.terminated, self.truncated, self.valid)
        return Rollout(
            obs, self.action, self.log_prob, self.reward, none, none, *flags, start, self.action_mask, self.memory, self.next_obs
        )


def join(unrolls: Sequence[Unroll]) -> Unroll:
    """Side by side, of arrays all: the environments of the first one, then those of the next."""
    if len(unrolls) == 1:
        return unrolls[0]
    bodies = [unroll._replace(ends=()) for unroll in unrolls]  # type: ignore[arg-type]
    joined: Unroll = tree_map(lambda *leaves: np.concatenate(leaves, 1), *bodies)
    first = np.cumsum([0, *(unroll.reward.shape[1] for unroll in unrolls)])
    ends = [unroll.ends._replace(env=unroll.ends.env + shift) for unroll, shift in zip(unrolls, first, strict=False)]
    ends = [each for each in ends if len(each.step)] or ends[:1]
    return joined._replace(ends=tree_map(lambda *leaves: np.concatenate(leaves), *ends))


def judge(unroll: Unroll, network: Any, device: torch.device, log_probs: bool = False) -> Rollout:
    """Values of all rows at once, and on request their log-probabilities, by the weights that a network has now.

    Args:
        unroll: of tensors; ends of arrays.
        network: with `value` and `judge`, see `networks/actor_critic.py`.
        device: of the network.
        log_probs: whether to compute them.
    """
    ends = unroll.ends
    unroll = tree_map(lambda leaf: leaf.to(device), unroll._replace(ends=()))  # type: ignore[arg-type]
    rollout, memory = unroll.rollout(), tree_index(unroll.memory, 0)
    if log_probs:
        log_prob, value = network.judge(unroll.obs, unroll.action, memory, unroll.episode_start, unroll.action_mask)
        rollout = rollout._replace(log_prob=log_prob)
    else:
        value = network.value(unroll.obs, memory, unroll.episode_start)
    next_value = value[1:]
    if len(ends.step):
        obs, memory_then = tree_to_torch((ends.obs, ends.memory), device)
        next_value = next_value.clone()
        next_value[ends.step, ends.env] = network.value(obs, memory_then, torch.zeros(len(ends.step), dtype=torch.bool, device=device))
    return rollout._replace(value=value[:-1], next_value=next_value)


def gather_ends(found: Sequence[tuple[int, np.ndarray, Tree, Tree]], allocate_obs: Callable[[int], Tree]) -> Ends:
    """From what was found at each step: the step, the environments, their last observations, and the memory after them, as arrays."""
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return Ends(none, none)
    steps, envs, finals, after = zip(*found, strict=True)
    env = np.concatenate(envs)
    obs = tree_map(lambda row, *leaves: np.concatenate(leaves, out=row, casting="unsafe"), allocate_obs(len(env)), *finals)
    memory = tree_map(lambda *leaves: np.concatenate(leaves), *after) if len(tree_leaves(after[0])) else after[0]
    return Ends(np.repeat(steps, [len(each) for each in envs]), env, obs, memory)


class Batch(NamedTuple):
    """Rows of on-policy experience, `[B, ...]`: of sequences of L rows, time-major; L = 1 where nothing is remembered.

    log_prob: `[B, D]`, of the policy that acted, part by part.  value, returns: `[B, S]`.  advantage: `[B]`, summed over S.
    weight: `[B]`, the same for all rows that are experience, 0 for the others; sums to 1 over a minibatch.
    next_obs, terminated: for reward signals; empty where none asks for them.
    episode_start: `[L, B / L]`.  memory: the policy's before the first row of each sequence, `[B / L, ...]` tree.
    """

    obs: Tree
    action: Tree
    log_prob: Tree
    value: Tensor
    advantage: Tensor
    returns: Tensor
    weight: Tensor
    episode_start: Tensor
    action_mask: Tree = ()
    next_obs: Tree = ()
    terminated: Tree = ()
    memory: Tree = ()

    @property
    def experience(self) -> Experience:
        """The rows as reward signals see them."""
        return Experience(self.obs, self.action, self.next_obs, (), self.terminated, self.weight)


def make_batch(rollout: Rollout, discount: Tensor, gae_lambda: float, sequence_length: int = 1) -> Batch:
    """Advantages and returns of a rollout, flattened to `B = T * N` rows.

    Args:
        rollout: with its reward streams filled.
        discount: γ · bootstrap, `[T, N, S]`.
        gae_lambda: λ of the generalised advantage estimate; 1 gives n-step returns.
        sequence_length: L, rows of a sequence, T if that is less. A last one that is shorter is filled with rows that do not count.
    """
    carry = ~(rollout.terminated | rollout.truncated).unsqueeze(-1)
    advantage = gae(rollout.reward, discount, rollout.value, rollout.next_value, carry, gae_lambda)
    returns = advantage + rollout.value
    valid = rollout.valid.to(advantage.dtype)
    weight = valid / valid.sum().clamp(min=1)
    length = min(sequence_length, len(weight))
    advantage, start = advantage.sum(-1), rollout.episode_start
    rows = Batch(rollout.obs, rollout.action, rollout.log_prob, rollout.value, advantage, returns, weight, start, rollout.action_mask)
    if len(rollout.next_obs):
        rows = rows._replace(next_obs=rollout.next_obs, terminated=rollout.terminated)
    batch = in_sequences(rows, length)
    if len(weight) % length:
        batch.weight.unflatten(0, (length, -1, weight.shape[1]))[len(weight) % length :, -1] = 0.0
    return batch._replace(episode_start=batch.episode_start.unflatten(0, (length, -1)), memory=flatten_time(rollout.memory))


def in_sequences(rows: Tree, length: int) -> Any:
    """From `[T, N, ...]` to rows of sequences of `length` steps, time-major and flat. A last one that is shorter repeats its last row."""
    steps = len(tree_leaves(rows)[0])
    if length == 1:
        return tree_map(lambda leaf: leaf.flatten(0, 1), rows)
    if steps % length:
        rows = tree_index(rows, torch.arange(steps - steps % length + length).clamp(max=steps - 1))
    return tree_map(lambda leaf: leaf.unflatten(0, (-1, length)).transpose(0, 1).flatten(0, 2), rows)


def in_time(rows: Tree, length: int, steps: int, num: int) -> Any:
    """The inverse: `[steps, num, ...]`."""
    return tree_map(lambda leaf: leaf.unflatten(0, (length, -1, num)).transpose(0, 1).flatten(0, 1)[:steps], rows)


def minibatches(batch: Batch, batch_size: int, normalize_advantage: bool, generator: Generator) -> Iterator[Batch]:
    """All sequences once, in random order, `batch_size` rows at a time; advantages normalized within each minibatch on request."""
    length, num = batch.episode_start.shape
    order = torch.randperm(num, generator=generator).to(batch.weight.device).view(-1, batch_size // length)

    def shuffled(leaf: Tensor) -> Tensor:
        if length == 1:
            return leaf.index_select(0, order.flatten()).unflatten(0, order.shape)  # copies whole rows, and indexing byte for byte
        rows = leaf.unflatten(0, (length, num)).index_select(1, order.flatten())
        return rows.unflatten(1, order.shape).transpose(0, 1).flatten(1, 2)

    start, memory = batch.episode_start[:, order].transpose(0, 1), tree_index(batch.memory, order)
    batch = tree_map(shuffled, batch._replace(episode_start=batch.weight, memory=()))._replace(episode_start=start, memory=memory)
    weight = batch.weight / batch.weight.sum(1, keepdim=True).clamp(min=1e-12)
    advantage = normalize(batch.advantage, weight) if normalize_advantage else batch.advantage
    batch = batch._replace(weight=weight, advantage=advantage)
    for k in range(len(order)):
        yield tree_map(lambda leaf, k=k: leaf[k], batch)


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    """(x − mean) / (std + 1e-8) over the last dimension, unbiased, over rows that count; x itself where fewer than two do.

    The ranks' rows count as one batch: what they learn together is what one of them would from all rows.
    """
    own = (weight > 0).sum(-1, keepdim=True)
    count = sum_over_ranks(own)
    weight = weight * (own / count.clamp(min=1))
    mean = sum_over_ranks((weight * x).sum(-1, keepdim=True))
    variance = sum_over_ranks((weight * (x - mean).square()).sum(-1, keepdim=True)) * count / (count - 1).clamp(min=1)
    return torch.where(count > 1, (x - mean) / (variance.sqrt() + 1e-8), x)
