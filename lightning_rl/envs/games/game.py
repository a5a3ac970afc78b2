"""Base class of games, with many copies in arrays; and the copies of a game as a world, without a loop over them in a step."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from gymnasium.spaces import Space

from lightning_rl.envs.agents.world import Moves, World
from lightning_rl.spaces import Spaces
from lightning_rl.types import Info, State, Tree


class Game:
    """E copies of a game for A players, stepped together. An episode ends for all players in the same step.

    Subclasses define the class attributes, and `_begin`, `_play`, `observe`, `masks` and `draw_text`. `copies` are the indices of K copies.

    Args:
        num_copies: E.

    Attributes:
        over: whether the game of a copy is over, `[E]`.
        mover: the player to move in each copy, `[E]`; meaningless if all move simultaneously.
    """

    name: ClassVar[str]
    agents: ClassVar[tuple[str, ...]] = ("player_0", "player_1")
    in_turn: ClassVar[bool] = True
    """Whether players take turns instead of moving simultaneously."""
    masked: ClassVar[bool] = False
    """Whether some actions may be illegal."""
    num_actions: ClassVar[int]
    observation: ClassVar[Space]
    arrays: ClassVar[tuple[str, ...]] = ("over", "mover")
    """Names of all arrays `[E, ...]` that hold the state of the copies."""
    num_openings: ClassVar[int] = 1
    """Number of openings, such as the ways to deal cards, all equally likely."""

    def __init__(self, num_copies: int) -> None:
        self.num_copies = num_copies
        self.all = np.arange(num_copies)
        self.over = np.zeros(num_copies, dtype=bool)
        self.mover = np.zeros(num_copies, dtype=np.int64)
        self.random = np.random.default_rng()

    def reset(self, copies: np.ndarray | None = None, seed: int | None = None) -> None:
        """Start a game in some copies (default: all); without a seed, continue the current random stream."""
        if seed is not None:
            self.random = np.random.default_rng(seed)
        copies = self.all if copies is None else copies
        self.open(copies, self.random.integers(self.num_openings, size=len(copies)))

    def open(self, copies: np.ndarray, openings: np.ndarray) -> None:
        """Start games in copies with these openings `[K]`."""
        for name in self.arrays:
            getattr(self, name)[copies] = 0
        self._begin(copies, openings)

    def step(self, copies: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Step with the actions `[K]` of the players to move, or `[K, A]` if all move simultaneously. Return the rewards `[K, A]`.

        Raises `ValueError` for an illegal move.
        """
        if actions.min() < 0 or actions.max() >= self.num_actions:
            raise ValueError(f"{self.name}: actions are 0 to {self.num_actions - 1}, got {np.asarray(actions).tolist()}")
        rewards, over = self._play(copies, actions)
        self.over[copies] = over
        if self.in_turn:
            self.mover[copies] = (self.mover[copies] + 1) % len(self.agents)
        return rewards

    def observe(self, copies: np.ndarray, agents: np.ndarray) -> np.ndarray:
        """Return the observations `[K, ...]` of agents `[K]` in their copies, with their own stones or cards first."""
        raise NotImplementedError

    def masks(self, copies: np.ndarray, agents: np.ndarray) -> Tree:
        """Return which actions are legal for agents `[K]`, `[K, M]`: none for agents not to move. () if all always are."""
        return ()

    def draw_text(self, copy: int) -> str:
        """Return a picture of a copy as lines of text."""
        raise NotImplementedError

    def _begin(self, copies: np.ndarray, openings: np.ndarray) -> None:
        """Set up the openings `[K]` in copies whose arrays are zeros."""

    def _play(self, copies: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Make the moves. Return the rewards `[K, A]`, and whether the games are over, `[K]`."""
        raise NotImplementedError

    def are_possible(self) -> np.ndarray:
        """Return whether moves can lead to the state of each copy, `[E]`; a checkpoint may hold any."""
        return np.ones(self.num_copies, dtype=bool)

    def get_state(self) -> State:
        """Return everything that the next steps depend on, as plain data."""
        return {"arrays": {name: getattr(self, name).copy() for name in self.arrays}, "draws": self.random.bit_generator.state}

    def set_state(self, state: State) -> None:
        """Restore a state. Raises `KeyError`, `ValueError` or `TypeError`: it is from another game or another number of copies."""
        self.set_arrays(state["arrays"])
        self.random = np.random.default_rng()
        self.random.bit_generator.state = state["draws"]

    def set_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the states of all copies from arrays. Raises `KeyError` or `ValueError`: they do not fit, or no moves lead to them."""
        for name in self.arrays:
            values, current = np.asarray(arrays[name]), getattr(self, name)
            if values.shape != current.shape or values.dtype != current.dtype:
                raise ValueError(f"{name} has shape {values.shape} of {values.dtype}, not {current.shape} of {current.dtype}")
        if not np.isin(arrays["mover"], range(len(self.agents))).all():
            raise ValueError("mover is not the index of a player")
        for name in self.arrays:
            getattr(self, name)[:] = arrays[name]
        if not self.are_possible().all():
            raise ValueError("no moves lead to this state")


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
