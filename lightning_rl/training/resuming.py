"""Check that a run can be continued from a checkpoint, before anything of it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.optim import Optimizer

from lightning_rl.actors.pool import ActorPool
from lightning_rl.callbacks.checkpoints import BestModel
from lightning_rl.callbacks.curriculum import Curriculum
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.iteration import match_target
from lightning_rl.callbacks.recording import RecordDemonstrations
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.callbacks.stopping import StopOnEvaluation
from lightning_rl.checkpoints.archive import Checkpoint
from lightning_rl.checkpoints.files import shown
from lightning_rl.checkpoints.validation import (
    COUNT,
    FLAG,
    LIGHTNING_RULES,
    LIST,
    MAPPING,
    NUMBER,
    POSITIVE,
    Kind,
    Rules,
    below,
    find_optimizer_differences,
    first_error,
)
from lightning_rl.data.collector import Collector
from lightning_rl.data.dataset import OfflineDataset, ReplayDataset
from lightning_rl.data.self_play import SelfPlayOpponent
from lightning_rl.data.shared import JointCollector, SideCollector
from lightning_rl.data.turns import Turns
from lightning_rl.errors import SettingError
from lightning_rl.nan_policy import Guard
from lightning_rl.optimization import ScheduledOptimizer, split_vectors
from lightning_rl.settings.names import MODELS
from lightning_rl.sharing.agent import agent_of
from lightning_rl.sharing.hub import is_address, is_agent
from lightning_rl.spaces import allocate
from lightning_rl.training.learner import Learner
from lightning_rl.training.loading import changed_settings, check_names, check_weights, read_checkpoint, stored_name
from lightning_rl.training.state import RANDOM_RULES, RunLog
from lightning_rl.types import State

OPPONENT = "collector/episodes?/envs/opponent?"
EXPERIENCE: Rules = {
    **ReplayDataset.state_rules,
    **OfflineDataset.state_rules,
    **below("collector", Collector.state_rules),
    **below("collector", ActorPool.state_rules),
    OPPONENT: MAPPING,
    **below(OPPONENT, SelfPlayOpponent.state_rules),
}
"""The experience of an algorithm."""
RANK: Rules = {"num_envs": POSITIVE, **below("log", RunLog.state_rules), **below("random", RANDOM_RULES)}
ALONE: Rules = {**RANK, **below("data", EXPERIENCE), **Learner.state_rules}
"""A single algorithm on a rank."""
SEVERAL: Rules = {
    **RANK,
    **below("data/behaviors/*", EXPERIENCE),
    "data/behaviors/*/collector/open_iteration": MAPPING.or_null(),
    **below("data/behaviors/*/collector/open_iteration?", SideCollector.open_iteration_rules),
    **below("data/collector", JointCollector.state_rules),
    **below("data/turns?", Turns.state_rules),
    **below("behaviors/*", Learner.state_rules),
    **below("frozen/*/guard", Guard.state_rules),
    "behaviors/*/began_at": COUNT,
    "behaviors/*/progress": NUMBER,
    "newest/*/*": Kind("a number", lambda value: isinstance(value, float | int)),
}
"""Several behaviors on a rank."""
CALLBACKS: dict[str, Rules] = {
    "BestModel?": BestModel.state_rules,
    "RecordDemonstrations?": RecordDemonstrations.state_rules,
    "StopOnEvaluation?": StopOnEvaluation.state_rules,
    "MultiEvaluator?|RolloutEvaluator?": RolloutEvaluator.state_rules,
    "Curriculum?": Curriculum.state_rules,
    "SelfPlay?|SelfPlay[!0-9A-Z_a-z]*": SelfPlay.state_rules,
}
"""Callbacks with a state, by their keys, which may end with settings or the name of a behavior."""
RUN: Rules = {
    **LIGHTNING_RULES,
    "callbacks?": MAPPING,
    **{path: kind for name, rules in CALLBACKS.items() for path, kind in below(f"callbacks?/{name}", rules).items()},
    "callbacks?/*/reports_success?": FLAG,  # also those of a user's evaluator
    "callbacks?/*/played?|last_played?": COUNT,
    "lightning_rl/ranks?": LIST,
}
"""What a run that can be resumed contains in addition to what every checkpoint does."""


def check_fits(algorithm: Any, path: str | Path) -> int:
    """Return a checkpoint's count of environment steps or updates; raise `SettingError` if an algorithm cannot resume from it."""
    if is_address(path) or is_agent(path) or agent_of(Path(path)) is not None:
        raise SettingError(f"ckpt_path {shown(path)} is an agent without its run: start a new run with its weights, --init_from {path}")
    checkpoint = read_checkpoint(path)
    entries, name = checkpoint["lightning_rl"], stored_name(type(algorithm))
    stored = entries["algorithm"]
    if stored != name:
        way_out = f"; continue it with --model {stored}" if stored in MODELS else ""
        raise SettingError(f"ckpt_path {shown(path)} holds {stored[:60]}, not {name}{way_out}")
    check_names(checkpoint["hyper_parameters"], path, imported=False)
    algorithm.configure_model()  # Lightning allows repeated calls
    behaviors: Mapping[str, Any] = getattr(algorithm, "algorithms", {})
    for behavior in behaviors.values() or [algorithm]:
        for networks in behavior.target_networks:
            match_target(*networks)  # as when the run begins: a user may have changed the online one
    try:
        check_weights(checkpoint["state_dict"], algorithm.state_dict(), path, entries.get("changes", ()))
    except SettingError as error:
        differences = changed_settings(checkpoint["hyper_parameters"], algorithm.hparams)
        changed = [name for name in differences if name != f"max_{algorithm.counter}"]  # the length of a run may change
        named = ", ".join(changed[:3]) + " …" * (len(changed) > 3)
        raise SettingError(f"{error}; changed: {named}" if named else str(error)) from error
    check_run(checkpoint, path, _optimizers(algorithm), tuple(behaviors))
    for rank in entries.get("ranks", []):
        if rank["num_envs"] == algorithm.num_envs:
            data = rank["data"]
            for name, behavior in behaviors.items() or [("", algorithm)]:
                _check_observations(behavior, data["behaviors"][name]["collector"] if name else data["collector"], path)
    return entries[algorithm.counter]


