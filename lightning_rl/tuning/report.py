"""Write the results of a study: the best config, a table of its trials, and a picture."""

from __future__ import annotations

import csv
import math
from io import BytesIO, StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from lightning_rl.checkpoints.atomic import write_bytes, write_text
from lightning_rl.errors import missing_extra
from lightning_rl.settings.yaml_files import Plain, dump
from lightning_rl.tuning.search_space import shorten_path
from lightning_rl.tuning.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NEEDED_FOR_IMPORTANCES = 4
"""Complete trials; importances of fewer would be meaningless."""


def write_trials(study: Study) -> Path:
    """Write `trials.csv`: a row for each trial, with its value, the mean of all seeds if it was run again, each seed's, and settings."""
    file, confirmation, seeds = study.folder / "trials.csv", study.confirmation, study.settings.seeds
    again = {trial.number: confirmation.values(trial.number) for trial in confirmation.trials}
    paths = [dimension.path for dimension in study.space.dimensions]
    text = StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    numbered = [f"seed_{seed + 1}" for seed in range(seeds + len(confirmation.seeds) * bool(again))]
    writer.writerow(["trial", "state", "value", "confirmed", *numbered, "seconds", *map(shorten_path, paths), "error"])
    for trial in study.trials:
        runs = trial.user_attrs.get("evaluations", [])
        seed_values = [study.objective.best([value for _, value in run]) for run in runs] + [math.nan] * (seeds - len(runs))
        seed_values += again.get(trial.number, [math.nan] * (len(numbered) - seeds))
        mean = confirmation.mean(trial) if trial.number in again else None
        values = ["" if value is None or math.isnan(value) else repr(value) for value in (trial.value, mean, *seed_values)]
        parameters = [trial.params[path] for path in paths]
        error = trial.user_attrs.get("error", "") or confirmation.error(trial.number)
        writer.writerow([trial.number, trial.state.name.lower(), *values, trial.user_attrs.get("seconds", ""), *parameters, error])
    write_text(file, text.getvalue())
    return file


def describe_best(study: Study, best: FrozenTrial) -> str:
    """Describe the best trial on one line."""
    return f"trial {best.number}, {study.objective.monitor} {study.describe_value(best)}: {study.space.describe(best.params)}"


def write_best(folder: Path, line: str, config: Plain) -> None:
    """Write `best.yaml`: the config of the best trial for `fit --config`, below a line that describes it."""
    write_text(folder / "best.yaml", f"# {line}\n{dump(config)}")


def draw_study(study: Study) -> tuple[Path, str]:
    """Draw `study.png`, the values of the trials and the importances of the settings; return its path, and a remark if they are missing.

    Raises:
        SettingError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "plots", "the picture of a study") from error
    importances, remark = find_importances(study)
    height = 4 + 0.25 * len(importances)
    figure = Figure(figsize=(11, height), dpi=120, layout="constrained")
    history, bars = figure.subplots(1, 2)
    draw_history(study, history)
    names = [shorten_path(path) for path in importances][::-1]
    bars.barh(names, list(importances.values())[::-1], color="#0072B2")
    bars.set_title("importance of each setting" if importances else remark, loc="left", fontsize=None if importances else 9)
    bars.set_xlabel("share of the variance of values explained by it alone")
    bars.spines[["top", "right"]].set_visible(False)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_bytes(study.folder / "study.png", picture.getvalue())
    return study.folder / "study.png", remark


def draw_history(study: Study, axes: Axes) -> None:
    """Draw the value of each trial and the best so far."""
    marks = {TrialState.COMPLETE: ("complete", "o", "#0072B2"), TrialState.PRUNED: ("pruned", "x", "#999999")}
    for state, (name, marker, color) in marks.items():
        points = [(trial.number, trial.value) for trial in study.trials if trial.state == state and trial.value is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, color=color, label=name)
    again = [(trial.number, mean) for trial in study.confirmation.trials if math.isfinite(mean := study.confirmation.mean(trial))]
    if again:
        axes.scatter(*zip(*again, strict=True), marker="D", facecolors="none", edgecolors="#009E73", label="mean of all seeds", zorder=3)
    complete = [(trial.number, trial.value) for trial in study.trials if trial.state == TrialState.COMPLETE]
    if complete:
        numbers, values = zip(*complete, strict=True)
        best = np.maximum.accumulate(values) if study.objective.mode == "max" else np.minimum.accumulate(values)
        axes.step([*numbers, len(study.trials)], [*best, best[-1]], where="post", color="#D55E00", label="best so far")
    axes.set(xlabel="trial", ylabel=study.objective.monitor)
    axes.locator_params("x", integer=True)
    axes.set_title("value of each trial", loc="left")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def find_importances(study: Study) -> tuple[dict[str, float], str]:
    """Return the importance of each setting by PED-ANOVA (Watanabe et al. 2023), and the reason if there is none."""
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    if len(complete) < NEEDED_FOR_IMPORTANCES:
        return {}, f"importances need {NEEDED_FOR_IMPORTANCES} complete trials, and there are {len(complete)}"
    if len({trial.value for trial in complete}) == 1:
        return {}, "importances cannot be computed: all complete trials have the same value"
    try:
        importances = get_param_importances(study.study, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError) as error:
        return {}, f"importances cannot be computed: {error}"
    return importances, ""
