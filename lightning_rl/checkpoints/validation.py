"""What a checkpoint must hold of a run before it is continued: counts that are some, and what Lightning and torch take for granted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer, RMSprop

from lightning_rl.checkpoints.files import shown
from lightning_rl.errors import SettingError

LARGEST_COUNT = 1 << 53
"""What a float64 still counts by one."""
VERSION = re.compile(r"[2-9]\.\d+(\.\w+)*(\+[\w.]+)?")
"""Of Lightning: it would rewrite what older ones wrote."""
CALLBACKS = {
    "BestModel": ("best",),
    "MultiEvaluator": ("evaluated_at",),
    "RecordDemonstrations": ("best",),
    "RolloutEvaluator": ("evaluated_at",),
    "StopOnEvaluation": ("best", "since_best"),
}
"""Which numbers our callbacks keep."""
GUARD = ("replaced", "skipped", "restored", "bad_steps", "bad_iterations")
PROGRESS = {"ready", "started", "processed", "completed"}
WORDS = 624
"""Of a Mersenne twister's state."""
NEEDED = ((Adam, ("step", "exp_avg", "exp_avg_sq")), (RMSprop, ("step", "square_avg")))
"""What a step reads without asking."""
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
LIKE_PARAMETERS = (*SQUARES, "exp_avg", "grad_avg", "momentum_buffer")


