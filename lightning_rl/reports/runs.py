"""Read the files that runs wrote into their folders."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import yaml

from lightning_rl.envs.config import TASK
from lightning_rl.errors import SettingError
from lightning_rl.loggers import read_rows
from lightning_rl.settings.yaml_files import Plain

AXES = {"env_steps": "environment steps", "updates": "updates"}
"""Names of what a run counts."""
EVALUATIONS, TRAINING = "evaluations", "rollout/ep_rew_mean"
LEARNING_FLAGS = {"devices", "num_nodes", "precision", "strategy"}
"""Flags of the Trainer that change what is learned; the others set where a run is stored and how it is watched."""
DEFAULT_FLAGS = (None, "auto", 1, "1")
SCHEDULES = ("constant", "linear", "piecewise")
NOT_OURS = "it was not written by a run"


@dataclass(frozen=True, eq=False)
class Run:
    """The results of one run.

    Args:
        environment: the id, without its module.
        settings: those of the algorithm and its environment by their dotted names, as text; without null values.
        seed: `seed_everything`; None if none was set.
        counter: what the run counts, `env_steps` or `updates`.
        source: where the returns come from: `evaluations`, or `rollout/ep_rew_mean` for a run without any.
        cut: a note about an evaluation that is left out; empty if there is none.
        counts: [K], the counts at which there are returns, ascending.
        returns: [K], the mean over an evaluation's episodes, or the mean of training.
        clock: [L, 2], counts and the elapsed seconds.
    """

    folder: Path
    algorithm: str
    environment: str
    settings: dict[str, str]
    seed: int | None
    counter: str
    source: str
    cut: str
    counts: np.ndarray
    returns: np.ndarray
    clock: np.ndarray

    def in_training(self) -> Self:
        """Return the same run with the returns of its training; `counts` is empty if it has none."""
        returns = series(self.folder / "metrics.csv", read_rows(self.folder / "metrics.csv"), self.counter, TRAINING)
        return replace(self, source=TRAINING, counts=returns[:, 0], returns=returns[:, 1])

    def task(self) -> dict[str, str]:
        """Return the settings that define the environment's task, without those that are off."""
        task_names = {f"env.{name}" for name in TASK}
        given = {name: value for name, value in self.settings.items() if ".".join(name.split(".")[:2]) in task_names}
        return {name: value for name, value in given.items() if value not in ("False", "[]") or name.count(".") > 1}

    def seconds(self, count: float) -> float:
        """Return the elapsed time in the first row of `metrics.csv` at or after a count, or else in the last row; NaN without rows."""
        if not len(self.clock):
            return float("nan")
        row = min(int(np.searchsorted(self.clock[:, 0], count)), len(self.clock) - 1)
        return float(self.clock[row, 1])

    def reaches(self, threshold: float) -> float:
        """Return the first count at which a return is at least the threshold; infinity if there is none."""
        reached = self.counts[self.returns >= threshold]
        return float(reached[0]) if len(reached) else float("inf")


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    """Return the runs in folders, which are runs or contain runs, each once, and the folders of runs that have no returns yet.

    Raise `SettingError` if a folder does not exist, cannot be read or contains no run, or if a run that was named has no returns.
    """
    runs: dict[Path, Run] = {}
    empty: list[Path] = []
    for folder in folders:
        try:
            paths = find_folders(folder)
        except OSError as error:
            raise SettingError(f"{folder} cannot be read: {error.strerror}") from error
        new = [read_run(path) for path in paths if path.resolve() not in runs]
        without = [run.folder for run in new if not len(run.counts)]
        if without and (paths == [folder] or len(without) == len(paths)):
            raise SettingError(f"{without[0]}: neither evaluations.csv nor metrics.csv has a return in it")
        empty += [path for path in without if path not in empty]
        runs |= {run.folder.resolve(): run for run in new if len(run.counts)}
    return list(runs.values()), empty


def find_folders(folder: Path) -> list[Path]:
    """Return a folder if it is that of a run, or else the folders of runs in it. Raise `SettingError` if there are none."""
    if folder.is_file():
        where = folder.parent if is_run(folder.parent) else "or a folder of runs such as runs/PPO/CartPole-v1"
        raise SettingError(f"{folder} is a file; name the folder of a run, {where}")
    if not folder.is_dir():
        raise SettingError(f"{folder}: there is no such folder; name the folder of a run, or a folder of runs such as runs/PPO/CartPole-v1")
    folders = [folder] if is_run(folder) else sorted(filter(is_run, (path.parent for path in folder.rglob("config.yaml"))), key=natural)
    if not folders:
        raise SettingError(f"{folder}: there is no run in it, a folder with config.yaml and evaluations.csv or metrics.csv")
    return folders


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and any((folder / name).is_file() for name in ("evaluations.csv", "metrics.csv"))


