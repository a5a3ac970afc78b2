"""Experience to put into buffers, and what the plainest loops make of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.envs.stepping import Stepper
from lightning_rl.types import EnvStep, Tree, tree_leaves, tree_map

MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")
LAYOUTS = (False, True)
"""Of `optimize_memory_usage`."""
LINE = Box(-np.inf, np.inf, (1,), np.float32)

EnvFactory = Callable[..., gym.Env]


class Row(NamedTuple):
    """A transition of one environment."""

    obs: Tree
    action: Any
    reward: float
    next_obs: Tree
    terminated: bool
    ended: bool


class Start(NamedTuple):
    """What a buffer should say of a row from which learning can start."""

    obs: Tree
    action: Any
    reward: list[float]
    steps: int
    next_obs: Tree


def environments(kind: EnvFactory, num_envs: int) -> list[Callable[[], gym.Env]]:
    """One environment with episodes of three steps, or three whose episodes take one, two and five."""
    periods = {1: [3], 3: [1, 2, 5]}[num_envs]
    return [lambda i=i, period=period: kind(period=period, first_episode=100 * i) for i, period in enumerate(periods)]


def some_actions(kind: EnvFactory, steps: int, num_envs: int) -> np.ndarray:
    space = kind().action_space
    space.seed(1)
    return np.array([[space.sample() for _ in range(num_envs)] for _ in range(steps)])


def experience(envs: Sequence[Callable[[], gym.Env]], actions: np.ndarray, mode: str) -> list[tuple[Tree, Any, EnvStep]]:
    """What our steppers say, to add to a buffer step by step."""
    stepper = Stepper(SyncVectorEnv(envs, autoreset_mode=AutoresetMode[mode], copy=False), AutoresetMode[mode])
    obs, said = copy.deepcopy(stepper.reset(seed=0)[0]), []
    for action in actions:
        step = copy.deepcopy(stepper.step(action))
        said.append((obs, action, step))
        obs = step.obs
    return said


def diary(env: gym.Env, actions: np.ndarray, mode: str) -> list[Row | None]:
    """What happens to one environment, by the plainest loop; None where NEXT_STEP only resets."""
    obs, over, rows = env.reset()[0], False, []
    for action in actions:
        if over:
            obs, over = env.reset()[0], False
            if mode == "NEXT_STEP":
                rows.append(None)
                continue
        next_obs, reward, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        rows.append(Row(obs, action, reward, next_obs, terminated, over))
        obs = next_obs
    return rows


def starts(rows: Sequence[Row], n_steps: int) -> Iterator[Start]:
    """Every row whose window is complete."""
    for i, row in enumerate(rows):
        window = []
        for each in rows[i : i + n_steps]:
            window.append(each)
            if each.ended:
                break
        last, missing = window[-1], n_steps - len(window)
        if last.ended or not missing:
            reward = [each.reward for each in window] + [0.0] * missing
            yield Start(row.obs, row.action, reward, 0 if last.terminated else len(window), last.next_obs)


def check_contents(buffer: ReplayBuffer, rows: Sequence[Sequence[Row | None]]) -> None:
    """Draw so often that every row that can be drawn is, and compare each with what happened in its environment."""
    kept = [[row for row in each if row is not None][-buffer.length :] for each in rows]
    expected = {(ring, name(start.obs)): start for ring, each in enumerate(kept) for start in starts(each, buffer.n_steps)}
    assert len(buffer) == sum(map(len, kept))
    assert buffer.ready == len(expected)
    if not expected:
        return
    window = buffer.sample(40 * len(expected))
    _, distinct = np.unique(window.rows, return_index=True)
    obs, next_obs = ([tree_map(lambda leaf, i=i: leaf[i], tree) for i in distinct] for tree in (window.obs, window.next_obs))
    drawn = {(ring, name(each)): i for ring, each, i in zip(window.rows[distinct] // buffer.slots, obs, distinct, strict=True)}
    assert drawn.keys() == expected.keys()
    following = dict(zip(drawn, next_obs, strict=True))
    for place, start in expected.items():
        i = drawn[place]
        assert name(following[place]) == name(start.next_obs)
        assert np.array_equal(window.action[i], start.action)
        assert window.reward[i].tolist() == np.float32(start.reward).tolist()
        assert window.steps[i] == start.steps


def name(obs: Tree) -> bytes:
    """An observation, to the last bit."""
    return b"".join(np.asarray(leaf).tobytes() for leaf in tree_leaves(obs))


def line_buffer(capacity: int, num_envs: int = 1, n_steps: int = 1, seed: int = 0, **config: Any) -> ReplayBuffer:
    """A buffer for `walk`."""
    return ReplayBuffer(LINE, np.int64(0), capacity, num_envs, n_steps=n_steps, config=ReplayConfig(**config), seed=seed)


def walk(buffer: ReplayBuffer, numbers: Sequence[float], ends: Sequence[float] = ()) -> None:
    """All environments go from each number to the next, for a reward of that number; where it is one of `ends`, they terminate."""
    num_envs = len(buffer.head)
    for x in numbers:
        obs, reward, end = np.full((num_envs, 1), x, np.float32), np.full(num_envs, x), np.full(num_envs, x in ends)
        none, valid = np.zeros(num_envs, dtype=bool), np.ones(num_envs, dtype=bool)
        step = EnvStep(obs + 1, reward, end, none, valid, end, np.flatnonzero(end), (obs + 1)[end] if end.any() else None, {})
        buffer.add(obs, np.full(num_envs, 7), step)
