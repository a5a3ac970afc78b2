"""Copies of VMAS's scenarios as the environments of a collector: all copies and agents in one call, and no loop over copies in a step."""

from collections.abc import Mapping

import numpy as np

from lightning_rl.envs.agents.vmas import VmasCopies
from lightning_rl.envs.lessons import LessonValues
from lightning_rl.errors import SettingError
from lightning_rl.spaces import JOINT, OWN, Spaces
from lightning_rl.types import EnvStep, State, Tree, first_step, tree_index, tree_leaves, tree_map, tree_stack


class BatchedStepper:
    """Steps copies of a scenario; row e * A + a is agent a of copy e. Has the methods of `envs.stepping.Stepper`.

    A copy begins its next episode in the step that ends one.

    Args:
        copies: E copies of A agents with equal spaces.
        spaces: of an agent.
        name: for messages.
        can_be_saved: whether the copies can be saved in the middle of an episode.
        settings: a fingerprint of the settings, which a state must fit.
    """

    restarts, workers = 0, None

    def __init__(self, copies: VmasCopies, spaces: Spaces, name: str, can_be_saved: bool, settings: str = "") -> None:
        self.copies, self.spaces, self.name, self.can_be_saved, self.settings = copies, spaces, name, can_be_saved, settings
        self.agents = len(spaces.agents)
        self.num_envs = copies.env.num_envs * self.agents
        self.all_valid = self.present = np.ones(self.num_envs, dtype=bool)
        self.notices: list[str] = []

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def reset(self, seed: int | None = None) -> tuple[Tree, Tree]:
        """Start an episode everywhere, all from one seed. Return the first observations, and no masks."""
        return self._rows(tree_stack(self.copies.reset(seed), 1)), ()

    def restart_all(self) -> EnvStep:
        """Abandon all episodes and start new ones: a step that is not experience."""
        return first_step(*self.reset(), self.num_envs)

    def step(self, action: Tree) -> EnvStep:
        """Step all copies with the actions `[N, ...]` of agents, in their own form."""
        seen, reward, terminated, truncated = self.copies.step([action[a :: self.agents] for a in range(self.agents)])
        obs, over, final_obs = tree_stack(seen, 1), terminated | truncated, None
        if over.any():
            final_obs = self._rows(tree_index(obs, over))
            first = tree_stack(self.copies.start(over, self.can_be_saved), 1)
            tree_map(lambda rows, new: rows.__setitem__(over, new[over]), obs, first)
        terminated, truncated, start = (np.repeat(each, self.agents) for each in (terminated, truncated, over))
        return EnvStep(self._rows(obs), reward.ravel(), terminated, truncated, self.all_valid, start, np.flatnonzero(start), final_obs, {})

    def _rows(self, obs: Tree) -> Tree:
        """Return observations `[E, A, ...]` as those of rows, with what all agents of a copy see where critics read that."""
        own = tree_map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), obs)
        if not self.spaces.joint:
            return own
        parts = [leaf.reshape(*leaf.shape[:2], -1) for leaf in tree_leaves(obs)]
        seen = np.concatenate(parts, 2)
        there = np.ones(seen.shape[:2], dtype=np.float32)
        return {OWN: own, JOINT: np.repeat(np.concatenate([seen.reshape(len(seen), -1), there], 1), self.agents, 0)}

    def set_lessons(self, lessons: Mapping[str, LessonValues]) -> None:
        """Raise `SettingError`: such an environment takes none."""
        raise SettingError(f"{self.name} takes no lessons: it has no parameters")

    def state_dict(self) -> State:
        """Return all that the next steps depend on, as plain data, between two steps."""
        states = self.copies.get_state() if self.can_be_saved else None
        return {"num_copies": self.copies.env.num_envs, "settings": self.settings, "states": states}

    def load_state_dict(self, state: State) -> str | None:
        """Restore a state, before the first reset. Return why that is not possible, in which case reset; else None."""
        if state["states"] is None or not self.can_be_saved:
            return f"{self.name} cannot be saved in the middle of one"
        if not isinstance(state["states"], dict) or "num_copies" not in state:
            return "the checkpoint has environments of another kind"
        if state["num_copies"] != self.copies.env.num_envs:
            return f"the checkpoint has {state['num_copies']} copies of the environment, not {self.copies.env.num_envs}"
        if state["settings"] != self.settings:
            return "their settings changed since they were saved"
        try:
            self.copies.set_state(state["states"])
        except (KeyError, IndexError, TypeError, ValueError):
            return f"{self.name} did not come back as it was saved"
        return None
