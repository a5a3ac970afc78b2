"""Compare the zoo's rows with their references over whole suites, and write all rows into one file.

    python benchmarks/zoo_scores.py

A score is 0 for random moves and 1 for what the reference reports: (return - random) / (reference - random), a seed. For each suite, the
interquartile mean over the rows with a reference and three seeds or more, its 95 % interval, and the share of runs above each score
(Agarwal et al. 2021, https://arxiv.org/abs/2108.13264), into docs/zoo.md and its picture; all rows with their scores into
`benchmarks/results/zoo.csv`. Random moves are played once in an environment, over 100 episodes, and kept in
`benchmarks/results/random.csv`.
"""

from __future__ import annotations

import csv
from pathlib import Path

import gymnasium as gym
import numpy as np
from references import REFERENCES
from report import put_between

from lightning_rl.reports.figures import COLORS, new_figure, png
from lightning_rl.reports.tables import bootstrap, iqm, share_above
from zoo import RESULTS, ROOT, environment_of, read_rows, rows_of

BEGIN, END = "<!-- scores: begin -->", "<!-- scores: end -->"
PICTURE = ROOT / "docs" / "images" / "zoo_scores.png"
SUITES = {"classic control": "classic_control", "Box2D": "box2d", "MuJoCo": "mujoco"}
"""By the package of gymnasium's environments."""
THRESHOLDS = np.linspace(0, 1.6, 161)
RANDOM = RESULTS / "random.csv"
EPISODES, FIRST_SEED = 100, 50_000
SEEDS = 3


def suite_of(env: str) -> str | None:
    """Return the suite of an environment, None if it is in none."""
    spec = gym.registry.get(env)
    package = "" if spec is None else str(spec.entry_point)
    return next((name for name, part in SUITES.items() if f"gymnasium.envs.{part}" in package), None)


def random_return(env: str) -> float:
    """Return what random moves reach in an environment, played once."""
    known = {row["env"]: float(row["return_mean"]) for row in read_rows(RANDOM)}
    if env not in known:
        game, returns = gym.make(env), []
        for seed in range(FIRST_SEED, FIRST_SEED + EPISODES):
            game.reset(seed=seed)
            game.action_space.seed(seed)
            total, ended = 0.0, False
            while not ended:
                _, reward, terminated, truncated, _ = game.step(game.action_space.sample())
                total, ended = total + float(reward), terminated or truncated
            returns.append(total)
        known[env] = float(np.mean(returns))
        write(RANDOM, [{"env": name, "return_mean": f"{known[name]:.6g}"} for name in sorted(known)])
    return known[env]


def write(file: Path, rows: list[dict[str, str]]) -> None:
    """Write rows, the columns of the first."""
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def scored(config: str, suite: str | None) -> list[dict[str, str]]:
    """Return the rows of a config with the reference and the score."""
    reference, env = REFERENCES[config], environment_of(config)
    added = {"environment": env, "suite": suite or "", "reference": "" if reference is None else f"{reference.mean:g}", "score": ""}
    rows = [added | row for row in sorted(rows_of(config), key=lambda row: int(row["seed"]))]
    if suite is None or reference is None:
        return rows
    low = random_return(env)
    return [row | {"score": f"{(float(row['return_mean']) - low) / (reference.mean - low):.4f}"} for row in rows]


def draw(scores: dict[str, np.ndarray]) -> None:
    """Draw the performance profiles of the suites, each `[seeds, configs]`."""
    figure = new_figure(7, 3.6, "zoo_scores.py")
    axes = figure.subplots()
    for color, (suite, each) in zip(COLORS, scores.items(), strict=False):
        axes.plot(THRESHOLDS, share_above(each, THRESHOLDS), color=color, label=f"{suite}, {each.shape[1]} configs")
        axes.fill_between(THRESHOLDS, *bootstrap(each, lambda drawn: share_above(drawn, THRESHOLDS)), color=color, alpha=0.12, linewidth=0)
    axes.axvline(1, color="#777777", linestyle="--", linewidth=1)
    axes.set_xlabel("score: 0 random moves, 1 the published reference")
    axes.set_ylabel("share of runs above it")
    axes.grid(color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    PICTURE.write_bytes(png(figure))


def main() -> None:
    """Write the file, the table and the picture."""
    suites = {config: suite_of(environment_of(config)) for config in REFERENCES}
    rows = {config: scored(config, suite) for config, suite in suites.items()}
    write(RESULTS / "zoo.csv", [row for each in rows.values() for row in each])
    lines = ["| suite | configs × seeds | IQM of the scores | 95 % interval | runs above the reference |", "|---|---|---|---|---|"]
    scores = {}
    for suite in SUITES:
        values = [[float(row["score"]) for row in each[:SEEDS] if row["score"]] for config, each in rows.items() if suites[config] == suite]
        scores[suite] = every = np.array([each for each in values if len(each) == SEEDS]).T
        low, high = bootstrap(every, lambda drawn: np.array([iqm(drawn.ravel())])).ravel()
        above = f"{(every >= 1).mean():.0%}"
        lines.append(f"| {suite} | {every.shape[1]} × {SEEDS} | {iqm(every.ravel()):.3f} | {low:.3f} to {high:.3f} | {above} |")
    put_between(ROOT / "docs" / "zoo.md", BEGIN, END, "\n".join(lines))
    draw(scores)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