def _check_observations(algorithm: Any, collector: State, path: str | Path) -> None:
    """Raise `SettingError` unless the observations in a collector's state have the shapes of the environments' observations."""
    episodes, done = collector.get("episodes"), collector.get("open_iteration")
    observations = [part["obs"] for part in [*([episodes] if episodes else []), *(done["steps"] if done else [])]]
    expected = _shapes(allocate(algorithm.spaces.observation, algorithm.num_envs))
    if any(_shapes(obs) != expected for obs in observations):
        raise SettingError(f"ckpt_path {shown(path)} holds observations of other shapes than the environments return")


def _optimizers(algorithm: pl.LightningModule) -> list[Optimizer] | None:
    """Return the optimizers that the algorithm will have, without changing it; None if only Lightning can build them."""
    kept = [(parameter, parameter.data, parameter.grad) for parameter in algorithm.parameters()]
    try:
        configured: Any = algorithm.configure_optimizers()
    except Exception:  # a user's method may use its trainer, which does not exist yet
        return None
    finally:
        for parameter, data, gradient in kept:
            parameter.data, parameter.grad = data, gradient
    configured = list(configured) if isinstance(configured, list | tuple) else [configured]
    optimizers = [optimizer for optimizer in configured if isinstance(optimizer, Optimizer)]
    return optimizers if len(optimizers) == len(configured) else None


