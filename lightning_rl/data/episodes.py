"""Statistics of training episodes, and whole episodes with a fixed policy for evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Generator

from lightning_rl.checkpoints.validation import COUNT, FLAG, FLOATS, INTEGERS, MAPPING, NUMBER, Rules
from lightning_rl.envs import KEPT, LESSONS, PARAMETERS, SUCCESS
from lightning_rl.envs.masks import detect_masks
from lightning_rl.envs.snapshot.state import seed_spaces
from lightning_rl.envs.sync import close_env, contract_of, name_of
from lightning_rl.errors import RunStoppedError, SettingError
from lightning_rl.nan_policy import BadStep, check_episode
from lightning_rl.networks.acting import ActingPolicy
from lightning_rl.networks.changes import check_float32
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.processes.ranks import of_all_ranks
from lightning_rl.spaces import allocate, as_spaces
from lightning_rl.types import EnvStep, Info, State, Tree, tree_index, tree_map, tree_stack, tree_to_numpy, tree_to_torch

WINDOW = 100
"""Number of latest episodes over which a run's means are taken."""


class Finished(NamedTuple):
    """A finished training episode: the sum of its rewards, its success (None if not reported), its lessons, its steps, its drawn
    parameters, and the entries of its last info that `KeepInfo` names."""

    return_: float
    success: float | None
    lessons: Mapping[str, int]
    length: int = 0
    parameters: Mapping[str, float] = {}
    info: Mapping[str, float] = {}


