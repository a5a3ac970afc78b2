"""Run folders written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def write_run(folder: Path, evaluations: dict[int, list[float]] | None = None, **others: Any) -> Path:
    """A run's folder: its evaluations as returns of episodes by environment steps.

    `others`: `seed`, `algorithm`, `env`, `counter`, `trainer`, `training` and `seconds` by environment steps; what is left is a setting.
    """
    folder.mkdir(parents=True)
    seed, algorithm, env = others.pop("seed", 0), others.pop("algorithm", "PPO"), others.pop("env", "CartPole-v1")
    counter, trainer = others.pop("counter", "env_steps"), others.pop("trainer", {})
    training, seconds = others.pop("training", {}), others.pop("seconds", {})
    settings = {"env": {"id": env, "num_envs": 8, "kwargs": {}}, "learning_rate": 0.0003, "memory": None, **others}
    model = {"class_path": f"lightning_rl.{algorithm}", "init_args": settings}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model, "trainer": trainer, "seed_everything": seed}, sort_keys=False))
    if evaluations is not None:
        rows = [f"{count},{10_000 + k},{value},9," for count, values in evaluations.items() for k, value in enumerate(values)]
        (folder / "evaluations.csv").write_text("\n".join([f"{counter},seed,return,length,success", *rows, ""]))
    if training or seconds:
        rows = [f"{count},{training.get(count, '')},{seconds.get(count, '')}" for count in sorted(training | seconds)]
        (folder / "metrics.csv").write_text("\n".join([f"{counter},rollout/ep_rew_mean,time/time_elapsed", *rows, ""]))
    return folder
