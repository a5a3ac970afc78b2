"""State as plain data, and back."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Discrete

from lightning_rl.checkpoints.archive import to_arrays, to_plain
from lightning_rl.types import Step

ARRAYS = [np.arange(6).astype(dtype)[::-2] for dtype in ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", ">f8", "c8")]


def through_a_file(tree, path):
    torch.save(to_plain(tree), path)
    return to_arrays(torch.load(path, weights_only=True))


@pytest.mark.parametrize("array", [*ARRAYS, np.float32(2)[()], np.zeros((0, 3)), np.asfortranarray(np.ones((2, 3))), np.array(5)], ids=repr)
def test_arrays_come_back_as_they_were(array, tmp_path):
    back = through_a_file({"a": array}, tmp_path / "x")["a"]
    assert np.array_equal(back, array) and np.shape(back) == array.shape
    assert not isinstance(array, np.ndarray) or back.dtype == array.dtype.newbyteorder("=")


def test_trees_come_back_with_deques_as_lists_and_numpy_scalars_as_numbers(tmp_path):
    tree = {"a": [1, (2.5, None), deque([True, "x"])], 3: b"y", "o": OrderedDict(z=1), "n": np.int64(4), "big": 1 << 127}
    tree |= {"step": Step(1, 2, 3, 4), np.int32(7): np.bool_(True)}
    assert through_a_file(tree, tmp_path / "x") == {
        "a": [1, (2.5, None), [True, "x"]],
        3: b"y",
        "o": {"z": 1},
        "n": 4,
        "big": 1 << 127,
        "step": (1, 2, 3, 4),
        7: True,
    }


def test_random_generators_continue_after_a_round_trip_through_a_file(tmp_path):
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "own": np.random.default_rng(3).bit_generator.state}
    state["torch"] = torch.get_rng_state()
    expected = random.random(), np.random.random(), torch.rand(1), np.random.default_rng(3).random()
    back = through_a_file(state, tmp_path / "x")
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(torch.from_numpy(back["torch"]))
    own = np.random.default_rng()
    own.bit_generator.state = back["own"]
    assert (random.random(), np.random.random(), torch.rand(1), own.random()) == expected


def test_plain_data_is_a_copy_without_the_rest_of_its_storage(tmp_path):
    whole = np.zeros(100_000)
    plain = to_plain({"a": whole[:2], "b": torch.zeros(100_000)[:2]})
    whole[0] = 1
    assert plain["a"][0] == 0 and all(each.untyped_storage().nbytes() < 20 for each in plain.values())


@pytest.mark.parametrize(
    "tree, said",
    [
        ({"a": [Discrete(2)]}, r"state\['a'\]\[0\] is a Discrete"),
        ({"a": np.array([None])}, r"state\['a'\] is an array of object"),
        ([{1, 2}], r"state\[0\] is a set"),
        ({"a": np.zeros(1, "V4")}, r"state\['a'\] is an array of \|V4"),
        ({Path("x"): 1}, "a key of state is a PosixPath"),
    ],
)
def test_anything_else_is_refused_with_its_place(tree, said):
    with pytest.raises(TypeError, match=said):
        to_plain(tree)
