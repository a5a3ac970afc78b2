"""Collect experience: step a vector environment with a policy, and store the results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator

from lightning_rl.checkpoints.validation import ANYTHING, COUNT, FLAG, FLAGS, GENERATOR, MAPPING, MATRICES, Rules, below
from lightning_rl.data.episodes import EpisodeStatistics
from lightning_rl.data.rollout import NO_ENDS, Stepped, Unroll, add_values, gather_ends
from lightning_rl.distributions import Exploration, state_dependent
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.agents.world import Side
from lightning_rl.envs.classic_control import ClassicControlEnvs
from lightning_rl.envs.stepping import AnyStepper
from lightning_rl.errors import RunStoppedError
from lightning_rl.nan_policy import Guard
from lightning_rl.networks.acting import (
    ActingContext,
    ActingNetwork,
    NumpyActor,
    RandomActor,
    StepActor,
    TorchActor,
    fits_numpy,
    make_actor,
    reset_memory,
)
from lightning_rl.spaces import Spaces, allocate
from lightning_rl.types import EnvStep, Rollout, State, Tree, is_finite, tree_index, tree_map, tree_stack, tree_to_numpy, tree_to_torch

INTERRUPTED = "an error ended the run in the middle of an iteration"
"""Reason why environments start new episodes."""
copy_to = partial(np.copyto, casting="unsafe")
"""Copy an array into storage, casting it to the storage's dtype."""


