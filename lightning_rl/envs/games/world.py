"""Copies of a game of this package as a world, without a loop over copies in a step."""

from collections.abc import Mapping

import numpy as np

from lightning_rl.envs.agents.world import Moves, World
from lightning_rl.envs.games.game import Game
from lightning_rl.spaces import Spaces
from lightning_rl.types import Info, State, Tree


class GameWorld(World):
    """E copies of a game for A players, with the same results as `SerialWorld`. All copies start from one seed.

    Args:
        game: the copies.
        side, spaces: the name of the only side, and the spaces of its players.
        name, max_episode_steps, settings: as of `World`; moves of all players count as steps, or steps if they move simultaneously.
    """

    ends_together = True

    def __init__(self, game: Game, side: str, spaces: Spaces, name: str, max_episode_steps: int | None = None, settings: str = "") -> None:
        super().__init__(name, game.num_copies, {side: spaces}, max_episode_steps, settings)
        self.game, self.side_name, self.side = game, side, self.sides[side]
        self.side.present[:] = True

    def _start(self, copies: np.ndarray, seed: int | None) -> None:
        self.game.reset(copies, seed)

    def _step(self, copies: np.ndarray, actions: Mapping[str, Tree]) -> tuple[dict[str, Moves], np.ndarray]:
        game, rows = self.game, self.side.rows[copies]
        acted = self.side.to_move[rows]
        chosen = np.asarray(actions[self.side_name])
        reward = game.step(copies, chosen[rows[acted]] if game.in_turn else chosen[rows])
        over = game.over[copies]
        ended = np.repeat(over[:, None], acted.shape[1], 1)
        return {self.side_name: Moves(reward, ended, ended, ~ended)}, over

    def look(self, copies: np.ndarray) -> None:
        side = self.side
        rows = side.rows[copies].ravel()
        if self.game.in_turn:
            side.to_move[rows] = False
            movers = self.game.mover[copies]
            rows = side.rows[copies, movers]
        else:
            copies, movers = np.divmod(rows, len(side.agents))
        side.to_move[rows] = True
        side.obs[rows] = self.game.observe(copies, movers)
        if len(side.mask):
            side.mask[rows] = self.game.masks(copies, movers)

    def observe_last(self, name: str, rows: np.ndarray) -> tuple[Tree, Tree, Mapping[int, Info]]:
        at = np.divmod(rows, len(self.side.agents))
        mask = self.side.spaces.masks(len(rows))
        if len(mask) and not (over := self.game.over[at[0]]).all():
            seen = self.game.masks(*at)
            mask = seen | (over | ~seen.any(1))[:, None]
        return self.game.observe(*at), mask, {}

    def _are_alike(self, state: State) -> bool:
        return "game" in state

    def _get_copies(self) -> State:
        return {"game": self.game.get_state()}

    def _set_copies(self, state: State) -> bool:
        self.game.set_state(state["game"])
        if self.game.over.any():
            return False
        self.look(self.all)
        return True
