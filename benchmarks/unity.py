"""Scenes of Unity beside ML-Agents' own Python, on the fake player of `tests/unity`: what is decoded, exchanges a second, and training.

    python benchmarks/unity.py decode --theirs PYTHON                # whether both sides read equal arrays
    python benchmarks/unity.py exchange --theirs PYTHON              # exchanges a second with a player that repeats one message
    python benchmarks/unity.py players                               # steps a second with one player and with four, whose ticks take 8 ms
    python benchmarks/unity.py train --theirs PYTHON [--seeds 2]     # PPO to 100,000 steps; with `--scene coop`, POCA

PYTHON is that of an environment with `mlagents` 1.1.0, which needs Python 3.10; here it was installed with
`pip install --ignore-requires-python numpy==1.23.5 mlagents==1.1.0`. Both sides are measured in turn; ratios are those of medians.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
DECODED_STEPS, RESET_AT = 120, 20
WARM_UP = 100
"""Exchanges before the measured ones."""
BEHAVIOR = "Ball?team=0"
EXCHANGES = {"16 agents": (16, 0, 2_000), "128 agents": (128, 0, 1_000), "16 agents, images of 84 x 84": (16, 84, 500)}
"""Agents, size of the image or 0, and measured exchanges of each case."""
PLAYER_AGENTS = 8
"""Agents of each player in `players`."""
TRAINED_STEPS = 100_000
TRAINER_FILE = """
behaviors:
  {behavior}:
    trainer_type: {trainer}
    hyperparameters: {{batch_size: {batch}, buffer_size: {buffer}, learning_rate: 0.001, learning_rate_schedule: constant, beta: 0.001,
      beta_schedule: constant, epsilon: 0.2, epsilon_schedule: constant, lambd: 0.95, num_epoch: 4}}
    network_settings: {{normalize: false, hidden_units: 64, num_layers: 2}}
    reward_signals: {{extrinsic: {{gamma: {gamma}, strength: 1.0}}}}
    max_steps: 100000
    time_horizon: 64
    summary_freq: 10000
"""
"""Settings for `mlagents-learn`."""
OUR_SETTINGS = "--model.n_steps=64 --model.n_epochs=4 --model.learning_rate=1e-3 --model.ent_coef=0.001"
"""The same settings here; two layers of 64 are the default."""


class Case(NamedTuple):
    """A scene to train in.

    batch_size: ours, which with POCA counts steps of groups.  their_batch, their_buffer: steps of agents.  metric: the return to compare.
    """

    behavior: str
    algorithm: str
    gamma: float
    batch_size: int
    their_batch: int
    their_buffer: int
    metric: str

    @property
    def options(self) -> list[str]:
        """Return our settings."""
        return ["--model", self.algorithm, *OUR_SETTINGS.split(), f"--model.gamma={self.gamma}", f"--model.batch_size={self.batch_size}"]

    @property
    def trainer_file(self) -> str:
        """Return their settings."""
        sizes = {"batch": self.their_batch, "buffer": self.their_buffer}
        return TRAINER_FILE.format(behavior=self.behavior, trainer=self.algorithm.lower(), gamma=self.gamma, **sizes)


CASES = {
    "reach": Case("Reach", "PPO", 0.95, 256, 256, 16 * 64, "rollout/ep_rew_mean"),
    "coop": Case("Coop", "POCA", 0.97, 64, 3 * 64, 24 * 64, "rollout/group_ep_rew_mean"),
}
"""By scene. In `reach` 16 agents ask, in `coop` 8 groups of three."""


class Numbers:
    """Draw the same numbers with every version of numpy."""

    state = 1

    def draw(self, count: int) -> np.ndarray:
        """Return `[count]` numbers from 0 to 1."""
        found = []
        for _ in range(count):
            self.state = (self.state * 1103515245 + 12345) % 2**31
            found.append(self.state / 2**31)
        return np.array(found)

    def choose(self, count: int, continuous: int, branches: tuple[int, ...], mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return continuous `[count, C]` and legal discrete `[count, branches]` actions."""
        numbers = (self.draw(count * continuous) * 2 - 1).astype(np.float32).reshape(count, continuous)
        choices, first = np.zeros((count, len(branches)), np.int32), 0
        for branch, size in enumerate(branches):
            for row in range(count):
                assert mask is not None
                legal = np.flatnonzero(mask[row, first : first + size])
                choices[row, branch] = legal[int(self.draw(1)[0] * len(legal))]
            first += size
        return numbers, choices


