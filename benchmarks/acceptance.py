"""Whether algorithms learn ML-Agents' acceptance tasks within twice the steps that ML-Agents grants itself.

    python benchmarks/acceptance.py [--rows "PPO base" LSTM …] [--seeds 1 2 3] [--processes 2]

A row is an environment of `envs/examples.py`, an algorithm with settings, a budget of environment steps and a threshold. It is reached at
the environment step that ends the first five training episodes in a row whose mean return exceeds the threshold (none of them begun
before learning starts), and passes if that is within twice the budget (rows of 100 steps: within 1,000) for two of three seeds. Where an
episode has two steps luck can do that; `--to_the_limit` tells what was learned by then. `--rows` takes parts of names.
The table is Markdown; the
exit status is 0 if all rows pass.

ML-Agents' settings are taken as they are, under our names: `buffer_size` rows an update are `n_steps` of one environment, `num_epoch`
`n_epochs`, `beta` `ent_coef`, `epsilon` `clip_range`, `lambd` `gae_lambda`, layers of n units `net_arch`, swish `silu`, `buffer_init_steps`
`learning_starts`, `init_entcoef` the first value of a learned `ent_coef`. What cannot be the same:

* the image encoders of policy and value end in `encoder_features` units, and the hidden layers come after them;
* gradients are not clipped (`max_grad_norm: null`), as there; advantages are normalized in each minibatch, there over the whole rollout;
* a Gaussian of PPO acts cut to [-1, 1], there to [-3, 3] and divided by 3;
* the target entropy of SAC's choices is 0.2 log n (`target_entropy_scale`), as there;
* GAIL sees actions and looks beyond terminations, and has a discount of 0.8 and a learning rate of 3e-3 but for PPO on vectors: the
  observations of `Simple1D` tell nothing of what was done, and with ML-Agents' settings the threshold is reached, but not kept when
  cloning fades out;
* SAC learns mixed actions from returns over five steps (`n_steps`), there over one: only the last step of an episode tells a side, and with
  one step two to four of six seeds kept to a wrong side in one of four dimensions, at all temperatures that were tried.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import accumulate
from typing import Any, NamedTuple

import pytorch_lightning as pl

import lightning_rl as lrl
from lightning_rl.demonstrations.recorder import record_1d


class Row(NamedTuple):
    """A line of the table: `algorithm` with `settings` on `env` with `kwargs`."""

    name: str
    algorithm: str
    env: str
    kwargs: dict[str, Any]
    settings: dict[str, Any]
    budget: int
    threshold: float = 0.9
    demonstrations: int = 0
    """How many steps of the best policy are recorded before, as the dataset `EXPERT`."""

    @property
    def limit(self) -> int:
        """Environment steps within which it passes."""
        return 1000 if self.budget == 100 else 2 * self.budget


KINDS = {"continuous": (1, 0), "discrete": (0, 1)}
FIRST = {"step_size": 0.1, "time_penalty": 0.001, "min_steps": 11}
IMAGES = {"num_vector": 0, "num_visual": 1}
SETS = {"num_vector": 0, "num_var_len": 1}
PPO = {
    "n_steps": 64,
    "batch_size": 16,
    "n_epochs": 3,
    "learning_rate": 5e-3,
    "ent_coef": 5e-3,
    "net_arch": [32],
    "encoder_features": 32,
    "activation": "silu",
    "max_grad_norm": None,
}
SAC = {
    "learning_starts": 100,
    "buffer_size": 5000,
    "batch_size": 8,
    "learning_rate": 5e-3,
    "tau": 0.01,
    "ent_coef": "auto_0.01",
    "target_entropy_scale": 0.2,
    "net_arch": [16],
    "encoder_features": 16,
    "activation": "silu",
    "steps_per_iteration": 10,
}
LSTM = {"memory": {"class_path": "LSTM", "init_args": {"memory_size": 16, "sequence_length": 16}}}

EXPERT = "simple1d/expert-v0"


def rows() -> Iterator[Row]:
    """The table, top to bottom."""
    for kind, action in KINDS.items():
        first = {"action": action, **FIRST}
        yield Row(f"PPO of 2019, {kind}", "PPO", "Simple1D", first, PPO | {"net_arch": [128, 128]}, 2500, 0.99)
        slow = {"batch_size": 32, "buffer_size": 10240, "learning_starts": 1000, "net_arch": [64], "tau": 0.005}
        yield Row(f"SAC of 2019, {kind}", "SAC", "Simple1D", first, SAC | slow, 2000, 0.99)
    for kind, action in KINDS.items():
        one, two = {"action": action}, {"action": [2 * count for count in action], "step_size": 0.8}
        yield Row(f"PPO base, {kind}", "PPO", "Simple1D", one, PPO, 3000)
        yield Row(f"PPO 2-D, {kind}", "PPO", "Simple1D", two, PPO | {"n_steps": 640, "batch_size": 64}, 10000)
        yield Row(f"SAC base, {kind}", "SAC", "Simple1D", one, SAC, 1000)
        yield Row(f"SAC 2-D, {kind}", "SAC", "Simple1D", two, SAC | {"learning_starts": 2000}, 3000, 0.8)
        for number in (1, 2):
            images = one | IMAGES | {"num_visual": number}
            for share in (True, False):
                encoders = {"learning_rate": 3e-4, "share_encoder": share}
                whose = "shared" if share else "own"
                yield Row(f"PPO image ×{number}, {kind}, {whose} encoder", "PPO", "Simple1D", images, PPO | encoders, 3000)
            yield Row(f"SAC image ×{number}, {kind}", "SAC", "Simple1D", images, SAC | {"batch_size": 16, "learning_rate": 3e-4}, 1000)
    for encoder in ("resnet", "nature_cnn", "match3"):
        size = (5, 5, 5) if encoder == "match3" else (36, 36, 3)
        large = {**IMAGES, "vis_size": size, "step_size": 0.5, "action": (0, 1)}
        own = {"encoder": encoder, "learning_rate": 3e-4, "net_arch": [16], "encoder_features": 16}
        yield Row(f"PPO {encoder}", "PPO", "Simple1D", large, PPO | own, 900, 0.5)
        yield Row(f"SAC {encoder}", "SAC", "Simple1D", large, SAC | own | {"batch_size": 16, "learning_starts": 0}, 100, 0.5)
    for kind, action in KINDS.items():
        slow = {"learning_rate": 1e-3, "batch_size": 64, "n_steps": 128}
        yield Row(f"PPO LSTM, {kind}", "PPO", "Memory1D", {"action": action}, PPO | LSTM | slow, 6000)
        slow = {"learning_rate": 3e-4, "batch_size": 256, "learning_starts": 1000, "train_freq": 2}
        steps = {"step_size": 0.2 if kind == "discrete" else 0.5}
        yield Row(f"SAC LSTM, {kind}", "SAC", "Memory1D", {"action": action} | steps, SAC | LSTM | slow, 4000)
    views = {"": {}, " and a vector": {"num_vector": 1}, " and an image": {"num_visual": 1}}
    for number in (1, 2):
        for view, others in views.items():
            names = {"entities": [f"entities_{i}" for i in range(number)] if others or number > 1 else ["obs"], "learning_rate": 3e-4}
            sets = SETS | {"num_var_len": number} | others
            yield Row(f"PPO entities ×{number}{view}", "PPO", "Simple1D", sets, PPO | names, 3000)
            yield Row(f"SAC entities ×{number}{view}", "SAC", "Simple1D", sets, SAC | names | {"batch_size": 16}, 1000)
    goals = {"goals": ["vector_0"], "learning_rate": 3e-4}
    yield Row("PPO goal", "PPO", "Simple1D", {"num_vector": 2}, PPO | goals, 3000)
    for counts in ((1, 1), (2, 2), (1, 2), (2, 1)):
        far = {"action": counts, "step_size": 0.8}
        large = {"n_steps": 1024, "batch_size": 64, "learning_rate": 1e-3}
        yield Row(f"PPO hybrid {counts[0]} + {counts[1]}", "PPO", "Simple1D", far, PPO | large, 20000)
        large = {"buffer_size": 50000, "batch_size": 256, "learning_starts": 0, "n_steps": 5}
        yield Row(f"SAC hybrid {counts[0]} + {counts[1]}", "SAC", "Simple1D", far, SAC | large, 8000)
    both = {"action": (1, 1)}
    yield Row("PPO hybrid image", "PPO", "Simple1D", both | IMAGES, PPO | {"n_steps": 1024, "batch_size": 64, "learning_rate": 1e-4}, 8000)
    yield Row("SAC hybrid image", "SAC", "Simple1D", both | IMAGES, SAC | {"batch_size": 128, "learning_rate": 3e-4}, 3000)
    far = both | {"step_size": 0.5}
    slow = {"learning_rate": 1e-3, "batch_size": 64, "n_steps": 512}
    yield Row("PPO hybrid LSTM", "PPO", "Memory1D", far, PPO | LSTM | slow, 5000)
    slow = {"learning_rate": 3e-4, "batch_size": 256, "learning_starts": 1000, "train_freq": 2}
    yield Row("SAC hybrid LSTM", "SAC", "Memory1D", far, SAC | LSTM | slow, 4000)
    yield from imitation()


def imitation() -> Iterator[Row]:
    """The rows that learn from demonstrations alone, without the environment's reward."""
    gail = {"demo_path": EXPERT, "encoding_size": 32, "use_actions": True, "ignore_done": True}
    cloning = {"demo_path": EXPERT, "steps": 1000}
    alone = {"reward_signals": {"extrinsic": None, "gail": gail}, "behavioral_cloning": cloning}
    fast = alone | {"reward_signals": {"extrinsic": None, "gail": gail | {"gamma": 0.8, "learning_rate": 3e-3}}}
    for kind, action in KINDS.items():
        one = {"action": action}
        yield Row(f"PPO GAIL and cloning, {kind}", "PPO", "Simple1D", one, PPO | alone, 500, demonstrations=100)
        yield Row(f"SAC GAIL and cloning, {kind}", "SAC", "Simple1D", one, SAC | fast, 500, demonstrations=100)
        slow = fast | {"behavioral_cloning": cloning | {"steps": 1500}, "learning_rate": 1e-3}
        images = one | IMAGES | {"step_size": 0.3}
        yield Row(f"PPO GAIL and cloning, image, {kind}", "PPO", "Simple1D", images, PPO | slow, 1000, demonstrations=100)
        slow = fast | {"batch_size": 16, "learning_rate": 3e-4}
        yield Row(f"SAC GAIL and cloning, image, {kind}", "SAC", "Simple1D", one | IMAGES, SAC | slow, 500, demonstrations=100)


