"""An evaluation is a validation to Lightning's callbacks: they hear it, find its metrics, stop and save by it."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys

import gymnasium as gym
import numpy as np
import optuna
import pytest
import pytorch_lightning as pl
import torch
from optuna_integration import PyTorchLightningPruningCallback
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torchmetrics import SumMetric

from lightning_rl import (
    PPO,
    SAC,
    BestModel,
    EvaluationConfig,
    MultiEvaluator,
    Policy,
    RolloutEvaluator,
    SaveCheckpoints,
    SettingError,
    Trainer,
    evaluate,
    load_policy,
)
from lightning_rl.errors import UnsavedError
from tests.apart import ROOT
from tests.fitting import ALL, fit, tiny, weights

EVERY = EvaluationConfig(every_n_env_steps=16, episodes=2, num_envs=2)
EVENTS = ("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end")


def trainer_of(folder, *callbacks, **settings):
    """A Trainer that evaluates every iteration of a tiny model."""
    quiet = {"default_root_dir": folder, "enable_progress_bar": False, "accelerator": "cpu", "evaluation": EVERY}
    return Trainer(callbacks=list(callbacks), **(quiet | settings))


class Heard(pl.Callback):
    """The events of validations, with the mean return known at each."""

    def __init__(self):
        self.events = []

    def on_evaluation_end(self, trainer, algorithm, metrics):
        self.events.append(("on_evaluation_end", float(trainer.callback_metrics["eval/mean_reward"])))


for event in EVENTS:
    setattr(Heard, event, lambda self, trainer, module, event=event: self.events.append((event, mean_return(trainer))))


def mean_return(trainer):
    known = trainer.callback_metrics.get("eval/mean_reward")
    return None if known is None else float(known)


@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_callbacks_and_hooks_are_called_for_each_evaluation_and_get_its_metrics_at_the_end(kind, tmp_path):
    of_module = []

    class Mine(PPO):
        def on_validation_start(self):
            of_module.append(self.env_steps)

    heard = Heard()
    if kind is Trainer:
        trainer = trainer_of(tmp_path, heard)
    else:
        silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": -1, "accelerator": "cpu"}
        trainer = pl.Trainer(default_root_dir=tmp_path, callbacks=[RolloutEvaluator(16, episodes=2, num_envs=2), heard], **silent)
    trainer.fit(tiny(Mine))
    assert of_module == [16, 32, 48, 64, 80, 96]
    names = [name for name, _ in heard.events]
    assert (
        names
        == ["on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_evaluation_end", "on_validation_end"] * 6
    )
    known = [value for _, value in heard.events]
    assert known[:2] == [None, None] and None not in known[2:]
    assert all(known[k] == known[k + 1] == known[k + 2] for k in range(2, 30, 5))


def test_early_stopping_stops_at_the_evaluation_that_reaches_its_threshold(tmp_path):
    model = tiny(PPO)
    trainer_of(tmp_path, EarlyStopping("eval/mean_reward", mode="max", stopping_threshold=-1e9)).fit(model)
    assert model.env_steps == 16


@pytest.mark.thorough
def test_model_checkpoint_saves_by_evaluations(tmp_path):
    saver = ModelCheckpoint(tmp_path / "mine", "{env_steps}", monitor="eval/mean_reward", mode="max", save_top_k=-1)
    model = tiny(PPO)
    trainer_of(tmp_path, saver).fit(model)
    assert len(list((tmp_path / "mine").glob("*.ckpt"))) == 6
    assert saver.best_model_score == max(saver.best_k_models.values())
    assert PPO.load_from_checkpoint(saver.best_model_path).env_steps in range(16, 97, 16)


@pytest.mark.thorough
def test_the_evaluated_weights_are_those_of_the_best_checkpoint(tmp_path):
    judged = []

    class Watched(RolloutEvaluator):
        def play(self, algorithm, *arguments):
            judged.append({name: value.clone() for name, value in algorithm.network.state_dict().items()})
            return super().play(algorithm, *arguments)

    model = tiny(PPO, learning_rate=0.01)
    trainer = trainer_of(tmp_path, Watched(16, episodes=2, num_envs=2), EMAWeightAveraging(decay=0.9, update_every_n_steps=1))
    trainer.fit(model)
    kept = load_policy(trainer.run_folder / "checkpoints" / "best.ckpt").network.state_dict()
    final = model.network.state_dict()
    assert any(all(torch.equal(weights[name], kept[name]) for name in kept) for weights in judged)
    assert any(not torch.equal(judged[-2][name], final[name]) for name in final)


@pytest.mark.thorough
def test_a_users_callback_finds_the_averaged_weights_at_the_end_and_the_last_checkpoint_holds_those_that_learn(tmp_path):
    found = {}

    class Exported(pl.Callback):
        def on_train_end(self, trainer, pl_module):
            found.update({name: value.clone() for name, value in pl_module.network.state_dict().items()})

    model = tiny(PPO, learning_rate=0.01)
    trainer = trainer_of(tmp_path, EMAWeightAveraging(decay=0.9, update_every_n_steps=1), Exported())
    trainer.fit(model)
    averaged, last = model.network.state_dict(), torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=False)
    assert all(torch.equal(found[name], averaged[name]) for name in averaged)
    learned = {name.removeprefix("network."): value for name, value in last["current_model_state"].items() if "network." in name}
    assert any(not torch.equal(learned[name], averaged[name]) for name in learned if name in averaged)


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint])
def test_a_monitor_that_no_evaluation_has_is_refused_at_the_start(kind, tmp_path):
    model = tiny(SAC)
    with pytest.raises(SettingError, match=rf"^{kind.__name__}: monitor 'eval/mean_rewrad' is not .*; did you mean eval/mean_reward\?$"):
        trainer_of(tmp_path, kind(monitor="eval/mean_rewrad")).fit(model)
    assert model.env_steps == 0


@pytest.mark.parametrize(
    ("flag", "value", "instead"),
    [
        ("val_check_interval", 0.5, "evaluation.every_n_env_steps"),
        ("check_val_every_n_epoch", 3, "evaluation.every_n_env_steps"),
        ("num_sanity_val_steps", 2, "evaluation.every_n_env_steps"),
        ("limit_val_batches", 7, "evaluation.episodes"),
        ("limit_test_batches", 7, "evaluation.episodes"),
        ("limit_predict_batches", 0.5, "evaluation.episodes"),
        ("overfit_batches", 3, "limit_train_batches"),
        ("overfit_batches", 1.0, "limit_train_batches"),
        ("val_check_interval", 1, "evaluation.every_n_env_steps"),
        ("limit_val_batches", 1, "evaluation.episodes"),
        ("gradient_clip_val", 1.0, "model.max_grad_norm"),
        ("gradient_clip_val", 0, "model.max_grad_norm"),
    ],
)
def test_flags_that_would_do_nothing_name_the_setting_to_use(flag, value, instead, tmp_path):
    with pytest.raises(SettingError, match=f"^trainer.{flag} {value!r}: .*; use {instead}$"):
        trainer_of(tmp_path, **{flag: value})


# ---------------------------------------------------------------- the best checkpoint, validate, test, predict


def test_the_checkpoint_callback_knows_its_files_and_score(tmp_path):
    trainer = trainer_of(tmp_path)
    assert (trainer.checkpoint_callback.best_model_path, trainer.checkpoint_callback.best_model_score) == ("", None)
    trainer.fit(tiny(PPO))
    saver, folder = trainer.checkpoint_callback, trainer.run_folder / "checkpoints"
    assert (saver.best_model_path, saver.last_model_path) == (str(folder / "best.ckpt"), str(folder / "last.ckpt"))
    assert saver.monitor == "eval/mean_reward" and float(saver.best_model_score) >= mean_return(trainer)


FORKS = """
import torch

