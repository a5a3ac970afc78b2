"""Whether steps of self-play and their memory stay as they are, however many snapshots a run has.

    python benchmarks/flatness.py [--windows 10 1000] [--snapshots 900] [--agents]

PPO learns tic-tac-toe against its past selves, with a snapshot after every 128 steps; with `--agents` two PPO learn simple_tag in turns.
Prints, for each window, the milliseconds of an environment step and the memory of the process in the second and in the last tenth of the
snapshots, and how much of that memory holds the weights of snapshots in the window. Each window is a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

import lightning_rl as lrl

GAME = "lightning_rl.envs.games.tic_tac_toe"
STEPS = 128
"""Environment steps of an iteration, after which there is a snapshot."""


class Watch(pl.Callback):
    """Notes the seconds of each iteration, and after it the memory, and that of the snapshots, in MB."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.memory: list[float] = []
        self.snapshots: list[float] = []
        self.last: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *arguments: Any) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.memory.append(pages * 4096 / 1e6)
            stores = [learner.collector.opponent.snapshots for learner in pl_module.run.algorithms.values()]
            weights = [weight for store in stores for snapshot in store.weights.values() for weight in snapshot.values()]
            self.snapshots.append(sum(weight.nbytes for weight in weights) / 1e6)
        self.last = time.perf_counter()


def train(window: int, snapshots: int, agents: bool) -> Watch:
    """Train with a window until there are so many snapshots."""
    self_play = {"save_steps": STEPS, "window": window, "play_against_latest_model_ratio": 0.2}
    settings: dict[str, Any] = {"n_steps": STEPS // 8, "batch_size": STEPS, "n_epochs": 1, "net_arch": [64], "compile": False}
    if agents:
        learner = partial(lrl.PPO, self_play=self_play, **settings)
        behaviors = {name: lrl.Behavior(agents=f"{name}_*", learner=learner) for name in ("adversary", "agent")}
        model: Any = lrl.MultiAgent(lrl.EnvConfig("mpe2.simple_tag_v3", num_envs=8), behaviors, max_env_steps=STEPS * snapshots)
    else:
        model = lrl.PPO(lrl.EnvConfig(GAME, num_envs=8), self_play=self_play, max_env_steps=STEPS * snapshots, **settings)
    watch = Watch()
    lrl.Trainer(evaluation=None, checkpoint=None, logger=False, enable_progress_bar=False, callbacks=[watch]).fit(model)
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[10, 1000])
    parser.add_argument("--snapshots", type=int, default=900)
    parser.add_argument("--agents", action="store_true", help="two behaviors")
    options = parser.parse_args()
    if len(options.windows) > 1:
        for window in options.windows:
            more = ["--agents"] if options.agents else []
            subprocess.run([sys.executable, __file__, "--windows", str(window), "--snapshots", str(options.snapshots), *more], check=True)
        return
    (window,) = options.windows
    watch = train(window, options.snapshots, options.agents)
    tenth = len(watch.seconds) // 10
    seconds, memory, weights = (
        [statistics.median(part) for part in (values[tenth : 2 * tenth], values[-tenth:])]
        for values in (watch.seconds, watch.memory, watch.snapshots)
    )
    first, last = (1e3 * each / STEPS for each in seconds)
    rest = [each - own for each, own in zip(memory, weights, strict=True)]
    print(
        f"window {window}, {len(watch.seconds)} iterations: {first:.3f} ms a step in the second tenth, {last:.3f} in the last, "
        f"ratio {last / first:.2f}; memory {memory[0]:.0f} and {memory[1]:.0f} MB, of which snapshots {weights[0]:.0f} and "
        f"{weights[1]:.0f}, ratio of the rest {rest[1] / rest[0]:.2f}"
    )


if __name__ == "__main__":
    main()
