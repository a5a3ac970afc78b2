"""A trained policy for use: observations in, environment actions out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.envs.masks import Masks
from lightning_rl.errors import SettingError
from lightning_rl.spaces import MASK, Spaces, allocate, is_batch_of
from lightning_rl.types import Tree, tree_index, tree_leaves, tree_map, tree_to_numpy, tree_to_torch


class Policy:
    """Acts with a network on numpy observations; needs neither an environment nor a Trainer.

    Args:
        network: of an algorithm, with its normalizer inside.
        spaces: of the environment it was trained on.
        seed: of the draws when not deterministic.
    """

    def __init__(self, network: Any, spaces: Spaces, seed: int = 0) -> None:
        self.network, self.spaces = network.eval(), spaces
        self.device = next(network.parameters()).device
        self.generator = Generator(self.device).manual_seed(seed)

    @torch.inference_mode()
    def act(
        self, obs: Tree, memory: Tree | None = None, *, action_mask: Tree | None = None, deterministic: bool = True
    ) -> tuple[Tree, Tree]:
        """The environment's action, as numpy, for one observation or for a batch of them, and the memory for the next call.

        Args:
            obs: `[...]` or `[N, ...]`, a tree like the observation space; it may have a key `action_mask`.
            memory: what the last call returned; None at the start of an episode. In a batch, zeros in a row begin one there.
            action_mask: True for allowed choices, `[M]` or `[N, M]`, or another form of `envs/masks.py`; a policy that was trained with
                masks needs one.
            deterministic: the most likely action instead of a drawn one.

        Raises:
            SettingError: a mask that does not fit, allows nothing, or is missing; a memory of another number of observations.
        """
        if isinstance(obs, dict) and MASK in obs:
            action_mask = obs[MASK] if action_mask is None else action_mask
            obs = {key: child for key, child in obs.items() if key != MASK}
        if action_mask is None and self.spaces.masked:
            raise SettingError(f"this policy was trained with masks: give an {MASK}, beside the observation or as a key of it")
        batched = is_batch_of(self.spaces.observation, obs)
        if not batched:
            obs = tree_map(lambda leaf: np.asarray(leaf)[None], obs)
        num = len(tree_leaves(obs)[0])
        rows = tree_map(_copy_into, allocate(self.spaces.observation, num), obs)
        start = torch.full((num,), memory is None, device=self.device)
        memory = self.network.initial_memory(num) if memory is None else memory
        for leaf in tree_leaves(memory):
            if len(leaf) != num:
                raise SettingError(
                    f"the memory is of {len(leaf)} observations, not of {num}: hand back that of the last call for the same ones"
                )
        mask: Tree = ()
        if action_mask is not None:
            masks = Masks(self.spaces.action, "observation {}")
            read = masks.batch(action_mask, num) if batched else masks.one((), {MASK: action_mask})[1][None]
            mask = tree_to_torch(read, self.device)
        action, memory = self.network.sample(
            tree_to_torch(rows, self.device), memory, start, mask, deterministic=deterministic, generator=self.generator
        )
        env_action = self.network.distribution.to_env(tree_to_numpy(action))
        return (env_action if batched else tree_index(env_action, 0)), memory


def load_policy(path: str | Path, map_location: Any = "cpu") -> Policy:
    """The policy of a checkpoint, or of a run's folder (its `checkpoints/best.ckpt`), ready to act.

    Raises:
        SettingError: see `Algorithm.load_from_checkpoint`.
    """
    algorithm = Algorithm.load_from_checkpoint(path, map_location)
    return Policy(algorithm.network.to(map_location), algorithm.spaces)


def _copy_into(target: np.ndarray, source: Any) -> np.ndarray:
    target[...] = source
    return target
