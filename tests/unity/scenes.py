"""Executables that play scenes of `fake_player.py`."""

import shlex
import sys
from pathlib import Path

import numpy as np

import lightning_rl

PUSH = "Push?team=0"
FAKE = Path(__file__).parent / "fake_player.py"
PACKAGE = Path(lightning_rl.__file__).parent.parent


def build(folder, *arguments, name="Scene"):
    """Write an executable that plays a scene, as Unity builds one, and return its path."""
    file = folder / f"{name}.x86_64"
    command = shlex.join([sys.executable, str(FAKE), *map(str, arguments)])
    file.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(PACKAGE))} exec {command} "$@"\n')
    file.chmod(0o755)
    return file


def find_players(log):
    """Return the ids of running processes that write to a log."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
        except OSError:  # it has ended
            continue
        if str(log).encode() in words:
            found.append(int(process.name))
    return found


def agent(agent_id, seen, **more):
    return [agent_id, [float(seen)], more]


def ended(agent_id, seen, reward, interrupted=False):
    return agent(agent_id, seen, reward=reward, done=True, interrupted=interrupted)


def step(stepper):
    return stepper.step(np.zeros((stepper.num_envs, 1), dtype=np.float32))
