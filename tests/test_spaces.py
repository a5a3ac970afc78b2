"""Spaces: their leaves, their storage and their plain form."""

import io
from collections import OrderedDict

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Sequence, Text, Tuple

from lightning_rl.errors import SettingError
from lightning_rl.spaces import (
    Leaf,
    allocate,
    check_observation_space,
    from_plain,
    is_batch_of,
    limits,
    observation_leaves,
    short,
    to_plain,
)
from lightning_rl.types import tree_leaves

VECTOR = Box(np.array([-1, -np.inf, 0], np.float32), np.array([1, np.inf, 1e30], np.float32))
SPACES = {
    "vector": VECTOR,
    "double": Box(-0.1, 0.3, (2, 2), np.float64),
    "scalar": Box(-1.0, 1.0, (), np.float32),
    "image": Box(0, 255, (84, 84, 3), np.uint8),
    "integers": Box(np.array([[0, 1], [2, 3]]), np.array([[5, 6], [7, 8]]), dtype=np.int16),
    "discrete": Discrete(5, start=-2),
    "short discrete": Discrete(5, start=-2, dtype=np.int32),
    "multi_discrete": MultiDiscrete([3, 4], start=[1, -1]),
    "multi_discrete of 2 dimensions": MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32, start=[[1, 2], [3, 4]]),
    "bits": MultiBinary(4),
    "list of bits": MultiBinary([4]),
    "grid of bits": MultiBinary([2, 3]),
    "tree": Dict(camera=Box(0, 255, (8, 8, 1), np.uint8), body=Tuple([VECTOR, Dict(mode=Discrete(3), bits=MultiBinary(2))])),
}


@pytest.mark.parametrize("name", SPACES)
def test_a_space_is_restored_from_plain_data(name):
    file = io.BytesIO()
    torch.save(to_plain(SPACES[name]), file)
    file.seek(0)
    again = from_plain(torch.load(file, weights_only=True))
    assert again == SPACES[name]
    assert (again.shape, again.dtype) == (SPACES[name].shape, SPACES[name].dtype)


def test_a_discrete_space_of_int64_is_restored_by_versions_of_gymnasium_without_its_dtype(monkeypatch):
    monkeypatch.setattr("lightning_rl.spaces.Discrete", lambda n, seed=None, start=0: Discrete(n, seed, start))
    assert from_plain({"type": "Discrete", "n": 5, "start": -2}) == Discrete(5, start=-2)


def test_bounds_are_restored_bit_for_bit():
    again = from_plain(to_plain(VECTOR))
    assert again.low.tobytes() == VECTOR.low.tobytes()
    assert again.high.tobytes() == VECTOR.high.tobytes()


def test_the_order_of_a_dict_is_restored():
    space = Dict(OrderedDict(b=Discrete(2), a=Discrete(3)))
    assert list(from_plain(to_plain(space))) == ["b", "a"]


def test_the_plain_form_of_an_image_space_is_small():
    assert to_plain(SPACES["image"]) == {"type": "Box", "low": 0, "high": 255, "shape": [84, 84, 3], "dtype": "uint8"}


def test_an_unknown_type_of_space_in_a_file_is_refused():
    with pytest.raises(SettingError, match="unknown space type 'Text'"):
        from_plain({"type": "Text"})


