"""Read runs from their folders, and draw figures of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lightning_rl.errors import SettingError, missing_extra
from lightning_rl.loggers import read_rows

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette without its yellow, which is pale on white."""
AXES = {"env_steps": "environment steps", "updates": "updates"}
"""What a run counts, in words."""


def new_figure(width: float, height: float, needed_by: str) -> Any:
    """An empty figure of so many inches.

    Raises:
        SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "plots", needed_by) from error
    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def label(axes: Any, title: str, counter: str, returns: str = "mean return (sum of rewards)", key: str = "") -> None:
    """Names of the axes, thousands set apart, a quiet grid, and the legend in a place of its own below, under the words of a key."""
    axes.set_title(title, loc="left")
    axes.set_xlabel(AXES[counter])
    axes.set_ylabel(returns)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.10g}")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.figure.legend(
            handles, labels, title=key, alignment="left", loc="outside lower left", frameon=False, fontsize=9, title_fontsize=9
        )


def png(figure: Any) -> bytes:
    """The figure as a PNG file. Its texts are names that others chose: a `$` begins no formula."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_text(text.get_text().encode(errors="backslashreplace").decode())  # names of files may hold bytes that are no letters
    file = BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


EVALUATIONS, TRAINING = "evaluations", "rollout/ep_rew_mean"
TOGETHER = {"devices", "num_nodes", "precision", "strategy"}
"""Flags of the Trainer that change what is learned; the others say where a run lies and how it is watched."""
SCHEDULES = ("constant", "linear", "piecewise")
UNSAID = (None, "auto", 1, "1")


@dataclass(frozen=True, eq=False)
class Run:
    """What one run wrote.

    Args:
        folder: of the run.
        algorithm: the name of its class.
        environment: the id, without its module.
        settings: those of the algorithm and its environment by their dotted names, as they are shown; without what is null.
        seed: `seed_everything`; None if none was set.
        counter: what the run counts, `env_steps` or `updates`.
        source: where the returns come from: `evaluations`, or `rollout/ep_rew_mean` for a run without any.
        cut: what there is to say of an evaluation that was left out; nothing of none.
        counts: [K], where the returns were found, ascending.
        returns: [K], the mean over an evaluation's episodes, or the training's mean.
        clock: [L, 2], counts and the seconds that had passed.
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

    def in_training(self) -> Run:
        """The same run by the returns of its training; `counts` is empty where it has none."""
        returns = series(self.folder / "metrics.csv", read_rows(self.folder / "metrics.csv"), self.counter, TRAINING)
        return replace(self, source=TRAINING, counts=returns[:, 0], returns=returns[:, 1])

    def seconds(self, count: float) -> float:
        """The time in the first row of `metrics.csv` at that count or after it, the last one at the end; NaN if there are none."""
        if not len(self.clock):
            return float("nan")
        row = min(int(np.searchsorted(self.clock[:, 0], count)), len(self.clock) - 1)
        return float(self.clock[row, 1])

    def reaches(self, threshold: float) -> float:
        """The count at which a return first was the threshold or more; infinite if none was."""
        reached = self.counts[self.returns >= threshold]
        return float(reached[0]) if len(reached) else float("inf")


def find_runs(folders: Iterable[Path]) -> tuple[list[Run], list[Path]]:
    """The runs in folders of runs or of folders of runs, each once; and those found in a folder of runs that have no returns yet.

    Raises:
        SettingError: no such folder, no run in it, or a run that was named has no returns.
    """
    runs: dict[Path, Run] = {}
    empty: list[Path] = []
    for folder in folders:
        if folder.is_file():
            where = folder.parent if is_run(folder.parent) else "or one of runs such as runs/PPO/CartPole-v1"
            raise SettingError(f"{folder} is a file; name the folder of a run, {where}")
        if not folder.is_dir():
            raise SettingError(f"{folder}: there is no such folder; name the folder of a run, or one of runs such as runs/PPO/CartPole-v1")
        found = [folder] if is_run(folder) else sorted((path.parent for path in folder.rglob("config.yaml")), key=natural)
        new = [read_run(path) for path in found if is_run(path) and path.resolve() not in runs]
        if not any(is_run(path) for path in found):
            raise SettingError(f"{folder}: there is no run in it, a folder with config.yaml and evaluations.csv or metrics.csv")
        without = [run.folder for run in new if not len(run.counts)]
        if without and (found == [folder] or len(without) == len(found)):
            raise SettingError(f"{without[0]}: neither evaluations.csv nor metrics.csv has a return in it")
        empty += [path for path in without if path not in empty]
        runs |= {run.folder.resolve(): run for run in new if len(run.counts)}
    return list(runs.values()), empty


def is_run(folder: Path) -> bool:
    """Whether a run lies there."""
    return (folder / "config.yaml").is_file() and any((folder / name).is_file() for name in ("evaluations.csv", "metrics.csv"))


def natural(path: Path) -> list[tuple[int, str]]:
    """A key that puts version_10 behind version_9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def read_run(folder: Path) -> Run:
    """The run in a folder; `counts` is empty if it has no returns yet.

    Raises:
        SettingError: a file that no run wrote.
    """
    config = read_config(folder / "config.yaml")
    model, trainer = config["model"], config.get("trainer") or {}
    settings = dict(flat(model.get("init_args") or {}))
    settings |= {f"trainer.{name}": shown(trainer[name]) for name in TOGETHER & trainer.keys() if trainer[name] not in UNSAID}
    evaluations, metrics = table(folder / "evaluations.csv", "return"), table(folder / "metrics.csv")
    counter = next(iter((evaluations or metrics or [{"env_steps": ""}])[0]))
    returns = series(folder / "evaluations.csv", evaluations, counter, "return")
    cut = cut_off(evaluations, counter, (config.get("evaluation") or {}).get("episodes"))
    returns = returns[:-1] if cut else returns
    source = EVALUATIONS if len(returns) else TRAINING
    returns = returns if len(returns) else series(folder / "metrics.csv", metrics, counter, TRAINING)
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


