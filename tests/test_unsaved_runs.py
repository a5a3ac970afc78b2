"""A run whose newest weights could not be saved has an exit status of its own, and says how many steps are lost."""

from __future__ import annotations

import os
import resource
import shutil
import signal

import pytest
import torch
from pytorch_lightning import Callback

import lightning_rl as lrl
from lightning_rl.errors import UnsavedError
from tests.command_line import TINY, run
from tests.fitting import tiny


@pytest.fixture(autouse=True)
def room():
    """Make room on the disk again after each test."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill_disk(size=4096):
    """Let no file grow beyond these bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class After(Callback):
    """Calls a function once, after the fourth iteration; checkpoints are saved after each."""

    def __init__(self, do):
        self.do = do

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 4:
            self.do()


def trainer(do):
    checkpoint = {"every_n_env_steps": 16}
    return lrl.Trainer(accelerator="cpu", evaluation=None, checkpoint=checkpoint, callbacks=[After(do)], enable_progress_bar=False)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.SAC])
def test_a_disk_that_is_full_at_the_end_of_a_run_costs_a_status_and_the_steps_since_the_last_save_are_counted(folder, algorithm, capfd):
    model, fitting = tiny(algorithm), trainer(fill_disk)
    with pytest.raises(UnsavedError, match=r"^32 of 96 environment steps are lost: '\S+last.ckpt' could not be saved; make room") as ended:
        fitting.fit(model)
    assert ended.value.status == 4
    assert torch.load(fitting.run_folder / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == 64
    out = capfd.readouterr().out
    assert out.count("last.ckpt could not be saved (File too large)") == 3
    assert out.count("the run continues, and the previous save is kept") == 2  # not at its end
    fill_disk(resource.RLIM_INFINITY)
    fitting.save_checkpoint(folder / "mine.ckpt")  # nothing is lost in a Python program
    assert torch.load(folder / "mine.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == 96


@pytest.mark.thorough
def test_self_play_on_a_disk_that_is_full_counts_what_is_lost(folder):
    model = lrl.PPO(
        {"id": "lightning_rl.envs.games.tic_tac_toe", "num_envs": 2},
        n_steps=8,
        batch_size=16,
        max_env_steps=96,
        self_play={"save_steps": 16},
    )
    with pytest.raises(UnsavedError, match=r"^32 of 96 environment steps are lost"):
        trainer(fill_disk).fit(model)


@pytest.mark.thorough
def test_a_run_that_could_save_nothing_ends_with_its_own_status_and_one_line(folder, capfd):
    fill_disk()
    status, _, err = run(f"fit {TINY}--model.env.id CartPole-v1 --evaluation null --model.net_arch [64,64]", capfd)
    place = "'runs/PPO/CartPole-v1/version_0/checkpoints/last.ckpt'"
    assert status == 4 and err.startswith(f"error: 64 of 64 environment steps are lost: {place} could not be saved; make room there")
    assert len(err.splitlines()) == 1


def test_a_run_whose_working_folder_is_removed_says_that_all_is_lost(folder):
    with pytest.raises(UnsavedError, match=r"^96 of 96 environment steps are lost"):
        trainer(lambda: shutil.rmtree(folder)).fit(tiny(lrl.PPO))


def test_a_run_whose_folder_becomes_a_file_says_that_all_is_lost(folder, capfd):
    def replace():
        (folder / "runs").rename(folder / "before")
        (folder / "runs").write_text("")

    with pytest.raises(UnsavedError, match=r"^96 of 96 environment steps are lost"):
        trainer(replace).fit(tiny(lrl.PPO))
    assert (folder / "runs").read_text() == "" and (folder / "before/PPO/Scripted-v0/version_0/checkpoints/last.ckpt").is_file()
    out = capfd.readouterr().out
    assert "config.yaml could not be written, the run goes on: Not a directory" in out and "is written again" not in out


@pytest.mark.thorough
def test_a_run_whose_checkpoint_is_deleted_saves_it_again_and_ends_well(folder):
    fitting = trainer(lambda: shutil.rmtree(folder / "runs"))
    fitting.fit(tiny(lrl.PPO))
    assert (fitting.run_folder / "checkpoints/last.ckpt").is_file()


def test_a_signal_on_a_full_disk_is_not_taken_for_a_saved_run(folder, capfd):
    def fill_and_stop():
        fill_disk()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(UnsavedError, match=r"^16 of 80 environment steps are lost"):
        trainer(fill_and_stop).fit(tiny(lrl.PPO))
    assert "stopped by SIGTERM at 80 environment steps; continue: " in capfd.readouterr().out
