"""Flags, callbacks and idioms of Lightning: each works, or one line says what to use."""

from __future__ import annotations

import csv

import lightning as L
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    RichProgressBar,
    TQDMProgressBar,
)
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import CSVLogger

from lightning_rl import PPO, SAC, CheckpointConfig, EnvConfig, EvaluationConfig, SettingError, Trainer
from tests.fitting import fit, tiny, weights


@pytest.mark.variants
@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_a_barebones_trainer_learns_the_same_and_leaves_nothing(kind, tmp_path, capsys):
    plain, bare = tiny(PPO), tiny(PPO)
    fit(plain)
    kind(barebones=True, default_root_dir=tmp_path, accelerator="cpu", max_epochs=-1).fit(bare)
    assert torch.equal(weights(plain), weights(bare)) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [{"evaluation": EvaluationConfig(episodes=3)}, {"checkpoint": CheckpointConfig(keep=2)}])
def test_a_barebones_trainer_refuses_what_it_would_leave_out(given):
    with pytest.raises(SettingError, match=rf"^trainer.barebones leaves out {next(iter(given))}"):
        Trainer(barebones=True, **given)


class Observed(pl.Callback):
    """Notes under which modes of torch a run trains and evaluates."""

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.anomaly = torch.is_anomaly_enabled()
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.warns = torch.is_deterministic_algorithms_warn_only_enabled()
        self.benchmark = torch.backends.cudnn.benchmark

    def on_validation_start(self, trainer, pl_module):
        def act(*args, **kwargs):
            self.inference = torch.is_inference_mode_enabled()
            return type(network).sample(network, *args, **kwargs)

        network = pl_module.network
        network.sample = act

    def on_validation_end(self, trainer, pl_module):
        del pl_module.network.sample


@pytest.fixture
def modes_of_torch():
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.variants
@pytest.mark.parametrize(
    ("flags", "holds"),
    [
        ({"detect_anomaly": True}, {"anomaly": True}),
        ({"detect_anomaly": False}, {"anomaly": False}),
        ({"deterministic": True}, {"deterministic": True, "warns": False}),
        ({"deterministic": "warn"}, {"deterministic": True, "warns": True}),
        ({"benchmark": True}, {"benchmark": True}),
        ({"benchmark": False}, {"benchmark": False}),
        ({"inference_mode": True}, {"inference": True}),
        ({"inference_mode": False}, {"inference": False}),
        ({}, {"anomaly": False, "deterministic": False, "inference": False}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("modes_of_torch")
def test_flags_that_set_a_mode_of_torch_set_it(flags, holds, tmp_path):
    evaluation, seen = EvaluationConfig(every_n_env_steps=32, episodes=1, num_envs=1), Observed()
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=evaluation, callbacks=[seen], logger=False, **flags)
    trainer.fit(tiny(PPO, max_env_steps=32))
    assert {name: getattr(seen, name) for name in holds} == holds


@pytest.mark.parametrize(
    ("flags", "files"),
    [
        ({}, "best.ckpt last.ckpt metrics.csv evaluations.csv config.yaml hparams.yaml"),
        ({"enable_checkpointing": False}, "metrics.csv evaluations.csv config.yaml hparams.yaml"),
        ({"logger": False}, "best.ckpt last.ckpt evaluations.csv config.yaml"),
        ({"limit_val_batches": 0}, "last.ckpt metrics.csv config.yaml hparams.yaml"),
        ({"fast_dev_run": True}, ""),
        ({"max_time": "00:00:00:00"}, ""),
        ({"max_steps": 0}, ""),
        ({"max_epochs": 0}, ""),
        ({"limit_train_batches": 0}, ""),
    ],
    ids=str,
)
def test_flags_that_leave_out_files_leave_out_these_files(flags, files, tmp_path, capsys):
    evaluation = EvaluationConfig(every_n_env_steps=32, episodes=1, num_envs=1)
    Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=evaluation, **flags).fit(tiny(PPO, max_env_steps=32))
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("events")}
    assert {name for name in written if not name.endswith(".json")} == set(files.split())
    (name, value), *_ = [*flags.items(), ("", None)]
    assert (f"trainer.{name} 0: nothing is trained" in capsys.readouterr().out) == (value == 0 and type(value) is int and "val" not in name)


