"""What environments and a policy did over some steps, and what a network thinks of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_rl.types import Rollout, Tree, tree_index, tree_leaves, tree_map, tree_to_torch


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
