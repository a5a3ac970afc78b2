"""Experience of several behaviors in one world: their collectors act, the world steps once, and each stores its results.

Each behavior has its own length of iterations. An item of the joint dataset holds the full ones, by the name of the behavior.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from lightning_rl.checkpoints.validation import ANYTHING, COUNT, FLAG, FLAGS, FLOATS, GENERATOR, MAPPING, ROWS, Rules, below
from lightning_rl.data.collector import INTERRUPTED, Recorder
from lightning_rl.data.dataset import ReplayDataset
from lightning_rl.data.rollout import ExperienceDataset, Stepped, Unroll
from lightning_rl.data.self_play import SelfPlayOpponent
from lightning_rl.data.turns import Rival, Turns
from lightning_rl.envs.agents.world import Side, World
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.networks.acting import reset_memory
from lightning_rl.types import EnvStep, State, Tree, tree_to_numpy


class Pushed(NamedTuple):
    """A step of a side: the actions as sampled, the policy's memory before and after them, and the results."""

    action: Tree
    before: Tree
    step: EnvStep
    after: Tree


class SideCollector(Recorder):
    """Records the rows of one side of a world that the joint dataset steps; its iterations hold what was pushed.

    Args:
        side: the side; further arguments as in `Recorder`.
        opponent: plays the side while another behavior learns, if behaviors take turns.
        learns: whether its behavior learns; otherwise only statistics are kept, and its iterations are not used.
    """

    open_iteration_rules: ClassVar[Rules] = {
        "generator": GENERATOR,
        "actions/[]/action|memory": ANYTHING,
        "steps/[]/obs|final_obs|mask|final_mask": ANYTHING,
        "steps/[]/reward": FLOATS,
        "steps/[]/terminated|truncated|valid|episode_start": FLAGS,
        "steps/[]/ended": ROWS,
        "steps/[]/info": MAPPING,
    }
    """What a state holds of an incomplete iteration, and the kind of each value, see `checkpoints/validation.py`."""

    can_be_saved = True

    def __init__(self, side: Side, *arguments: Any, opponent: SelfPlayOpponent | None = None, learns: bool = True, **settings: Any) -> None:
        super().__init__(side, side.num, *arguments, **settings)
        self.side, self.opponent, self.learns = side, opponent, learns
        self.opened: State = {}
        """The state at the beginning of the current iteration."""
        self.pushed: list[Pushed] = []
        """The steps of the current iteration."""

    def reset(self) -> None:
        """Let the rows begin with the newest observations of the side, whose world resets itself."""
        self.begin(*self.side.newest())

    def offer(self, random_steps: int) -> Tree:
        """Return the next actions `[N, ...]`; the first `random_steps` of an iteration are random."""
        if not self.is_open:
            if self._current is None:
                self.reset()
            self.opened, self.pushed = self._get_state(dict), []
        return self.act(random_steps)

    def push(self, step: EnvStep) -> None:
        """Store the results of the newest actions."""
        step = self.store(step)
        self.pushed.append(Pushed(self._taken, self._before, step, self._memory))

    def unroll(self) -> Unroll:
        """Return the iteration that was pushed. Tensors, with the ends as arrays."""
        return self.pack()

    def transitions(self, random_steps: int = 0) -> Iterator[Stepped]:
        """Yield the steps that were pushed."""
        for t, made in enumerate(self.pushed):
            memory = reset_memory(tree_to_numpy(made.before), self._flags["start"][t]) if len(made.before) else ()
            yield Stepped(self._obs_rows[t], tree_to_numpy(made.action), made.step, memory, self._mask_rows[t])

    def metrics(self) -> dict[str, float]:
        """Return means over the last 100 episodes."""
        return self.statistics.metrics()

    def take_notices(self) -> list[str]:
        """Return the lines for the user since the last call."""
        notices, self.notices = self.notices, []
        return notices

    def close(self) -> None:
        """Do nothing: the world is shared."""

    def get_state(self) -> State:
        """Return the state at the beginning of the iteration with its steps so far, or between iterations the state then."""
        if not self.is_open:
            return {**self._get_state(dict), "open_iteration": None}
        actions = [tree_to_numpy({"action": made.action, "memory": made.after}) for made in self.pushed]
        steps = [made.step._asdict() for made in self.pushed]
        return {**self.opened, "open_iteration": {"actions": actions, "steps": steps, "generator": self.generator.get_state()}}

    def set_state(self, state: State) -> str | None:
        """Restore a state, and repeat its steps. Return None, or the reason why the environments start new episodes instead."""
        new_episodes = self._set_state(state, lambda envs: None)
        if new_episodes is None and (made := state.get("open_iteration")) is not None:
            self._repeat(made)
        return new_episodes

    def _repeat(self, made: State) -> None:
        """Repeat the steps of an iteration that were made before the state was saved."""
        if len(made["steps"]) >= self.n_steps:
            raise ValueError(f"its iteration has {self.n_steps} steps and is full")
        self.opened, self.pushed = self._get_state(dict), []
        for taken, step in zip(made["actions"], made["steps"], strict=True):
            self.act(made=(taken["action"], taken["memory"]))
            self.push(EnvStep(**step))
        if made["steps"]:  # otherwise its actor is not ready yet
            self.generator.set_state(torch.from_numpy(made["generator"]))


