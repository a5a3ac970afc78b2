"""What all tests share."""

import gc
import logging
import os
import sys
from functools import cache

import docstring_parser
import pytest
import pytorch_lightning  # noqa: F401  (its loggers have their handlers from here on)
import threadpoolctl
import torch
from gymnasium.envs.registration import registry
from lightning_fabric.utilities import registry as plugins

torch.set_num_threads(1)
# a program reads these once, the tests would for each of thousands of parsers and Trainers
docstring_parser.parse_from_object = cache(docstring_parser.parse_from_object)
plugins.entry_points = cache(plugins.entry_points)
threadpoolctl.ThreadpoolController = cache(threadpoolctl.ThreadpoolController)
LOGGERS = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")]
AT_FIRST = [(logger.handlers, logger.propagate) for logger in LOGGERS]


def pytest_collection_finish():
    """Take all that was imported out of garbage collection, here and in processes that are forked: there each look at it copies memory."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the cases of a test with `variants` as thorough, except those whose ids contain one of its words, or else its first.

    A slow case of a thorough test is slow alone.
    """
    tests = {}
    for item in items:
        if item.get_closest_marker("slow"):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "thorough"]
        if item.get_closest_marker("variants") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        words = cases[0].get_closest_marker("variants").args
        fast = [case for case in cases if any(word in case.callspec.id for word in words)] or cases[:1]
        for case in cases:
            if case not in fast:
                case.add_marker("thorough")


@pytest.fixture(autouse=True)
def loggers_of_lightning():
    """Give Lightning's loggers the handlers they had at first: the command line, also in a fixture of a module, gives them its stdout."""
    for logger, (handlers, propagate) in zip(LOGGERS, AT_FIRST, strict=True):
        logger.handlers, logger.propagate = handlers, propagate


@pytest.fixture(autouse=True)
def same_arithmetic():
    """Leave the arithmetic of torch as it was found: another precision, or other threads, would change the last digits of later tests."""
    before = torch.get_float32_matmul_precision(), torch.get_num_threads()
    yield
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == before
    torch.use_deterministic_algorithms(False)  # which Lightning leaves on after a Trainer with `deterministic`


@pytest.fixture(autouse=True)
def no_seed_and_ranks_of_another_test():
    """Forget what Lightning's DDP left in a test before: it seeds the next run again, and a script would wait for ranks of another."""
    for name in ("PL_GLOBAL_SEED", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def no_process_group():
    """Leave no process group behind, which a process that is forked later would wait for."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder; what the command line changes in this process is put back, and modules of the folder are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(os, "environ", os.environ.copy())
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
            for spec in [spec for spec in registry.values() if module_of(spec.entry_point) == name]:
                del registry[spec.id]


def module_of(entry_point):
    """Return the name of the module that an environment's class or its "module:Class" comes from."""
    return entry_point.split(":")[0] if isinstance(entry_point, str) else getattr(entry_point, "__module__", None)
