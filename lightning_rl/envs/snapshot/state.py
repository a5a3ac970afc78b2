"""Save and restore the state of environments, so that a resumed run equals an uninterrupted one.

| way | what is saved | for |
|---|---|---|
| own | the environment's `get_state()`, and its wrappers' attributes | environments that also have `set_state(state)` |
| attributes | all plain attributes, the emulator's state, the simulation's arrays | classic control, toy text, MuJoCo, Atari, most others |
| replay | the attributes before the last reset and the actions since | Box2D, and others with hidden state |
| draws | the random generators before the last reset and the actions since | those whose other attributes do not fit before a reset |

The first way that is exact is used. To find it, two copies are built, one is stepped, and the other continues from its state. If no way is
exact, the environment starts new episodes.
"""

import faulthandler
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from zlib import crc32

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv

from lightning_rl.envs.masks import legal_action
from lightning_rl.envs.snapshot.decoding import Decoder, write_all
from lightning_rl.envs.snapshot.encoding import VERSION, Encoder, Plain, attributes_of, is_space, objects_in, read_all
from lightning_rl.envs.sync import AnyEnv, close_env, layers
from lightning_rl.errors import is_interrupt
from lightning_rl.processes.startup import follow_parent
from lightning_rl.types import Info, Options, StepResult, Tree, tree_leaves

WAYS = ("own", "attributes", "replay", "draws")
MAX_TRIAL_SECONDS = 10.0
"""Maximum duration of trying the ways: a real-world environment should not be driven around for it."""
TRIAL_STEPS = 16

State = dict[str, Plain]
T = TypeVar("T")

_chosen: dict[str, str | None] = {}


class Recorder(gym.Wrapper):
    """Records what is needed to replay an episode. Only environments saved by replay are wrapped."""

    def __init__(self, env: gym.Env, way: str) -> None:
        super().__init__(env)
        self.way = way
        self.episode: State | None = None
        self.actions: list[Tree] = []
        self.obs: Tree = None
        self.stepped = False
        """Whether the environment was ever stepped; Box2D's worlds behave slightly differently afterwards."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        before = read_all(layers(self.env), only_generators=self.way == "draws")
        self.episode = {"version": VERSION, "before": before, "seed": seed, "options": Encoder().encode(options), "worn": self.stepped}
        if has_sticky_actions(self.env):
            _release_sticky_action(self.env)
        self.actions = []
        self.obs, info = self.env.reset(seed=seed, options=options)
        return self.obs, info

    def step(self, action: Tree) -> StepResult:
        self.actions.append(action.copy() if isinstance(action, np.ndarray | np.generic) else deepcopy(action))
        self.stepped = True
        self.obs, *rest = self.env.step(action)
        return self.obs, *rest

    def get_state(self) -> State:
        encode = Encoder().encode
        return {"episode": self.episode, "actions": [encode(action) for action in self.actions], "obs": encode(self.obs)}

    def set_state(self, state: State) -> bool:
        """Replay the episode; return whether it led to the same observation."""
        episode = state["episode"]
        version = episode.get("version")
        decode = Decoder(version).decode
        if episode["worn"]:
            seen, random_actions = self.env.reset(seed=0), getattr(self.env.unwrapped, "random_actions", None)
            self.env.step(self._legal_action(state["actions"], decode, *seen) if random_actions is None else random_actions(0))
            self.stepped = True
        write_all(layers(self.env), episode["before"], version, lenient=True)
        self.reset(seed=episode["seed"], options=decode(episode["options"]))
        for action in state["actions"]:
            self.step(decode(action))
        self.episode = episode
        return are_equal(self.obs, decode(state["obs"]))

    def _legal_action(self, actions: list[Plain], decode: Callable[[Plain], Tree], obs: Tree, info: Info) -> Tree:
        """Return a legal action for the start of an episode; the first recorded one if all actions are legal."""
        space = deepcopy(self.action_space)
        return legal_action(self, space, partial(decode, actions[0]) if actions else space.sample, obs, info)


def has_sticky_actions(env: AnyEnv) -> bool:
    """Return whether an Atari game repeats actions at random. The last action is not part of the emulator's state."""
    ale = getattr(env.unwrapped, "ale", None)
    return ale is not None and ale.getFloat("repeat_action_probability") > 0