class JointStatistics:
    """Statistics of all learning behaviors together, for the run as a whole."""

    def __init__(self, collectors: Mapping[str, SideCollector]) -> None:
        self.collectors = collectors

    @property
    def reports_success(self) -> bool:
        """Return whether any episode has reported its success."""
        return any(collector.statistics.reports_success for collector in self.collectors.values())

    @property
    def mean_length(self) -> float:
        """Return the mean over behaviors of the mean length of their last episodes."""
        return float(np.mean([collector.statistics.mean_length for collector in self.collectors.values()]))

    def share_reports(self) -> None:
        """Let every rank know which behaviors have reported success."""
        for collector in self.collectors.values():
            collector.statistics.share_reports()

    def clear(self) -> None:
        """Forget the finished episodes."""
        for collector in self.collectors.values():
            collector.statistics.clear()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of episodes, averaged over behaviors."""
        by_name: dict[str, list[float]] = {}
        for collector in self.collectors.values():
            for name, value in collector.statistics.metrics().items():
                by_name.setdefault(name, []).append(value)
        return {name: float(np.mean(values)) for name, values in by_name.items()}


class JointCollector:
    """The collector of a run for all behaviors of a world, see `RunCollector`. Its iteration ends when that of any learner is full."""

    state_rules: ClassVar[Rules] = {**below("world", World.state_rules), "steps": COUNT, "begin_anew?": FLAG}
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, world: World, collectors: Mapping[str, SideCollector]) -> None:
        self.world, self.collectors = world, collectors
        self.name, self.num_envs, self.can_be_saved, self.close = world.name, world.num_copies, world.can_be_saved, world.close
        self.learners = {name: collector for name, collector in collectors.items() if collector.learns}
        self.n_steps = min(learner.n_steps for learner in self.learners.values())
        self.statistics = JointStatistics(self.learners)
        self.steps = 0
        """Steps of the world on this rank."""
        self.interrupted = False

    @property
    def rows(self) -> int:
        """Return the number of stepped rows: one per copy and step, experience or not."""
        return self.steps * self.num_envs

    @property
    def steps_made(self) -> int:
        """Return the steps of the copies so far, as `Collector.steps_made` does."""
        return self.rows

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what parameters are drawn from, starting with the next episodes."""
        self.world.set_lessons(lessons)

    def restart_episodes(self) -> None:
        """Truncate the current episodes in the next step; learners may be in the middle of an iteration."""
        self.world.cuts_all = self.steps > 0

    def metrics(self) -> dict[str, float]:
        """Return the metrics of each behavior under its name, and the means over learning behaviors."""
        of_behaviors = {f"{name}/{key}": value for name, collector in self.collectors.items() for key, value in collector.metrics().items()}
        return self.statistics.metrics() | self.world.stats | of_behaviors

    def take_notices(self) -> list[str]:
        """Return nothing: each behavior has its own notices."""
        return []

    def interrupt(self) -> None:
        """Abandon the episodes of all behaviors after an error. Copies in the middle of a step cannot be saved."""
        self.interrupted, self.world.can_be_saved = True, False
        for collector in self.collectors.values():
            collector.interrupt()

    def get_state(self) -> State:
        """Return the state of the world; only between two steps."""
        state = {"world": self.world.get_state(), "steps": self.steps, "begin_anew": self.world.cuts_all}
        return {**state, "interrupted": True} if self.interrupted else state

    def set_state(self, state: State) -> str | None:
        """Restore a state. Return None, or the reason why the environments start new episodes instead."""
        self.steps = state["steps"]
        if state.get("interrupted", False):
            return INTERRUPTED
        new_episodes = self.world.set_state(state["world"])
        self.world.cuts_all = new_episodes is None and state.get("begin_anew", False)
        return new_episodes


