"""Small environments of several agents in PettingZoo's two forms, one for each thing that can happen to an agent.

Each is also an id: `tests.agents.Mortal`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Space
from pettingzoo import AECEnv, ParallelEnv

ALWAYS = range(1000)


class Together(ParallelEnv):
    """Agents move at once. Each observes (its number, t) and gets 10 · number + t + action / 10.

    Agents are there at the times in `visits`, from the beginning to the end if it has none of theirs. An episode has `length` steps.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "together_v0", "render_modes": [], "is_parallelizable": True}
    names: ClassVar[tuple[str, ...]] = ("a", "b")
    visits: ClassVar[dict[str, Collection[int]]] = {}
    length, truncates, render_mode = 4, False, None
    observation: Space = Box(-100, 100, (2,), np.float32)
    action: Space = Discrete(2)

    def __init__(self) -> None:
        self.possible_agents, self.agents = list(self.names), []

    def observation_space(self, agent: str) -> Space:
        return self.observation

    def action_space(self, agent: str) -> Space:
        return self.action

    def there(self) -> list[str]:
        return [agent for agent in self.names if self.t in self.visits.get(agent, ALWAYS)] if self.t < self.length else []

    def observe(self, agent: str) -> Any:
        return np.array([self.names.index(agent), self.t], np.float32)

    def pay(self, agent: str, action: Any) -> float:
        return 10.0 * self.names.index(agent) + self.t + float(np.sum(action)) / 10

    def tell(self, agent: str, over: bool) -> dict[str, Any]:
        return {"is_success": agent == self.names[0]} if over else {}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.t = 0
        self.agents = self.there()
        return {agent: self.observe(agent) for agent in self.agents}, {agent: self.tell(agent, False) for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        before, rewards = self.agents, {agent: self.pay(agent, actions[agent]) for agent in self.agents}
        self.t += 1
        self.agents = self.there()
        all_ = [*before, *(agent for agent in self.agents if agent not in before)]
        over = {agent: agent in before and agent not in self.agents for agent in all_}
        rewards = {agent: rewards.get(agent, 0.0) for agent in all_}
        ends = [{agent: over[agent] and self.truncates == kind for agent in all_} for kind in (False, True)]
        return {agent: self.observe(agent) for agent in all_}, rewards, *ends, {agent: self.tell(agent, over[agent]) for agent in all_}


class Mortal(Together):
    """b dies in the second of four steps."""

    visits: ClassVar = {"b": range(2)}


class Visited(Together):
    """b comes at time 1, leaves after time 2, comes again at time 4 and stays to the end."""

    visits: ClassVar = {"b": (1, 2, 4, 5)}
    length = 6


class Sealed(Mortal):
    """Pays what a running generator says, which nobody can save: an episode has to be played again."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seed = self.seed if seed is None else seed
        self.numbers = (np.sin(self.seed + k) for k in range(10**6))
        return super().reset(seed, options)

    seed = 0

    def pay(self, agent: str, action: Any) -> float:
        return float(next(self.numbers)) + float(action)


class Teams(Together):
    """What reds get the blue one pays; all end together, after two steps."""

    names = ("red_0", "red_1", "blue_0")
    length = 2

    def pay(self, agent: str, action: Any) -> float:
        return -2.0 if agent.startswith("blue") else 1.0


class Squads(Together):
    """Two against two, whose agents are not listed by their teams."""

    names = ("red_0", "blue_0", "red_1", "blue_1")


class MortalSquads(Squads):
    """blue_0 dies in the second of four steps, and red_1 comes at time 1."""

    visits: ClassVar = {"blue_0": range(2), "red_1": (1, 2, 3)}


class FallenSquads(Squads):
    """blue_0 dies in the first of four steps and blue_1 in the second."""

    visits: ClassVar = {"blue_0": range(1), "blue_1": range(2)}


class Penalties(Squads):
    """All get the same in each of 30 steps, which binary fractions do not hold exactly."""

    length = 30

    def pay(self, agent: str, action: Any) -> float:
        return -0.001


class Buttons(Squads):
    """A team both of whose members press the button, action 1, has a point; each gets its team's points minus the other's."""

    def step(self, actions: dict[str, Any]) -> Any:
        pressed = {team: all(action == 1 for agent, action in actions.items() if agent.startswith(team)) for team in ("red", "blue")}
        self.lead = float(pressed["red"]) - float(pressed["blue"])
        return super().step(actions)

    def pay(self, agent: str, action: Any) -> float:
        return self.lead if agent.startswith("red") else -self.lead


class Timed(Together):
    """All are truncated after three steps."""

    length, truncates = 3, True


class Continuous(Mortal):
    """Mortal with two continuous actions."""

    action: Space = Box(-1, 1, (2,), np.float32)


class Duel(Together):
    """Each gets its own action minus the other's."""

    action: Space = Box(-1, 1, (1,), np.float32)

    def step(self, actions: dict[str, Any]) -> Any:
        self.chosen = {agent: float(np.sum(action)) for agent, action in actions.items()}
        return super().step(actions)

    def pay(self, agent: str, action: Any) -> float:
        return 2 * float(np.sum(action)) - sum(self.chosen.values())


class Bequest(Mortal):
    """Actions do not matter: b gets 1 as it dies, in the second step, and a gets 1 in each of four."""

    def pay(self, agent: str, action: Any) -> float:
        return float(agent == "a" or self.t == 1)


class Nested(Mortal):
    """Mortal with nested observations."""

    observation: Space = Dict({"who": Discrete(2), "where": Dict({"t": Box(-100, 100, (1,), np.float32)})})

    def observe(self, agent: str) -> Any:
        return {"who": np.int64(self.names.index(agent)), "where": {"t": np.array([self.t], np.float32)}}


class Haunted(Together):
    """c is possible and never there; where it is asked, its observation would be NaN."""

    names = ("a", "b", "c")
    visits: ClassVar = {"b": range(2), "c": ()}

    def observe(self, agent: str) -> Any:
        return np.full(2, np.nan, np.float32) if agent == "c" else super().observe(agent)


class MaskedTogether(Together):
    """Of three actions, the one with the number t mod 3 is forbidden; the mask is in the info. Broken if it is taken."""

    visits: ClassVar = {"b": range(2)}
    action: Space = Discrete(3)

    def tell(self, agent: str, over: bool) -> dict[str, Any]:
        return super().tell(agent, over) | {"action_mask": np.arange(3) != self.t % 3}

    def pay(self, agent: str, action: Any) -> float:
        assert action != self.t % 3, "forbidden"
        return super().pay(agent, action)


def pressing(obs: Any, mask: Any, random: np.random.Generator) -> np.ndarray:
    """Take action 1."""
    return np.ones(len(obs), int)


def idle(obs: Any, mask: Any, random: np.random.Generator) -> np.ndarray:
    """Take action 0."""
    return np.zeros(len(obs), int)


class MaskedSquads(MaskedTogether):
    """Two against two with masks, of whom blue_0 dies in the second step."""

    names = ("red_0", "blue_0", "red_1", "blue_1")
    visits: ClassVar = {"blue_0": range(2)}


class InTurn(AECEnv):
    """Three players move in turn, six moves in all; each observes (its number, moves so far).

    A move by player i pays 1 to the player before it, and 100 · i + action to itself.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "in_turn_v0", "render_modes": [], "is_parallelizable": False}
    names: ClassVar[tuple[str, ...]] = ("p0", "p1", "p2")
    length, truncates, render_mode = 6, False, None
    observation: Space = Box(-100, 100, (2,), np.float32)
    action: Space = Discrete(2)

    def __init__(self) -> None:
        self.possible_agents, self.agents = list(self.names), []

    def observation_space(self, agent: str) -> Space:
        return self.observation

    def action_space(self, agent: str) -> Space:
        return self.action

    def observe(self, agent: str) -> Any:
        return np.array([self.names.index(agent), self.t], np.float32)

    def pay(self, mover: str, action: int) -> dict[str, float]:
        number = self.names.index(mover)
        paid = dict.fromkeys(self.names, 0.0)
        paid[mover] += 100.0 * number + float(action)
        if self.t > 0:
            paid[self.names[number - 1]] += 1.0
        return paid

    def ends(self) -> list[str]:
        """Return who ends with this move, the t-th."""
        return [] if self.t < self.length else self.agents

    def after(self, mover: str) -> str:
        number = self.names.index(mover)
        return next((agent for agent in (*self.names[number + 1 :], *self.names) if agent in self.agents), mover)

    def tell(self, agent: str) -> dict[str, Any]:
        return {}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents, self.t = list(self.names), 0
        self.rewards, self._cumulative_rewards = ({agent: 0.0 for agent in self.names} for _ in range(2))
        self.terminations, self.truncations = ({agent: False for agent in self.names} for _ in range(2))
        self.agent_selection = self.names[0]
        self.infos = {agent: self.tell(agent) for agent in self.agents}

    def step(self, action: Any) -> None:
        mover = self.agent_selection
        if self.terminations[mover] or self.truncations[mover]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[mover] = 0.0
        self._clear_rewards()
        self.rewards = dict.fromkeys(self.agents, 0.0) | {who: r for who, r in self.pay(mover, action).items() if who in self.agents}
        self.t += 1
        for agent in self.ends():
            (self.truncations if self.truncates else self.terminations)[agent] = True
        self.agent_selection = self.after(mover)
        self.infos = {agent: self.tell(agent) for agent in self.agents}
        self._accumulate_rewards()
        self._deads_step_first()


class Elimination(InTurn):
    """p1 is thrown out by the move of p2; p0 and p2 go on, to the sixth move."""

    def ends(self) -> list[str]:
        return ["p1"] if self.t == 3 else super().ends()


class Slow(Elimination):
    """Elimination that lets who is dead wait for its turn to be stepped away."""

    def _deads_step_first(self) -> str:
        return self.agent_selection

    def _was_dead_step(self, action: Any) -> None:
        dead = self.agent_selection
        super()._was_dead_step(action)
        self.agent_selection = self.after(dead)


class MaskedInTurn(InTurn):
    """Of three actions the mover may not take number t mod 3; nobody else may do anything. The mask is in the observation."""

    action: Space = Discrete(3)
    observation: Space = Dict({"observation": InTurn.observation, "action_mask": Box(0, 1, (3,), np.int8)})

    def mask(self, agent: str) -> np.ndarray:
        return ((np.arange(3) != self.t % 3) & (agent == self.agent_selection)).astype(np.int8)

    def observe(self, agent: str) -> Any:
        return {"observation": super().observe(agent), "action_mask": self.mask(agent)}

    def pay(self, mover: str, action: int) -> dict[str, float]:
        assert action != self.t % 3, "forbidden"
        return super().pay(mover, action)


class MaskedInfo(MaskedInTurn):
    """The same, with the mask in the info."""

    observation: Space = InTurn.observation

    def observe(self, agent: str) -> Any:
        return InTurn.observe(self, agent)

    def tell(self, agent: str) -> dict[str, Any]:
        return {"action_mask": self.mask(agent)}


class FirstWins(InTurn):
    """Two players. The game is over after the first move if its action is 1, else after the second; who moves last gets 1, the other -1."""

    names = ("p0", "p1")
    length = 2

    def ends(self) -> list[str]:
        return self.agents if self.t == self.length or self.won else []

    def pay(self, mover: str, action: int) -> dict[str, float]:
        self.won = action == 1
        over = self.won or self.t + 1 == self.length
        return {agent: (1.0 if agent == mover else -1.0) * over for agent in self.agents}


class Gift(InTurn):
    """Every player gets 5 with the first move, whoever makes it."""

    def pay(self, mover: str, action: int) -> dict[str, float]:
        return {agent: paid + 5.0 * (self.t == 0) for agent, paid in super().pay(mover, action).items()}


class Returning(InTurn):
    """p1 ends with the move of p2 and is back before the next move of p0, a new agent of the old name."""

    length = 8

    def ends(self) -> list[str]:
        return ["p1"] if self.t == 3 else super().ends()

    def step(self, action: Any) -> None:
        super().step(action)
        if self.t == 3 and "p1" not in self.agents:
            self.agents = list(self.names)
            for table, value in ((self.rewards, 0.0), (self._cumulative_rewards, 0.0), (self.terminations, False)):
                table["p1"] = value  # type: ignore[assignment]
            self.truncations["p1"], self.infos["p1"], self.agent_selection = False, {}, "p0"


class Crew(ParallelEnv):
    """Agents that each play an environment of one agent, without seeing each other, to its end. Masks are in infos, as there."""

    metadata: ClassVar[dict[str, Any]] = {"name": "crew_v0", "render_modes": [], "is_parallelizable": True}
    render_mode = None

    def __init__(self, env_id: str, size: int = 2, **kwargs: Any) -> None:
        self.envs = {f"member_{i}": gym.make(env_id, disable_env_checker=True, **kwargs) for i in range(size)}
        self.possible_agents, self.agents = list(self.envs), []

    def observation_space(self, agent: str) -> Space:
        return self.envs[agent].observation_space

    def action_space(self, agent: str) -> Space:
        return self.envs[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents = list(self.envs)
        begun = {agent: env.reset(seed=None if seed is None else 100 * seed + i) for i, (agent, env) in enumerate(self.envs.items())}
        return {agent: obs for agent, (obs, _) in begun.items()}, {agent: info for agent, (_, info) in begun.items()}

    def step(self, actions: dict[str, Any]) -> Any:
        done = {agent: self.envs[agent].step(actions[agent]) for agent in self.agents}
        obs, rewards, terminated, truncated, infos = ({agent: each[k] for agent, each in done.items()} for k in range(5))
        self.agents = [agent for agent in self.agents if not (terminated[agent] or truncated[agent])]
        return obs, rewards, terminated, truncated, infos


class Walks(ParallelEnv):
    """Two walkers on lines of their own, who do not see each other, modelled on ML-Agents' tests of self-play.

    A walk goes from 0 to -1 or 1 in steps of 0.2: a step costs 0.01, the end that a walker sees as its goal pays 1, the other -1. The game
    ends when both are there. `finals` has what each walker got at its end, game by game.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "walks_v0", "render_modes": [], "is_parallelizable": True}
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents, self.agents = ["a", "b"], []
        self.finals: list[dict[str, float]] = []
        self.random = np.random.default_rng()

    def observation_space(self, agent: str) -> Space:
        return Box(-1, 1, (2,), np.float32)

    def action_space(self, agent: str) -> Space:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.goal = {agent: float(self.random.choice([-1.0, 1.0])) for agent in self.agents}
        self.place, self.reached = dict.fromkeys(self.agents, 0), {}
        return self.look(), {agent: {} for agent in self.agents}

    def look(self) -> dict[str, np.ndarray]:
        return {agent: np.array([self.goal[agent], self.place[agent] / 5], np.float32) for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        paid = dict.fromkeys(self.agents, 0.0)
        for agent in [agent for agent in self.agents if agent not in self.reached]:
            self.place[agent] += 2 * int(actions[agent]) - 1
            paid[agent] = -0.01
            if abs(self.place[agent]) == 5:
                paid[agent] = self.reached[agent] = self.goal[agent] * self.place[agent] / 5
        over, seen, nobody = len(self.reached) == 2, self.look(), dict.fromkeys(self.agents, False)
        ended = dict.fromkeys(self.agents, over)
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if over:
            self.finals.append(self.reached)
            self.agents = []
        return seen, paid, ended, nobody, infos


PARALLEL = (Together, Mortal, Visited, Teams, Timed, Continuous, Nested, MaskedTogether)
TURNS = (InTurn, Elimination, Slow, MaskedInTurn, MaskedInfo, FirstWins)


class FilmedElimination(Elimination):
    """Elimination that renders a square, brighter with each move."""

    metadata: ClassVar[dict[str, Any]] = {**InTurn.metadata, "render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.full((16, 16, 3), 30 * self.t, np.uint8)


class Sized(Together):
    """a is paid `size` in each step, b ten times that, and both see it."""

    size = 1.0

    def observe(self, agent: str) -> Any:
        return np.array([self.names.index(agent), self.size], np.float32)

    def pay(self, agent: str, action: Any) -> float:
        return self.size * (10 if agent == "b" else 1)


class SizedTeller(Sized):
    """Takes its size by a method."""

    def set_parameters(self, values: dict[str, float]) -> None:
        self.size = values["size"] + 0.5


class SizedByOptions(Sized):
    """Takes its size with a reset."""

    metadata: ClassVar[dict[str, Any]] = {"name": "sized_v0", "render_modes": [], "parameters": ["size"]}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.size = (options or {"parameters": {"size": 1.0}})["parameters"]["size"]
        return super().reset(seed, options)
