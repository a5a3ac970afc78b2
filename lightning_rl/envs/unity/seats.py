"""Seats of the agents of a behavior and team in a player: each is a row, and a group of agents has seats next to one another."""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from lightning_rl.envs.unity.decoding import Agents
from lightning_rl.errors import SettingError


class Report(NamedTuple):
    """What a message says of one agent: its place among the agents that ask, or among those whose episodes ended."""

    agents: Agents
    place: int

    @property
    def reward(self) -> float:
        """Return the reward since its last decision, with that of its group."""
        return float(self.agents.reward[self.place])

    @property
    def group_reward(self) -> float:
        """Return the reward of its group since its last decision."""
        return float(self.agents.group_reward[self.place])

    @property
    def interrupted(self) -> bool:
        """Return whether the episode was truncated."""
        return bool(self.agents.interrupted[self.place])


class Seating(NamedTuple):
    """The number of seats of a behavior and team, and of those of each group; `group_size` is 0 if agents learn one by one."""

    num: int
    group_size: int = 0


class Seats:
    """The seats of the agents of one behavior and team in a player. An agent keeps its seat for all its episodes, a group its seats.

    If agents learn one by one, all seats are those of one group, whatever groups they have in Unity. Otherwise an agent without a group
    there is one by itself.

    Args:
        name: of the behavior, for messages.
        num, group_size: as in `Seating`.
    """

    def __init__(self, name: str, num: int, group_size: int = 0) -> None:
        self.name, self.num, self.in_groups, self.size = name, num, group_size > 0, group_size or num
        self.groups: dict[int, int] = {}
        """The number of each group here, by its number in Unity."""
        self.members: list[dict[int, int]] = [{} for _ in range(num // self.size)]
        """By group: the place of each member in it, by the agent's id."""
        self.seat_of: dict[int, int] = {}
        """The seats of the agents that are present, by their ids."""
        self.asked: list[int] = []
        """The seats of the agents that ask, in the message's order."""
        self.acted: set[int] = set()
        """The seats that asked before."""
        self.asking: Any = None
        """The newest message's agents that ask; None before the first."""
        self.ended: dict[int, Report] = {}
        """By seat, since the last decisions."""

    def begin_step(self) -> None:
        """Note that the agents that asked act."""
        self.acted, self.asked = set(self.asked), []
        self.ended.clear()

    def note_ends(self, agents: Agents) -> None:
        """Note which episodes ended; agents that never asked in theirs have none."""
        for place, agent_id in enumerate(agents.ids):
            seat = self.seat_of.pop(agent_id, None)
            if seat is not None:
                self.ended[seat] = Report(agents, place)

    def note_requests(self, agents: Agents) -> None:
        """Seat the agents that ask for a decision. Raises `SettingError`: there are too few seats, or present agents do not ask."""
        self.asking, self.asked = agents, []
        for agent_id, group in zip(agents.ids, agents.groups, strict=True):
            if agent_id not in self.seat_of:
                self.seat_of[agent_id] = self._find_seat(agent_id, group)
            self.asked.append(self.seat_of[agent_id])
        waiting = {*self.seat_of.values()}.difference(self.asked)
        if waiting:
            who = f"seat {min(waiting)} waits while {f'seat {self.asked[0]} asks' if self.asked else 'others ask'}"
            way_out = "give their Decision Requesters one period and step"
            raise SettingError(f"agents of {self.name} decide at different ticks ({who}): {way_out}")

    def _find_seat(self, agent_id: int, group: int) -> int:
        """Return the seat of an agent that begins an episode. Raises `SettingError`: there is none left."""
        present, first = {*self.seat_of.values()}, 0
        if self.in_groups:
            occupied = {seat // self.size for seat in present}
            number = find_place(self.groups, key_of_group(agent_id, group), len(self.members), occupied)
            if number is None:
                raise SettingError(
                    f"{len(self.members) + 1} groups of {self.name} are present, and there are seats of {len(self.members)}: "
                    "let all of them ask in the first message"
                )
            first = number * self.size
        place = find_place(self.members[first // self.size], agent_id, self.size, {seat - first for seat in present})
        if place is None:
            whose = f"a group of {self.name}" if self.in_groups else self.name
            raise SettingError(f"{self.size + 1} agents of {whose} are present, and there are {self.size} seats: set env.kwargs.seats")
        return first + place

    def read_rewards(self) -> np.ndarray:
        """Return the reward of each seat since its last decision, `[num]`; what comes before the first one of an episode is nobody's.

        Unity tells each member what its group was paid until then. Of a group that learns only one gets it: the first that goes on, or else
        the one that ended last.
        """
        reward, paid = np.zeros(self.num), set[int]()
        reports = [(seat, Report(self.asking, k)) for k, seat in enumerate(self.asked) if seat in self.acted and seat not in self.ended]
        for seat, report in [*reports, *reversed(self.ended.items())]:
            is_paid = self.in_groups and seat // self.size in paid
            reward[seat] = report.reward - (report.group_reward if is_paid else 0.0)
            paid.add(seat // self.size)
        return reward


def key_of_group(agent_id: int, group: int) -> int:
    """Return the number of an agent's group in Unity; a number of its own, below 0, for an agent without a group."""
    return group or -1 - agent_id


def find_place(taken: dict[int, int], key: int, num: int, occupied: Collection[int]) -> int | None:
    """Return the place of a key among `num`; a new key takes the lowest that was never taken, or else the lowest that is not occupied.

    Return None if all are occupied.
    """
    if key in taken:
        return taken[key]
    place = len(taken)
    if place == num:
        free = {place: other for other, place in taken.items() if place not in occupied}
        if not free:
            return None
        place = min(free)
        del taken[free[place]]
    taken[key] = place
    return place