def check_run(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Raise `SettingError` unless a checkpoint of this package, which `check_content` passed, can be one of a run that goes on."""
    for what in _wrong_things(checkpoint):
        raise SettingError(f"ckpt_path {shown(path)} cannot be continued: its {what} is not what a run saves")


def check_optimizers(stored: Sequence[Mapping[str, Any]], own: Sequence[Optimizer], path: str | Path) -> None:
    """Raise `SettingError` unless the states of optimizers, which `check_run` passed, fit the optimizers here."""
    if len(stored) != len(own):
        raise SettingError(f"ckpt_path {shown(path)} does not fit the model: it has {len(stored)} optimizers, not {len(own)}")
    for number, (state, optimizer) in enumerate(zip(stored, own, strict=True)):
        try:
            check_optimizer(state, optimizer)
        except SettingError as error:
            raise SettingError(f"ckpt_path {shown(path)} does not fit the model: of optimizer {number}, {error}") from None


def check_optimizer(stored: Any, own: Optimizer) -> None:
    """Raise `SettingError` unless an optimizer can take a state: torch's kernels trust its shapes, and write where they lead.

    Args:
        stored: what `state_dict` gave once.
        own: the optimizer.
    """
    if not _is_optimizer(stored):
        raise SettingError("its state is none")
    here = own.state_dict()["param_groups"]
    if [group["params"] for group in stored["param_groups"]] != [group["params"] for group in here]:
        raise SettingError("its parameters are others")
    parameters: dict[int, Tensor] = {}
    for there, group, own_group in zip(stored["param_groups"], here, own.param_groups, strict=True):
        for name, value in group.items():
            if name != "params" and not _is_like(there.get(name, _default(name, value)), value):
                raise SettingError(f"its {name[:30]} is wrong")
        if (there.get("momentum", 0) > 0) != (group.get("momentum", 0) > 0):
            raise SettingError("its momentum is another")
        parameters |= dict(zip(group["params"], own_group["params"], strict=True))
    needed = next((names for kind, names in NEEDED if isinstance(own, kind)), ())
    for number, state in stored["state"].items():
        if number not in parameters or any(name not in state for name in needed):
            raise SettingError("its state lacks what a step needs")
        for name, value in state.items():
            if name == "step" and not _is_step(value):
                raise SettingError("its step is wrong")
            if name in LIKE_PARAMETERS and not _fits(value, parameters[number], signed=name not in SQUARES):
                raise SettingError(f"its {name} is wrong")


def _wrong_things(checkpoint: Mapping[str, Any]) -> Iterator[str]:
    """What in a checkpoint a run did not save, by its place."""
    version = checkpoint.get("pytorch-lightning_version")
    if not isinstance(version, str) or not VERSION.fullmatch(version):
        yield "pytorch-lightning_version"
    for name in ("epoch", "global_step"):
        if not _is_count(checkpoint.get(name, 0)):
            yield name
    optimizers = checkpoint.get("optimizer_states")
    if not isinstance(optimizers, list) or not all(map(_is_optimizer, optimizers)):
        yield "optimizer_states"
    if not isinstance(checkpoint.get("lr_schedulers"), list):
        yield "lr_schedulers"
    if not _are_loops(checkpoint.get("loops", {"fit_loop": {}})):
        yield "loops"
    callbacks = checkpoint.get("callbacks", {})
    if not isinstance(callbacks, dict) or not all(isinstance(name, str) and isinstance(state, dict) for name, state in callbacks.items()):
        yield "callbacks"
    else:
        for name, state in callbacks.items():
            kind = name.partition("{")[0]
            numbers = [state.get(key) for key in CALLBACKS.get(kind, ())]
            good = all(type(number) in (int, float) and number < LARGEST_COUNT for number in numbers)
            good = good and type(state.get("reports_success", False)) is bool
            if not good or (kind == "Curriculum" and not _are_lessons(state)):
                yield f"state of {kind}"
    own = checkpoint["lightning_rl"]
    ranks = own.get("ranks", [])
    if not isinstance(ranks, list):
        yield "ranks"
        return
    for number, rank in enumerate(ranks):
        for what in _wrong_in_rank(rank):
            yield f"{what} of rank {number}"
    for name, counts in (("env_steps", lambda data: data), ("episodes", lambda data: data["statistics"])):
        if ranks and sum(counts(rank["data"]["collector"])[name] for rank in ranks) < own[name]:
            yield f"{name} of all ranks"


def _wrong_in_rank(rank: Any) -> Iterator[str]:
    collector = _get(rank, "data", "collector")
    num_envs, statistics = _get(rank, "num_envs"), _get(collector, "statistics")
    if not _is_count(num_envs) or num_envs == 0:
        yield "num_envs"
    for name in ("env_steps", "rows"):
        if not _is_count(_get(collector, name)):
            yield name
    if not _is_count(_get(statistics, "episodes")):
        yield "episodes"
    for name, kind in (("running_return", torch.float64), ("running_length", torch.int64)):
        if not _is_vector(_get(statistics, name), kind, num_envs):
            yield name
    for name in ("returns", "lengths", "successes"):
        window = _get(statistics, name)
        if not isinstance(window, list) or not all(map(_is_number, window)):
            yield name
    if type(_get(statistics, "reports_success") or False) is not bool:
        yield "reports_success"
    if not _are_windows(statistics.get("parameters", {}) if isinstance(statistics, dict) else None):
        yield "parameters"
    episodes = _get(collector, "episodes")
    if episodes is not None and not (
        {"obs", "memory", "start", "envs"} <= _keys(episodes)
        and isinstance(episodes["envs"], dict)
        and _is_vector(episodes["start"], torch.bool, num_envs)
        and type(episodes.get("begin_anew", False)) is bool
    ):
        yield "episodes under way"
    if not _is_count(_get(rank, "log", "logged_env_steps")) or not _is_number(_get(rank, "log", "elapsed")):
        yield "log"
    if not _is_guard(_get(rank, "guard")):
        yield "guard"
    beside = _get(rank, "beside")
    if not isinstance(beside, list) or not all(isinstance(state, dict) for state in beside):
        yield "state of what learns beside"
    yield from _wrong_in_data(rank["data"])
    acting = _list(_get(collector, "actors")) if "actors" in _keys(collector) else [collector]
    generators = [*(_get(each, "generator") for each in acting), _get(rank, "learning"), _get(rank, "noise"), _get(rank, "random", "torch")]
    if not all(_is_vector(state, torch.uint8) for state in (*generators, *_list(_get(rank, "random", "cuda")))):
        yield "generators"
    if not _is_python_generator(_get(rank, "random", "python")) or not _is_numpy_generator(_get(rank, "random", "numpy")):
        yield "generators"


def _wrong_in_data(data: Mapping[str, Any]) -> Iterator[str]:
    """Of what replays, which has these names."""
    for name in ("learning_starts", "random_until", "phases"):
        value = data.get(name, 0)
        if not _is_number(value) and not (name == "learning_starts" and value is None):
            yield name
    rows = data.get("rows")
    if rows is not None and not (_is_vector(rows, torch.int64) and bool((rows >= 0).all())):
        yield "rows"
    if not isinstance(data.get("replay", {}) or {}, dict):
        yield "replay"


def _is_guard(guard: Any) -> bool:
    updates = _get(guard, "bad_updates")
    if not isinstance(updates, dict) or not all(isinstance(name, str) and _is_count(count) for name, count in updates.items()):
        return False
    return all(_is_count(_get(guard, name)) for name in GUARD) and type(_get(guard, "is_bad_iteration")) is bool


def _are_lessons(state: Mapping[str, Any]) -> bool:
    """Whether a curriculum finds, for each of its parameters, a lesson, a smoothed measure and a window."""
    lessons, smoothed, windows = (state.get(name) for name in ("lessons", "smoothed", "windows"))
    if not (isinstance(lessons, dict) and isinstance(smoothed, dict) and _are_windows(windows)):
        return False
    alike = lessons.keys() == smoothed.keys() == _keys(windows)
    unreported = state.get("unreported", 0)
    return (
        alike
        and (unreported is None or _is_count(unreported))
        and all(map(_is_count, lessons.values()))
        and all(map(_is_number, smoothed.values()))
    )


def _are_windows(windows: Any) -> bool:
    """Whether something has a list of numbers for each of some names."""
    if not isinstance(windows, dict) or not all(isinstance(name, str) for name in windows):
        return False
    return all(isinstance(window, list) and all(map(_is_number, window)) for window in windows.values())


def _are_loops(loops: Any) -> bool:
    """Whether Lightning's loops find their progress; it has the file's word for the names of its attributes."""
    fit = _get(loops, "fit_loop")
    if (
        loops is None
        or not isinstance(fit, dict)
        or not all(isinstance(name, str) and isinstance(each, dict) for name, each in fit.items())
    ):
        return loops is None
    for name, each in fit.items():
        if name.endswith("optim_progress"):
            good = _is_progress(_get(each, "optimizer", "step")) and _is_progress(_get(each, "optimizer", "zero_grad"))
        elif name.endswith("progress"):
            good = _is_progress(each) and (not name.endswith("batch_progress") or type(each.get("is_last_batch")) is bool)
        else:
            good = _is_count(each.get("_batches_that_stepped", 0))
        if not good:
            return False
    return True


def _is_progress(value: Any) -> bool:
    counts = [_get(value, name) for name in ("total", "current")]
    return all(isinstance(each, dict) and each.keys() <= PROGRESS and all(map(_is_count, each.values())) for each in counts)


def _is_optimizer(state: Any) -> bool:
    """Whether a state has the structure that torch takes for granted, and only numbers that are some."""
    groups, states = _get(state, "param_groups"), _get(state, "state")
    if not isinstance(groups, list) or not groups or not all("params" in _keys(group) for group in groups):
        return False
    if not all(isinstance(group["params"], list) and all(map(_is_count, group["params"])) for group in groups):
        return False
    if not isinstance(states, dict) or not all(isinstance(each, dict) for each in states.values()):
        return False
    values = [value for each in states.values() for value in each.values() if isinstance(value, Tensor)]
    return all(value.layout is torch.strided and _is_finite(value) for value in values)


def _fits(value: Any, parameter: Tensor, signed: bool) -> bool:
    """Whether a running mean lies in memory as its parameter does; one that repeats an element has the shape alone."""
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.dtype == parameter.dtype
        and (value.is_contiguous() or value.stride() == parameter.stride())
        and (signed or bool((value >= 0).all()))
    )


def _is_step(value: Any) -> bool:
    number = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
    return _is_number(number) and number >= 0 and (not isinstance(value, Tensor) or value.dtype.is_floating_point)


def _default(name: str, value: Any) -> Any:
    """What a group may lack: switches of another version of torch, and what a scheduler adds that the run began without."""
    return value if value is None or type(value) is bool or name == "initial_lr" else ...


def _is_like(value: Any, own: Any) -> bool:
    """Whether a setting of an optimizer is one of the same kind."""
    if own is None:
        return value is None or type(value) is bool
    if type(own) is bool:
        return value is own
    if isinstance(own, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(own) and all(map(_is_like, value, own))
    if _is_number(own):
        return _is_number(value) and (own < 0 or value >= 0)
    return type(value) is type(own)


def _is_python_generator(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 3 or state[0] != 3 or not (state[2] is None or _is_number(state[2])):
        return False
    return isinstance(state[1], tuple | list) and len(state[1]) == WORDS + 1 and all(_is_count(word, 1 << 32) for word in state[1])


def _is_numpy_generator(state: Any) -> bool:
    """Of its place in the words numpy takes any number, and would read there."""
    if not isinstance(state, tuple) or len(state) not in (3, 5) or state[0] != "MT19937":
        return False
    rest = all(_is_number(each) for each in state[3:])
    return _is_vector(state[1], torch.uint32, WORDS) and _is_count(state[2], WORDS + 1) and rest


def _get(tree: Any, *names: str) -> Any:
    """What lies at a place in nested dicts; None where there is no such place."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _keys(tree: Any) -> set[Any]:
    return set(tree) if isinstance(tree, dict) else set()


def _list(tree: Any) -> list[Any]:
    return tree if isinstance(tree, list) else [None]


def _is_count(value: Any, bound: int = LARGEST_COUNT) -> bool:
    return type(value) is int and 0 <= value < bound


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1 << 1000 and math.isfinite(value)


def _is_vector(value: Any, dtype: torch.dtype, size: Any = None) -> bool:
    return (
        isinstance(value, Tensor)
        and (value.dtype, value.dim(), value.layout) == (dtype, 1, torch.strided)
        and (size is None or len(value) == size)
        and _is_finite(value)
    )


def _is_finite(value: Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())
