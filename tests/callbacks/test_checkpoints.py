"""Which weights a run keeps."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch

from lightning_rl import PPO, BestModel, RolloutEvaluator, SaveCheckpoints
from lightning_rl.callbacks import checkpoints
from lightning_rl.errors import SettingError
from tests.callbacks.evaluations import Scores
from tests.fitting import fit, tiny, weights


def stored(path):
    """A checkpoint's environment steps and its weights."""
    checkpoint = torch.load(path, weights_only=True)
    model = tiny(PPO)
    model.load_state_dict(checkpoint["state_dict"])
    return checkpoint["lightning_rl"]["env_steps"], weights(model)


class Watch(pl.Callback):
    """The weights after each iteration and what `best.ckpt` holds then."""

    def __init__(self, folder):
        self.folder, self.weights, self.best = folder, {}, []

    def on_train_batch_end(self, trainer, model, *_):
        self.weights[model.env_steps] = weights(model)
        self.best.append(stored(self.folder / "best.ckpt"))


@pytest.mark.thorough
def test_best_is_saved_after_each_evaluation_that_is_as_good_as_all_before_and_the_newest_of_equals_is_kept(tmp_path):
    watch = Watch(tmp_path)
    fit(tiny(PPO, max_env_steps=80), enable_checkpointing=True, callbacks=[Scores([1, 3, 2, 3, 1]), BestModel(tmp_path), watch])
    assert [env_steps for env_steps, _ in watch.best] == [16, 32, 32, 64, 64]
    for env_steps, kept in watch.best:
        assert torch.equal(kept, watch.weights[env_steps])
    different = torch.stack(list(watch.weights.values())).unique(dim=0)
    assert len(different) == 5  # the weights moved, so that the right ones can be told from the others


@pytest.mark.thorough
def test_a_run_that_continues_keeps_a_better_model_from_before_and_replaces_an_equal_one(tmp_path):
    callbacks = [Scores([1, 3, 2]), BestModel(tmp_path)]
    fit(tiny(PPO, max_env_steps=48), enable_checkpointing=True, callbacks=callbacks).save_checkpoint(tmp_path / "a.ckpt")
    fit(tiny(PPO, max_env_steps=96), tmp_path / "a.ckpt", enable_checkpointing=True, callbacks=[Scores([2, 2, 1]), BestModel(tmp_path)])
    assert stored(tmp_path / "best.ckpt")[0] == 32
    fit(tiny(PPO, max_env_steps=96), tmp_path / "a.ckpt", enable_checkpointing=True, callbacks=[Scores([2, 3, 1]), BestModel(tmp_path)])
    assert stored(tmp_path / "best.ckpt")[0] == 80
    fit(tiny(PPO, max_env_steps=96), tmp_path / "a.ckpt", enable_checkpointing=True, callbacks=[Scores([3, 4, 1]), BestModel(tmp_path)])
    assert stored(tmp_path / "best.ckpt")[0] == 80


def test_weights_that_replace_a_deleted_file_after_an_evaluation_of_nan_count_as_the_worst(tmp_path):
    class Delete(pl.Callback):
        def on_train_batch_end(self, trainer, model, *_):
            if model.env_steps == 16:
                (tmp_path / "best.ckpt").unlink()

    best = BestModel(tmp_path)
    callbacks = [Scores([1, float("nan"), -5, -6]), best, Delete()]
    fit(tiny(PPO, max_env_steps=64), enable_checkpointing=True, callbacks=callbacks)
    assert (stored(tmp_path / "best.ckpt")[0], best.best) == (48, -5)