torch.set_num_threads(1)  # a forked process would wait for the other threads
from lightning_rl import PPO, EvaluationConfig, Trainer
from tests.fitting import tiny

evaluation = EvaluationConfig(every_n_env_steps=48, episodes=1, num_envs=1)
trainer = Trainer(strategy="ddp_fork", devices=1, accelerator="cpu", evaluation=evaluation)
trainer.fit(tiny(PPO))
assert trainer.checkpoint_callback.best_model_path == str(trainer.run_folder / "checkpoints" / "best.ckpt")
"""


@pytest.mark.thorough
def test_the_best_checkpoint_of_a_process_that_lightning_forked_is_known(tmp_path):
    # in a process of its own: this one has threads, which a fork has not
    program = subprocess.run([sys.executable, "-c", FORKS], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert program.returncode == 0, program.stderr.decode()


class Uploads(pl.loggers.Logger):
    """A logger that is told of checkpoints."""

    name, version = "uploads", 0

    def __init__(self):
        self.told = []

    def log_hyperparams(self, *_):
        pass

    def log_metrics(self, *_, **__):
        pass

    def after_save_checkpoint(self, checkpoint_callback):
        self.told.append((checkpoint_callback.best_model_path, checkpoint_callback.last_model_path))


def test_our_checkpoint_callbacks_save_in_lightnings_own_trainer(tmp_path):
    model = tiny(PPO)
    trainer = fit(
        model,
        callbacks=[RolloutEvaluator(32, episodes=1), BestModel(), SaveCheckpoints()],
        default_root_dir=tmp_path,
        enable_checkpointing=True,
    )
    assert {"best.ckpt", "last.ckpt"} <= {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert trainer.checkpoint_callback.best_model_path == str(tmp_path / "checkpoints" / "best.ckpt")
    assert load_policy(trainer.checkpoint_callback.last_model_path).act(model.spaces.observation.sample())[0] in (0, 1, 2)


def test_loggers_are_notified_of_each_checkpoint(tmp_path):
    uploads = Uploads()
    trainer = trainer_of(tmp_path, logger=uploads)
    trainer.fit(tiny(PPO))
    folder = trainer.run_folder / "checkpoints"
    assert uploads.told[0] == (str(folder / "best.ckpt"), "")
    assert uploads.told[-1] == (str(folder / "best.ckpt"), str(folder / "last.ckpt"))


@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_validate_test_and_predict_play_with_the_weights_asked_for(algorithm, tmp_path):
    model = tiny(algorithm, "CartPole-v1", learning_rate=0.05)
    trainer = trainer_of(tmp_path)
    trainer.fit(model)
    (validated,) = trainer.validate(model)
    assert validated["eval/mean_reward"] == mean_return(trainer)
    episodes = trainer.predict(model)
    assert [episode.seed for episode in episodes] == [10_000, 10_001]
    assert sum(episode.return_ for episode in episodes) / 2 == validated["eval/mean_reward"]
    (best,) = trainer.validate(ckpt_path="best")
    assert best["eval/mean_reward"] == float(trainer.checkpoint_callback.best_model_score)
    (tested,) = trainer.test(ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert tested["test/mean_reward"] == evaluate(trainer.checkpoint_callback.best_model_path)["return_mean"]
    assert set(tested) == {"test/mean_reward", "test/std_reward", "test/mean_ep_length"}


def test_the_best_of_a_trainer_that_saved_nothing_is_one_line(tmp_path):
    for play in ("validate", "test", "predict", "fit"):
        with pytest.raises(SettingError, match=r"^ckpt_path best: this Trainer has saved no checkpoint; call fit first, or name a file$"):
            getattr(trainer_of(tmp_path), play)(tiny(PPO), ckpt_path="best")


@pytest.mark.parametrize("algorithm", ALL)
def test_calling_an_algorithm_returns_the_deterministic_actions_of_its_policy(algorithm):
    model = tiny(algorithm)
    obs = np.stack([model.spaces.observation.sample() for _ in range(3)])
    assert np.array_equal(model(obs), Policy(model.network, model.spaces).act(obs)[0])


def test_calling_an_algorithm_takes_observations_of_the_environments_own_type():
    model = tiny(PPO, "Pendulum-v1")
    obs = model.spaces.observation.sample()[None]
    assert np.array_equal(model(obs.astype(np.float64)), model(obs))


def test_weights_that_do_not_fit_are_refused_before_any_is_taken(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.fit(tiny(PPO))
    other = tiny(PPO, net_arch=[4])
    before = weights(other)
    with pytest.raises(SettingError, match=r"^ckpt_path .* does not fit the model: network\."):
        trainer.validate(other, ckpt_path="best")
    assert torch.equal(weights(other), before)


@pytest.mark.thorough
def test_test_plays_unseen_episodes_whatever_evaluator_the_run_has(tmp_path):
    several = MultiEvaluator([RolloutEvaluator(16, episodes=1), RolloutEvaluator(16, episodes=1, deterministic=False)])
    model = tiny(PPO, "CartPole-v1")
    (tested,) = trainer_of(tmp_path, several).test(model)
    assert tested["test/mean_reward"] == evaluate(model)["return_mean"]


@pytest.mark.thorough
def test_model_checkpoint_that_shall_save_at_the_end_of_the_epoch_does(tmp_path):
    saver = ModelCheckpoint(tmp_path / "mine", monitor="eval/mean_reward", save_top_k=-1, save_on_train_epoch_end=True)
    trainer_of(tmp_path, saver).fit(tiny(PPO))
    assert len(list((tmp_path / "mine").glob("*.ckpt"))) == 1


def test_a_best_checkpoint_that_could_not_be_saved_is_not_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(trainer, "save_checkpoint", full)
    with pytest.raises(UnsavedError):
        trainer.fit(tiny(PPO))
    assert trainer.checkpoint_callback.best_model_path == ""


# ---------------------------------------------------------------- tuning


class AfterTwo(optuna.pruners.BasePruner):
    """Prunes each trial after its second evaluation."""

    def prune(self, study, trial):
        return len(trial.intermediate_values) == 2


def test_optunas_callback_reports_each_evaluation_and_prunes(tmp_path):
    trained = []

    def objective(trial):
        model = tiny(PPO, learning_rate=trial.suggest_float("learning_rate", 1e-4, 1e-2, log=True))
        trainer = trainer_of(tmp_path, PyTorchLightningPruningCallback(trial, "eval/mean_reward"))
        trained.append((trainer, model))
        trainer.fit(model)

    optuna.logging.disable_default_handler()
    study = optuna.create_study(direction="maximize", pruner=AfterTwo())
    study.optimize(objective, n_trials=2)
    for trial, (trainer, model) in zip(study.trials, trained, strict=True):
        assert trial.state == optuna.trial.TrialState.PRUNED and [*trial.intermediate_values] == [1, 2]
        assert model.env_steps == 32 and trial.intermediate_values[2] == trainer.callback_metrics["eval/mean_reward"]


# ---------------------------------------------------------------- what hooks log in an evaluation


class Logs(PPO):
    """Logs in the hooks of an evaluation."""

    def on_validation_epoch_start(self):
        self.summed = getattr(self, "summed", None) or SumMetric()

    def on_validation_epoch_end(self):
        self.summed.update(1.0)
        self.log("val/sum", self.summed)
        self.log("val/hidden", 2.0, logger=False)


@pytest.mark.thorough
def test_a_metric_of_torchmetrics_counts_one_evaluation_and_what_is_not_for_loggers_reaches_none(tmp_path):
    trainer = trainer_of(tmp_path)
    model = tiny(Logs)
    trainer.fit(model)
    rows = list(csv.DictReader((trainer.run_folder / "metrics.csv").read_text().splitlines()))
    assert [float(row["val/sum"]) for row in rows if row.get("val/sum")] == [1.0] * 6
    assert "val/hidden" not in rows[0] and float(trainer.callback_metrics["val/hidden"]) == 2.0


@pytest.mark.thorough
def test_an_evaluation_that_is_interrupted_calls_no_hook_that_waits_for_its_metrics(tmp_path):
    class Reads(PPO):
        def on_validation_epoch_end(self):
            self.trainer.callback_metrics["eval/mean_reward"]

    class Ends(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            trainer.stop.received = signal.SIGTERM

    trainer = trainer_of(tmp_path, Ends())
    with pytest.raises(SystemExit):
        trainer.fit(tiny(Reads))


@pytest.mark.parametrize("every", [16, 40])
def test_the_epoch_of_an_algorithm_counts_evaluations(every, tmp_path):
    heard = []

    class Epochs(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            heard.append(pl_module.current_epoch)

    trainer_of(tmp_path, Epochs(), evaluation=EvaluationConfig(every_n_env_steps=every, episodes=1, num_envs=1)).fit(tiny(PPO))
    assert heard == list(range(1, len(heard) + 1)) and len(heard) == {16: 6, 40: 3}[every]


def test_best_and_last_may_be_those_of_a_callback_without_a_monitor(tmp_path):
    saver = ModelCheckpoint(tmp_path / "mine", every_n_train_steps=2, save_last=True)
    trainer = trainer_of(tmp_path, saver, checkpoint=None)
    trainer.fit(tiny(PPO))
    assert trainer.validate(ckpt_path="last")[0]["eval/mean_reward"] == trainer.callback_metrics["eval/mean_reward"]


@pytest.mark.parametrize("shape", [(4,), (3, 1), (3, 5)])
def test_observations_of_another_shape_are_refused_in_one_line(shape):
    line = r"^observations must be a batch, \[N, \.\.\.\] of Box\(4\)|^the observation has shape \(3, \d\), and its space \(4,\)$"
    with pytest.raises(SettingError, match=line):
        tiny(PPO, "CartPole-v1")(np.zeros(shape))


@pytest.mark.parametrize("judge", ["validate", "test", "predict"])
def test_episodes_of_the_trainer_are_played_in_one_thread_unless_its_flag_says_otherwise(judge, folder):
    threads = []

    class Counting(EnvOfOneStep):
        def step(self, action):
            threads.append(torch.get_num_threads())
            return super().step(action)

    model = PPO(Counting, max_env_steps=32, n_steps=4, batch_size=8, net_arch=[8])
    torch.set_num_threads(2)
    try:
        getattr(Trainer(default_root_dir=folder, logger=False, accelerator="cpu"), judge)(model)
        assert torch.get_num_threads() == 2 and set(threads) == {1}
        threads.clear()
        getattr(Trainer(default_root_dir=folder, logger=False, accelerator="cpu", torch_threads=2), judge)(model)
        assert set(threads) == {2}
    finally:
        torch.set_num_threads(1)


class EnvOfOneStep(gym.Env):
    """Pays 1 and ends."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, True, False, {}
