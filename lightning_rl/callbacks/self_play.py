"""Self-play: take snapshots of the learning policy, and rate it by its games against them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, SupportsFloat

import numpy as np
import pytorch_lightning as pl
import torch

from lightning_rl.callbacks import AlgorithmRun
from lightning_rl.checkpoints.validation import COUNT, GAMES, RATING, RATINGS, SCORES, SNAPSHOTS, TEXT, Rules, are_scores
from lightning_rl.data.episodes import win_rate
from lightning_rl.data.opponents import explain_unsaved
from lightning_rl.data.ratings import Rating, Results, elo_change, fit_ratings
from lightning_rl.data.self_play import NEWEST, Game, SelfPlayConfig, SelfPlayOpponent, Snapshots, SnapshotStore, as_game
from lightning_rl.errors import SettingError
from lightning_rl.processes.ranks import of_all_ranks
from lightning_rl.types import State


def finite(value: SupportsFloat) -> float:
    """Return a number as a float. Raises `ValueError`: it is NaN or infinite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def by_behavior(scores: list[Any]) -> dict[str, list[Any]]:
    """Convert the scores of older checkpoints, rows that may end with the other's behavior, to rows of `Results` for each behavior."""
    rows: dict[str, list[Any]] = {}
    for player, other, games, points, *behavior in scores:  # 0.1.0 stored no behavior
        rows.setdefault("".join(behavior), []).append((player, other, games, points))
    return rows