class EpisodeStatistics:
    """Returns, lengths, successes, drawn parameters and kept info of the last 100 episodes, as the environment reports them."""

    state_rules: ClassVar[Rules] = {
        "episodes": COUNT,
        "running_return": FLOATS,
        "running_length": INTEGERS,
        "returns|lengths|successes/[]": NUMBER,
        "reports_success?": FLAG.or_null(),
        "parameters?|info?": MAPPING,
        "parameters?|info?/*/[]": NUMBER,
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, num_envs: int) -> None:
        self.running_return = np.zeros(num_envs)
        self.running_length = np.zeros(num_envs, dtype=np.int64)
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.lengths: deque[int] = deque(maxlen=WINDOW)
        self.successes: deque[float] = deque(maxlen=WINDOW)
        self.reports_success = False
        """Whether any episode has reported its success. From then on, episodes that do not report it count as failures."""
        self.parameters: dict[str, deque[float]] = {}
        self.info: dict[str, deque[float]] = {}
        self.finished: list[Finished] = []
        """Episodes that ended in the current iteration."""
        self.episodes = 0

    def of_rows(self, rows: slice) -> EpisodeStatistics:
        """Return statistics of some environments alone, whose episodes are added to these."""
        part = EpisodeStatistics(0)
        part.running_return, part.running_length = self.running_return[rows], self.running_length[rows]
        part.add = self.add  # type: ignore[method-assign]
        return part

    def update(self, step: EnvStep) -> None:
        """Add one step of all environments."""
        self.running_return += step.reward
        self.running_length += step.valid
        if not len(step.ended):
            return
        lessons, drawn = (info_arrays(step.info, key) if key in step.info else {} for key in (LESSONS, PARAMETERS))
        kept = step.info.get(KEPT, {})
        reports = any(name in step.info for name in SUCCESS)
        for i in step.ended:
            played = {name: int(values[i]) for name, values in lessons.items()}
            numbers = {name: float(values[i]) for name, values in drawn.items()}
            succeeded = success(step.info, i) if reports else None
            info = {name: float(kept[name][i]) for name in kept if f"_{name}" in kept and kept[f"_{name}"][i]}
            self.add(Finished(float(self.running_return[i]), succeeded, played, int(self.running_length[i]), numbers, info))
        self.running_return[step.ended] = 0.0
        self.running_length[step.ended] = 0

    def add(self, episode: Finished) -> None:
        self.returns.append(episode.return_)
        self.lengths.append(episode.length)
        self.successes.append(episode.success or 0.0)
        self.reports_success |= episode.success is not None
        for windows, values in ((self.parameters, episode.parameters), (self.info, episode.info)):
            for name, value in values.items():
                windows.setdefault(name, deque(maxlen=WINDOW)).append(value)
        self.finished.append(episode)
        self.episodes += 1

    @property
    def mean_length(self) -> float:
        """Return the mean length of the last episodes, or of the running ones before the first has ended."""
        return float(np.mean(self.lengths if self.lengths else self.running_length))

    def share_reports(self) -> None:
        """Let every rank know whether an episode of any rank has reported its success."""
        self.reports_success = any(of_all_ranks(self.reports_success))

    def get_state(self) -> State:
        windows: State = {name: list(getattr(self, name)) for name in ("returns", "lengths", "successes")}
        for key in ("parameters", "info"):
            windows[key] = {name: list(window) for name, window in getattr(self, key).items()}
        counts = {"episodes": self.episodes, "reports_success": self.reports_success}
        return {"running_return": self.running_return.copy(), "running_length": self.running_length.copy(), **counts, **windows}

    def set_state(self, state: State) -> None:
        self.running_return[:], self.running_length[:], self.episodes = state["running_return"], state["running_length"], state["episodes"]
        for name in ("returns", "lengths", "successes"):
            getattr(self, name).clear()
            getattr(self, name).extend(state[name])
        self.reports_success = state.get("reports_success", bool(self.successes))  # 0.1.0 stored the successes that were reported
        for key in ("parameters", "info"):
            setattr(self, key, {name: deque(window, WINDOW) for name, window in state.get(key, {}).items()})

    def clear(self) -> None:
        """Forget the finished episodes, except for their number."""
        for window in (self.returns, self.lengths, self.successes, self.parameters, self.info):
            window.clear()
        self.reports_success = False

    def forget(self, envs: np.ndarray | slice = slice(None)) -> None:
        """Abandon the current episodes of some environments."""
        self.running_return[envs], self.running_length[envs] = 0.0, 0

    def metrics(self) -> dict[str, float]:
        """Return means over the window, under Stable-Baselines3's names; empty before the first episode ends."""
        windows: dict[str, deque[float] | deque[int]] = {"ep_rew_mean": self.returns, "ep_len_mean": self.lengths}
        windows |= {"success_rate": self.successes} if self.reports_success else {}
        means = {f"rollout/{name}": float(np.mean(window)) for name, window in windows.items() if window}
        for group in ("parameters", "info"):
            means |= {f"{group}/{name}": float(np.mean(window)) for name, window in getattr(self, group).items()}
        return means


def success(info: Info, env: int | None = None) -> float | None:
    """Return whether an episode was a success, 0 or 1; None if its last info does not report it.

    Args:
        info: info of one environment, or of all: arrays, with gymnasium's masks `_<name>` of the environments that have the entry.
        env: index of the environment; None if the info is of one environment.
    """
    for name in SUCCESS:
        reported = info.get(f"_{name}")
        if info.get(name) is not None and (env is None or reported is None or reported[env]):
            return float(info[name] if env is None else info[name][env])
    return None


def info_arrays(info: Info, key: str) -> Info:
    """Return the arrays under a key in the info of all environments, without the masks that gymnasium adds to them."""
    values = info[key]
    return {name: values[name] for name in values if not (name[:1] == "_" and name[1:] in values)}


MAX_EPISODE_STEPS = 10_000
"""Default limit of an episode if the environment has no limit of its own."""


class Episode(NamedTuple):
    """A finished episode: the seed of its reset, the sum of its rewards, its steps, and its success (None if not reported).

    parts: returns of behaviors by name, if there are several; then `return_` is their mean.
    result: result of a game against opponents, by comparing returns: 1 won, ½ drawn, 0 lost; the mean over several opponents; else None.
    """

    seed: int
    return_: float
    length: int
    success: float | None
    parts: Mapping[str, float] = {}
    result: float | None = None


