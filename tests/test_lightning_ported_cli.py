"""Lightning's own tests of its command line, `LightningCLI`, with algorithms for models.

They stand for `test_main.py` of Lightning 2.6: both Trainers, other models and numbers. What concerns data modules is one refusal here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import LearningRateMonitor, ModelCheckpoint, Timer
from pytorch_lightning.cli import LightningCLI, SaveConfigCallback
from pytorch_lightning.loggers import CSVLogger

from lightning_rl import PPO, SAC, RolloutEvaluator, SettingError, Trainer
from lightning_rl.algorithms.algorithm import Algorithm
from tests.fitting import weights
from tests.ported import KINDS

NOTICES = (
    ".*configure_optimizers` will be",
    "No seed found",
    "Checkpoint directory",
    "You passed in a `val_d",
    "The number of training batches",
)
pytestmark = [pytest.mark.usefixtures("folder"), *(pytest.mark.filterwarnings(f"ignore:{notice}") for notice in NOTICES)]
MODEL = {"env": {"id": "tests.environments:Scripted-v0", "num_envs": 2}, "n_steps": 8, "batch_size": 16, "n_epochs": 1, "net_arch": [8]}
SETTINGS = {"model": {**MODEL, "max_env_steps": 32}, "seed_everything": 3}
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": -1}


def run(kind, command="fit", *options, model=PPO, settings=SETTINGS, **arguments):
    """A command line whose settings are in a file; `run=False` where there is no command."""
    Path("settings.yaml").write_text(yaml.safe_dump({**settings, "trainer": QUIET | settings.get("trainer", {})}))
    line = [*([command] if command else []), "--config", "settings.yaml", *options]
    arguments.setdefault("auto_configure_optimizers", any("--optimizer" in option for option in options))  # which takes time
    return LightningCLI(model, trainer_class=kind, args=line, run=bool(command), **arguments)


def written():
    """The configs that were written."""
    return sorted(str(path) for path in Path(".").rglob("*.yaml") if path.name not in ("settings.yaml", "more.yaml"))


# ---------------------------------------------------------------- commands


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_fit_trains_what_a_file_and_options_describe(kind):
    cli = run(kind, "fit", "--model.gamma", "0.5")
    assert (cli.model.env_steps, cli.model.n_steps, cli.model.gamma) == (32, 8, 0.5)
    assert cli.config.fit.model.gamma == 0.5 and isinstance(cli.trainer, kind) and cli.trainer.global_step == 2


@pytest.mark.thorough
def test_later_files_and_then_options_win():
    Path("more.yaml").write_text("model: {gamma: 0.7, gae_lambda: 0.6, n_epochs: 2}")
    cli = run(Trainer, "fit", "--config", "more.yaml", "--model.n_epochs", "3")
    assert (cli.model.gamma, cli.model.gae_lambda, cli.model.n_epochs, cli.model.env_steps) == (0.7, 0.6, 3, 32)


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_run_model_and_trainer_are_ready(kind):
    cli = run(kind, None, save_config_callback=None)
    assert cli.model.env_steps == 0 and cli.config.model.n_steps == 8
    cli.trainer.fit(cli.model)
    again = cli.instantiate_trainer(max_steps=3)
    cli.model.max_env_steps = 64
    again.fit(cli.model)
    assert cli.model.env_steps == 64 and cli.trainer.max_steps == -1


@pytest.mark.thorough
def test_validate_and_test_play_with_the_weights_and_settings_of_a_checkpoint():
    cli = run(Trainer, "fit", "--trainer.run_name", "one")
    best = cli.trainer.run_folder / "checkpoints" / "best.ckpt"
    for command in ("validate", "test"):
        other = run(Trainer, command, "--ckpt_path", str(best), "--model.gamma", "0.5")
        assert torch.equal(weights(other.model), weights(PPO.load_from_checkpoint(best)))
        assert other.model.gamma == 0.99  # Lightning takes the settings of the checkpoint


@pytest.mark.thorough
def test_a_trainer_of_lightning_names_what_it_lacks_to_validate():
    with pytest.raises(Exception, match=r"No `validation_step\(\)` method defined"):
        run(pl.Trainer, "validate")


@pytest.mark.thorough
def test_the_config_goes_before_the_command_too_and_common_files_are_read():
    Path("all.yaml").write_text(yaml.safe_dump({"fit": {**SETTINGS, "trainer": QUIET}, "test": {"trainer": {"max_steps": 9}}}))
    assert LightningCLI(PPO, trainer_class=Trainer, args=["--config", "all.yaml", "fit"], save_config_callback=None).model.env_steps == 32
    files = {"default_config_files": ["all.yaml"]}
    assert LightningCLI(PPO, trainer_class=Trainer, args=["fit"], parser_kwargs=files, save_config_callback=None).model.env_steps == 32


@pytest.mark.thorough
def test_settings_come_from_the_environment_of_the_process_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("PL_FIT__MODEL__GAMMA", "0.25")
    monkeypatch.setenv("PL_FIT__TRAINER__MAX_STEPS", "1")
    cli = run(Trainer, parser_kwargs={"default_env": True})
    assert (cli.model.gamma, cli.model.env_steps) == (0.25, 16)


@pytest.mark.thorough
def test_hooks_around_a_command_are_called():
    class Mine(LightningCLI):
        def before_fit(self):
            called.append(self.model.env_steps)

        after_fit = before_fit

    called = []
    Path("settings.yaml").write_text(yaml.safe_dump({**SETTINGS, "trainer": QUIET}))
    Mine(PPO, trainer_class=Trainer, args=["fit", "--config", "settings.yaml"])
    assert called == [0, 32]


def test_settings_may_be_given_as_a_mapping():
    cli = LightningCLI(PPO, trainer_class=Trainer, run=False, args={"model": SETTINGS["model"], "trainer": QUIET})
    assert cli.model.max_env_steps == 32 and cli.trainer.max_epochs == -1


# ---------------------------------------------------------------- models


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["PPO", "lightning_rl.PPO", "lightning_rl.algorithms.ppo.PPO"])
def test_any_algorithm_is_chosen_by_its_class(name):
    settings = {"model": {"class_path": name, "init_args": SETTINGS["model"]}}
    cli = run(Trainer, settings=settings, model=Algorithm, subclass_mode_model=True)
    assert type(cli.model) is PPO and cli.model.env_steps == 32


@pytest.mark.thorough
def test_another_model_may_be_chosen_than_that_of_the_file():
    settings = {"model": {"class_path": "PPO", "init_args": {"env": {"id": "Pendulum-v1"}, "gamma": 0.5}}}
    cli = run(Trainer, None, "--model", "SAC", settings=settings, model=None)
    assert type(cli.model) is SAC and cli.model.gamma == 0.5 and cli.model.env.id == "Pendulum-v1"


@pytest.mark.thorough
def test_linked_arguments_are_computed_and_saved():
    class Linking(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("model.n_steps", "model.batch_size", compute_fn=lambda n_steps: 2 * n_steps)

    model = {name: value for name, value in SETTINGS["model"].items() if name != "batch_size"}
    Path("settings.yaml").write_text(yaml.safe_dump({"model": model, "trainer": QUIET}))
    cli = Linking(PPO, trainer_class=Trainer, args=["fit", "--config", "settings.yaml"])
    assert cli.model.batch_size == cli.model.hparams["batch_size"] == 16


@pytest.mark.thorough
def test_the_seed_makes_runs_alike():
    first, second, other = (run(Trainer, "fit", "--seed_everything", str(seed), save_config_callback=None) for seed in (5, 5, 6))
    assert torch.equal(weights(first.model), weights(second.model)) and not torch.equal(weights(first.model), weights(other.model))
    assert [run(Trainer, None, "--seed_everything", value).config.seed_everything for value in ("7", "false")] == [7, False]
    assert isinstance(run(Trainer, None, "--seed_everything", "true").config.seed_everything, int)


# ---------------------------------------------------------------- callbacks, loggers, optimizers


@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_are_added_by_their_class_with_settings(kind):
    options = [
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.callbacks.logging_interval=step",
        "--trainer.callbacks+=ModelCheckpoint",
    ]
    options += ["--trainer.callbacks.monitor=eval/mean_reward", "--trainer.callbacks+=lightning_rl.RolloutEvaluator"]
    trainer = run(kind, None, *options, "--trainer.callbacks.episodes=3").trainer
    found = {cls: [each for each in trainer.callbacks if isinstance(each, cls)] for cls in (LearningRateMonitor, RolloutEvaluator)}
    assert [each.logging_interval for each in found[LearningRateMonitor]] == ["step"]
    assert [each.episodes for each in found[RolloutEvaluator]] == [3]
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint) and trainer.checkpoint_callback.monitor == "eval/mean_reward"


def test_a_callback_may_have_options_of_its_own():
    class WithMonitor(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_lightning_class_args(LearningRateMonitor, "rates")
            parser.set_defaults({"rates.logging_interval": "epoch"})

    Path("settings.yaml").write_text(yaml.safe_dump({**SETTINGS, "trainer": QUIET}))
    line = ["--config", "settings.yaml", "--rates.log_momentum", "true"]
    callbacks = WithMonitor(PPO, trainer_class=Trainer, run=False, args=line).trainer.callbacks
    (rates,) = (each for each in callbacks if isinstance(each, LearningRateMonitor))
    assert (rates.logging_interval, rates.log_momentum) == ("epoch", True)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_logger_is_chosen_by_its_class(kind):
    settings = {**SETTINGS, "trainer": {"logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "logs", "name": "mine"}}}}
    trainer = run(kind, settings=settings).trainer
    assert any(isinstance(each, CSVLogger) for each in trainer.loggers)
    header = Path("logs/mine/version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"step", "rollout/ep_rew_mean", "train/loss"} <= set(header)


@pytest.mark.thorough
def test_defaults_of_the_trainer_yield_to_settings():
    defaults = {"max_steps": 1, "callbacks": Timer(), "max_epochs": 5}
    cli = run(Trainer, trainer_defaults=defaults)
    assert cli.model.env_steps == 16 and cli.trainer.max_epochs == -1
    assert any(isinstance(each, Timer) for each in cli.trainer.callbacks)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_and_a_scheduler_replace_those_of_the_algorithm(kind):
    scheduler = ["--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "1", "--lr_scheduler.gamma", "0.5"]
    cli = run(kind, "fit", "--optimizer", "SGD", "--optimizer.lr", "0.01", *scheduler)
    (optimizer,) = cli.trainer.optimizers
    assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["lr"] == 0.0025  # halved by each of two iterations
    assert cli.trainer.lr_scheduler_configs[0].scheduler.gamma == 0.5


@pytest.mark.thorough
def test_one_optimizer_for_an_algorithm_of_several_is_refused_in_one_line():
    settings = {"model": {"env": {"id": "Pendulum-v1"}, "max_env_steps": 32, "net_arch": [8]}}
    with pytest.raises(
        SettingError, match=r"^SAC needs 3 optimizers, got 1: override configure_optimizers in a subclass, or leave it out$"
    ):
        run(Trainer, "fit", "--optimizer", "Adam", model=SAC, settings=settings)


def test_options_for_optimizers_are_left_out_where_that_is_asked_for(capsys):
    for automatic in (True, False):
        with pytest.raises(SystemExit):
            LightningCLI(PPO, run=False, args=["--help"], auto_configure_optimizers=automatic)
        out = capsys.readouterr().out
        assert ("--optimizer" in out) == automatic and "--model.learning_rate" in out and "--print_config" in out


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_module_is_refused(kind):
    with pytest.raises(SettingError, match="learns from its own experience: give fit no dataloaders and no datamodule"):
        run(kind, "fit", "--data", "pytorch_lightning.demos.boring_classes.BoringDataModule")


# ---------------------------------------------------------------- configs


@pytest.mark.thorough
def test_a_printed_config_describes_the_same_run(capsys):
    with pytest.raises(SystemExit) as end:
        run(Trainer, "fit", "--model.gamma", "0.5", "--optimizer", "Adam", "--optimizer.lr", "0.1", "--print_config")
    text = capsys.readouterr().out
    printed = yaml.safe_load(text)
    assert not end.value.code and text.startswith(f"# pytorch_lightning=={pl.__version__}")
    assert (printed["seed_everything"], printed["model"]["gamma"], printed["ckpt_path"]) == (3, 0.5, None)
    assert printed["optimizer"]["class_path"] == "torch.optim.Adam" and printed["optimizer"]["init_args"]["lr"] == 0.1
    Path("more.yaml").write_text(text)
    cli = LightningCLI(PPO, trainer_class=Trainer, args=["fit", "--config", "more.yaml"])
    assert (cli.model.env_steps, cli.model.gamma) == (32, 0.5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "lightning_cli.yaml"),
        ({"save_config_kwargs": {"config_filename": "mine.yaml"}}, "mine.yaml"),
        ({"save_config_callback": None}, None),
    ],
)
def test_the_config_of_the_command_line_is_saved_with_the_run_or_not(arguments, name):
    folder = str(run(Trainer, **arguments).trainer.run_folder)
    assert written() == sorted(f"{folder}/{each}" for each in ("config.yaml", name) if each)
    if name:
        stored = yaml.safe_load(Path(folder, name).read_text())
        assert (stored["seed_everything"], stored["model"]["n_steps"], stored["trainer"]["max_epochs"]) == (3, 8, -1)


@pytest.mark.thorough
def test_a_trainer_of_lightning_overwrites_no_config_unless_that_is_asked_for():
    run(pl.Trainer)
    assert written() == ["config.yaml"]
    with pytest.raises(RuntimeError, match="to NOT exist"):
        run(pl.Trainer)
    run(pl.Trainer, save_config_kwargs={"overwrite": True})


@pytest.mark.thorough
def test_a_callback_may_save_the_config_elsewhere():
    class Saving(SaveConfigCallback):
        def save_config(self, trainer, pl_module, stage):
            saved.append((yaml.safe_load(self.parser.dump(self.config))["model"]["n_steps"], stage, pl_module.env_steps))

    saved = []
    run(Trainer, save_config_callback=Saving, save_config_kwargs={"save_to_log_dir": False})
    assert saved == [(8, "fit", 0)]


@pytest.mark.thorough
def test_a_fast_run_for_developers_saves_no_config():
    run(Trainer, "fit", "--trainer.fast_dev_run", "1")
    assert written() == []


@pytest.mark.parametrize(
    ("option", "words"), [("--model.gama=0.5", "gama"), ("--model.n_steps=many", "n_steps"), ("--trainer.epochs=3", "epochs")]
)
def test_unknown_options_and_wrong_values_end_with_status_2(option, words, capsys):
    with pytest.raises(SystemExit) as end:
        run(Trainer, "fit", option)
    assert end.value.code == 2 and words in capsys.readouterr().err