@contextmanager
def built(*arguments: object) -> Iterator[Path]:
    """Build a scene as an executable in a temporary folder."""
    sys.path.insert(0, str(ROOT))
    from tests.unity.scenes import build

    with tempfile.TemporaryDirectory() as folder:
        yield build(Path(folder), *arguments)


@contextmanager
def our_player(executable: str) -> Iterator[Any]:
    """Start a player with this package."""
    from lightning_rl.envs.unity.player import Player
    from lightning_rl.envs.unity.settings import UnitySettings

    with tempfile.TemporaryDirectory() as folder:
        player = Player(Path(executable), UnitySettings(), 0, 7, b"", Path(folder, "Player-0.log"))
        try:
            yield player
        finally:
            player.close()


@contextmanager
def their_player(executable: str) -> Iterator[Any]:
    """Start a player with mlagents_envs."""
    from mlagents_envs.environment import UnityEnvironment

    env = UnityEnvironment(executable, seed=7, base_port=6000 + os.getpid() % 2000, log_folder=tempfile.gettempdir())
    try:
        env.reset()
        yield env
    finally:
        env.close()


def keep(store: dict[str, np.ndarray], key: str, reward: np.ndarray, ids: Any, observations: list[np.ndarray], **others: Any) -> None:
    """Store the arrays of the agents in a message, if there are any."""
    if len(ids):
        arrays = {"ids": ids, "reward": reward, **{f"observation {i}": each for i, each in enumerate(observations)}, **others}
        store.update({f"{key} {name}": np.asarray(value) for name, value in arrays.items() if value is not None})


def decode_ours(executable: str, store: dict[str, np.ndarray]) -> None:
    """Step a scene with fixed actions, and store what this package reads."""
    from lightning_rl.envs.unity.player import Actions

    numbers = Numbers()
    with our_player(executable) as player:
        turn = player.finish()
        for step in range(DECODED_STEPS):
            actions = {}
            for name, spec in player.specs.items():
                asking, ended = turn.asking[name], turn.ended[name]
                keep(store, f"{step} {name} asks", asking.reward, asking.ids, asking.obs, mask=asking.mask)
                keep(store, f"{step} {name} ended", ended.reward, ended.ids, ended.obs, interrupted=ended.interrupted)
                if len(asking.ids):
                    continuous, discrete = numbers.choose(len(asking.ids), spec.continuous, spec.branches, asking.mask)
                    actions[name] = Actions(continuous if spec.continuous else None, discrete if spec.branches else None)
            player.reset() if step == RESET_AT else player.start(actions)
            turn = player.finish()
        player.start({})


def decode_theirs(executable: str, store: dict[str, np.ndarray]) -> None:
    """Step a scene with fixed actions, and store what mlagents_envs reads."""
    from mlagents_envs.base_env import ActionTuple

    numbers = Numbers()
    with their_player(executable) as env:
        for step in range(DECODED_STEPS):
            for name in env.behavior_specs:
                asking, ended = env.get_steps(name)
                mask = None if asking.action_mask is None else ~np.concatenate(asking.action_mask, 1)
                reward = np.add(asking.reward, asking.group_reward, dtype=np.float64)
                keep(store, f"{step} {name} asks", reward, asking.agent_id, asking.obs, mask=mask)
                reward = np.add(ended.reward, ended.group_reward, dtype=np.float64)
                keep(store, f"{step} {name} ended", reward, ended.agent_id, ended.obs, interrupted=ended.interrupted)
                if len(asking):
                    spec = env.behavior_specs[name].action_spec
                    continuous, discrete = numbers.choose(len(asking), spec.continuous_size, spec.discrete_branches, mask)
                    env.set_actions(name, ActionTuple(continuous=continuous, discrete=discrete))
            env.reset() if step == RESET_AT else env.step()


