"""How good policies become at games by self-play, by exact judges and against players that are known.

    python benchmarks/self_play.py [GAME ...] [--seeds 1 2 3] [--folder self_play_runs]

Each row is a run of `configs/self_play/GAME.yaml`, judged with its last weights as it plays, drawing its moves:

* rock_paper_scissors, kuhn_poker, tic_tac_toe: its exploitability, what the best opponent wins a game against it, and that of the average
  of all weights of the run where a game has one decision.
* tic_tac_toe: exploitability of the most likely moves, and their lost games of 1,000 against perfect play.
* connect_four: points a game (1 for a win, ½ for a draw) over 1,000 games, with the most likely moves, against random moves after 100,000
  steps, and against a player that wins or blocks in one move at the end.

Further options are those of `lightning-rl fit`: `--model.ent_coef 0` shows what happens without entropy.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import lightning_rl as lrl
from lightning_rl.data.opponents import Probabilities
from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.judges import JUDGED, exploitability

PLAYERS = "lightning_rl.envs.games.players"
CONFIGS = Path(__file__).parents[1] / "configs" / "self_play"
COPIES = {"rock_paper_scissors": 256, "connect_four": 100_000}
"""Environment steps between the checkpoints that are judged beside the last one."""
Row = dict[str, Any]


def train(game: str, seed: int, folder: Path, settings: list[str]) -> Path:
    """Return the folder with the checkpoints of a run of a packaged config."""
    home = folder / game / f"seed_{seed}"
    copies = ["--checkpoint.every_n_env_steps", COPIES[game], "--checkpoint.keep", -1] if game in COPIES else []
    options = ["--config", f"self_play/{game}", "--seed_everything", seed, "--trainer.default_root_dir", home, *copies, *settings]
    subprocess.run([sys.executable, "-m", "lightning_rl", "fit", *map(str, options)], check=True, stdout=subprocess.DEVNULL)
    (last,) = home.rglob("last.ckpt")
    return last.parent


def load(file: Path) -> lrl.PPO:
    """Return the algorithm of a checkpoint."""
    return lrl.PPO.load_from_checkpoint(file)


def steps_of(file: Path) -> int:
    """Return the environment steps in the name of a numbered checkpoint."""
    return int(file.stem.partition("=")[2])


def judge(game: str, checkpoints: Path) -> Row:
    """Return the figures of a run."""
    last, env = load(checkpoints / "last.ckpt"), f"lightning_rl.envs.games.{game}"
    row: Row = {"env_steps": last.env_steps}
    if env in JUDGED:
        row["exploitability"] = exploitability(env, Probabilities(last.network, False))
    if game == "rock_paper_scissors":
        one = GAMES[env](1)
        obs = one.observe(one.all, one.all)
        policies = [Probabilities(load(file).network, False)(obs, ()) for file in checkpoints.glob("env_steps=*.ckpt")]
        average = np.mean(policies, axis=0)
        row["of_average"] = exploitability(env, lambda obs, mask: average)
    if game == "tic_tac_toe":
        row["of_most_likely_moves"] = exploitability(env, Probabilities(last.network, True))
        found = lrl.evaluate(last, 1_000, opponent=f"{PLAYERS}.minimax")
        row["lost_to_perfect_play"] = round(1_000 * (1 - found["win_rate"] - found["draw_rate"]))
    if game == "connect_four":
        row["points_against_random_at_100,000"] = points(load(min(checkpoints.glob("env_steps=*.ckpt"), key=steps_of)), "random")
        row["points_against_random"], row["points_against_two_ply"] = points(last, "random"), points(last, f"{PLAYERS}.two_ply")
    return row


def points(algorithm: Any, opponent: str) -> float:
    """Return points a game against a player."""
    found = lrl.evaluate(algorithm, 1_000, num_envs=100, opponent=opponent)
    return found["win_rate"] + found["draw_rate"] / 2


def main() -> None:
    """Train and judge what is asked for, and write a row for each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("games", nargs="*", help="which, all without")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--folder", type=Path, default=Path("self_play_runs"), help="where runs are kept")
    parser.add_argument("--out", type=Path, help="a CSV file for the rows")
    options, settings = parser.parse_known_args()
    known = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    if unknown := [game for game in options.games if game not in known]:
        raise SystemExit(f"error: {unknown[0]} is none of the games {', '.join(known)}")
    rows = []
    for game in options.games or known:
        for seed in options.seeds:
            row = {"game": game, "seed": seed, **judge(game, train(game, seed, options.folder.resolve(), settings))}
            print(
                ", ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()),
                flush=True,
            )
            rows.append(row)
    if options.out is not None:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        with options.out.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
