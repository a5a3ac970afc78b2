"""Each row of the tables of docs/lightning.md is tried: what works works, and the rest is refused in one line."""

import inspect

import pytest
import pytorch_lightning as pl
import torch
import wandb
from pytorch_lightning.strategies import StrategyRegistry

from lightning_rl import PPO, SAC, SettingError, Trainer
from tests.fitting import tiny, weights
from tests.lightning_table import LEARNS, PAGE, ROWS, page

QUIET = {"accelerator": "cpu", "evaluation": None, "checkpoint": None, "logger": False, "enable_progress_bar": False}
BASES = {"Callback", "Checkpoint", "ProgressBar", "BaseFinetuning"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    found = {}
    for algorithm in (PPO, SAC):
        model = tiny(algorithm)
        Trainer(default_root_dir=tmp_path_factory.mktemp("plain"), **QUIET).fit(model)
        found[algorithm] = weights(model)
    return found


def one_line(error):
    """Lightning's own errors end in one line on the command line, too."""
    return (
        isinstance(error, SettingError | ValueError | ImportError | RuntimeError | TypeError) or "Misconfiguration" in type(error).__name__
    )


def trials():
    for row in ROWS:
        both = (PPO, SAC) if row.kind in ("flag", "callback") else (PPO,)
        for algorithm in [kind for kind in both if kind.__name__ in row.algorithms] or both:
            yield pytest.param(row, algorithm, id=f"{algorithm.__name__}-{row.kind}-{row.shown}")


@pytest.mark.variants("PPO-callback")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("row", "algorithm"), trials())
def test_the_table_of_lightnings_parts_in_the_docs_is_true(row, algorithm, expected, tmp_path):
    model = tiny(algorithm)
    defaults = {name: value for name, value in QUIET.items() if name not in ("logger", "enable_progress_bar") or row.name != "barebones"}
    arguments = lambda: {"default_root_dir": tmp_path, **defaults, **row.flags(tmp_path)}  # noqa: E731  # some are refused when made
    if row.refused:
        with pytest.raises(Exception, match=row.outcome) as caught:
            Trainer(**arguments()).fit(model)
        assert one_line(caught.value) and model.env_steps == 0
        return
    Trainer(**arguments()).fit(model)
    wandb.finish()  # or the next test's logger would go on in its run
    if row.name == "fast_dev_run":
        assert model.updates > 0
    elif isinstance(row.outcome, int):
        assert model.env_steps == row.outcome * 16
    else:
        assert model.env_steps == 96 and weights(model).isfinite().all()
        assert row.outcome == LEARNS or torch.equal(weights(model), expected[algorithm])


def test_the_page_holds_the_rows():
    assert page() in PAGE.read_text(encoding="utf-8"), "python -m tests.lightning_table"


def test_no_part_of_lightning_is_left_out():
    named = {kind: {row.name for row in ROWS if row.kind == kind} for kind in ("flag", "callback", "logger", "strategy")}
    flags = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    assert named["flag"] == flags
    assert named["callback"] == set(pl.callbacks.__all__) - BASES
    assert named["logger"] == set(pl.loggers.__all__) - {"Logger"}
    kinds = {"ddp_spawn", "ddp_fork", "ddp_notebook"}  # in tests/processes/test_ranks.py, as they start processes
    known = {
        name for name in StrategyRegistry.available_strategies() if not name.startswith((*kinds, "deepspeed_", "fsdp_", "xla_", "single_"))
    }
    assert known <= named["strategy"]


def test_variables_of_the_shell_that_lightning_reads_are_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("PL_TRAINER_MAX_STEPS", "3")
    with pytest.raises(SettingError, match=r"^PL_TRAINER_MAX_STEPS is not read: give the Trainer max_steps$"):
        Trainer()
