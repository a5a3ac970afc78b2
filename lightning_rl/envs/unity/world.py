"""Scenes of Unity as a world: the agents of each player are rows."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from statistics import fmean

import numpy as np

from lightning_rl.envs import LESSONS
from lightning_rl.envs.agents.world import Moves, World
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.envs.unity.player import Actions, PlayerError
from lightning_rl.envs.unity.scene import Scene, action_space, known_as, observation_space, open_scene
from lightning_rl.envs.unity.seats import Report, Seating, Seats
from lightning_rl.envs.unity.settings import DEFAULT_RESTARTS
from lightning_rl.errors import SettingError
from lightning_rl.processes.children import FailureLimit
from lightning_rl.spaces import Spaces
from lightning_rl.types import Info, State, Tree, tree_index, tree_map, tree_stack

RECENT = 100
"""Number of latest values of a statistic over which its mean is taken."""
RESTART_PATIENCE = 1.0
"""Seconds in which a player that failed must end before it is killed."""


class UnityWorld(World):
    """E players that play the same scene and simulate at the same time, each in its own process.

    Unity begins the next episode of an agent by itself, often in the message that ends the last one. An agent is present from its first
    request to the end of its episode. Episodes of a player that fails are lost, and it is started again.

    Args:
        config: of the environment; a player for each of its `num_envs`.
        sides: the spaces of each side, with the names of its agents, as `find_spaces` returns them.
        first: the index of the first player among those of all ranks.
    """

    is_endless = True

    def __init__(self, config: EnvConfig, sides: Mapping[str, Spaces], first: int = 0) -> None:
        super().__init__(config.name, config.num_envs, sides, can_be_saved=False, first=first)
        self.failures = FailureLimit(
            f"player {{}} of {config.name}",
            first + self.num_copies,
            DEFAULT_RESTARTS if config.max_restarts is None else config.max_restarts,
        )
        self.first = first
        self.places: dict[str, tuple[str, int]] = {}
        """By behavior and team: its side, and the index of its first agent there."""
        self.seating: dict[str, Seating] = {}
        """By behavior and team."""
        for side_name, side in self.sides.items():
            size = side.spaces.group_size if side.spaces.groups else 0
            for a, agent in enumerate(side.agents):
                behavior, team, _ = agent.rsplit("/", 2)
                name = f"{behavior}?team={team}"
                self.places.setdefault(name, (side_name, a))
                self.seating[name] = Seating(self.seating.get(name, Seating(0)).num + 1, size)
        self.finals: dict[str, dict[int, Report]] = {name: {} for name in self.sides}
        """The last messages of agents whose episodes the last step ended, by side and row."""
        self.reported: dict[str, deque[float]] = {}
        """The latest values of statistics that scenes report, whose mean is a metric."""
        self.lost: set[int] = set()
        """Players that were started again in the last step."""
        self.is_fresh = True
        """Whether the scenes are at the beginning of their first episodes."""
        self.has_begun = False
        """Whether the actions of the next step have been sent."""
        self.scenes: list[Scene] = []
        try:
            for e in range(self.num_copies):
                self.scenes.append(open_scene(config, first + e))
            for scene in self.scenes:
                self._sit(scene)
        except BaseException:
            self.close()
            raise

    def _sit(self, scene: Scene) -> None:
        """Seat the agents that ask first. Raises `SettingError`: they have other spaces than the model."""
        scene.sit(self.seating)
        for name, spec in scene.player.specs.items():
            if name in self.places:
                spaces = self.sides[self.places[name][0]].spaces
                if (spaces.observation, spaces.action) != (observation_space(spec), action_space(spec)):
                    raise SettingError(
                        f"the spaces of {known_as(name)} differ from those of the model, {spaces}; load it with its own environment"
                    )

    def _start(self, copies: np.ndarray, seed: int | None) -> None:
        """Start all episodes again, unless the players have just begun. Their seeds are those of the run when they are started."""
        for e in copies if self.has_begun else ():
            with suppress(PlayerError):
                self.scenes[e].player.finish()  # the answer to a step that nobody waits for
        for e in copies:
            self.scenes[e].keep_log()
            if not self.is_fresh:
                self.scenes[e].reset()
        for e in () if self.is_fresh else copies:
            try:
                self._sit(self.scenes[e])
            except PlayerError as error:
                self._restart(e, error)
        self.is_fresh = self.has_begun = False
        self.lost.clear()

    def begin_step(self, actions: Mapping[str, Tree]) -> None:
        """Send the actions of the next step: the players simulate it until `step`, which gets the same actions, waits for them."""
        self._send(self.all, actions)
        self.has_begun = True

    def _send(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> None:
        """Send actions to K players."""
        actions_of: dict[int, dict[str, Actions]] = {}
        for e in copies:
            scene, chosen = self.scenes[e], actions_of.setdefault(e, {})
            for name, seats in scene.seats.items():
                side, first = self.places[name]
                if seats.asked:
                    rows = self.sides[side].rows[e, first] + np.array(seats.asked)
                    chosen[name] = scene.as_actions(name, tree_index(actions[side], rows))
                seats.begin_step()
        for e, chosen in actions_of.items():
            self.scenes[e].player.start(chosen)

    def _step(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> tuple[dict[str, Moves], np.ndarray]:
        if not self.has_begun:
            self._send(copies, actions)
        self.has_begun = False
        self.lost.clear()
        for e in copies:
            try:
                self.scenes[e].wait()
            except PlayerError as error:
                self._restart(e, error)
        self._read_stats()
        return {name: self._read_moves(name, copies) for name in self.sides}, np.zeros(len(copies), dtype=bool)

    def _read_stats(self) -> None:
        """Read what scenes reported: the mean of the latest values, the last one, or the sum since the start, as they want it."""
        for scene in self.scenes:
            for name, value, kind in scene.player.stats:
                metric = f"scene/{name}"
                if kind == "sum":
                    self.stats[metric] = self.stats.get(metric, 0.0) + value
                elif kind == "last":
                    self.stats[metric] = value
                else:
                    latest = self.reported.setdefault(metric, deque(maxlen=RECENT))
                    latest.append(value)
                    self.stats[metric] = fmean(latest)
            scene.player.stats.clear()

    def _restart(self, e: int, error: PlayerError) -> None:
        """Start a player that failed again. Raises `WorkerError`: it failed too often."""
        scene, failure = self.scenes[e], str(error)
        while failure:
            scene.player.close(RESTART_PATIENCE)
            self.notices.append(failure if scene.player.executable is None else self.failures.add(self.first + e, failure))
            self.restarts += 1
            try:
                scene.open()
                self._sit(scene)
                failure = ""
            except PlayerError as again:
                failure = str(again)
        self.lost.add(e)

    def _seated(self, name: str, copies: np.ndarray) -> Iterator[tuple[int, Seats]]:
        """Yield the seats of K players that belong to a side, with the row of the first one."""
        for e in copies:
            for behavior, seats in self.scenes[e].seats.items():
                side, first = self.places[behavior]
                if side == name:
                    yield int(self.sides[name].rows[e, first]), seats

    def _read_moves(self, name: str, copies: np.ndarray) -> Moves:
        side, finals = self.sides[name], self.finals[name]
        reward, (ended, terminated, present) = np.zeros(side.num), np.zeros((3, side.num), dtype=bool)
        finals.clear()
        for first, seats in self._seated(name, copies):
            reward[first : first + seats.num] = seats.read_rewards()
            present[first + np.array(seats.asked, dtype=np.int64)] = True
            for seat, last in seats.ended.items():
                row = first + seat
                ended[row], terminated[row], finals[row] = True, not last.interrupted, last
        for rows in (side.rows[e] for e in self.lost):
            side.valid[rows] &= side.ended[rows]
            side.unpaid[rows] = 0.0
        rows = side.rows[copies]
        return Moves(reward[rows], ended[rows], terminated[rows], present[rows])

    def look(self, copies: np.ndarray) -> None:
        for name, side in self.sides.items():
            was_present, present = side.present.copy(), np.zeros(side.num, dtype=bool)
            for first, seats in self._seated(name, copies):
                rows = first + np.array(seats.asked, dtype=np.int64)
                present[rows] = True
                if seats.asking is not None:
                    tree_map(lambda kept, new, rows=rows: kept.__setitem__(rows, new), side.obs, as_tree(seats.asking.obs))
                    if seats.asking.mask is not None:
                        side.mask[rows] = seats.asking.mask
            begun = ~was_present
            begun[[*self.finals[name], *(row for e in self.lost for row in side.rows[e])]] = True
            rows = side.rows[copies].ravel()
            side.present[rows] = side.to_move[rows] = present[rows]
            side.start[rows] |= begun[rows] | ~present[rows]
            side.moved[rows] &= ~begun[rows]
            gone = rows[was_present[rows] & ~present[rows]]
            if len(gone):
                tree_map(lambda kept, gone=gone: kept.__setitem__(gone, 0), side.obs)
                if len(side.mask):
                    side.mask[gone] = True

    def observe_last(self, name: str, rows: np.ndarray) -> tuple[Tree, Tree, Mapping[int, Info]]:
        reports: Mapping[int, Report] = self.finals[name]
        if not reports.keys() >= {*rows.tolist()}:  # the others are cut, and go on in the scene
            asking = [
                (first + seat, Report(seats.asking, k))
                for first, seats in self._seated(name, self.all)
                for k, seat in enumerate(seats.asked)
            ]
            reports = {**dict(asking), **reports}
        lasts = [reports[row] for row in rows.tolist()]
        obs = tree_stack([as_tree([sensor[last.place] for sensor in last.agents.obs]) for last in lasts])
        mask = np.stack([last.agents.mask[last.place] for last in lasts]) if self.sides[name].spaces.masked else ()  # type: ignore[index]
        infos: dict[int, Info] = {}
        if any(scene.lessons for scene in self.scenes):
            infos = {row: {LESSONS: self.scenes[row // len(self.sides[name].agents)].played} for row in rows.tolist()}
        return obs, mask, infos

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        for scene in self.scenes:
            scene.set_lessons(lessons)

    def report_to(self, other: "UnityWorld") -> None:
        """Add what these scenes report to the statistics of another world."""
        self.stats, self.reported = other.stats, other.reported

    def ask_to_quit(self) -> None:
        """Ask all players to quit; `close` waits for them."""
        for scene in self.scenes:
            scene.player.ask_to_quit()

    def close(self) -> None:
        self.ask_to_quit()
        for scene in self.scenes:
            scene.close()

    def _are_alike(self, state: State) -> bool:
        return True

    def _get_copies(self) -> State:
        return {"states": None}

    def _set_copies(self, state: State) -> bool:
        return False


def as_tree(obs: list[np.ndarray]) -> Tree:
    """Return a behavior's observations in the form of their space."""
    return obs[0] if len(obs) == 1 else {f"obs_{i}": sensor for i, sensor in enumerate(obs)}