def exchange_ours(executable: str, agents: int, steps: int) -> float:
    """Return exchanges a second of this package."""
    from lightning_rl.envs.unity.player import Actions

    actions = {BEHAVIOR: Actions(np.zeros((agents, 2), np.float32), None)}
    with our_player(executable) as player:
        player.finish()

        def step() -> None:
            player.start(actions)
            player.finish()

        speed = time_steps(step, steps)
        player.start(actions)
    return speed


def exchange_theirs(executable: str, agents: int, steps: int) -> float:
    """Return exchanges a second of mlagents_envs."""
    from mlagents_envs.base_env import ActionTuple

    actions = ActionTuple(continuous=np.zeros((agents, 2), np.float32))
    with their_player(executable) as env:

        def step() -> None:
            env.set_actions(BEHAVIOR, actions)
            env.step()
            env.get_steps(BEHAVIOR)

        return time_steps(step, steps)


def step_ours(executable: str, players: int, steps: int) -> float:
    """Return steps of agents a second of this package's stepper."""
    from lightning_rl.envs.config import EnvConfig
    from lightning_rl.envs.make import probe_spaces
    from lightning_rl.envs.stepping import make_agent_stepper

    with tempfile.TemporaryDirectory() as folder:
        config = EnvConfig(f"unity:{executable}", num_envs=players, kwargs={"log_folder": folder})
        stepper = make_agent_stepper(config, probe_spaces(config), 0)
        stepper.reset(1)
        actions = np.zeros((players * PLAYER_AGENTS, 2), np.float32)
        speed = players * PLAYER_AGENTS * time_steps(lambda: stepper.step(actions), steps)
        stepper.close()
    return speed


def time_steps(step: Any, steps: int) -> float:
    """Return how many steps are made in a second, after a warm-up."""
    for _ in range(WARM_UP):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return steps / (time.perf_counter() - start)


