"""Scripted players. Each is a function of observations `[K, ...]`, masks `[K, M]` and a random generator, and returns actions `[K]`."""

import numpy as np

from lightning_rl.envs.games.judges import best_moves
from lightning_rl.envs.games.two_players import ConnectFour
from lightning_rl.types import Tree


def random_legal(obs: Tree, mask: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Choose uniformly among the legal moves; for games with masks."""
    return np.where(mask, generator.random(mask.shape), -1.0).argmax(1)


def minimax(obs: np.ndarray, mask: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Play tic-tac-toe perfectly: choose among the moves with the best result against perfect play."""
    return random_legal(obs, best_moves(obs, mask) > 0, generator)


def two_ply(obs: np.ndarray, mask: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Play connect four: win in one move, else block a win of the other's next move, else choose a random legal move."""
    stones = ConnectFour.read(obs)
    placed = ConnectFour.place(stones.sum(1)[:, None], np.arange(ConnectFour.num_actions))
    wins, blocks = (mask & ConnectFour.wins(stones[:, player, None] | placed) for player in (0, 1))
    best = np.where(wins.any(1, keepdims=True), wins, np.where(blocks.any(1, keepdims=True), blocks, mask))
    return random_legal(obs, best, generator)
