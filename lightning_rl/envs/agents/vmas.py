"""Scenarios of VMAS (Bettini et al. 2022, https://arxiv.org/abs/2207.03530): many copies in one call, or one copy with PettingZoo's API."""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, TypeGuard
from warnings import catch_warnings, simplefilter, warn_explicit

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from lightning_rl.envs.agents.world import Moves, World
from lightning_rl.envs.snapshot.decoding import write_all
from lightning_rl.envs.snapshot.encoding import VERSION, read_all
from lightning_rl.errors import SettingError, missing_extra, nearest
from lightning_rl.spaces import JOINT, OWN, Spaces
from lightning_rl.types import Info, Options, State, StepByAgent, Tree, tree_index, tree_leaves, tree_map, tree_stack, tree_to_numpy

PREFIX = "vmas."
"""Prefix of the ids of scenarios, such as `vmas.simple_spread`."""
DEFAULT_MAX_STEPS = 100
OURS = ("scenario", "num_envs", "device", "wrapper", "wrapper_kwargs", "dict_spaces", "terminated_truncated", "seed", "grad_enabled")
"""Arguments of `vmas.make_env` that users cannot set."""
Key = str | int | tuple[int]
"""The name or index of a value in its holder; `(index,)` for other keys of a dict."""
Entry = tuple[str, Key, Any, str]
"""A saved value: the path of its holder, its key there, the value, and its kind."""


def is_vmas(env_id: str) -> bool:
    """Return whether an id is that of a scenario of VMAS."""
    return env_id.startswith(PREFIX)


@dataclass(frozen=True)
class Scenario:
    """A scenario of VMAS, or a user's own.

    Args:
        env_id: its id in messages.
        cls: the class of a user's own scenario; None for one of VMAS.
    """

    env_id: str
    cls: type | None = None

    def __call__(self, render_mode: str | None = None, **kwargs: object) -> "VmasGame":
        """Build one copy; arguments as for `VmasCopies`."""
        return VmasGame(VmasCopies(self, 1, kwargs), render_mode=render_mode)


def find_scenario(env_id: str) -> Scenario:
    """Return a scenario of VMAS. Raises `SettingError`: VMAS is not installed, or has no such scenario."""
    vmas, name = _load(env_id), env_id.removeprefix(PREFIX)
    known = [*vmas.scenarios, *vmas.debug_scenarios, *vmas.mpe_scenarios]
    if name not in known:
        raise SettingError(f"env.id {env_id!r}: VMAS has no scenario {name!r}{nearest(name, known)}")
    return Scenario(env_id)


def is_scenario(value: object) -> TypeGuard[type]:
    """Return whether something that a path leads to is the class of a scenario; whoever defines one has imported VMAS."""
    base = getattr(sys.modules.get("vmas.simulator.scenario"), "BaseScenario", ())
    return isinstance(value, type) and issubclass(value, base)


def _load(env_id: str) -> ModuleType:
    try:
        import vmas
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "vmas", "vmas", env_id) from error
    return vmas


