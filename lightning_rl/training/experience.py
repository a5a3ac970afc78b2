"""Build the experience that an algorithm learns from: rollouts, demonstrations, generations. Replay buffers are in `replay.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Generator

from lightning_rl.actors.actor import BuildActor
from lightning_rl.actors.config import ActorsConfig, make_workers
from lightning_rl.actors.evaluator import BuildEvaluator
from lightning_rl.actors.generations import EvaluatorPool, GenerationDataset, GenerationSettings
from lightning_rl.actors.pool import ActorPool
from lightning_rl.data.collector import Collector, Recorder, SteppingCollector
from lightning_rl.data.demonstrations import (
    DemonstrationDataset,
    DemonstrationDraws,
    DemonstrationSettings,
    EpisodeRows,
    NoCollector,
    Rows,
    read_rows,
    split_by_episode,
)
from lightning_rl.data.interleaved import InterleavedCollector, PlayerCollector
from lightning_rl.data.opponents import seat_opponents
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.data.self_play import SelfPlayOpponent
from lightning_rl.data.shared import SideCollector
from lightning_rl.data.tensor_collector import TensorCollector
from lightning_rl.demonstrations.dataset import Demonstration, concatenate_steps, load_demonstrations, summarize
from lightning_rl.envs.agents.stepper import TeamStepper
from lightning_rl.envs.agents.world import SharedEnv
from lightning_rl.envs.config import EnvConfig, EnvSource, count_envs, resolve_in_actor
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.envs.tensors import HostView
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import ActingContext
from lightning_rl.networks.normalization import eval_mode
from lightning_rl.processes.ranks import of_all_ranks
from lightning_rl.rewards.gail import GAIL
from lightning_rl.training.learning import LearningModule
from lightning_rl.types import tree_leaves, tree_to_torch

FROZEN_STEPS = 32
"""Maximum number of steps that a frozen behavior stores."""


def read_demonstrations(algorithm: LearningModule, setting: str, source: object) -> list[Demonstration]:
    """Load the episodes of a dataset by name, or check given episodes; None gives an empty list.

    Args:
        algorithm: the algorithm whose environment they belong to.
        setting: the setting's name, for messages.
        source: the setting's value.

    Raises:
        SettingError: the dataset does not exist, or does not fit the environment.
    """
    if isinstance(source, str):
        return load_demonstrations(source, algorithm.spaces, algorithm.say)
    if not isinstance(source, list | tuple | None):
        raise SettingError(f"{setting} must be the name of a dataset, got {source!r}")
    for k, episode in enumerate(source or ()):
        check_demonstration(f"demonstration {k}", setting, episode, algorithm)
    return list(source or ())


def check_demonstration(who: str, setting: str, given: object, algorithm: LearningModule) -> None:
    """Raise `SettingError` unless `given` is an episode of the algorithm's environment."""
    if not isinstance(given, Demonstration):
        raise SettingError(f"{who} of {setting} is a {type(given).__name__}, not a lightning_rl.Demonstration")
    read_rows(who, given.obs, given.action, None, algorithm.spaces, algorithm.network.distribution)
    steps = {len(np.atleast_1d(column)) for column in (given.reward, given.terminated, given.truncated)}
    rows = len(tree_leaves(given.action)[0])
    if steps != {rows} or not np.isfinite(given.reward).all():
        raise SettingError(f"{who} must have a reward that is a number, terminated and truncated for each of its {rows} actions")


def demonstrated_rows(algorithm: LearningModule, setting: str, source: object) -> list[Rows]:
    """Convert demonstrations to rows for the algorithm's policy: actions as sampled, with masks.

    Raises:
        SettingError: as in `read_demonstrations`, or an action is not legal.
    """
    episodes = read_demonstrations(algorithm, setting, source)
    masks = [episode.action_mask[: len(episode.reward)] if len(episode.action_mask) else None for episode in episodes]
    rows = [
        read_rows(f"demonstration {k}", episode.obs, episode.action, mask, algorithm.spaces, algorithm.network.distribution)
        for k, (episode, mask) in enumerate(zip(episodes, masks, strict=True))
    ]
    return rows if any(mask is not None for mask in masks) else [row._replace(action_mask=()) for row in rows]


