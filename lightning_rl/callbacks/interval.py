"""How often, in what a run counts: environment steps or updates."""

from __future__ import annotations

from typing import Any

from lightning_rl.errors import SettingError

COUNTERS = ("env_steps", "updates")


def check_interval(section: str, callback: Any, algorithm: Any) -> None:
    """Raise `SettingError` for an interval in what the algorithm's runs do not count."""
    for counter in COUNTERS:
        if counter != algorithm.counter and getattr(callback, f"every_n_{counter}") is not None:
            name, right = type(algorithm).__name__, f"{section}.every_n_{algorithm.counter}"
            raise SettingError(f"{section}.every_n_{counter}: a run of {name} counts {algorithm.counted}; use {right}")


def interval(callback: Any, algorithm: Any, parts: int) -> int:
    """What the callback was told, or one of so many parts of the run."""
    return getattr(callback, f"every_n_{algorithm.counter}") or max(1, algorithm.length // parts)
