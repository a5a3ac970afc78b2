"""Which experience an algorithm learns from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Generator

from lightning_rl.actors.actor import BuildActor
from lightning_rl.actors.backends import make_workers
from lightning_rl.actors.config import ActorsConfig
from lightning_rl.actors.evaluator import BuildEvaluator
from lightning_rl.actors.generations import EvaluatorPool, GenerationDataset, GenerationSettings
from lightning_rl.actors.pool import ActorPool
from lightning_rl.algorithms.demonstrations import demonstrated_rows, demonstration_draws
from lightning_rl.algorithms.replay_buffer import make_replay_buffer
from lightning_rl.algorithms.run_state import saved_buffer
from lightning_rl.data.collector import Collector
from lightning_rl.data.demonstration_dataset import DemonstrationDataset, DemonstrationSettings, NoCollector
from lightning_rl.data.demonstrations import EpisodeRows, split_by_episode
from lightning_rl.data.replay_config import ReplayConfig
from lightning_rl.data.replay_dataset import ReplayDataset, ReplaySettings
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.envs.config import EnvConfig, in_turn
from lightning_rl.envs.stepping import make_fitting_stepper
from lightning_rl.errors import SettingError
from lightning_rl.types import tree_leaves


def rollouts(algorithm: Any, n_steps: int, log_probs: bool, actors: ActorsConfig | None = None) -> RolloutDataset:
    """Rollouts of `n_steps` steps from each environment, which actors step if there are any."""
    collector: Any = make_collector(algorithm, n_steps, log_probs) if actors is None else make_actor_pool(algorithm, n_steps, actors)
    return RolloutDataset(collector, planned_iterations(algorithm, collector))


def replay(algorithm: Any, settings: ReplaySettings, config: ReplayConfig, actors: ActorsConfig | None = None) -> ReplayDataset:
    """Experience kept in a buffer of this rank."""
    ranks = algorithm.trainer.world_size
    saved = saved_buffer(algorithm) is not None
    buffer = make_replay_buffer(algorithm, settings, config, saved)
    steps = max(1, settings.steps_per_iteration // (algorithm.num_envs * ranks))
    if algorithm.trainer.fast_dev_run:  # its first iteration must run the losses; the policy of TD3 waits for the second update
        enough = buffer.open_rows + settings.batch_size
        settings = replace(settings, learning_starts=min(settings.learning_starts, enough * ranks))
        steps = max(steps, -(-(enough + 2 * settings.train_freq) // algorithm.num_envs))
    if settings.learning_starts >= algorithm.max_env_steps:
        algorithm.say(f"learning_starts {settings.learning_starts:,}: a run of {algorithm.max_env_steps:,} steps ends before it learns")
    resumed = algorithm.env_steps > 0
    if resumed and not saved:
        goes_on = "with the demonstrations" if len(buffer) else f"after {settings.learning_starts:,} steps"
        algorithm.say(f"the checkpoint holds no replay buffer: learning goes on {goes_on}")
    collector: Any = make_collector(algorithm, steps, False) if actors is None else make_actor_pool(algorithm, steps, actors)
    signals = dict(algorithm.reward_signals.items())
    return ReplayDataset(collector, buffer, signals, settings, algorithm.device, planned_iterations(algorithm, collector), ranks, resumed)


def make_collector(algorithm: Any, n_steps: int, log_probs: bool) -> Collector:
    """The environments of a run on this rank, `n_steps` steps of each an iteration, and the seeds of the rank's draws."""
    if algorithm.env is None:
        raise SettingError("this algorithm was loaded without an environment; pass env= to train it")
    acting = seed_draws(algorithm)
    stepper = make_fitting_stepper(algorithm.env, algorithm.spaces, first=algorithm.global_rank * algorithm.num_envs)
    precision = algorithm.trainer.precision_plugin.forward_context
    return Collector(stepper, algorithm.spaces, algorithm.network, n_steps, acting, log_probs, precision, sees_next(algorithm))