class Recorder:
    """Acts in N rows, and stores `n_steps` steps of them per iteration. Base of collectors, which differ in who steps the environments.

    A step is two calls: `act` returns the actions of N rows, and `store` takes their results.

    An observation is stored once, in an array `[T + 1, N, ...]`: the actor reads row t of it, and the rollout is a view of it. So a rollout
    on the CPU must be used before collecting the next.

    Args:
        source: where the rows come from.
        num_rows: N.
        network: the policy, with its newest weights in every iteration.
        n_steps: T.
        seed: seed of the environments and of the policy's random draws.
        log_probs: whether rollouts need log-probabilities; otherwise that field stays empty.
        context: in which the network acts and judges; see `acting_context`.
        next_obs: whether rollouts hold next observations, and the values of final observations also at terminations.
    """

    state_rules: ClassVar[Rules] = {
        "env_steps|rows": COUNT,
        "generator?": GENERATOR,
        **below("statistics", EpisodeStatistics.state_rules),
        "episodes?/obs|memory": ANYTHING,
        "episodes?/envs": MAPPING,
        "episodes?/start": FLAGS,
        "episodes?/begin_anew?": FLAG,
        "episodes?/exploration?/steps": COUNT,
        "episodes?/exploration?/draws/[]": MATRICES,
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""
    at_once: ClassicControlEnvs | None = None
    """The environments, if they are stepped as a batch."""

    def __init__(
        self,
        source: AnyStepper | Side,
        num_rows: int,
        spaces: Spaces,
        network: ActingNetwork,
        n_steps: int,
        seed: int,
        log_probs: bool = True,
        context: ActingContext = nullcontext,
        next_obs: bool = False,
    ) -> None:
        self.source, self.network, self.n_steps, self.seed, self.log_probs = source, network, n_steps, seed, log_probs
        self.name, self.num_envs = source.name, num_rows
        self.labels: Sequence[str] = getattr(source, "labels", ())
        """Names of the rows in messages if they are agents, else empty."""
        self.context = context
        self.guard = Guard()
        self.statistics = EpisodeStatistics(num_rows)
        self.env_steps = 0
        self.rows = 0
        """Number of stepped rows, experience or not: it grows equally on all ranks in an iteration."""
        self.generator = Generator(next(network.parameters()).device).manual_seed(seed)
        """Generator of the policy's draws, on its device."""
        exploring = state_dependent(network.distribution)
        self.exploration = Exploration(exploring, num_rows, self.generator) if exploring else None
        self._space = spaces.observation
        self._obs = allocate(self._space, n_steps + 1, num_rows)
        self._obs_tensor = tree_to_torch(self._obs)
        self._obs_rows = [tree_index(self._obs, t) for t in range(n_steps + 1)]
        self._next_obs = allocate(self._space, n_steps, num_rows) if next_obs else ()
        self._masks = spaces.masks(n_steps, num_rows)
        self._mask_rows = [tree_index(self._masks, t) for t in range(n_steps)]
        self._reward = np.zeros((n_steps, num_rows), dtype=np.float32)
        self._flags = {name: np.zeros((n_steps + 1, num_rows), dtype=bool) for name in ("terminated", "truncated", "valid", "start")}
        stored = self._reward, self._flags, self._masks, self._next_obs
        self._rewards, self._marks, self._mask_tensor, self._next_tensor = tree_to_torch(stored)
        self._sequence_length: int = network.memory.sequence_length
        self._actor: StepActor | None = None
        self._random: RandomActor | None = None
        self.notices: list[str] = []
        """Lines for the user about how actions are computed."""
        self.t = 0
        """Number of steps of the current iteration so far."""
        self._ends: list[tuple[int, np.ndarray, Tree, Tree]] = []
        """Ends of episodes in this iteration whose final value is needed: step, environments, their final observations and memories."""
        self._taken: Tree = ()
        """The newest actions, as sampled."""
        self._before: Tree = ()
        """The memory before them."""
        self._memory: Tree = ()
        self._memories: list[Tree] = []
        """The memory before the first row of each sequence of this iteration."""
        self._start = np.ones(num_rows, dtype=bool)
        self._current: Tree = None
        self._mask: Tree = ()
        self._restarts = False
        """Whether the next step abandons all episodes."""
        self.interrupted = False

    # ---------------------------------------------------------------- stepping

    @property
    def steps_made(self) -> int:
        """Return a number that grows with each environment step, also within an iteration; only its differences have a meaning."""
        return self.env_steps

    @property
    def is_open(self) -> bool:
        """Return whether an iteration has begun and is not full."""
        return 0 < self.t < self.n_steps

    def collect(self) -> Rollout:
        """Step `n_steps` times, continuing from the last rollout, and add values and log-probabilities."""
        unroll = self.unroll()
        with torch.no_grad(), self.context():
            return add_values(unroll, self.network, self.generator.device, self.log_probs)

    def unroll(self) -> Unroll:
        """Return the experience of the next `n_steps` steps, continuing from the last; tensors, with the ends as arrays."""
        raise NotImplementedError

    def reset(self) -> None:
        """Let the rows `begin`, before the first step or after an interruption."""
        raise NotImplementedError

    def begin(self, obs: Tree, mask: Tree) -> None:
        """Note that an episode starts in all rows, with these first observations and masks."""
        self._current = obs if is_finite(obs) else self.guard.replace_first(obs, self.env_steps, self.labels)
        self._mask, self._memory = mask, self.network.initial_memory(self.num_envs)
        self._start = np.ones(self.num_envs, dtype=bool)

    def pack(self) -> Unroll:
        """Return the stored steps of an iteration that is full, where they are stored, and the observations after it."""
        tree_map(copy_to, self._obs_rows[self.n_steps], self._current)
        self._flags["start"][self.n_steps] = self._start
        memory = tree_stack([tree_to_torch(memory, self.generator.device) for memory in self._memories]) if len(self._memory) else ()
        ends = gather_ends(self._ends, partial(allocate, self._space)) if self._ends else NO_ENDS
        reward, marks, start = self._rewards.unsqueeze(-1), self._marks, self._marks["start"]
        flags = marks["terminated"][:-1], marks["truncated"][:-1], marks["valid"][:-1], start
        assert self._actor is not None
        return Unroll(self._obs_tensor, self._actor.actions(), (), reward, *flags, self._mask_tensor, memory, self._next_tensor, ends)

    def act(self, random_steps: int = 0, made: tuple[Tree, Tree] | None = None) -> Tree:
        """Return the next actions `[N, ...]`, as environments take them. The first call resets the environments.

        Args:
            random_steps: number of steps at the beginning of an iteration whose actions are random.
            made: the actions as sampled and the memory after them if a run that is resumed has acted already; then () is returned.
        """
        t = self.t = self.t % self.n_steps
        if t == 0:  # an iteration begins
            obs = tree_index(self._obs, slice(self.n_steps))
            if self._current is None:
                self.reset()
            if self._actor is None and self.exploration is not None:
                self._actor = TorchActor(self.network, obs, self.exploration.generator, self.context, self.exploration.step)
            elif self._actor is None:
                self._actor = make_actor(self.network, obs, self.generator, self.context)
            elif isinstance(self._actor, NumpyActor) and not fits_numpy(self._actor.network, obs):
                self.notices.append("the policy was changed from outside: torch computes its actions from now on, which is slower")
                self._actor = TorchActor(self.network, obs, self.generator, self.context)
            else:
                self._actor.begin(obs)
            if self.at_once is not None:
                self.at_once.next_check = 0  # callbacks may have changed copies
            self._random, self._memories, self._ends = None, [], []
            self.statistics.finished.clear()
        tree_map(copy_to, self._obs_rows[t], self._current)
        if len(self._mask):
            copy_to(self._mask_rows[t], self._mask)
        self._flags["start"][t] = self._start
        if t % self._sequence_length == 0:
            self._memories.append(self._memory)
        self._before = self._memory
        actor: Any = self._actor
        if made is not None:
            device, (taken, memory) = self.generator.device, made
            actor.taken.append(taken if isinstance(actor, NumpyActor) else tree_to_torch(taken, device))
            action, self._memory = (), tree_to_torch(memory, device)
        else:
            if t < random_steps:
                actor = self._random = self._random or RandomActor(self.network, self.num_envs, self.generator, actor)
            action, self._memory = actor.act(t, self._memory, self._start, self._mask_rows[t])
        self._taken = actor.taken[-1]
        return action

    def store(self, step: EnvStep) -> EnvStep:
        """Store the results of the newest actions. Return them, without NaN and infinite values."""
        t, flags = self.t, self._flags
        if is_finite(step.obs) and is_finite(step.reward) and (step.final_obs is None or is_finite(step.final_obs)):
            self.guard.bad_steps = 0
        else:
            step = self.guard.replace(step, self._obs_rows[t], self.env_steps, self.labels)
        self._reward[t] = step.reward
        flags["terminated"][t], flags["truncated"][t], flags["valid"][t] = step.terminated, step.truncated, step.valid
        self._start, self._current, self._mask, self._restarts = step.episode_start, step.obs, step.mask, False
        self.rows += self.num_envs
        if step.valid.all():
            self.env_steps += self.num_envs
        else:
            self.env_steps += int(np.count_nonzero(step.valid))
            self._cut(t, step.episode_start & ~step.valid)
        if len(self._next_obs):
            self._keep_next(tree_index(self._next_obs, t), step)
        if len(step.ended) and (len(self._next_obs) or step.truncated.any()):
            ended = step.ended if len(self._next_obs) else np.flatnonzero(step.truncated)
            final = tree_index(step.final_obs, np.searchsorted(step.ended, ended))
            self._ends.append((t, ended, final, tree_to_numpy(tree_index(self._memory, ended))))
        self.statistics.update(step)
        self.t = t + 1
        return step

    def _keep_next(self, row: Tree, step: EnvStep) -> None:
        """Store the next observations; the final ones where episodes ended."""
        tree_map(copy_to, row, step.obs)
        if len(step.ended):
            tree_map(lambda leaf, final: leaf.__setitem__(step.ended, final), row, step.final_obs)

    def _cut(self, t: int, begins: np.ndarray) -> None:
        """Truncate lost episodes: their last row is the one before a row that only begins an episode."""
        flags = self._flags
        if t > 0:
            flags["truncated"][t - 1] |= begins & flags["valid"][t - 1] & ~flags["terminated"][t - 1]
        self.statistics.forget(begins)

    def rollout(self) -> Rollout:
        """Return the environments' results of the last iteration, where they are stored; the fields that a network adds are empty."""
        terminated, truncated, valid, start = (self._marks[name][:-1] for name in ("terminated", "truncated", "valid", "start"))
        obs, reward, empty = tree_index(self._obs_tensor, slice(-1)), self._rewards.unsqueeze(-1), torch.zeros(0)
        return Rollout(obs, (), (), reward, empty, empty, terminated, truncated, valid, start, self._mask_tensor, (), self._next_tensor)

    def interrupt(self) -> None:
        """Abandon the current episodes after an error, which may have left the environments in the middle of a step."""
        self.interrupted, self._current, self.t = True, None, 0

    def _get_state(self, get_envs: Callable[[], State]) -> State:
        """Return everything that the next iteration depends on, between iterations or after an interruption; `get_envs`: of the source."""
        state: State = {name: getattr(self, name) for name in ("env_steps", "rows")}
        state |= {"statistics": self.statistics.get_state(), "generator": self.generator.get_state(), "episodes": None}
        if self.interrupted:
            state["interrupted"] = True
        if self._current is not None:
            obs, start, mask = tree_to_numpy((self._current, self._start, self._mask))
            current = {"obs": obs, "memory": self._memory, "start": start, "mask": mask}
            if self.exploration is not None:
                current["exploration"] = self.exploration.get_state()
            state["episodes"] = {"envs": get_envs(), "begin_anew": self._restarts, **current}
        return state

    def _set_state(self, state: State, set_envs: Callable[[State], str | None]) -> str | None:
        """Restore a state before the first iteration. Return None, or the reason why the environments start new episodes instead.

        `set_envs`: restores the state of the source, and returns the same.
        """
        self.env_steps, self.rows = state["env_steps"], state["rows"]
        self.statistics.set_state(state["statistics"])
        if "generator" not in state:
            self.statistics.forget()
            return "the checkpoint holds those of actors"
        self.generator.set_state(torch.from_numpy(state["generator"]))
        episodes = state["episodes"]
        if episodes is None:
            self.statistics.forget()
            return INTERRUPTED if state.get("interrupted", False) else None
        if np.shape(episodes.get("mask", ())) != np.shape(self._mask_rows[0]):
            new_episodes: str | None = "the checkpoint holds no action masks, or different ones"
        elif tree_map(np.shape, episodes["memory"]) != tree_map(np.shape, self.network.initial_memory(self.num_envs)):
            new_episodes = "the checkpoint holds another memory"
        elif self.exploration is not None and not self.exploration.set_state(episodes.get("exploration")):
            new_episodes = "the checkpoint holds other exploration matrices"
        else:
            new_episodes = set_envs(episodes["envs"])
        if new_episodes is not None:
            self.statistics.forget()
            return new_episodes
        self._current, self._start, self._mask = episodes["obs"], episodes["start"], episodes.get("mask", ())
        self._restarts = episodes.get("begin_anew", False)
        self._memory = tree_to_torch(episodes["memory"], self.generator.device)
        return None


class SteppingCollector(Recorder):
    """Base of collectors that step environments themselves. Arguments other than `stepper` as in `Recorder`."""

    def __init__(self, stepper: AnyStepper, *arguments: Any, **settings: Any) -> None:
        super().__init__(stepper, stepper.num_envs, *arguments, **settings)
        envs = getattr(stepper, "envs", None)
        self.at_once = envs if isinstance(envs, ClassicControlEnvs) else None
        self.stepper, self.can_be_saved, self.set_lessons, self.close = stepper, stepper.can_be_saved, stepper.set_lessons, stepper.close

    def reset(self, seeded: bool = True) -> None:
        """Start an episode in all environments, with the collector's seed or continuing their random streams."""
        self.begin(*self.stepper.reset(self.seed if seeded else None))

    @property
    def opponent(self) -> Opponent:
        """Return the player of the other seats of a game."""
        return self.stepper.opponent  # type: ignore[union-attr]

    def restart_episodes(self) -> None:
        """Abandon the current episodes, between iterations: the next step starts new ones instead of acting."""
        self._restarts = self._current is not None

    def metrics(self) -> dict[str, float]:
        """Return means over the last 100 episodes, what environments report, and `env/worker_restarts` if some were restarted."""
        restarts = {"env/worker_restarts": float(self.stepper.restarts)} if self.stepper.restarts else {}
        return {**self.statistics.metrics(), **self.stepper.stats, **restarts}

    def take_notices(self) -> list[str]:
        """Return the lines for the user since the last call: about the environments, and about how actions are computed."""
        notices = [*self.stepper.notices, *self.notices]
        self.stepper.notices.clear()
        self.notices.clear()
        return notices

    def get_state(self) -> State:
        """Return everything that the next iteration depends on, between iterations or after an interruption."""
        return self._get_state(self.stepper.state_dict)

    def set_state(self, state: State) -> str | None:
        """Restore a state before the first iteration. Return None, or the reason why the environments start new episodes instead."""
        return self._set_state(state, self.stepper.load_state_dict)

    def random_steps(self, count: int, stop: Callable[[], bool] = lambda: False) -> Tree:
        """Return observations `[>= count, ...]` of a random policy; the next rollout starts new episodes.

        Raises `RunStoppedError`: `stop` returned True.
        """
        rows, source, end = [], self.random_rows(), self.env_steps + count
        while self.env_steps < end:
            if stop():
                raise RunStoppedError
            rows.append(next(source))
        return tree_map(lambda *leaves: torch.cat(leaves), *rows)

    def random_rows(self) -> Iterator[Tree]:
        """Yield observations of a random policy step by step, `[<= N, ...]` each."""
        actor = RandomActor(self.network, self.num_envs, self.generator)
        self.reset()
        current, mask, self._current = self._current, self._mask, None
        while True:
            row = tree_map(lambda leaf, new: copy_to(leaf, new) or leaf, allocate(self._space, self.num_envs), current)
            step = self.stepper.step(actor.act(0, (), self._start, mask)[0])
            if not (is_finite(step.obs) and is_finite(step.reward)):
                step = self.guard.replace(step, row, self.env_steps, self.labels)
            current, mask = step.obs, step.mask
            self.env_steps += int(step.valid.sum())
            self.rows += self.num_envs
            yield tree_index(tree_to_torch(row), torch.from_numpy(step.valid))


class Collector(SteppingCollector):
    """Steps N environments whose observations and actions are arrays, see `Recorder`."""

    def unroll(self) -> Unroll:
        """Step `n_steps` times, continuing from the last rollout. Return tensors, with the ends as arrays."""
        self.t = 0
        while self.t < self.n_steps:
            action = self.act()
            self.store(self.stepper.restart_all() if self._restarts else self.stepper.step(action))
        return self.pack()

    def transitions(self, random_steps: int = 0) -> Iterator[Stepped]:
        """Yield `n_steps` steps one by one, the first `random_steps` with random actions. The next step overwrites the arrays."""
        self.t = 0
        for t in range(self.n_steps):
            action = self.act(random_steps)
            step = self.store(self.stepper.restart_all() if self._restarts else self.stepper.step(action))
            memory = reset_memory(tree_to_numpy(self._before), self._flags["start"][t]) if len(self._before) else ()
            yield Stepped(self._obs_rows[t], tree_to_numpy(self._taken), step, memory, self._mask_rows[t])
