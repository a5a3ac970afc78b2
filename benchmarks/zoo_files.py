"""Import every entry of rl-baselines3-zoo's hyperparameter files, and train each for a short time.

    git clone --depth 1 https://github.com/DLR-RM/rl-baselines3-zoo
    python benchmarks/zoo_files.py rl-baselines3-zoo/hyperparams [--files ppo.yml …] [--seconds 60] [--out zoo_files.csv]

Each entry trains for one iteration in a process of its own, with at most two environments, rollouts of 64 steps, and a small replay buffer.
Entries of all games are tried with Pong. Writes a row for each entry (imported, trained, refused and why) and prints a table of the files.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml

from lightning_rl.errors import SettingError
from lightning_rl.importers.zoo import import_zoo
from lightning_rl.settings.yaml_files import Loader

COLUMNS = ("file", "entry", "result", "why")
ON_POLICY = {"n_steps": 64, "batch_size": 64, "n_epochs": 1}
OFF_POLICY = {"buffer_size": 2000, "learning_starts": 40, "steps_per_iteration": 64, "train_freq": 8, "gradient_steps": 1, "batch_size": 32}


def shortened(text: str) -> dict[str, object]:
    """Return a config whose first iteration takes seconds."""
    config = yaml.load(text, Loader)
    settings = config["model"]["init_args"]
    settings["env"] |= {"num_envs": min(2, settings["env"]["num_envs"]), "vectorization": "sync"}
    if "buffer_size" in settings or "train_freq" in settings:
        settings |= OFF_POLICY
    elif config["model"]["class_path"] == "ARS":
        settings |= {"episodes_per_generation": 2, "top_directions": 1}
    else:
        settings |= {name: value for name, value in ON_POLICY.items() if name in settings}
    if "memory" in settings:
        settings["memory"]["init_args"]["sequence_length"] = 16
    return config


def try_entry(path: Path, entry: str, seconds: float, folder: Path) -> tuple[str, str]:
    """Return `trained`, `refused`, `too slow` or `not imported`, and why."""
    try:
        config = shortened(import_zoo(str(path), "ALE/Pong-v5" if entry == "atari" else entry))
    except SettingError as error:
        return "not imported", str(error)
    (folder / "entry.yaml").write_text(yaml.safe_dump(config))
    options = "--trainer.max_steps 1 --trainer.accelerator cpu --trainer.enable_progress_bar false --evaluation null --checkpoint null"
    command = [sys.executable, "-m", "lightning_rl", "fit", "--config", "entry.yaml", *options.split()]
    try:
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return "too slow", f"no iteration within {seconds:g} seconds"
    lines = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    return ("trained", "") if run.returncode == 0 else ("refused", lines[-1][7:] if lines else run.stderr.strip()[-200:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", nargs="*", help="names of files; default: all")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of an entry")
    parser.add_argument("--out", type=Path, default=Path("zoo_files.csv"))
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    with options.out.open("w", newline="") as file, tempfile.TemporaryDirectory() as folder:
        rows = csv.writer(file)
        rows.writerow(COLUMNS)
        for path in sorted(options.folder.glob("*.yml")):
            if options.files and path.name not in options.files:
                continue
            counts[path.name] = Counter()
            for entry in yaml.load(path.read_text(), Loader):
                if entry == "default":
                    continue
                result, why = try_entry(path, entry, options.seconds, Path(folder))
                counts[path.name][result] += 1
                rows.writerow((path.name, entry, result, why))
                file.flush()
                print(f"{path.name} {entry}: {result} {why}".strip(), flush=True)
    results = ("trained", "refused", "too slow", "not imported")
    print(f"\n| file | entries | {' | '.join(results)} |\n|{'---|' * 6}")
    for name, found in counts.items():
        print(f"| {name} | {found.total()} | {' | '.join(str(found[each]) for each in results)} |")


if __name__ == "__main__":
    main()
