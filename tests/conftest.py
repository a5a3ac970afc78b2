"""What all tests share."""

import logging
import os
import sys

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder; what the command line changes in this process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(os, "environ", os.environ.copy())
    loggers = [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")]
    before, modules = [(logger.handlers, logger.propagate) for logger in loggers], set(sys.modules)
    yield tmp_path
    for logger, (handlers, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