class VmasCopies:
    """E copies of a scenario with A agents and their own random state (VMAS itself has one for the whole process).

    An episode ends for all agents of a copy in the same step. Observations are A trees of arrays `[E, ...]`, rewards `[E, A]`, flags `[E]`.

    Args:
        scenario: of all copies.
        num_copies: E.
        kwargs: arguments of `vmas.make_env` and of the scenario; the default of `max_steps`, the length of episodes, is 100.
    """

    def __init__(self, scenario: Scenario, num_copies: int, kwargs: Mapping[str, object]) -> None:
        env_id, vmas = scenario.env_id, _load(scenario.env_id)
        for name in OURS:
            if name in kwargs:
                raise SettingError(f"env.kwargs of {env_id} cannot set {name}")
        self.shared: list[Any] = vmas.simulator.environment.Environment.vmas_random_state
        self.draws: list[Any] = [
            torch.Generator().manual_seed(0).get_state(),
            np.random.RandomState(0).get_state(),
            random.Random(0).getstate(),
        ]
        arguments = {"max_steps": DEFAULT_MAX_STEPS, "clamp_actions": True, **kwargs}
        arguments.pop("render_mode", None)  # training leaves it out
        with self._drawing(), catch_warnings(record=True) as warned:
            simplefilter("always")
            source = env_id.removeprefix(PREFIX) if scenario.cls is None else scenario.cls()
            self.env = vmas.make_env(source, num_copies, device="cpu", terminated_truncated=True, **arguments)
        for warning in warned:
            if "not used by the scenario" in str(warning.message):
                raise SettingError(f"env.kwargs of {env_id}: the scenario does not take {', '.join(unused(str(warning.message), kwargs))}")
            warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        self.name, self.scenario, self.kwargs = env_id, scenario, kwargs
        self.names: list[str] = [agent.name for agent in self.env.agents]
        self.observation_spaces = [as_gymnasium(space) for space in self.env.observation_space]
        self.action_spaces = [as_gymnasium(space) for space in self.env.action_space]

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let VMAS draw from this object's random state."""
        before, self.shared[:] = self.shared[:], self.draws
        try:
            yield
        finally:
            self.draws, self.shared[:] = self.shared[:], before

    def reset(self, seed: int | None = None) -> list[Tree]:
        """Start an episode in all copies; without a seed, continue the current random stream. Return the observations."""
        with self._drawing():
            return as_arrays(self.env.reset(seed=None if seed is None else seed % 2**32))

    def step(self, actions: Sequence[np.ndarray]) -> tuple[list[Tree], np.ndarray, np.ndarray, np.ndarray]:
        """Step with an array `[E, ...]` for each agent. Return observations, rewards, and which copies terminated or were truncated."""
        taken = [torch.from_numpy(np.ascontiguousarray(action)) for action in actions]
        with self._drawing():
            obs, reward, terminated, truncated, _ = self.env.step(taken)
        return as_arrays(obs), torch.stack(reward, 1).numpy(), terminated.numpy(), truncated.numpy() & ~terminated.numpy()

    def start(self, ended: np.ndarray, restorable: bool) -> list[Tree]:
        """Start an episode in some copies `[E]`. Return all observations.

        VMAS resets either one copy or all copies, at the same cost. So to start several, reset all and then restore the others.

        Args:
            ended: which copies to start.
            restorable: whether `set_state` can restore the scenario; if not, copies start one by one.
        """
        if ended.all():
            return self.reset()
        if not (restorable and ended.sum() > 1 and self._start_together(ended)):
            with self._drawing():
                for e in np.flatnonzero(ended):
                    self.env.reset_at(int(e), return_observations=False)
        return self.observe()

    def _start_together(self, ended: np.ndarray) -> bool:
        """Start an episode in all copies, then restore those not `ended`. If more than rows changed, restore all and return False."""
        before = self.get_state()
        with self._drawing():
            self.env.reset(return_observations=False)
        after = self.get_state()
        only_rows = restore_rows(after["values"], before["values"], ~ended)
        self.set_state(after if only_rows else before)
        return only_rows

    def start_from(self, copies: np.ndarray, seed: int) -> list[Tree]:
        """Start an episode in K copies, with the seeds seed, seed + 1, … Return all observations."""
        with self._drawing():
            for k, e in enumerate(copies.tolist()):
                self.env.seed((seed + k) % 2**32)
                self.env.reset_at(e, return_observations=False)
        return self.observe()

    def observe(self) -> list[Tree]:
        """Return the observations."""
        with self._drawing():
            return as_arrays(self.env.get_from_scenario(True, False, False, False)[0])

    def are_independent(self) -> bool:
        """Return whether the episode of each of these new copies would be that of a single copy with the same seed.

        In some scenarios, starting a copy draws other numbers, or changes the others too, or steps draw, for all copies together.
        """
        single, seen = VmasCopies(self.scenario, 1, self.kwargs), self.reset(0)
        for seed in range(1, 9):  # what is drawn for all copies may be the same by chance
            now = self.start_from(np.zeros(1, dtype=np.int64), seed)
            pairs = zip(tree_leaves(tuple(single.reset(seed))), tree_leaves(tuple(now)), tree_leaves(tuple(seen)), strict=True)
            if not all(np.allclose(new[:1], alone, atol=1e-5) and np.array_equal(new[1:], before[1:]) for alone, new, before in pairs):
                return False
        drawn = self._read_draws()
        self.step([np.zeros((self.env.num_envs, *(space.shape or ())), space.dtype) for space in self.action_spaces])
        return self._read_draws() == drawn

    def _read_draws(self) -> tuple[object, ...]:
        """Return the random state in a form that can be compared."""
        torch_state, (_, keys, *rest), python_state = self.draws
        return torch_state.tolist(), keys.tolist(), rest, python_state

    def get_state(self) -> State:
        """Return all tensors, numbers and references that VMAS holds, and the random state, as plain data."""
        values: list[Entry] = []
        first: dict[int, int] = {}
        places = [*holders(self.env)]
        paths = {id(holder): path for path, holder in places}
        for path, holder in places:
            for key, value in entries(holder):
                if isinstance(value, Tensor) and id(value) in first:
                    values.append((path, key, first[id(value)], "same"))
                elif isinstance(value, Tensor):
                    first[id(value)] = len(values)
                    values.append((path, key, np.array(value.numpy()), "tensor"))
                elif value is None or type(value) in (bool, int, float):
                    values.append((path, key, value, "number"))
                elif paths.get(id(value), child := f"{path}/{key}") != child:  # such as an agent's goal, a landmark
                    values.append((path, key, paths[id(value)], "reference"))
        torch_state, numpy_state, python_state = self.draws
        return {"values": values, "draws": [torch_state.numpy().copy(), numpy_state, python_state]}

    def set_state(self, state: State) -> None:
        """Restore a state in copies that were built the same way. Raises `KeyError` or `IndexError`: it does not fit."""
        places = dict(holders(self.env))
        made: list[object] = []
        for path, key, value, kind in state["values"]:
            match kind:
                case "same":
                    made.append(made[value])
                case "tensor":
                    made.append(torch.from_numpy(np.array(value)))
                case "reference":
                    made.append(places[value])
                case _:
                    made.append(value)
            if not isinstance(key, tuple):
                holder = places[path]
                (holder if isinstance(holder, dict | list) else vars(holder))[key] = made[-1]
            elif key[0] < len(keys := list(places.get(path, ()))):  # else VMAS has not filled it yet, and refills it in each step
                places[path][keys[key[0]]] = made[-1]
        torch_state, (kind, keys, *rest), (version, numbers, gauss) = state["draws"]
        self.draws = [torch.from_numpy(np.array(torch_state)), (kind, np.array(keys), *rest), (version, tuple(numbers), gauss)]


