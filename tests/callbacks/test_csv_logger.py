"""`metrics.csv`, read back after every row."""

from __future__ import annotations

import errno
import os

import pytest

from lightning_rl.callbacks.csv_logger import MetricsLogger, read_rows
from lightning_rl.run_folder import cut_back_evaluations, write_config


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


def test_a_second_logger_goes_on_in_the_same_file(tmp_path):
    MetricsLogger(tmp_path).log_metrics({"a": 1.0, "b": 2.0}, step=10)
    MetricsLogger(tmp_path).log_metrics({"b": 3.0}, step=20)
    assert read_rows(tmp_path / "metrics.csv")[1] == {"env_steps": "20", "a": "", "b": "3.0"}


def test_rows_beyond_a_checkpoint_are_cut(tmp_path):
    logger = MetricsLogger(tmp_path)
    for step in (10, 20, 30):
        logger.log_metrics({"a": step / 10}, step=step)
    logger.cut_back(20)
    assert [row["env_steps"] for row in read_rows(logger.file)] == ["10", "20"]
    logger.log_metrics({"a": 9.0}, step=25)
    assert [row["a"] for row in read_rows(logger.file)] == ["1.0", "2.0", "9.0"]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("torn", ["48,1000", "48,1000,1.5", "48,1000\r\n", "48,1000,1.5,2\r\n", "\r\n", "\0\0\0", "4", '"48,10'])
def test_what_a_kill_left_of_a_row_is_no_row(tmp_path, torn):
    file = tmp_path / "metrics.csv"
    file.write_text("env_steps,a,b\r\n16,1,2\r\n32,3,4\r\n" + torn, newline="")
    assert [row["env_steps"] for row in read_rows(file)] == ["16", "32"]
    logger = MetricsLogger(tmp_path)
    logger.cut_back(48)
    logger.log_metrics({"a": 5, "b": 6}, step=48)
    assert file.read_text().splitlines() == ["env_steps,a,b", "16,1,2", "32,3,4", "48,5,6"]
    (tmp_path / "evaluations.csv").write_text("env_steps,seed\r\n16,1\r\n32", newline="")
    cut_back_evaluations(tmp_path, 32)
    assert (tmp_path / "evaluations.csv").read_text().splitlines() == ["env_steps,seed", "16,1"]


def test_a_header_without_an_end_is_none(tmp_path):
    (tmp_path / "metrics.csv").write_text("env_st")
    MetricsLogger(tmp_path).log_metrics({"a": 1.0}, step=10)
    assert (tmp_path / "metrics.csv").read_text().split() == ["env_steps,a", "10,1.0"]


def test_a_full_disk_takes_neither_rows_nor_the_configuration(tmp_path, monkeypatch):
    logger = MetricsLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=10)
    write_config(tmp_path, {"seed": 1})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (lambda: logger.cut_back(0), lambda: logger.log_metrics({"b": 1.0}, step=20), lambda: write_config(tmp_path, {"seed": 2})):
        with pytest.raises(OSError, match="No space left") as error:
            write()
        assert error.value.strerror == "No space left on device"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.csv") == []
    MetricsLogger(tmp_path).cut_back(10)
    assert list(tmp_path.iterdir()) == []