def demonstration_draws(algorithm: LearningModule, rows: EpisodeRows, batch_size: int) -> DemonstrationDraws:
    """Return this rank's share of minibatches of rows."""
    seed = shared_seed(algorithm)
    return DemonstrationDraws(rows, batch_size, seed, algorithm.device, algorithm.global_rank, algorithm.world_size)


def show_demonstrations(algorithm: LearningModule) -> None:
    """Pass the demonstrations to each imitation reward signal.

    Raises:
        SettingError: there are no demonstrations, or they do not fit the environment.
    """
    for signal in algorithm.reward_signals.values():
        if isinstance(signal, GAIL):
            if getattr(getattr(algorithm, "replay", None), "demonstrations", None) is not None:
                raise SettingError("reward_signals.gail would treat replay.demonstrations as the policy's own steps: use one of them")
            episodes = read_demonstrations(algorithm, "reward_signals.gail.demo_path", signal.demo_path)
            if not episodes:
                raise SettingError("reward_signals.gail.demo_path: there are no demonstrations to imitate")
            algorithm.say(f"demonstrations: {summarize(episodes)}; gail rewards imitating them")
            obs, action, terminated = tree_to_torch(concatenate_steps(episodes, algorithm.network.distribution.from_env))
            signal.show(obs, action, terminated, algorithm.seed)


def rollouts(algorithm: LearningModule, n_steps: int, log_probs: bool, actors: ActorsConfig | None = None) -> RolloutDataset:
    """Return rollouts of `n_steps` steps per environment, from actors if there are any."""
    if actors is None:
        collector: Any = make_collector(algorithm, n_steps, log_probs, rollouts=True)
    else:
        collector = make_actor_pool(algorithm, n_steps, actors)
    return RolloutDataset(collector, planned_iterations(algorithm, collector))


def make_collector(
    algorithm: LearningModule, n_steps: int, log_probs: bool, rollouts: bool = False
) -> SteppingCollector | SideCollector | InterleavedCollector:
    """Build this rank's environments and collector, for `n_steps` steps per iteration, and seed its random generators.

    `rollouts`: whole rollouts are needed; environments on a device store them there, and players of Unity are served in turns.
    """
    if algorithm.env is None:
        raise SettingError("this algorithm was loaded without an environment; pass env= to train it")
    acting = seed_draws(algorithm)
    if isinstance(algorithm.env, SharedEnv):
        return make_shared_collector(algorithm, n_steps, acting, log_probs)
    if rollouts and are_interleaved(algorithm):
        return make_interleaved_collector(algorithm, n_steps, acting, log_probs)
    stepper = make_fitting_stepper(algorithm.env, algorithm.spaces, first=algorithm.global_rank * count_envs(algorithm.env))
    network, context = algorithm.network, acting_context(algorithm)
    if algorithm.self_play is None:
        seat_opponents(stepper, network)
    else:
        stepper.opponent = make_self_play_opponent(algorithm, len(stepper.seats))  # type: ignore[union-attr]
        if isinstance(stepper, TeamStepper):
            stepper.swap_steps, stepper.team_change = algorithm.self_play.draw_steps, algorithm.self_play.turn_steps
    kind: Callable[..., SteppingCollector] = Collector
    if rollouts and isinstance(getattr(stepper, "envs", None), HostView):
        kind = partial(TensorCollector, cuda_graph=algorithm.compile is not False)
    return kind(stepper, algorithm.spaces, network, n_steps, acting, log_probs, context, sees_next(algorithm))


def are_interleaved(algorithm: LearningModule) -> bool:
    """Return whether there are several players of a scene of Unity to serve in turns, in which each agent learns by itself."""
    env, spaces = algorithm.env, algorithm.spaces
    return isinstance(env, EnvConfig) and env.is_unity and env.num_envs > 1 and not (spaces.groups or spaces.teams or spaces.one_learns)


