"""lightning_rl with gymnasium's own environments in place of those that live on a device: what it gains to leave arrays out."""

from __future__ import annotations

from dataclasses import replace

from cases import Case
from clock import Clock, measure

from peers import ours


def train(case: Case, clock: Clock, device: str) -> tuple[int, int]:
    """See `clock.Train`."""
    return ours.train(replace(case, env=case.env.removeprefix("Torch/"), vectorization="sync"), clock, device)


if __name__ == "__main__":
    measure(train)