def run_side(python: str, *arguments: object) -> str:
    """Run a part of this script with a Python, and return what it prints last."""
    command = [python, __file__, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def decode(options: argparse.Namespace) -> None:
    """Compare the arrays that both sides read in the scene `mixed`."""
    with tempfile.TemporaryDirectory() as folder, built("--scene", "mixed") as executable:
        files = []
        for side, python in (("ours", sys.executable), ("theirs", options.theirs)):
            files.append(Path(folder, f"{side}.npz"))
            run_side(python, "side", "decode", side, executable, files[-1])
        ours, theirs = map(np.load, files)
    values = differences = 0
    for name in sorted(set(ours.files) | set(theirs.files)):
        if name not in ours.files or name not in theirs.files:
            print("only in one:", name)
            differences += 1
            continue
        a, b = ours[name], theirs[name]
        a = a / 255 if a.dtype == np.uint8 and b.dtype == np.float32 else a  # images are bytes here
        values += a.size
        if not np.allclose(a.astype(np.float64), b, rtol=0, atol=1e-7):
            print("differs:", name)
            differences += 1
    print(f"{DECODED_STEPS} messages, {len(ours.files)} arrays, {values:,} values compared, {differences} arrays differ")


def exchange(options: argparse.Namespace) -> None:
    """Compare exchanges a second with a player that repeats one message."""
    for case, (agents, size, steps) in EXCHANGES.items():
        with built("--scene", "ball", "--repeat", "--count", agents, "--size", size) as executable:
            speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
            for _ in range(options.repeats):
                for side, python in (("ours", sys.executable), ("theirs", options.theirs)):
                    speeds[side].append(float(run_side(python, "side", "exchange", side, executable, agents, steps)))
        ours, theirs = (statistics.median(each) for each in speeds.values())
        print(f"{case}: {ours:.0f} exchanges/s here, {theirs:.0f} with mlagents_envs, ratio {ours / theirs:.2f}", flush=True)


def fit_ours(executable: Path, *options: str, players: int = 1, steps: int = TRAINED_STEPS) -> tuple[float, list[dict[str, str]]]:
    """Train here, and return the seconds of the command and its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--model.env.id", f"unity:{executable}", "--model.env.num_envs", str(players), "--model.max_env_steps", str(steps)]
        start = time.perf_counter()
        command = [sys.executable, "-m", "lightning_rl", "fit", *own, *options, "--trainer.default_root_dir", folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise SystemExit(done.stdout[-3000:])
        (metrics,) = Path(folder).rglob("metrics.csv")
        return seconds, list(csv.DictReader(metrics.read_text().splitlines()))


def fit_theirs(python: str, executable: Path, seed: int, case: Case) -> tuple[float, float, float]:
    """Train with `mlagents-learn`, and return the seconds of the command, those that it counts itself, and the last return as in a case."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "trainer.yaml").write_text(case.trainer_file)
        start = time.perf_counter()
        command = [
            str(Path(python).parent / "mlagents-learn"),
            "trainer.yaml",
            "--env",
            str(executable),
            "--run-id",
            "x",
            "--seed",
            str(seed),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
        seconds = time.perf_counter() - start
    kind = "Mean Group Reward" if case.algorithm == "POCA" else "Mean Reward"
    rows = re.findall(rf"Step: (\d+)\. Time Elapsed: (\d+\.\d+) s\. .*{kind}: (-?\d+\.\d+)", done.stdout)
    if not rows or int(rows[-1][0]) < TRAINED_STEPS:
        raise SystemExit(done.stdout[-3000:])
    return seconds, float(rows[-1][1]), float(rows[-1][2])


def train(options: argparse.Namespace) -> None:
    """Compare training to 100,000 steps with equal settings, in turn."""
    ratios, gaps, case = [], [], CASES[options.scene]
    with built("--scene", options.scene) as executable:
        for seed in range(1, options.seeds + 1):
            whole, rows = fit_ours(executable, *case.options, "--seed_everything", str(seed))
            value = float(rows[-1][case.metric])
            their_whole, their_seconds, their_value = fit_theirs(options.theirs, executable, seed, case)
            print(
                f"seed {seed}: {whole:.1f} s here, {their_whole:.1f} s mlagents-learn ({their_seconds:.1f} s by its own count); "
                f"return {value:.2f} and {their_value:.2f}; ratio of seconds {whole / their_whole:.2f}",
                flush=True,
            )
            ratios.append(whole / their_whole)
            gaps.append(value - their_value)
    differences = ", ".join(f"{gap:.2f}" for gap in gaps)
    print(f"median ratio of the whole commands {statistics.median(ratios):.2f}, returns here minus theirs {differences}")


def players(options: argparse.Namespace) -> None:
    """Compare one player and four, whose ticks take 8 ms: steps of the scene alone, and those of training."""

    def step(number: int) -> float:
        return float(run_side(sys.executable, "side", "step", "ours", executable, number, 500))

    def learn(number: int) -> float:
        own = [*CASES["reach"].options, "--seed_everything", "1"]
        _, rows = fit_ours(executable, *own, players=number, steps=10_000 * number)
        return statistics.median(float(row["time/fps"]) for row in rows[len(rows) // 2 :])

    with built("--scene", "reach", "--count", PLAYER_AGENTS, "--sleep", 0.008) as executable:
        for name, measure in (("the scene alone", step), ("PPO", learn)):
            speeds = [[measure(number) for number in (1, 4)] for _ in range(options.repeats)]
            one, four = map(statistics.median, zip(*speeds, strict=True))
            print(f"{name}: one player {one:.0f} steps/s, four {four:.0f}, ratio {four / one:.2f}", flush=True)


def side(options: argparse.Namespace) -> None:
    """Run one side of a comparison."""
    what, whose, executable, *others = options.arguments
    if what == "decode":
        store: dict[str, np.ndarray] = {}
        (decode_ours if whose == "ours" else decode_theirs)(executable, store)
        np.savez_compressed(others[0], **store)
    else:
        measure = step_ours if what == "step" else exchange_ours if whose == "ours" else exchange_theirs
        print(measure(executable, *map(int, others)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function in (decode, exchange, players, train, side):
        command = commands.add_parser(function.__name__, description=function.__doc__)
        command.set_defaults(function=function)
        if function is side:
            command.add_argument("arguments", nargs="+")
        else:
            command.add_argument("--theirs", default=os.environ.get("MLAGENTS_PYTHON", ""), help="Python of an environment with mlagents")
            command.add_argument("--repeats", type=int, default=3)
            command.add_argument("--seeds", type=int, default=2)
        if function is train:
            command.add_argument("--scene", choices=CASES, default="reach", help="in which is trained")
    options = parser.parse_args()
    options.function(options)


if __name__ == "__main__":
    main()
