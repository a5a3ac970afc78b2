"""`metrics.csv`, read back after every row."""

from __future__ import annotations

from lightning_rl.callbacks.csv_logger import CSVLogger, read_rows


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.5}, step=10)
    assert (tmp_path / "metrics.csv").read_text().split() == ["env_steps,a", "10,1.5"]
    logger.log_metrics({"a": 2.5}, step=20)
    assert (tmp_path / "metrics.csv").read_text().split() == ["env_steps,a", "10,1.5", "20,2.5"]


def test_a_new_metric_adds_a_column_and_keeps_the_rows(tmp_path):
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, step=10)
    logger.log_metrics({"b": 2.0, "env_steps": 20}, step=20)
    logger.log_metrics({"a": 3.0, "b": 4.0}, step=30)
    rows = [{"env_steps": "10", "a": "1.0", "b": ""}, {"env_steps": "20", "a": "", "b": "2.0"}, {"env_steps": "30", "a": "3.0", "b": "4.0"}]
    assert read_rows(logger.file) == rows and list(rows[0]) == list(read_rows(logger.file)[0])


def test_a_second_logger_goes_on_in_the_same_file(tmp_path):
    CSVLogger(tmp_path).log_metrics({"a": 1.0, "b": 2.0}, step=10)
    CSVLogger(tmp_path).log_metrics({"b": 3.0}, step=20)
    assert read_rows(tmp_path / "metrics.csv")[1] == {"env_steps": "20", "a": "", "b": "3.0"}


def test_rows_beyond_a_checkpoint_are_cut(tmp_path):
    logger = CSVLogger(tmp_path)
    for step in (10, 20, 30):
        logger.log_metrics({"a": step / 10}, step=step)
    logger.cut_back(20)
    assert [row["env_steps"] for row in read_rows(logger.file)] == ["10", "20"]
    logger.log_metrics({"a": 9.0}, step=25)
    assert [row["a"] for row in read_rows(logger.file)] == ["1.0", "2.0", "9.0"]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.csv") == []
    CSVLogger(tmp_path).cut_back(10)
    assert list(tmp_path.iterdir()) == []
