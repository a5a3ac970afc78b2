"""What a run prints before it begins: what learns, from what, where, and how it is evaluated."""

from __future__ import annotations

import math

import pytorch_lightning as pl
import torch

from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.protocols import AlgorithmRun, callbacks_of
from lightning_rl.spaces import describe_space


def describe_run(trainer: pl.Trainer, algorithm: AlgorithmRun) -> list[str]:
    """Return lines about a run that is about to begin or to go on."""
    name, collector, spaces = type(algorithm).__name__, algorithm.collector, algorithm.spaces
    behaviors = f", behaviors {', '.join(algorithm.learner_names)}" if algorithm.learner_names else ""
    copies = "" if collector.n_steps == math.inf else f", {collector.num_envs} cop{'ies' if collector.num_envs > 1 else 'y'}"
    parameters = [parameter for parameter in algorithm.parameters() if parameter.requires_grad]
    threads = torch.get_num_threads()
    cpu = f"the CPU, {threads} thread{'s' * (threads > 1)}"
    device = cpu if parameters[0].device.type == "cpu" else str(parameters[0].device)
    ranks = f", {trainer.world_size} processes" if trainer.world_size > 1 else ""
    seed = getattr(trainer, "seed", None)
    at = f", continued at {algorithm.count:,}" if algorithm.count else ""
    return [
        f"{name} on {collector.name}{copies}{behaviors}",
        f"  observations  {describe_space(spaces.observation)}",
        f"  actions       {describe_space(spaces.action)}{', masked' if spaces.masked else ''}",
        f"  learns        {sum(each.numel() for each in parameters):,} parameters on {device}{ranks}",
        f"  length        {algorithm.length:,} {algorithm.counted}{at}, {'no seed' if seed is None else f'seed {seed}'}",
        f"  evaluation    {describe_evaluation(trainer, algorithm)}",
        f"  folder        {getattr(trainer, 'run_folder', trainer.default_root_dir)}",
    ]


def describe_evaluation(trainer: pl.Trainer, algorithm: AlgorithmRun) -> str:
    """Return when a run is evaluated, and what that costs."""
    evaluators = callbacks_of(trainer, RolloutEvaluator)
    if not evaluators:
        return "none"
    first = evaluators[0]
    collector = algorithm.collector
    iteration = collector.n_steps * collector.num_envs * trainer.world_size  # evaluations lie between iterations; infinite if unknown
    is_short = first.interval < iteration < math.inf
    when = "after each iteration" if is_short else f"every {first.interval:,} {algorithm.counted}"
    episodes = f"{first.episodes} episode{'s' * (first.episodes > 1)} {when}"
    return f"{episodes}, fewer if they would play over {first.max_share:.0%} of the steps" if first.is_bounded(algorithm) else episodes
