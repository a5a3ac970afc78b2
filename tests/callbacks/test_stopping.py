"""When a run ends before its time, worked by hand from the returns of its evaluations."""

from __future__ import annotations

import pytest
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

from lightning_rl import PPO, StopOnEvaluation, Trainer
from lightning_rl.errors import SettingError
from tests.callbacks.evaluations import Scores
from tests.fitting import fit, tiny


@pytest.mark.parametrize(
    "returns, patience, evaluations",
    [
        ([1, 3, 2, 3, 4], 1, 3),  # 2 does not beat 3
        ([1, 3, 2, 3, 4], 2, 4),  # nor does the 3 after it: a tie is no improvement
        ([1, 3, 2, 3, 4], 3, 5),
        ([1, 2, 3, 4, 5], 1, 5),
        ([3, 3, 3, 3, 3], 1, 2),
        ([1, 3, 2, 4, 3], 2, 5),  # the 4 starts the count again
    ],
)
def test_patience_counts_evaluations_in_a_row_that_are_not_better(returns, patience, evaluations):
    model = tiny(PPO, max_env_steps=80)
    fit(model, callbacks=[Scores(returns), StopOnEvaluation(patience=patience)])
    assert model.env_steps == 16 * evaluations


@pytest.mark.parametrize("stop_at, evaluations", [(3, 2), (3.5, 5), (1, 1), (9, 5), (None, 5)])
def test_a_run_stops_at_its_goal(stop_at, evaluations):
    model = tiny(PPO, max_env_steps=80)
    fit(model, callbacks=[Scores([1, 3, 2, 3, 4]), StopOnEvaluation(stop_at=stop_at)])
    assert model.env_steps == 16 * evaluations


def test_a_run_that_continues_remembers_its_best_evaluation(tmp_path):
    fit(tiny(PPO, max_env_steps=48), callbacks=[Scores([1, 3, 2]), StopOnEvaluation(patience=3)]).save_checkpoint(tmp_path / "a.ckpt")
    model = tiny(PPO, max_env_steps=160)
    fit(model, tmp_path / "a.ckpt", callbacks=[Scores([3, 2, 9]), StopOnEvaluation(patience=3)])
    assert model.env_steps == 48 + 2 * 16


@pytest.mark.parametrize(
    "ends, says, goes_on",
    [
        ({"stop_at": 3}, "stop_at 3: eval/mean_reward 3 reached at 32 environment steps", ["--evaluation.stop_at null"]),
        ({"patience": 1}, "patience 1: eval/mean_reward has not beaten 3, at 48 environment steps", ["--evaluation.patience null"]),
    ],
)
def test_a_run_that_evaluations_end_says_why_and_its_command_goes_on_without_that_end(ends, says, goes_on, tmp_path, capsys):
    arguments = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": tmp_path, "evaluation": ends}
    Trainer(**arguments, callbacks=[Scores([1, 3, 2])]).fit(tiny(PPO, "CartPole-v1", max_env_steps=80))
    lines = capsys.readouterr().out.splitlines()
    assert says in lines
    (command,) = (line for line in lines if line.startswith("continue it: "))
    assert all(option in command for option in goes_on)


def test_a_run_that_is_at_its_end_says_nothing_of_its_goal(tmp_path, capsys):
    arguments = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": tmp_path, "evaluation": {"stop_at": 3}}
    Trainer(**arguments, callbacks=[Scores([1, 3])]).fit(tiny(PPO, "CartPole-v1", max_env_steps=32))
    assert "stop_at" not in capsys.readouterr().out


@pytest.mark.parametrize("stop", [StopOnEvaluation(stop_at=3), EarlyStopping("eval/mean_reward", mode="max", stopping_threshold=2)])
def test_a_run_that_a_callback_ends_says_why_and_gives_no_command_that_it_would_end_again(stop, tmp_path, capsys):
    arguments = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": tmp_path}
    Trainer(**arguments, callbacks=[stop, Scores([1, 3, 2])]).fit(tiny(PPO, "CartPole-v1", max_env_steps=80))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith(("stop_at 3: eval/mean_reward 3 reached at 32", "EarlyStopping: Stopping threshold reached: "))
    assert not lines[-3].endswith("stop.") and not any(line.startswith("continue it") for line in lines)


def test_patience_is_at_least_one():
    with pytest.raises(SettingError, match=r"evaluation.patience must be >= 1, got 0"):
        StopOnEvaluation(patience=0)


@pytest.mark.parametrize(
    "settings, evaluations",
    [
        ({"patience": 1}, 3),  # 2 does not beat 3
        ({"patience": 2}, 4),
        ({"patience": 9, "stopping_threshold": 2.5}, 2),
        ({"patience": 1, "check_on_train_epoch_end": False}, 3),
        ({"patience": 9}, 5),
    ],
)
def test_lightnings_early_stopping_decides_after_each_evaluation(settings, evaluations):
    model = tiny(PPO, max_env_steps=80)
    fit(model, callbacks=[EarlyStopping("eval/mean_reward", mode="max", **settings), Scores([1, 3, 2, 3, 4])])
    assert model.env_steps == 16 * evaluations


def test_lightnings_early_stopping_decides_once_for_an_evaluation_where_epochs_are_short():
    model = tiny(PPO, max_env_steps=80)
    scores = Scores([1, 2, 3])
    scores.every_n_env_steps = 32  # at 32, 64 and 80
    fit(model, callbacks=[EarlyStopping("eval/mean_reward", mode="max", patience=1), scores], limit_train_batches=1)
    assert model.env_steps == 80


