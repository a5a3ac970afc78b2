"""Exact evaluation of policies in small games: exploitability and optimal moves, from the whole game tree.

A policy is a function from observations `[K, ...]` and masks `[K, M]` of all information sets, in one batch, to probabilities `[K, M]`. It
plays both seats. The games are zero-sum.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np

from lightning_rl.envs.games import GAMES
from lightning_rl.envs.games.game import Game
from lightning_rl.envs.games.two_players import ConnectFour
from lightning_rl.types import Tree

Policy = Callable[[np.ndarray, Tree], np.ndarray]
JUDGED = [name for name, game in GAMES.items() if game is not ConnectFour]
"""Games that are small enough."""
MAX_STATES = 20_000
"""Maximum number of states in a level of a tree."""


class Level(NamedTuple):
    """The n unfinished states of a game after a number of moves; states that are reached in several ways count once.

    mover: the player to move, `[n]`.  obs: its observations, `[n, ...]`.  mask: its legal actions, `[n, M]`.
    information_set: the index of each state's information set, `[n]`, among those of the level.
    child: the state of the next level that an action leads to, `[n, M]`, -1 if it is illegal or ends the game.
    reward: the rewards of an action, `[n, M, 2]`.  ends: whether it ends the game, `[n, M]`.
    """

    mover: np.ndarray
    obs: np.ndarray
    mask: np.ndarray
    information_set: np.ndarray
    child: np.ndarray
    reward: np.ndarray
    ends: np.ndarray


class GameTree:
    """All states of a turn-based game for two players, level by level, from the first move on.

    Args:
        game: class of the game.
    """

    def __init__(self, game: type[Game]) -> None:
        self.game, self.num_openings = game, game.num_openings
        self.levels: list[Level] = []
        start = game(game.num_openings)
        start.open(start.all, start.all)
        states = {name: getattr(start, name) for name in game.arrays}
        while len(states["over"]):
            states = self._expand(states)

    def _expand(self, states: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Add the level of these states. Return the states of the next level."""
        num, actions = len(states["over"]), self.game.num_actions
        if num > MAX_STATES:
            raise ValueError(f"{self.game.name} has too many states to enumerate them")
        before = self._set_up(states)
        obs = before.observe(before.all, before.mover)
        mask = before.masks(before.all, before.mover) if self.game.masked else np.ones((num, actions), dtype=bool)
        seen = np.concatenate((before.mover[:, None], obs.reshape(num, -1)), 1)
        information_set = np.unique(seen, axis=0, return_inverse=True)[1].ravel()
        state, action = np.nonzero(mask)
        after = self._set_up({name: values[state] for name, values in states.items()})
        reward = np.zeros((num, actions, 2))
        reward[state, action] = after.step(after.all, action)
        goes_on = np.flatnonzero(~after.over)
        reached = {name: getattr(after, name)[goes_on] for name in self.game.arrays}
        numbers = np.concatenate([values.reshape(len(goes_on), prod(values.shape[1:])) for values in reached.values()], 1)
        _, first, which = np.unique(numbers, axis=0, return_index=True, return_inverse=True)
        child, ends = np.full((num, actions), -1), np.zeros((num, actions), dtype=bool)
        child[state[goes_on], action[goes_on]] = which.ravel()
        ends[state, action] = after.over
        self.levels.append(Level(before.mover, obs, mask, information_set, child, reward, ends))
        return {name: values[first] for name, values in reached.items()}

    def _set_up(self, states: dict[str, np.ndarray]) -> Game:
        game = self.game(len(states["over"]))
        game.set_arrays(states)
        return game

    @property
    def num_states(self) -> int:
        """Return the number of unfinished states."""
        return sum(len(level.mover) for level in self.levels)

    def ask(self, policy: Policy) -> list[np.ndarray]:
        """Return a policy's action probabilities `[n, M]` for each level; 0 for illegal actions."""
        mask = np.concatenate([level.mask for level in self.levels])
        given = policy(np.concatenate([level.obs for level in self.levels]), mask if self.game.masked else ())
        probs = np.where(mask, np.asarray(given, dtype=np.float64), 0.0)
        if not np.allclose(probs.sum(1), 1.0, atol=1e-4):
            raise ValueError("the policy's probabilities of legal actions do not sum to 1")
        probs /= probs.sum(1, keepdims=True)
        return np.split(probs, np.cumsum([len(level.mover) for level in self.levels])[:-1])

    def outcomes(self, policy: Policy) -> np.ndarray:
        """Return the probabilities of a win of the first player, a draw, and a win of the second, if the policy plays both."""
        later = np.zeros((1, 3))
        for level, probs in zip(reversed(self.levels), reversed(self.ask(policy)), strict=True):
            results = (np.sign(level.reward[..., 0])[..., None] == np.array([1, 0, -1])) & level.ends[..., None]
            later = (probs[..., None] * (results + self._next(level, later))).sum(1)
        return later.mean(0)

    def best_responses(self, policy: Policy) -> np.ndarray:
        """Return the expected rewards of the best response to a policy as the first and as the second player, `[2]`."""
        probs = self.ask(policy)
        return np.array([self._respond(seat, probs) for seat in range(2)])

    def nash_conv(self, policy: Policy) -> float:
        """Return the sum of the rewards of both seats' best responses to a policy that plays both seats; 0 in an equilibrium."""
        return float(self.best_responses(policy).sum())

    def _respond(self, seat: int, probs: list[np.ndarray]) -> float:
        """Return the expected reward of the best response in a seat."""
        reach = np.full(self.num_openings, 1 / self.num_openings)
        reaches = []
        for level, chosen in zip(self.levels, probs, strict=True):  # probability that the others and chance lead to each state
            reaches.append(reach)
            lead = reach[:, None] * np.where(level.mover[:, None] == seat, 1.0, chosen)
            reach = np.bincount(level.child[level.child >= 0], lead[level.child >= 0])
        later = np.zeros(1)
        for level, chosen, reach in zip(reversed(self.levels), reversed(probs), reversed(reaches), strict=True):
            value = level.reward[..., seat] + self._next(level, later)
            weighted = np.zeros((level.information_set.max() + 1, value.shape[1]))
            np.add.at(weighted, level.information_set, reach[:, None] * value)  # states of an information set are indistinguishable
            best = np.where(level.mask, weighted[level.information_set], -np.inf).argmax(1)
            later = np.where(level.mover == seat, value[np.arange(len(value)), best], (chosen * value).sum(1))
        return float(later.mean())

    def optimal_moves(self) -> list[np.ndarray]:
        """Return the moves `[n, M]` of each level with the best result against perfect play, for a game without hidden information."""
        later, best = np.zeros((1, 2)), []
        for level in reversed(self.levels):
            value = level.reward + self._next(level, later)
            mover_value = np.where(level.mask, value[np.arange(len(value)), :, level.mover], -np.inf)
            best.append(mover_value == mover_value.max(1, keepdims=True))
            later = value[np.arange(len(value)), mover_value.argmax(1)]
        return best[::-1]

    def _next(self, level: Level, later: np.ndarray) -> np.ndarray:
        """Return for each action the value or values of the state it leads to; 0 if there is none."""
        goes_on = level.child >= 0
        return later[level.child] * goes_on.reshape(*goes_on.shape, *[1] * (later.ndim - 1))


