"""Runs of the zoo that wait in the repository for more time."""

import importlib
import random
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = "PPO/MinAtar/Breakout-v1/seed_2"


@pytest.fixture
def unfinished(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module = importlib.import_module("zoo_unfinished")
    monkeypatch.setattr(module, "UNFINISHED", tmp_path / "unfinished")
    return module


def write_run(folder, content=b"weights"):
    checkpoints = folder / "ppo/minatar_breakout" / RUN / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("last.ckpt", "last.ckpt.json", "last.previous.ckpt", "best.ckpt"):
        (checkpoints / name).write_bytes(content)
    (checkpoints.parent / "metrics.csv").write_text("env_steps\n1000\n")


def files(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_packed_run_is_restored_without_older_checkpoints(unfinished, tmp_path):
    write_run(tmp_path / "here")
    kept = {name: text for name, text in files(tmp_path / "here").items() if "previous" not in name}
    unfinished.pack(tmp_path / "here", "ppo/minatar_breakout", 2)
    shutil.rmtree(tmp_path / "here")
    unfinished.unpack(tmp_path / "there", "ppo/minatar_breakout", 2)
    assert files(tmp_path / "there") == kept and len(kept) == 4
    assert list(files(tmp_path / "unfinished")) == ["ppo_minatar_breakout_2.tar.xz"]


def test_an_existing_run_is_not_overwritten_by_a_packed_one(unfinished, tmp_path):
    write_run(tmp_path / "here")
    unfinished.pack(tmp_path / "here", "ppo/minatar_breakout", 2)
    write_run(tmp_path / "there", b"later")
    before = files(tmp_path / "there")
    unfinished.unpack(tmp_path / "there", "ppo/minatar_breakout", 2)
    unfinished.unpack(tmp_path / "there", "ppo/minatar_breakout", 3)  # nothing waits
    assert files(tmp_path / "there") == before


@pytest.mark.thorough
def test_what_is_too_large_for_the_repository_or_not_there_is_refused(unfinished, tmp_path, monkeypatch):
    monkeypatch.setattr(unfinished, "LIMIT", 2**20)
    write_run(tmp_path / "small")
    kept = unfinished.pack(tmp_path / "small", "ppo/minatar_breakout", 2).read_bytes()
    write_run(tmp_path / "here", random.Random(0).randbytes(2**21))
    with pytest.raises(ValueError, match=r"^ppo/minatar_breakout seed 2 has 2 MiB, more than 1 do not belong into the repository$"):
        unfinished.pack(tmp_path / "here", "ppo/minatar_breakout", 2)
    assert files(tmp_path / "unfinished") == {"ppo_minatar_breakout_2.tar.xz": kept}
    with pytest.raises(ValueError, match="ppo/minatar_breakout seed 3 has no run with a checkpoint in"):
        unfinished.pack(tmp_path / "here", "ppo/minatar_breakout", 3)
