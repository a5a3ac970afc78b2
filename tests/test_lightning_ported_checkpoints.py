"""Lightning's own tests of `ModelCheckpoint`, for algorithms: an evaluation stands where they have an epoch with a validation.

They stand for `checkpointing/test_model_checkpoint.py`, `test_checkpoint_callback_frequency.py` and `test_trainer_checkpoint.py`, and for
`callbacks/test_model_checkpoint_*.py`, of Lightning 2.6, with other models and numbers.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import pytorch_lightning as pl
import torch
import yaml
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_rl import PPO, SAC, SettingError, Trainer
from tests.fitting import tiny, weights
from tests.ported import KINDS, trainer_of

RETURNS = [5, 1, 4, 6, 2, 3]
"""Of the evaluations of a tiny run, which has one after each of its six iterations."""
without_its_callbacks = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
into_a_folder_in_use = pytest.mark.filterwarnings("ignore:Checkpoint directory")


def saver_in(folder, filename="{step}", **settings):
    return ModelCheckpoint(folder / "mine", filename, **({"monitor": "eval/mean_reward", "mode": "max"} | settings))


def files(folder):
    """The checkpoints of a folder, without what our Trainer writes beside them."""
    return sorted(path.name for path in (folder / "mine").glob("*.ckpt") if not path.stem.endswith(".previous"))


def steps(*numbers):
    return [f"step={number}.ckpt" for number in numbers]


# ---------------------------------------------------------------- which are kept


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("save_top_k", "mode", "kept", "best", "worst"),
    [
        (-1, "max", (1, 2, 3, 4, 5, 6), 4, 2),
        (0, "max", (), None, None),
        (1, "max", (4,), 4, 4),
        (2, "max", (1, 4), 4, 1),
        (3, "max", (1, 3, 4), 4, 3),
        (2, "min", (2, 5), 2, 5),
    ],
)
def test_the_best_by_evaluations_are_kept_and_known(kind, save_top_k, mode, kept, best, worst, tmp_path):
    saver = saver_in(tmp_path, save_top_k=save_top_k, mode=mode)
    trainer_of(kind, tmp_path, RETURNS, saver).fit(tiny(PPO))
    assert files(tmp_path) == steps(*kept)
    folder = tmp_path / "mine"
    assert {path: float(score) for path, score in saver.best_k_models.items()} == {
        str(folder / name): RETURNS[number - 1] for name, number in zip(steps(*kept), kept, strict=True)
    }
    assert saver.best_model_path == ("" if best is None else str(folder / f"step={best}.ckpt"))
    assert saver.kth_best_model_path == ("" if worst is None else str(folder / f"step={worst}.ckpt"))
    assert saver.best_model_score == (None if best is None else RETURNS[best - 1])
    saver.to_yaml(tmp_path / "best.yaml")
    assert yaml.safe_load((tmp_path / "best.yaml").read_text()) == {path: float(score) for path, score in saver.best_k_models.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_each_file_has_its_score_in_its_name_and_state_and_is_a_whole_checkpoint(kind, algorithm, tmp_path):
    saver = saver_in(tmp_path, "{env_steps}-return={eval/mean_reward:.2f}", auto_insert_metric_name=False, save_top_k=-1)
    model = tiny(algorithm)
    trainer_of(kind, tmp_path, RETURNS, saver).fit(model)
    assert files(tmp_path) == sorted(f"{16 * (i + 1)}-return={score:.2f}.ckpt" for i, score in enumerate(RETURNS))
    for i, score in enumerate(RETURNS):
        checkpoint = torch.load(tmp_path / "mine" / f"{16 * (i + 1)}-return={score:.2f}.ckpt", weights_only=True)
        assert (checkpoint["global_step"], checkpoint["epoch"]) == (i + 1, 0)
        assert checkpoint["callbacks"][saver.state_key]["current_score"] == score
        assert type(checkpoint["hyper_parameters"]) is dict
    loaded = algorithm.load_from_checkpoint(tmp_path / "mine" / "96-return=3.00.ckpt")
    assert torch.equal(weights(loaded), weights(model)) and loaded.env_steps == 96


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("save_last", [True, "link"])
def test_the_last_is_saved_with_each_that_is_kept_and_only_then(kind, save_last, tmp_path):
    saver = saver_in(tmp_path, save_last=save_last)
    trainer_of(kind, tmp_path, RETURNS, saver).fit(tiny(PPO))
    last = tmp_path / "mine" / "last.ckpt"
    assert files(tmp_path) == ["last.ckpt", "step=4.ckpt"] and saver.last_model_path == str(last)
    assert last.is_symlink() == (save_last == "link")
    kept = [torch.load(path, weights_only=True) for path in (last, tmp_path / "mine" / "step=4.ckpt")]
    assert [each["global_step"] for each in kept] == [4, 4] and PPO.load_from_checkpoint(last).env_steps == 64
    assert kept[0]["callbacks"][saver.state_key]["best_model_score"] == kept[1]["callbacks"][saver.state_key]["best_model_score"] == 6


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_alone_is_saved_at_the_end(kind, tmp_path):
    saver = saver_in(tmp_path, monitor=None, save_top_k=0, save_last=True, every_n_epochs=5)
    trainer_of(kind, tmp_path, RETURNS, saver).fit(tiny(PPO))
    assert files(tmp_path) == ["last.ckpt"] and not (tmp_path / "mine" / "last.ckpt").is_symlink()
    assert (saver.best_model_path, saver.best_model_score, saver.best_k_models) == ("", None, {})
    assert PPO.load_from_checkpoint(saver.last_model_path).env_steps == 96


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_metric_the_newest_is_kept_at_the_end_of_the_run(kind, tmp_path):
    saver = saver_in(tmp_path, None, monitor=None)
    trainer_of(kind, tmp_path, RETURNS, saver).fit(tiny(PPO))
    assert files(tmp_path) == ["epoch=0-step=6.ckpt"]
    assert saver.best_model_path == str(tmp_path / "mine" / "epoch=0-step=6.ckpt")
    assert (saver.best_model_score, saver.best_k_models, saver.kth_best_model_path) == (None, {}, "")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_score_that_is_nan_is_the_worst(kind, mode, tmp_path):
    saver = saver_in(tmp_path, mode=mode, save_top_k=1)
    trainer_of(kind, tmp_path, [float("nan"), *RETURNS[:5]], saver).fit(tiny(PPO))
    assert files(tmp_path) == steps(5 if mode == "max" else 3) and saver.best_model_score == (6 if mode == "max" else 1)
    only = saver_in(tmp_path / "other", mode=mode)
    trainer_of(kind, tmp_path / "other", [float("nan")], only).fit(tiny(PPO, max_env_steps=16))
    assert only.current_score == only.best_model_score == float("inf" if mode == "min" else "-inf")


# ---------------------------------------------------------------- when they are saved


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("every", "kept"), [(1, (1, 2, 3, 4, 5, 6)), (2, (2, 4, 6)), (4, (4,)), (7, ())])
def test_every_n_train_steps_counts_iterations(kind, every, kept, tmp_path, recwarn):
    saver = saver_in(tmp_path, monitor=None, every_n_train_steps=every, save_top_k=-1)
    trainer_of(kind, tmp_path, RETURNS, saver).fit(tiny(PPO))
    assert files(tmp_path) == steps(*kept)
    assert not any("manual optimization" in str(warning.message) for warning in recwarn)


@pytest.mark.parametrize("kind", KINDS)
def test_every_n_train_steps_compares_by_the_evaluation_of_its_iteration(kind, tmp_path):
    saver = saver_in(tmp_path, every_n_train_steps=2, save_top_k=2)  # of 1, 6 and 3
    trainer_of(kind, tmp_path, RETURNS, saver).fit(tiny(PPO))
    assert files(tmp_path) == steps(4, 6) and saver.best_model_score == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_save_whose_metric_is_not_there_yet_waits_for_the_evaluation(kind, tmp_path):
    saver = saver_in(tmp_path, every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_of(kind, tmp_path, [7, 9], saver, max_steps=6)
    trainer.callbacks[0].every_n_env_steps = 64  # after the fourth and, with the run, the seventh iteration
    trainer.fit(tiny(PPO, max_env_steps=112))
    assert {path.rpartition("/")[2]: float(score) for path, score in saver.best_k_models.items()} == {"step=4.ckpt": 7, "step=6.ckpt": 7}


@pytest.mark.parametrize("kind", KINDS)
def test_every_n_epochs_counts_epochs_where_a_run_has_several(kind, tmp_path):
    saver = saver_in(tmp_path, "{epoch}-{step}", monitor=None, every_n_epochs=2, save_top_k=-1)
    trainer_of(kind, tmp_path, RETURNS, saver, limit_train_batches=2).fit(tiny(PPO))
    assert files(tmp_path) == ["epoch=1-step=4.ckpt"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every_n_epochs": 2}, "every_n_epochs 2 saves nothing, since a run is one epoch; use every_n_train_steps$"),
        ({"train_time_interval": timedelta(minutes=1)}, "train_time_interval saves nothing .*; use every_n_train_steps$"),
    ],
)
def test_intervals_at_which_nothing_would_be_saved_are_refused(kind, settings, words, tmp_path):
    model = tiny(PPO)
    with pytest.raises(SettingError, match=f"^ModelCheckpoint: {words}"):
        trainer_of(kind, tmp_path, RETURNS, saver_in(tmp_path, **settings)).fit(model)
    assert model.env_steps == 0


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [PPO, pl.Callback])
@pytest.mark.parametrize(
    ("hook", "env_steps"),
    [
        ("on_train_batch_start", 32),
        ("on_before_backward", 32),
        ("on_validation_start", 16),
        ("on_validation_epoch_end", 16),
        ("on_train_batch_end", 16),
        ("on_train_end", 96),
        ("on_fit_end", 96),
    ],
)
def test_an_exception_leaves_a_checkpoint_where_that_is_asked_for(kind, place, hook, env_steps, tmp_path):
    def trouble(*_):
        if trainer.global_step:  # Lightning saves nothing before the first
            raise RuntimeError("Trouble!")

    saver = saver_in(tmp_path, "exception", monitor=None, save_on_exception=True, every_n_epochs=7)
    troubled = type("Troubled", (place,), {hook: trouble})
    model, others = (tiny(troubled), []) if place is PPO else (tiny(PPO), [troubled()])
    trainer = trainer_of(kind, tmp_path, RETURNS, saver, *others)
    with pytest.raises(RuntimeError, match="Trouble!"):
        trainer.fit(model)
    assert files(tmp_path) == ["exception.ckpt"]
    checkpoint = torch.load(tmp_path / "mine" / "exception.ckpt", weights_only=True)
    assert checkpoint["lightning_rl"]["env_steps"] == env_steps and checkpoint["state_dict"].keys() == model.state_dict().keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_fast_run_for_developers_saves_nothing(kind, tmp_path):
    trainer_of(kind, tmp_path, RETURNS, saver_in(tmp_path, save_on_exception=True), fast_dev_run=2).fit(tiny(PPO))
    assert files(tmp_path) == []


# ---------------------------------------------------------------- names and folders


@pytest.mark.variants
@into_a_folder_in_use
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("counts", "expected"), [(True, ["best-v1.ckpt", "best.ckpt", "last-v1.ckpt", "last.ckpt"]), (False, ["best.ckpt", "last.ckpt"])]
)
def test_files_of_another_run_get_no_new_content_but_where_that_is_asked_for(kind, counts, expected, tmp_path):
    for number in (6, 7):
        saver = saver_in(tmp_path, "best", save_last=True, enable_version_counter=counts)
        trainer_of(kind, tmp_path, [number], saver).fit(tiny(PPO, max_env_steps=16))
    assert files(tmp_path) == expected
    best = torch.load(tmp_path / "mine" / "best.ckpt", weights_only=True)["callbacks"][saver.state_key]["best_model_score"]
    assert best == (6 if counts else 7)


@pytest.mark.parametrize("kind", KINDS)
def test_another_ending_of_files_is_used(kind, tmp_path):
    saver = saver_in(tmp_path, save_last=True)
    saver.FILE_EXTENSION = ".weights"
    trainer_of(kind, tmp_path, [1], saver).fit(tiny(PPO, max_env_steps=16))
    assert {path.name for path in (tmp_path / "mine").iterdir()} >= {"step=1.weights", "last.weights"}
    assert PPO.load_from_checkpoint(tmp_path / "mine" / "step=1.weights").env_steps == 16


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_folder_of_its_own_it_saves_in_that_of_the_run(kind, tmp_path):
    saver = ModelCheckpoint(filename="{step}", monitor="eval/mean_reward", mode="max")
    trainer = trainer_of(kind, tmp_path, [1], saver)
    trainer.fit(tiny(PPO, max_env_steps=16))
    run = trainer.run_folder if kind is Trainer else tmp_path
    assert saver.dirpath == str(run / "checkpoints") and (run / "checkpoints" / "step=1.ckpt").is_file()


def test_who_saves_is_chosen_as_in_lightning(tmp_path):
    first, second = saver_in(tmp_path), saver_in(tmp_path, mode="min")
    assert Trainer(default_root_dir=tmp_path, enable_checkpointing=False, accelerator="cpu").checkpoint_callback is None
    alone = trainer_of(Trainer, tmp_path, [], first, second)  # checkpoint=None leaves out ours
    assert alone.checkpoint_callback is first and alone.checkpoint_callbacks == [first, second]
    besides = Trainer(default_root_dir=tmp_path, callbacks=[first], accelerator="cpu")
    assert besides.checkpoint_callback is first and len(besides.checkpoint_callbacks) == 3
    with pytest.raises(MisconfigurationException, match="enable_checkpointing=False"):
        Trainer(default_root_dir=tmp_path, enable_checkpointing=False, callbacks=[first])


# ---------------------------------------------------------------- what is done with them


@without_its_callbacks
@into_a_folder_in_use
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_continues_keeps_the_file_it_came_from_and_compares_with_the_scores_before(kind, tmp_path):
    trainer_of(kind, tmp_path, [3, 1, 2], saver_in(tmp_path, save_top_k=2), max_steps=3).fit(tiny(PPO))
    assert files(tmp_path) == steps(1, 3)
    model, saver = tiny(PPO), saver_in(tmp_path, save_top_k=2)
    trainer = trainer_of(kind, tmp_path, [1, 4, 5], saver)
    trainer.fit(model, ckpt_path=tmp_path / "mine" / "step=3.ckpt", weights_only=True)
    assert model.env_steps == 96 and files(tmp_path) == steps(3, 5, 6)  # 1 is no better than 3 and 2
    assert [float(score) for score in saver.best_k_models.values()] == [4, 5]


@without_its_callbacks
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_continues_in_another_folder_leaves_the_first_alone(kind, tmp_path):
    trainer_of(kind, tmp_path, [3, 1, 2], saver_in(tmp_path, save_top_k=2, save_last=True), max_steps=3).fit(tiny(PPO))
    saver = saver_in(tmp_path / "second", save_top_k=2)
    trainer = trainer_of(kind, tmp_path, [1, 4, 5], saver)
    trainer.fit(tiny(PPO), ckpt_path=tmp_path / "mine" / "last.ckpt", weights_only=True)
    assert files(tmp_path) == ["last.ckpt", *steps(1, 3)] and files(tmp_path / "second") == steps(5, 6)
    assert saver.best_model_path == str(tmp_path / "second" / "mine" / "step=6.ckpt")


@without_its_callbacks
@into_a_folder_in_use
@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_that_is_continued_changes_nothing(kind, tmp_path):
    saver = saver_in(tmp_path)
    trainer_of(kind, tmp_path, RETURNS[:4], saver).fit(tiny(PPO, max_env_steps=64))
    again = tiny(PPO, max_env_steps=64)
    for _ in range(2):
        trainer_of(kind, tmp_path, [], saver_in(tmp_path)).fit(again, ckpt_path=saver.best_model_path, weights_only=True)
        assert again.env_steps == 64 and files(tmp_path) == steps(4)
    assert torch.equal(weights(again), weights(PPO.load_from_checkpoint(saver.best_model_path)))


def test_best_and_last_are_those_of_the_first_callback_that_saves_by_a_metric(tmp_path):
    model, saver = tiny(PPO), saver_in(tmp_path, mode="min", save_last=True)
    newest = ModelCheckpoint(tmp_path / "newest")
    trainer = trainer_of(Trainer, tmp_path, [*RETURNS, 8], newest, saver)
    trainer.fit(model)
    last = weights(model)
    assert trainer.validate(model, ckpt_path="best") == [{"eval/mean_reward": 8, "eval/std_reward": 0, "eval/mean_ep_length": 1}]
    assert torch.equal(weights(model), weights(PPO.load_from_checkpoint(tmp_path / "mine" / "step=2.ckpt")))
    assert trainer.saved("last") == str(tmp_path / "mine" / "last.ckpt") and not torch.equal(weights(model), last)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_weights_alone_is_loaded_but_not_continued(kind, tmp_path):
    model, saver = tiny(PPO, max_env_steps=16), saver_in(tmp_path, save_weights_only=True)
    trainer_of(kind, tmp_path, [1], saver).fit(model)
    assert torch.equal(weights(PPO.load_from_checkpoint(saver.best_model_path)), weights(model))
    trainer = trainer_of(kind, tmp_path, [1], enable_checkpointing=False)
    with pytest.raises((SettingError, KeyError), match=r"only the model|init_from|weights"):
        trainer.fit(tiny(PPO), ckpt_path=saver.best_model_path, weights_only=True)
