"""`metrics.csv`, read back after every row."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from contextlib import contextmanager

import pytest
from pytorch_lightning import Callback

from lightning_rl import PPO, RolloutEvaluator
from lightning_rl.loggers import MetricsLogger, read_rows
from lightning_rl.training.run_folder import cut_back_evaluations, write_config
from tests.fitting import fit, tiny


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log_metrics({"a": 1.5}, step=10)
    assert (tmp_path / "metrics.csv").read_text().split() == ["env_steps,a", "10,1.5"]
    logger.log_metrics({"a": 2.5}, step=20)
    assert (tmp_path / "metrics.csv").read_text().split() == ["env_steps,a", "10,1.5", "20,2.5"]


def test_a_new_metric_adds_a_column_and_keeps_the_rows(tmp_path):
    logger = MetricsLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=10)
    logger.log_metrics({"b": 2.0, "env_steps": 20}, step=20)
    logger.log_metrics({"a": 3.0, "b": 4.0}, step=30)
    rows = [{"env_steps": "10", "a": "1.0", "b": ""}, {"env_steps": "20", "a": "", "b": "2.0"}, {"env_steps": "30", "a": "3.0", "b": "4.0"}]
    assert read_rows(logger.file) == rows and list(rows[0]) == list(read_rows(logger.file)[0])


def test_a_second_logger_continues_the_same_file(tmp_path):
    MetricsLogger(tmp_path).log_metrics({"a": 1.0, "b": 2.0}, step=10)
    MetricsLogger(tmp_path).log_metrics({"b": 3.0}, step=20)
    assert read_rows(tmp_path / "metrics.csv")[1] == {"env_steps": "20", "a": "", "b": "3.0"}


def test_rows_beyond_a_checkpoint_are_removed(tmp_path):
    logger = MetricsLogger(tmp_path)
    for step in (10, 20, 30):
        logger.log_metrics({"a": step / 10}, step=step)
    logger.cut_back(20)
    assert [row["env_steps"] for row in read_rows(logger.file)] == ["10", "20"]
    logger.log_metrics({"a": 9.0}, step=25)
    assert [row["a"] for row in read_rows(logger.file)] == ["1.0", "2.0", "9.0"]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("torn", ["48,1000", "48,1000,1.5", "48,1000\r\n", "48,1000,1.5,2\r\n", "\r\n", "\0\0\0", "4", '"48,10'])
def test_half_a_row_after_a_kill_is_ignored(tmp_path, torn):
    file = tmp_path / "metrics.csv"
    file.write_text("env_steps,a,b\r\n16,1,2\r\n32,3,4\r\n" + torn, newline="")
    assert [row["env_steps"] for row in read_rows(file)] == ["16", "32"]
    logger = MetricsLogger(tmp_path)
    logger.cut_back(48)
    logger.log_metrics({"a": 5, "b": 6}, step=48)
    assert file.read_text().splitlines() == ["env_steps,a,b", "16,1,2", "32,3,4", "48,5,6"]
    (tmp_path / "evaluations.csv").write_text("env_steps,seed\r\n16,1\r\n32", newline="")
    cut_back_evaluations(tmp_path, "env_steps", 32)
    assert (tmp_path / "evaluations.csv").read_text().splitlines() == ["env_steps,seed", "16,1"]


def test_a_header_without_a_line_end_is_ignored(tmp_path):
    (tmp_path / "metrics.csv").write_text("env_st")
    MetricsLogger(tmp_path).log_metrics({"a": 1.0}, step=10)
    assert (tmp_path / "metrics.csv").read_text().split() == ["env_steps,a", "10,1.0"]


def test_a_full_disk_destroys_neither_rows_nor_the_configuration(tmp_path, monkeypatch):
    lines: list[str] = []
    logger = MetricsLogger(tmp_path, say=lines.append)
    logger.log_metrics({"a": 1.0}, step=10)
    write_config(tmp_path, {"seed": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: logger.cut_back(0), lambda: write_config(tmp_path, {"seed": 2})):
        with pytest.raises(OSError, match="No space left") as error:
            write()
        assert error.value.strerror == "No space left on device"
    logger.log_metrics({"b": 1.0}, step=20)
    assert lines == [f"{logger.file} could not be written (No space left on device): its rows are retried later, the run goes on"]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.csv") == []
    MetricsLogger(tmp_path).cut_back(10)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def full_disk(size):
    """Let no file grow beyond that many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 4, 9])
def test_rows_that_a_full_disk_refused_are_written_once_it_has_room(tmp_path, room):
    lines: list[str] = []
    logger = MetricsLogger(tmp_path, say=lines.append)
    logger.log_metrics({"a": 1.0}, step=10)
    with full_disk(logger.file.stat().st_size + room):
        for step, row in ((20, {"a": 2.000000001}), (30, {"b": 3.0}), (40, {"a": 4.0})):  # a row is cut off, the header cannot grow
            logger.log_metrics(row, step=step)
        assert read_rows(logger.file) == [{"env_steps": "10", "a": "1.0"}]
    logger.log_metrics({"b": 5.0}, step=50)
    rows = [(row["env_steps"], row["a"], row["b"]) for row in read_rows(logger.file)]
    assert rows == [("10", "1.0", ""), ("20", "2.000000001", ""), ("30", "", "3.0"), ("40", "4.0", ""), ("50", "", "5.0")]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    assert lines == [f"{logger.file} could not be written (File too large): its rows are retried later, the run goes on"]