def unused(message: str, kwargs: Mapping[str, object]) -> list[str]:
    """Return the arguments named in a warning of VMAS."""
    return [name for name in kwargs if repr(name) in message] or [message]


def restore_rows(now: list[Entry], before: list[Entry], kept: np.ndarray) -> bool:
    """Write back the `kept` rows `[E]` of arrays with a row for each copy. Return whether everything else is unchanged."""
    if [(path, key, kind) for path, key, _, kind in now] != [(path, key, kind) for path, key, _, kind in before]:
        return False
    for (_, _, new, kind), (_, _, old, _) in zip(now, before, strict=True):
        if kind == "tensor" and new.shape == old.shape and new.shape[:1] == kept.shape:
            new[kept] = old[kept]
        elif not np.array_equal(new, old) if kind == "tensor" else new != old:
            return False
    return True


def entries(holder: object) -> list[tuple[Key, object]]:
    """Return the values of an object, list or dict with their keys."""
    if isinstance(holder, list | tuple):
        return list(enumerate(holder))
    attributes = enumerate((holder if isinstance(holder, dict) else vars(holder)).items())
    return [(key if isinstance(key, str | int) else (place,), value) for place, (key, value) in attributes]


def holders(env: Any) -> Iterator[tuple[str, Any]]:
    """Yield all lists, dicts, and objects of VMAS and of the scenario's package in an environment, each once, with its path."""
    packages = "vmas", type(env.scenario).__module__.partition(".")[0]  # empty for VMAS's own, which it loads from a file
    waiting, seen = [("", env)], {id(env)}
    for path, holder in waiting:
        if not isinstance(holder, tuple):
            yield path, holder
        for key, value in entries(holder):
            is_part = type(value).__module__.partition(".")[0] in packages and not isinstance(value, Enum | type)
            if (isinstance(value, dict | list | tuple) or (is_part and hasattr(value, "__dict__"))) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((f"{path}/{key}", value))


def as_arrays(obs: list[Tree]) -> list[Tree]:
    """Return VMAS's observations, which are copies already, as arrays that share their memory."""
    return [tree_to_numpy(agent_obs) for agent_obs in obs]


def as_gymnasium(space: Any) -> gym.Space:
    """Convert a space of gym, which VMAS uses, to gymnasium."""
    if hasattr(space, "spaces"):
        return gym.spaces.Dict({key: as_gymnasium(child) for key, child in space.spaces.items()})
    if hasattr(space, "nvec"):
        return gym.spaces.MultiDiscrete(space.nvec)
    return gym.spaces.Discrete(int(space.n)) if hasattr(space, "n") else gym.spaces.Box(space.low, space.high, dtype=space.dtype)


