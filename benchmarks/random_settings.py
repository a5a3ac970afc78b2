"""Random settings: runs that are stopped and continue, or that only do the same in another way, must have equal weights bit for bit.

    python benchmarks/random_settings.py [--first 0] [--count 100]

Each seed draws an algorithm, an environment with random observations, ends and masks, and settings, and trains them as they are; stopped by
a signal after some iterations and continued; now and then with `vectorization: async`, without evaluations, and off-policy with
observations stored once instead of twice. Weights and counts of all must be equal, and what was saved last is evaluated. Prints a line for
each seed: equal, what differs, or the line by which the settings are refused. Exits with status 1 if anything differed, or raised anything
but a refusal. The last comparison leaves out prioritized buffers, whose draws differ, and observations of two or three dimensions, whose
memory layout differs and so does their rounding.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

import lightning_rl as lrl

OBSERVATIONS: dict[str, Space] = {
    "box": Box(-5, 5, (3,), np.float32),
    "wide": Box(-np.inf, np.inf, (2, 2), np.float64),
    "scalar": Box(-1, 1, (), np.float32),
    "choice": Discrete(4, start=2),
    "choices": MultiDiscrete([3, 2]),
    "bits": MultiBinary(4),
    "image": Box(0, 255, (12, 12, 3), np.uint8),
    "dict": Dict({"v": Box(-1, 1, (2,), np.float32), "k": Discrete(3), "image": Box(0, 255, (12, 12, 1), np.uint8)}),
    "nested": Dict({"a": Dict({"x": Box(-1, 1, (1,), np.float32)}), "b": Tuple((Discrete(2), Box(0, 1, (2,), np.float32)))}),
}
ACTIONS: dict[str, Space] = {
    "choice": Discrete(4),
    "from 1": Discrete(3, start=1),
    "choices": MultiDiscrete([3, 2]),
    "bits": MultiBinary(3),
    "box": Box(-2, np.array([1, 3], np.float32), (2,), np.float32),
    "dict": Dict({"go": Discrete(3), "how": Box(-1, 1, (2,), np.float32)}),
    "tuple": Tuple((MultiDiscrete([2, 3]), Discrete(2), Box(0, 1, (1,), np.float32))),
}
MASKED = ("choice", "from 1", "choices")
ON_POLICY = ("PPO", "A2C", "TRPO", "PQN")


class Random(gym.Env):
    """Observes and ends at random, and pays a running mean of what was done; actions that a mask rules out are an error."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}

    def __init__(self, obs: str, action: str, masked: bool, end: float, cut: float) -> None:
        self.observation_space, self.action_space = OBSERVATIONS[obs], ACTIONS[action]
        self.masked, self.end, self.cut, self.mean = masked, end, cut, 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.mean = float(self.np_random.random())
        return self.draw(self.observation_space), self.info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        assert not self.masked or self.legal[self.places(action)].all(), f"{action} is not legal"
        self.mean = 0.9 * self.mean + 0.1 * float(gym.spaces.flatten(self.action_space, action).sum())
        terminated, truncated = self.np_random.random(2) < (self.end, self.cut)
        info = self.info() | ({"is_success": bool(terminated)} if terminated or truncated else {})
        return self.draw(self.observation_space), self.mean, bool(terminated), bool(truncated), info

    def draw(self, space: Space) -> Any:
        """Draw an observation from the environment's own generator."""
        if isinstance(space, Dict):
            return {name: self.draw(child) for name, child in space.items()}
        if isinstance(space, Tuple):
            return tuple(map(self.draw, space))
        if isinstance(space, Discrete):
            return space.start + self.np_random.integers(space.n)
        low, high = (0, space.nvec) if isinstance(space, MultiDiscrete) else (0, 2)
        if isinstance(space, Box):
            low, high = (0, 256) if space.dtype == np.uint8 else (np.maximum(space.low, -1), np.minimum(space.high, 1))
        drawn = low + (high - low) * self.np_random.random(space.shape)
        return np.asarray(drawn if space.dtype.kind == "f" else np.floor(drawn), space.dtype)  # type: ignore[union-attr]

    @property
    def sizes(self) -> list[int]:
        """How many choices each branch has."""
        return [int(self.action_space.n)] if isinstance(self.action_space, Discrete) else list(self.action_space.nvec)  # type: ignore[attr-defined]

    def places(self, action: Any) -> list[int]:
        """Where an action's choices are in the mask."""
        start = self.action_space.start if isinstance(self.action_space, Discrete) else 0
        return [int(choice - start + sum(self.sizes[:branch])) for branch, choice in enumerate(np.ravel(action))]

    def info(self) -> dict[str, Any]:
        """A random mask that allows something in each branch."""
        if not self.masked:
            return {}
        self.legal = self.np_random.random(sum(self.sizes)) < 0.6
        for branch, size in enumerate(self.sizes):
            self.legal[sum(self.sizes[:branch]) + self.np_random.integers(size)] = True
        return {"action_mask": self.legal}


