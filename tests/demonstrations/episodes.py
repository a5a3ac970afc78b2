"""Episodes to record, and comparing them bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium as gym
import minari
import numpy as np
from minari.data_collector import EpisodeBuffer

from lightning_rl.demonstrations.dataset import Demonstration
from lightning_rl.demonstrations.recorder import RecordEpisodes
from lightning_rl.spaces import Spaces, as_spaces
from lightning_rl.types import tree_map, tree_stack


class Drawn(gym.Env):
    """Random observations of a space and random actions of another; an episode has 4 steps, every other one is truncated."""

    def __init__(self, observation: gym.Space, action: gym.Space) -> None:
        self.observation_space, self.action_space, self.episode = observation, action, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.t, self.episode = 0, self.episode + 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        end, truncates = self.t == 4, self.episode % 2 == 0
        return self.observation_space.sample(), float(self.np_random.normal()), end and not truncates, end and truncates, {}


def recorded(env: gym.Env, episodes: int = 3) -> tuple[RecordEpisodes, list[Demonstration]]:
    """Random episodes as the recorder has them, and as they are written down beside it."""
    recorder, beside = RecordEpisodes(env), []
    env.action_space.seed(1)
    for seed in range(episodes):
        seen, done, over = [recorder.reset(seed=seed)[0]], [], False
        while not over:
            action = env.action_space.sample()
            obs, reward, terminated, truncated, _ = recorder.step(action)
            seen.append(obs)
            done.append((action, reward, terminated, truncated))
            over = terminated or truncated
        action, reward, terminated, truncated = zip(*done, strict=True)
        flags = np.array(terminated), np.array(truncated)
        beside.append(Demonstration(stacked(seen), stacked(action), np.array(reward, np.float64), *flags))
    return recorder, beside


def stacked(trees: Any) -> Any:
    return tree_stack([tree_map(np.asarray, tree) for tree in trees])


def spaces_of(env: gym.Env, masked: bool = False) -> Spaces:
    spaces = as_spaces(env.observation_space, env.action_space)
    return spaces._replace(masked=masked or spaces.masked)


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Where two trees differ in kind, keys, type, shape or a bit."""
    if type(a) is not type(b):
        return [f"{place} is {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{place} has {list(a)} and {list(b)}"]
        return [each for key in a for each in differences(a[key], b[key], f"{place}.{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{place} has {len(a)} and {len(b)}"]
        return [each for i, pair in enumerate(zip(a, b, strict=True)) for each in differences(*pair, f"{place}.{i}")]
    if not isinstance(a, np.ndarray):
        return [] if a == b else [f"{place} is {a} and {b}"]
    same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return [] if same else [f"{place} is {a.dtype}{a.shape} and {b.dtype}{b.shape}"]


def minari_dataset(name: str, observation: Any, action: Any, spaces: tuple[gym.Space, gym.Space], **settings: Any) -> Any:
    """A dataset that Minari writes, of one episode: T + 1 observations, T actions; its last step terminates it unless told otherwise."""
    steps = len(action) if not isinstance(action, dict | tuple) else settings.pop("steps")
    last = [False] * (steps - 1) + [settings.pop("terminated", True)]
    episode = EpisodeBuffer(
        observations=observation,
        actions=action,
        rewards=[1.0] * steps,
        terminations=last,
        truncations=[False] * steps,
        infos=settings.pop("infos", None),
    )
    with warnings.catch_warnings(action="ignore"):
        return minari.create_dataset_from_buffers(name, [episode], observation_space=spaces[0], action_space=spaces[1], **settings)
