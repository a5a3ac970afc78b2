"""Hooks are the user's: whoever overrides one of Lightning's, with or without `super()`, has the run that he would have had without."""

from __future__ import annotations

from itertools import count

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader

from lightning_rl import A2C, DQN, PPO, SAC, EvaluationConfig, SettingError, Trainer, load_policy
from tests.fitting import fit, tiny, weights

NUMBERS = count()
"""A checkpoint finds its class by the name."""
HOOKS = (
    *("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end", "teardown", "prepare_data", "on_save_checkpoint", "on_load_checkpoint"),
)


def overriding(algorithm):
    """A subclass that overrides every hook without `super()`, and what it heard."""
    heard = []

    def hook(name):
        return lambda self, *_, **__: heard.append((name, self.env_steps))

    methods = {name: hook(name) for name in HOOKS} | {"configure_callbacks": lambda self: []}
    return type(f"Overriding{next(NUMBERS)}", (algorithm,), methods), heard


@pytest.mark.parametrize("algorithm", [PPO, SAC, DQN])
def test_hooks_that_are_overridden_without_super_change_nothing(algorithm, tmp_path):
    kind, heard = overriding(algorithm)
    plain, mine = tiny(algorithm), tiny(kind)
    fit(plain)
    fit(mine)
    assert torch.equal(weights(plain), weights(mine)) and mine.env_steps == plain.env_steps
    names = [name for name, _ in heard]
    assert names.index("setup") < names.index("on_train_start") < names.index("on_train_batch_start") < names.index("on_train_end")
    assert names.count("on_train_batch_start") == names.count("on_train_batch_end") > 1


def test_a_hook_that_calls_super_works_once():
    class Mine(PPO):
        def on_train_start(self):
            super().on_train_start()
            assert self.own_optimizers
            started.append(self.run.log_rows)

    started = []
    plain, mine = tiny(PPO), tiny(Mine)
    fit(plain)
    fit(mine)
    assert len(started) == 1 and started[0] is mine.run.log_rows
    assert torch.equal(weights(plain), weights(mine))


def test_schedules_move_on_whatever_hooks_are_overridden(tmp_path):
    kind, _ = overriding(PPO)
    model = tiny(kind, learning_rate={"schedule": "linear", "start": 0.01})
    rates = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            rates.append(module.learning_rate)

    fit(model, callbacks=[Watch()])
    assert rates[0] > rates[1] and model.progress == 1.0


@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_a_checkpoint_saved_under_overridden_hooks_is_whole(algorithm, tmp_path):
    kind, heard = overriding(algorithm)
    trainer = Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False, accelerator="cpu")
    model = tiny(kind)
    trainer.fit(model)
    last = trainer.run_folder / "checkpoints" / "last.ckpt"
    loaded = kind.load_from_checkpoint(last)
    assert torch.equal(weights(loaded), weights(model)) and loaded.env_steps == model.env_steps > 0
    assert load_policy(last).spaces == model.spaces
    assert {"on_save_checkpoint", "on_load_checkpoint"} <= {name for name, _ in heard}


def test_a_users_hook_sees_the_steps_of_its_batch_and_the_evaluation_of_its_iteration(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, module, *_):
            seen.append(("start", module.env_steps))

        def on_train_batch_end(self, trainer, module, *_):
            seen.append(("end", module.env_steps, "eval/mean_reward" in trainer.callback_metrics))

    model = tiny(PPO)
    evaluation = {"episodes": 2, "num_envs": 2, "every_n_env_steps": 1, "max_episode_steps": 10}

    trainer = Trainer(
        default_root_dir=tmp_path,
        evaluation=EvaluationConfig(**evaluation),
        callbacks=[Watch()],
        enable_progress_bar=False,
        accelerator="cpu",
    )
    trainer.fit(model)
    rows = model.n_steps * model.num_envs
    assert seen[:2] == [("start", rows), ("end", rows, True)]


@pytest.mark.parametrize("place", ["module", "callback"])
def test_hooks_around_gradients_fire_in_lightnings_order(place):
    heard = []

    def hook(name):
        return lambda self, *arguments: heard.append((name, len(arguments) - (2 if place == "callback" else 0)))

    names = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
    methods = {name: hook(name) for name in names}
    if place == "module":
        model, callbacks = tiny(type("Mine", (A2C,), methods)), []
    else:
        model, callbacks = tiny(A2C), [type("Heard", (pl.Callback,), methods)()]
    fit(model, callbacks=callbacks)
    once = [("on_before_zero_grad", 1), ("on_before_backward", 1), ("on_after_backward", 0), ("on_before_optimizer_step", 1)]
    assert heard == once * model.updates and model.updates > 0


