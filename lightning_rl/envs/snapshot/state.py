"""The state of environments, so that a run that is stopped and continued equals one that never stopped.

| way | what is kept | for |
|---|---|---|
| own | what the environment's `get_state()` says, and its wrappers' attributes | environments that have `set_state(state)` too |
| attributes | all plain attributes, a game's emulator and a simulation's arrays | classic control, toy text, MuJoCo, Atari, most others |
| replay | the attributes before the last reset and the actions since | Box2D, and others that hide what they are |
| draws | the random generators before the last reset and the actions since | where other attributes do not fit before a reset |

The first that fits is taken: two copies are built, one is stepped, and the other continues from its state. An environment for which
none does starts new episodes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from lightning_rl.envs.masks import legal_action
from lightning_rl.envs.snapshot.attributes import AttributeReader, AttributeWriter, read, write
from lightning_rl.startup import follow_parent
from lightning_rl.types import tree_leaves

WAYS = ("own", "attributes", "replay", "draws")
PATIENCE = 10.0
"""Seconds that trying the ways may take: an environment of the real world is not to be driven about for it."""
TRIED_STEPS = 16

_chosen: dict[str, str | None] = {}


class Recorder(gym.Wrapper):
    """Remembers what an episode needs to be played again. Without a cost for others: only what is replayed is wrapped."""

    def __init__(self, env: gym.Env, way: str) -> None:
        super().__init__(env)
        self.way = way
        self.episode: dict[str, Any] | None = None
        self.actions: list[Any] = []
        self.obs: Any = None
        self.worn = False
        """Whether it was ever stepped: Box2D's worlds are not quite the same again."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        before = read_layers(self.env, only_generators=self.way == "draws")
        self.episode = {"before": before, "seed": seed, "options": AttributeReader().plain(options), "worn": self.worn}
        release(self.env)
        self.actions = []
        self.obs, info = self.env.reset(seed=seed, options=options)
        return self.obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.actions.append(action.copy() if isinstance(action, np.ndarray | np.generic) else deepcopy(action))
        self.worn = True
        self.obs, *rest = self.env.step(action)
        return self.obs, *rest

    def get_state(self) -> dict[str, Any]:
        plain = AttributeReader().plain
        return {"episode": self.episode, "actions": [plain(action) for action in self.actions], "obs": plain(self.obs)}

    def set_state(self, state: dict[str, Any]) -> bool:
        """Play the episode again; whether it ended where it had."""
        value, episode = AttributeWriter().value, state["episode"]
        if episode["worn"]:
            space, actions = deepcopy(self.action_space), state["actions"]
            any_action = partial(value, actions[0]) if actions else space.sample
            self.env.step(legal_action(self, space, any_action, *self.env.reset(seed=0)))
            self.worn = True
        write_layers(self.env, episode["before"], lenient=True)
        self.reset(seed=episode["seed"], options=value(episode["options"]))
        for action in state["actions"]:
            self.step(value(action))
        self.episode = episode
        return equal(self.obs, value(state["obs"]))


def sticky(env: Any) -> bool:
    """Whether an Atari game repeats actions by chance. The last one is no part of the state that its emulator gives."""
    ale = getattr(env.unwrapped, "ale", None)
    return ale is not None and ale.getFloat("repeat_action_probability") > 0


def release(env: Any) -> None:
    """Let go of the last action in a sticky game, which may reach into the next episode: 40 times it is repeated with chance 0.25."""
    if sticky(env):
        ale = env.unwrapped.ale
        for _ in range(40):
            ale.act(ale.getLegalActionSet()[0])  # no-op, and nothing at all where the game is over


def layers(env: Any) -> Iterator[Any]:
    """An environment's wrappers from the outermost, and then itself."""
    while env is not env.unwrapped:
        yield env
        env = env.env
    yield env


def read_layers(env: Any, only_generators: bool = False) -> list[Any]:
    """The attributes of an environment and its wrappers. What several of them share is said once."""
    reader = AttributeReader(only_generators)
    return [read(layer, reader) for layer in layers(env)]


def write_layers(env: Any, states: list[Any], lenient: bool = False) -> None:
    """The inverse, into an environment that was built alike.

    Raises:
        NotAttributesError: a value does not fit.
    """
    writer = AttributeWriter(lenient)
    for layer, state in zip(layers(env), states, strict=True):
        write(layer, state, writer)


def record(env: Any, way: str | None) -> Any:
    """The environment, as its way needs it to be stepped."""
    return Recorder(env, way) if way in ("replay", "draws") else env


def get_state(env: Any, way: str) -> dict[str, Any]:
    """An environment's state as plain data."""
    if way in ("replay", "draws"):
        return {"way": way, **env.get_state()}
    if way == "attributes":
        return {"way": way, "layers": read_layers(env)}
    outer = read_layers(env)[:-1]
    return {
        "way": way,
        "layers": [*outer, read(env.unwrapped, AttributeReader(only_generators=True))],
        "own": AttributeReader().plain(env.unwrapped.get_state()),
    }