TABLE = Box(np.zeros((2, 2), np.float32), np.array([[1, 2], [3, 4]], np.float32))
UNSUPPORTED = {
    "text": Text(5),
    "graph": Graph(node_space=Box(-1, 1, (3,)), edge_space=None),
    "sequence": Sequence(TABLE),
    "inside a dict": Dict(a=Discrete(2), b=Tuple([Text(5)])),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("function", [check_observation_space, to_plain])
def test_an_unsupported_space_is_refused_in_one_line(function, name):
    with pytest.raises(SettingError, match=r"^the .*space .* is not supported") as error:
        function(UNSUPPORTED[name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("space", [Dict({}), Tuple([]), Dict(a=Dict({})), Box(-1, 1, (0,)), Dict(a=TABLE, b=Box(-1, 1, (3, 0)))])
def test_an_empty_observation_space_is_refused_in_one_line(space):
    with pytest.raises(SettingError, match="is empty") as error:
        check_observation_space(space)
    assert "\n" not in str(error.value)


def test_short_is_one_line_of_at_most_60_characters():
    assert short(TABLE) == "Box(2, 2)"
    assert short(Discrete(3)) == "Discrete(3)"
    text = short(Dict(a=TABLE, b=MultiDiscrete(np.full((9, 9), 5))))
    assert "\n" not in text
    assert len(text) == 60


def test_leaves_describe_how_each_part_is_encoded():
    assert list(observation_leaves(SPACES["tree"])) == [
        Leaf("vector", (3,), name="body.0"),
        Leaf("vector", (2,), name="body.1.bits"),
        Leaf("one_hot", (), sizes=(3,), starts=(0,), name="body.1.mode"),
        Leaf("image", (8, 8, 1), 1 / 255, name="camera"),
    ]
    assert list(observation_leaves(SPACES["multi_discrete of 2 dimensions"])) == [
        Leaf("one_hot", (2, 2), sizes=(2, 3, 4, 5), starts=(1, 2, 3, 4))
    ]
    assert list(observation_leaves(Box(0, 1, (4, 84, 84, 3)))) == [Leaf("image", (4, 84, 84, 3))]
    assert list(observation_leaves(Box(0, 255, (7,), np.uint8))) == [Leaf("vector", (7,), 1 / 255)]


def test_a_leaf_is_named_by_its_path_and_a_lone_one_obs():
    def names(space):
        return [leaf.name for leaf in observation_leaves(space)]

    assert names(VECTOR) == names(Discrete(2)) == ["obs"]
    assert names(Dict(vector_0=VECTOR)) == ["vector_0"]
    assert names(Dict(robot=Dict(arm=VECTOR, mode=Discrete(2)))) == ["robot.arm", "robot.mode"]
    assert names(Tuple([VECTOR, Dict(b=VECTOR, a=Tuple([VECTOR]))])) == ["0", "1.a.0", "1.b"]


CROWD = Dict(agents=Box(-1, 1, (5, 2)), body=VECTOR, bits=MultiBinary(2), camera=Box(0, 255, (8, 8, 1), np.uint8))


@pytest.mark.parametrize(
    ("entities", "goals", "message"),
    [
        (["agent"], [], "entities: there is no observation 'agent'; did you mean agents?"),
        ([], ["pose"], "goals: there is no observation 'pose'; choose from agents, bits, body, camera"),
        (["body"], [], "entities: 'body' has shape (3,); a set of entities is a Box of shape (max_n, features)"),
        (["camera"], [], "entities: 'camera' has shape (8, 8, 1); a set of entities is a Box of shape (max_n, features)"),
        (["agents"], ["body", "agents"], "goals: 'agents' is a set of entities, which cannot be a goal"),
        ("agents", [], "entities must be a list of names of observations such as [agents], got 'agents'"),
        ([], 3, "goals must be a list of names of observations such as [agents], got 3"),
    ],
)
def test_wrong_names_of_entities_and_goals_are_refused_in_one_line(entities, goals, message):
    with pytest.raises(SettingError) as error:
        check_observation_space(CROWD, entities, goals)
    assert str(error.value) == message


def test_every_observation_but_a_set_of_entities_may_be_a_goal():
    check_observation_space(CROWD, ["agents"], ["body", "bits", "camera"])
    check_observation_space(CROWD, [], ["agents"])
    check_observation_space(VECTOR, (), ("obs",))


def test_leaves_of_a_space_have_the_order_of_the_leaves_of_its_observations():
    space = Dict(OrderedDict(b=Box(-1, 1, (2,)), a=Tuple([Box(-1, 1, (3,)), Discrete(2)])))
    assert [leaf.shape for leaf in observation_leaves(space)] == [np.shape(leaf) for leaf in tree_leaves(space.sample())]


def test_storage_keeps_bytes_and_integers_and_has_floats_in_single_precision():
    stored = allocate(SPACES["tree"], 6, 2)
    assert stored["camera"].shape == (6, 2, 8, 8, 1)
    assert stored["body"][0].shape == (6, 2, 3)
    assert stored["body"][1]["mode"].shape == (6, 2)
    dtypes = [leaf.dtype for leaf in (stored["camera"], *stored["body"][:1], stored["body"][1]["mode"], stored["body"][1]["bits"])]
    assert dtypes == [np.uint8, np.float32, np.int64, np.float32]
    assert allocate(SPACES["double"], 1).dtype == np.float32
    assert allocate(SPACES["integers"]).dtype == np.int16


@pytest.mark.parametrize("name", SPACES)
def test_a_batch_has_one_more_dimension_than_an_observation(name):
    space = SPACES[name]
    assert not is_batch_of(space, space.sample())
    assert is_batch_of(space, allocate(space, 3))


def test_limits_are_the_lowest_and_the_highest_value_of_each_part():
    space = Dict(
        a=Tuple([Box(np.float32([-1, 0]), np.float32([1, np.inf])), Discrete(3, start=-1)]),
        b=MultiDiscrete([2, 4], start=[1, 0]),
        c=MultiBinary([2, 2]),
    )
    lowest_and_highest = limits(space)
    box, choice = lowest_and_highest["a"]
    assert box.tolist() == [[-1, 0], [1, np.inf]] and choice.tolist() == [-1, 1]
    assert lowest_and_highest["b"].tolist() == [[1, 0], [2, 3]] and lowest_and_highest["c"].tolist() == [0, 1]
