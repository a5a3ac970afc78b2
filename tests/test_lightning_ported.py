"""Lightning's own tests of hooks and early stopping, for algorithms: an evaluation stands where they have an epoch with a validation.

They stand for `models/test_hooks.py` and `callbacks/test_early_stopping.py` of Lightning 2.6, with other models and numbers.
"""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason as Reason
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks

from lightning_rl import PPO, SAC, RolloutEvaluator, SettingError, Trainer
from tests.fitting import fit, tiny, weights
from tests.ported import KINDS, trainer_of

# ---------------------------------------------------------------- hooks

NOT_OURS = {"configure_sharded_model", "val_dataloader", "test_dataloader", "predict_dataloader"}
OF_MODULES = {name for hooks in (CheckpointHooks, DataHooks, ModelHooks) for name in vars(hooks) if not name.startswith("_")} - NOT_OURS
OF_MODULES |= {"configure_callbacks", "configure_optimizers", "training_step", "backward", "optimizer_step", "lr_scheduler_step"}
OF_CALLBACKS = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict")]


def listening(algorithm, heard):
    """A subclass that notes its hooks and then does as its parent."""

    def hook(name):
        def both(self, *args, **kwargs):
            heard.append(name)
            return getattr(super(mine, self), name)(*args, **kwargs)

        return both

    mine = type(f"Listening{algorithm.__name__}", (algorithm,), {name: hook(name) for name in OF_MODULES})
    return mine


def listener(heard):
    """A callback that notes its hooks, under names that begin with a star, and has a state."""

    def hook(name):
        return lambda *_, **__: heard.append(f"*{name}")

    methods = {name: hook(name) for name in OF_CALLBACKS}
    return type("Listener", (pl.Callback,), {**methods, "state_dict": lambda self: heard.append("*state_dict") or {"foo": 1}})()


def both(*names):
    """Hooks that callbacks hear first, and then the module."""
    return [each for name in names for each in (f"*{name}", name)]


