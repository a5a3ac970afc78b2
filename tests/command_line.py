"""Running the command line in tests: in this process for speed, in one of its own where that matters."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rl.cli.main import main
from tests.apart import Apart

TINY = (
    "--model PPO --model.env.num_envs 2 --model.n_steps 16 --model.batch_size 32 --model.n_epochs 1 --model.net_arch [8] "
    "--model.max_env_steps 64 --evaluation.episodes 2 --evaluation.num_envs 2 --evaluation.max_episode_steps 20 --trainer.accelerator cpu "
)
"""Two iterations of 32 environment steps."""

MODULE = """
import gymnasium as gym, numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Sequence, Text
from lightning_rl import PPO

SPACES = {
    "plain": (Box(-1, 1, (2,)), Discrete(2)),
    "text": (Text(5), Discrete(2)),
    "nothing": (Dict({}), Discrete(2)),
    "sequence": (Sequence(Discrete(2)), Discrete(2)),
    "text action": (Box(-1, 1, (2,)), Text(5)),
    "integer action": (Box(-1, 1, (2,)), Box(0, 5, (2,), np.int64)),
    "unbounded action": (Box(-1, 1, (2,)), Box(-np.inf, np.inf, (2,))),
    "image": (Box(0, 255, (8, 8, 3), np.uint8), Discrete(2)),
}

class Mine(gym.Env):
    def __init__(self, spaces="plain"):
        if spaces == "broken":
            raise RuntimeError("no display found")
        self.observation_space, self.action_space = SPACES[spaces]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(2, self.t / 10, np.float32), 1.0, self.t == 5, False, {}

gym.register("Mine-v0", f"{__name__}:Mine")

class MyPPO(PPO):
    '''PPO with a factor on its loss.'''

    def __init__(self, env, *, factor: float = 1.0, **common):
        super().__init__(env, **common)
        self.factor = factor

    def loss(self, minibatch, *scheduled):
        loss, metrics = super().loss(minibatch, *scheduled)
        return self.factor * loss, metrics
"""
"""A user's module with an environment and an algorithm."""


def run(arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a run in this process."""
    capfd.readouterr()
    try:
        status = main(shlex.split(arguments))
    except SystemExit as end:  # --print_config and help
        status = end.code
    return status, *capfd.readouterr()


def run_apart(arguments: str, folder: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """The same in a process of its own, in a folder; environment variables as in `Apart`."""
    program = Apart(f"-m lightning_rl {arguments}", folder, env)
    out, err = program.communicate()
    return program.wait(), out, err


def run_python(program: tuple[str, ...], arguments: str, folder: Path) -> tuple[int, str, str]:
    """The same as Python starts it, with these arguments before those of the program."""
    done = subprocess.run([sys.executable, *program, *shlex.split(arguments)], cwd=folder, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr
