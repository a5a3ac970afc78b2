"""Checkpoints survive kills, full disks and damage."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import subprocess
import sys
import threading

import pytest
import torch

from lightning_rl import PPO, CheckpointConfig, SettingError, Trainer
from lightning_rl.checkpoints.atomic import SaveError, remove_leftovers, temporary, write_text
from lightning_rl.checkpoints.files import AtomicCheckpointIO, last_generation, read_verified
from tests.apart import ROOT, Apart
from tests.fitting import fit, tiny


def save(path, number, size=1000):
    AtomicCheckpointIO().save_checkpoint({"number": number, "weights": torch.full((size,), float(number))}, path)


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def number(path, said=None):
    return read_verified(path, say=(said if said is not None else []).append)["number"]


def test_two_generations_of_the_last_and_the_best_are_kept_and_one_of_others(tmp_path):
    for name in ("last", "best", "env_steps=16"):
        for i in range(3):
            save(tmp_path / f"{name}.ckpt", i)
    kept = [f"{name}.ckpt" for name in ("best", "best.previous", "env_steps=16", "last", "last.previous")]
    assert names(tmp_path) == sorted([*kept, *(f"{name}.json" for name in kept)])
    assert [number(tmp_path / f"{name}.ckpt") for name in ("last", "last.previous", "env_steps=16")] == [2, 1, 2]


@pytest.mark.thorough
def test_after_a_kill_at_any_moment_a_whole_checkpoint_is_found(tmp_path):
    program = Apart(f"-m tests.checkpoints.kills {shlex.quote(str(tmp_path))}", ROOT)
    out, err = program.communicate()
    assert program.wait() == 0, err
    lines = out.splitlines()
    assert sum("killed" in line for line in lines) >= 25 and not any(line.startswith("notice") for line in lines)
    moved = [line for line in lines if line.startswith("event") and "killed" in line]
    assert any(int(line.split()[-1]) > int(line.split()[-3]) for line in moved)  # some were killed after the save counted
    assert lines[-1] == "left: ['last.ckpt', 'last.ckpt.json', 'last.previous.ckpt', 'last.previous.ckpt.json']"


@pytest.mark.parametrize("limit", [0, 1000, 3000])
def test_a_full_disk_leaves_the_files_that_were_there(tmp_path, limit):
    save(tmp_path / "last.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(SaveError, match=r"last\.ckpt could not be saved \(File too large\); what was saved before is unchanged"):
            save(tmp_path / "last.ckpt", 3, size=10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    save(tmp_path / "last.ckpt", 4)
    assert number(tmp_path / "last.ckpt") == 4


def test_a_folder_that_cannot_be_made_is_reported_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match=r"could not be saved \(Not a directory\)"):
        save(tmp_path / "file" / "checkpoints" / "last.ckpt", 1)
    with pytest.raises(SaveError, match="could not be saved"):
        save(tmp_path.__class__("/proc/1/last.ckpt"), 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_reported_in_one_line(tmp_path):
    save(tmp_path / "last.ckpt", 1)
    tmp_path.chmod(0o555)
    with pytest.raises(SaveError, match="Permission denied"):
        save(tmp_path / "last.ckpt", 2)
    tmp_path.chmod(0o755)
    assert number(tmp_path / "last.ckpt") == 1


def test_a_checkpoint_that_cannot_be_pickled_leaves_no_files(tmp_path):
    with pytest.raises(Exception, match="pickle"):
        AtomicCheckpointIO().save_checkpoint({"number": lambda: 0}, tmp_path / "last.ckpt")
    assert names(tmp_path) == []


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("harm", [damage, cut_off, lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_the_previous_generation_replaces_a_damaged_or_missing_checkpoint_with_one_line(tmp_path, harm):
    save(tmp_path / "last.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    harm(tmp_path / "last.ckpt")
    said: list[str] = []
    assert number(tmp_path / "last.ckpt", said) == 1
    (line,) = said
    assert "last.ckpt" in line and "continuing with the previous generation, last.previous.ckpt" in line and "\n" not in line
    found = last_generation(tmp_path)
    assert found is not None and number(found, []) == 1
    save(tmp_path / "last.ckpt", 3)  # a damaged one does not take the place of a whole one
    assert (number(tmp_path / "last.ckpt"), number(tmp_path / "last.previous.ckpt")) == (3, 1)


def test_two_damaged_generations_are_reported_in_one_line(tmp_path):
    save(tmp_path / "last.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    damage(tmp_path / "last.ckpt")
    damage(tmp_path / "last.previous.ckpt")
    with pytest.raises(SettingError, match=r"last\.ckpt' cannot be read as a checkpoint \(its bytes are not those of last\.ckpt\.json\)"):
        number(tmp_path / "last.ckpt")
    assert last_generation(tmp_path / "nothing") is None


def test_reading_during_a_save_gives_a_whole_checkpoint_without_a_notice(tmp_path):
    save(tmp_path / "last.ckpt", 0)
    stop, said = threading.Event(), []

    def save_on():
        i = 1
        while not stop.is_set():
            save(tmp_path / "last.ckpt", i)
            i += 1

    thread = threading.Thread(target=save_on)
    thread.start()
    try:
        found = [number(tmp_path / "last.ckpt", said) for _ in range(150)]
    finally:
        stop.set()
        thread.join()
    assert found == sorted(found) and found[-1] > found[0] and said == []


def test_temporary_files_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path):
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    ).stdout.strip()
    for name in (f"last.ckpt.tmp-{dead}", f"last.ckpt.json.tmp-{dead}", f"last.ckpt.tmp-{os.getppid()}", "notes.tmp-x"):
        (tmp_path / name).write_text("")
    save(tmp_path / "last.ckpt", 1)
    assert names(tmp_path) == sorted(["last.ckpt", "last.ckpt.json", f"last.ckpt.tmp-{os.getppid()}", "notes.tmp-x"])
    remove_leftovers(tmp_path / "nowhere")


def refuse(*arguments):
    raise OSError(errno.EPERM, "Operation not permitted")


def test_saving_replaces_a_link_and_leaves_its_target(tmp_path, monkeypatch):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "precious")
    (tmp_path / "last.ckpt.json").symlink_to(tmp_path / "precious")
    save(tmp_path / "last.ckpt", 1)
    for name in ("last.ckpt", "last.ckpt.json", "last.previous.ckpt", "last.previous.ckpt.json"):
        temporary(tmp_path / name).symlink_to(tmp_path / "precious")
    monkeypatch.setattr(os, "link", refuse)  # a file system without second names: the generation before is copied
    save(tmp_path / "last.ckpt", 2)
    assert number(tmp_path / "last.previous.ckpt") == 1
    assert (tmp_path / "precious").read_text() == "mine" and not (tmp_path / "last.ckpt").is_symlink()
    assert number(tmp_path / "last.ckpt") == 2


def test_a_text_is_not_written_through_a_link_that_has_its_temporary_name(tmp_path):
    (tmp_path / "precious").write_text("mine")
    for name in (tmp_path / "config.yaml", temporary(tmp_path / "config.yaml")):
        name.symlink_to(tmp_path / "precious")
    write_text(tmp_path / "config.yaml", "seed: 1")
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "config.yaml").read_text() == "seed: 1"
    assert names(tmp_path) == ["config.yaml", "precious"]


def test_removing_a_checkpoint_removes_what_belongs_to_it(tmp_path):
    save(tmp_path / "last.ckpt", 1)
    save(tmp_path / "last.ckpt", 2)
    AtomicCheckpointIO().remove_checkpoint(tmp_path / "last.ckpt")
    assert names(tmp_path) == []


def test_lightning_saves_and_continues_through_it(tmp_path):
    trainer = fit(tiny(PPO, max_env_steps=16), plugins=[AtomicCheckpointIO()])
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt.json").is_file()
    model = tiny(PPO, max_env_steps=32)
    fit(model, ckpt_path=tmp_path / "last.ckpt", plugins=[AtomicCheckpointIO()])
    assert model.env_steps == 32


def test_falling_back_is_reported_once_for_each_damage(tmp_path):
    path, said = tmp_path / "last.ckpt", []
    for i in range(2):
        save(path, i)
    damage(path)
    assert [number(path, said) for _ in range(3)] == [0, 0, 0] and len(said) == 1
    path.write_bytes(b"")
    assert [number(path, said) for _ in range(2)] == [0, 0] and len(said) == 2


@pytest.mark.thorough
def test_a_run_that_falls_back_reports_it_once(tmp_path, capfd):
    model = tiny(PPO, max_env_steps=32)
    every = CheckpointConfig(every_n_env_steps=16)
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False, checkpoint=every)
    trainer.fit(model)
    damage(trainer.run_folder / "checkpoints" / "last.ckpt")
    Trainer(default_root_dir=tmp_path, accelerator="cpu", enable_progress_bar=False).fit(tiny(PPO), ckpt_path="last")
    assert capfd.readouterr().out.count("continuing with the previous generation") == 1


def test_a_checkpoint_that_its_user_has_edited_and_saved_again_is_loaded_and_not_the_one_before(tmp_path):
    path, said = tmp_path / "last.ckpt", []
    save(path, 1)
    save(path, 2)
    torch.save(torch.load(path, weights_only=True) | {"number": 3}, path)
    assert number(path, said) == 3 and said == []
    damage(path)
    assert number(path, said) == 1 and len(said) == 1
