"""What a trained policy earns, outside of runs: `lrl.evaluate`, which is `lightning-rl evaluate` too."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from pytorch_lightning.utilities.seed import isolate_rng

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.evaluation import make_player
from lightning_rl.cpu_threads import torch_threads
from lightning_rl.data.episodes import Episode, summarize
from lightning_rl.envs.config import EnvConfig
from lightning_rl.errors import SettingError, check_flag, check_range


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