@pytest.mark.parametrize("flags", [{"enable_progress_bar": False}, {"enable_model_summary": True}, {}], ids=str)
def test_flags_that_show_show_or_hide(flags, tmp_path, capsys):
    Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, checkpoint=None, logger=False, **flags).fit(tiny(PPO))
    shown = capsys.readouterr().out
    assert ("steps/s" in shown) == flags.get("enable_progress_bar", True)
    assert ("Trainable params" in shown) == flags.get("enable_model_summary", False)


def test_half_of_the_batches_are_half_a_run(tmp_path):
    model = tiny(PPO)
    Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, limit_train_batches=0.5, max_epochs=1).fit(model)
    assert model.env_steps == 48


@pytest.mark.parametrize("logged", [True, False])
def test_hyperparameters_go_to_loggers_unless_autologging_is_off(logged, tmp_path):
    logger = CSVLogger(tmp_path / "csv")
    Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, logger=logger, enable_autolog_hparams=logged).fit(tiny(PPO))
    assert any("gamma" in file.read_text() for file in (tmp_path / "csv").rglob("hparams.yaml")) == logged


@pytest.mark.parametrize(("interval", "rows"), [(1, 6), (3, 2)])
def test_what_others_log_is_logged_at_lightnings_interval(interval, rows, tmp_path):
    class Logging(PPO):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.log("mine", float(batch_idx))

    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, log_every_n_steps=interval)
    trainer.fit(tiny(Logging))
    with (trainer.run_folder / "metrics.csv").open() as file:
        assert sum(bool(row["mine"]) for row in csv.DictReader(file)) == rows


def test_one_device_learns_unless_more_are_asked_for(monkeypatch):
    assert Trainer(accelerator="cpu").num_devices == 1
    assert Trainer(accelerator="cpu", devices=2, strategy="ddp").num_devices == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")  # as torchrun sets it
    assert Trainer(accelerator="cpu", strategy="ddp").num_devices == 3


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (BatchSizeFinder(), "batch_size or num_envs"),
        (LearningRateFinder(), "learning_rate"),
        (GradientAccumulationScheduler({0: 2}), "a larger batch_size"),
    ],
)
def test_callbacks_that_cannot_work_name_the_setting_to_use(callback, instead, tmp_path):
    model = tiny(PPO)
    with pytest.raises(SettingError, match=rf"^{type(callback).__name__}: .*; use {instead}$"):
        Trainer(default_root_dir=tmp_path, callbacks=[callback], accelerator="cpu").fit(model)
    assert model.env_steps == 0


@pytest.mark.thorough
def test_a_compiled_module_is_refused_in_one_line(tmp_path):
    with pytest.raises(SettingError, match=r"set compile to true instead$"):
        Trainer(default_root_dir=tmp_path, accelerator="cpu").fit(torch.compile(tiny(PPO)))


@pytest.mark.thorough
@pytest.mark.parametrize("given", [[], ["factor"], [{"note": EnvConfig("Pendulum-v1")}]])
def test_a_subclass_may_save_its_hyperparameters_as_lightning_shows(given, tmp_path):
    class Saving(SAC):
        def __init__(self, env, *, factor: float = 2.0, **common):
            super().__init__(env, **common)
            self.save_hyperparameters(*given)
            self.factor = factor

    model = Saving(EnvConfig("Pendulum-v1", num_envs=2), learning_starts=16, max_env_steps=64, steps_per_iteration=16, net_arch=[8])
    trainer = Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False, accelerator="cpu")
    trainer.fit(model)
    assert model.hparams["factor"] == 2.0 and model.hparams["env"]["id"] == "Pendulum-v1"
    if given and isinstance(given[0], dict):
        assert model.hparams["note"]["id"] == "Pendulum-v1"
        return
    loaded = Saving.load_from_checkpoint(trainer.run_folder / "checkpoints" / "last.ckpt", strict=True, weights_only=True)
    assert torch.equal(weights(loaded), weights(model))


@pytest.mark.parametrize("argument", [{"strict": False}, {"hparams_file": "hparams.yaml"}])
def test_arguments_of_lightnings_loading_that_have_no_meaning_here_are_refused_in_one_line(argument, tmp_path):
    with pytest.raises(SettingError, match="init_from"):
        PPO.load_from_checkpoint(tmp_path / "a.ckpt", **argument)