BEGIN = ["configure_callbacks", "prepare_data", *both("setup"), "configure_model"]
LOAD = ["on_load_checkpoint", "*on_load_checkpoint", "*load_state_dict"]
START = ["configure_optimizers", *both("on_fit_start"), "train_dataloader", *both("on_train_start")]
BATCH = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", *both("on_train_batch_start"), "training_step"]
GRADIENT = both("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
EVALUATION = both("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end", "on_validation_end")
SAVE = ["*state_dict", "*on_save_checkpoint", "on_save_checkpoint"]
END = both("on_train_end", "on_fit_end", "teardown")


def iterations(*gradient_steps):
    return [each for steps in gradient_steps for each in (*BATCH, *GRADIENT * steps, *EVALUATION, *both("on_train_batch_end"))]


ONE_STEP = {"n_epochs": 1, "batch_size": 16}
"""PPO: an iteration of 16 samples is one gradient step. SAC learns from its second iteration on: 4 updates of 3 optimizers."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("algorithm", "settings", "steps"), [(PPO, ONE_STEP, (1, 1)), (SAC, {}, (0, 12))])
def test_a_fit_calls_hooks_in_lightnings_order(kind, algorithm, settings, steps, tmp_path):
    heard = []
    model = tiny(listening(algorithm, heard), max_env_steps=32, **settings)
    trainer = trainer_of(kind, tmp_path, [1, 2], listener(heard), ModelCheckpoint(tmp_path / "mine"))
    heard.clear()
    trainer.fit(model)
    epoch = [*both("on_train_epoch_start"), *iterations(*steps), *both("on_train_epoch_end"), *SAVE]
    assert heard == [*BEGIN, *START, *epoch, *END]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # that the callback which saved is not there
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("saved_at", [1, 2])
def test_a_fit_that_continues_loads_after_setup_and_before_the_optimizers(kind, saved_at, tmp_path):
    heard = []
    algorithm = listening(PPO, heard)
    saver = ModelCheckpoint(tmp_path / "mine", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer_of(kind, tmp_path, [1] * saved_at, listener([]), saver, max_steps=saved_at).fit(tiny(algorithm, **ONE_STEP))
    model = tiny(algorithm, max_env_steps=(saved_at + 2) * 16, **ONE_STEP)
    trainer = trainer_of(kind, tmp_path, [1, 2], listener(heard), enable_checkpointing=False)
    heard.clear()
    trainer.fit(model, ckpt_path=tmp_path / "mine" / f"step={saved_at}.ckpt", weights_only=True)
    goes_on = heard[heard.index("configure_callbacks") :]  # our Trainer has looked at the optimizers before
    # the epoch that was begun goes on, without a new start
    assert goes_on == [*BEGIN, *LOAD, *START, *iterations(1, 1), *both("on_train_epoch_end"), *END]


def test_validate_test_and_predict_play_without_hooks(tmp_path):
    heard = []
    model = tiny(listening(PPO, heard))
    trainer = trainer_of(Trainer, tmp_path, [1, 2, 3], listener(heard))
    heard.clear()
    assert trainer.validate(model)[0]["eval/mean_reward"] == trainer.callback_metrics["eval/mean_reward"] == 1
    assert [episode.return_ for episode in trainer.predict(model)] == [2]
    assert trainer.test(model)[0]["test/mean_reward"] == pytest.approx(float(trainer.callback_metrics["test/mean_reward"]))
    assert heard == []


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_may_name_their_arguments_as_they_like(kind, tmp_path):
    class Mine(PPO):
        def training_step(self, rollout, number):
            seen.append(number)
            return super().training_step(rollout, number)

        def on_train_batch_end(self, outcome, rollout, number):
            seen.append(-number)

    seen = []
    trainer_of(kind, tmp_path, [1, 2], enable_checkpointing=False).fit(tiny(Mine, max_env_steps=32))
    assert seen == [0, 0, 1, -1]


@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_parts_that_were_in_evaluation_mode_stay_so_and_all_the_others_are_in_training_mode(tmp_path):
    class Mine(PPO):
        def training_step(self, batch, batch_idx):
            modes.append([part.training for part in self.network.modules() if part is not frozen])
            frozen_modes.append(frozen.training)
            super().training_step(batch, batch_idx)

    modes, frozen_modes = [], []
    model = tiny(Mine, max_env_steps=48)
    frozen = next(part for part in model.network.modules() if not list(part.children()))
    frozen.eval()
    fit(model, callbacks=[RolloutEvaluator(16, episodes=1)])
    assert frozen_modes == [False] * 3 and all(all(each) for each in modes)


class WithHead(PPO):
    """Has a part that `configure_model` makes."""

    def configure_model(self):
        if not hasattr(self, "head"):
            self.head = torch.nn.Linear(2, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_what_configure_model_makes_is_saved_loaded_and_continued(kind, tmp_path):
    model, again = tiny(WithHead, max_env_steps=16), tiny(WithHead, max_env_steps=32)
    trainer = trainer_of(kind, tmp_path, [1], enable_checkpointing=False)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(WithHead.load_from_checkpoint(tmp_path / "a.ckpt").head.weight, model.head.weight)
    trainer_of(kind, tmp_path, [1], enable_checkpointing=False).fit(again, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(again.head.weight, model.head.weight) and again.env_steps == 32


@pytest.mark.parametrize("kind", KINDS)
def test_what_hooks_log_in_an_evaluation_is_a_metric_of_it_even_at_the_end_of_a_run(kind, tmp_path):
    class Mine(PPO):
        def on_validation_epoch_end(self):
            assert self.trainer.validating and not self.trainer.training
            self.log("val/steps", float(self.env_steps))

    class Heard(pl.Callback):
        def on_evaluation_end(self, trainer, algorithm, metrics):
            found.append((metrics["val/steps"], trainer.callback_metrics["val/steps"]))

    found = []
    evaluator = RolloutEvaluator(32, episodes=1)
    trainer = trainer_of(kind, tmp_path, [], Heard(), enable_checkpointing=False, max_steps=3)
    trainer.callbacks[0] = evaluator
    trainer.fit(tiny(Mine))
    assert found == [(32, 32), (48, 48)] and trainer.training is False


# ---------------------------------------------------------------- early stopping


@pytest.mark.variants
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "returns", "evaluations", "reason"),
    [
        ({"mode": "min", "patience": 2}, [6, 5, 5, 7, 4, 3], 4, Reason.PATIENCE_EXHAUSTED),  # a tie, then a worse one
        ({"mode": "max", "patience": 2, "min_delta": 1.0}, [1, 1.5, 2.5, 3, 3.5, 9], 5, Reason.PATIENCE_EXHAUSTED),  # 3.5 = 2.5 + 1
        ({"mode": "max", "stopping_threshold": 4.0}, [1, 4, 4.5, 5, 6, 7], 3, Reason.STOPPING_THRESHOLD),  # 4 is not beyond 4
        ({"mode": "max", "divergence_threshold": -9.0}, [1, -9, -10, 5, 6, 7], 3, Reason.DIVERGENCE_THRESHOLD),
        ({"mode": "max"}, [1, float("nan"), 3, 4, 5, 6], 2, Reason.NON_FINITE_METRIC),
        ({"mode": "max", "check_finite": False}, [1, float("nan"), 3, 4, 5, 6], 6, Reason.NOT_STOPPED),
        ({"mode": "max", "patience": 3}, [1, 1, 1, 2, 1, 1], 6, Reason.NOT_STOPPED),  # the 2 comes in time
    ],
)
def test_early_stopping_follows_evaluations_by_each_of_its_settings(kind, settings, returns, evaluations, reason, tmp_path):
    model, stop = tiny(PPO), EarlyStopping("eval/mean_reward", **settings)
    trainer_of(kind, tmp_path, returns, stop, enable_checkpointing=False).fit(model)
    assert (model.env_steps, stop.stopping_reason) == (16 * evaluations, reason)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_early_stopping_looks_once_at_each_evaluation(kind, tmp_path, monkeypatch):
    looked, stop = [], EarlyStopping("eval/mean_reward")
    monkeypatch.setattr(stop, "_run_early_stopping_check", lambda trainer: looked.append(trainer.lightning_module.env_steps))
    trainer = trainer_of(kind, tmp_path, [1, 2, 3, 4, 5, 6], stop, enable_checkpointing=False)
    trainer.fit(tiny(PPO))
    assert looked == [16, 32, 48, 64, 80, 96]
    assert trainer.early_stopping_callback is stop and trainer.early_stopping_callbacks == [stop]


@pytest.mark.parametrize("first", [0, 1])
def test_of_several_the_first_that_is_met_stops_the_run(first, tmp_path):
    stops = [EarlyStopping("eval/mean_reward", mode="max", patience=2), EarlyStopping("eval/mean_ep_length", patience=4)]
    model = tiny(PPO)  # the third 3 stops it; lengths are all 1, which would at the fifth
    trainer = trainer_of(Trainer, tmp_path, [3, 3, 3, 9, 9, 9], stops[first], stops[1 - first], enable_checkpointing=False)
    trainer.fit(model)
    assert model.env_steps == 48 and len(trainer.early_stopping_callbacks) == 2


@pytest.mark.parametrize(
    ("kind", "flags", "iterations"),
    [
        (Trainer, {"min_steps": 4}, 4),
        (pl.Trainer, {"min_steps": 4, "min_epochs": 0}, 4),  # without it Lightning asks for an epoch
        (Trainer, {"min_steps": 1}, 2),
        (Trainer, {"min_epochs": 2, "limit_train_batches": 2}, 4),
        (pl.Trainer, {"min_epochs": 2, "limit_train_batches": 2}, 4),
        (Trainer, {"min_epochs": 1, "min_steps": 5, "limit_train_batches": 3}, 5),
        (pl.Trainer, {"min_epochs": 1, "min_steps": 5, "limit_train_batches": 3}, 5),
    ],
)
def test_a_run_does_not_stop_before_its_least_number_of_steps_and_epochs(kind, flags, iterations, tmp_path):
    model, stop = tiny(PPO), EarlyStopping("eval/mean_reward", mode="max", patience=1)  # at the second
    trainer_of(kind, tmp_path, [1, 0, 0, 0, 0, 0], stop, enable_checkpointing=False, **flags).fit(model)
    assert model.env_steps == 16 * iterations


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("kind", KINDS)
def test_early_stopping_goes_on_counting_where_its_checkpoint_was_saved(kind, tmp_path):
    def stop():
        return EarlyStopping("eval/mean_reward", mode="max", patience=3)

    saver = ModelCheckpoint(tmp_path / "mine", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer_of(kind, tmp_path, [3, 1, 2], stop(), saver, max_steps=3).fit(tiny(PPO))
    stored = torch.load(tmp_path / "mine" / "step=3.ckpt", weights_only=True)["callbacks"]
    state = stored["EarlyStopping{'monitor': 'eval/mean_reward', 'mode': 'max'}"]
    assert (state["wait_count"], state["best_score"]) == (2, 3)
    model, again = tiny(PPO), stop()
    trainer = trainer_of(kind, tmp_path, [1, 9, 9], again, enable_checkpointing=False)
    trainer.fit(model, ckpt_path=tmp_path / "mine" / "step=3.ckpt", weights_only=True)
    assert (model.env_steps, again.wait_count, again.best_score) == (64, 3, 3)  # the first evaluation is the third without a better one


def test_a_verbose_early_stopping_prints_what_improved_and_why_it_stops(tmp_path, caplog):
    stop = EarlyStopping("eval/mean_reward", mode="max", patience=1, verbose=True)
    trainer_of(Trainer, tmp_path, [1, 3, 2], stop, enable_checkpointing=False).fit(tiny(PPO))
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("early_stopping")]
    beginnings = ["Metric eval/mean_reward improved.", "Metric eval/mean_reward improved by 2.000", "Monitored metric eval/mean_reward did"]
    assert [line.startswith(beginning) for line, beginning in zip(lines, beginnings, strict=True)] == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "settings"), [("val/steps", {}), ("val_steps", {}), ("steps", {"check_on_train_epoch_end": False})])
def test_early_stopping_follows_what_a_hook_logs_in_evaluations(kind, name, settings, tmp_path):
    class Mine(PPO):
        def on_validation_epoch_end(self):
            self.log(name, float(self.env_steps))

    model = tiny(Mine)
    stop = EarlyStopping(name, mode="max", stopping_threshold=40.0, **settings)
    trainer_of(kind, tmp_path, [1, 2, 3, 4, 5, 6], stop, enable_checkpointing=False).fit(model)
    assert model.env_steps == 48


@pytest.mark.parametrize("kind", KINDS)
def test_early_stopping_at_the_end_of_epochs_follows_what_training_logs(kind, tmp_path):
    class Mine(PPO):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            self.log("index", float(batch_idx), on_epoch=True)

    model = tiny(Mine)  # an epoch of two iterations has the mean of 0 and 1, and the second is not better
    stop = EarlyStopping("index", patience=1, check_on_train_epoch_end=True)
    trainer_of(kind, tmp_path, [1] * 6, stop, enable_checkpointing=False, limit_train_batches=2).fit(model)
    assert model.env_steps == 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_that_is_missing_stops_nothing_where_its_user_allows_that(kind, tmp_path):
    model = tiny(PPO)
    trainer_of(kind, tmp_path, [1] * 6, EarlyStopping("val/none", strict=False), enable_checkpointing=False).fit(model)
    assert model.env_steps == 96
    with pytest.raises(SettingError, match=r"^EarlyStopping: monitor 'val/none' is not a metric of evaluations"):
        trainer_of(kind, tmp_path, [1], EarlyStopping("val/none"), enable_checkpointing=False).fit(tiny(PPO))


def test_an_unknown_mode_is_lightnings_error():
    with pytest.raises(MisconfigurationException, match="`mode` can be"):
        EarlyStopping("eval/mean_reward", mode="most")


@pytest.mark.parametrize("given", ["train_dataloaders", "val_dataloaders", "datamodule"])
def test_our_trainer_refuses_data_before_it_begins(given, tmp_path):
    data = pl.LightningDataModule.from_datasets([1]) if given == "datamodule" else torch.utils.data.DataLoader([1])
    model = tiny(PPO)
    before = weights(model)
    with pytest.raises(SettingError, match="learns from its own experience: give fit no dataloaders"):
        Trainer(default_root_dir=tmp_path, accelerator="cpu").fit(model, **{given: data})
    assert torch.equal(weights(model), before) and list(tmp_path.iterdir()) == []
