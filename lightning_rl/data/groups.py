"""Experience of groups: rollouts of agents with values of their groups, returns, and minibatches of whole groups.

Shapes: E groups, the copies of an environment or those in a scene of Unity, of A agents each; row e · A + a is agent a of group e.
"""

from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from lightning_rl.data.collector import Collector
from lightning_rl.data.rollout import Ends, ExperienceDataset, RolloutDataset, Unroll, in_sequences, normalize
from lightning_rl.data.shared import SideCollector
from lightning_rl.networks.group_critic import GroupActorCritic
from lightning_rl.returns import gae
from lightning_rl.types import Experience, Rollout, State, Tree, flatten_time, tree_index, tree_map, tree_to_torch

RECENT = 100
"""Number of latest group episodes over which means are taken."""


class GroupRollout(NamedTuple):
    """Experience of E groups over T steps.

    rows: rows of agents `[T, N, ...]`, without values.  present: which agents were present, bool `[T, E, A]`.
    over, terminated: bool `[T, E]`, whether the last agent of the group ended, and whether no agent was then truncated.
    value, next_value: `[T, E, S]`, value of the group before the step, and of the agents present after it; at a truncation, the value of
    their final observations.  baseline: `[T, E, A, S]`, baseline of each agent; empty without baselines.
    """

    rows: Rollout
    present: Tensor
    over: Tensor
    terminated: Tensor
    value: Tensor
    next_value: Tensor
    baseline: Tensor


class GroupBatch(NamedTuple):
    """Steps of groups, `[B, ...]`, in sequences of L steps, time-major; L = 1 without a memory.

    obs, action, log_prob, action_mask, next_obs, terminated: of agents, `[B, A, ...]`.  present: which agents were present, `[B, A]`.
    value, returns: `[B, S]`.  baseline: `[B, A, S]`.  advantage: `[B, A]`, summed over S.
    weight, group_weight: `[B, A]` and `[B]`, equal for all agents, and groups, that are experience, 0 for the others; each sums to 1.
    episode_start: `[L, B / L, A]`.  memory: the policy's memory before the first step of each sequence, `[B / L, A, ...]` tree.
    """

    obs: Tree
    action: Tree
    log_prob: Tensor
    action_mask: Tree
    next_obs: Tree
    terminated: Tensor
    present: Tensor
    value: Tensor
    baseline: Tensor
    returns: Tensor
    advantage: Tensor
    weight: Tensor
    group_weight: Tensor
    episode_start: Tensor
    memory: Tree = ()

    def flat(self, name: str) -> Tree:
        """Return a field of agents as rows `[B · A, ...]`, or `[L, B / L · A]` for the starts of episodes."""
        tree, dim = getattr(self, name), int(name == "episode_start")
        return tree_map(lambda leaf: leaf.flatten(dim, dim + 1), tree)

    @property
    def experience(self) -> Experience:
        """Return the rows as input of reward signals."""
        obs, action, next_obs, terminated, weight = map(self.flat, ("obs", "action", "next_obs", "terminated", "weight"))
        return Experience(obs, action, next_obs, (), terminated, weight)


