"""Kinds of values in checkpoints: the name of each for error messages, and its check."""

import math
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lightning_rl.checkpoints.archive import mappings

MAX_COUNT = 1 << 53  # float64 represents all integers up to this one
MAX_OBSERVATION = 1 << 26  # numbers in an observation
MAX_RATING = 1e9
TWISTER_WORDS = 624  # in the state of a Mersenne twister
TRACKER = {"ready", "started", "processed", "completed"}  # Lightning's loops set whatever attributes they find in one


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
    weights = [value for each in dict.values(snapshots) for value in dict.values(each)]
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
RATINGS = Kind("ratings of players", lambda value: all(type(player) is int and _is_rating(each) for player, each in dict.items(value)))
SCORES = Kind("scores of players", are_scores)
GAMES = Kind("results of games", _are_games)
SNAPSHOTS = Kind("weights of snapshots", are_snapshots)
LIGHTNING = Kind("a version of Lightning >= 2", lambda value: bool(re.fullmatch(r"[2-9]\.\d+(\.\w+)*(\+[\w.]+)?", value)))
PROGRESS = Kind("Lightning's counts", lambda value: value.keys() <= TRACKER and all(map(is_count, value.values())))
