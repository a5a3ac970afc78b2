"""Trees of arrays and tensors."""

import numpy as np
import pytest
import torch

from lightning_rl.types import (
    Step,
    Transition,
    flatten_time,
    tree_index,
    tree_leaves,
    tree_map,
    tree_stack,
    tree_to_numpy,
    tree_to_torch,
)


def nested(k: float) -> dict:
    return {
        "camera": np.full((2, 3), k, np.uint8),
        "body": (torch.full((4,), k, dtype=torch.float64), {"hand": torch.tensor([[k]], dtype=torch.int32)}),
    }


def test_map_combines_corresponding_leaves_and_keeps_the_structure():
    a, b = {"x": (1, 2), "y": 3}, {"y": 30, "x": (10, 20)}
    assert tree_map(lambda p, q: p + q, a, b) == {"x": (11, 22), "y": 33}


def test_map_keeps_the_class_of_a_named_tuple():
    step = tree_map(lambda leaf: leaf + 1, Step(1, 2, 3, ()))
    assert isinstance(step, Step)
    assert step == Step(2, 3, 4, ())


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ({"x": 1}, {"y": 1}, "trees differ: the keys ['x'] against the keys ['y']"),
        ({"x": 1}, {"x": 1, "y": 2}, "trees differ: the keys ['x'] against the keys ['x', 'y']"),
        ({"x": 1}, 5, "trees differ: the keys ['x'] against a leaf"),
        ((1, 2), (1,), "trees differ: a tuple of 2 against a tuple of 1"),
        ((1, 2), 3, "trees differ: a tuple of 2 against a leaf"),
        (({"a": 1},), (1,), "trees differ: the keys ['a'] against a leaf"),
        ({"x": {"y": 1}}, {"x": {"z": 1}}, "trees differ: the keys ['y'] against the keys ['z']"),
    ],
)
def test_map_refuses_trees_that_differ(a, b, message):
    with pytest.raises(ValueError) as error:
        tree_map(lambda *leaves: leaves, a, b)
    assert str(error.value) == message


def test_leaves_of_a_dict_come_in_the_order_of_its_keys_however_it_was_built():
    assert tree_leaves({"b": (3, 4), "a": {"d": 2, "c": 1}}) == [1, 2, 3, 4]
    assert tree_leaves(tree_map(lambda leaf: -leaf, {"b": 2, "a": 1})) == [-1, -2]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stack_holds_each_tree_and_dtypes_are_kept(dim):
    trees = [nested(k) for k in range(5)]
    stacked = tree_stack(trees, dim)
    shapes = {0: ((5, 2, 3), (5, 4), (5, 1, 1)), 1: ((2, 5, 3), (4, 5), (1, 5, 1))}[dim]
    camera, body, hand = stacked["camera"], stacked["body"][0], stacked["body"][1]["hand"]
    assert (camera.shape, tuple(body.shape), tuple(hand.shape)) == shapes
    assert (camera.dtype, body.dtype, hand.dtype) == (np.uint8, torch.float64, torch.int32)
    for k, tree in enumerate(trees):
        again = tree_index(stacked, (slice(None),) * dim + (k,))
        tree_map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), tree, again)


def test_stack_refuses_trees_with_different_keys():
    with pytest.raises(ValueError, match="trees differ"):
        tree_stack([{"a": np.zeros(2)}, {"a": np.zeros(2), "b": np.zeros(2)}])


def test_the_mean_over_rows_of_a_batch_that_has_none_is_zero():
    empty = torch.zeros(0)
    batch = Transition(empty, empty, empty, empty, empty, torch.zeros(3), np.arange(3), successor=torch.arange(3))
    assert batch.mean(torch.tensor([1.0, 2.0, 3.0])) == 0
    assert batch._replace(weight=torch.tensor([0.5, 0.5, 0.0])).mean(torch.tensor([1.0, 2.0, 3.0])) == 1.5


def test_index_reaches_every_leaf():
    tree = tree_index({"a": np.arange(6).reshape(3, 2), "b": (torch.arange(3),)}, 1)
    np.testing.assert_array_equal(tree["a"], [2, 3])
    assert tree["b"][0].item() == 1


def test_torch_and_numpy_share_memory_both_ways():
    array = {"a": (np.zeros(3, np.float32),)}
    tensor = tree_to_torch(array)
    tensor["a"][0][1] = 5
    assert array["a"][0].tolist() == [0, 5, 0]
    tree_to_numpy(tensor)["a"][0][2] = 7
    assert array["a"][0].tolist() == [0, 5, 7]
    assert tree_to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


def test_flatten_time_puts_the_environments_of_a_step_side_by_side():
    flat = flatten_time({"a": torch.arange(24).reshape(2, 3, 4), "b": torch.arange(6).reshape(2, 3)})
    assert flat["a"].shape == (6, 4)
    assert flat["b"].tolist() == [0, 1, 2, 3, 4, 5]
