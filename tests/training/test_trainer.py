"""What a run leaves, and how it goes on."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time

import gymnasium as gym
import pytest
import pytorch_lightning as pl
import torch
import wandb
import yaml
from pytorch_lightning.loggers import WandbLogger

from lightning_rl import A2C, PPO, SAC, CheckpointConfig, EvaluationConfig, RolloutEvaluator, Trainer, evaluate
from lightning_rl.checkpoints.manifest import threads_of
from lightning_rl.errors import SettingError
from lightning_rl.loggers import read_rows
from lightning_rl.training.run_folder import read_seed
from tests.command_line import MODULE
from tests.environments import Endless
from tests.fitting import tiny, weights

SHORT = EvaluationConfig(every_n_env_steps=16, episodes=2, num_envs=2, max_episode_steps=20)


@pytest.fixture
def fit(folder):
    """Train a tiny model on CartPole in the current folder: 6 iterations of 16 environment steps."""

    def fit(algorithm=PPO, env="CartPole-v1", ckpt_path=None, max_env_steps=96, **arguments):
        model = tiny(algorithm, env, max_env_steps=max_env_steps) if isinstance(env, str) else env
        trainer = Trainer(**({"accelerator": "cpu", "enable_progress_bar": False, "evaluation": SHORT} | arguments))
        trainer.fit(model, ckpt_path=ckpt_path)
        return trainer

    return fit


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_each_run_has_its_own_folder(fit, folder):
    trainer = fit()
    run = folder / "runs/PPO/CartPole-v1/version_0"
    assert trainer.run_folder.resolve() == run and trainer.log_dir == "runs/PPO/CartPole-v1/version_0"
    left = {name for name in files(run) if "tfevents" not in name and name != "hparams.yaml"}
    saved = {"best.ckpt", "best.ckpt.json", "last.ckpt", "last.ckpt.json"}
    before = {f"checkpoints/{name}.previous.ckpt{end}" for name in ("best", "last") for end in ("", ".json")}  # if it took long
    assert left - before == {
        *("config.yaml", "metrics.csv", "evaluations.csv"),
        *(f"checkpoints/{name}" for name in saved),
    }
    assert any("tfevents" in name for name in files(run)) and {path.name for path in folder.iterdir()} == {"runs"}
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["class_path"] == "PPO" and config["model"]["init_args"]["env"]["id"] == "CartPole-v1"
    assert config["evaluation"]["episodes"] == 2
    assert config["checkpoint"] == {
        **dict.fromkeys(("every_n_env_steps", "every_n_updates", "save_replay_buffer", "mode")),
        "keep": 0,
        "monitor": "eval/mean_reward",
    }


def test_rows_begin_with_environment_steps_and_episodes_have_theirs(fit, folder):
    run = fit().run_folder
    metrics, episodes = read_rows(run / "metrics.csv"), read_rows(run / "evaluations.csv")
    assert next(iter(metrics[0])) == "env_steps"
    assert [int(row["env_steps"]) for row in metrics if row["train/loss"]] == [16, 32, 48, 64, 80, 96]
    assert [int(row["env_steps"]) for row in metrics if row["eval/mean_reward"]] == [16, 32, 48, 64, 80, 96]
    assert len(episodes) == 12 and list(episodes[0]) == ["env_steps", "seed", "return", "length", "success"]
    assert {row["seed"] for row in episodes} == {"10000", "10001"}


@pytest.mark.thorough
def test_versions_count_up_for_each_algorithm_and_environment(fit, folder):
    quick = {"max_env_steps": 16, "evaluation": None, "checkpoint": None}
    runs = [fit(**quick).run_folder, fit(**quick).run_folder, fit(A2C, **quick).run_folder]
    runs.append(fit(env="tests.environments:Scripted-v0", **quick).run_folder)
    for number in (9, 10):
        (folder / f"runs/PPO/CartPole-v1/version_{number}").mkdir()
    runs.append(fit(**quick).run_folder)
    names = ["PPO/CartPole-v1/version_0", "PPO/CartPole-v1/version_1", "A2C/CartPole-v1/version_0", "PPO/Scripted-v0/version_0"]
    assert [str(run) for run in runs] == [f"runs/{name}" for name in [*names, "PPO/CartPole-v1/version_11"]]


def test_the_root_of_all_runs_can_be_set(fit, folder):
    assert str(fit(default_root_dir=folder / "elsewhere").run_folder) == str(folder / "elsewhere/PPO/CartPole-v1/version_0")


@pytest.mark.thorough
def test_last_continues_in_its_folder_with_counters_and_without_rows_beyond_the_checkpoint(fit, folder):
    run = fit(checkpoint=CheckpointConfig(every_n_env_steps=64), max_env_steps=96).run_folder
    first = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    for file in (run / "checkpoints").glob("last.*"):
        file.unlink()
    fit(checkpoint=CheckpointConfig(every_n_env_steps=64), max_env_steps=96, limit_train_batches=4, max_epochs=1)
    for file in (folder / "runs/PPO/CartPole-v1/version_1/checkpoints").glob("last.*"):
        file.rename(run / "checkpoints" / file.name)  # as if it broke after 80
    before = read_rows(run / "metrics.csv")
    assert int(before[-1]["env_steps"]) == 96
    trainer = fit(ckpt_path="last", max_env_steps=160)
    assert trainer.run_folder == run and trainer.global_step == 10 and trainer.model.env_steps == 160
    for name in ("metrics.csv", "evaluations.csv"):
        steps = [int(row["env_steps"]) for row in read_rows(run / name)]
        assert steps == sorted(steps) and set(steps) == set(range(16, 161, 16))
    kept = [row for row in read_rows(run / "metrics.csv") if int(row["env_steps"]) <= 64]
    assert kept == [row for row in before if int(row["env_steps"]) <= 64]
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert (last["lightning_rl"]["env_steps"], last["lightning_rl"]["updates"]) == (160, 10 * 2 * 2)
    assert first["lightning_rl"]["updates"] == 6 * 2 * 2


@pytest.mark.thorough
def test_learning_continues_with_the_weights_of_the_checkpoint(fit):
    run = fit().run_folder
    stored = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    model = tiny(PPO, "CartPole-v1", seed=9, max_env_steps=112)
    seen = []
    model.training_step, training_step = lambda *batch: seen.append(weights(model)) or training_step(*batch), model.training_step
    fit(env=model, ckpt_path="last")
    other = tiny(PPO, "CartPole-v1")
    other.load_state_dict(stored)
    assert len(seen) == 1 and torch.equal(seen[0], weights(other))


@pytest.mark.thorough
def test_last_is_the_newest_run_of_that_algorithm_and_environment(fit, folder):
    quick = {"max_env_steps": 16, "evaluation": None}
    first, second, _ = fit(**quick).run_folder, fit(**quick).run_folder, fit(A2C, **quick).run_folder
    (folder / "runs/PPO/CartPole-v1/version_2").mkdir()  # nothing was saved there
    assert fit(ckpt_path="last", **quick | {"max_env_steps": 32}).run_folder == second
    assert int(read_rows(first / "metrics.csv")[-1]["env_steps"]) == 16


@pytest.mark.thorough
def test_a_checkpoint_by_its_path_continues_in_a_new_folder(fit):
    old = fit().run_folder
    trainer = fit(ckpt_path=old / "checkpoints/last.ckpt", max_env_steps=128)
    assert trainer.run_folder.name == "version_1" and trainer.global_step == 8
    assert [int(row["env_steps"]) for row in read_rows(trainer.run_folder / "metrics.csv") if row["train/loss"]] == [112, 128]
    assert int(read_rows(old / "metrics.csv")[-1]["env_steps"]) == 96


@pytest.mark.thorough
def test_a_runs_folder_continues_from_its_last_checkpoint_in_a_new_folder(fit):
    old = fit(evaluation=None).run_folder
    trainer = fit(ckpt_path=old, evaluation=None, max_env_steps=128)
    assert (trainer.run_folder.name, trainer.global_step) == ("version_1", 8)


@pytest.mark.thorough
def test_two_runs_of_an_unseeded_program_differ_and_a_seed_of_torch_repeats_one(folder):
    torch.seed()  # as in a new program

    def learn(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
        model = PPO("CartPole-v1", n_steps=8, batch_size=64, max_env_steps=64, net_arch=[8])
        with torch.no_grad():
            for parameter in model.network.parameters():  # alike, so that only experience differs
                parameter.fill_(0.1)
        Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=None).fit(model)
        return weights(model)

    assert not torch.equal(learn(), learn())
    assert torch.equal(learn(3), learn(3))


@pytest.mark.thorough
def test_a_seed_of_torch_counts_also_before_the_package_is_used_for_the_first_time(folder):
    learning = (
        "torch.manual_seed(1); model = lrl.PPO('CartPole-v1', n_steps=8, batch_size=64, max_env_steps=64, net_arch=[8]); "
        "lrl.Trainer(accelerator='cpu', enable_progress_bar=False, evaluation=None, checkpoint=None, logger=False).fit(model); "
        "print('sum', sum(each.double().sum().item() for each in model.network.parameters()))"
    )
    program = f"import torch, lightning_rl as lrl\nfor _ in range(2):\n    {learning}"
    unseeded = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, env=unseeded).stdout
    first, second = [line for line in out.splitlines() if line.startswith("sum")]
    assert first == second


def test_a_continued_run_keeps_the_seed_that_it_began_with(fit):
    pl.seed_everything(5)
    run = fit(evaluation=None, max_env_steps=16).run_folder
    pl.seed_everything(0)
    assert fit(ckpt_path="last", evaluation=None, max_env_steps=32).run_folder == run
    assert yaml.safe_load((run / "config.yaml").read_text())["seed_everything"] == 5


@pytest.mark.thorough
def test_the_next_run_of_a_trainer_that_continued_one_records_its_own_seed(folder):
    make = lambda steps: PPO("CartPole-v1", n_steps=8, batch_size=64, max_env_steps=steps, net_arch=[8])  # noqa: E731
    pl.seed_everything(5)
    first = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=None)
    first.fit(make(64))
    pl.seed_everything(0)
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=None)
    trainer.fit(make(128), ckpt_path=first.run_folder)
    seeds = [yaml.safe_load((trainer.run_folder / "config.yaml").read_text())["seed_everything"]]
    trainer.fit(make(64))
    seeds.append(yaml.safe_load((trainer.run_folder / "config.yaml").read_text())["seed_everything"])
    assert seeds == [5, 0]


def test_the_seed_of_a_run_is_that_of_its_model_also_where_the_trainer_was_made_before(folder):
    pl.seed_everything(3)
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=None)
    pl.seed_everything(7)
    trainer.fit(PPO("CartPole-v1", n_steps=8, batch_size=64, max_env_steps=64, net_arch=[8]))
    assert yaml.safe_load((trainer.run_folder / "config.yaml").read_text())["seed_everything"] == 7


def test_a_config_above_a_foreign_checkpoint_does_not_belong_to_its_run(tmp_path):
    (tmp_path / "config.yaml").write_text("seed_everything: 77")
    assert read_seed(tmp_path / "copied" / "last.ckpt", 1) == 1
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    assert read_seed(tmp_path / "checkpoints" / "last.ckpt", 1) == 1


@pytest.mark.thorough
def test_unseeded_runs_after_a_continued_one_differ(folder):
    torch.seed()  # as in a new program
    make = lambda steps: PPO("CartPole-v1", n_steps=8, batch_size=64, max_env_steps=steps, net_arch=[8])  # noqa: E731
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=None)
    trainer.fit(make(64))
    run = trainer.run_folder
    drawn = []
    for _ in range(2):
        trainer.fit(make(128), ckpt_path=run)
        trainer.fit(make(64))
        drawn.append(torch.initial_seed())
    trainer.fit(make(64))
    assert len({*drawn, torch.initial_seed()}) == 3


def test_a_run_without_evaluations_has_no_best_checkpoint_and_the_line_names_its_last(fit):
    run = fit(evaluation=None, max_env_steps=16).run_folder
    with pytest.raises(SettingError) as error:
        evaluate(run)
    named = f"ckpt_path '{run}' has no checkpoints/best.ckpt"
    assert str(error.value) == f"{named}: no evaluation saved one; name '{run}/checkpoints/last.ckpt'"


@pytest.mark.thorough
def test_last_with_nothing_saved_starts_a_new_run_and_prints_so(fit, capsys):
    trainer = fit(ckpt_path="last", enable_progress_bar=True)
    assert capsys.readouterr().out.splitlines()[0] == "no last.ckpt below runs/PPO/CartPole-v1: starting a new run"
    assert trainer.run_folder.name == "version_0" and trainer.global_step == 6


@pytest.mark.thorough
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(fit, folder):
    path = fit(A2C).run_folder / "checkpoints/last.ckpt"
    before = files(folder)
    with pytest.raises(SettingError, match="holds A2C, not PPO"):
        fit(ckpt_path=path)
    assert files(folder) == before


@pytest.mark.parametrize(
    "arguments",
    [
        {"logger": False, "enable_checkpointing": False, "evaluation": None},
        {"fast_dev_run": True},
        {"fast_dev_run": True, "evaluation": EvaluationConfig(every_n_env_steps=16, episodes=1, max_episode_steps=5)},
    ],
)
def test_switched_off_parts_write_no_files(arguments, fit, folder, capsys):
    fit(enable_progress_bar=True, **arguments)
    assert list(folder.iterdir()) == [] and "run:" not in capsys.readouterr().out


@pytest.mark.variants
@pytest.mark.parametrize(
    "arguments",
    [
        *({"fast_dev_run": True}, {"fast_dev_run": True, "run_name": "version_0"}, {"barebones": True, "evaluation": None}),
        *({"max_steps": 0}, {"max_steps": 0, "run_name": "mine"}, {"limit_train_batches": 0}),
        {"logger": False, "enable_checkpointing": False, "evaluation": None},
    ],
)
def test_a_run_that_leaves_no_folder_names_none(arguments, fit, folder, capsys):
    run = fit(max_env_steps=16).run_folder
    before = files(folder)
    capsys.readouterr()
    trainer = fit(**arguments)
    out = capsys.readouterr().out
    assert trainer.run_folder is None and trainer.log_dir == "runs" and str(run) not in out and "continue it" not in out
    assert files(folder) == before
    trainer.save_checkpoint(folder / "saved.ckpt")
    assert files(folder) == before | {"saved.ckpt", "saved.ckpt.json"}


def test_a_run_in_no_folder_prints_none_as_its_folder(fit, folder, capsys):
    fit(fast_dev_run=True, enable_progress_bar=True)
    assert "  folder        none\n" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_folder_of_a_trainer_is_that_of_the_run_of_its_model(fit, folder):
    other, model = tiny(PPO, "CartPole-v1", max_env_steps=16), tiny(PPO, "CartPole-v1", max_env_steps=16)
    first, second = fit(env=other), fit(env=model)
    assert first.run_folder != second.run_folder
    second.fit(model)  # which has nothing to do
    assert second.run_folder == fit(env=model).run_folder != first.run_folder
    second.fit(other)
    assert second.run_folder == first.run_folder
    loaded = PPO.load_from_checkpoint(first.run_folder / "checkpoints" / "last.ckpt")
    assert fit(env=loaded).run_folder is None and Trainer().run_folder is None


@pytest.mark.parametrize(
    "arguments, missing",
    [
        ({"logger": False}, {"metrics.csv"}),
        ({"enable_checkpointing": False}, {"checkpoints/best.ckpt", "checkpoints/last.ckpt"}),
        ({"checkpoint": None}, {"checkpoints/best.ckpt", "checkpoints/last.ckpt"}),
        ({"evaluation": None}, {"evaluations.csv", "checkpoints/best.ckpt"}),
    ],
)
def test_each_part_is_switched_off_alone(arguments, missing, fit):
    left = files(fit(**arguments).run_folder)
    everything = {"config.yaml", "metrics.csv", "evaluations.csv", "checkpoints/best.ckpt", "checkpoints/last.ckpt"}
    assert everything - left == missing


def test_loggers_given_replace_tensorboard_and_the_csv_file_stays(fit, folder):
    trainer = fit(logger=pl.loggers.CSVLogger(folder / "theirs"))
    assert "metrics.csv" in files(trainer.run_folder) and not any("tfevents" in name for name in files(folder))
    (theirs,) = (folder / "theirs").rglob("metrics.csv")
    assert {int(row["step"]) for row in read_rows(theirs)} == {16, 32, 48, 64, 80, 96}


@pytest.mark.parametrize("given", [None, "theirs"])
def test_the_logger_of_an_algorithm_is_tensorboard_or_the_one_given_with_its_experiment(given, fit, folder):
    class Draws(pl.Callback):
        def on_train_batch_end(self, trainer, algorithm, *batch):
            algorithm.logger.experiment.add_scalar("mine", 1.0, algorithm.env_steps)

    run = fit(callbacks=[Draws()], **({} if given is None else {"logger": pl.loggers.TensorBoardLogger(folder / given)})).run_folder
    (events,) = (run if given is None else folder / given).rglob("*tfevents*")
    assert b"mine" in events.read_bytes() and read_rows(run / "metrics.csv")


def test_the_file_of_metrics_has_the_row_that_another_logger_refuses(fit, folder):
    class Refuses(pl.loggers.CSVLogger):
        def log_metrics(self, metrics, step=None):
            raise RuntimeError("no such project")

    with pytest.raises(RuntimeError, match="no such project"):
        fit(logger=Refuses(folder / "theirs"))
    assert len(read_rows(folder / "runs/PPO/CartPole-v1/version_0/metrics.csv")) == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")  # after the step is when we mean
def test_lightnings_model_checkpoint_follows_the_evaluations(fit, folder):
    best = pl.callbacks.ModelCheckpoint(folder / "theirs", monitor="eval/mean_reward", mode="max", every_n_train_steps=1)
    trainer = fit(env=tiny(PPO, "CartPole-v1", learning_rate=0.3), callbacks=[best])
    means = [float(row["eval/mean_reward"]) for row in read_rows(trainer.run_folder / "metrics.csv") if row["eval/mean_reward"]]
    assert float(best.best_model_score) == pytest.approx(max(means)) and len(set(means)) > 1
    env_steps = torch.load(best.best_model_path, weights_only=True)["lightning_rl"]["env_steps"]
    assert means[env_steps // 16 - 1] == max(means) and "checkpoints/best.ckpt" in files(trainer.run_folder)


def test_lightnings_model_checkpoint_sees_the_last_evaluation_at_the_end_of_the_epoch(fit, folder):
    best = pl.callbacks.ModelCheckpoint(folder / "theirs", monitor="eval/mean_reward", mode="max")
    fit(evaluation=EvaluationConfig(every_n_env_steps=1_000, episodes=1, max_episode_steps=5), callbacks=[best])
    assert float(best.best_model_score) == 5.0


def test_lightnings_early_stopping_follows_the_evaluations_from_epoch_to_epoch(fit):
    stop = pl.callbacks.EarlyStopping("eval/mean_reward", mode="max", patience=1)
    trainer = fit(
        evaluation=EvaluationConfig(every_n_env_steps=16, episodes=1, max_episode_steps=5), callbacks=[stop], limit_train_batches=1
    )
    assert trainer.global_step == 2 and float(stop.best_score) == 5.0  # always 5: never better


@pytest.fixture
def wandb_online(monkeypatch):
    """Weights & Biases as it is without WANDB_MODE, with a server that does not answer."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()  # it read the environment of other tests
    yield wandb.setup()
    wandb.teardown()


@pytest.mark.thorough
def test_an_offline_wandb_logger_calls_no_server(fit, folder, wandb_online, capfd):
    fit(logger=WandbLogger(offline=True, save_dir=folder), evaluation=None)
    out, err = capfd.readouterr()
    assert wandb.run.offline and err == ""
    wandb.finish()
    (kept,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    assert f"upload it: wandb sync {kept.parent.relative_to(folder)}\n" in out


def test_an_evaluator_among_the_callbacks_replaces_ours(fit):
    run = fit(callbacks=[RolloutEvaluator(48, episodes=3, seed=1, max_episode_steps=20)]).run_folder
    assert [(row["env_steps"], row["seed"]) for row in read_rows(run / "evaluations.csv")] == [(n, s) for n in ("48", "96") for s in "123"]


@pytest.mark.thorough
def test_a_run_ends_when_it_reaches_its_goal(fit):
    assert fit(evaluation=EvaluationConfig(every_n_env_steps=16, episodes=1, max_episode_steps=5, stop_at=5.0)).global_step == 1
    assert (
        fit(evaluation=EvaluationConfig(every_n_env_steps=16, episodes=1, max_episode_steps=5, patience=2)).global_step == 3
    )  # always 5: never better


@pytest.mark.parametrize("threads, inside", [(None, 1), (2, 2)])
def test_small_networks_use_one_thread_by_default_and_the_number_is_restored(threads, inside, fit):
    seen, before = [], torch.get_num_threads()

    class Look(pl.Callback):
        def on_train_start(self, trainer, model):
            seen.append(torch.get_num_threads())

    class Break(pl.Callback):
        def on_train_end(self, trainer, model):
            raise RuntimeError("at the end")

    torch.set_num_threads(3)
    try:
        quick = {"torch_threads": threads, "max_env_steps": 16, "evaluation": None, "logger": False, "checkpoint": None}
        fit(callbacks=[Look()], **quick)
        assert seen == [inside] and torch.get_num_threads() == 3
        with pytest.raises(RuntimeError, match="at the end"):
            fit(callbacks=[Break()], **quick)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.thorough
def test_a_run_that_continues_keeps_its_threads(fit):
    seen, before = [], torch.get_num_threads()

    class Look(pl.Callback):
        def on_train_start(self, trainer, model):
            seen.append(torch.get_num_threads())

    quick = {"evaluation": None, "logger": False}
    run = fit(torch_threads=os.cpu_count(), max_env_steps=16, **quick).run_folder
    fit(max_env_steps=32, ckpt_path=run / "checkpoints/last.ckpt", callbacks=[Look()], **quick)
    fit(max_env_steps=48, ckpt_path=run / "checkpoints/last.ckpt", callbacks=[Look()], torch_threads=1, **quick)
    assert seen == [os.cpu_count(), 1] and torch.get_num_threads() == before
    manifest = run / "checkpoints/last.ckpt.json"
    assert threads_of(run / "checkpoints/last.ckpt") == os.cpu_count()
    manifest.write_text(manifest.read_text().replace('"model": "', '"model": "another '))
    assert threads_of(run / "checkpoints/last.ckpt") is None


@pytest.mark.thorough
def test_a_function_that_builds_environments_names_the_folder(fit):
    assert (
        str(fit(env=PPO(Endless, n_steps=8, batch_size=32, max_env_steps=64)).run_folder)
        == f"runs/PPO/{Endless.__module__}.Endless/version_0"
    )


@pytest.mark.thorough
def test_a_run_prints_its_folder_and_no_progress_without_a_progress_bar(fit, capsys):
    fit(enable_progress_bar=True)
    out = capsys.readouterr().out.splitlines()
    assert out[-2] == "run: runs/PPO/CartPole-v1/version_0"
    assert out[-1] == "evaluate it: lightning-rl evaluate --ckpt_path runs/PPO/CartPole-v1/version_0/checkpoints/best.ckpt --episodes 100"
    assert any("steps/s" in line for line in out)
    fit(enable_progress_bar=False)
    assert not any("steps/s" in line or "evaluation at" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.thorough
@pytest.mark.parametrize(("own", "env"), [(False, "Mine-v0"), (True, "CartPole-v1"), (True, "mine:Mine-v0")])
def test_the_command_that_a_python_program_prints_imports_the_modules_that_it_needs(fit, folder, capsys, monkeypatch, own, env):
    (folder / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(gym.registry, "Mine-v0", raising=False)  # of other tests
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    mine = importlib.import_module("mine")
    fit(env=tiny(mine.MyPPO if own else PPO, env), enable_progress_bar=True)
    name = f"runs/{'MyPPO' if own else 'PPO'}/{env.rpartition(':')[2]}/version_0/checkpoints/best.ckpt"
    command = f"lightning-rl evaluate --import mine --ckpt_path {name} --episodes 100"
    assert capsys.readouterr().out.splitlines()[-1] == f"evaluate it: {command}"


@pytest.mark.thorough
def test_a_program_whose_algorithm_no_other_can_import_gets_a_python_command_to_evaluate(fit, capsys, monkeypatch):
    monkeypatch.setattr(type(own := tiny(type("Mine", (PPO,), {}), "CartPole-v1")), "__module__", "__main__")
    fit(env=own, enable_progress_bar=True)
    place = "runs/Mine/CartPole-v1/version_0/checkpoints/best.ckpt"
    assert capsys.readouterr().out.splitlines()[-1] == f'evaluate it: lightning_rl.evaluate("{place}") in this program, which defines it'


def test_a_trainer_that_fits_twice_makes_two_runs(folder):
    trainer = Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=SHORT)
    for number in range(2):
        trainer.fit(tiny(PPO, "CartPole-v1", max_env_steps=16))
        run = folder / f"runs/PPO/CartPole-v1/version_{number}"
        assert all((run / name).is_file() for name in ("checkpoints/best.ckpt", "checkpoints/last.ckpt", "evaluations.csv"))
        assert len(trainer.loggers) == 2 and (run / "metrics.csv").is_file()


class Interrupted(Endless):
    """The user presses Ctrl-C while it steps for the 20th time."""

    steps = 0

    def step(self, action):
        Interrupted.steps += 1
        if Interrupted.steps == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def test_an_interrupted_run_keeps_its_weights_and_prints_its_folder(folder, capfd):
    model = PPO(Interrupted, n_steps=1, batch_size=8, max_env_steps=10_000)
    with pytest.raises(KeyboardInterrupt):
        Trainer(accelerator="cpu", evaluation=None).fit(model)
    run = f"runs/PPO/{__name__}.Interrupted/version_0"
    assert torch.load(folder / f"{run}/checkpoints/last.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == 24
    assert f"run: {run}" in capfd.readouterr().out


def test_evaluation_of_a_ready_environment_is_refused_before_the_first_step(folder):
    envs = gym.vector.SyncVectorEnv([Endless] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    model = PPO(envs, n_steps=8, batch_size=8)
    with pytest.raises(SettingError, match="pass evaluation=None"):
        Trainer(accelerator="cpu", enable_progress_bar=False).fit(model)
    assert model.env_steps == 0


def test_what_others_log_gets_the_environment_steps(folder):
    class Talking(PPO):
        def training_step(self, rollout, batch_idx):
            super().training_step(rollout, batch_idx)
            self.log("mine", float(self.env_steps))

    trainer = Trainer(accelerator="cpu", evaluation=None, enable_progress_bar=False)
    trainer.fit(tiny(Talking, "CartPole-v1"))
    rows = [row for row in read_rows(trainer.run_folder / "metrics.csv") if row["mine"]]
    assert [row["env_steps"] for row in rows] == ["16", "32", "48", "64", "80", "96"]
    assert all(float(row["mine"]) == float(row["env_steps"]) for row in rows)


@pytest.mark.thorough
def test_settings_may_be_mappings_in_python_too(fit):
    trainer = fit(evaluation={"episodes": 2, "every_n_env_steps": 48}, checkpoint={"keep": 1})
    assert len(read_rows(trainer.run_folder / "evaluations.csv")) == 4


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_a_run_whose_folder_is_deleted_writes_it_again_and_can_be_continued(fit, folder, capfd, algorithm):
    class Delete(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 3:
                shutil.rmtree("runs")

    env = "CartPole-v1" if algorithm is PPO else "Pendulum-v1"
    every = {"checkpoint": CheckpointConfig(every_n_env_steps=16), "enable_progress_bar": True}
    run = fit(algorithm, env, callbacks=[Delete()], **every).run_folder
    out, err = capfd.readouterr()
    lost = f"{run / 'config.yaml'} was deleted during the run and is written again; the other deleted files are lost\n"
    assert err == "" and out.count(lost) == 1
    assert {"config.yaml", "checkpoints/last.ckpt", "checkpoints/best.ckpt"} < files(run)
    fit(algorithm, env, max_env_steps=128, ckpt_path="last", **every)
    assert capfd.readouterr().err == ""
    for name, last in (("metrics.csv", "train/n_updates"), ("evaluations.csv", "return")):
        rows = [row for row in read_rows(run / name) if row[last]]
        assert sorted({int(row["env_steps"]) for row in rows}) == [64, 80, 96, 112, 128], name


def test_a_logger_whose_disk_is_full_is_reported_in_one_line(fit, folder, capfd):
    class Full(pl.Callback):
        """TensorBoard's file can grow no more: it is a folder."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 3:
                (events,) = trainer.run_folder.glob("events*")
                events.unlink()
                events.mkdir()

    run = fit(callbacks=[Full()], enable_progress_bar=True).run_folder
    out, err = capfd.readouterr()
    assert err == "" and "TensorBoardLogger could not write and is turned off, the run goes on: Is a directory\n" in out
    assert int(read_rows(run / "metrics.csv")[-1]["env_steps"]) == 96


@pytest.mark.thorough
def test_a_disk_that_is_full_at_the_last_row_does_not_end_the_run_when_its_loggers_are_closed(fit, folder, capfd):
    class Full(pl.Callback):
        """The disk has no room for the end of the last row, which TensorBoard's thread writes a little later."""

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 5:
                rows = trainer.logger.experiment._get_file_writer().event_writer._async_writer
                write = rows._writer.write

                def write_all_but_the_last(event):
                    time.sleep(0.03)
                    if rows._byte_queue.empty():
                        raise OSError(errno.ENOSPC, "No space left on device")
                    write(event)

                rows._writer.write = write_all_but_the_last

    run = fit(callbacks=[Full()], evaluation=None, enable_progress_bar=True).run_folder
    out, err = capfd.readouterr()
    assert err == "" and "TensorBoardLogger could not write and is turned off, the run goes on: No space left on device\n" in out
    assert (run / "checkpoints/last.ckpt").is_file()
    assert int(read_rows(run / "metrics.csv")[-1]["env_steps"]) == 96


@pytest.mark.parametrize("name", ["default_root_dir", "run_name"])
def test_a_folder_that_is_a_number_is_reported(name):
    with pytest.raises(SettingError, match=f"trainer.{name}.* 5|trainer.{name} '5' is not a valid path"):
        Trainer(**{name: 5})


@pytest.mark.parametrize("logger", ["wandb", 5, ["wandb"]])
def test_an_invalid_logger_is_reported(logger):
    with pytest.raises(SettingError, match=r"^trainer\.logger: ('wandb'|5) is not a logger"):
        Trainer(logger=logger)
