"""Kill processes while they save; one process forks them, so that torch is loaded once.

`python -m tests.checkpoints.kills FOLDER` prints a line for each kill: the number in the checkpoint found before and after it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lightning_rl.checkpoints.files import AtomicCheckpointIO, last_generation, read_verified

EVENTS = ("os.rename", "os.link", "os.remove", "open")


def save(folder: Path, number: int) -> None:
    content = {"number": number, "weights": torch.full((50_000 + number,), float(number))}
    AtomicCheckpointIO().save_checkpoint(content, folder / "last.ckpt")


def find(folder: Path) -> int:
    """Return the number in the checkpoint to continue from; every save is whole or not there."""
    path = last_generation(folder)
    assert path is not None
    content = read_verified(path, say=lambda line: print("notice:", line))
    assert content["weights"].shape == (50_000 + content["number"],) and (content["weights"] == content["number"]).all()
    return content["number"]


def child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def die_at(folder: Path, number: int, event: int) -> None:
    """Save, and be killed before the `event`-th call of the system."""
    left = event

    def count(name: str, arguments: tuple) -> None:
        nonlocal left
        if name in EVENTS:
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    save(folder, number)


def save_on(folder: Path, first: int) -> None:
    number = first
    while True:
        save(folder, number)
        number += 1


def main(folder: Path) -> None:
    save(folder, 0)
    save(folder, 1)
    found = 1
    for event in range(200):  # each kill but the first follows a kill
        before = found
        pid = child(lambda event=event, number=before + 1: die_at(folder, number, event))
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        found = find(folder)
        print(f"event {event} {'killed' if killed else 'done'} from {before} to {found}")
        assert before <= found <= before + 1
        if not killed:
            break
    draw = random.Random(0)
    for _ in range(10):
        before = found
        pid = child(lambda number=before + 1: save_on(folder, number))
        time.sleep(draw.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found = find(folder)
        print(f"random killed from {before} to {found}")
        assert found >= before
    save(folder, 10**6)
    print("left:", sorted(each.name for each in folder.iterdir()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