class SelfPlay(pl.Callback):
    """Play against past snapshots of the policy, and rate the policy. Algorithms with `self_play` add this callback automatically.

    The result of a game is 1 if the learner's return over the whole episode is the higher one, and ½ for a draw, including one at a time
    limit. With several opponents it is the mean of their results. Between two snapshots the policy counts as one player, the next snapshot.
    Games against the newest weights are not rated.

    If several behaviors take turns learning, each has its own callback for the games of its turns. The return of a side is the mean over
    its agents, and every other side is an opponent. Games against the newest weights of another behavior are rated too. Metrics begin with
    the behavior's name, such as `<behavior>/self_play/elo`; the first snapshots of the others have the rating `initial_elo`.

    Metrics: `self_play/elo` (updated with K = 1 after each game, as in ML-Agents), `self_play/rating` and half of its 95 % interval
    `self_play/rating_margin` (fitted over all games; fixed opponents, or else the first snapshot, have the rating `initial_elo`),
    `self_play/win_rate` and `self_play/draw_rate` against past snapshots since the last row, `self_play/win_rate/<opponent>` against fixed
    opponents, and `self_play/snapshots`. A rating can rise while policies go in circles: check it against `evaluation.opponent`.

    Args:
        config: the setting `self_play`.
        snapshots: snapshots of the learning policy.
        behavior: name of the behavior, if several take turns.
    """

    state_rules: ClassVar[Rules] = {
        "elo": RATING,
        "elos": RATINGS,
        "scores": SCORES,
        "games": GAMES,
        "opponents?/[]": TEXT,
        "taken_at|taken": COUNT,
        "snapshots": SNAPSHOTS,
        "snapshot_files?/[]/name|sha256": TEXT,
        "snapshot_files?/[]/size": COUNT,
        "snapshot_files?/[]/numbers/[]": COUNT,
    }
    """What a state holds, and the kind of each value, see `checkpoints/validation.py`."""

    def __init__(self, config: SelfPlayConfig, snapshots: Snapshots, behavior: str = "") -> None:
        self.config, self.snapshots, self.behavior = config, snapshots, behavior
        self.rivals: list[SelfPlay] = [self]
        """The callbacks whose players it meets: itself, or those of the other behaviors."""
        self.fixed = {NEWEST - 1 - k: name for k, name in enumerate(config.names)}
        self.elo, self.elos = config.initial_elo, dict.fromkeys(self.fixed, config.initial_elo)
        self.results: dict[str, Results] = {}
        """Results of the policy, whose number is that of its next snapshot, against the players of each behavior."""
        self.games: list[Game] = []
        """Games since the last row of the log."""
        self.taken_at = 0
        self.store: SnapshotStore | None = None
        """Where checkpoints that are saved in between `begin_save` and `end_save` have the snapshots; others contain them."""
        self.folder = Path("last.ckpt.d")
        """The folder next to the checkpoint that is loaded."""
        self.run: Any = None
        self.algorithm: Any = None

    @property
    def state_key(self) -> str:
        """Return the key of its state in checkpoints."""
        return f"SelfPlay/{self.behavior}" if self.behavior else "SelfPlay"

    @property
    def players(self) -> range:
        """Return the numbers of its players: fixed ones, the newest weights, snapshots, and the policy until the next snapshot."""
        return range(NEWEST - len(self.fixed), self.snapshots.taken + 1)

    def store_in(self, folder: Path) -> SnapshotStore:
        """Keep the snapshots in files of the folder next to a checkpoint, `last.ckpt.d`."""
        folder = folder / "self_play" / self.behavior
        if self.store is None or self.store.folder != folder:
            self.store = SnapshotStore(folder)
        return self.store

    def begin_save(self) -> None:
        """Write the snapshots that are in no file yet. Raises `SaveError`."""
        if self.store is not None:
            self.store.save(self.snapshots.get_weights(self.snapshots.numbers))

    def end_save(self, saved: bool) -> None:
        """Delete files that are not needed any more, after the checkpoint was saved or has failed."""
        if self.store is not None:
            self.store.end_save(saved)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: AlgorithmRun, checkpoint: State) -> None:
        self.folder = Path(str(trainer.ckpt_path)).parent / "last.ckpt.d"

    def on_train_start(self, trainer: pl.Trainer, pl_module: AlgorithmRun) -> None:
        self.run = pl_module.run
        self.algorithm = self.run.algorithms[self.behavior]
        for line in filter(None, map(explain_unsaved, self.config.names)):
            pl_module.say(line)
        for rival in self.rivals:
            met = self.results.get(rival.behavior, Results()).places
            if not all(player in self.players and other in rival.players for player, other in met):
                raise SettingError("the checkpoint's state of self_play is damaged: results of players that it lacks")
        if self.snapshots.taken == 0:
            self._take(self.algorithm.count)

    def _opponent(self) -> SelfPlayOpponent:
        return self.algorithm.collector.opponent

    def _take(self, count: int) -> None:
        """Take a snapshot, which gets the policy's rating."""
        self.elos[self.snapshots.taken] = self.elo
        self.snapshots.take()
        self.snapshots.drop(self._opponent().playing.tolist())
        players = {*self.fixed, *self.snapshots.numbers}
        self.elos = {player: elo for player, elo in self.elos.items() if player in players}
        self.taken_at = count

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: AlgorithmRun, outputs: object, batch: object, batch_idx: int) -> None:
        self._rate_finished()
        if self.algorithm.count - self.taken_at >= self.config.save_steps:
            self._take(self.algorithm.count)

    def _rate_finished(self) -> None:
        """Rate the games of all ranks that ended since the last call."""
        for rival in self.rivals:
            for games in of_all_ranks(rival._opponent().take_finished(self.behavior)):
                for game in games:
                    self.rate(Game(*game))

    def rate(self, game: Game) -> None:
        """Update the ratings with a game, unless it was played against the policy's own newest weights."""
        if game.player == NEWEST and game.behavior == self.behavior:
            return
        rivals = {rival.behavior: rival for rival in self.rivals}
        if game.behavior not in rivals:
            raise SettingError(f"the checkpoint's state of self_play is damaged: a game against {game.behavior!r}")
        self.games.append(game)
        rival = rivals[game.behavior]
        number = rival.snapshots.taken if game.player == NEWEST else game.player
        self.results.setdefault(rival.behavior, Results()).add(self.snapshots.taken, number, game.result)
        rival_elo = rival.elo if game.player == NEWEST else rival.elos.get(game.player)
        if rival_elo is None:  # the snapshot left the window during the game
            return
        change = elo_change(self.elo, rival_elo, game.result)
        self.elo += change
        if game.player == NEWEST:
            rival.elo -= change
        elif game.player not in rival.fixed:
            rival.elos[game.player] -= change

    def run_metrics(self) -> dict[str, float]:
        """Return the metrics for a row of the log, including the games of its iteration, and start counting games from 0."""
        if self.algorithm is not None:
            self._rate_finished()
        metrics = {"elo": self.elo, "snapshots": float(self.snapshots.taken)}
        if any((results.rows[:, 0] == self.snapshots.taken).any() for results in self.results.values()):
            metrics["rating"], metrics["rating_margin"] = self._fit()
        names = {(rival.behavior, player): name for rival in self.rivals for player, name in rival.fixed.items()}
        past = [game.result for game in self.games if (game.behavior, game.player) not in names]
        if past:
            metrics["win_rate"] = win_rate(past)
            metrics["draw_rate"] = past.count(0.5) / len(past)
        for player, name in names.items():
            results = [game.result for game in self.games if (game.behavior, game.player) == player]
            if results:
                metrics[f"win_rate/{name}"] = win_rate(results)
        self.games = []
        return {f"{self.behavior}/self_play/{name}".lstrip("/"): value for name, value in metrics.items()}

    def _fit(self) -> Rating:
        """Fit the ratings of all players to all results, and return the policy's."""
        everyone, zero, num = {rival.behavior: rival for rival in (self, *self.rivals)}, {}, 0
        for name, other in everyone.items():  # the place of a player is its number, counted from that of its behavior's player 0
            zero[name], num = num - other.players.start, num + len(other.players)
        rows = [
            results.rows + np.array([zero[name], zero[rival], 0, 0])
            for name, other in everyone.items()
            for rival, results in other.results.items()
            if rival in zero
        ]
        fixed = {zero[rival.behavior] + player: rival.config.initial_elo for rival in self.rivals for player in rival.fixed}
        anchors = fixed or {zero[rival.behavior]: rival.config.initial_elo for rival in self.rivals}
        place = zero[self.behavior] + self.snapshots.taken
        return fit_ratings(np.concatenate(rows), anchors, [place])[place]

    def state_dict(self) -> State:
        saves_run = self.run is not None and self.run.saves_run
        manifest = self.store.manifest if self.store is not None and saves_run else None
        return {
            "elo": self.elo,
            "elos": dict(self.elos),
            "scores": {behavior: torch.tensor(results.rows) for behavior, results in self.results.items()},
            "games": [tuple(game) for game in self.games],
            "taken_at": self.taken_at,
            "opponents": self.config.names,
            "taken": self.snapshots.taken if saves_run else 0,
            "snapshots": self.snapshots.get_weights(self.snapshots.numbers) if saves_run and manifest is None else {},
            "snapshot_files": [] if manifest is None else manifest["files"],
        }

    def load_state_dict(self, state_dict: State) -> None:
        opponents = state_dict.get("opponents", self.config.names)  # missing in older checkpoints
        if opponents != self.config.names:
            raise SettingError(f"the checkpoint was saved with self_play.opponents {opponents}, not {self.config.names}: keep them")
        try:
            self.elo, self.taken_at = finite(state_dict["elo"]), int(state_dict["taken_at"])
            self.elos = {int(player): finite(elo) for player, elo in state_dict["elos"].items()}
            if not are_scores(scores := state_dict["scores"]):
                raise ValueError(f"{scores} are no scores")
            scores = scores if isinstance(scores, dict) else by_behavior(scores)
            self.results = {behavior: Results(np.array(rows, float)) for behavior, rows in scores.items()}
            self.games = [as_game(game) for game in state_dict["games"]]
            taken, weights = int(state_dict["taken"]), dict(state_dict["snapshots"])
            if not taken:  # as in best.ckpt: the snapshots to come are not those that played
                self.elos, self.results, self.games = {}, {}, []
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingError("the checkpoint's state of self_play is damaged") from error
        if files := state_dict.get("snapshot_files"):
            weights |= self.store_in(self.folder).load(files)
        self.snapshots.set_weights(weights)
        self.snapshots.taken, self.snapshots.first = taken, min(weights, default=taken)
        if missing := {*self.snapshots.numbers} - {*self.snapshots.weights}:
            raise SettingError(f"the checkpoint lacks the snapshots {sorted(missing)} of self_play")
