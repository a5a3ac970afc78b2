"""Play the policies of several runs of a game against each other, and rate them by their results."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lightning_rl.data.episodes import summarize
from lightning_rl.data.opponents import Script, name_opponent
from lightning_rl.data.ratings import Rating, Score, fit_ratings
from lightning_rl.errors import SettingError, check_range
from lightning_rl.policy import load_with_env, play_episodes
from lightning_rl.sharing.hub import is_address
from lightning_rl.training.run_folder import environment_name

ANCHOR = 1200.0
"""The rating of the first player, which fixes the scale."""
SEED = 30_000
"""Seed of the first game; evaluations during runs and `evaluate` use other seeds."""


class Matches(NamedTuple):
    """Results of players against each other.

    players: their names.  environments: where each was trained; empty for a scripted player.
    scores: of player i against player j, keyed by (i, j), both ways.  ratings: by player.
    """

    players: list[str]
    environments: list[str]
    scores: dict[tuple[int, int], Score]
    ratings: dict[int, Rating]


def play_matches(players: Sequence[str | Path | Script], games: int = 100) -> Matches:
    """Play each pair of players; policies sample their actions, and seats rotate from game to game.

    Args:
        players: checkpoints, run folders or `hf://USER/NAME` of one game, at least one; the others may also be `random` or a scripted
            player, a function or its path. A pair plays in the environment of its first policy, or of the first policy of all.
        games: number of games for each pair.

    Raises:
        SettingError: there are fewer than two players, a player does not exist or cannot play this game, or a number is out of range.
    """
    names = [name_opponent("each player", player) for player in players]
    check_range("games", games, 2, whole=True)
    if len(names) < 2 or len({*names}) < len(names):
        raise SettingError(f"matches need at least two different players, got {', '.join(names)}")
    learned = {k for k, name in enumerate(names) if name != "random" and (is_address(name) or Path(name).exists())}
    if not learned:
        raise SettingError(f"matches need a checkpoint or a run's folder, and {' and '.join(names)} are none")
    policies = {k: load_with_env(names[k]) for k in sorted(learned)}
    environments = [environment_name(policies[k].env) if k in learned else "" for k in range(len(names))]
    scores: dict[tuple[int, int], Score] = {}
    for pair in combinations(range(len(names)), 2):
        one, two = sorted(pair, key=lambda k: k not in learned)
        host, player = (policies[one], None) if one in learned else (policies[min(learned)], names[one])
        result = summarize(play_episodes(host, games, SEED, deterministic=False, opponent=names[two], player=player))
        if "win_rate" not in result:
            raise SettingError(f"{names[one if one in learned else min(learned)]} is not the policy of a game against other players")
        points = games * result["points"]
        scores[one, two], scores[two, one] = Score(games, points), Score(games, games - points)
    once = np.array([(*pair, *score) for pair, score in scores.items() if pair[0] < pair[1]])
    return Matches(names, environments, scores, fit_ratings(once, {0: ANCHOR}))


def describe_matches(matches: Matches) -> str:
    """Return a text table of the points per game (a draw counts ½), row against column, with ratings."""
    names = [f"{k + 1}" for k in range(len(matches.players))]
    lines = ["points a game of the row against the column (a draw counts 0.5), and ratings with their 95 % interval", ""]
    lines.append("".join(f"{name:>7}" for name in ("", *names)) + "   rating")
    for one, name in enumerate(names):
        cells = []
        for two in range(len(names)):
            score = matches.scores.get((one, two))
            cells.append("-" if score is None else f"{score.points / score.games:.2f}")
        rating = matches.ratings.get(one)
        shown = "" if rating is None else f"   {rating.value:.0f} ± {rating.margin:.0f}"
        lines.append("".join(f"{cell:>7}" for cell in (name, *cells)) + shown)
    lines += ["", *(f"{name}: {player}" for name, player in zip(names, matches.players, strict=True))]
    if len({*matches.environments} - {""}) > 1:
        trained = ", ".join(f"{name} in {env}" for name, env in zip(names, matches.environments, strict=True) if env)
        lines += ["", f"they were trained in several environments, {trained}; a pair plays in its first player's environment"]
    return "\n".join(lines)
