"""Kill self-play before its k-th access to the folder of its checkpoints, for several k, and continue it.

`python -m tests.checkpoints.kills_of_self_play FOLDER` prints a line for each: the snapshots of the checkpoint that it continued from, and
whether it ended like the run that nobody killed. One process forks them all, so that torch is loaded once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytorch_lightning as pl
import torch

from lightning_rl.checkpoints.files import last_generation, read_verified
from tests.checkpoints.kills import EVENTS
from tests.checkpoints.test_runs_of_self_play import fit, model

STRIDE = 11


def train(folder: Path) -> None:
    """Train, from the last checkpoint if there is one, and save how the run ended."""
    pl.seed_everything(3)
    made = model(32 * 6, window=2)
    trainer = fit(folder, made, "last", checkpoint={"every_n_env_steps": 32}, logger=False)
    (past,) = made.past_selves
    ended = {"weights": made.state_dict(), "snapshots": past.snapshots.weights, "elo": past.elo, "elos": past.elos}
    torch.save({**ended, "scores": torch.tensor(past.results[""].rows)}, folder / "ended")
    assert trainer.run_folder is not None


def die_at(folder: Path, event: int) -> None:
    """Train, and be killed before the `event`-th access."""
    left = event

    def watch(name: str, arguments: tuple) -> None:
        nonlocal left
        if name in EVENTS and "/checkpoints" in str(arguments[0]):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    train(folder)


def child(work: Callable[[], None]) -> bool:
    """Run in another process; return whether it was killed."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    status = os.waitpid(pid, 0)[1]
    assert status == 0 or os.WIFSIGNALED(status)
    return status != 0


def equal(one: object, other: object) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) else one == other


def main(folder: Path) -> None:
    assert not child(lambda: train(folder / "whole"))
    whole = torch.load(folder / "whole/ended", weights_only=True)
    for event in count(0, STRIDE):
        killed = child(lambda event=event: die_at(folder / str(event), event))
        (saved,) = (folder / str(event)).rglob("checkpoints")
        last = last_generation(saved)
        stored = None if last is None else read_verified(last)["callbacks"]["SelfPlay"]
        if not killed:
            break
        assert not child(lambda event=event: train(folder / str(event)))
        ended = torch.load(folder / str(event) / "ended", weights_only=True)
        files = len(list(saved.glob("last.ckpt.d/self_play/*")))
        print(f"KILLED at {event}: from {None if stored is None else stored['taken']}, {equal(ended, whole)}, {files} files")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