def natural(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that puts version_10 behind version_9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def read_run(folder: Path) -> Run:
    """Read the run in a folder; `counts` is empty if it has no returns yet. Raise `SettingError` for a file not written by a run."""
    config = read_config(folder / "config.yaml")
    model, trainer = config["model"], config.get("trainer") or {}
    settings = dict(flatten(model.get("init_args") or {}))
    settings |= {
        f"trainer.{name}": as_text(trainer[name]) for name in LEARNING_FLAGS & trainer.keys() if trainer[name] not in DEFAULT_FLAGS
    }
    evaluations, metrics = read_table(folder / "evaluations.csv", "return"), read_table(folder / "metrics.csv")
    counter = next(iter((evaluations or metrics or [{"env_steps": ""}])[0]))
    source, returns = EVALUATIONS, series(folder / "evaluations.csv", evaluations, counter, "return")
    cut = check_last(evaluations, counter, (config.get("evaluation") or {}).get("episodes"))
    if cut:
        returns = returns[:-1]
    if not len(returns):
        source, returns = TRAINING, series(folder / "metrics.csv", metrics, counter, TRAINING)
    return Run(
        folder=folder,
        algorithm=str(model["class_path"]).rpartition(".")[2],
        environment=settings.pop("env.id", folder.resolve().parent.name).rpartition(":")[2],
        settings=settings,
        seed=config.get("seed_everything"),
        counter=counter,
        source=source,
        cut=cut and f"{folder} {cut}",
        counts=returns[:, 0],
        returns=returns[:, 1],
        clock=series(folder / "metrics.csv", metrics, counter, "time/time_elapsed"),
    )


def read_config(file: Path) -> Plain:
    """Read the settings of a run."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        model = config["model"]
        sections = (model.get("init_args"), config.get("trainer"), config.get("evaluation"))
        is_named = isinstance(model["class_path"], str) and isinstance(config.get("seed_everything"), int | None)
        if is_named and all(isinstance(section or {}, dict) for section in sections):
            return config
    except OSError as error:
        raise SettingError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, yaml.YAMLError):
        pass
    raise SettingError(f"{file} does not name the algorithm that ran, or its seed: {NOT_OURS}")


def read_table(file: Path, needed: str | None = None) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if it does not exist or its first line is incomplete. Raise `SettingError` for other files."""
    try:
        rows, begin = read_rows(file), file.read_bytes()[:100].decode(errors="replace") if file.exists() else ""
    except OSError as error:
        raise SettingError(f"{file} cannot be read: {error.strerror}") from error
    first = re.split(r"[,\r\n]", begin)[0]
    if first not in AXES and (first != begin or not any(name.startswith(first) for name in AXES)):
        raise SettingError(f"{file} does not begin with the column {' or '.join(AXES)}: {NOT_OURS}")
    if rows and needed is not None and needed not in rows[0]:
        raise SettingError(f"{file} has no column {needed}: {NOT_OURS}")
    return rows


def check_last(evaluations: list[dict[str, str]], counter: str, wanted: object) -> str:
    """Describe an incomplete last evaluation, left by a killed process; empty if it is complete.

    It is incomplete if it has fewer episodes than `wanted` and fewer than the previous evaluation, if there is one.
    """
    numbers = sorted(Counter(float(row[counter]) for row in evaluations if row["return"]).items())
    if not numbers:
        return ""
    count, last = numbers[-1]
    before = numbers[-2][1] if len(numbers) > 1 else wanted
    if not isinstance(before, int) or last >= before or last == wanted:
        return ""
    episodes = "1 episode" if last == 1 else f"{last} episodes"
    if len(numbers) == 1:
        return f"has {episodes} of the {wanted} of its only evaluation, at {count:,.0f}: it is left out."
    return f"has {episodes} of its last evaluation, at {count:,.0f}, and {before} of the one before: it is left out."


def series(file: Path, rows: list[dict[str, str]], counter: str, column: str, gaps: bool = False) -> np.ndarray:
    """Return [K, 2]: each count of a CSV file, ascending, and the mean of a column over its rows; empty cells are left out.

    Raises `SettingError` for numbers that are not finite, unless there may be gaps: then they are NaN.
    """
    try:
        points = np.array([(float(row[counter]), float(row[column])) for row in rows if row.get(column)]).reshape(-1, 2)
    except (ValueError, KeyError) as error:
        raise SettingError(f"{file}: {error}; {NOT_OURS}") from error
    if gaps:
        points[~np.isfinite(points)] = np.nan
    elif not np.isfinite(points).all():
        raise SettingError(f"{file}: the column {column} holds numbers that are not finite")
    counts, places = np.unique(points[:, 0], return_inverse=True)
    return np.stack([counts, np.bincount(places, points[:, 1]) / np.bincount(places)], axis=1)


def flatten(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings by their dotted names, as text; an object is represented by its class name."""
    for name, value in settings.items():
        key = f"{prefix}{name}".removesuffix(".class_path")
        if isinstance(value, Mapping) and value.get("schedule") in SCHEDULES:
            yield key, schedule_as_text(value)
        elif isinstance(value, Mapping):
            yield from flatten(value, prefix if name == "init_args" else f"{key}.")
        elif value is not None:
            yield key, as_text(value).rpartition(".")[2] if name == "class_path" else as_text(value)


def schedule_as_text(setting: Mapping[str, object]) -> str:
    """Return a short form such as `linear 0.001→0`."""
    if setting["schedule"] == "constant":
        return as_text(setting.get("value"))
    if setting["schedule"] == "linear":
        return f"linear {as_text(setting.get('start'))}→{as_text(setting.get('end', 0.0))}"
    points = setting.get("points")
    if not isinstance(points, list) or not all(isinstance(point, list) and len(point) == 2 for point in points):
        return f"piecewise {as_text(points)}"
    return "piecewise " + "→".join(f"{as_text(value)}@{as_text(at)}" for at, value in points)


def as_text(value: object) -> str:
    """Return a setting as text: integers without a fraction and with thousands separators."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