def _release_sticky_action(env: gym.Env) -> None:
    """Clear a game's last action, which may carry over to the next episode: it survives each of 40 no-ops with probability 0.25."""
    ale: Any = getattr(env.unwrapped, "ale", None)
    for _ in range(40):
        ale.act(ale.getLegalActionSet()[0])  # no-op, without effect once the game is over


def seed_spaces(env: AnyEnv, seed: int | None) -> None:
    """Seed the spaces of an environment and its wrappers, from which it may draw; without a seed, they continue their random streams.

    `reset` of gymnasium does not do that: their first draw would come from the system's randomness.
    """
    for layer in layers(env) if seed is not None else ():
        for name, space in attributes_of(layer).items():
            if is_space(space):
                space.seed(crc32(f"{seed} {type(layer).__qualname__} {name}".encode()))  # not the stream of the environment itself


def record(env: gym.Env, way: str | None) -> gym.Env:
    """Wrap an environment if this way of saving needs it."""
    return Recorder(env, way) if way in ("replay", "draws") else env


def get_state(env: AnyEnv, way: str) -> State:
    """Return an environment's state as plain data; if it can no longer be saved in this way, a state that `set_state` rejects."""
    if isinstance(env, Recorder):
        return {"way": way, **env.get_state()}
    try:
        if way == "attributes":
            return {"version": VERSION, "way": way, "layers": read_all(layers(env), strict=True)}
        wrappers, core = read_all([*layers(env)][:-1], strict=True), env.unwrapped
        generators = read_all([core], only_generators=True)
        state = Encoder().encode(core.get_state())  # type: ignore[union-attr]
        return {"version": VERSION, "way": way, "layers": wrappers, "generators": generators, "own": state}
    except BaseException as error:  # user code may raise anything
        if is_interrupt(error):
            raise
        return {"way": None}


def set_state(env: AnyEnv, way: str | None, state: State) -> bool:
    """Restore a state in an environment that was built the same way; return whether that succeeded. If not, it can be reset."""
    restore = remember(env)
    try:
        if state["way"] is not None and state["way"] == way and _restore(env, state):
            return True
    except BaseException as error:  # user code may raise anything
        if is_interrupt(error):
            raise
    restore()
    return False


def set_states(envs: Sequence[gym.Env], ways: Sequence[str | None], states: Sequence[State]) -> bool:
    """Restore the states of several environments as `set_state` does; if that fails for one, all are as they were."""
    restores = [remember(env) for env in envs]
    if all(set_state(*triple) for triple in zip(envs, ways, states, strict=True)):
        return True
    for restore in restores:
        restore()
    return False


def remember(env: AnyEnv) -> Callable[[], None]:
    """Return a function that gives an environment its present attributes back, whatever has taken their place."""
    before, objects = read_all(layers(env)), objects_in(layers(env))

    def restore() -> None:
        for attributes, values in objects:
            attributes.clear()
            attributes.update(values)
        write_all(layers(env), before, VERSION, lenient=True)  # into these objects, which may have changed

    return restore


def _restore(env: AnyEnv, state: State) -> bool:
    if isinstance(env, Recorder):
        return env.set_state(state)
    env.reset(seed=0)  # objects created at the first reset must exist to be written into
    parts, version = [*layers(env)], state.get("version")
    if state["way"] == "own":
        core: Any = env.unwrapped
        core.set_state(Decoder(version).decode(state["own"]))
        if version is not None:
            write_all([core], state["generators"], version)
            parts = parts[:-1]
    write_all(parts, state["layers"], version, whole=version is not None)
    return True


def choose_way(build: Callable[[], AnyEnv], key: str | None = None) -> str | None:
    """Return the first way of saving that is exact for what `build` builds, or None. Results are cached by `key`."""
    if key is None:
        return run_apart(partial(_try_ways, build))
    if key not in _chosen:
        _chosen[key] = run_apart(partial(_try_ways, build))
    return _chosen[key]


