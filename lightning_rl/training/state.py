"""What a run logs, and the state beside networks, optimizers and callbacks that a checkpoint holds."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.distributed import of_all_ranks
from lightning_rl.errors import SettingError
from lightning_rl.loggers import log_row

Metric = Tensor | Callable[[], Tensor]


class RunLog:
    """Rows of metrics over what the run counts, environment steps or updates, one every `interval` of them.

    Lightning's `self.log` costs 0.2 ms a key and counts neither, so rows go to the loggers and to `callback_metrics` directly.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.recorded: dict[str, list[float | Tensor]] = {}
        self.keeps = True
        """Whether the iteration may be logged, and what it records is kept."""

    def start(self, count: int) -> None:
        """The clock of a run, at the count it begins with."""
        self.started = self.logged_at = time.monotonic()
        self.logged_env_steps = count

    def get_state(self) -> dict[str, Any]:
        """Where the log stands."""
        return {"logged_env_steps": self.logged_env_steps, "elapsed": time.monotonic() - self.started}

    def set_state(self, state: dict[str, Any]) -> None:
        """The inverse; time goes on from then, without the time in between."""
        self.logged_env_steps = state["logged_env_steps"]
        self.started = time.monotonic() - state["elapsed"]

    def begin(self, most: float) -> None:
        """An iteration begins, after which the run is at `most` at the furthest."""
        self.recorded.clear()
        self.keeps = most - self.logged_env_steps >= self.interval

    def record(self, **values: Metric) -> None:
        """Keep metrics of this iteration; a function is called only if the iteration may be logged.

        Numbers are kept, no tensors of the CPU and no functions that hold some: small ones that outlive an update break up the memory that
        the large ones of the next could take again. Where no row can come, only the newest values are kept, to be named if they are bad.
        """
        for name, value in values.items():
            if not self.keeps:
                self.recorded[name] = [value.detach()] if isinstance(value, Tensor) else []
                continue
            found = value.detach() if isinstance(value, Tensor) else without_gradient(value)
            self.recorded.setdefault(name, []).append(number(found) if found.is_cpu else found)

    def is_due(self, count: int) -> bool:
        """Whether a row is due."""
        return self.keeps and count - self.logged_env_steps >= self.interval

    def means(self) -> dict[str, float]:
        """The means of what this iteration recorded, as `train/<name>`."""
        return {name if "/" in name else f"train/{name}": mean(values) for name, values in self.recorded.items() if values}

    def write(self, trainer: Any, algorithm: Any, metrics: dict[str, float]) -> None:
        """One row: the given metrics, and those of time."""
        now, count, row = time.monotonic(), algorithm.count, dict(metrics)
        row["time/fps"] = (count - self.logged_env_steps) / max(now - self.logged_at, 1e-9)
        row["time/time_elapsed"] = now - self.started
        row["time/iterations"] = trainer.global_step
        log_row(trainer, algorithm, row)
        self.logged_at, self.logged_env_steps = now, count


@torch.no_grad()
def without_gradient(function: Callable[[], Tensor]) -> Tensor:
    """What a metric's function says, inside an update or not."""
    return function()


def number(value: Tensor) -> float:
    """A tensor of the CPU, or its mean."""
    return float(value.item() if value.dim() == 0 else value.float().mean().item())


def mean(values: list[Any]) -> float:
    """Of numbers, or of tensors of a device, which is asked once."""
    return float((torch.stack(values) if isinstance(values[0], Tensor) else torch.tensor(values)).mean())


def run_states(algorithm: Any) -> list[Any]:
    """The state of each rank as plain data, known to all ranks."""
    own = to_plain(run_state(algorithm))
    if algorithm.trainer.world_size == 1:
        return [own]
    file = io.BytesIO()
    torch.save(own, file)  # the pickles of `all_gather_object` do not know all types of tensors
    return [torch.load(io.BytesIO(state), weights_only=True) for state in of_all_ranks(file.getvalue())]