class Reached(pl.Callback):
    """Notes when the first five episodes in a row have a mean return above a row's threshold, and ends the run there or at the budget."""

    def __init__(self, row: Row, to_the_limit: bool) -> None:
        self.row, self.step, self.last = row, None, math.nan
        self.end = row.limit if to_the_limit else 0

    def on_train_batch_end(self, trainer: Any, model: Any, *_: Any) -> None:
        """Look at the last hundred episodes: one environment plays one after the other."""
        statistics = model.collector.statistics
        returns, lengths = list(statistics.returns), list(statistics.lengths)
        self.last = sum(returns[-20:]) / max(1, len(returns[-20:]))
        first = model.env_steps - int(statistics.running_length[0]) - sum(lengths)
        bounds = [first, *(first + steps for steps in accumulate(lengths))]
        for k in range(5, len(bounds)) if self.step is None else ():
            learned = bounds[k - 5] >= self.row.settings.get("learning_starts", 0) and bounds[k] <= self.row.limit
            if learned and sum(returns[k - 5 : k]) / 5 > self.row.threshold:
                self.step = bounds[k]
                break
        if self.step is not None and model.env_steps >= self.end:
            trainer.should_stop = True


def run(row: Row, seed: int, to_the_limit: bool) -> tuple[int | None, float]:
    """The environment step at which a seed reaches the row's threshold, or None; and the mean return of its last twenty episodes."""
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    pl.seed_everything(seed, verbose=False)
    env = lrl.EnvConfig(f"lightning_rl/{row.env}-v0", num_envs=1, kwargs=row.kwargs)
    model = getattr(lrl, row.algorithm)(env, max_env_steps=row.limit, **row.settings)
    reached = Reached(row, to_the_limit)
    off = {"evaluation": None, "checkpoint": None, "logger": False, "enable_progress_bar": False}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(None):
        if row.demonstrations:
            os.environ["MINARI_DATASETS_PATH"] = folder
            record_1d(row.demonstrations, seed, **row.kwargs).save(EXPERT)
        trainer = lrl.Trainer(default_root_dir=folder, callbacks=[reached], accelerator="cpu", torch_threads=1, **off)
        trainer.fit(model)
    return reached.step, reached.last