gym.register("Random-v0", Random, max_episode_steps=30)


class Draw:
    """The settings of a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        pick = self.rng.choice
        self.algorithm = pick(["PPO", "PPO", "PPO", "A2C", "TRPO", "PQN", "DQN", "DQN", "SAC", "SAC", "TD3", "TQC", "CrossQ"])
        kinds = {"PQN": MASKED[:2], "DQN": MASKED[:2], "TD3": ("box",), "TQC": ("box",)}.get(self.algorithm, tuple(ACTIONS))
        obs, action = pick(list(OBSERVATIONS)), pick(kinds)
        masked = action in MASKED and self.rng.random() < 0.5
        kwargs = {"obs": obs, "action": action, "masked": masked, "end": pick([0.0, 0.1, 0.4, 0.9]), "cut": pick([0.0, 0.05, 0.4])}
        self.env: dict[str, Any] = {"id": "Random-v0", "num_envs": pick([1, 2, 3]), "kwargs": kwargs}
        self.some(self.env, 0.2, autoreset=["NEXT_STEP", "SAME_STEP", "DISABLED"], frame_stack=[2, 3], max_episode_steps=[4, 7])
        self.settings: dict[str, Any] = {
            "net_arch": pick([[8], [8, 6], []]),
            "encoder_features": 8,
            "normalize_obs_steps": pick([1, 10, 33]),
        }
        self.some(self.settings, 0.35, normalize_obs=["running", "frozen"], normalize_reward=[True])
        self.some(self.settings, 0.2, clip_reward=[1.0], reward_scale=[0.1], gamma=[0.0, 1.0, 0.9], max_grad_norm=[None, 0.1])
        self.some(self.settings, 0.15, learning_rate=[{"schedule": "linear", "start": 1e-3, "end": 1e-5}, 1e-2])
        curious, novel = {"curiosity": {"strength": 0.1}}, {"rnd": {"strength": 0.1}, "extrinsic": {"gamma": 0.8}}
        self.some(self.settings, 0.2, reward_signals=[curious, novel])
        if self.algorithm not in ("CrossQ", "PQN", "TRPO"):
            memory = {"memory_size": pick([4, 6]), "sequence_length": pick([2, 4, 8])}
            self.some(self.settings, 0.4, memory=[{"class_path": each, "init_args": memory} for each in ("LSTM", "GRU")])
        (self.on_policy if self.algorithm in ON_POLICY else self.off_policy)()

    def some(self, settings: dict[str, Any], share: float, **choices: list[Any]) -> None:
        """Set each of some settings with a probability."""
        settings |= {name: self.rng.choice(values) for name, values in choices.items() if self.rng.random() < share}

    def on_policy(self) -> None:
        steps = self.rng.choice([8, 16])
        rows = steps * self.env["num_envs"]
        self.settings |= {"n_steps": steps, "max_env_steps": 6 * rows}
        if self.algorithm in ("PPO", "PQN"):
            self.settings |= {"batch_size": self.rng.choice([8 * self.env["num_envs"], rows]), "n_epochs": self.rng.choice([1, 2])}
        if self.algorithm == "PPO":
            self.some(self.settings, 0.2, clip_range_vf=[0.2], target_kl=[0.01], threaded=[True], normalize_advantage=[False])
            self.some(self.settings, 0.3, ratio=["per_part", "per_dim"], share_encoder=[True, False])
        if self.algorithm in ("PPO", "A2C"):
            self.some(self.settings, 0.25, critic_burn_in_steps=[2 * rows], ent_coef=[0.01])
        if self.algorithm != "PQN":
            self.some(self.settings, 0.2, value_transform=["symlog"], value_support=[[-5, 5]], gae_lambda=[1.0, 0.0])
            boxed = self.env["kwargs"]["action"] in ("box", "dict", "tuple")
            self.some(self.settings, 0.3 * boxed, action_dist=["tanh_normal"], use_sde=[True])

    def off_policy(self) -> None:
        pick = self.rng.choice
        self.settings |= {"batch_size": 16, "buffer_size": pick([60, 300]), "max_env_steps": 120, "steps_per_iteration": pick([10, 20, 25])}
        self.settings |= {"learning_starts": pick([0, 10, 40]), "train_freq": pick([1, 2, 5]), "gradient_steps": pick([1, -1, 2])}
        self.some(self.settings, 0.25, n_steps=[2, 3], warmup=["policy"])
        replay: dict[str, Any] = {}
        self.some(replay, 0.3, prioritized=[True], optimize_memory_usage=[True])
        self.settings |= {"replay": replay} if replay else {}
        if self.algorithm == "DQN":
            self.some(self.settings, 0.35, double=[True, False], dueling=[True], noisy=[True], distribution=["c51", "quantiles"])
        elif self.algorithm != "CrossQ":
            self.some(self.settings, 0.2, n_critics=[1, 3], critic_layers=["layer_norm"], policy_delay=[2])
        if self.algorithm == "SAC":
            self.some(self.settings, 0.2, value_network=[True], ent_coef=[0.1], threaded=[True])

    def ways(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """Other ways to do the same: a name, the environment, the settings, and arguments of `train`."""
        if not self.settings.get("threaded") and self.rng.random() < 0.35:
            yield "async", {**self.env, "vectorization": "async"}, self.settings, {}
        if self.rng.random() < 0.3:
            yield "without evaluations", self.env, self.settings, {"evaluation": None}
        replay = self.settings.get("replay", {})
        is_exact = not replay.get("prioritized") and self.env["kwargs"]["obs"] not in ("image", "dict", "wide")
        if self.algorithm not in ON_POLICY and is_exact and self.rng.random() < 0.6:
            other = {**replay, "optimize_memory_usage": not replay.get("optimize_memory_usage", False)}
            yield "observations stored otherwise", self.env, {**self.settings, "replay": other}, {}


class StopAfter(pl.Callback):
    """Sends the process a signal after some iterations."""

    def __init__(self, iterations: int) -> None:
        self.left = iterations

    def on_train_batch_end(self, *arguments: object) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def train(draw: Draw, env: dict[str, Any], settings: dict[str, Any], folder: Path, **arguments: Any) -> Any:
    """Train once, from a seed, until the end, or until a callback sends a signal. Return the algorithm."""
    pl.seed_everything(1, verbose=False)
    model = getattr(lrl, draw.algorithm)(env=dict(env), **json.loads(json.dumps(settings)))
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = lrl.Trainer(accelerator="cpu", enable_progress_bar=False, default_root_dir=folder, **arguments)
    with suppress(SystemExit) if "callbacks" in arguments else nullcontext():
        trainer.fit(model, ckpt_path=ckpt_path)
    return model


def differences(a: Any, b: Any) -> list[str]:
    """What is not equal in two algorithms: counts, and the first of their weights."""
    ours, theirs = a.state_dict(), b.state_dict()
    weights = [name for name in ours.keys() | theirs.keys() if not torch.equal(ours[name].nan_to_num(), theirs[name].nan_to_num())]
    return [f"{a.env_steps} and {b.env_steps} environment steps"] * (a.env_steps != b.env_steps) + sorted(weights)[:3]


def compare(seed: int, folder: Path) -> tuple[bool, str]:
    """Train a seed's settings in several ways. Return whether all is well, and a line."""
    draw = Draw(seed)
    try:
        whole = train(draw, draw.env, draw.settings, folder / "whole")
    except lrl.SettingError as error:
        return True, f"refused: {error}"
    train(draw, draw.env, draw.settings, folder / "stopped", callbacks=[StopAfter(draw.rng.choice([1, 2, 3, 4]))])
    (saved,) = (folder / "stopped").rglob("last.ckpt")
    continued = train(draw, draw.env, draw.settings, folder / "continued", ckpt_path=saved)
    found = {"continued": differences(whole, continued)}
    (last,) = (folder / "continued").rglob("last.ckpt")
    lrl.evaluate(last, episodes=2)
    for name, env, settings, arguments in draw.ways():
        found[name] = differences(whole, train(draw, env, settings, folder / name.replace(" ", "_"), **arguments))
    wrong = "; ".join(f"{name}: {', '.join(each)}" for name, each in found.items() if each)
    return not wrong, f"{draw.algorithm}: {wrong or f'equal ({len(found)} ways)'}"


def main() -> int:
    """Compare, and print a line for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--count", type=int, default=100, help="how many seeds (100)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    failed = 0
    for seed in range(options.first, options.first + options.count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                with redirect_stdout(StringIO()):
                    is_well, line = compare(seed, Path(folder))
            except Exception:
                is_well, line = False, traceback.format_exc(limit=-6)
        failed += not is_well
        drawn = "" if is_well else f"\n    {json.dumps([vars(Draw(seed))[name] for name in ('algorithm', 'env', 'settings')])}"
        print(f"{seed} {line}{drawn}", flush=True)
    print(f"{options.count} seeds, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
