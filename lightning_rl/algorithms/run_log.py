"""What an algorithm logs, and when."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_rl.callbacks.disk import log_row

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
