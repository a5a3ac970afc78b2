"""What one of two ranks does in `test_distributed.py`: cases of the table, one after the other, for the price of one start.

`python -m tests.two_ranks FOLDER CASE...`, with LOCAL_RANK and what else torch.distributed asks for in the environment.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_rl import (
    A2C,
    DQN,
    IMPALA,
    IQL,
    PPO,
    PQN,
    SAC,
    TD3,
    TRPO,
    BehavioralCloning,
    CheckpointConfig,
    CrossQ,
    EvaluationConfig,
    EvolutionStrategies,
    Trainer,
    Video,
)
from lightning_rl.errors import LostRankError, SettingError
from tests.algorithms.test_evolution import CARTPOLE as CARTPOLE_JOBS
from tests.algorithms.test_evolution import learned
from tests.experts import at_random
from tests.fitting import Rows, fit, tiny

CARTPOLE, PENDULUM = {"id": "CartPole-v1"}, {"id": "Pendulum-v1", "max_episode_steps": 30}
SHORT = {"normalize_obs": "running", "normalize_reward": True}
REPLAYS = {"steps_per_iteration": 32, "learning_starts": 64}
LESSONS = {
    "curriculum": [
        {"name": "short", "value": 0.3, "completion_criteria": {"threshold": 5, "min_lesson_length": 4, "require_reset": True}},
        {"name": "middle", "value": 1.0, "completion_criteria": {"measure": "progress", "threshold": 0.8}},
        {"name": "long", "value": 2.0},
    ]
}
GAIL = {"reward_signals": {"gail": {"demo_path": at_random("CartPole-v1", "{}"), "use_vail": True, "normalize": True}}}
FROZEN = {"normalize_obs": "frozen", "normalize_obs_steps": 64, "max_env_steps": 704}
RND = {"reward_signals": {"rnd": {}}, "reward_signal_steps_per_update": 3}
"""Rows that only reset come at different times on the two ranks: neither may wait for the other."""
CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "PPO": (PPO, CARTPOLE | {"parameters": {"length": LESSONS}}, {"batch_size": 16, "target_kl": 0.01, **SHORT}),
    "A2C": (A2C, PENDULUM, {"normalize_advantage": True, **SHORT}),
    "IMPALA": (IMPALA, CARTPOLE | {"num_envs": 1}, {"actors": {"num_actors": 2, "backend": "in_process"}, **SHORT}),
    "SAC": (SAC, PENDULUM, REPLAYS | SHORT),
    "SAC of smooth noise": (SAC, PENDULUM, REPLAYS | {"use_sde": True, "sde_sample_freq": 5}),
    "SAC of choices": (SAC, CARTPOLE, REPLAYS | GAIL),
    "PQN": (PQN, CARTPOLE, {"batch_size": 16, **SHORT}),
    "TRPO": (TRPO, CARTPOLE, {"batch_size": 16, **SHORT}),
    "CrossQ": (CrossQ, PENDULUM, REPLAYS | {"critic_net_arch": [8]}),
    "DQN": (DQN, CARTPOLE, REPLAYS | {"replay": {"prioritized": True}, "double": True} | FROZEN),
    "DQN that resets": (DQN, CARTPOLE | {"num_envs": 1, "autoreset": "NEXT_STEP"}, REPLAYS | RND),
    "TD3": (TD3, PENDULUM, REPLAYS | {"n_steps": 2}),
    "IQL": (IQL, PENDULUM, {"normalize_obs": "running", "updates_per_iteration": 2, "max_updates": 40}),
    "BehavioralCloning": (BehavioralCloning, CARTPOLE, {"normalize_obs": "running", "updates_per_iteration": 2, "max_updates": 40}),
}
"""Runs of 20 iterations: 640 environment steps of two ranks with two environments each, or 40 updates. PPO learns from whole rollouts."""
ALONE = ("PPO", "SAC")
"""Those that one rank begins and two go on with, and the other way round."""


def build(case: str, seed: int = 1, **more: Any) -> Any:
    """The model of a case, its weights by the seed alone."""
    algorithm, env, settings = CASES[case]
    settings = {"log_interval": 64, f"max_{algorithm.counter}": 640} | settings | more
    return tiny(algorithm, env=env | settings.pop("env", {}), seed=seed, **settings)


def trainer(root: Path, algorithm: Any, ranks: int, *callbacks: pl.Callback) -> Trainer:
    """As a user would train."""
    every = f"every_n_{algorithm.counter}"
    return Trainer(
        **({"devices": ranks, "strategy": "ddp"} if ranks > 1 else {}),
        default_root_dir=root,
        accelerator="cpu",
        logger=Rows(),
        enable_progress_bar=False,
        evaluation=EvaluationConfig(**{every: algorithm.length // 3}, episodes=3, num_envs=2, max_episode_steps=20),
        checkpoint=CheckpointConfig(**{every: algorithm.length // 2}),
        callbacks=list(callbacks),
        torch_threads=1,
    )


class SendAt(pl.Callback):
    """Sends this process a signal in an iteration."""

    def __init__(self, iteration: int, number: int = signal.SIGTERM) -> None:
        self.iteration, self.number = iteration, number

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.iteration:
            os.kill(os.getpid(), self.number)


@contextmanager
def first_update(model: Any, batch: Any = None, noise: Any = ()):
    """What the first update learns from, draws, and its gradients; of a batch and with noise that are given, if they are."""
    seen: dict[str, Any] = {"batches": [], "noise": [], "gradients": []}
    given, learning = list(noise), [True]
    normal, end, step = torch.Tensor.normal_, model.end_update, model.training_step

    def on_before_optimizer_step(optimizer: Any) -> None:
        if learning[0]:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            seen["gradients"].append(torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]))

    def drawn(tensor: Any, *arguments: Any, generator: Any = None) -> Any:
        tensor = normal(tensor, *arguments, generator=generator)
        if learning[0] and generator is model.noise:
            if given:
                tensor.copy_(given.pop(0))
            seen["noise"].append(tensor.clone())
        return tensor

    def ended(minibatch: Any) -> None:
        learning[0] = False
        end(minibatch)

    def kept(batches: Any) -> Any:
        for each in batches:
            if learning[0]:
                seen["batches"].append(copied(each))
                seen["state"] = {name: value.clone() for name, value in model.state_dict().items()}
            yield each

    def training_step(batches: Any, batch_idx: int) -> None:
        rollout = hasattr(batches, "_fields")
        if batch is not None:
            model.trainer.should_stop = True
            batches = batch if rollout else iter([batch])
        if rollout:
            (batches,) = kept([batches])
        step(batches if rollout else kept(batches), batch_idx)

    torch.Tensor.normal_ = drawn
    model.end_update, model.training_step, model.on_before_optimizer_step = ended, training_step, on_before_optimizer_step
    try:
        yield seen
    finally:
        torch.Tensor.normal_ = normal


def copied(batch: Any) -> Any:
    """A batch that does not change, though the collector's arrays do."""
    leaf = lambda each: each.clone() if isinstance(each, torch.Tensor) else each  # noqa: E731
    return batch._replace(**{name: leaf(value) for name, value in batch._asdict().items() if name != "experience"})


