"""Steps a vector environment with a policy and keeps what happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Generator, Tensor

from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.data.rollout import Unroll, gather_ends, judge
from lightning_rl.distributions import Distribution
from lightning_rl.envs.stepping import EnvStep, Stepper
from lightning_rl.errors import Interrupted
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.acting import Precision, RandomActor, StepActor, forgotten, make_actor
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import Rollout, Tree, tree_index, tree_leaves, tree_map, tree_stack, tree_to_numpy, tree_to_torch


class ActingNetwork(Protocol):
    """What the collector asks of a network, see `networks/actor_critic.py`."""

    distribution: Distribution
    memory: Any

    def initial_memory(self, num: int) -> Tree: ...

    def parameters(self) -> Iterator[Tensor]: ...

    def sample(
        self, obs: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree, *, generator: Generator
    ) -> tuple[Tree, Tree]: ...

    def log_prob(self, obs: Tree, action: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree) -> Tensor: ...

    def judge(self, obs: Tree, action: Tree, memory: Tree, episode_start: Tensor | None, action_mask: Tree) -> tuple[Tensor, Tensor]: ...

    def value(self, obs: Tree, memory: Tree, episode_start: Tensor | None) -> Tensor: ...


class Stepped(NamedTuple):
    """One step of N environments, for a replay buffer: what was seen, done, and happened, and the policy's memory and the masks before it.

    obs, action, memory, action_mask: `[N, ...]` trees of arrays.
    """

    obs: Tree
    action: Tree
    step: EnvStep
    memory: Tree
    action_mask: Tree


class Collector:
    """Steps N environments, `n_steps` times an iteration.

    The rollout's tensors on the CPU share memory with the collector's arrays: use one before collecting the next.

    Args:
        stepper: the environments.
        spaces: of one of them.
        network: the policy, asked with its newest weights at every step.
        n_steps: T.
        seed: of the environments and of the policy's draws.
        log_probs: whether rollouts need log-probabilities; else that slot stays empty.
        precision: a context in which the network computes, the same as in its losses.
        next_obs: whether rollouts hold what was seen next, and the values of last observations beyond terminations.
    """

    def __init__(
        self,
        stepper: Stepper,
        spaces: Spaces,
        network: ActingNetwork,
        n_steps: int,
        seed: int,
        log_probs: bool = True,
        precision: Precision = nullcontext,
        next_obs: bool = False,
    ) -> None:
        self.stepper, self.network, self.n_steps, self.seed, self.log_probs = stepper, network, n_steps, seed, log_probs
        self.num_envs = num_envs = stepper.num_envs
        self.precision = precision
        self.guard = Guard()
        self.statistics = EpisodeStatistics(num_envs)
        self.env_steps = 0
        self.rows = 0
        """Rows stepped, experience or not: they grow on all ranks in the same iterations."""
        self._space = spaces.observation
        self._obs = allocate(self._space, n_steps + 1, num_envs)
        self._obs_tensor = tree_to_torch(self._obs)
        self._obs_rows = [tree_index(self._obs, t) for t in range(n_steps + 1)]
        self._next_obs = allocate(self._space, n_steps, num_envs) if next_obs else ()
        self._masks = spaces.masks(n_steps, num_envs)
        self._mask_rows = [tree_index(self._masks, t) for t in range(n_steps)]
        self._reward = np.zeros((n_steps, num_envs), dtype=np.float32)
        self._flags = {name: np.zeros((n_steps + 1, num_envs), dtype=bool) for name in ("terminated", "truncated", "valid", "start")}
        self._memory: Tree = ()
        self._memories: list[Tree] = []
        """Before the first row of each sequence of this iteration."""
        self._start = np.ones(num_envs, dtype=bool)
        self._generator: Generator | None = None
        self._current: Tree = None
        self._mask: Tree = ()
        self._begins_anew = False

    @property
    def generator(self) -> Generator:
        """Of the policy's draws, on its device."""
        if self._generator is None:
            self._generator = Generator(next(self.network.parameters()).device).manual_seed(self.seed)
        return self._generator

    @property
    def can_be_saved(self) -> bool:
        """Whether the environments can, in the middle of their episodes."""
        return self.stepper.can_be_saved

    def reset(self) -> None:
        """Start an episode in all environments."""
        obs, self._mask = self.stepper.reset(self.seed)
        self._current = self.guard.reset(obs, self.env_steps)
        self._memory = self.network.initial_memory(self.num_envs)
        self._start = np.ones(self.num_envs, dtype=bool)

    def begin(self) -> StepActor:
        """Before the first step of an iteration: who acts. The first call resets the environments."""
        if self._current is None:
            self.reset()
        self._memories = []
        self.statistics.finished.clear()
        return make_actor(self.network, tree_index(self._obs, slice(self.n_steps)), self.generator, self.precision)

    @property
    def name(self) -> str:
        """Of the environments, for messages."""
        return self.stepper.name

    def set_lessons(self, lessons: Mapping[str, dict[str, Any]]) -> None:
        """What environments draw their parameters from at their next resets, see `envs/parameters.py`."""
        self.stepper.set_lessons(lessons)

    def begin_anew(self) -> None:
        """Between iterations: the episodes under way are given up, with the next step in place of an action."""
        self._begins_anew = self._current is not None

    def step(self, t: int, actor: StepActor) -> tuple[EnvStep, Tree]:
        """Step t of an iteration: what happened, and the policy's memory after it."""
        tree_map(_assign, self._obs_rows[t], self._current)
        tree_map(_assign, self._mask_rows[t], self._mask)
        flags = self._flags
        flags["start"][t] = self._start
        if t % self.network.memory.sequence_length == 0:
            self._memories.append(self._memory)
        action, self._memory = actor.act(t, self._memory, self._start, self._mask_rows[t])
        happened = self.stepper.begin_anew() if self._begins_anew else self.stepper.step(action)
        self._begins_anew = False
        step = self.guard.step(happened, self._obs_rows[t], self.env_steps)
        self._reward[t] = step.reward
        flags["terminated"][t], flags["truncated"][t], flags["valid"][t] = step.terminated, step.truncated, step.valid
        self._start, self._current, self._mask = step.episode_start, step.obs, step.mask
        self.env_steps += self.num_envs if step.valid is self.stepper.all_valid else int(np.count_nonzero(step.valid))
        self.rows += self.num_envs
        if step.valid is not self.stepper.all_valid:
            self._cut(t, step.episode_start & ~step.valid)
        if len(self._next_obs):
            self._keep_next(tree_index(self._next_obs, t), step)
        self.statistics.update(step)
        return step, self._memory

    def _keep_next(self, row: Tree, step: EnvStep) -> None:
        """What was seen next, the last observation where an episode ended."""
        tree_map(_assign, row, step.obs)
        if len(step.ended):
            tree_map(lambda leaf, final: leaf.__setitem__(step.ended, final), row, step.final_obs)

    def _cut(self, t: int, begins: np.ndarray) -> None:
        """Rows that only begin an episode: one that was lost under way ended, as a truncation does, with the row before."""
        flags = self._flags
        if t > 0:
            flags["truncated"][t - 1] |= begins & flags["valid"][t - 1] & ~flags["terminated"][t - 1]
        self.statistics.forget(begins)

    def end(self) -> None:
        """After the last step of an iteration."""
        tree_map(_assign, self._obs_rows[self.n_steps], self._current)
        self._flags["start"][self.n_steps] = self._start

    def memory_row(self) -> Tree:
        """The policy's memory before the next step, as arrays `[N, ...]`, zeros where an episode begins."""
        return forgotten(tree_to_numpy(self._memory), self._start)

    def collect(self) -> Rollout:
        """Step `n_steps` times from where the last rollout ended, and judge what was done."""
        unroll = self.unroll()
        with torch.no_grad(), self.precision():
            return judge(unroll, self.network, self.generator.device, self.log_probs)

    def transitions(self, random_steps: int = 0) -> Iterator[Stepped]:
        """Step `n_steps` times, each when it is asked for, the first `random_steps` at random. The next step overwrites the arrays."""
        policy = self.begin()
        random = RandomActor(self.network, self.num_envs, self.generator, policy)
        for t in range(self.n_steps):
            actor, memory = random if t < random_steps else policy, self.memory_row()
            step, _ = self.step(t, actor)
            yield Stepped(self._obs_rows[t], tree_to_numpy(actor.taken[-1]), step, memory, self._mask_rows[t])

    def unroll(self) -> Unroll:
        """Step `n_steps` times from where the last rollout ended. Tensors, and arrays of what ended."""
        actor, found = self.begin(), []
        for t in range(self.n_steps):
            step, after = self.step(t, actor)
            if len(step.ended) and (len(self._next_obs) or step.truncated.any()):
                ended = step.ended if len(self._next_obs) else np.flatnonzero(step.truncated)
                final = tree_index(step.final_obs, np.searchsorted(step.ended, ended))
                found.append((t, ended, final, tree_to_numpy(tree_index(after, ended))))
        self.end()
        seen, start = self.rollout(), torch.from_numpy(self._flags["start"])
        memory = tree_stack([tree_to_torch(each, self.generator.device) for each in self._memories])
        ends = gather_ends(found, partial(allocate, self._space))
        flags = seen.terminated, seen.truncated, seen.valid, start
        return Unroll(self._obs_tensor, actor.actions(), (), seen.reward, *flags, seen.action_mask, memory, seen.next_obs, ends)

    def rollout(self) -> Rollout:
        """What the environments said in the last iteration, on the CPU; the slots for what a network adds are empty."""
        terminated, truncated, valid, start = (torch.from_numpy(flag[:-1]) for flag in self._flags.values())
        obs = tree_index(self._obs_tensor, slice(-1))
        none, mask = torch.zeros(0), tree_to_torch(self._masks)
        reward, next_obs = torch.from_numpy(self._reward).unsqueeze(-1), tree_to_torch(self._next_obs)
        return Rollout(obs, (), (), reward, none, none, terminated, truncated, valid, start, mask, (), next_obs)

    def random_steps(self, count: int, stop: Callable[[], bool] = lambda: False) -> Tree:
        """Observations `[>= count, ...]` of a policy that knows nothing; the next rollout starts new episodes.

        Raises:
            Interrupted: `stop` says so.
        """
        rows, seen, end = [], self.random_rows(), self.env_steps + count
        while self.env_steps < end:
            if stop():
                raise Interrupted
            rows.append(next(seen))
        return tree_map(lambda *leaves: torch.cat(leaves), *rows)

    def random_rows(self) -> Iterator[Tree]:
        """The same step by step, `[<= N, ...]` each."""
        actor = RandomActor(self.network, self.num_envs, self.generator)
        self._current = None
        obs, mask = self.stepper.reset(self.seed)
        current = self.guard.reset(obs, self.env_steps)
        while True:
            row = tree_to_torch(tree_map(_assign, allocate(self._space, self.num_envs), current))
            step = self.stepper.step(actor.act(0, (), self._start, mask)[0])
            step = self.guard.step(step, tree_to_numpy(row), self.env_steps)
            current, mask = step.obs, step.mask
            self.env_steps += int(step.valid.sum())
            self.rows += self.num_envs
            yield tree_index(row, torch.from_numpy(step.valid))

    def get_state(self) -> dict[str, Any]:
        """Between iterations: all that the next one depends on."""
        state: dict[str, Any] = {name: getattr(self, name) for name in ("env_steps", "rows")}
        state |= {"statistics": self.statistics.get_state(), "generator": self.generator.get_state(), "episodes": None}
        if self._current is not None:
            current = {"obs": self._current, "memory": self._memory, "start": self._start, "mask": self._mask}
            state["episodes"] = {"envs": self.stepper.state_dict(), "begin_anew": self._begins_anew, **current}
        return state

    def set_state(self, state: dict[str, Any]) -> str | None:
        """The inverse, before the first iteration; one line if the environments start new episodes instead."""
        self.env_steps, self.rows = state["env_steps"], state["rows"]
        self.statistics.set_state(state["statistics"])
        if "generator" not in state:
            self.statistics.forget()
            return "the checkpoint holds those of actors"
        self.generator.set_state(torch.from_numpy(state["generator"]))
        episodes = state["episodes"]
        if episodes is not None and np.shape(episodes.get("mask", ())) != np.shape(self._mask_rows[0]):
            new_episodes: str | None = "the checkpoint holds no action masks, or other ones"
        elif episodes is not None and _shapes(episodes["memory"]) != _shapes(self.network.initial_memory(self.num_envs)):
            new_episodes = "the checkpoint holds another memory"
        else:
            new_episodes = None if episodes is None else self.stepper.load_state_dict(episodes["envs"])
        if episodes is None or new_episodes is not None:
            self.statistics.forget()
            return new_episodes
        self._current, self._start, self._mask = episodes["obs"], episodes["start"], episodes.get("mask", ())
        self._begins_anew = episodes.get("begin_anew", False)
        self._memory = tree_to_torch(episodes["memory"], self.generator.device)
        return None

    def metrics(self) -> dict[str, float]:
        """Of the last 100 episodes, and `env/worker_restarts` where environments had to be started anew."""
        restarts = {"env/worker_restarts": float(self.stepper.restarts)} if self.stepper.restarts else {}
        return {**self.statistics.metrics(), **restarts}

    def take_notices(self) -> list[str]:
        """What there is to tell of the environments since the last time."""
        notices = self.stepper.notices[:]
        self.stepper.notices.clear()
        return notices

    def close(self) -> None:
        """Close the environments."""
        self.stepper.close()


def _shapes(tree: Tree) -> list[tuple[int, ...]]:
    return [tuple(np.shape(leaf)) for leaf in tree_leaves(tree)]


def _assign(target: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Copy into storage, with its dtype."""
    target[...] = source
    return target