def test_gradients_are_there_and_not_clipped_before_the_optimizers_step():
    norms = []

    class Norms(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            norms.append(float(torch.cat([p.grad.flatten() for p in module.network.parameters()]).norm()))

    model = tiny(PPO, max_grad_norm=1e-6, n_epochs=1)
    fit(model, callbacks=[Norms()])
    assert len(norms) == model.updates and min(norms) > 1e-4


def test_methods_that_are_never_called_are_named_at_the_start(capsys):
    class Mine(PPO):
        def optimizer_step(self, *_):
            raise AssertionError

        def configure_gradient_clipping(self, *_):
            raise AssertionError

    fit(tiny(Mine))
    said = [line for line in capsys.readouterr().out.splitlines() if "is not called" in line]
    assert [line.partition(" ")[0] for line in said] == ["Mine.optimizer_step", "Mine.configure_gradient_clipping"]


@pytest.mark.parametrize("given", ["method", "argument", "datamodule"])
def test_experience_from_elsewhere_is_refused_in_one_line(given, tmp_path):
    class Mine(PPO):
        def train_dataloader(self):
            return torch.utils.data.DataLoader([1, 2, 3])

    loader = torch.utils.data.DataLoader([1, 2, 3])
    arguments = {"argument": {"train_dataloaders": loader}, "datamodule": {"datamodule": pl.LightningDataModule.from_datasets([1, 2])}}
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": -1}
    with pytest.raises(SettingError, match="learns from its own experience: give fit no dataloaders"):
        pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", **silent).fit(
            tiny(Mine if given == "method" else PPO), **arguments.get(given, {})
        )


class Mixin:
    """Overrides hooks for any algorithm, as a class that is no module."""

    def configure_callbacks(self):
        return []

    def on_train_start(self):
        pass

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1

    def on_load_checkpoint(self, checkpoint):
        self.mine = checkpoint["mine"]


class MixedSAC(Mixin, SAC):
    """Inherits the hooks."""


def test_hooks_of_a_mixin_change_nothing(tmp_path):
    plain, mixed = tiny(SAC), tiny(MixedSAC)
    fit(plain)
    fit(mixed).save_checkpoint(tmp_path / "mixed.ckpt")
    assert torch.equal(weights(plain), weights(mixed)) and mixed.env_steps == 96
    loaded = MixedSAC.load_from_checkpoint(tmp_path / "mixed.ckpt")
    assert (loaded.mine, loaded.env_steps) == (1, 96)


def test_a_hook_that_skips_all_batches_ends_the_run():
    class Skips(PPO):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.env_steps > 32 else None

    model = tiny(Skips)
    assert fit(model).global_step == 2


def test_a_user_defined_train_dataloader_is_refused_in_one_line(tmp_path):
    class Loads(PPO):
        def train_dataloader(self):
            return DataLoader([1, 2])

    with pytest.raises(SettingError, match=r"^Loads learns from its own experience: "):
        Trainer(default_root_dir=tmp_path, accelerator="cpu").fit(tiny(Loads))


@pytest.mark.filterwarnings("default")  # Lightning has its own
def test_steps_of_loops_that_never_run_are_named_at_the_start(capsys):
    class Validates(PPO):
        def validation_step(self, batch, batch_idx):
            pass

        def test_step(self, batch, batch_idx):
            pass

    fit(tiny(Validates), num_sanity_val_steps=0)
    out = capsys.readouterr().out
    assert all(f"Validates.{name} is not called: evaluations play episodes" in out for name in ("validation_step", "test_step"))


def test_data_for_a_test_and_a_misspelt_flag_are_refused_in_one_line(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu")
    with pytest.raises(SettingError, match=r"^PPO is evaluated in its environment"):
        trainer.test(tiny(PPO), dataloaders=[1])
    with pytest.raises(SettingError, match=r"^trainer.max_stepss is not a flag; did you mean max_steps\?$"):
        Trainer(max_stepss=3)


@pytest.mark.parametrize("name", ["end_iteration", "load_run", "log_row", "begin_learning", "finish_learning"])
def test_a_method_that_moved_to_the_run_is_refused_where_a_class_overrides_it(name):
    with pytest.raises(SettingError, match=rf"^Mine\.{name} is not called, since an algorithm is not its run; override one of"):
        type("Mine", (PPO,), {name: lambda self, *arguments: None})