def make_actor_pool(algorithm: Any, n_steps: int, config: ActorsConfig) -> ActorPool:
    """The actors of this rank."""
    env = algorithm.env
    threads = config.num_actors == 1 and config.backend == "threads"
    check_can_be_built(env, here=threads)
    num_envs = algorithm.num_envs // config.batch
    seed, first = seed_draws(algorithm), algorithm.global_rank * config.num_actors * num_envs
    build = BuildActor(env if threads else in_turn(env), algorithm.spaces, n_steps, seed, first, algorithm.on_nan, sees_next(algorithm))
    workers = make_workers(build, config, algorithm.network)
    return ActorPool(workers, algorithm.network, config, n_steps, num_envs, algorithm.trainer.precision_plugin.forward_context)


def generations(algorithm: Any, actors: ActorsConfig, **settings: Any) -> GenerationDataset:
    """Generations of episodes with weights that were moved; `settings` are those of `GenerationSettings`."""
    env, trainer = algorithm.env, algorithm.trainer
    check_can_be_built(env)
    seed_draws(algorithm)
    seed = trainer.strategy.broadcast(int(np.random.SeedSequence([torch.initial_seed(), algorithm.count]).generate_state(1)[0]))
    num_envs = env.num_envs if isinstance(env, EnvConfig) else 8
    names = tuple(name for name, parameter in algorithm.network.named_parameters() if parameter.requires_grad)
    build = BuildEvaluator(env, num_envs, algorithm.spaces, names, algorithm.stochastic, algorithm.on_nan)
    pool: Any = EvaluatorPool(
        make_workers(build, actors, algorithm.network),
        actors,
        GenerationSettings(**settings, num_envs=num_envs, rank=algorithm.global_rank, ranks=trainer.world_size, device=algorithm.device),
        algorithm.spaces,
        seed,
        sigma=lambda: algorithm.sigma(min(1.0, algorithm.count / algorithm.length)),
        random_collector=lambda: make_collector(algorithm, 1, log_probs=False),
    )
    return GenerationDataset(pool, algorithm.max_env_steps)  # an episode has a step at least


def check_can_be_built(env: Any, here: bool = False) -> None:
    """Raise `SettingError` where actors cannot build their environments; one that is `here`, in this process, may have ready ones."""
    if env is None:
        raise SettingError("this algorithm was loaded without an environment; pass env= to train it")
    if isinstance(env, VectorEnv) and not here:
        raise SettingError("actors build their environments themselves: pass an id, an EnvConfig, or a function that builds one")


def sees_next(algorithm: Any) -> bool:
    """Whether a reward signal asks for what was seen next."""
    return any(signal.sees or signal.ignore_done for signal in algorithm.reward_signals.values())


def seed_draws(algorithm: Any) -> int:
    """Give the rank's learning a generator of its own. Returns the seed of its acting."""
    entropy = [torch.initial_seed(), algorithm.global_rank, algorithm.count]  # a continued run draws on, it does not repeat
    acting, learning = (int(seed) // 2 for seed in np.random.SeedSequence(entropy).generate_state(2))
    algorithm.seed = learning
    algorithm.generator = Generator().manual_seed(learning)
    return acting


def demonstrations(algorithm: Any, source: Any, settings: DemonstrationSettings) -> DemonstrationDataset:
    """Minibatches of demonstrations: of a dataset by its name, or given ones.

    Raises:
        SettingError: there are none, or they do not fit the environment.
    """
    if source is None:
        raise SettingError("this algorithm was loaded without its demonstrations; pass dataset= to train it")
    seed_draws(algorithm)
    rows = demonstrated_rows(algorithm, "dataset", source)
    lengths = [len(tree_leaves(each.action)[0]) for each in rows]
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


def planned_iterations(algorithm: Any, collector: Collector) -> int:
    """The fewest that reach the run's environment steps, if all rows are experience."""
    return -(-algorithm.max_env_steps // (collector.n_steps * collector.num_envs * algorithm.trainer.world_size))
