"""Experience of several behaviors in one world: their collectors propose actions, the world steps once, and each keeps what it saw.

Iterations have their own length for each behavior. An item of the joint dataset holds those that are full, by the name of the behavior.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_rl.data.collector import Collector, Stepped, copy_to
from lightning_rl.data.dataset import ReplayDataset
from lightning_rl.data.rollout import ExperienceDataset
from lightning_rl.envs.agents.world import Side, World
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import RandomActor, reset_memory
from lightning_rl.types import EnvStep, State, Tree, is_finite, tree_map, tree_stack, tree_to_numpy, tree_to_torch


class SharedStepper:
    """A side of a world as the environments of a collector: who steps the world passes on what happened, in `told`."""

    restarts, workers = 0, None

    def __init__(self, side: Side) -> None:
        self.side, self.name, self.num_envs, self.can_be_saved = side, side.name, side.num, True
        self.all_valid, self.notices, self.told = side.outcome.all_valid, list[str](), deque[EnvStep]()

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        return self.side.newest()

    def step(self, action: Tree) -> EnvStep:
        return self.told.popleft()

    def restart_all(self) -> EnvStep:
        raise SettingError(f"{self.name} is one of several behaviors: lessons and frozen statistics cannot restart episodes for it alone")

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        raise SettingError(f"{self.name} takes no lessons: env.parameters are for environments of one agent")

    def close(self) -> None:
        """Leave the world open, which is not its own."""

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> str | None:
        return None


class Act(NamedTuple):
    """What N rows did in one step: the action as sampled and in the environment's form, and the memory after it."""

    taken: Tree
    action: Tree
    memory: Tree


class SharedCollector(Collector):
    """A collector that acts when it is asked, and collects when its iteration is full, from what it remembers of the steps.

    `open` begins an iteration; then come `n_steps` times `propose` and `take`; `collect` and `transitions` follow.
    """

    stepper: SharedStepper  # type: ignore[assignment]
    is_open = False
    """Whether an iteration is under way."""

    def open(self, random_steps: int = 0) -> None:
        """Begin an iteration, the first `random_steps` at random."""
        self.steps_at_random, self.generator_before = random_steps, self.generator.get_state()
        self.policy = super().begin()
        self.random = RandomActor(self.network, self.num_envs, self.generator, self.policy) if random_steps > 0 else None
        self.acts: list[Act] = []
        self.now = self._current, self._mask, self._start, self._memory
        self.is_open = True

    def propose(self) -> Tree:
        """Return the next actions `[N, ...]`, in the environment's form."""
        t, (_, _, start, memory) = len(self.acts), self.now
        self._show()
        actor = self.random if self.random is not None and t < self.steps_at_random else self.policy
        action, after = actor.act(t, memory, start, self._mask_rows[t])
        self.acts.append(Act(actor.taken[-1], action, after))
        return action

    def _show(self) -> None:
        """Write the newest observations and masks to where actors read them."""
        t, (obs, mask, _, _) = len(self.acts), self.now
        tree_map(copy_to, self._obs_rows[t], obs)
        if len(mask):
            copy_to(self._mask_rows[t], mask)

    def take(self, step: EnvStep) -> bool:
        """Take in what happened. Return whether the iteration is full."""
        finite = is_finite(step.obs) and is_finite(step.reward) and (step.final_obs is None or is_finite(step.final_obs))
        if not finite:
            step = self.guard.replace(step, self._obs_rows[len(self.acts) - 1], self.env_steps)
        else:
            self.guard.bad_steps = 0
        self.stepper.told.append(step)
        self.now = step.obs, step.mask, step.episode_start, self.acts[-1].memory
        self.is_open = len(self.acts) < self.n_steps
        return not self.is_open

    def begin(self) -> Any:
        """Return who repeats what was done, for `unroll`."""
        self._memories = []
        self.statistics.finished.clear()
        return self

    def step(self, t: int, actor: Any) -> tuple[EnvStep, Tree]:
        """Collect step t of what was done; `take` has counted the steps in a row that are NaN or infinite."""
        bad_steps = self.guard.bad_steps
        collected = super().step(t, actor)
        self.guard.bad_steps = bad_steps
        return collected

    def act(self, t: int, memory: Tree, episode_start: np.ndarray, action_mask: Tree = ()) -> tuple[Tree, Tree]:
        """Repeat what was done in a step."""
        return self.acts[t].action, self.acts[t].memory

    def actions(self) -> Tree:
        """Return all actions as sampled, `[T, N, ...]`."""
        return tree_stack([tree_to_torch(act.taken, self.generator.device) for act in self.acts])

    def transitions(self, random_steps: int = 0) -> Iterator[Stepped]:
        """Yield the steps of a full iteration one by one; `random_steps` was decided when it began."""
        actor = self.begin()
        for t, act in enumerate(self.acts):
            memory = self._memory
            if len(memory):
                memory = reset_memory(tree_to_numpy(memory), self._start)
            step, _ = self.step(t, actor)
            yield Stepped(self._obs_rows[t], tree_to_numpy(act.taken), step, memory, self._mask_rows[t])

    def get_state(self) -> State:
        """Return the state at the beginning of the iteration, and what has been done in it."""
        state = {**super().get_state(), "under_way": None}
        if self.is_open:
            acts = [tuple(tree_to_numpy(each) for each in act) for act in self.acts]
            told = [tuple(step) for step in self.stepper.told]
            own = {"random_steps": self.steps_at_random, "acts": acts, "told": told, "generator": state["generator"]}
            state |= {"under_way": own, "generator": self.generator_before}
        return state

    def set_state(self, state: State) -> str | None:
        new_episodes, under_way = super().set_state(state), state["under_way"]
        if new_episodes is None and under_way is not None:
            self.open(under_way["random_steps"])
            for act, told in zip(under_way["acts"], under_way["told"], strict=True):
                self._show()
                self.acts.append(Act(*act)._replace(memory=tree_to_torch(act[2], self.generator.device)))
                self.take(EnvStep(*told))
            self.generator.set_state(torch.from_numpy(under_way["generator"]))
        return new_episodes