def test_best_follows_the_monitored_metric_and_its_mode(tmp_path):
    watch, lowest = Watch(tmp_path), BestModel(tmp_path, mode="min")
    fit(tiny(PPO, max_env_steps=80), enable_checkpointing=True, callbacks=[Scores([3, 1, 2, 1, 2]), lowest, watch])
    assert [env_steps for env_steps, _ in watch.best] == [16, 32, 32, 64, 64]
    assert [BestModel(monitor=name).mode for name in ("val/loss", "val/accuracy")] == ["min", "max"]
    highest = BestModel(tmp_path)
    highest.setup(None, None, "fit")
    highest.load_state_dict(lowest.state_dict())  # a run that goes on with another goal has no best yet
    assert highest.best == -float("inf")
    with pytest.raises(SettingError, match=r"checkpoint\.monitor must be the name of a metric"):
        BestModel(monitor=None)
    with pytest.raises(SettingError, match=r"checkpoint.monitor 'eval/mean_rewad' is not a metric of .* did you mean eval/mean_reward"):
        BestModel(tmp_path, "eval/mean_rewad")
    assert BestModel(tmp_path, "eval/coins").monitor == "eval/coins"  # that a hook of the user's logs


def test_what_was_learned_is_saved_where_an_evaluation_has_not_the_monitored_metric(tmp_path):
    with pytest.raises(SettingError, match=r"checkpoint.monitor 'eval/win_rate' is not a metric of evaluations"):
        fit(tiny(PPO), enable_checkpointing=True, callbacks=[Scores([1]), BestModel(tmp_path, "eval/win_rate")])
    assert stored(tmp_path / "last.ckpt")[0] == 16


@pytest.mark.parametrize("section, callback", [("checkpoint", SaveCheckpoints), ("evaluation", RolloutEvaluator)])
def test_an_interval_in_another_counter_than_the_runs_is_refused(section, callback):
    with pytest.raises(
        SettingError, match=f"{section}.every_n_updates: a run of PPO counts environment steps; use {section}.every_n_env_steps"
    ):
        fit(tiny(PPO), enable_checkpointing=True, callbacks=[callback(every_n_updates=5)])


def test_last_is_saved_on_the_way_and_at_the_end(tmp_path):
    seen = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, model, *_):
            file = tmp_path / "last.ckpt"
            seen.append(stored(file)[0] if file.exists() else None)

    model = tiny(PPO, max_env_steps=80)
    fit(model, enable_checkpointing=True, callbacks=[SaveCheckpoints(32, folder=tmp_path), Look()])
    assert seen == [None, None, 32, 32, 64]  # Lightning calls those that save last
    env_steps, kept = stored(tmp_path / "last.ckpt")
    assert env_steps == 80 and torch.equal(kept, weights(model))
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.variants
@pytest.mark.parametrize("seconds, saved", [(0.0, [16, 32, 48, 64, 80, 80]), (60.0, [80])])
def test_by_default_a_run_saves_no_more_often_than_every_few_seconds(seconds, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "MIN_SECONDS_BETWEEN_SAVES", seconds)
    seen, save = [], SaveCheckpoints.save
    monkeypatch.setattr(
        SaveCheckpoints, "save", lambda self, *given, **named: (seen.append(given[1].env_steps), save(self, *given, **named))
    )
    fit(tiny(PPO, max_env_steps=80), enable_checkpointing=True, callbacks=[SaveCheckpoints(folder=tmp_path)])
    assert seen == saved


@pytest.mark.thorough
@pytest.mark.parametrize("keep, kept", [(0, []), (2, [64, 80]), (-1, [16, 32, 48, 64, 80])])
def test_the_newest_copies_are_kept(keep, kept, tmp_path):
    fit(tiny(PPO, max_env_steps=80), enable_checkpointing=True, callbacks=[SaveCheckpoints(16, keep, tmp_path)])
    copies = {f"env_steps={env_steps}.ckpt": env_steps for env_steps in kept}
    assert {file.name for file in tmp_path.iterdir()} == {"last.ckpt", *copies}
    assert all(stored(tmp_path / name)[0] == env_steps for name, env_steps in copies.items())


def test_wrong_intervals_are_named():
    with pytest.raises(SettingError, match=r"checkpoint.every_n_env_steps must be >= 1, got 0"):
        SaveCheckpoints(0)
    with pytest.raises(SettingError, match=r"checkpoint.keep must be >= -1, got -2"):
        SaveCheckpoints(keep=-2)