def run_apart(trial: Callable[[float], T]) -> T | None:
    """Try environments in a child process, so that this one is not affected and does not wait for an environment that hangs.

    `trial` gets the time by which it must end. Returns None if it does not, or if the child dies.
    """
    deadline = time.monotonic() + MAX_TRIAL_SECONDS
    if sys.platform != "linux" or multiprocessing.current_process().daemon:
        return _run_silently(trial, deadline)
    context = multiprocessing.get_context("fork")  # works with any function
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(trial, deadline, sender), daemon=True)
    try:
        process.start()
    except OSError:  # no memory for another process
        receiver.close()
        sender.close()
        return None
    sender.close()
    try:
        return receiver.recv() if receiver.poll(MAX_TRIAL_SECONDS) else None
    except (EOFError, OSError):
        return None
    finally:
        receiver.close()
        process.kill()
        process.join()
        process.close()


def _send_result(trial: Callable[[float], object], deadline: float, pipe: Connection) -> None:
    follow_parent()
    faulthandler.disable()
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries bypass Python's streams
        os.dup2(null, stream)
    try:
        pipe.send(_run_silently(trial, deadline))
    finally:
        os._exit(0)  # without running the parent's exit handlers


def _run_silently(trial: Callable[[float], T], deadline: float) -> T:
    generators = random.getstate(), np.random.get_state()
    try:
        with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null), warnings.catch_warnings(action="ignore"):
            return trial(deadline)
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])


def _try_ways(build: Callable[[], AnyEnv], deadline: float) -> str | None:
    return next((way for way in WAYS if is_exact(build, way, deadline)), None)


def is_exact(build: Callable[[], Any], way: str, deadline: float) -> bool:
    """Return whether a copy that takes over the state of another continues identically, including over the start of an episode."""
    copies: list[AnyEnv] = []
    try:
        for _ in range(2):
            copies.append(record(build(), way))
        first, second = copies
        if first.unwrapped is second.unwrapped or (way == "own" and not hasattr(first.unwrapped, "get_state")):
            return False
        if way == "attributes" and has_sticky_actions(first):
            return False
        space = deepcopy(first.action_space)
        space.seed(0)
        draw, seen = partial(legal_action, first, space, space.sample), first.reset(seed=1)
        for steps in (4, 5):  # later episodes start without a seed
            _, _, seen = play(first, draw, seen, steps, deadline)
        state = get_state(first, way)
        # done before the second copy is touched: they may share state of their class
        actions, expected, _ = play(first, draw, seen, TRIAL_STEPS, deadline)
        again = iter(actions)
        return set_state(second, way, state) and are_equal(expected, play(second, lambda *_: next(again), seen, TRIAL_STEPS, deadline)[1])
    except BaseException as error:  # user code may raise anything
        if is_interrupt(error):
            raise
        return False
    finally:
        if len({id(copy.unwrapped) for copy in copies}) > 1:  # otherwise the function returned the environment itself
            for copy in copies:
                close_env(copy)


def play(
    env: AnyEnv, act: Callable[[Tree, Info], Tree], seen: tuple[Tree, Info], steps: int, deadline: float
) -> tuple[list[Tree], list[Tree], tuple[Tree, Info]]:
    """Play some steps, with a reset halfway and at the end of episodes.

    `act` returns an action for an observation and its info, `seen` are the first of these. Returns the actions, all results, and the last
    observation with its info. Raises `TimeoutError` after the deadline.
    """
    actions, results = [], []
    for i in range(steps):
        if time.monotonic() > deadline:
            raise TimeoutError
        actions.append(act(*seen))
        obs, reward, terminated, truncated, info = env.step(actions[-1])
        seen = obs, info
        results.append(deepcopy((obs, reward, terminated, truncated)))
        if i == steps // 2 or (not isinstance(env, VectorEnv) and (terminated or truncated)):
            seen = env.reset()
            results.append(deepcopy(seen[0]))
    return actions, results, seen


def are_equal(a: Tree, b: Tree) -> bool:
    """Return whether trees, or lists of trees, are bit-identical."""
    if isinstance(a, list):
        return len(a) == len(b) and all(map(are_equal, a, b))
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)]
    return all((x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()) for x, y in pairs)