def _shapes(tree: object) -> object:
    """Replace the arrays of a tree with their shapes."""
    if isinstance(tree, dict):
        return {key: _shapes(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return [_shapes(child) for child in tree]
    return tuple(getattr(tree, "shape", ()))


def check_run(
    checkpoint: Checkpoint, path: str | Path, optimizers: Sequence[Optimizer] | None = None, behaviors: Sequence[str] = ()
) -> None:
    """Raise `SettingError` unless a run can resume from a checkpoint that `check_content` accepts.

    `optimizers`: those of the run, if they are known.  `behaviors`: the names of those that learn in the run, if it has several.
    """
    names = set(checkpoint["lightning_rl"].get("behaviors", ()))
    if names != set(behaviors):
        stored, current = (", ".join(map(str, some)) or "none" for some in (names, behaviors))
        problem = f"its behaviors are {stored}, and those of the run {current}"
        raise SettingError(f"ckpt_path {shown(path)} cannot be continued: {problem}")
    rules = {**RUN, **below("lightning_rl/ranks?/[]", SEVERAL if behaviors else ALONE)}
    if error := first_error(checkpoint, rules) or next(_contradictions(checkpoint, optimizers), None):
        raise SettingError(f"ckpt_path {shown(path)} cannot be continued: {error}")


def _contradictions(checkpoint: Checkpoint, optimizers: Sequence[Optimizer] | None) -> Iterator[str]:
    """Yield what is inconsistent in a checkpoint whose values are all allowed."""
    states = checkpoint["optimizer_states"]
    if optimizers is not None and len(states) != len(optimizers):
        yield f"it has {len(states)} optimizers, the model has {len(optimizers)}"
    for number, optimizer in enumerate(optimizers or ()):
        state = split_vectors(states[number], optimizer) if isinstance(optimizer, ScheduledOptimizer) else states[number]
        yield from (f"optimizer {number}: {error}" for error in find_optimizer_differences(state, optimizer))
    run = checkpoint["lightning_rl"]
    ranks, behaviors = run.get("ranks", []), run.get("behaviors", {})
    if not behaviors:
        yield from _count_differences(run, [(rank["num_envs"], rank["data"]["collector"]) for rank in ranks])
    for number, rank in enumerate(ranks if behaviors else ()):
        yield from (f"rank {number}: {error}" for error in _world_differences(rank, behaviors))
    for name, counts in behaviors.items():
        rows = [(rank["num_envs"] * len(counts["agents"]), rank["data"]["behaviors"][name]["collector"]) for rank in ranks]
        yield from (f"behavior {name}: {error}" for error in _count_differences(counts, rows))
    for name, state in checkpoint.get("callbacks", {}).items():
        if name.partition("{")[0] == "Curriculum" and not state["lessons"].keys() == state["smoothed"].keys() == state["windows"].keys():
            yield "its Curriculum names different parameters"


def _count_differences(counts: State, collectors: Sequence[tuple[int, State]]) -> Iterator[str]:
    """Yield what is inconsistent between the counts of an algorithm and the number of rows and the collector of each rank."""
    for number, (rows, collector) in enumerate(collectors):
        vectors = [collector["statistics"]["running_return"], collector["statistics"]["running_length"]]
        vectors += [collector["episodes"]["start"]] if collector.get("episodes") else []
        done = collector.get("open_iteration") or {"actions": [], "steps": []}
        for step in done["steps"]:
            vectors += [step[name] for name in ("reward", "terminated", "truncated", "valid", "episode_start")]
        if any(len(vector) != rows for vector in vectors):
            yield f"rank {number} does not have one number for each of {rows} environments"
        elif any(not torch.equal(step["ended"], (step["terminated"] | step["truncated"]).nonzero().flatten()) for step in done["steps"]):
            yield f"rank {number} has contradictory ends of episodes"
        if len(done["actions"]) != len(done["steps"]):
            yield f"rank {number} has {len(done['actions'])} actions for {len(done['steps'])} steps"
    steps = [step for _, collector in collectors for step in (collector.get("open_iteration") or {"steps": []})["steps"]]
    totals = {
        "env_steps": sum(collector["env_steps"] for _, collector in collectors) + sum(int(step["valid"].sum()) for step in steps),
        "episodes": sum(collector["statistics"]["episodes"] for _, collector in collectors) + sum(len(step["ended"]) for step in steps),
    }
    for name, number in totals.items():
        if collectors and number < counts[name]:
            yield f"all ranks together have fewer {name} than the run"


def _world_differences(rank: State, behaviors: State) -> Iterator[str]:
    """Yield what is inconsistent between a rank's world and its behaviors."""
    world, copies = rank["data"]["collector"]["world"], rank["num_envs"]
    for names in (rank["data"]["behaviors"], world["sides"], {**rank["behaviors"], **rank["frozen"]}):
        if names.keys() != behaviors.keys():
            yield f"its behaviors are {', '.join(map(str, names)) or 'none'}"
    per_copy = [world["lengths"], *([] if world["states"] is None else [world["states"]])]
    if world["num_copies"] != copies or any(len(per_row) != copies for per_row in per_copy):
        yield f"its world does not have {copies} copies"
    if any(len(side["present"]) != copies * len(behaviors[name]["agents"]) for name, side in world["sides"].items()):
        yield "its world has different agents"