class EpisodePlayer:
    """Plays episodes in its own environments, each episode with its own seed, each environment with its fixed share of the episodes.

    Taking the episodes that finish first instead would be biased towards short episodes.

    Args:
        envs: environments; the player closes them.
        max_episode_steps: an episode of this length ends, counted as truncated (default: see `longest_episode`).
        masked: whether the environments must mask actions, as in `Spaces`; if false, they may.
    """

    on_nan = "raise"
    """How to handle NaN and infinite values, see `nan_policy.py`."""

    def __init__(self, envs: list[gym.Env], max_episode_steps: int | None, masked: bool = False) -> None:
        self.envs = envs
        self.max_episode_steps, self.masked = max_episode_steps or longest_episode(self.envs[0]), masked
        self.finished: list[Episode] = []
        """Episodes of the newest `play` that have ended so far."""

    def play(
        self, network: ActingPolicy, episodes: int, seed: int, deterministic: bool, stop: Callable[[], bool] = lambda: False
    ) -> list[Episode]:
        """Play episodes with the seeds seed, seed + 1, …; environment i plays i, i + num_envs, …  The network's modes do not change.

        Raises `RunStoppedError`: `stop` returned True.
        """
        check_float32(network)
        with eval_mode(network.modules()):
            shares = [range(seed + i, seed + episodes, len(self.envs)) for i in range(len(self.envs))]
            seats = [_Share(i, self.envs[i], list(share), network, self) for i, share in enumerate(shares) if share]
            return self._play(network, seats, Generator(next(network.parameters()).device).manual_seed(seed), deterministic, stop)

    def close(self) -> None:
        for env in self.envs:
            close_env(env)

    @torch.no_grad()
    def _play(
        self, network: ActingPolicy, seats: list[_Share], generator: Generator, deterministic: bool, stop: Callable[[], bool]
    ) -> list[Episode]:
        self.finished.clear()
        while seats:
            if stop():
                raise RunStoppedError
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
                self.finished += seat.play(tree_index(actions, row), self.max_episode_steps)
            seats = [seat for seat in seats if seat.seeds]
        return sorted(self.finished)


class Seat:
    """One environment and its running episode.

    obs, mask: the next observation and mask to act on.  seed, return_, length: of the episode so far.  info: the environment's last info.
    replaced, bad: number of steps of the episode with replaced NaN or infinite values, and the first of them.

    `index` and `where` are for messages: the environment's index, and the phase. Other arguments are as in `EpisodePlayer`.
    """

    def __init__(self, index: int, env: gym.Env, masked: bool = False, on_nan: str = "raise", where: str = "in evaluation") -> None:
        self.index, self.env, self.masked, self.on_nan, self.where = index, env, masked, on_nan, where
        self.space = as_spaces(env.observation_space, env.action_space).observation
        self.name, self.contract = name_of(env), contract_of(env, index)

    def start(self, seed: int) -> None:
        """Start an episode."""
        self.seed, self.return_, self.length = seed, 0.0, 0
        self.replaced = 0
        self.bad: BadStep | None = None
        self.obs = allocate(self.space)
        with self.contract.naming(OSError):
            seed_spaces(self.env, seed)
            obs, info = self.env.reset(seed=seed)
        self.contract.check_obs(obs)
        self.info = self.contract.read_info(info)
        self.masks = detect_masks(self.env, self.info, f"environment {{}} of {self.name}", self.masked)
        obs, self.mask = self.masks.one(obs, self.info, self.index)
        self.obs, self.reward = self._checked(obs, 0.0)

    def _checked(self, obs: Tree, reward: float) -> tuple[Tree, float]:
        where = f"{self.where}, at step {self.length} of the episode with seed {self.seed}"
        good, good_reward, line = check_episode(obs, reward, self.obs, where, self.on_nan)
        if line:
            self.replaced += 1
            self.bad = self.bad or BadStep(line, deepcopy({"obs": self.obs, "reward": reward, "next_obs": obs}))
        return (good if self.on_nan in ("raise", "report") else deepcopy(good)), good_reward  # an environment may reuse the array

    def step(self, action: Tree, max_episode_steps: int) -> bool:
        """Step once. Return whether this ended the episode."""
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except (SettingError, OSError):  # OSError: of wrappers that write files
            raise
        except BaseException as error:  # a user's environment may raise anything
            raise self.contract.failure(error) from error
        self.contract.check_obs(obs)
        self.contract.check_reward(reward)
        self.contract.check_end(terminated, truncated)
        self.length += 1
        over = bool(terminated or truncated or self.length >= max_episode_steps)
        self.info = self.contract.read_info(info, over)
        obs, self.mask = self.masks.one(obs, self.info, self.index, over)
        self.obs, self.reward = self._checked(obs, float(reward))
        self.return_ += self.reward
        return over

    @property
    def success(self) -> float | None:
        """Return whether the finished episode was a success; None if not reported."""
        return success(self.info)


