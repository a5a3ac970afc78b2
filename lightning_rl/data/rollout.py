"""Experience as collectors return it, datasets of it, and on-policy batches: values, advantages, minibatches."""

import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import IterableDataset

from lightning_rl.networks.acting import ActingNetwork
from lightning_rl.processes.ranks import sum_over_ranks
from lightning_rl.returns import gae
from lightning_rl.types import (
    EnvStep,
    Experience,
    Rollout,
    State,
    Tree,
    flatten_time,
    tree_index,
    tree_leaves,
    tree_map,
    tree_to_torch,
)

Rows = TypeVar("Rows")


class Ends(NamedTuple):
    """Final observations of K episodes whose final value is needed. K may be 0; then obs and memory are ().

    step, env: `[K]` arrays, where they ended.  obs: `[K, ...]` tree.  memory: the policy's memory after the step, `[K, ...]` tree.
    """

    step: np.ndarray
    env: np.ndarray
    obs: Tree = ()
    memory: Tree = ()


NO_ENDS = Ends(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


class Unroll(NamedTuple):
    """Raw experience of N environments over T steps, on the CPU, without values; actors send arrays. Fields as in `Rollout`, except:

    obs: `[T + 1, N, ...]` tree.  episode_start: `[T + 1, N]`.  log_prob: of the policy that acted; () if it was not computed.
    """

    obs: Tree
    action: Tree
    log_prob: Tree
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    episode_start: Tensor
    action_mask: Tree
    memory: Tree
    next_obs: Tree
    ends: Ends

    def rollout(self) -> Rollout:
        """Convert to a rollout; the fields that a network adds are empty."""
        obs, start = tree_index((self.obs, self.episode_start), slice(-1))
        empty, flags = torch.zeros(0), (self.terminated, self.truncated, self.valid)
        return Rollout(
            obs, self.action, self.log_prob, self.reward, empty, empty, *flags, start, self.action_mask, self.memory, self.next_obs
        )


class Stepped(NamedTuple):
    """One step of N environments for a replay buffer: observations, actions, results, and the policy's memory and masks before the step.

    obs, action, memory, action_mask: `[N, ...]` trees of arrays.
    """

    obs: Tree
    action: Tree
    step: EnvStep
    memory: Tree
    action_mask: Tree


class Statistics(Protocol):
    """The interface of episode statistics that a run uses."""

    @property
    def reports_success(self) -> bool: ...
    def share_reports(self) -> None: ...
    def clear(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...


class RunCollector(Protocol):
    """The interface of a collector that a run and its callbacks use, see `Collector`."""

    name: str
    can_be_saved: bool
    num_envs: int

    @property
    def n_steps(self) -> float: ...
    @property
    def rows(self) -> int: ...
    @property
    def steps_made(self) -> int: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def close(self) -> Callable[[], object]: ...
    def metrics(self) -> dict[str, float]: ...
    def take_notices(self) -> list[str]: ...
    def interrupt(self) -> None: ...
    def get_state(self) -> State: ...
    def set_state(self, state: State) -> str | None: ...


class RolloutCollector(RunCollector, Protocol):
    """A collector of rollouts."""

    def collect(self) -> Rollout: ...


class StepCollector(RunCollector, Protocol):
    """A collector of single steps, for replay buffers."""

    def transitions(self, random_steps: int = 0) -> Iterator[Stepped]: ...
    def rollout(self) -> Rollout: ...


class ExperienceDataset(IterableDataset[object]):
    """Endless iterations of experience, each collected on demand.

    The dataset has a length, the planned number of iterations, because Lightning prefetches one batch from a loader without a length, and
    that experience would be collected with old weights.
    """

    full: Sequence[str] = ("",)
    """Names of the behaviors whose iterations the newest item holds; `""` if there is only one policy."""
    restart_notice = "environments start new episodes"
    """What happens if a run cannot continue exactly; printed before the reason."""

    def __init__(self, collector: RunCollector, iterations: int) -> None:
        self.collector, self.iterations = collector, iterations
        self.batch: Any = ()
        """The batch or rollout that is being learned from."""
        self.is_whole = True
        """Whether no iteration is in progress."""
        self.collected: Callable[[], object] | None = None
        """Called as soon as the environments were stepped, so that a run counts the steps. Without a run, items are copies."""

    def __len__(self) -> int:
        return min(self.iterations, sys.maxsize)

    def __iter__(self) -> Iterator[object]:
        raise NotImplementedError

    def is_in_iteration(self, name: str) -> bool:
        """Return whether a behavior is in the middle of an iteration, while the run is between two of its own."""
        return False

    def begin_iteration(self, count: int, progress: float) -> None:
        """Prepare an iteration; `count` and `progress` say how far the run is, over all ranks."""

    def end_iteration(self) -> None:
        """Finish an iteration, after learning from it."""

    def begin_episodes(self) -> None:
        """Abandon the current episodes and reset all environments, between iterations."""
        collector: Any = self.collector
        collector.reset()
        collector.statistics.forget()
        self.cut_episodes()

    def cut_episodes(self) -> None:
        """End what is stored of the current episodes, which do not continue."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the data itself."""
        return {}

    def begin_save(self) -> None:
        """Save large data in separate files, before a checkpoint of the whole run."""

    def end_save(self, saved: bool) -> None:
        """Clean up after the checkpoint was saved or has failed."""

    def get_state(self) -> State:
        """Return everything that the next iteration depends on, with arrays, between iterations."""
        return {"collector": self.collector.get_state(), **self.own_state()}

    def set_state(self, state: State) -> str | None:
        """Restore a state before the first iteration. Return None, or the reason why the run cannot continue exactly."""
        new_episodes = self.collector.set_state(state["collector"])
        return self.set_own_state(state, new_episodes) or new_episodes

    def take_over(self, state: State) -> None:
        """Take over what does not depend on environments from a state of `get_state` that cannot be restored as a whole."""

    def own_state(self) -> State:
        """Return what to save in addition to the collector's state."""
        return {}

    def set_own_state(self, state: State, new_episodes: str | None) -> str | None:
        """Restore a state of `own_state`. Return None, or another reason why the run cannot continue exactly.

        `new_episodes`: why environments start new episodes, or None.
        """
        return None

    def state_dict(self) -> State:
        """Return an empty state. Its existence tells Lightning that a run can be resumed in the middle of an epoch."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore nothing."""


class RolloutDataset(ExperienceDataset):
    """Endless rollouts with the newest weights. All state is in the collector."""

    collector: RolloutCollector

    def __iter__(self) -> Iterator[Rollout]:
        while True:
            self.is_whole = False
            self.batch = self.collector.collect()
            if self.collected is None:
                yield deepcopy(self.batch)
            else:
                self.collected()
                yield self.batch


def add_values(unroll: Unroll, network: ActingNetwork, device: torch.device, log_probs: bool = False) -> Rollout:
    """Compute the values of all rows as one batch, and on request their log-probabilities, with the current weights of an actor-critic.

    `unroll` holds tensors, with its ends as arrays.
    """
    ends = unroll.ends
    unroll = tree_map(lambda leaf: leaf.to(device), unroll._replace(ends=()))  # type: ignore[arg-type]
    rollout, memory = unroll.rollout(), tree_index(unroll.memory, 0)
    if log_probs:
        log_prob, value = network.log_prob_and_value(unroll.obs, unroll.action, memory, unroll.episode_start, unroll.action_mask)
        rollout = rollout._replace(log_prob=log_prob)
    else:
        value = network.value(unroll.obs, memory, unroll.episode_start)
    next_value = value[1:]
    if len(ends.step):
        obs, memory_then = tree_to_torch((ends.obs, ends.memory), device)
        next_value = next_value.clone()
        next_value[ends.step, ends.env] = network.value(obs, memory_then, torch.zeros(len(ends.step), dtype=torch.bool, device=device))
    return rollout._replace(value=value[:-1], next_value=next_value)


def gather_ends(ends: Sequence[tuple[int, np.ndarray, Tree, Tree]], allocate_obs: Callable[[int], Tree]) -> Ends:
    """Join the ends found at each step, as arrays: the step, the environments, their final observations, and the memory after them."""
    steps, envs, finals, after = zip(*ends, strict=True)
    env = np.concatenate(envs)
    obs = tree_map(lambda row, *leaves: np.concatenate(leaves, out=row, casting="unsafe"), allocate_obs(len(env)), *finals)
    memory = tree_map(lambda *leaves: np.concatenate(leaves), *after)
    return Ends(np.repeat(steps, [len(own_envs) for own_envs in envs]), env, obs, memory)


def join(unrolls: Sequence[Unroll]) -> Unroll:
    """Concatenate unrolls of arrays, or of tensors, along the environments."""
    if len(unrolls) == 1:
        return unrolls[0]
    bodies = [unroll._replace(ends=()) for unroll in unrolls]  # type: ignore[arg-type]
    join_leaves: Callable[..., Any] = torch.cat if isinstance(unrolls[0].reward, Tensor) else np.concatenate
    joined: Unroll = tree_map(lambda *leaves: join_leaves(leaves, 1), *bodies)
    first = np.cumsum([0, *(unroll.reward.shape[1] for unroll in unrolls)])
    ends = [unroll.ends._replace(env=unroll.ends.env + shift) for unroll, shift in zip(unrolls, first, strict=False)]
    ends = [part for part in ends if len(part.step)] or ends[:1]
    return joined._replace(ends=tree_map(lambda *leaves: np.concatenate(leaves), *ends))


class Batch(NamedTuple):
    """Rows of on-policy experience, `[B, ...]`: sequences of L rows, time-major; L = 1 without a memory.

    log_prob: `[B, D]`, of the policy that acted, part by part.  value, returns: `[B, S]`.  advantage: `[B]`, summed over S.
    weight: `[B]`, equal for all rows that are experience, 0 for the others; sums to 1 over a minibatch.
    next_obs, terminated: empty unless a reward signal or the algorithm's `needs_next_obs` asks for them.
    episode_start: `[L, B / L]`.  memory: the policy's memory before the first row of each sequence, `[B / L, ...]` tree.
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
        """Return the rows as input of reward signals."""
        return Experience(self.obs, self.action, self.next_obs, (), self.terminated, self.weight)


def make_batch(rollout: Rollout, discount: Tensor, gae_lambda: float, sequence_length: int = 1) -> Batch:
    """Compute advantages and returns of a rollout, and flatten it to `B = T * N` rows.

    Args:
        discount: γ · bootstrap, `[T, N, S]`.
        gae_lambda: λ of the generalised advantage estimate; 1 gives n-step returns.
        sequence_length: L, rows of a sequence, at most T. A shorter last sequence is padded with rows of weight 0.
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
    batch = flatten_time(rows) if length == 1 else in_sequences(rows, length)
    if len(weight) % length:
        batch.weight.unflatten(0, (length, -1, weight.shape[1]))[len(weight) % length :, -1] = 0.0
    return batch._replace(episode_start=batch.episode_start.unflatten(0, (length, -1)), memory=flatten_time(rollout.memory))


def in_sequences(rows: Rows, length: int) -> Rows:
    """Cut `[T, N, ...]` into sequences of `length` steps, time-major and flat. A shorter last sequence repeats its last row."""
    steps = len(tree_leaves(rows)[0])
    if steps % length:
        rows = tree_index(rows, torch.arange(steps - steps % length + length).clamp(max=steps - 1))
    return tree_map(lambda leaf: leaf.unflatten(0, (-1, length)).transpose(0, 1).flatten(0, 2), rows)


def in_time(rows: Tree, length: int, steps: int, num: int) -> Tree:
    """Undo `in_sequences`: return `[steps, num, ...]`."""
    return tree_map(lambda leaf: leaf.unflatten(0, (length, -1, num)).transpose(0, 1).flatten(0, 1)[:steps], rows)


def minibatches(batch: Batch, batch_size: int, normalize_advantage: bool, generator: Generator) -> Iterator[Batch]:
    """Yield all sequences once in random order, `batch_size` rows at a time; on request, normalize advantages within each minibatch."""
    length, num = batch.episode_start.shape
    order = torch.randperm(num, generator=generator, device=generator.device).to(batch.weight.device).view(-1, batch_size // length)

    def shuffled(leaf: Tensor) -> Tensor:
        if length == 1:
            return leaf.index_select(0, order.flatten()).unflatten(0, order.shape)  # copies whole rows; indexing would copy byte by byte
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
    """Return (x − mean) / (std + 1e-8) over the last dimension, unbiased, over rows of positive weight; x itself if fewer than two.

    The rows of all ranks count as one batch, so that the ranks together learn the same as a single one would from all rows.
    """
    local_count = count = (weight > 0).sum(-1, keepdim=True)
    are_several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if are_several:
        count = sum_over_ranks(local_count)
        weight = weight * (local_count / count.clamp(min=1))
    mean = (weight * x).sum(-1, keepdim=True)
    mean = sum_over_ranks(mean) if are_several else mean
    variance = (weight * (x - mean).square()).sum(-1, keepdim=True)
    variance = (sum_over_ranks(variance) if are_several else variance) * count / (count - 1).clamp(min=1)
    return torch.where(count > 1, (x - mean) / (variance.sqrt() + 1e-8), x)