def read_config(file: Path) -> dict[str, Any]:
    """The settings that a run wrote."""
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
        model, trainer = config["model"], config.get("trainer") or {}
        if isinstance(model["class_path"], str) and all(
            isinstance(each, dict) for each in (model.get("init_args") or {}, trainer, config.get("evaluation") or {})
        ):
            return config
    except (OSError, ValueError, TypeError, KeyError, AttributeError, yaml.YAMLError):
        pass
    raise SettingError(f"{file} does not say which algorithm ran: it is not what a run wrote")


def table(file: Path, needed: str | None = None) -> list[dict[str, str]]:
    """The rows of a CSV file; none if it does not exist or not even its first line is whole.

    Raises:
        SettingError: something else than a run wrote.
    """
    try:
        rows, begin = read_rows(file), file.read_bytes()[:100].decode(errors="replace") if file.exists() else ""
    except OSError as error:
        raise SettingError(f"{file}: {error.strerror}; it is not what a run wrote") from error
    first = re.split(r"[,\r\n]", begin)[0]
    if first not in AXES and (first != begin or not any(name.startswith(first) for name in AXES)):
        raise SettingError(f"{file} does not begin with the column {' or '.join(AXES)}: it is not what a run wrote")
    if rows and needed is not None and needed not in rows[0]:
        raise SettingError(f"{file} has no column {needed}: it is not what a run wrote")
    return rows


def cut_off(evaluations: list[dict[str, str]], counter: str, wanted: Any) -> str:
    """What is wrong with the last evaluation: a killed process left fewer episodes than of the one before, and than it `wanted`."""
    numbers = sorted(Counter(float(row[counter]) for row in evaluations if row["return"]).items())
    (_, before), (count, last) = numbers[-2:] if len(numbers) > 1 else [(0, 0)] * 2
    if last >= before or last == wanted:
        return ""
    episodes = "1 episode" if last == 1 else f"{last} episodes"
    return f"has {episodes} of its last evaluation, at {count:,.0f}, and {before} of the one before: it is left out."


def series(file: Path, rows: list[dict[str, str]], counter: str, column: str) -> np.ndarray:
    """[K, 2]: each count of a CSV file, ascending, and the mean of a column over its rows; rows that are empty there are left out."""
    try:
        found = np.array([(float(row[counter]), float(row[column])) for row in rows if row.get(column)]).reshape(-1, 2)
    except (ValueError, KeyError) as error:
        raise SettingError(f"{file}: {error}; it is not what a run wrote") from error
    if not np.isfinite(found).all():
        raise SettingError(f"{file}: the column {column} holds numbers that are not finite")
    counts, places = np.unique(found[:, 0], return_inverse=True)
    return np.stack([counts, np.bincount(places, found[:, 1]) / np.bincount(places)], axis=1)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings inside settings by their dotted names; an object is named by its class."""
    for name, value in settings.items():
        key = f"{prefix}{name}".removesuffix(".class_path")
        if isinstance(value, Mapping) and value.get("schedule") in SCHEDULES:
            yield key, schedule(value)
        elif isinstance(value, Mapping):
            yield from flat(value, prefix if name == "init_args" else f"{key}.")
        elif value is not None:
            yield key, shown(value).rpartition(".")[2] if name == "class_path" else shown(value)


def schedule(setting: Mapping[str, Any]) -> str:
    """In short: `linear 0.001→0`."""
    if setting["schedule"] == "constant":
        return shown(setting.get("value"))
    if setting["schedule"] == "linear":
        return f"linear {shown(setting.get('start'))}→{shown(setting.get('end', 0.0))}"
    return "piecewise " + "→".join(f"{shown(value)}@{shown(at)}" for at, value in setting.get("points") or ())


def shown(value: Any) -> str:
    """A setting as it is read: whole numbers without a fraction and with their thousands set apart."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
