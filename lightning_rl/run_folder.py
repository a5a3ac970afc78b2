"""Where runs lie: `<root>/<algorithm>/<environment>/version_<n>/`, and the files of one that are not a logger's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pytorch_lightning.utilities.rank_zero import rank_zero_only

from lightning_rl.callbacks.csv_logger import read_rows, write_rows
from lightning_rl.envs.config import EnvConfig


def choose_run(folder: Path, ckpt_path: str | Path | None) -> tuple[Path, str | Path | None]:
    """The folder of a run and the checkpoint that it continues.

    `last` is the newest run below `folder` that saved a `last.ckpt`, in its own folder; a new run's folder and None if there is none.
    """
    numbers = sorted(int(path.name[8:]) for path in folder.glob("version_*") if path.name[8:].isdecimal())
    runs = [folder / f"version_{number}" for number in numbers]
    if ckpt_path == "last":
        for run in reversed(runs):
            if (run / "checkpoints" / "last.ckpt").exists():
                return run, run / "checkpoints" / "last.ckpt"
        ckpt_path = None
    return folder / f"version_{numbers[-1] + 1 if numbers else 0}", ckpt_path


def environment_name(env: Any) -> str:
    """The environment's id without its module; the class or function of a ready environment."""
    if isinstance(env, EnvConfig):
        return env.id.rpartition(":")[2]
    spec = getattr(env, "spec", None)
    return spec.id if spec is not None else getattr(env, "__name__", type(env).__name__).strip("<>")


@rank_zero_only
def write_config(run: Path, config: dict[str, Any]) -> None:
    """Make the run's folder and write `config.yaml`: `fit --config` repeats the run."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


@rank_zero_only
def cut_back_evaluations(run: Path, env_steps: int) -> None:
    """Forget evaluations beyond a checkpoint from which the run continues: they will be made again."""
    file = run / "evaluations.csv"
    rows = read_rows(file)
    if rows:
        write_rows(file, list(rows[0]), [row for row in rows if int(row["env_steps"]) <= env_steps])
