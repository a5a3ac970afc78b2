"""An environment whose parameters are drawn anew for each episode, as its settings or a curriculum say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import gymnasium as gym
import numpy as np

from lightning_rl.envs.lessons import Parameter, as_sampler
from lightning_rl.envs.parameter_targets import make_receiver
from lightning_rl.errors import SettingError, nearest
from lightning_rl.spaces import with_vector

PARAMETERS, LESSONS = "env_parameters", "env_lessons"
"""Keys of what an info says of an episode, at its beginning and at its end: the numbers drawn, and the lesson of each."""
OBSERVED = "parameters"
"""Key of the numbers in a Dict of observations."""


class EnvParameters(gym.Wrapper):
    """Draws parameters at each reset, from streams of this environment alone, and hands them to it (see `receiving.py`).

    Parameters with lessons have those of the last one, unless `set_lessons` says otherwise. A reset with a seed begins the streams anew,
    but for those of samplers with a seed of their own.

    Args:
        env: receives them.
        parameters: its parameters by name, see `lessons.py`.
        index: which environment this is among those of a run, for samplers with a seed of their own.
        observe: append the numbers to the observation: to a vector, or under the key `parameters` of a Dict.

    Raises:
        SettingError: the environment has no such parameter, or its observations cannot be appended to; at a reset: a parameter is an
            attribute that the environment sets itself.
    """

    def __init__(self, env: gym.Env, parameters: Mapping[str, Parameter], index: int = 0, observe: bool = False) -> None:
        super().__init__(env)
        self.lessons = {name: parameter.only(len(parameter.lessons) - 1) for name, parameter in parameters.items()}
        self.index, self.observe = index, observe
        self.seed: int | None = None
        self.streams: dict[str, np.random.Generator] = {}
        self.drawn: dict[str, float] = {}
        self.played: dict[str, int] = {}
        self.received: dict[str, float] = {}
        """What the environment has, the object `drawn` itself; it is another one where this state came from a checkpoint."""
        self.receive, self.restore, self.check = make_receiver(env, parameters)
        if observe:
            self.observation_space = with_vector(env.observation_space, OBSERVED, len(self.lessons))

    def set_lessons(self, lessons: Mapping[str, dict[str, Any]]) -> None:
        """What to draw from the next reset on, as `Parameter.until` and `only` say it.

        Raises:
            SettingError: the environment has no such parameter.
        """
        for name in lessons.keys() - self.lessons.keys():
            raise SettingError(f"{name} is not a parameter that this environment draws{nearest(name, self.lessons)}")
        self.lessons = {**self.lessons, **lessons}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.seed = seed
            self.streams = {key: stream for key, stream in self.streams.items() if not key.startswith("run ")}
        episode = {name: self.draw(name, **lessons) for name, lessons in self.lessons.items()}
        self.drawn = self.received = {name: value for name, (_, value) in episode.items()}
        self.played = {name: lesson for name, (lesson, _) in episode.items()}
        obs, info = self.env.reset(seed=seed, options=self.receive(self.drawn, options))
        self.check(self.drawn)
        return self.shown(obs), self.told(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        if self.received is not self.drawn:
            self.restore(self.drawn)
            self.received = self.drawn
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.shown(obs), reward, terminated, truncated, self.told(info) if terminated or truncated else info

    def draw(self, name: str, values: list[Any], replay: float, first: int) -> tuple[int, float]:
        """The lesson of an episode, the last of the known ones or by the share `replay` an earlier one, and its number."""
        lesson, ours = len(values) - 1, self.stream(name, -1)
        if lesson and replay and ours.random() < replay:
            lesson = int(ours.integers(lesson))
        sampler = as_sampler(name, values[lesson])
        return first + lesson, sampler.draw(self.stream(name, sampler.seed))

    def stream(self, name: str, seed: int) -> np.random.Generator:
        """What a parameter is drawn from: a stream that the environment's seed begins, or that a sampler's own does."""
        key = f"run {name}" if seed < 0 else f"{seed} {name}"
        if key not in self.streams:
            begins = [self.seed, crc32(name.encode())] if seed < 0 else [seed, self.index, crc32(name.encode())]
            self.streams[key] = np.random.default_rng(None if begins[0] is None else [int(each or 0) for each in begins])
        return self.streams[key]

    def shown(self, obs: Any) -> Any:
        """An observation, with the numbers where they are asked for."""
        if not self.observe:
            return obs
        numbers = np.array([*self.drawn.values()], np.float32)
        return {**obs, OBSERVED: numbers} if isinstance(obs, dict) else np.concatenate([obs, numbers.astype(obs.dtype)])

    def told(self, info: dict[str, Any]) -> dict[str, Any]:
        """An info with what was drawn."""
        return {**info, PARAMETERS: dict(self.drawn), LESSONS: dict(self.played)}