class JointDataset(ExperienceDataset):
    """Endless iterations; each holds the items of the behaviors whose iterations are full, by name.

    Iterations count steps of the world instead of valid rows, so that all ranks agree even when agents leave.

    Args:
        world: the world to step.
        datasets: the dataset of each behavior, with a `SideCollector`.
        seed: seed of the world's first episodes.
        iterations: an upper bound of the run's iterations.
        rivals: the learners that take turns, by name, in order.
    """

    full: list[str]

    def __init__(
        self, world: World, datasets: Mapping[str, ExperienceDataset], seed: int, iterations: int, rivals: Mapping[str, Rival] | None = None
    ) -> None:
        collectors: dict[str, Any] = {name: dataset.collector for name, dataset in datasets.items()}
        self.joint = JointCollector(world, collectors)
        super().__init__(self.joint, iterations)
        self.world, self.datasets, self.collectors, self.seed = world, dict(datasets), collectors, seed
        self.turns = Turns(world, rivals or {}, collectors)
        self.full = []
        self.counted_steps = 0
        """Steps of the world that the run has counted."""
        self.was_reset = False
        for dataset in datasets.values():
            dataset.collected = lambda: None  # the run counts, once for all

    def __iter__(self) -> Iterator[dict[str, object]]:
        items = {name: iter(dataset) for name, dataset in self.datasets.items()}
        while True:
            self.is_whole = False
            self.full = self._advance()
            batch = {name: next(items[name]) for name in self.full}
            if self.collected is not None:
                self.collected()
            yield batch

    def _advance(self) -> list[str]:
        """Step until the iteration of any behavior is full. Return the names of the behaviors whose iterations are full."""
        if not self.was_reset:
            self.world.reset(self.seed)
            self.turns.reset()
            self.was_reset = True
        full = self._begin_turn() if self.turns.begins else []
        acting = [name for name in self.collectors if name not in self.turns.waiting]
        while not full:
            self.world.step_all({**self._act(acting), **self.turns.act()})
            steps = {name: side.pop_step() for name, side in self.world.sides.items()}
            self.joint.steps += 1
            full = self._store(steps, acting)
            self.turns.watch(steps)
        return full

    def _begin_turn(self) -> list[str]:
        """Begin new episodes in all copies; for behaviors that always learn this is a step that is not experience.

        Return the names of the behaviors whose iterations become full by it.
        """
        others = [name for name in self.collectors if name not in self.turns.opponents]
        self._act(others)
        self.world.reset()
        self.turns.begin()
        self.datasets[self.turns.learner].begin_episodes()
        return self._store({name: self.world.sides[name].restart() for name in others}, others)

    def _act(self, names: Iterable[str]) -> dict[str, Tree]:
        """Return the actions of behaviors; those with a replay buffer begin with random ones."""
        actions = {}
        for name in names:
            collector, dataset = self.collectors[name], self.datasets[name]
            left = dataset.random_until - dataset.steps if isinstance(dataset, ReplayDataset) else 0.0
            actions[name] = collector.offer(math.ceil(left / collector.num_envs))
        return actions

    def _store(self, steps: Mapping[str, EnvStep], names: Iterable[str]) -> list[str]:
        """Store the results of behaviors. Return the names of those whose iterations are full."""
        full = []
        for name in names:
            collector = self.collectors[name]
            collector.push(steps[name])
            if collector.learns and not collector.is_open:
                full.append(name)
        return full

    def count_steps(self) -> int:
        """Return the number of steps of the world's copies since the last call."""
        new, self.counted_steps = self.joint.steps - self.counted_steps, self.joint.steps
        return new * self.joint.num_envs

    def is_in_iteration(self, name: str) -> bool:
        return self.collectors[name].is_open

    def end_iteration(self) -> None:
        """Finish the iterations that were full, and the turn of a learner that has made all its steps."""
        self.turns.end_iteration(self.full)
        for name in self.full:
            self.datasets[name].end_iteration()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of each behavior's data under its name."""
        return {f"{name}/{key}": value for name, dataset in self.datasets.items() for key, value in dataset.metrics().items()}

    def begin_save(self) -> None:
        """Save the replay buffers."""
        for dataset in self.datasets.values():
            dataset.begin_save()

    def end_save(self, saved: bool) -> None:
        """Clean up after the checkpoint was saved or has failed."""
        for dataset in self.datasets.values():
            dataset.end_save(saved)

    def take_over(self, state: State) -> None:
        """Start in the turn of a state, with new environments."""
        if self.turns.opponents:
            self.turns.set_state(state["turns"], continues=False)

    def own_state(self) -> State:
        """Return the state of each behavior's data, and of their turns."""
        behaviors = {name: dataset.get_state() for name, dataset in self.datasets.items()}
        return {"behaviors": behaviors, "turns": self.turns.get_state()}

    def set_own_state(self, state: State, new_episodes: str | None) -> str | None:
        self.was_reset, self.counted_steps = new_episodes is None, self.joint.steps
        for name, dataset in self.datasets.items():
            stored = state["behaviors"][name]
            collector = stored["collector"] if new_episodes is None else {**stored["collector"], "episodes": None, "open_iteration": None}
            reason = dataset.collector.set_state(collector)
            new_episodes = new_episodes or reason
            dataset.set_own_state(stored, new_episodes)
        if self.turns.opponents:
            self.turns.set_state(state["turns"], continues=self.was_reset)
        return new_episodes
