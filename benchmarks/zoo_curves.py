"""Keep the learning curves of the zoo's runs, and draw them for docs/zoo.md.

    python benchmarks/zoo_curves.py [--folder zoo_runs]

Writes the evaluations of each run in the folder whose row `zoo.py run` measured to `benchmarks/results/curves/<algorithm>_<config>.csv`,
and draws a panel for each config that has such a file: a line for each seed, and what the reference reached. A training evaluation plays a
few episodes and so is noisier than the returns of the table, which are of the best checkpoint over 100 new ones.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import yaml
from references import REFERENCES

from lightning_rl.reports.figures import COLORS, label, new_figure, png
from lightning_rl.reports.runs import Run, read_run
from zoo import RESULTS, ROOT, results_file, rows_of

CURVES = RESULTS / "curves"
PICTURE = ROOT / "docs" / "images" / "zoo_curves.png"
COLUMNS = ("seed", "counted", "count", "return")
PANELS_PER_ROW = 4
Curves = dict[str, np.ndarray]
"""Of each seed, counts and returns `[E, 2]`."""


def has_ended(run: Run, env_steps: str) -> bool:
    """Return whether a run is the one whose row says how many steps it made; one that is measured again may have been interrupted."""
    length = float(env_steps)
    if run.counter == "updates":
        length = yaml.safe_load((run.folder / "config.yaml").read_text("utf-8"))["model"]["init_args"]["max_updates"]
    return len(run.counts) > 0 and run.counts[-1] == length


def keep(config: str, folder: Path) -> None:
    """Write the curves of a config's measured runs that lie in a folder; those of other seeds stay."""
    measured = {row["seed"]: row["env_steps"] for row in rows_of(config)}
    found = {run.name.removeprefix("seed_"): read_run(run) for run in (folder / config).rglob("seed_*")}
    counted, curves = read(config)
    for seed in measured.keys() & found.keys():
        if not has_ended(found[seed], measured[seed]):
            continue
        counted = found[seed].counter
        curves[seed] = np.stack([found[seed].counts, found[seed].returns], 1)
    if curves:
        CURVES.mkdir(parents=True, exist_ok=True)
        with (CURVES / results_file(config).name).open("w", newline="") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(COLUMNS)
            for seed in sorted(curves, key=int):
                writer.writerows([seed, counted, int(count), f"{value:.6g}"] for count, value in curves[seed])


def read(config: str) -> tuple[str, Curves]:
    """Return what the curves of a config count, and the curves by their seeds; none if none are kept."""
    file = CURVES / results_file(config).name
    points: dict[str, list[tuple[float, float]]] = defaultdict(list)
    counted = "env_steps"
    for row in csv.DictReader(file.read_text().splitlines()) if file.exists() else ():
        counted = row["counted"]
        points[row["seed"]].append((float(row["count"]), float(row["return"])))
    return counted, {seed: np.array(curve) for seed, curve in points.items()}


def draw(configs: list[str]) -> None:
    """Draw a panel for each config."""
    rows = -(-len(configs) // PANELS_PER_ROW)
    figure = new_figure(3.1 * PANELS_PER_ROW, 2.4 * rows, "zoo_curves.py")
    panels = list(figure.subplots(rows, PANELS_PER_ROW, squeeze=False).flat)
    for panel, config in zip(panels, configs, strict=False):
        counted, curves = read(config)
        for color, curve in zip(COLORS, curves.values(), strict=False):
            panel.plot(*curve.T, color=color, linewidth=1.2, marker="." if len(curve) == 1 else None)
        if (reference := REFERENCES[config]) is not None:
            panel.axhline(reference.mean, color="#777777", linestyle="--", linewidth=1)
        label(panel, "", counted, returns="")
        panel.set_title(config, loc="left", fontsize=9)
        panel.tick_params(labelsize=7)
        panel.xaxis.label.set_size(8)
        panel.locator_params(axis="x", nbins=4)
    for panel in panels[len(configs) :]:
        panel.set_visible(False)
    PICTURE.write_bytes(png(figure))
    print(f"{PICTURE.relative_to(ROOT)}: {len(configs)} configs, {PICTURE.stat().st_size:,} bytes")


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("zoo_runs"), help="where runs lie (zoo_runs)")
    folder = parser.parse_args().folder
    for config in REFERENCES:
        keep(config, folder)
    draw([config for config in REFERENCES if read(config)[1]])


if __name__ == "__main__":
    main()
