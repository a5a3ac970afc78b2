"""Demonstrations as environments give them, by a rule or at random."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import gymnasium as gym
import numpy as np

from lightning_rl import Demonstration
from lightning_rl.envs.masks import detect_masks
from lightning_rl.spaces import legal_sample
from lightning_rl.types import Tree, tree_map, tree_stack


def played(env: gym.Env, episodes: int, rule: Callable[[Any], Any] | None = None, seed: int = 0) -> list[Demonstration]:
    """Episodes of a rule that tells the action for an observation, or of random legal actions."""
    env.action_space.seed(seed)
    return [episode(env, rule, seed + k) for k in range(episodes)]


def episode(env: gym.Env, rule: Callable[[Any], Any] | None, seed: int) -> Demonstration:
    """One of them."""
    seen, info = env.reset(seed=seed)
    masks, over = detect_masks(env, info, "environment {}"), False
    obs, mask = masks.one(seen, info)
    rows: list[tuple[Tree, float, bool, bool]] = []
    observations, legal = [obs], [mask]
    while not over:
        action = rule(obs) if rule else env.action_space.sample() if isinstance(mask, tuple) else legal_sample(env.action_space, mask)
        seen, reward, terminated, truncated, info = env.step(action)
        over = bool(terminated or truncated)
        obs, mask = masks.one(seen, info, over=over)
        rows.append((as_arrays(action), float(reward), bool(terminated), bool(truncated)))
        observations.append(obs)
        legal.append(mask)
    actions, *flags = zip(*rows, strict=True)
    reward, terminated, truncated = map(np.array, flags)
    said = () if isinstance(legal[0], tuple) else np.stack(legal)
    return Demonstration(tree_stack(list(map(as_arrays, observations))), tree_stack(actions), reward, terminated, truncated, said)


def as_arrays(tree: Tree) -> Tree:
    """A tree of numbers as one of arrays."""
    return tree_map(np.asarray, tree)


@cache
def at_random(env_id: str, kwargs: str, episodes: int = 6) -> list[Demonstration]:
    """Random episodes of an environment, of at most 30 steps; `kwargs` as they are written."""
    env = gym.make(env_id, max_episode_steps=30, **eval(kwargs))
    return played(env, episodes)


def balance(obs: np.ndarray) -> int:
    """A rule that holds CartPole's pole upright for 500 steps."""
    return int(0.1 * obs[0] + 0.3 * obs[1] + 3 * obs[2] + obs[3] > 0)
