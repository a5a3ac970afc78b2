"""One copy of a game with PettingZoo's two APIs, for probing, evaluation, videos and play; PettingZoo itself is not needed."""

from collections.abc import Iterator, Mapping
from copy import copy, deepcopy
from typing import Self

import numpy as np
from gymnasium.spaces import Discrete, Space

from lightning_rl.envs.games.game import Game
from lightning_rl.spaces import MASK
from lightning_rl.types import Info, Options, State, StepByAgent, Tree

PIXELS = 24
"""Side of a cell in a rendered image."""


def make_one_copy(game: type[Game], render_mode: str | None = None) -> "OneCopy":
    """Build one copy of a game."""
    return (TurnGame if game.in_turn else ParallelGame)(game, render_mode)


class OneCopy:
    """Common base of both APIs: names, spaces, masks in the infos, rendering and state.

    Args:
        game: class of the game.
        render_mode: `ansi` (text) or `rgb_array`.
    """

    kept: tuple[str, ...] = ("agents",)
    """The attributes that the next steps depend on, in addition to the game's state."""

    def __init__(self, game: type[Game], render_mode: str | None = None) -> None:
        self.game, self.render_mode = game(1), render_mode
        self.metadata = {"name": game.name, "render_modes": ["ansi", "rgb_array"], "is_parallelizable": False, "render_fps": 2}
        self.possible_agents, self.agents = list(game.agents), list(game.agents)
        self.observation_spaces: dict[str, Space] = {agent: deepcopy(game.observation) for agent in game.agents}
        self.action_spaces: dict[str, Space] = {agent: Discrete(game.num_actions) for agent in game.agents}
        self.only, self.numbers = np.array([0]), {agent: np.array([a]) for a, agent in enumerate(game.agents)}

    def __str__(self) -> str:
        return str(self.metadata["name"])

    @property
    def unwrapped(self) -> Self:
        return self

    @property
    def num_agents(self) -> int:
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        return len(self.possible_agents)

    def observation_space(self, agent: str) -> Space:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> Space:
        return self.action_spaces[agent]

    def observe(self, agent: str) -> np.ndarray:
        """Return the observation of an agent."""
        return self.game.observe(self.only, self.numbers[agent])[0]

    def _make_infos(self) -> dict[str, Info]:
        """Return the mask of each agent that is present, all false for those not to move."""
        if not self.game.masked:
            return {agent: {} for agent in self.agents}
        return {agent: {MASK: self.game.masks(self.only, self.numbers[agent])[0].astype(np.int8)} for agent in self.agents}

    def render(self) -> np.ndarray | str:
        """Render the board as text, or as an image `[H, W, 3]` from the first player's observation."""
        if self.render_mode == "rgb_array":
            seen = np.atleast_2d(self.observe(self.possible_agents[0]).astype(np.uint8))
            colors = np.array([[235, 235, 235], [60, 60, 60], [200, 60, 40]], np.uint8)
            cells = seen[..., 0] + 2 * seen[..., 1] if seen.ndim == 3 else seen
            return np.kron(colors[cells], np.ones((PIXELS, PIXELS, 1), np.uint8))
        return self.game.draw_text(0)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def get_state(self) -> State:
        """Return everything that the next steps depend on, as plain data."""
        return {"game": self.game.get_state(), **{name: copy(getattr(self, name)) for name in self.kept}}

    def set_state(self, state: State) -> None:
        """Restore a state."""
        self.game.set_state(state["game"])
        for name in self.kept:
            setattr(self, name, copy(state[name]))
        self.infos = self._make_infos()


class ParallelGame(OneCopy):
    """A game with simultaneous moves, as a PettingZoo `ParallelEnv`."""

    def reset(self, seed: int | None = None, options: Options = None) -> tuple[dict[str, np.ndarray], dict[str, Info]]:
        self.game.reset(seed=seed)
        self.agents = list(self.possible_agents)
        return {agent: self.observe(agent) for agent in self.agents}, self._make_infos()

    def step(self, actions: Mapping[str, Tree]) -> StepByAgent:
        agents = self.possible_agents
        rewards = self.game.step(self.only, np.array([[actions[agent] for agent in agents]]))[0]
        over, infos = bool(self.game.over[0]), self._make_infos()
        if over:
            self.agents = []
        obs = {agent: self.observe(agent) for agent in agents}
        return obs, dict(zip(agents, rewards.tolist(), strict=True)), dict.fromkeys(agents, over), dict.fromkeys(agents, False), infos


class TurnGame(OneCopy):
    """A turn-based game, as a PettingZoo `AECEnv`."""

    kept = ("agents", "rewards", "_cumulative_rewards", "terminations", "truncations", "agent_selection")
    agent_selection: str
    rewards: dict[str, float]
    _cumulative_rewards: dict[str, float]
    terminations: dict[str, bool]
    truncations: dict[str, bool]
    infos: dict[str, Info]

    def reset(self, seed: int | None = None, options: Options = None) -> None:
        self.game.reset(seed=seed)
        self.agents = list(self.possible_agents)
        self.rewards, self._cumulative_rewards = dict.fromkeys(self.agents, 0.0), dict.fromkeys(self.agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(self.agents, False), dict.fromkeys(self.agents, False)
        self._look()

    def _look(self) -> None:
        self.agent_selection = self.possible_agents[int(self.game.mover[0])]
        self.infos = self._make_infos()

    def step(self, action: Tree | None) -> None:
        mover = self.agent_selection
        if self.terminations[mover]:
            self._leave(mover, action)
            return
        rewards = self.game.step(self.only, np.array([action]))[0]
        self.rewards = dict(zip(self.possible_agents, rewards.tolist(), strict=True))
        self._cumulative_rewards[mover] = 0.0
        for agent, reward in self.rewards.items():
            self._cumulative_rewards[agent] += reward
        self.terminations = dict.fromkeys(self.agents, bool(self.game.over[0]))
        self._look()

    def _leave(self, agent: str, action: Tree | None) -> None:
        """Remove an agent whose game is over."""
        if action is not None:
            raise ValueError("the game is over: the only action is None")
        self.agents.remove(agent)
        for table in (self.rewards, self._cumulative_rewards, self.terminations, self.truncations, self.infos):
            del table[agent]
        self.rewards = dict.fromkeys(self.agents, 0.0)
        if self.agents:
            self.agent_selection = self.agents[0]

    def last(self, observe: bool = True) -> tuple[np.ndarray | None, float, bool, bool, Info]:
        """Return observation, rewards since its last move, termination, truncation and info of the agent to move."""
        agent = self.agent_selection
        obs = self.observe(agent) if observe else None
        return obs, self._cumulative_rewards[agent], self.terminations[agent], self.truncations[agent], self.infos[agent]

    def agent_iter(self, max_iter: int = 2**63) -> Iterator[str]:
        """Yield the agent to move, until all have left."""
        while self.agents and max_iter > 0:
            max_iter -= 1
            yield self.agent_selection
