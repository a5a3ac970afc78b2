"""A dataset that cannot be used is refused in one line with the reason; nothing in it is run, and it takes no memory."""

from __future__ import annotations

import resource
import shutil
import sys

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from lightning_rl.cli.main import one_line
from lightning_rl.demonstrations.dataset import load_demonstrations
from lightning_rl.demonstrations.files import differences
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces
from tests.demonstrations.episodes import minari_dataset
from tests.demonstrations.hostile import ACTION, CASES, OBSERVATION, good

SPACES = Spaces(OBSERVATION, ACTION)


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory):
    """The folder of a dataset that can be read, made once."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("undamaged")))
        yield good("bad-v0").parent


@pytest.fixture
def dataset(datasets, undamaged):
    """The files of its copy, to be damaged."""
    return shutil.copytree(undamaged, datasets / "bad-v0") / "data"


@pytest.mark.variants
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_used_is_refused_in_one_line(dataset, tmp_path, case):
    damage, words = CASES[case]
    damage(dataset, tmp_path / "proof")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SettingError) as refused:
        load_demonstrations("bad-v0", SPACES)
    line = one_line(str(refused.value))
    assert "dataset 'bad-v0'" in line and [word for word in words if word not in line] == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kilobytes
    assert not (tmp_path / "proof").exists()


def test_the_dataset_that_was_damaged_is_good(dataset):
    assert len(load_demonstrations("bad-v0", SPACES)) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ba-v0", "did you mean bad-v0?"),
        ("../bad-v0", "is neither in"),
        ("", "is neither in"),
        ("x" * 5000, "is neither in"),
        ("bad-v0\0", "is neither in"),
    ],
)
def test_a_missing_dataset_is_refused_with_the_nearest_name(dataset, name, message):
    with pytest.raises(SettingError, match="is neither in") as refused:
        load_demonstrations(name, SPACES)
    assert message in str(refused.value)


def test_an_algorithm_with_masks_needs_a_dataset_with_masks(dataset):
    with pytest.raises(SettingError, match="episode_0 has no action masks, but the algorithm's environment has"):
        load_demonstrations("bad-v0", SPACES._replace(masked=True))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.array([[1, 0], [0, 0], [1, 1]]), "step 1 of episode_0 allows no action"),
        (np.ones((3, 3)), "action_mask of step 0 of episode_0 must have 2 entries"),
        (np.ones((2, 2)), r"action_mask has shape \(2, 2\), not 3 rows"),
        ({"choice": np.ones((3, 2))}, "infos/action_mask is no array"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(datasets, mask, message):
    spaces = Box(-1, 1, (2,)), Discrete(2)
    minari_dataset("masks-v0", np.zeros((3, 2), np.float32), [0, 1], spaces, infos={"action_mask": mask})
    with pytest.raises(SettingError, match=message):
        load_demonstrations("masks-v0", Spaces(*spaces, masked=True))


def test_differences_of_all_kinds_of_spaces_are_described():
    import json

    from minari.serialization import serialize_space

    def said(there, here):
        return list(differences(*(json.loads(serialize_space(space)) for space in (there, here)), "action"))

    box = Box(-1, 1, (2,))
    assert said(MultiDiscrete([2, 3]), MultiDiscrete([2, 4])) == ["action has nvec [2, 3] in the dataset and [2, 4] in the algorithm"]
    assert said(MultiBinary(3), MultiBinary(4)) == ["action has n 3 in the dataset and 4 in the algorithm"]
    assert said(MultiBinary([2, 3]), MultiBinary([2, 3])) == []
    assert said(Tuple((box, Discrete(2))), Tuple((box, Discrete(3)))) == ["action.1 has n 2 in the dataset and 3 in the algorithm"]
    assert said(Tuple((box,)), Tuple((box, box))) == ["action has 0 in the dataset and 0, 1 in the algorithm"]
    assert said(Text(5), box) == ["action is Text in the dataset and Box in the algorithm"]
    assert said(Box(-1, np.inf, (2,)), box) == ["action has high inf in the dataset and 1.0 in the algorithm"]
    assert said(Discrete(3, start=1), Discrete(3)) == ["action has start 1 in the dataset and 0 in the algorithm"]


@pytest.mark.parametrize("package", ["minari", "h5py", "PIL.Image"])
def test_a_missing_package_is_named_with_its_extra(datasets, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingError, match=r'needs the package minari, which is not installed; run: pip install "lightning_rl\[minari\]"'):
        load_demonstrations("any-v0", SPACES)
