"""Games of groups as PettingZoo `ParallelEnv`s: an agent that sacrifices itself for another, and walkers with a shared goal."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from gymnasium.spaces import Box, Discrete, Space

from lightning_rl.types import Info, Options, StepByAgent, Tree

Observations = dict[str, np.ndarray]


class Group:
    """Base class: all agents begin an episode together and leave it one by one."""

    metadata: ClassVar[dict[str, object]] = {"name": "group_v0", "render_modes": [], "is_parallelizable": True}
    render_mode = None

    def __init__(self, num_agents: int, observation: Space, action: Space) -> None:
        self.possible_agents = [f"agent_{i}" for i in range(num_agents)]
        self.agents: list[str] = []
        self.observation, self.action = observation, action
        self.random = np.random.default_rng()

    def observation_space(self, agent: str) -> Space:
        return self.observation

    def action_space(self, agent: str) -> Space:
        return self.action

    def reset(self, seed: int | None = None, options: Options = None) -> tuple[Observations, dict[str, Info]]:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.begin()
        return self.observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Tree]) -> StepByAgent:
        before = self.agents
        rewards, ended, infos = self.play(actions)
        self.agents = [agent for agent in before if not ended[agent]]
        return self.observe(before), rewards, ended, dict.fromkeys(before, False), infos

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def begin(self) -> None:
        """Begin an episode."""
        raise NotImplementedError

    def play(self, actions: Mapping[str, Tree]) -> tuple[dict[str, float], dict[str, bool], dict[str, Info]]:
        """Step the agents. Return the reward of each agent, whether it has ended, and its info."""
        raise NotImplementedError

    def observe(self, agents: list[str]) -> Observations:
        raise NotImplementedError


class Sacrifice(Group):
    """One agent may sacrifice itself, which earns the other a reward after it has left.

    `agent_0` sacrifices itself by action 1, which costs it 0.3 and ends its episode. From two steps later on, action 1 of `agent_1` gives
    `agent_1` a reward of 1 and ends the game, which otherwise ends after 8 steps. The best return of the group is 0.7, that of `agent_0`
    alone is 0.

    An observation holds: whether the agent is `agent_0`, whether its action 1 has an effect, the time, and whether `agent_0` is present.
    """

    COST, WAIT, LENGTH = 0.3, 2, 8

    def __init__(self) -> None:
        super().__init__(2, Box(0, 1, (4,), np.float32), Discrete(2))

    def begin(self) -> None:
        self.time, self.left = 0, -1  # left: when agent_0 left, or -1

    @property
    def works(self) -> bool:
        """Whether action 1 of agent_1 is rewarded."""
        return self.left >= 0 and self.time >= self.left + self.WAIT

    def play(self, actions: Mapping[str, Tree]) -> tuple[dict[str, float], dict[str, bool], dict[str, Info]]:
        rewards, ended = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, self.time + 1 == self.LENGTH)
        if self.works and actions["agent_1"] == 1:
            rewards["agent_1"], ended["agent_1"] = 1.0, True
        if actions.get("agent_0") == 1:
            rewards["agent_0"], ended["agent_0"], self.left = -self.COST, True, self.time
        self.time += 1
        return rewards, ended, {agent: {} for agent in ended}

    def observe(self, agents: list[str]) -> Observations:
        can = {"agent_0": self.left < 0, "agent_1": self.works}
        state = [self.time / self.LENGTH, float(self.left < 0)]
        return {agent: np.array([agent == "agent_0", can[agent], *state], np.float32) for agent in agents}


class Walkers(Group):
    """Walkers on lines from −1 to 1, each with an observed goal at one end; modelled on ML-Agents' test of groups.

    A step costs 0.01. The episode of a walker ends at either end of its line. The last walker gets 1.06 at its goal and −1.06 at the other
    end; a walker that arrives before others gets at most −0.01. Two that both reach their goals in five steps get 2.04 together. The info
    has `is_success`.

    Args:
        num_walkers: number of walkers.
        continuous: whether an action is a number in [-1, 1], clipped to ±0.2; otherwise the actions 0 and 1 move by −0.2 and 0.2.
    """

    STEP, COST, PAID = 0.2, 0.01, 1.06

    def __init__(self, num_walkers: int = 2, continuous: bool = False) -> None:
        self.continuous = continuous
        super().__init__(num_walkers, Box(-1, 1, (2,), np.float32), Box(-1, 1, (1,), np.float32) if continuous else Discrete(2))

    def begin(self) -> None:
        num = len(self.possible_agents)
        self.goal, self.place = self.random.choice([-1.0, 1.0], num), np.zeros(num)

    def play(self, actions: Mapping[str, Tree]) -> tuple[dict[str, float], dict[str, bool], dict[str, Info]]:
        finals: dict[str, float] = {}
        for agent in self.agents:
            i = self.possible_agents.index(agent)
            move = float(actions[agent][0]) if self.continuous else 2.0 * float(actions[agent]) - 1.0
            self.place[i] = np.clip(self.place[i] + np.clip(move, -self.STEP, self.STEP), -1, 1)
            if abs(self.place[i]) > 1 - 1e-9:
                finals[agent] = self.PAID * self.place[i] * self.goal[i]
        last = len(finals) == len(self.agents)
        rewards = {agent: final if last else min(-self.COST, final) for agent, final in finals.items()}
        infos = {agent: {"is_success": finals[agent] > 0} if agent in finals else {} for agent in self.agents}
        return {agent: rewards.get(agent, -self.COST) for agent in self.agents}, {agent: agent in finals for agent in self.agents}, infos

    def observe(self, agents: list[str]) -> Observations:
        places = [self.possible_agents.index(agent) for agent in agents]
        return {agent: np.array([self.goal[i], self.place[i]], np.float32) for agent, i in zip(agents, places, strict=True)}
