"""Whole episodes with a fixed policy, for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Generator

from lightning_rl.data.episode_statistics import success
from lightning_rl.envs.contract import Contract, name_of
from lightning_rl.envs.masks import masks_of
from lightning_rl.errors import Interrupted, SettingError
from lightning_rl.finite import check_episode
from lightning_rl.spaces import allocate, as_spaces
from lightning_rl.types import Tree, tree_index, tree_map, tree_stack, tree_to_numpy, tree_to_torch

MAX_EPISODE_STEPS = 10_000
"""The longest episode where the environment has no limit of its own."""


class Episode(NamedTuple):
    """A finished episode: the seed of its reset, the sum of its rewards, its steps, and its success (None if it did not report it)."""

    seed: int
    return_: float
    length: int
    success: float | None


class EpisodePlayer:
    """Plays episodes on environments of its own, each episode with its own seed, each environment with its own share of them.

    An environment whose episodes are short plays no more of them than the others: "the first to finish" would favour short ones.

    Args:
        make: builds one environment.
        num_envs: how many of them act together.
        max_episode_steps: an episode of this length ends here, counted as truncated; see `longest_episode` unless given.
        masked: whether the environments must rule out actions, as in `Spaces`; if not, they may.
    """

    on_nan = "raise"
    """What to do about numbers that are none, see `guards.py`."""

    def __init__(self, make: Callable[[], gym.Env], num_envs: int, max_episode_steps: int | None, masked: bool = False) -> None:
        self.envs = [make() for _ in range(num_envs)]
        self.max_episode_steps, self.masked = max_episode_steps or longest_episode(self.envs[0]), masked

    def play(self, network: Any, episodes: int, seed: int, deterministic: bool, stop: Callable[[], bool] = lambda: False) -> list[Episode]:
        """Episodes with the seeds seed, seed + 1, …; environment i plays i, i + num_envs, …  Leaves the network's mode as it was.

        Raises:
            Interrupted: `stop` says so.
        """
        was_training = network.training
        network.eval()
        try:
            shares = [range(seed + i, seed + episodes, len(self.envs)) for i in range(len(self.envs))]
            seats = [_Share(i, self.envs[i], list(share), network, self) for i, share in enumerate(shares) if share]
            return self._play(network, seats, Generator(next(network.parameters()).device).manual_seed(seed), deterministic, stop)
        finally:
            network.train(was_training)

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()

    @torch.no_grad()
    def _play(
        self, network: Any, seats: list[_Share], generator: Generator, deterministic: bool, stop: Callable[[], bool]
    ) -> list[Episode]:
        finished: list[Episode] = []
        while seats:
            if stop():
                raise Interrupted
            obs = allocate(seats[0].space, len(seats))
            for row, seat in enumerate(seats):
                tree_map(lambda batch, leaf, row=row: batch.__setitem__(row, leaf), obs, seat.obs)
            start = torch.tensor([seat.length == 0 for seat in seats], device=generator.device)
            action, memory = network.sample(
                tree_to_torch(obs, generator.device),
                tree_stack([seat.memory for seat in seats]),
                start,
                tree_to_torch(tree_stack([seat.mask for seat in seats]), generator.device),
                deterministic=deterministic,
                generator=generator,
            )
            actions = network.distribution.to_env(tree_to_numpy(action))
            for row, seat in enumerate(seats):
                seat.memory = tree_index(memory, row)
                finished += seat.play(tree_index(actions, row), self.max_episode_steps)
            seats = [seat for seat in seats if seat.seeds]
        return sorted(finished)


class Seat:
    """One environment, and the episode under way in it.

    obs, mask: what to act on next.  seed, return_, length: of the episode so far.  info: what the environment said last.

    Args:
        index: which of the environments of its owner it is, for messages.
        env: the environment.
        masked: whether it must rule out actions, as in `Spaces`; if not, it may.
        on_nan: what to do about numbers that are none, see `guards.py`.
        where: when that is, for messages.
    """

    def __init__(self, index: int, env: gym.Env, masked: bool = False, on_nan: str = "raise", where: str = "in evaluation") -> None:
        self.index, self.env, self.masked, self.on_nan, self.where = index, env, masked, on_nan, where
        self.space = as_spaces(env.observation_space, env.action_space).observation
        self.name, self.contract = name_of(env), Contract(env, index)

    def start(self, seed: int) -> None:
        """Begin an episode."""
        self.seed, self.return_, self.length = seed, 0.0, 0
        self.obs = allocate(self.space)
        with self.contract.naming(OSError):
            obs, self.info = self.env.reset(seed=seed)
        self.contract.check_obs(obs)
        self.masks = masks_of(self.env, self.info, f"environment {{}} of {self.name}", self.masked)
        obs, self.mask = self.masks.one(obs, self.info, self.index)
        self.obs, self.reward = self._checked(obs, 0.0)

    def _checked(self, obs: Tree, reward: float) -> tuple[Tree, float]:
        where = f"{self.where}, at step {self.length} of the episode with seed {self.seed}"
        return check_episode(obs, reward, self.obs, where, self.on_nan)

    def step(self, action: Tree, max_episode_steps: int) -> bool:
        """Step once. Whether this ended the episode."""
        try:
            obs, paid, terminated, truncated, self.info = self.env.step(action)
        except (SettingError, OSError):  # of wrappers that write what they see
            raise
        except Exception as error:  # an environment of others may raise anything
            raise self.contract.failure(error) from error
        self.contract.check_obs(obs)
        self.contract.check_reward(paid)
        self.length += 1
        over = bool(terminated or truncated or self.length >= max_episode_steps)
        obs, self.mask = self.masks.one(obs, self.info, self.index, over)
        self.obs, self.reward = self._checked(obs, float(paid))
        self.return_ += self.reward
        return over

    @property
    def success(self) -> float | None:
        """Return whether the episode that ended was a success; None if it did not report it."""
        return success(self.info)


class _Share(Seat):
    """A seat with the seeds it has still to play, the current one first."""

    def __init__(self, index: int, env: gym.Env, seeds: list[int], network: Any, player: EpisodePlayer) -> None:
        super().__init__(index, env, player.masked, player.on_nan)
        self.seeds, self.initial_memory = seeds, tree_index(network.initial_memory(1), 0)
        self.begin()

    def begin(self) -> None:
        """The episode of the current seed."""
        self.memory = self.initial_memory
        self.start(self.seeds[0])

    def play(self, action: Tree, max_episode_steps: int) -> list[Episode]:
        """Step once; the episode if this ended it."""
        if not self.step(action, max_episode_steps):
            return []
        episode = Episode(self.seeds.pop(0), self.return_, self.length, self.success)
        if self.seeds:
            self.begin()
        return [episode]


def longest_episode(env: gym.Env) -> int:
    """The steps after which an episode is ended: the environment's own limit, or 10,000 where it has none."""
    return getattr(env.spec, "max_episode_steps", None) or MAX_EPISODE_STEPS


def summarize(episodes: list[Episode]) -> dict[str, Any]:
    """Statistics of the returns: mean, standard deviation, range, median, interquartile mean, and a 95 % bootstrap interval of the mean.

    The interval of one episode is None and None.
    """
    returns = np.array([episode.return_ for episode in episodes])
    ordered, quarter = np.sort(returns), len(returns) // 4
    draws = np.random.default_rng(0).choice(returns, (2_000, len(returns))).mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    statistics = {
        "return_mean": returns.mean(),
        "return_std": returns.std(),
        "return_min": returns.min(),
        "return_max": returns.max(),
        "return_median": np.median(returns),
        "iqm": ordered[quarter : len(ordered) - quarter].mean(),
        "ci_low": low,
        "ci_high": high,
        "length_mean": np.mean([episode.length for episode in episodes]),
    }
    return {name: None if len(returns) == 1 and name.startswith("ci_") else float(value) for name, value in statistics.items()}