def test_rows_that_wait_at_the_end_of_a_run_are_written_or_counted_as_lost(tmp_path):
    lines: list[str] = []
    logger = MetricsLogger(tmp_path, say=lines.append)
    logger.log_metrics({"a": 1.0}, step=10)
    with full_disk(0):
        for step in (20, 30):
            logger.log_metrics({"a": 1.0}, step=step)
        logger.finalize("success")
    assert lines[1:] == [f"2 rows of {logger.file} are lost: it still cannot be written"]
    logger.finalize("success")
    assert [row["env_steps"] for row in read_rows(logger.file)] == ["10", "20", "30"] and len(lines) == 2


def remove(file):
    file.unlink()


def remove_folder(file):
    shutil.rmtree(file.parent)


def cut(file):
    os.truncate(file, file.stat().st_size - 3)


def empty(file):
    os.truncate(file, 0)


def replace_by_folder(file):
    file.unlink()
    (file / "mine").mkdir(parents=True)


def replace_by_pipe(file):
    file.unlink()
    os.mkfifo(file)


def replace_by_other_columns(file):
    file.write_text("time;reward\n1;2\n3;4\n")


def replace_by_bytes(file):
    file.write_bytes(bytes(range(256)) * 10 + b'"')


def add_bytes(file):
    with file.open("ab") as stream:
        stream.write(b'"' + bytes(range(256)) + b"\n" + b"x" * 200_000 + b"\r\r\n")


SPOILED = {
    remove: [],
    remove_folder: [],
    cut: ["10"],
    empty: [],
    replace_by_folder: [],
    replace_by_pipe: [],
    replace_by_other_columns: [],
    replace_by_bytes: [],
    add_bytes: ["10", "20"],
}
"""Harm to `metrics.csv`, and the rows that remain."""


@pytest.mark.parametrize("spoil", SPOILED)
@pytest.mark.parametrize("continues", [False, True])
def test_logging_continues_whatever_happened_to_the_file(tmp_path, spoil, continues):
    lines: list[str] = []
    logger = MetricsLogger(tmp_path / "run", say=lines.append)
    for step in (10, 20):
        logger.log_metrics({"a": step / 10}, step=step)
    spoil(logger.file)
    if continues:
        logger = MetricsLogger(tmp_path / "run", say=lines.append)
        logger.cut_back(20)
    for step in (30, 40):
        logger.log_metrics({"a": step / 10}, step=step)
    expected = [{"env_steps": step, "a": str(int(step) / 10)} for step in [*SPOILED[spoil], "30", "40"]]
    assert read_rows(logger.file) == expected
    aside = tmp_path / "run" / "metrics.csv.unreadable"
    is_foreign = spoil.__name__.startswith("replace")
    assert lines == ([f"{logger.file} has no column env_steps: it is now {aside.name}, and a new file begins"] if is_foreign else [])
    assert os.path.lexists(aside) == is_foreign


def test_evaluations_that_a_full_disk_refused_are_written_with_the_next_ones(tmp_path):
    model, evaluator = tiny(PPO), RolloutEvaluator(16, episodes=2, num_envs=1, file=tmp_path / "evaluations.csv")
    lines: list[str] = []

    class Full(Callback):
        """The disk is full from the second evaluation to the fourth."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            trainer.say = lines.append  # standard output is a file too
            if batch_idx == 1:
                self.disk = full_disk(60)
                self.disk.__enter__()
            if batch_idx == 4:
                self.disk.__exit__(None, None, None)

    fit(model, callbacks=[evaluator, Full()])
    assert [int(row["env_steps"]) for row in read_rows(evaluator.file)] == [step for step in range(16, 97, 16) for _ in range(2)]
    assert lines == [f"{evaluator.file} could not be written (File too large): its rows are retried later, the run goes on"]


@pytest.mark.parametrize("content", ["years of work", "env_steps,a\n10,1.0\n"])
def test_rows_are_never_written_through_a_link(tmp_path, content):
    (tmp_path / "mine").write_text(content)
    (tmp_path / "run").mkdir()
    file, logger = tmp_path / "run" / "metrics.csv", MetricsLogger(tmp_path / "run")
    for step in (10, 20):  # before the run, and during it
        file.unlink(missing_ok=True)
        file.symlink_to(tmp_path / "mine")
        logger.log_metrics({"a": 2.0}, step=step)
        assert (tmp_path / "mine").read_text() == content and not file.is_symlink()
        assert read_rows(file)[-1] == {"env_steps": str(step), "a": "2.0"}


def test_evaluations_are_never_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    (tmp_path / "evaluations.csv").symlink_to(tmp_path / "mine")
    fit(tiny(PPO, max_env_steps=16), callbacks=[RolloutEvaluator(16, episodes=2, num_envs=1, file=tmp_path / "evaluations.csv")])
    assert (tmp_path / "mine").read_text() == "years of work"
    assert [row["env_steps"] for row in read_rows(tmp_path / "evaluations.csv")] == ["16", "16"]
