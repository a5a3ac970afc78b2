"""An environment whose parameters are drawn again for each episode, from samplers or from the lessons of a curriculum."""

from collections.abc import Mapping
from zlib import crc32

import gymnasium as gym
import numpy as np

from lightning_rl.envs import LESSONS, PARAMETERS
from lightning_rl.envs.lessons import LessonValues, Parameter, PlainSampler, as_sampler
from lightning_rl.envs.parameter_targets import make_target
from lightning_rl.errors import SettingError, nearest
from lightning_rl.spaces import with_vector
from lightning_rl.types import Info, Options, StepResult, Tree

OBSERVED = "parameters"
"""Key of the parameters in Dict observations."""


def draw_by_episode(env: gym.Env) -> gym.Env:
    """Let the seed of an episode alone determine what it draws, so that an evaluation may play it in any of several environments."""
    layer = env
    while isinstance(layer, gym.Wrapper):
        if isinstance(layer, EnvParameters):
            layer.of_episode = True
        layer = layer.env
    return env


class EnvParameters(gym.Wrapper):
    """Draws parameters at each reset, from random streams of this environment alone, and sets them on it (see `parameter_targets.py`).

    Parameters with lessons use the last lesson until `set_lessons` is called. A reset with a seed restarts the streams, except those of
    samplers with their own seed (but see `draw_by_episode`). Checkpoints store the attributes of this class under their names.

    Args:
        env: the environment that receives the parameters.
        parameters: its parameters by name, see `lessons.py`.
        index: index of this environment in the run, for samplers with their own seed.
        observe: append the values to the observation: to a vector, or under the key `parameters` of a Dict.

    Raises:
        SettingError: the environment has no such parameter, or its observations cannot be appended to; at a reset: the environment
            overwrites a parameter.
    """

    def __init__(self, env: gym.Env, parameters: Mapping[str, Parameter], index: int = 0, observe: bool = False) -> None:
        super().__init__(env)
        self.lessons = {name: parameter.only(len(parameter.lessons) - 1) for name, parameter in parameters.items()}
        self.index, self.observe = index, observe
        self.seed: int | None = None
        self.of_episode = False
        """Whether a seeded reset determines all draws, including those of samplers with their own seed: see `draw_by_episode`."""
        self.streams: dict[str, np.random.Generator] = {}
        self.drawn: dict[str, float] = {}
        self.played: dict[str, int] = {}
        self.receive, self.restore, self.check = make_target(env, parameters)
        if observe:
            self.observation_space = with_vector(env.observation_space, OBSERVED, len(self.lessons))

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Set what to draw from, starting with the next reset."""
        for name in lessons.keys() - self.lessons.keys():
            raise SettingError(f"{name} is not a parameter that this environment draws{nearest(name, self.lessons)}")
        self.lessons = {**self.lessons, **lessons}

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[Tree, Info]:
        if seed is not None:
            self.seed = seed
            self.streams = {key: stream for key, stream in self.streams.items() if not (key.startswith("run ") or self.of_episode)}
        episode = {name: self.draw(name, **lessons) for name, lessons in self.lessons.items()}
        self.drawn = {name: value for name, (_, value) in episode.items()}
        self.played = {name: lesson for name, (lesson, _) in episode.items()}
        obs, info = self.env.reset(seed=seed, options=self.receive(self.drawn, options))
        self.check(self.drawn)
        return self.extend_obs(obs), self.extend_info(info)

    def step(self, action: Tree) -> StepResult:
        self.restore(self.drawn)
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.extend_obs(obs), reward, terminated, truncated, self.extend_info(info) if terminated or truncated else info

    def draw(self, name: str, values: list[PlainSampler], replay: float, first: int) -> tuple[int, float]:
        """Draw the lesson of an episode (the last one, or an earlier one with probability `replay`) and a value from it."""
        lesson, stream = len(values) - 1, self.stream(name, -1)
        if lesson and replay and stream.random() < replay:
            lesson = int(stream.integers(lesson))
        sampler = as_sampler(name, values[lesson])
        return first + lesson, sampler.draw(self.stream(name, sampler.seed))

    def stream(self, name: str, seed: int) -> np.random.Generator:
        """Return a parameter's generator, which depends on the environment's seed, or on the sampler's `seed` if it has one."""
        key = f"run {name}" if seed < 0 else f"{seed} {name}"
        if key not in self.streams:
            own = [] if seed < 0 else [seed]
            entropy = [*own, self.index if own and not self.of_episode else self.seed, crc32(name.encode())]
            self.streams[key] = np.random.default_rng(None if entropy[0] is None else [int(each or 0) for each in entropy])
        return self.streams[key]

    def extend_obs(self, obs: Tree) -> Tree:
        """Append the values to an observation if they are observed."""
        if not self.observe:
            return obs
        numbers = np.array([*self.drawn.values()], np.float32)
        return {**obs, OBSERVED: numbers} if isinstance(obs, dict) else np.concatenate([obs, numbers.astype(obs.dtype)])

    def extend_info(self, info: Info) -> Info:
        """Add the drawn values and their lessons to an info."""
        return {**info, PARAMETERS: dict(self.drawn), LESSONS: dict(self.played)}