class GroupDataset(ExperienceDataset):
    """Endless rollouts of groups with the newest weights.

    Args:
        rollouts: dataset of the groups' rows, whose collector is taken over.
        baselines: whether rollouts hold baselines.
    """

    collector: Collector | SideCollector

    def __init__(self, rollouts: RolloutDataset, baselines: bool) -> None:
        super().__init__(rollouts.collector, rollouts.iterations)
        self.baselines = baselines
        self.returns: np.ndarray | None = None
        """Return of each group in its current episode so far."""
        self.finished: deque[float] = deque(maxlen=RECENT)
        """Returns of the latest groups that ended."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.is_whole = False
            self.batch = self._collect()
            if self.collected is None:
                yield deepcopy(self.batch)
            else:
                self.collected()
                yield self.batch

    @torch.no_grad()
    def _collect(self) -> GroupRollout:
        collector = self.collector
        source: Any = collector.source
        network: Any = collector.network
        unroll, present = collector.unroll(), torch.from_numpy(source.present)
        with collector.context():
            groups = add_group_values(unroll, present, network, collector.generator.device, self.baselines)
        self._note(groups)
        return groups

    def _note(self, groups: GroupRollout) -> None:
        """Note the returns of groups that ended."""
        reward = (groups.rows.reward[..., 0].unflatten(-1, groups.present.shape[1:]) * groups.present).sum(-1).cpu().numpy()
        present, over = groups.present.any(-1).cpu().numpy(), groups.over.cpu().numpy().copy()
        over[:-1] &= groups.rows.episode_start.unflatten(-1, groups.present.shape[1:])[1:].all(-1).cpu().numpy()  # else it was abandoned
        self.returns = np.zeros(reward.shape[1]) if self.returns is None else self.returns
        for rewards, ended, is_present in zip(reward, over, present, strict=True):
            self.returns = (self.returns + rewards) * is_present  # no agent is present if an episode was abandoned
            if ended.any():
                self.finished.extend(self.returns[ended].tolist())
                self.returns[ended] = 0.0

    def cut_episodes(self) -> None:
        self.returns = None

    def metrics(self) -> dict[str, float]:
        return {"rollout/group_ep_rew_mean": float(np.mean(self.finished))} if self.finished else {}

    def own_state(self) -> State:
        return {"paid": None if self.returns is None else self.returns.copy(), "finished": list(self.finished)}

    def set_own_state(self, state: State, new_episodes: str | None) -> None:
        self.returns = None if new_episodes is not None or state["paid"] is None else np.array(state["paid"])
        self.finished.clear()
        self.finished.extend(state["finished"])


def add_group_values(unroll: Unroll, present: Tensor, network: GroupActorCritic, device: torch.device, baselines: bool) -> GroupRollout:
    """Compute the values of all groups as one batch, and log-probabilities, with the current weights.

    Args:
        unroll: unroll of tensors, with its ends as arrays.
        present: `[N]`, agents that are present after the last step.
        baselines: whether to compute baselines too.
    """
    ends, size = unroll.ends, network.group_size
    unroll = tree_map(lambda leaf: leaf.to(device), unroll._replace(ends=()))  # type: ignore[arg-type]
    rows, memory = unroll.rollout(), tree_index(unroll.memory, 0)
    presence = torch.cat([rows.valid, present.to(device).unsqueeze(0)]).unflatten(1, (-1, size))
    kept = torch.zeros_like(rows.valid)
    kept[ends.step, ends.env] = True
    left, truncated, kept = (flags.unflatten(1, (-1, size)) for flags in (rows.terminated | rows.truncated, rows.truncated, kept))
    now = presence[:-1]
    abandoned = truncated & now & ~kept
    presence = torch.cat([now[:1], presence[1:] | abandoned])  # the next row, without actions, holds their final observations
    over = now.any(-1) & (left | ~now).all(-1)
    log_prob, _, z = network.evaluate(rows.obs, rows.action, memory, rows.episode_start, rows.action_mask, now, baselines)
    value = network.value(unroll.obs, memory, unroll.episode_start, presence)
    next_value = value[1:]
    cut = over & (truncated & now).any(-1)
    keeps_terminated = len(unroll.next_obs) > 0  # in `ends`: a stream that ignores terminations needs next_obs
    last = (over if keeps_terminated else cut) & ~abandoned.any(-1)
    if last.any():
        next_value = next_value.clone()
        next_value[last] = value_last(ends, torch.where(cut.unsqueeze(-1), truncated, left), last, network)
    baseline = network.value_head.value(z)[..., 1:, :]
    return GroupRollout(rows._replace(log_prob=log_prob), now, over, over & ~cut, value[:-1], next_value, baseline)


def value_last(ends: Ends, leaving: Tensor, last: Tensor, network: GroupActorCritic) -> Tensor:
    """Return V of the final observations `[K, S]` of the K groups that end where `last [T, E]` is true.

    V counts the agents that are `leaving [T, E, A]` in this step: in a truncated group those that were truncated, but not those that
    terminated in the same step; in a terminated group all that terminated. Agents that left earlier do not count.
    """
    device, size = last.device, leaving.shape[-1]
    step, row = torch.from_numpy(ends.step).to(device), torch.from_numpy(ends.env).to(device)
    counts = last[step, row // size] & leaving.flatten(1)[step, row]
    number = (last.flatten().cumsum(0) - 1).view_as(last)[step, row // size]  # index of the group among the K
    place, groups = (number * size + row % size)[counts], int(last.sum())

    def in_place(leaf: Tensor) -> Tensor:
        return leaf.new_zeros(groups * size, *leaf.shape[1:]).index_copy(0, place, leaf[counts])

    obs, memory = tree_map(in_place, tree_to_torch((ends.obs, ends.memory), device))
    present = torch.zeros(groups * size, dtype=torch.bool, device=device).index_fill(0, place, True)
    start = torch.zeros_like(present)
    return network.value(obs, memory, start, present.view(-1, size))


def group_returns(groups: GroupRollout, reward: Tensor, gamma: Tensor, ignore_done: Tensor, gae_lambda: float) -> Tensor:
    """Return the λ-return of each group `[T, E, S]`. The death of an agent does not end it; it ends with the last agent of the group.

    R_t = r_t + γ ((1 − λ) V_{t+1} + λ R_{t+1}), with V of the agents present then, whatever their number; γ is 0 where the last terminated.

    Args:
        reward: reward of the group, `[T, E, S]`.
        gamma, ignore_done: of each stream, `[S]`; a stream that ignores terminations continues beyond them.
    """
    discount = gamma * ~(groups.terminated.unsqueeze(-1) & ~ignore_done)
    carry = ~groups.over.unsqueeze(-1)
    return gae(reward, discount, groups.value, groups.next_value, carry, gae_lambda) + groups.value


def make_group_batch(groups: GroupRollout, returns: Tensor, advantage: Tensor, sequence_length: int = 1) -> GroupBatch:
    """Flatten a rollout to `B = T * E` steps of groups, in sequences of min(`sequence_length`, T) steps.

    A shorter last sequence is padded with steps of weight 0.
    """
    rows, size = groups.rows, groups.present.shape[-1]
    occupied = groups.present.any(-1)
    weight, group_weight = (rows / rows.sum().clamp(min=1) for rows in (groups.present.float(), occupied.float()))

    def split(tree: Tree) -> Tree:
        return tree_map(lambda leaf: leaf.unflatten(1, (-1, size)), tree)

    agents = split((rows.obs, rows.action, rows.log_prob, rows.action_mask, rows.next_obs, rows.terminated))
    of_groups = groups.present, groups.value, groups.baseline, returns, advantage, weight, group_weight, split(rows.episode_start)
    batch = GroupBatch._make((*agents, *of_groups, ()))
    steps, length = len(weight), min(sequence_length, len(weight))
    batch = flatten_time(batch) if length == 1 else in_sequences(batch, length)
    if steps % length:
        for row_weight in (batch.weight, batch.group_weight):
            row_weight.unflatten(0, (length, -1, occupied.shape[1]))[steps % length :, -1] = 0.0
    return batch._replace(episode_start=batch.episode_start.unflatten(0, (length, -1)), memory=flatten_time(split(rows.memory)))


def group_minibatches(batch: GroupBatch, batch_size: int, normalize_advantage: bool, generator: Generator) -> Iterator[GroupBatch]:
    """Yield all sequences once in random order, `batch_size` steps of groups at a time; advantages are normalized over present agents."""
    length, num = batch.episode_start.shape[:2]
    steps = batch._replace(episode_start=batch.weight, memory=())
    for chosen in torch.randperm(num, generator=generator, device=generator.device).to(batch.weight.device).view(-1, batch_size // length):

        def take(leaf: Tensor, chosen: Tensor = chosen) -> Tensor:
            return leaf.unflatten(0, (length, num)).index_select(1, chosen).flatten(0, 1)

        part: GroupBatch = tree_map(take, steps)
        weight, group_weight = (rows / rows.sum().clamp(min=1e-12) for rows in (part.weight, part.group_weight))
        advantage = part.advantage
        if normalize_advantage:
            advantage = normalize(advantage.flatten(), weight.flatten()).view_as(advantage)
        start, memory = batch.episode_start[:, chosen], tree_index(batch.memory, chosen)
        yield part._replace(weight=weight, group_weight=group_weight, advantage=advantage, episode_start=start, memory=memory)