def test_lightnings_early_stopping_follows_our_trainers_evaluations(tmp_path):
    model = tiny(PPO, max_env_steps=80)
    stop = EarlyStopping("eval/mean_reward", mode="max", patience=1)
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    Trainer(default_root_dir=tmp_path, callbacks=[stop], evaluation={"every_n_env_steps": 16}, **quiet).fit(model)
    assert model.env_steps == 32  # the environment always pays the same


@pytest.mark.parametrize(("monitor", "env_steps"), [("eval/mean_rewrad", 0), ("val/mean_reward", 16)])
def test_early_stopping_that_monitors_nothing_is_refused_in_one_line_at_the_latest_at_the_first_evaluation(monitor, env_steps):
    model = tiny(PPO, max_env_steps=80)
    with pytest.raises(SettingError, match=rf"^EarlyStopping: monitor '{monitor}' .*; did you mean eval/mean_reward\?$"):
        fit(model, callbacks=[EarlyStopping(monitor), Scores([1, 3, 2, 3, 4])])
    assert model.env_steps == env_steps


@pytest.mark.parametrize(
    "monitor, evaluated", [("eval/mean_reward", False), ("val/loss", False), ("rollout/ep_rew_mean", True), ("train/loss", True)]
)
def test_early_stopping_that_no_evaluation_would_ask_is_refused_before_the_run(monitor, evaluated):
    model = tiny(PPO, max_env_steps=80)
    callbacks = [EarlyStopping(monitor), *([Scores([1, 2, 3, 4, 5])] if evaluated else [])]
    with pytest.raises(SettingError, match=f"^EarlyStopping: monitor '{monitor}' would never stop the run, .*; .*evaluation.patience$"):
        fit(model, callbacks=callbacks)
    assert model.env_steps == 0


@pytest.mark.parametrize("monitor", ["train/loss", "rollout/ep_rew_mean"])
def test_a_model_checkpoint_that_would_compare_nothing_is_refused_before_the_run(monitor, tmp_path):
    model = tiny(PPO, max_env_steps=80, log_interval=1)
    told = f"^ModelCheckpoint: monitor '{monitor}' would be checked only at the end, .*; add every_n_train_steps"
    with pytest.raises(SettingError, match=told):
        fit(model, callbacks=[ModelCheckpoint(tmp_path, monitor=monitor)], enable_checkpointing=True)
    assert model.env_steps == 0
    fit(model, callbacks=[ModelCheckpoint(tmp_path, monitor=monitor, every_n_train_steps=1)], enable_checkpointing=True)
    assert model.env_steps == 80
    short = tiny(PPO, max_env_steps=80, log_interval=1)
    fit(
        short,
        callbacks=[ModelCheckpoint(tmp_path / "short", monitor=monitor)],
        enable_checkpointing=True,
        limit_train_batches=1,
        max_epochs=2,
    )
    assert short.env_steps == 32


@pytest.mark.parametrize(("mode", "lines"), [("min", 1), ("max", 0)])
def test_one_line_warns_that_the_lowest_return_would_be_the_best(mode, lines, capsys):
    fit(tiny(PPO, max_env_steps=32), callbacks=[EarlyStopping("eval/mean_reward", mode=mode), Scores([1, 2])])
    told = "EarlyStopping treats the lowest eval/mean_reward as the best; use mode='max'"
    assert capsys.readouterr().out.count(told) == lines


def test_early_stopping_looks_at_any_metric_where_epochs_are_short():
    stopping, model = EarlyStopping("train/loss", patience=1, mode="max", stopping_threshold=-1e9), tiny(PPO, log_interval=1)
    fit(model, callbacks=[stopping], limit_train_batches=2)
    assert model.env_steps == 32  # two iterations of 16


@pytest.mark.parametrize("goal", ["x", float("nan"), True])
def test_a_goal_is_a_number(goal):
    with pytest.raises(SettingError, match=r"evaluation\.stop_at must be a number, got"):
        StopOnEvaluation(stop_at=goal)


def test_a_goal_for_a_metric_that_evaluations_do_not_have_is_reported_with_the_nearest_name():
    with pytest.raises(SettingError, match=r"StopOnEvaluation.monitor 'eval/mean' is not a metric of evaluations"):
        fit(tiny(PPO), callbacks=[Scores([1.0]), StopOnEvaluation(stop_at=1.0, monitor="eval/mean")])


def test_of_two_callbacks_that_stop_runs_the_one_that_did_is_named_and_not_in_the_next_run(tmp_path, capsys):
    stops = [EarlyStopping("eval/mean_reward", mode="max", stopping_threshold=2), EarlyStopping("eval/std_reward", patience=99)]
    arguments = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": tmp_path}
    Trainer(**arguments, callbacks=[*stops, Scores([1, 3, 2])]).fit(tiny(PPO, "CartPole-v1", max_env_steps=80))
    assert capsys.readouterr().out.count("EarlyStopping: Stopping threshold reached") == 1
    stops[0].stopping_threshold = 99
    Trainer(**arguments, callbacks=[*stops, Scores([1, 3, 2])], max_steps=1).fit(tiny(PPO, "CartPole-v1", max_env_steps=80))
    assert "EarlyStopping:" not in capsys.readouterr().out