class _Share(Seat):
    """A seat with the seeds still to play, the current one first."""

    def __init__(self, index: int, env: gym.Env, seeds: list[int], network: ActingPolicy, player: EpisodePlayer) -> None:
        super().__init__(index, env, player.masked, player.on_nan)
        self.seeds, self.initial_memory = seeds, tree_index(network.initial_memory(1), 0)
        self.begin()

    def begin(self) -> None:
        """Start the episode of the current seed."""
        self.memory = self.initial_memory
        self.start(self.seeds[0])

    def play(self, action: Tree, max_episode_steps: int) -> list[Episode]:
        """Step once. Return the episode if this ended it."""
        if not self.step(action, max_episode_steps):
            return []
        episode = Episode(self.seeds.pop(0), self.return_, self.length, self.success)
        if self.seeds:
            self.begin()
        return [episode]


def longest_episode(env: gym.Env) -> int:
    """Return the maximum number of steps of an episode: the environment's own limit, or 10,000 if it has none."""
    return getattr(env.spec, "max_episode_steps", None) or MAX_EPISODE_STEPS


def returns_of_parts(episodes: Sequence[Episode]) -> dict[str, list[float]]:
    """Return the returns of each behavior in the episodes in which it was present; empty unless there are several behaviors."""
    names = sorted({part for episode in episodes for part in episode.parts})
    return {name: [episode.parts[name] for episode in episodes if name in episode.parts] for name in names}


def rates_of(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return `success_rate` if any episode reports its success, and for games `win_rate` and `draw_rate`.

    An episode without a report then counts as a failure. A game is won if the learner beats more of the others than beat it.
    """
    rates = {}
    if any(episode.success is not None for episode in episodes):
        rates["success_rate"] = float(np.mean([episode.success or 0.0 for episode in episodes]))
    if results := [episode.result for episode in episodes if episode.result is not None]:
        rates |= {"win_rate": win_rate(results), "draw_rate": results.count(0.5) / len(results)}
    return rates


def win_rate(results: Sequence[float]) -> float:
    """Return the share of won games: those with a result above ½."""
    return sum(result > 0.5 for result in results) / len(results)


def summarize(episodes: list[Episode]) -> dict[str, Any]:
    """Compute statistics of the returns: mean, deviation, range, median, interquartile mean, and a 95 % bootstrap interval of the mean.

    The interval of a single episode is None, None. With several behaviors the returns are means over them, and `<behavior>/return_mean`,
    …, are added.
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
    statistics |= rates_of(episodes)
    if results := [episode.result for episode in episodes if episode.result is not None]:
        statistics["points"] = np.mean(results)
    for part, values in returns_of_parts(episodes).items():
        summary = {"mean": np.mean(values), "std": np.std(values), "min": min(values), "max": max(values)}
        statistics |= {f"{part}/return_{name}": value for name, value in summary.items()}
    return {name: None if len(returns) == 1 and name.startswith("ci_") else float(value) for name, value in statistics.items()}