def state_of(model: Any, trainer: Trainer) -> dict[str, Any]:
    """What there is to compare at the end of a run."""
    assert model.trainer is trainer
    return {
        "weights": {name: value.clone() for name, value in model.state_dict().items()},
        "counts": (model.env_steps, model.updates, model.episodes, trainer.global_step),
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "folder": str(trainer.run_folder),
    }


class Episodes(pl.Callback):
    """What this rank's own episodes came to when the run ended, and which lessons it held in each iteration."""

    def __init__(self) -> None:
        self.mean: dict[str, float] = {}
        self.lessons: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mean = pl_module.collector.statistics.metrics()
        self.lessons += [dict(each.lessons) for each in trainer.callbacks if hasattr(each, "lessons") and each is not self]


class Filmed(Video):
    """Tells which videos this rank made."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.names: list[str] = []

    def record(self, trainer: Any, algorithm: Any, files: list[Path]) -> None:
        super().record(trainer, algorithm, files)
        self.names += [file.name for file in files if file.exists()]


def main(folder: Path, cases: list[str]) -> None:
    """Some cases, those of `ALONE` among them, and a file of what came of each."""
    rank = int(os.environ["LOCAL_RANK"])
    for case in cases:
        found: dict[str, Any] = {}
        pl.seed_everything(1, verbose=False)
        model, episodes = build(case), Episodes()
        filmed = [Filmed(max_episode_steps=3)] if case == "PPO" else []
        whole = trainer(folder / case / "whole", model, 2, episodes, *filmed)
        with first_update(model) as found["first"]:
            whole.fit(model)
        found["whole"] = state_of(model, whole) | {"mean": episodes.mean, "lessons": episodes.lessons}
        found["films"] = [name for each in filmed for name in each.names]

        parts = folder / case / "parts"
        model = build(case)
        try:
            trainer(parts, model, 2, *([SendAt(7)] if rank else [])).fit(model)  # the other rank is asked to stop
        except SystemExit as left:
            found["status"] = left.code
        if rank == 0:
            shutil.copytree(parts, folder / case / "stopped")
        model = build(case, seed=2)
        pl.seed_everything(9, verbose=False)
        continued = trainer(parts, model, 2)
        continued.fit(model, ckpt_path="last")
        found["parts"] = state_of(model, continued)

        if case in ALONE:
            model = build(case, seed=3)
            after = trainer(folder / case / "alone", model, 2)
            after.fit(model, ckpt_path="last")
            found["alone"] = state_of(model, after)
        torch.save(found, folder / f"{case}.{rank}.pt")
    os.environ.pop("PL_GLOBAL_SEED")  # Lightning would seed the ranks by it again
    model = tiny(EvolutionStrategies, "CartPole-v1", **CARTPOLE_JOBS)  # each rank does its share of the jobs
    told: dict[str, Any] = {}
    model.on_train_end = lambda: told.update(learned=learned(model), steps=(model.collector.env_steps, model.env_steps))
    fit(model, devices=2, strategy="ddp")
    torch.save(told, folder / f"jobs.{rank}.pt")
    rows = Rows()
    poisoned = {"id": "tests.poisoned:Poisoned-v0", "kwargs": {"door": "observation" if rank else "none", "value": math.nan, "at": 5}}
    fit(tiny(A2C, env=poisoned, on_nan="skip_update"), devices=2, strategy="ddp", logger=rows)
    print("REPLACED", rows.rows[-1][1]["rollout/replaced_steps"] if rows.rows else None)
    try:  # a folder that only one of them sees
        trainer(folder / ("nowhere" if rank else "PPO/stopped"), model := build("PPO"), 2).fit(model, ckpt_path="last")
    except SettingError as error:
        print("REFUSED", error)
    try:
        lost = build("PPO")
        trainer(folder / "lost", lost, 2, *([SendAt(3, signal.SIGKILL)] if rank else [])).fit(lost)
    except LostRankError as error:
        print("LOST", error)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
