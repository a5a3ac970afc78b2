"""The reader's way: one iteration of PPO and of SAC from the environment's step to changed weights enters few files and functions."""

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


@pytest.mark.variants
@pytest.mark.parametrize(("name", "files", "functions"), [("PPO", 15, 59), ("SAC", 19, 76)])
def test_few_files_and_functions_lie_between_a_step_and_changed_weights_and_the_page_lists_them(name, files, functions):
    module = load_way()
    gc.collect()  # so that nothing of an earlier test is closed on the way
    entered = module.way(name)
    assert len(entered) <= files and sum(map(len, entered.values())) <= functions, module.table(entered)
    assert module.table(entered) in (ROOT / "docs" / "how_it_works.md").read_text(), "python docs/way.py"


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