def set_state(env: Any, way: str | None, state: dict[str, Any]) -> bool:
    """The inverse, for an environment that was built alike; whether it worked. If not, only a reset is needed."""
    before = read_layers(env)
    try:
        if state["way"] == way and _restored(env, state):
            return True
    except Exception:  # environments of others may raise anything
        pass
    write_layers(env, before, lenient=True)
    return False


def _restored(env: Any, state: dict[str, Any]) -> bool:
    if state["way"] in ("replay", "draws"):
        return env.set_state(state)
    env.reset(seed=0)  # what an environment makes when it is first reset must be there to be written into
    if state["way"] == "own":
        env.unwrapped.set_state(AttributeWriter().value(state["own"]))
    write_layers(env, state["layers"])
    return True


def choose(build: Callable[[], Any], key: str | None = None) -> str | None:
    """The first way that is exact for what `build` builds, or None. Tried once for each `key`."""
    if key is None or key not in _chosen:
        way = _aside(build)
        if key is None:
            return way
        _chosen[key] = way
    return _chosen[key]


def _aside(build: Callable[[], Any]) -> str | None:
    """`_try_ways` in a process of its own, so that nothing here is touched by it, and nothing here waits for an environment that hangs."""
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return _try_ways(build)
    context = multiprocessing.get_context("fork")  # which can be handed any function
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(build, theirs), daemon=True)
    try:
        process.start()
    except OSError:  # no memory for another process
        ours.close()
        theirs.close()
        return None
    theirs.close()
    try:
        return ours.recv() if ours.poll(PATIENCE) else None
    except (EOFError, OSError):
        return None
    finally:
        ours.close()
        process.kill()
        process.join()
        process.close()


def _tell(build: Callable[[], Any], pipe: Any) -> None:
    follow_parent()
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries and the end of a process write past Python's streams
        os.dup2(nowhere, stream)
    try:
        pipe.send(_try_ways(build))
    finally:
        os._exit(0)  # nothing that the parent left to be done at its end is done here


def _try_ways(build: Callable[[], Any]) -> str | None:
    drawn = random.getstate(), np.random.get_state()
    deadline = time.monotonic() + PATIENCE
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere), warnings.catch_warnings(action="ignore"):
            return next((way for way in WAYS if fits(build, way, deadline)), None)
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


def fits(build: Callable[[], Any], way: str, deadline: float) -> bool:
    """Whether a copy goes on from another's state as that one does, over the beginning of an episode."""
    copies: list[Any] = []
    try:
        for _ in range(2):
            copies.append(record(build(), way))
        first, second = copies
        if first.unwrapped is second.unwrapped or (way == "own" and not hasattr(first.unwrapped, "get_state")):
            return False
        if way == "attributes" and sticky(first):
            return False
        space = deepcopy(first.action_space)
        space.seed(0)
        draw, said = partial(legal_action, first, space, space.sample), first.reset(seed=1)
        for steps in (4, 5):  # an episode after the first: one that no seed began
            _, _, said = play(first, draw, said, steps, deadline)
        state = get_state(first, way)
        # before the second is touched: they may share what belongs to their class
        actions, expected, _ = play(first, draw, said, TRIED_STEPS, deadline)
        again = iter(actions)
        return set_state(second, way, state) and equal(expected, play(second, lambda *_: next(again), said, TRIED_STEPS, deadline)[1])
    except Exception:  # environments of others may raise anything
        return False
    finally:
        if len({id(copy.unwrapped) for copy in copies}) > 1:  # else it is none
            for copy in copies:
                copy.close()


def play(env: Any, act: Callable[..., Any], said: tuple[Any, Any], steps: int, deadline: float) -> tuple[list[Any], list[Any], Any]:
    """The actions of some steps and what happened, with a reset where an episode ended and half way.

    Args:
        env: what is stepped.
        act: gives an action for an observation and its info.
        said: the first of these.
        steps: how many.
        deadline: when to give up.

    Returns:
        The actions, what happened, and the last observation with its info.

    Raises:
        TimeoutError: it is too late.
    """
    actions, rows = [], []
    for i in range(steps):
        if time.monotonic() > deadline:
            raise TimeoutError
        actions.append(act(*said))
        obs, reward, terminated, truncated, info = env.step(actions[-1])
        said = obs, info
        rows.append(deepcopy((obs, reward, terminated, truncated)))
        if i == steps // 2 or (not isinstance(env, gym.vector.VectorEnv) and (terminated or truncated)):
            said = env.reset()
            rows.append(deepcopy(said[0]))
    return actions, rows, said


def equal(a: Any, b: Any) -> bool:
    """Whether trees and lists of them are the same, bit for bit."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)]
    return all((x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()) for x, y in pairs)
