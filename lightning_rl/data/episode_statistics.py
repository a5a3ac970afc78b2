"""What the environments paid and said of the episodes that ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.envs.parameters import LESSONS, PARAMETERS
from lightning_rl.envs.stepping import EnvStep
from lightning_rl.ranks import of_all_ranks


class Finished(NamedTuple):
    """An episode that ended: the sum of its rewards, its success (None if it did not report it), what lessons it played, how many
    steps it took, and what parameters it drew."""

    return_: float
    success: float | None
    lessons: Mapping[str, int]
    length: int = 0
    parameters: Mapping[str, float] = {}


SUCCESS = ("is_success", "success")
"""Under which names environments report the success of an episode."""


class EpisodeStatistics:
    """Returns, lengths, successes and drawn parameters of the last 100 episodes, as the environment pays and says them."""

    def __init__(self, num_envs: int, window: int = 100) -> None:
        self.running_return = np.zeros(num_envs)
        self.running_length = np.zeros(num_envs, dtype=np.int64)
        self.returns: deque[float] = deque(maxlen=window)
        self.lengths: deque[int] = deque(maxlen=window)
        self.successes: deque[float] = deque(maxlen=window)
        self.reports_success = False
        """Whether any episode has reported its success. From then on one that does not report it counts as a failure."""
        self.parameters: dict[str, deque[float]] = {}
        self.finished: list[Finished] = []
        """The episodes of the iteration under way."""
        self.episodes = 0

    def update(self, step: EnvStep) -> None:
        """Add one step of all environments."""
        self.running_return += step.reward
        self.running_length += step.valid
        if not len(step.ended):
            return
        lessons, drawn = said(step.info, LESSONS), said(step.info, PARAMETERS)
        for i in step.ended:
            played = {name: int(values[i]) for name, values in lessons.items()}
            numbers = {name: float(values[i]) for name, values in drawn.items()}
            self.add(Finished(float(self.running_return[i]), success(step.info, i), played, int(self.running_length[i]), numbers))
        self.running_return[step.ended] = 0.0
        self.running_length[step.ended] = 0

    def add(self, episode: Finished) -> None:
        """Add an episode that ended."""
        self.returns.append(episode.return_)
        self.lengths.append(episode.length)
        self.successes.append(episode.success or 0.0)
        self.reports_success |= episode.success is not None
        for name, value in episode.parameters.items():
            self.parameters.setdefault(name, deque(maxlen=self.returns.maxlen)).append(value)
        self.finished.append(episode)
        self.episodes += 1

    def share_reports(self) -> None:
        """Let every rank know whether an episode of any rank has reported its success."""
        self.reports_success = any(of_all_ranks(self.reports_success))

    def get_state(self) -> dict[str, Any]:
        """Everything."""
        windows: dict[str, Any] = {name: list(getattr(self, name)) for name in ("returns", "lengths", "successes")}
        windows["parameters"] = {name: list(window) for name, window in self.parameters.items()}
        counts = {"episodes": self.episodes, "reports_success": self.reports_success}
        return {"running_return": self.running_return, "running_length": self.running_length, **counts, **windows}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse, for as many environments."""
        self.running_return[:], self.running_length[:], self.episodes = state["running_return"], state["running_length"], state["episodes"]
        for name in ("returns", "lengths", "successes"):
            getattr(self, name).clear()
            getattr(self, name).extend(state[name])
        self.reports_success = state.get("reports_success", bool(self.successes))  # 0.1.0 stored the successes that were reported
        drawn = state.get("parameters", {})
        self.parameters = {name: deque(window, self.returns.maxlen) for name, window in drawn.items()}

    def forget(self, envs: Any = slice(None)) -> None:
        """The episodes under way in some environments are given up."""
        self.running_return[envs], self.running_length[envs] = 0.0, 0

    def metrics(self) -> dict[str, float]:
        """Means over the window, under Stable-Baselines3's names; empty before the first episode ends."""
        windows: dict[str, Any] = {"ep_rew_mean": self.returns, "ep_len_mean": self.lengths}
        windows |= {"success_rate": self.successes} if self.reports_success else {}
        means = {f"rollout/{name}": float(np.mean(window)) for name, window in windows.items() if window}
        return means | {f"parameters/{name}": float(np.mean(window)) for name, window in self.parameters.items()}


def success(info: Mapping[str, Any], env: int | None = None) -> float | None:
    """Return whether an episode was a success, 0 or 1; None if its last info does not report it.

    Args:
        info: of one environment, or of all: arrays, with gymnasium's masks `_<name>` of the environments that have the entry.
        env: which of all; None if the info is of one.
    """
    for name in SUCCESS:
        reported = info.get(f"_{name}")
        if name in info and (env is None or reported is None or reported[env]):
            return float(info[name] if env is None else info[name][env])
    return None


def said(info: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What an info of all environments says under a key: an array each, without the masks that gymnasium puts beside them."""
    values = info.get(key, {})
    return {name: values[name] for name in values if not (name[:1] == "_" and name[1:] in values)}