def run_state(algorithm: Any) -> dict[str, Any]:
    """Of this rank: experience, the place in the log, what learns beside, what was done about bad values, and all random generators."""
    return {
        "num_envs": algorithm.collector.num_envs,
        "data": algorithm.dataset.get_state(),
        "log": algorithm.log_rows.get_state(),
        "guard": algorithm.guard.get_state(),
        "beside": [learner.get_state() for learner in algorithm.side_learners],
        "learning": algorithm.generator.get_state(),
        "noise": algorithm.noise.get_state(),
        "random": random_state(),
    }


def continue_run(algorithm: Any) -> None:
    """Be the run that the checkpoint was made of, as far as it and the environments allow; what they do not is said in one line.

    Raises:
        SettingError: what the checkpoint holds is not the state of such a run.
    """
    state, collector = algorithm.own_state, algorithm.collector
    new_episodes: str | None = "the checkpoint holds none of a run"
    if algorithm.ranks:
        there = f"{len(algorithm.ranks)} x {algorithm.ranks[0]['num_envs']}"
        new_episodes = f"the checkpoint has {there} (ranks x env.num_envs), not {algorithm.trainer.world_size} x {algorithm.num_envs}"
    if state is not None:
        try:
            new_episodes = set_run_state(algorithm, to_arrays(state))
        except (KeyError, IndexError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
            reason = shorten(f"{type(error).__name__}: {error}", 80, placeholder=" …")
            raise SettingError(f"the checkpoint's run cannot be continued ({reason}); --init_from takes only its weights") from error
    else:
        if algorithm.global_rank == 0:  # one rank brings what all ranks had
            collector.env_steps, collector.statistics.episodes = algorithm.env_steps, algorithm.episodes
        if load_buffer(algorithm):
            algorithm.dataset.buffer.cut()
            algorithm.dataset.buffer.draw_anew(algorithm.seed)  # several ranks may have taken the same one
    if new_episodes is not None:
        algorithm.say(f"{algorithm.dataset.anew}: {new_episodes}")
    algorithm.ranks = []


def set_run_state(algorithm: Any, state: dict[str, Any]) -> str | None:
    """The inverse of `run_state`; why something is done anew after all, if it is."""
    load_buffer(algorithm)
    new_episodes = algorithm.dataset.set_state(state["data"])
    algorithm.log_rows.set_state(state["log"])
    for learner, own in zip(algorithm.side_learners, state["beside"], strict=True):
        if (anew := learner.set_state(own)) is not None:
            algorithm.say(anew)
    algorithm.guard.set_state(state["guard"])
    algorithm.generator.set_state(torch.from_numpy(state["learning"]))
    algorithm.noise.set_state(torch.from_numpy(state["noise"]))
    set_random_state(state["random"])
    return new_episodes


def saved_buffer(algorithm: Any) -> tuple[dict[str, Any], int] | None:
    """The manifest of the replay buffer that a checkpoint holds for this rank, and the rank that saved it: not always the same one where
    there were more or fewer. None if there is no buffer, or it is of another number of environments.
    """
    if not algorithm.ranks:
        return None
    number = algorithm.global_rank % len(algorithm.ranks)
    state = algorithm.ranks[number]
    manifest = state["data"].get("replay")
    return None if manifest is None or state["num_envs"] != algorithm.num_envs else (manifest, number)


def load_buffer(algorithm: Any) -> bool:
    """Take over the replay buffer that a checkpoint holds for this rank; whether there is one."""
    saved = saved_buffer(algorithm)
    if saved is None:
        return False
    manifest, number = saved
    algorithm.dataset.load_buffer(manifest, Path(algorithm.trainer.ckpt_path).parent / "last.ckpt.d" / f"rank{number}")
    return True


def random_state() -> dict[str, Any]:
    """The generators that belong to everyone in this process."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse; generators of accelerators that are not here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(torch.from_numpy(state["torch"]))
    for device, words in list(enumerate(state["cuda"]))[: torch.cuda.device_count()]:
        torch.cuda.set_rng_state(torch.from_numpy(words), device)
