"""Environments that would end the program, by `sys.exit()` or `KeyboardInterrupt`: the run is saved, and one line names them."""

from __future__ import annotations

import os
import signal
import sys

import gymnasium as gym
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.algorithms.sac import SAC
from lightning_rl.errors import ProgramEndedError, is_interrupt
from tests.agents import Duel
from tests.command_line import TINY, run
from tests.environments import Quits, Scripted
from tests.fitting import fit, tiny

WORDS = {"exits": "SystemExit 0", "interrupts": "KeyboardInterrupt", "raises": "BaseException window closed"}


QUITS = "tests.environments:Quits-v0"


@pytest.fixture(autouse=True)
def uncounted(monkeypatch):
    monkeypatch.setattr(Quits, "calls", 0)


@pytest.mark.thorough
@pytest.mark.parametrize("how", WORDS)
def test_a_run_that_its_environment_ends_is_saved_and_names_it_and_has_a_status_of_its_own(folder, capfd, how):
    settings = f"--model.env.id {QUITS} --model.env.kwargs.how {how} --model.env.kwargs.at 49 --evaluation null"
    status, out, err = run(f"fit {TINY}{settings}", capfd)
    assert status == 3
    assert err.startswith(f"error: environment 0 of Quits-v0 tried to end the program by {WORDS[how]} (environments.py:")
    assert len(err.splitlines()) == 1
    assert "continue it: lightning-rl fit" in out
    (saved,) = folder.rglob("last.ckpt")
    assert torch.load(saved, weights_only=True)["lightning_rl"]["env_steps"] == 48  # 32 of an iteration, 16 of the next


@pytest.mark.thorough
def test_a_replaying_run_that_its_environment_ends_is_saved(folder):
    model = tiny(SAC, QUITS, env={"kwargs": {"at": 41}}, max_env_steps=96)
    trainer = lrl.Trainer(accelerator="cpu", evaluation=None)
    with pytest.raises(ProgramEndedError, match="environment 0 of Quits-v0 tried to end the program by SystemExit 0"):
        trainer.fit(model)
    saved = torch.load(trainer.run_folder / "checkpoints/last.ckpt", weights_only=True)
    assert saved["lightning_rl"]["env_steps"] == 40


def test_lightnings_own_trainer_names_the_environment_that_ends_the_program():
    with pytest.raises(ProgramEndedError, match="environment 1 of Quits-v0"):
        fit(tiny(lrl.PPO, QUITS, env={"kwargs": {"at": 6}}))


@pytest.mark.thorough
@pytest.mark.parametrize("where", ["__init__", "reset"])
def test_an_environment_that_ends_the_program_while_it_is_tried_is_named(folder, capfd, where):
    status, _, err = run(f"fit {TINY}--model.env.id {QUITS} --model.env.kwargs.where {where}", capfd)
    assert status == 3 and err.startswith(f"error: the environment {QUITS} tried to end the program by SystemExit 0 (environments.py:")
    assert list(folder.iterdir()) == []


def test_a_function_that_ends_the_program_in_place_of_building_an_environment_is_named():
    def quits():
        sys.exit("no display")

    with pytest.raises(ProgramEndedError, match="the environment quits tried to end the program by SystemExit no display"):
        lrl.PPO(quits)


@pytest.mark.thorough
@pytest.mark.parametrize("subcommand", ["evaluate", "record --out a.mp4", "collect --dataset quits/quits-v0", "fit"])
def test_each_subcommand_that_plays_names_the_environment_that_ends_it(folder, capfd, monkeypatch, subcommand):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
    assert run(f"fit {TINY}--model.env.id {QUITS} --model.env.kwargs.at=-1 --trainer.run_name a", capfd)[0] == 0
    (saved,) = folder.rglob("best.ckpt")
    if subcommand == "fit":  # ended in an evaluation: its environments take the 65th step and more
        arguments = f"fit {TINY}--model.env.id {QUITS} --model.env.kwargs.at 33 --evaluation.every_n_env_steps 32 --trainer.run_name b"
    else:
        where = "render" if subcommand.startswith("record") else "step"
        arguments = f"{subcommand} --ckpt_path {saved} --env '{{id: \"{QUITS}\", kwargs: {{where: {where}}}}}'"
    Quits.calls = 0
    status, _, err = run(arguments, capfd)
    assert (status, len(err.splitlines())) == (3, 1)
    assert "Quits-v0 tried to end the program by SystemExit 0" in err


@pytest.mark.thorough
def test_a_worker_that_its_environment_ends_is_restarted_and_one_line_says_so(folder, capfd):
    several = "--model.env.vectorization async --evaluation null"
    status, out, err = run(f"fit {TINY}--model.env.id {QUITS} --model.env.kwargs.at 20 {several}", capfd)
    assert (status, err) == (0, "") and "was restarted: it died with exit code 0" in out


@pytest.mark.slow
def test_an_actor_that_its_environment_ends_is_restarted_and_the_line_names_the_environment(folder, capfd):
    actors = "--model IMPALA --model.actors.num_actors 2 --model.actors.backend processes --evaluation null --model.n_steps 16"
    tiny_run = f"--model.env.num_envs 2 --model.net_arch [8] --model.max_env_steps 128 --trainer.accelerator cpu {actors}"
    status, out, err = run(f"fit --model.env.id {QUITS} --model.env.kwargs.at 50 {tiny_run}", capfd)
    assert (status, err) == (0, "")
    assert "was restarted: environment 1 of Quits-v0 tried to end the program by SystemExit 0" in out


@pytest.mark.thorough
def test_a_copy_of_several_agents_that_ends_the_program_is_named(monkeypatch):
    monkeypatch.setattr(Duel, "step", lambda *arguments: sys.exit())
    with pytest.raises(ProgramEndedError, match=r"environment 0 of .*Duel tried to end the program by SystemExit"):
        fit(lrl.PPO(Duel, n_steps=5, batch_size=5, net_arch=[8], max_env_steps=20))


def test_a_vector_environment_that_ends_the_program_is_named():
    class Copies(gym.vector.SyncVectorEnv):
        def step(self, actions):
            sys.exit()

    envs = Copies([Scripted] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    with pytest.raises(ProgramEndedError, match="Scripted tried to end the program by SystemExit"):
        fit(lrl.PPO(envs, n_steps=8, batch_size=16, net_arch=[8], max_env_steps=32))


def test_a_callback_may_end_the_program_with_its_own_status_and_the_run_is_saved(folder):
    class Leave(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 2:
                sys.exit(7)

    trainer = lrl.Trainer(accelerator="cpu", evaluation=None, callbacks=[Leave()])
    with pytest.raises(SystemExit) as ended:
        trainer.fit(tiny(lrl.PPO))
    saved = torch.load(trainer.run_folder / "checkpoints/last.ckpt", weights_only=True)
    assert (ended.value.code, saved["lightning_rl"]["env_steps"]) == (7, 48)


def test_ctrl_c_in_a_step_is_no_end_by_the_environment():
    with pytest.raises(SystemExit) as ended:  # as Lightning ends a program after Ctrl-C
        fit(tiny(lrl.PPO, QUITS, env={"kwargs": {"how": "is interrupted"}}))
    assert ended.value.code == 1
    for seconds in (0, 1):
        try:
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            os.kill(os.getpid(), signal.SIGINT)
            while seconds:
                pass
        except KeyboardInterrupt as error:
            assert is_interrupt(error)
        finally:
            signal.signal(signal.SIGINT, before)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        assert not is_interrupt(error)