class FrozenCollector(SharedCollector):
    """The collector of a behavior that acts and does not learn: it is never full, and keeps nothing but statistics."""

    def take(self, step: EnvStep) -> bool:
        if super().take(step):
            for _ in self.transitions():
                pass
            self.open()
        return False


class JointStatistics:
    """The statistics of all behaviors, for those who ask about the run as a whole."""

    def __init__(self, collectors: Mapping[str, SharedCollector]) -> None:
        self.collectors = collectors

    @property
    def reports_success(self) -> bool:
        return any(each.statistics.reports_success for each in self.collectors.values())

    def share_reports(self) -> None:
        for each in self.collectors.values():
            each.statistics.share_reports()

    def metrics(self) -> dict[str, float]:
        """Return the mean over behaviors of what each reports of its episodes."""
        found: dict[str, list[float]] = {}
        for each in self.collectors.values():
            for name, value in each.statistics.metrics().items():
                found.setdefault(name, []).append(value)
        return {name: float(np.mean(values)) for name, values in found.items()}


class JointCollector:
    """What a run asks of its collector, answered for all behaviors of a world."""

    def __init__(self, world: World, collectors: Mapping[str, SharedCollector]) -> None:
        self.world, self.collectors = world, collectors
        self.name, self.num_envs, self.can_be_saved, self.close = world.name, len(world.copies), world.way is not None, world.close
        self.n_steps = max(each.n_steps for each in collectors.values())
        self.statistics = JointStatistics(collectors)
        self.steps = 0
        """Of the world, on this rank."""

    @property
    def rows(self) -> int:
        """Return how many rows were stepped: copies, experience of some behavior or not."""
        return self.steps * self.num_envs

    def metrics(self) -> dict[str, float]:
        """Return the metrics of each behavior under its name, and their means."""
        own = {f"{name}/{key}": value for name, each in self.collectors.items() for key, value in each.metrics().items()}
        return self.statistics.metrics() | own

    def take_notices(self) -> list[str]:
        return []


class JointDataset(ExperienceDataset):
    """Endless iterations; each holds those of the behaviors whose experience is full, by name.

    What is full counts steps of the world and not valid rows, so that all ranks agree and agents who leave do not shift it.

    Args:
        world: which it steps.
        datasets: of each behavior, with a `SharedCollector`.
        seed: of the world's first episodes.
        iterations: more than the run has.
    """

    def __init__(self, world: World, datasets: Mapping[str, ExperienceDataset], seed: int, iterations: int) -> None:
        collectors: dict[str, Any] = {name: dataset.collector for name, dataset in datasets.items()}
        self.joint = JointCollector(world, collectors)
        super().__init__(self.joint, iterations)  # type: ignore[arg-type]
        self.world, self.datasets, self.collectors, self.seed = world, dict(datasets), collectors, seed
        self.full: list[str] = []
        """The behaviors of the newest iteration."""
        self.was_reset = False
        for dataset in datasets.values():
            dataset.collected = lambda: None  # the run counts, once for all

    def __iter__(self) -> Iterator[dict[str, Any]]:
        items = {name: iter(dataset) for name, dataset in self.datasets.items()}
        while True:
            self.full = self._advance()
            batch = {name: next(items[name]) for name in self.full}
            if self.collected is not None:
                self.collected()
            yield batch

    def _advance(self) -> list[str]:
        """Step until the iteration of a behavior is full. Return those that are."""
        if not self.was_reset:
            self.world.reset(self.seed)
            self.was_reset = True
        for name, collector in self.collectors.items():
            if not collector.is_open:
                dataset = self.datasets[name]
                random = (dataset.random_until - dataset.steps) / collector.num_envs if isinstance(dataset, ReplayDataset) else 0
                collector.open(math.ceil(random))
        full: list[str] = []
        while not full:
            told = self.world.step({name: collector.propose() for name, collector in self.collectors.items()})
            self.joint.steps += 1
            full = [name for name, collector in self.collectors.items() if collector.take(told[name])]
        return full

    def end_iteration(self) -> None:
        for name in self.full:
            self.datasets[name].end_iteration()

    def metrics(self) -> dict[str, float]:
        return {f"{name}/{key}": value for name, dataset in self.datasets.items() for key, value in dataset.metrics().items()}

    def begin_save(self) -> None:
        for dataset in self.datasets.values():
            dataset.begin_save()

    def end_save(self, saved: bool) -> None:
        for dataset in self.datasets.values():
            dataset.end_save(saved)

    def get_state(self) -> State:
        own = {name: dataset.get_state() for name, dataset in self.datasets.items()}
        return {"world": self.world.get_state(), "steps": self.joint.steps, "behaviors": own}

    def set_state(self, state: State) -> str | None:
        self.joint.steps = state["steps"]
        new_episodes = self.world.set_state(state["world"])
        self.was_reset = new_episodes is None
        for name, dataset in self.datasets.items():
            own = state["behaviors"][name]
            collector = own["collector"] if new_episodes is None else {**own["collector"], "episodes": None, "under_way": None}
            reason = dataset.collector.set_state(collector)
            new_episodes = dataset.set_own_state(own, new_episodes or reason)
        return new_episodes
