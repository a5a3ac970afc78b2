"""The reader's ways, such as that from an environment's step to changed weights, enter few files and functions."""

import gc
import inspect
import sys
from functools import cached_property
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import pytorch_lightning as pl

import lightning_rl as lrl

ROOT = Path(__file__).parent.parent


def load_way():
    spec = spec_from_file_location("way", ROOT / "docs" / "way.py")
    module = sys.modules["way"] = module_from_spec(spec)  # its classes can be found by their path, also in later tests
    spec.loader.exec_module(module)
    return module


MOST = {
    "PPO": (15, 59),
    "SAC": (19, 76),
    "MultiAgent": (24, 101),
    "POCA": (23, 91),
    "setting in Python": (30, 100),
    "setting on the command line": (40, 148),
    "save": (16, 43),
    "load_policy": (34, 144),
    "evaluate": (47, 221),
}
"""The largest number of files and functions of each way. A change may lower them; one that raises them says why in the changelog."""


def entered(name):
    module = load_way()
    gc.collect()  # so that nothing of an earlier test is closed on the way
    return module, module.WAYS[name]()


@pytest.mark.variants
@pytest.mark.parametrize("name", ["PPO", "SAC"])
def test_the_page_lists_what_lies_between_a_step_and_changed_weights(name):
    module, way = entered(name)
    files, functions = module.size(way)
    assert files <= MOST[name][0] and functions <= MOST[name][1], module.table(way)
    assert module.table(way) in (ROOT / "docs" / "how_it_works.md").read_text(), "python docs/way.py"


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in MOST if name not in ("PPO", "SAC")])
def test_ways_enter_few_files_and_functions(name):
    module, way = entered(name)
    files, functions = module.size(way)
    assert files <= MOST[name][0] and functions <= MOST[name][1], module.table(way)


def own_methods(cls, below):
    """Names of the methods and properties that the classes between two others define; a dataclass generates its constructor."""
    between = cls.__mro__[1 : cls.__mro__.index(below)]
    kinds = (property, classmethod, staticmethod, cached_property)
    return {
        name
        for base in between
        for name, member in vars(base).items()
        if isinstance(member, kinds)
        or (inspect.isfunction(member) and member.__module__ == base.__module__ and member.__code__.co_filename != "<string>")
    }


def test_few_methods_stand_between_an_algorithm_and_the_lightning_module():
    found = own_methods(lrl.PPO, pl.LightningModule)
    assert {"record", "forward", "past_selves", "say"} <= found and len(found) <= 45, sorted(found)
