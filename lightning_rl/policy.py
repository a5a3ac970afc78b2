"""A trained policy for users, and its evaluation: `lrl.load_policy`, `lrl.evaluate`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Generator

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.evaluation import make_player
from lightning_rl.data.episodes import Episode, summarize
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.masks import Masks
from lightning_rl.errors import SettingError, check_flag, check_range
from lightning_rl.spaces import MASK, Spaces, allocate, is_batch_of
from lightning_rl.threads import torch_threads
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


def evaluate(
    checkpoint_or_algorithm: str | Path | Algorithm,
    episodes: int = 100,
    seed: int = 20_000,
    num_envs: int = 10,
    deterministic: bool = True,
    max_episode_steps: int | None = None,
) -> dict[str, float]:
    """Play episodes with a policy in the environment that it was trained in, and return their statistics.

    It is what `lightning-rl evaluate --json` prints: the same arguments give the same numbers. Nothing is learned meanwhile: the networks
    keep their mode and the global random generators their state.

    Args:
        checkpoint_or_algorithm: a `.ckpt` file, a run's folder (its `checkpoints/best.ckpt`), or an algorithm as it is now.
        episodes: how many to play.
        seed: of the first episode; the others count up.
        num_envs: how many environments act together, which changes the time it takes, and what is drawn if not deterministic.
        deterministic: the middle of the policy (most likely choice, mean) instead of a draw.
        max_episode_steps: an episode is cut after so many environment steps; the environment's own limit, or 10,000 where it has none,
            unless given.

    Returns:
        Of returns, in the environment's own rewards, summed over an episode and not discounted: `return_mean`, `return_std`, `return_min`,
        `return_max`, `return_median`, `iqm` (the mean of the middle half), `ci_low` and `ci_high` (a 95 % bootstrap interval of the mean).
        `length_mean`: in environment steps. `episodes`: how many. `env_steps` (and `updates` for what counts those): how long the algorithm
        had learned. `seed`: the one given.

    Raises:
        SettingError: a number out of range, a checkpoint that cannot be loaded, an algorithm trained on a ready vector environment, which
            cannot be built again, or an environment that cannot be built.
    """
    check_range("episodes", episodes, 1, whole=True)
    check_range("num_envs", num_envs, 1, whole=True)
    check_range("seed", seed, 0, whole=True)
    check_flag("deterministic", deterministic)
    if max_episode_steps is not None:
        check_range("max_episode_steps", max_episode_steps, 1, whole=True)
    algorithm = checkpoint_or_algorithm
    if isinstance(algorithm, str | Path):
        algorithm = load_with_env(algorithm)
    if not isinstance(algorithm, Algorithm):
        raise SettingError(f"evaluate takes a checkpoint, a run's folder or an algorithm, got {type(algorithm).__name__}")
    env: Any = algorithm.env
    if not (isinstance(env, EnvConfig) or callable(env)):
        raise SettingError("evaluate cannot build a ready environment again; train on an id, an EnvConfig or a function that builds one")
    players, masked = min(num_envs, episodes), algorithm.spaces.masked
    with isolate_rng(), torch_threads(1), closing(make_player(env, players, max_episode_steps, masked)) as player:
        return statistics(algorithm, player.play(algorithm.network, episodes, seed, deterministic), seed)


def statistics(algorithm: Algorithm, episodes: list[Episode], seed: int) -> dict[str, float]:
    """Of episodes from a seed on, and how long the algorithm had learned."""
    counts = {"env_steps": algorithm.env_steps, algorithm.counter: algorithm.count}
    return {**summarize(episodes), "episodes": len(episodes), **counts, "seed": seed}


def load_with_env(path: str | Path) -> Algorithm:
    """The algorithm of a checkpoint that says what environment it was trained in."""
    algorithm = Algorithm.load_from_checkpoint(path)
    if algorithm.env is None:
        raise SettingError(f"{path} was trained on a ready environment, which a file cannot name; play it from Python")
    return algorithm