@cache
def find_tree(name: str) -> GameTree:
    """Return the tree of the game of an id: tic-tac-toe or Kuhn poker."""
    return GameTree(GAMES[name])


def nash_conv(env_id: str, policy: Policy) -> float:
    """Return the sum of the rewards of both seats' best responses to a policy that plays both seats; 0 in an equilibrium.

    `env_id`: one of `JUDGED`.
    """
    return 2 * exploitability(env_id, policy)


def exploitability(env_id: str, policy: Policy) -> float:
    """Return half of `nash_conv`: the mean reward of the best response over the seats. Arguments are the same."""
    game = GAMES[env_id]
    if not game.in_turn:
        one = game(1)
        probs = np.asarray(policy(one.observe(one.all, one.all), ()), dtype=np.float64)[0]
        return float((one.payoff @ probs).max())  # type: ignore[attr-defined]
    return find_tree(env_id).nash_conv(policy) / 2


def best_moves(obs: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the moves of tic-tac-toe with the best result against perfect play, `[K, 9]`, at observations `[K, 3, 3, 2]`."""
    return _find_best_moves()[number_boards(obs)] & mask


@cache
def _find_best_moves() -> np.ndarray:
    tree = find_tree("lightning_rl.envs.games.tic_tac_toe")
    table = np.zeros((3**9, 9), dtype=bool)
    for level, moves in zip(tree.levels, tree.optimal_moves(), strict=True):
        table[number_boards(level.obs)] = moves
    return table


def number_boards(obs: np.ndarray) -> np.ndarray:
    """Return a number below 3⁹ for each observation of tic-tac-toe, from the content of each cell: empty, own stone, other's stone."""
    cells = (obs @ np.array([1, 2])).reshape(-1, 9)
    return cells @ 3 ** np.arange(9)
