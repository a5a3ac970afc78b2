"""Validate a checkpoint before it is used: it may come from others, and torch's kernels and Lightning's loops would trust its data.

A kind is what is allowed in one place, and rules name the kind for each place of a tree. `CONTENT` are those of every checkpoint. Classes
that save a state have their own, `state_rules`, which `training/resuming.py` puts together.
"""

import math
import random
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer, RMSprop

from lightning_rl.checkpoints.archive import mappings
from lightning_rl.checkpoints.files import shown
from lightning_rl.errors import SettingError
from lightning_rl.types import State

FORMAT_VERSION = 2
MAX_COUNT = 1 << 53  # float64 represents all integers up to this one
MAX_OBSERVATION = 1 << 26  # numbers in an observation
MAX_RATING = 1e9
TWISTER_WORDS = 624  # in the state of a Mersenne twister
TRACKER = {"ready", "started", "processed", "completed"}  # Lightning's loops set whatever attributes they find in one
MOMENTS = ("exp_avg", "grad_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "square_avg")
"""State of torch's optimizers that has the layout of its parameter; squares are >= 0. A step reads `REQUIRED_STATE` without checking."""
REQUIRED_STATE = ((Adam, ("step", "exp_avg", "exp_avg_sq")), (RMSprop, ("step", "square_avg")))


class Kind(NamedTuple):
    """A kind of value that is allowed in a place: its name for error messages, and a check, which may also fail by raising."""

    name: str
    allows: Callable[[Any], bool]

    def or_null(self) -> Self:
        return type(self)(f"{self.name} or null", lambda value: value is None or self.allows(value))


def is_count(value: object, bound: int = MAX_COUNT) -> bool:
    """Return whether a value is an integer in 0 … bound - 1."""
    return type(value) is int and 0 <= value < bound


def is_text(value: object) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= 1e308


def is_finite(value: Tensor) -> bool:
    """Return whether a tensor holds no NaN and no infinity."""
    return not (value.is_floating_point() or value.is_complex()) or bool(torch.isfinite(value).all())


def _is_vector(value: Tensor, dtype: torch.dtype) -> bool:
    return (value.dtype, value.dim(), value.layout) == (dtype, 1, torch.strided) and is_finite(value)


def are_spaces(spaces: object) -> bool:
    """Return whether these are two spaces as plain data, of reasonable size."""
    shapes = [space.get("shape", space.get("n")) for space in mappings(spaces)]
    sizes = [shape if isinstance(shape, list | tuple) else [1] for shape in shapes]
    is_pair = isinstance(spaces, list | tuple) and len(spaces) == 2
    return is_pair and all(all(map(is_count, shape)) and math.prod(shape) <= MAX_OBSERVATION for shape in sizes)


def are_optimizer_states(states: dict[Any, dict[str, object]]) -> bool:
    """Return whether these are finite optimizer states of parameters, by the parameters' numbers."""
    tensors = [value for state in dict.values(states) for value in dict.values(state) if isinstance(value, Tensor)]
    return all(tensor.layout is torch.strided and is_finite(tensor) for tensor in tensors)


def is_python_generator(state: tuple[int, Sequence[int], float | None]) -> bool:
    """Return whether this is a state of `random`."""
    version, words, gauss = state
    random.Random().setstate((version, tuple(words), gauss))  # raises if it is invalid
    return version == 3 and (gauss is None or is_number(gauss))


def is_numpy_generator(state: tuple[str, Tensor, int, *tuple[object, ...]]) -> bool:
    """Return whether this is a state of `numpy.random`."""
    name, words, position, *gauss = state  # numpy does not check the position
    fits = _is_vector(words, torch.uint32) and len(words) == TWISTER_WORDS and is_count(position, TWISTER_WORDS + 1)
    return fits and name == "MT19937" and len(gauss) in (0, 2) and all(map(is_number, gauss))


def _is_rating(value: object) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and abs(value) <= MAX_RATING


def are_scores(scores: object) -> bool:
    """Return whether these are rows of two players, their number of games, and the points of the first, in a matrix for each behavior.

    In older checkpoints it is a list of rows that may end with the behavior's name.
    """
    if isinstance(scores, dict):
        return all(is_text(name) and _is_matrix_of_scores(rows) for name, rows in dict.items(scores))
    return isinstance(scores, list) and all(
        type(one) is type(two) is int and is_count(games) and 0 <= points <= games and len(name) <= 1 and all(map(is_text, name))
        for one, two, games, points, *name in scores
    )


def _is_matrix_of_scores(rows: Tensor) -> bool:
    if (rows.dtype, rows.shape[1:], rows.layout) != (torch.float64, (4,), torch.strided) or not is_finite(rows):
        return False
    *_, games, points = rows.T
    return bool((rows[:, :3] % 1 == 0).all() and (points >= 0).all() and (points <= games).all())


def _are_games(games: object) -> bool:
    """Return whether these are rows of a player, a result, and two optional names."""
    return isinstance(games, list) and all(
        type(player) is int and is_number(result) and 0 <= result <= 1 and len(names) <= 2 and all(map(is_text, names))
        for player, result, *names in games
    )


def are_snapshots(snapshots: dict[int, dict[str, object]]) -> bool:
    """Return whether these are dense weights of policies, by number."""
    weights = [value for snapshot in dict.values(snapshots) for value in dict.values(snapshot)]
    tensors = [value for value in weights if isinstance(value, Tensor)]
    return all(map(is_count, snapshots)) and len(tensors) == len(weights) and all(value.layout is torch.strided for value in tensors)


ANYTHING = Kind("anything", lambda value: True)
COUNT = Kind("an integer >= 0", is_count)
POSITIVE = Kind("an integer >= 1", lambda value: is_count(value) and value > 0)
NUMBER = Kind("a finite number", is_number)
MEASURE = Kind("a number", lambda value: type(value) in (int, float) and value < MAX_COUNT)  # minus infinity before the first one
FLAG = Kind("true or false", lambda value: type(value) is bool)
SAMPLER = Kind("a number or a mapping", lambda value: is_number(value) or isinstance(value, dict))
TEXT = Kind("a string", is_text)
LIST = Kind("a list", lambda value: isinstance(value, list))
MAPPING = Kind("a mapping", lambda value: isinstance(value, dict))
SETTINGS = Kind("a mapping of settings", lambda value: isinstance(value, dict) and not any(str(key).startswith("_") for key in value))
WEIGHT = Kind("a dense tensor", lambda value: value.layout is torch.strided)
ROWS = Kind("row numbers", lambda value: _is_vector(value, torch.int64) and bool((value >= 0).all()))
FLAGS, INTEGERS, FLOATS, GENERATOR = (
    Kind(f"a vector of {str(dtype)[6:]}", partial(_is_vector, dtype=dtype))
    for dtype in (torch.bool, torch.int64, torch.float64, torch.uint8)
)
MATRICES = Kind(
    "matrices of float32", lambda value: (value.dtype, value.dim(), value.layout) == (torch.float32, 3, torch.strided) and is_finite(value)
)
RATING = Kind("a rating", _is_rating)
RATINGS = Kind("ratings of players", lambda value: all(type(player) is int and _is_rating(rating) for player, rating in dict.items(value)))
SCORES = Kind("scores of players", are_scores)
GAMES = Kind("results of games", _are_games)
SNAPSHOTS = Kind("weights of snapshots", are_snapshots)
LIGHTNING = Kind("a version of Lightning >= 2", lambda value: bool(re.fullmatch(r"[2-9]\.\d+(\.\w+)*(\+[\w.]+)?", value)))
PROGRESS = Kind("Lightning's counts", lambda value: value.keys() <= TRACKER and all(map(is_count, value.values())))

# ---------------------------------------------------------------- rules

Rules = Mapping[str, Kind]
"""Paths, and the kind of value allowed at each. `[]` stands for all items of a list, a name with `*` for all matching names of a mapping,
`a|b` for both names; the part of a name from `{` on is ignored. A name is required unless it ends with `?`; below one that may be missing,
null is not checked further."""


def below(place: str, rules: Rules) -> Rules:
    """Return rules for the places below another place."""
    return {f"{place}/{path}": kind for path, kind in rules.items()}


def first_error(tree: object, rules: Rules) -> str | None:
    """Return one line about the first place in plain data that breaks a rule; None if none does."""
    return next((error for path, kind in rules.items() for error in _errors(tree, path.split("/"), kind, "")), None)


def _errors(value: object, path: Sequence[str], kind: Kind, place: str) -> Iterator[str]:
    here = place if len(place) <= 48 else f"…{place[-47:]}"
    children: list[tuple[object, object]] = []
    if not path:
        is_allowed = False
        with suppress(Exception):
            is_allowed = kind.allows(value)
        if not is_allowed:
            yield f"{here} must be {kind.name}, got {reprlib.repr(value).splitlines()[0][:20]}"
    elif path[0] == "[]" and isinstance(value, list):
        children += enumerate(value)
    elif path[0] == "[]" or not isinstance(value, dict) or ("*" in path[0] and not all(isinstance(key, str) for key in value)):
        yield f"{here or 'its content'} must be a {'list' if path[0] == '[]' else 'mapping of names'}"
    else:
        for pattern in path[0].split("|"):
            name = pattern.removesuffix("?")
            entries = [(key, value[key]) for key in value if isinstance(key, str) and fnmatchcase(key.partition("{")[0], name)]
            if not entries and pattern == name and "*" not in name:
                yield f"{here}/{name} is missing".removeprefix("/")
            children += [(key, child) for key, child in entries if child is not None or pattern == name or len(path) == 1]
    for key, child in children:
        yield from _errors(child, path[1:], kind, f"{place}/{key}".removeprefix("/"))


# ---------------------------------------------------------------- files

CONTENT: Rules = {
    "lightning_rl/format_version?": POSITIVE,
    "lightning_rl/algorithm": TEXT,
    "lightning_rl/env_steps|updates|episodes": COUNT,
    "lightning_rl/spaces": Kind("two spaces of usual shapes", are_spaces),
    "lightning_rl/masked?|in_turn?": FLAG,
    "lightning_rl/agents?/[]": TEXT,
    "lightning_rl/joint?": TEXT,
    "lightning_rl/groups?": COUNT,
    "lightning_rl/parameters?/*": SAMPLER,
    "lightning_rl/attributes?/*": MAPPING,
    "lightning_rl/changes?/[]": TEXT,
    "lightning_rl/behaviors?": MAPPING,
    "lightning_rl/behaviors?/*/env_steps|updates|episodes": COUNT,
    "lightning_rl/behaviors?/*/spaces": Kind("two spaces of usual shapes", are_spaces),
    "lightning_rl/behaviors?/*/masked": FLAG,
    "lightning_rl/behaviors?/*/agents/[]": TEXT,
    "lightning_rl/behaviors?/*/groups?": COUNT,
    "state_dict/*": WEIGHT,
    "hyper_parameters": SETTINGS,
}
"""What every checkpoint contains."""
OPTIMIZER: Rules = {
    "param_groups": Kind("a list of groups", lambda value: len(value) > 0),
    "param_groups/[]/params/[]": COUNT,
    "state": Kind("a mapping of finite states", are_optimizer_states),
}

LIGHTNING_RULES: Rules = {
    "pytorch-lightning_version": LIGHTNING,
    "epoch?|global_step?": COUNT,
    "lr_schedulers": LIST,
    **{f"optimizer_states/[]/{path}": kind for path, kind in OPTIMIZER.items()},
    "loops?/fit_loop/*/_batches_that_stepped?": COUNT,
    "loops?/fit_loop/*epoch_progress|*batch_progress|*scheduler_progress|*step_progress/total|current": PROGRESS,
    "loops?/fit_loop/*optim_progress/optimizer/step|zero_grad/total|current": PROGRESS,
    "loops?/fit_loop/*batch_progress/is_last_batch": FLAG,
}
"""What Lightning saves of a run."""


def check_content(checkpoint: object, path: str | Path) -> None:
    """Raise `SettingError` unless a file contains a checkpoint of this package, in a format that this version reads."""
    match checkpoint:
        case {"lightning_rl": {"format_version": int(version)}} if version > FORMAT_VERSION:
            raise SettingError(f"ckpt_path {shown(path)} has format {version}, not {FORMAT_VERSION}: install a newer lightning_rl")
    if error := first_error(checkpoint, CONTENT):
        raise SettingError(f"ckpt_path {shown(path)} is not a checkpoint of lightning_rl: {error}")


# ---------------------------------------------------------------- optimizers


def check_optimizer(stored: State, optimizer: Optimizer) -> None:
    """Raise `SettingError` unless an optimizer can load a state: torch's kernels trust its shapes, and may write out of bounds."""
    if error := first_error(stored, OPTIMIZER) or next(find_optimizer_differences(stored, optimizer), None):
        raise SettingError(error)


def find_optimizer_differences(stored: State, optimizer: Optimizer) -> Iterator[str]:
    """Yield why an optimizer cannot load a state that `OPTIMIZER` allows."""
    groups = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in stored["param_groups"]] != [group["params"] for group in groups]:
        yield "its parameters are different"
        return
    parameters = {
        number: p
        for group, its in zip(groups, optimizer.param_groups, strict=True)
        for number, p in zip(group["params"], its["params"], strict=True)
    }
    for stored_group, group in zip(stored["param_groups"], groups, strict=True):
        for name, value in group.items():
            # flags of another version of torch, and what a scheduler adds, may be missing
            default = value if value is None or type(value) is bool or name == "initial_lr" else ...
            if name != "params" and not _is_like(stored_group.get(name, default), value):
                yield f"its {name[:30]} is wrong"
        if "momentum" in group and (stored_group["momentum"] > 0) != (group["momentum"] > 0):
            yield "its momentum is different"
    required = next((names for kind, names in REQUIRED_STATE if isinstance(optimizer, kind)), ())
    for number, state in stored["state"].items():
        if number not in parameters or any(name not in state for name in required):
            yield "its state lacks what a step needs"
        elif wrong := [name for name in ("step", *MOMENTS) if name in state and not _fits(name, state[name], parameters[number])]:
            yield f"its {wrong[0]} is wrong"


def _is_like(value: object, expected: object) -> bool:
    """Return whether a setting of an optimizer is of the same kind."""
    if expected is None or type(expected) is bool:
        return value is expected or (expected is None and type(value) is bool)
    if isinstance(expected, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(expected) and all(map(_is_like, value, expected))
    if isinstance(expected, int | float) and is_number(expected):
        return isinstance(value, int | float) and is_number(value) and (expected < 0 or value >= 0)
    return type(value) is type(expected)


def _fits(name: str, value: object, parameter: Tensor) -> bool:
    """Return whether optimizer state has the memory layout of its parameter; a tensor that repeats an element has only its shape."""
    if name == "step":
        number = value.item() if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() else value
        return isinstance(number, int | float) and is_number(number) and number >= 0
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        return False
    return (value.is_contiguous() or value.stride() == parameter.stride()) and ("sq" not in name or bool((value >= 0).all()))