def main() -> int:
    """Run what is asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[""], help="parts of the names of rows")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--to_the_limit", action="store_true", help="train on, and add the mean return of the last twenty episodes")
    options = parser.parse_args()
    chosen = [row for row in rows() if any(part in row.name for part in options.rows)]
    jobs = [(row, seed, options.to_the_limit) for row in chosen for seed in options.seeds]
    head = ["row", "budget", "threshold", "reached at, each seed", "", *["return at the limit"] * options.to_the_limit]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    passed = 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        results = pool.imap(run_one, jobs)
        for row in chosen:
            steps, returns = zip(*(next(results) for _ in options.seeds), strict=True)
            passes = 3 * sum(step is not None for step in steps) >= 2 * len(steps)
            passed += passes
            cells = [row.name, f"{row.budget:,}", row.threshold, " ".join("–" if step is None else f"{step:,}" for step in steps)]
            cells += ["passes" if passes else "fails", *[" ".join(f"{last:.2f}" for last in returns)] * options.to_the_limit]
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
    print(f"\n{passed} of {len(chosen)} rows pass")
    return int(passed < len(chosen))


def run_one(job: tuple[Row, int, bool]) -> tuple[int | None, float]:
    """`run`, for a pool."""
    return run(*job)


if __name__ == "__main__":
    sys.exit(main())