def test_what_lightning_and_a_subclass_log_stands_over_environment_steps(tmp_path):
    class Logging(PPO):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.log("mine", float(batch_idx))

    model = tiny(Logging)
    logger = CSVLogger(tmp_path / "csv")
    callbacks = [LearningRateMonitor("step")]
    Trainer(
        default_root_dir=tmp_path, evaluation=None, logger=logger, callbacks=callbacks, enable_progress_bar=False, accelerator="cpu"
    ).fit(model)
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    steps = {name: [int(row["step"]) for row in rows if row.get(name)] for name in ("mine", "train/loss", "lr-ScheduledAdam")}
    assert steps["mine"] == [16, 32, 48, 64, 80, 96]
    assert steps["train/loss"] == steps["mine"]
    assert steps["lr-ScheduledAdam"] == [0, 17, 33, 49, 65, 81]  # where an iteration begins


@pytest.mark.thorough
def test_lightnings_command_line_keeps_its_config_next_to_that_of_the_run(tmp_path):
    options = "--model.env.id CartPole-v1 --model.max_env_steps 64 --model.n_steps 8 --model.batch_size 64 --trainer.accelerator cpu"
    options += f" --trainer.default_root_dir {tmp_path} --trainer.enable_progress_bar false --trainer.run_name one"
    for more in ("", " --trainer.max_epochs -1 --model.max_env_steps 128 --ckpt_path last"):
        LightningCLI(PPO, trainer_class=Trainer, args=f"fit {options}{more}".split(), seed_everything_default=0)
    run = tmp_path / "PPO" / "CartPole-v1" / "one"
    assert "class_path: PPO" in (run / "config.yaml").read_text()
    assert "trainer:" in (run / "lightning_cli.yaml").read_text()


@pytest.mark.parametrize("flags", [{"min_steps": 7}, {"min_epochs": 2}, {"min_epochs": 4, "limit_train_batches": 2}])
@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_a_run_has_its_length_and_no_least_number_of_iterations_makes_it_longer(kind, flags, tmp_path):
    trainer = kind(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=-1, **flags)
    with pytest.raises(SettingError, match=r"ask for (7|12|8) iterations, and the run ends after 6: raise max_env_steps$"):
        trainer.fit(tiny(PPO))


def test_a_least_number_of_iterations_keeps_others_from_stopping_a_run(tmp_path):
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = True

    model = tiny(PPO)
    fit(model, callbacks=[Stop()], min_steps=4, min_epochs=0)
    assert model.env_steps == 4 * 16


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_a_run_that_a_callback_stops_before_its_first_iteration_has_none(kind, hook, tmp_path):
    class Stop(pl.Callback):
        pass

    setattr(Stop, hook, lambda self, trainer, module: setattr(trainer, "should_stop", True))
    model = tiny(PPO)
    kind(default_root_dir=tmp_path, accelerator="cpu", logger=False, max_epochs=-1, enable_checkpointing=False, callbacks=[Stop()]).fit(
        model
    )
    assert model.env_steps == 0


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_lightnings_bars_show_the_return(kind, bar, tmp_path):
    shown = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            mean = pl_module.collector.statistics.metrics()["rollout/ep_rew_mean"]
            shown.append((dict(trainer.progress_bar_metrics), {"return": pytest.approx(mean)}))

    callbacks = [bar(), Watch()]
    trainer = kind(
        default_root_dir=tmp_path, accelerator="cpu", max_epochs=-1, logger=False, enable_checkpointing=False, callbacks=callbacks
    )
    trainer.fit(tiny(PPO))
    assert len(shown) == 6 and all(found == expected for found, expected in shown)


def test_algorithms_are_modules_of_pytorch_lightning_and_callbacks_of_the_package_lightning_work_too(tmp_path):
    model = tiny(PPO)
    with pytest.raises(TypeError, match=r"`model` must be a `LightningModule`.*, got `PPO`"):
        L.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path).fit(model)
    stop = L.pytorch.callbacks.EarlyStopping("eval/mean_reward", mode="max", stopping_threshold=-1e9, check_on_train_epoch_end=False)
    evaluation = EvaluationConfig(every_n_env_steps=32, episodes=1, num_envs=1)
    Trainer(default_root_dir=tmp_path, accelerator="cpu", callbacks=[stop], evaluation=evaluation).fit(model)
    assert model.env_steps == 32
