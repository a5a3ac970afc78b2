"""Stepper of copies of a game for a collector: one learner per copy, without a loop over copies in a step."""

from collections.abc import Mapping

import numpy as np

from lightning_rl.envs.agents.stepper import Opponent, points, set_arrays
from lightning_rl.envs.games.game import Game
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces
from lightning_rl.types import EnvStep, State, Tree, first_step, tree_index

ARRAYS = ("seats", "moved", "paid", "returns", "lengths")


class GameStepper:
    """Steps games as `envs.agents.stepper.SeatStepper` does, with the same results, but all copies as a batch: a row is a copy.

    Args:
        game: E copies of a game for A players.
        spaces: the spaces of one player.
        name: name in messages.
        max_episode_steps: truncate episodes after this many moves of all players, or steps if they move simultaneously.
        settings: a fingerprint of the settings, which must equal that of a restored state.
    """

    restarts, workers, can_be_saved = 0, None, True
    opponent: Opponent

    def __init__(self, game: Game, spaces: Spaces, name: str, max_episode_steps: int | None = None, settings: str = "") -> None:
        self.game, self.spaces, self.name, self.max_episode_steps, self.settings = game, spaces, name, max_episode_steps, settings
        self.agents, num = list(spaces.agents), game.num_copies
        self.num_envs, self.num_seats = num, num * len(self.agents)
        self.copies, self.all_valid = np.arange(num), np.ones(num, dtype=bool)
        self.notices: list[str] = []
        self.seats = self.copies % len(self.agents)
        """Index of the learning agent of each copy."""
        self.moved = np.zeros((num, len(self.agents)), dtype=bool)
        """Agents that have moved in the current episode."""
        self.paid = np.zeros(num)
        """Reward of each learner since its last move."""
        self.returns = np.zeros((num, len(self.agents)))
        """Return of each agent in the current episode so far."""
        self.lengths = np.zeros(num, dtype=np.int64)
        """Steps of each copy in its episode."""
        self.final_obs, self.final_mask = self._look(self.copies, self.seats)
        self._forget()

    def _forget(self) -> None:
        """Clear the results of a step, with new arrays."""
        self.reward = np.zeros(self.num_envs)
        self.terminated, self.truncated, self.start = (np.zeros(self.num_envs, dtype=bool) for _ in range(3))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        """Start a game in all copies, all from one seed. Return the first observations of the learners, and their masks."""
        self.opponent.reset(seed)
        self.game.reset(seed=seed)
        self._clear(self.copies)
        self.opponent.begin(self.copies.copy(), self.seats.copy())
        self._play_others()
        self._forget()
        return self._look(self.copies, self.seats)

    def restart_all(self) -> EnvStep:
        """Abandon all episodes and start new ones in the next seats; return a step that is not experience."""
        self.seats = (self.seats + 1) % len(self.agents)
        return first_step(*self.reset(), self.num_envs)

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the learners' actions `[N]`, and play on until each is to move again."""
        self._forget()
        self._move(self.copies, action)
        self._play_others()
        over = self.terminated | self.truncated
        self.reward[~over], self.paid[~over] = self.paid[~over], 0.0
        ended = np.flatnonzero(over)
        obs, mask = self._look(self.copies, self.seats)
        final_obs, final_mask = tree_index((self.final_obs, self.final_mask), ended) if len(ended) else (None, ())
        flags = self.terminated, self.truncated, self.all_valid, self.start
        return EnvStep(obs, self.reward, *flags, ended, final_obs, {}, mask, final_mask)

    def _look(self, copies: np.ndarray, agents: np.ndarray) -> tuple[np.ndarray, Tree]:
        """Return the observations and masks of agents `[K]`."""
        return self.game.observe(copies, agents), self.game.masks(copies, agents)

    def _ask(self, copies: np.ndarray, agents: np.ndarray) -> np.ndarray:
        """Return the opponent's actions for agents `[K]`."""
        rows = copies * len(self.agents) + agents
        return np.asarray(self.opponent.act(*self._look(copies, agents), rows, ~self.moved[copies, agents]))

    def _play_others(self) -> None:
        """Let others move until it is the learner's turn in every copy."""
        while self.game.in_turn and len(waiting := np.flatnonzero(self.game.mover != self.seats)):
            self._move(waiting, self._ask(waiting, self.game.mover[waiting]))

    def _move(self, copies: np.ndarray, actions: np.ndarray) -> None:
        """Step copies with the actions of the players to move, or of the learners if all move simultaneously."""
        if self.game.in_turn:
            self.moved[copies, self.game.mover[copies]] = True
        else:
            others = np.arange(len(self.agents)) != self.seats[copies, None]
            at, agents = np.nonzero(others)
            joint = np.zeros(others.shape, dtype=np.int64)
            joint[others], joint[~others] = self._ask(copies[at], agents), actions
            self.moved[copies], actions = True, joint
        rewards = self.game.step(copies, actions)
        self.lengths[copies] += 1
        self.returns[copies] += rewards
        self.paid[copies] += rewards[np.arange(len(copies)), self.seats[copies]]
        over = copies[self.game.over[copies] | (self.lengths[copies] == self.max_episode_steps)]
        if len(over):
            self._finish(over)

    def _finish(self, over: np.ndarray) -> None:
        """End the episodes of copies, and begin the next ones with the learner in the next seat."""
        played = over[self.moved[over, self.seats[over]]]  # elsewhere the episode was over before the learner could act
        terminated = self.game.over[played]
        self.terminated[played], self.truncated[played], self.reward[played] = terminated, ~terminated, self.paid[played]
        self.final_obs[played], mask = self._look(played, self.seats[played])
        if self.spaces.masked:
            self.final_mask[played] = mask | ~mask.any(1, keepdims=True)
        self.opponent.finish(over, points(self.returns[over], self.seats[over]))
        self.seats[over] = (self.seats[over] + 1) % len(self.agents)
        self.start[over] = True
        self._clear(over)
        self.game.reset(over)
        self.opponent.begin(over, self.seats[over])

    def _clear(self, copies: np.ndarray) -> None:
        self.moved[copies], self.paid[copies], self.returns[copies], self.lengths[copies] = False, 0.0, 0.0, 0

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Raise `SettingError`: games have no parameters."""
        raise SettingError(f"{self.name} takes no lessons: it has no parameters")

    def state_dict(self) -> State:
        """Return everything that the next steps depend on, as plain data; only between two steps."""
        own = {"num_copies": self.num_envs, "settings": self.settings, "game": self.game.get_state(), "opponent": self.opponent.get_state()}
        return own | {name: getattr(self, name).copy() for name in ARRAYS}

    def load_state_dict(self, state: State) -> str | None:
        """Restore a state before the first reset. Return None, or the reason why that is impossible; then reset instead."""
        if "game" not in state:
            return "the checkpoint has environments of another kind"
        if state["num_copies"] != self.num_envs:
            return f"the checkpoint has {state['num_copies']} copies of the environment, not {self.num_envs}"
        if state["settings"] != self.settings:
            return "their settings changed since they were saved"
        try:
            self.game.set_state(state["game"])
            set_arrays(self, state, ARRAYS, len(self.agents))
            if self.game.over.any() or (self.game.in_turn and (self.game.mover != self.seats).any()):
                raise ValueError("between two steps each learner is to move")
        except (KeyError, TypeError, ValueError):
            return f"{self.name} could not be restored exactly"
        self.opponent.set_state(state["opponent"])
        return None
