"""The table of what a peer reached on this machine: a row a seed, one file a config in `benchmarks/results/peers/`."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results" / "peers"
EVALUATIONS, EPISODES = 20, 100
"""Evaluations of a run, and episodes that its best weights play."""


def measure_rows(description: str, columns: tuple[str, ...], measure: Callable[[str, int, Path], tuple[object, ...]]) -> None:
    """Measure the rows of the command line that are not there yet.

    Args:
        description: of the program, for `--help`.
        columns: of a row.
        measure: returns the row of a config and a seed, whose run lies in a folder.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="ALGORITHM/ENVIRONMENT, as our configs are named")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="(1 2 3)")
    parser.add_argument("--folder", type=Path, default=Path("peer_runs"), help="where runs lie (peer_runs)")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for config in options.configs:
        file = RESULTS / f"{config.replace('/', '_')}.csv"
        rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
        for seed in options.seeds:
            if str(seed) in {row["seed"] for row in rows}:
                continue
            found = measure(config, seed, options.folder.resolve() / config / f"seed_{seed}")
            rows.append(row := dict(zip(columns, map(str, found), strict=True)))
            print(f"{config} seed {seed}: {row['return_mean']} in {row['minutes']} min", flush=True)
            with file.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, columns, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
