"""Connect Four against an opponent that plays at random: an environment whose legal actions change."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from pettingzoo.classic.connect_four.connect_four import raw_env

from lightning_rl.types import Tree


class ConnectFour(gym.Env):
    """PettingZoo's `connect_four_v3` for one player; which of the two begins is drawn for each episode.

    Observes a Dict: `observation [6, 7, 2]`, where one's own pieces and the other's lie, and `action_mask [7]`, the columns that are not
    full. Four in a row end the episode and pay 1, the opponent's -1, a draw 0. A piece in a full column loses at once.
    """

    metadata = raw_env.metadata

    def __init__(self, render_mode: str | None = None) -> None:
        self.game = raw_env(render_mode=render_mode)
        self.render_mode = render_mode
        self.player, self.opponent = self.game.possible_agents
        self.observation_space = self.game.observation_space(self.player)
        self.action_space = self.game.action_space(self.player)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tree, dict[str, Any]]:
        super().reset(seed=seed)
        self.game.reset()
        order = self.game.possible_agents
        self.player, self.opponent = order if self.np_random.integers(2) else order[::-1]
        self.answer()
        return self.game.observe(self.player), {}

    def step(self, action: Any) -> tuple[Tree, float, bool, bool, dict[str, Any]]:
        before = self.game.observe(self.player)
        if not before["action_mask"][action]:
            return before, -1.0, True, False, {}
        self.game.step(action)
        self.answer()
        return self.game.observe(self.player), float(self.game.rewards[self.player]), self.game.terminations[self.player], False, {}

    def answer(self) -> None:
        """The opponent's move, where it has one."""
        if self.game.agent_selection == self.opponent and not self.game.terminations[self.opponent]:
            legal = np.flatnonzero(self.game.observe(self.opponent)["action_mask"])
            self.game.step(self.np_random.choice(legal))

    def render(self) -> Any:
        return self.game.render()

    def close(self) -> None:
        self.game.close()