def make_interleaved_collector(algorithm: LearningModule, n_steps: int, acting: int, log_probs: bool) -> InterleavedCollector:
    """Make the collector of players that are served in turns; `acting`: the seed from which each player's draws have their own."""
    env, parts = algorithm.env, list[PlayerCollector]()
    assert isinstance(env, EnvConfig)
    one, first = replace(env, num_envs=1), algorithm.global_rank * env.num_envs
    seeds = [int(seed) // 2 for seed in np.random.SeedSequence(acting).generate_state(env.num_envs)]
    settings = log_probs, acting_context(algorithm), sees_next(algorithm)
    try:
        for k in range(env.num_envs):
            stepper = make_fitting_stepper(one, algorithm.spaces, first + k)
            parts.append(PlayerCollector(stepper, algorithm.spaces, algorithm.network, n_steps, seeds[k], *settings))
    except BaseException:
        if parts:
            InterleavedCollector(parts).close()
        raise
    return InterleavedCollector(parts)


def make_self_play_opponent(algorithm: LearningModule, num_copies: int) -> SelfPlayOpponent:
    """Return the player of the other seats in `num_copies` copies of a game: the newest policy, past selves and fixed players."""
    config, agents = algorithm.self_play, len(algorithm.spaces.agents)
    assert config is not None
    fixed = [algorithm.make_opponent(name, num_copies * agents) for name in config.names]
    return SelfPlayOpponent(algorithm.past_selves[0].snapshots, config, fixed, num_copies * agents, agents, algorithm.behavior)


def make_shared_collector(algorithm: LearningModule, n_steps: int, acting: int, log_probs: bool) -> SideCollector:
    """Make the collector of one of several behaviors."""
    assert isinstance(algorithm.env, SharedEnv) and algorithm.env.side is not None
    opponent = None if algorithm.self_play is None else make_self_play_opponent(algorithm, algorithm.env.num_envs)
    settings = log_probs, acting_context(algorithm), sees_next(algorithm)
    return SideCollector(algorithm.env.side, algorithm.spaces, algorithm.network, n_steps, acting, *settings, opponent=opponent)


def frozen_experience(algorithm: LearningModule) -> RolloutDataset:
    """Return the dataset of a frozen behavior, which acts but yields nothing."""
    acting = seed_draws(algorithm)
    assert isinstance(algorithm.env, SharedEnv) and algorithm.env.side is not None
    settings = FROZEN_STEPS, acting, False, acting_context(algorithm)
    return RolloutDataset(SideCollector(algorithm.env.side, algorithm.spaces, algorithm.network, *settings, learns=False), 0)


def acting_context(algorithm: LearningModule) -> ActingContext:
    """Return the context in which a run's policy acts and judges: the Trainer's precision, and dropout and BatchNorm in evaluation mode."""
    precision = algorithm.trainer.precision_plugin.forward_context if algorithm.has_trainer else nullcontext

    @contextmanager
    def in_evaluation_mode() -> Iterator[None]:
        with precision(), eval_mode(algorithm.learner.by_mode):
            yield

    return lambda: in_evaluation_mode() if algorithm.learner.by_mode else precision()


def make_actor_pool(algorithm: LearningModule, n_steps: int, config: ActorsConfig) -> ActorPool:
    """Make the actors of this rank."""
    env = algorithm.env
    if algorithm.self_play is not None:
        raise SettingError("self_play cannot be combined with actors or threaded, whose policies are older; leave one out")
    threads = config.num_actors == 1 and config.backend == "threads"
    check_can_be_built(env, here=threads)
    assert env is not None
    num_envs = algorithm.num_envs // config.batch
    seed, first = seed_draws(algorithm), algorithm.global_rank * config.num_actors * count_envs(env)
    build = BuildActor(env if threads else resolve_in_actor(env), algorithm.spaces, n_steps, seed, first, sees_next(algorithm))
    workers = make_workers(build, config, algorithm.network)
    return ActorPool(workers, algorithm.network, config, n_steps, num_envs, acting_context(algorithm))


def generations(algorithm: LearningModule, actors: ActorsConfig, stochastic: bool, **settings: Any) -> GenerationDataset:
    """Return generations of episodes with perturbed weights; `settings` are those of `GenerationSettings`."""
    env = algorithm.env
    check_can_be_built(env)
    assert env is not None and not isinstance(env, VectorEnv)
    seed_draws(algorithm)
    seed = shared_seed(algorithm)
    seed = of_all_ranks(seed)[0] if algorithm.world_size > 1 else seed
    num_envs = count_envs(env)
    build = BuildEvaluator(env, num_envs, algorithm.spaces, stochastic, algorithm.on_nan)
    pool: Any = EvaluatorPool(
        make_workers(build, actors, algorithm.network),
        actors,
        GenerationSettings(**settings, num_envs=num_envs, rank=algorithm.global_rank, ranks=algorithm.world_size, device=algorithm.device),
        algorithm.spaces,
        seed,
        sigma=lambda: algorithm.schedules["sigma"](min(1.0, algorithm.count / algorithm.length)),
        random_collector=lambda: make_collector(algorithm, 1, log_probs=False),  # type: ignore[arg-type, return-value]
    )
    return GenerationDataset(pool, algorithm.max_env_steps)  # an episode has at least one step


def check_can_be_built(env: EnvSource | None, here: bool = False) -> None:
    """Raise `SettingError` if actors cannot build their environments; an actor `here`, in this process, may use ready ones."""
    if env is None:
        raise SettingError("this algorithm was loaded without an environment; pass env= to train it")
    if isinstance(env, VectorEnv) and not here:
        raise SettingError("actors build their environments themselves: pass an id, an EnvConfig, or a function that builds one")


def sees_next(algorithm: LearningModule) -> bool:
    """Return whether a loss or a reward signal needs next observations."""
    return algorithm.needs_next_obs or any(signal.sees or signal.ignore_done for signal in algorithm.reward_signals.values())


def seed_draws(algorithm: LearningModule) -> int:
    """Seed the generator of this rank's learning, and return the seed for acting."""
    entropy = [torch.initial_seed(), algorithm.global_rank, algorithm.count]  # with the count, a resumed run does not repeat itself
    entropy += algorithm.behavior.encode()
    acting, learning = (int(seed) // 2 for seed in np.random.SeedSequence(entropy).generate_state(2))
    algorithm.seed = learning
    algorithm.generator = Generator().manual_seed(learning)
    return acting


def shared_seed(algorithm: LearningModule) -> int:
    """Return a seed that is the same on all ranks, and different after a resume."""
    return int(np.random.SeedSequence([torch.initial_seed(), algorithm.count]).generate_state(1)[0])


def demonstrations(algorithm: LearningModule, source: object, settings: DemonstrationSettings) -> DemonstrationDataset:
    """Return minibatches of demonstrations, from a dataset by name or from given demonstrations.

    Raises:
        SettingError: there are no demonstrations, or they do not fit the environment.
    """
    if source is None:
        raise SettingError("this algorithm was loaded without its demonstrations; pass dataset= to train it")
    seed_draws(algorithm)
    rows = demonstrated_rows(algorithm, "dataset", source)
    lengths = [len(tree_leaves(row.action)[0]) for row in rows]
    parts = split_by_episode(lengths, settings.validation_fraction, settings.split_seed)
    learned, held = (EpisodeRows([rows[episode] for episode in part], settings.sequence_length) for part in parts)
    if not learned.num_rows:
        raise SettingError(f"dataset: {sum(lengths):,} steps in {len(rows)} demonstrations leave nothing to learn from")
    algorithm.say(
        f"demonstrations: {learned.num_rows:,} steps of {learned.num_episodes:,} episodes to learn from, "
        f"{held.num_rows:,} of {held.num_episodes:,} to validate"
    )
    return DemonstrationDataset(
        NoCollector(algorithm.spaces.observation),
        demonstration_draws(algorithm, learned, settings.batch_size),
        held,
        settings,
    )


def planned_iterations(algorithm: LearningModule, collector: Recorder | ActorPool) -> int:
    """Return the minimum number of iterations for the run's environment steps, if all rows are valid."""
    return -(-algorithm.max_env_steps // (collector.n_steps * collector.num_envs * algorithm.world_size))