class VmasGame:
    """A single copy of a scenario as a PettingZoo `ParallelEnv`, for probing, evaluation and videos."""

    def __init__(self, copies: VmasCopies, render_mode: str | None = None) -> None:
        self.copies, self.render_mode = copies, render_mode
        self.metadata = {"name": copies.name, "render_modes": ["rgb_array", "human"]}
        self.possible_agents, self.agents = copies.names, list(copies.names)
        self.get_state, self.set_state = copies.get_state, copies.set_state

    def observation_space(self, agent: str) -> gym.Space:
        return self.copies.observation_spaces[self.possible_agents.index(agent)]

    def action_space(self, agent: str) -> gym.Space:
        return self.copies.action_spaces[self.possible_agents.index(agent)]

    def reset(self, seed: int | None = None, options: Options = None) -> tuple[dict[str, Tree], dict[str, Info]]:
        self.agents = list(self.possible_agents)
        return self._by_name(self.copies.reset(seed)), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Tree]) -> StepByAgent:
        spaces = zip(self.possible_agents, self.copies.action_spaces, strict=True)
        obs, reward, terminated, truncated = self.copies.step([np.asarray(actions[agent], space.dtype)[None] for agent, space in spaces])
        if terminated[0] or truncated[0]:
            self.agents = []
        over, cut = (dict.fromkeys(self.possible_agents, bool(flag[0])) for flag in (terminated, truncated))
        infos: dict[str, Info] = {agent: {} for agent in self.possible_agents}
        return self._by_name(obs), dict(zip(self.possible_agents, reward[0].tolist(), strict=True)), over, cut, infos

    def _by_name(self, obs: list[Tree]) -> dict[str, Tree]:
        return {agent: tree_index(agent_obs, 0) for agent, agent_obs in zip(self.possible_agents, obs, strict=True)}

    def state(self) -> np.ndarray:
        raise SettingError(f"{self.metadata['name']} has no state(); use critic_obs: all")

    def render(self) -> Tree:
        return self.copies.env.render(mode=self.render_mode or "rgb_array", env_index=0)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class VmasWorld(World):
    """E copies of a scenario, which step in one call, whichever are to step. The copies of a first reset start from one seed.

    Args:
        copies: E copies.
        sides: the spaces of each side, with the names of its agents.
        can_be_saved, settings: as of `World`.
    """

    ends_together = True

    def __init__(self, copies: VmasCopies, sides: Mapping[str, Spaces], can_be_saved: bool, settings: str = "") -> None:
        super().__init__(copies.name, copies.env.num_envs, sides, settings=settings, can_be_saved=can_be_saved)
        self.copies = copies
        self.numbers = {name: [copies.names.index(agent) for agent in side.agents] for name, side in self.sides.items()}
        """The indices of each side's agents among those of the scenario."""
        self.seen: list[Tree] = []
        """The newest observations of each agent, `[E, ...]`."""
        for side in self.sides.values():
            side.present[:] = side.to_move[:] = True

    def _start(self, copies: np.ndarray, seed: int | None) -> None:
        if len(copies) == self.num_copies:
            self.seen = self.copies.reset(seed)
        elif seed is not None:
            self.seen = self.copies.start_from(copies, seed)
        else:
            self.seen = self.copies.start(np.isin(self.all, copies), self.can_be_saved)

    def _step(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> tuple[dict[str, Moves], np.ndarray]:
        chosen = {n: actions[name][a :: len(numbers)] for name, numbers in self.numbers.items() for a, n in enumerate(numbers)}
        self.seen, *results = self.copies.step([chosen[n] for n in range(len(chosen))])
        reward, terminated, truncated = (result[copies] for result in results)
        moves, over = {}, terminated | truncated
        for name, numbers in self.numbers.items():
            ended, by_itself = (np.repeat(flag[:, None], len(numbers), 1) for flag in (over, terminated))
            moves[name] = Moves(reward[:, numbers], ended, by_itself, ~ended)
        return moves, over

    def look(self, copies: np.ndarray) -> None:
        for name, side in self.sides.items():
            side.obs = tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), self._observe(name))

    def observe_last(self, name: str, rows: np.ndarray) -> tuple[Tree, Tree, Mapping[int, Info]]:
        return tree_index(self._observe(name), np.divmod(rows, len(self.numbers[name]))), (), {}

    def _observe(self, name: str) -> Tree:
        """Return the newest observations of a side's agents, `[E, A, ...]`, with those of all agents if their critics read them."""
        side_obs = tree_stack([self.seen[n] for n in self.numbers[name]], 1)
        if not self.sides[name].spaces.joint:
            return side_obs
        parts = [leaf.reshape(self.num_copies, -1) for obs in self.seen for leaf in tree_leaves(obs)]
        joint = np.concatenate([*parts, np.ones((self.num_copies, len(self.seen)), dtype=np.float32)], 1)
        return {OWN: side_obs, JOINT: np.repeat(joint[:, None], len(self.numbers[name]), 1)}

    def _are_alike(self, state: State) -> bool:
        return isinstance(state.get("states", ()), dict | type(None)) and "game" not in state

    def _get_copies(self) -> State:
        generators = read_all([self.copies.env.scenario], only_generators=True)  # a user's scenario may have its own
        return {"states": self.copies.get_state() if self.can_be_saved else None, "generators": generators}

    def _set_copies(self, state: State) -> bool:
        self.copies.set_state(state["states"])
        if "generators" in state:  # older states have none
            write_all([self.copies.env.scenario], state["generators"], VERSION)
        return True
