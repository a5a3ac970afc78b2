"""A run under Lightning: what ends it, what a Trainer keeps of it, and whose learning rate counts."""

from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau

from lightning_rl import DQN, LSTM, PPO, SAC, TD3, EvaluationConfig, RolloutEvaluator, SettingError, Trainer
from lightning_rl.optimization import ScheduledAdam
from tests.fitting import ALL, Rows, fit, tiny, twins_slow, weights

# ---------------------------------------------------------------- its end


class WithItsOwnSetup(PPO):
    """Overrides a hook as Lightning's docs do, without super()."""

    def setup(self, stage):
        self.was_set_up = True


class WithItsOwnTeardown(PPO):
    def teardown(self, stage):
        self.was_torn_down = True


class WithItsOwnCallbacks(PPO):
    def configure_callbacks(self):
        return pl.callbacks.Timer()


class Mixin:
    def configure_callbacks(self):
        return []


class WithAMixin(Mixin, PPO):
    pass


@pytest.mark.parametrize("algorithm", [WithItsOwnSetup, WithItsOwnTeardown, WithItsOwnCallbacks, WithAMixin])
def test_a_run_ends_at_its_length_whatever_hook_a_subclass_overrides(algorithm):
    model = tiny(algorithm)
    trainer = fit(model, max_steps=10)
    assert (model.env_steps, trainer.global_step, model.dataset) == (96, 6, None)


@pytest.mark.thorough
def test_a_subclass_adds_callbacks_to_those_of_the_algorithm():
    class Mine(SAC):
        def configure_callbacks(self):
            return [pl.callbacks.Timer()]

    class MineAndTheirs(Mine):
        def configure_callbacks(self):
            return [*super().configure_callbacks(), pl.callbacks.LambdaCallback()]

    for algorithm, added in [(Mine, ["Timer"]), (MineAndTheirs, ["Timer", "LambdaCallback"])]:
        kinds = Kinds()
        fit(tiny(algorithm), callbacks=[kinds])
        assert sorted(kinds.seen) == sorted(["Kinds", "EndIteration", "CloseIteration", "EndRun", "TargetNetworkUpdate", *added])


class Kinds(pl.Callback):
    """The callbacks of a run."""

    def on_train_start(self, trainer, pl_module):
        self.seen = [type(each).__name__ for each in trainer.callbacks if type(each).__name__ != "TQDMProgressBar"]


@pytest.mark.parametrize("algorithm", twins_slow(ALL))
def test_a_run_goes_on_and_ends_where_lightning_reloads_the_data_each_epoch(algorithm):
    model, rows = tiny(algorithm), Rows()
    trainer = fit(model, logger=rows, reload_dataloaders_every_n_epochs=1, limit_train_batches=2, max_steps=10)
    assert [step for step, row in rows.rows if "train/n_updates" in row] == [16, 32, 48, 64, 80, 96]
    assert (trainer.global_step, trainer.current_epoch) == (6, 3)


# ---------------------------------------------------------------- a Trainer that is used twice


def trainer_of(kind, **arguments):
    quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    own = {"evaluation": None} if kind is Trainer else {"enable_model_summary": False, "max_epochs": -1}
    return kind(**quiet | own | arguments)


class Taus(pl.Callback):
    """The speed of the target networks in each run."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        self.seen.append([each.tau for each in trainer.callbacks if hasattr(each, "tau")])


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_a_trainer_that_is_used_again_follows_the_second_model(kind, folder):
    taus = Taus()
    trainer = trainer_of(kind, callbacks=[taus])
    for model in (tiny(SAC, tau=0.005), tiny(SAC, tau=1.0), tiny(PPO)):
        trainer.fit(model)
    assert taus.seen == [[0.005], [1.0], []]


def test_callbacks_of_a_model_leave_when_the_next_one_comes_also_after_an_error():
    begun = []
    trainer = trainer_of(pl.Trainer, callbacks=[pl.callbacks.LambdaCallback(on_train_start=lambda *_: begun.append(1) or 1 / 0)])
    before, ours = list(trainer.callbacks), ["EndIteration", "EndRun"]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.fit(tiny(SAC))
    assert [type(each).__name__ for each in trainer.callbacks if each not in before] == [*ours, "TargetNetworkUpdate", "CloseIteration"]
    with pytest.raises(ZeroDivisionError):
        trainer.fit(tiny(PPO))
    assert [type(each).__name__ for each in trainer.callbacks if each not in before] == [*ours, "CloseIteration"]
    assert len(begun) == 3


@pytest.mark.parametrize("kind", [Trainer, pl.Trainer])
def test_callbacks_that_are_added_or_taken_away_between_two_runs_stay_so(kind, folder):
    first, second = Taus(), Taus()
    trainer = trainer_of(kind, callbacks=[first])
    trainer.fit(tiny(SAC, tau=0.5))
    trainer.callbacks.remove(first)
    trainer.callbacks.append(second)
    trainer.fit(tiny(SAC, tau=1.0))
    assert (first.seen, second.seen) == ([[0.5]], [[1.0]])


class Lessons(pl.Callback):
    """The lessons in which each run begins, and whether evaluations play them too."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if pl_module.began_at == pl_module.began:
            (evaluator,) = (each for each in trainer.callbacks if isinstance(each, RolloutEvaluator))
            held = [dict(each.lessons) for each in trainer.callbacks if hasattr(each, "lessons")]
            self.seen.append((held, list(evaluator.variants)))


def lessons(*criteria):
    """A lesson for each criterion, and a final one."""
    return {"curriculum": [*({"value": 1.0, "completion_criteria": each} for each in criteria), {"value": 2.0}]}


@pytest.mark.thorough
def test_a_trainer_that_is_used_again_plays_the_lessons_of_the_second_environment(folder):
    seen = Lessons()
    trainer = trainer_of(Trainer, callbacks=[seen], evaluation=EvaluationConfig(episodes=1, max_episode_steps=5))
    easy = {"parameters": {"length": lessons({"measure": "reward", "threshold": 1, "min_lesson_length": 1}, {"threshold": 1e6})}}
    hard = {"parameters": {"gravity": lessons({"threshold": 1e6})}}
    first, other, none = (tiny(PPO, "CartPole-v1", env=env) for env in (easy, hard, {}))
    for model in (first, other, first, none):
        model.began, model.max_env_steps = model.env_steps, model.env_steps + 96
        trainer.fit(model)
    assert seen.seen == [
        ([{"length": 0}], ["lesson"]),
        ([{"gravity": 0}], ["lesson"]),
        ([{"length": 1}], ["lesson"]),  # where it was
        ([], []),
    ]


# ---------------------------------------------------------------- the learning rate


class WithAScheduler(PPO):
    """A learning rate of its own, which falls to a hundredth over four iterations."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.network.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": CosineAnnealingLR(optimizer, 4, eta_min=1e-4)}


class WithOursScheduled(PPO):
    """The algorithm's own optimizer, halved each other iteration."""

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return optimizers, [{"scheduler": LambdaLR(optimizers[0], lambda step: 0.5**step), "frequency": 2}]


class WithoutAScheduler(PPO):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.network.parameters(), lr=0.02)


class FollowingOurs(PPO):
    def configure_optimizers(self):
        return self.with_side_learners(ScheduledAdam(self.network))


FALLING = {"learning_rate": {"schedule": "linear", "start": 6e-3}}
COSINE = [0.01, 0.0085501786, 0.00505, 0.0015498214, 0.0001, 0.0015498214]
"""η_min + (η − η_min) (1 + cos(π t / 4)) / 2 for t = 0 … 5."""


@pytest.mark.parametrize(
    ("algorithm", "settings", "rates"),
    [
        (WithAScheduler, FALLING, COSINE),
        (WithOursScheduled, {"learning_rate": 8e-3}, [8e-3, 8e-3, 4e-3, 4e-3, 2e-3, 2e-3]),
        (WithoutAScheduler, FALLING, [0.02] * 6),
        (FollowingOurs, FALLING, [6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3]),
        (PPO, FALLING, [6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3]),
    ],
)
def test_a_learning_rate_of_a_users_optimizer_is_kept_and_its_scheduler_stepped_once_an_iteration(algorithm, settings, rates):
    model, rows, used = tiny(algorithm, **settings), Rows(), []
    training_step = model.training_step

    def watched(*batch):
        used.append(model.own_optimizers[0].param_groups[0]["lr"])
        training_step(*batch)

    model.training_step = watched
    fit(model, logger=rows)
    assert used == pytest.approx(rates)
    assert [row["train/learning_rate"] for _, row in rows.rows if "train/learning_rate" in row] == pytest.approx(rates)


def test_a_resumed_run_continues_in_the_users_schedule(tmp_path):
    model, rows = tiny(WithAScheduler, max_env_steps=48), Rows()
    fit(model).save_checkpoint(tmp_path / "half.ckpt")
    fit(tiny(WithAScheduler, max_env_steps=96), ckpt_path=tmp_path / "half.ckpt", logger=rows)
    assert [row["train/learning_rate"] for _, row in rows.rows if "train/learning_rate" in row] == pytest.approx(COSINE[3:])


class OneOptimizer(LightningCLI):
    """Knows one optimizer and one scheduler, which is faster to parse than all of torch's."""

    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_lr_scheduler_args(CosineAnnealingLR)


@pytest.mark.thorough
def test_lightnings_command_line_chooses_optimizer_learning_rate_and_scheduler(folder):
    settings = "--model.env.id tests.environments:Scripted-v0 --model.env.num_envs 2 --model.n_steps 8 --model.batch_size 16"
    chosen = "--optimizer.lr 0.01 --lr_scheduler.T_max 4 --lr_scheduler.eta_min 1e-4"
    flags = "--trainer.accelerator cpu --trainer.max_epochs=-1 --trainer.log_every_n_steps 1 --trainer.logger tests.fitting.Rows"
    quiet = [f"--trainer.enable_{part}=false" for part in ("checkpointing", "progress_bar", "model_summary")]
    arguments = ["fit", *f"{settings} --model.max_env_steps 96 {chosen} {flags}".split(), *quiet]
    with pytest.warns(UserWarning, match="configure_optimizers` will be overridden"):
        cli = OneOptimizer(PPO, args=arguments, save_config_callback=None, seed_everything_default=0)
    assert [row["train/learning_rate"] for _, row in cli.trainer.logger.rows if "train/learning_rate" in row] == pytest.approx(COSINE)


class OnAPlateau(PPO):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.network.parameters())
        return [optimizer], [ReduceLROnPlateau(optimizer)]


def test_a_scheduler_that_waits_for_a_plateau_is_refused_in_one_line():
    with pytest.raises(SettingError, match=r"^ReduceLROnPlateau needs a metric, .* in on_evaluation_end$"):
        fit(tiny(OnAPlateau))


@pytest.mark.parametrize(("algorithm", "settings", "needed"), [(SAC, {}, 3), (SAC, {"ent_coef": 0.1}, 2), (TD3, {}, 2)])
def test_one_optimizer_where_several_are_needed_is_refused_in_one_line(algorithm, settings, needed):
    model = tiny(algorithm, **settings)
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=0.01)  # as LightningCLI does
    with pytest.raises(SettingError, match=rf"^{algorithm.__name__} needs {needed} optimizers, got 1: "):
        fit(model)


@pytest.mark.thorough
def test_a_learning_rate_that_nothing_follows_is_named(capsys):
    for setting, line in ({"learning_rate": 1e-3}, 0.001), ({}, 0.0003):  # the default too
        fit(tiny(WithoutAScheduler, **setting))
        assert f"learning_rate {line} is not used: AdamW of configure_optimizers has its own, 0.02" in capsys.readouterr().out
    fit(tiny(WithoutAScheduler, learning_rate=0.02))
    assert "learning_rate" not in capsys.readouterr().out


class WithoutAnOptimizer(PPO):
    """Learns nothing by gradients, as an algorithm that counts would."""

    def training_step(self, rollout, batch_idx):
        self.end_update(rollout)

    def configure_optimizers(self):
        return None


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_an_algorithm_without_an_optimizer_runs_and_logs_no_learning_rate():
    logger = Rows()
    fit(tiny(WithoutAnOptimizer, log_interval=1), logger=logger)
    assert len(logger.rows) == 6 and all("train/learning_rate" not in row for _, row in logger.rows)


def test_a_scheduler_may_be_added_to_a_run_that_continues(tmp_path):
    fit(tiny(WithoutAScheduler, max_env_steps=48)).save_checkpoint(tmp_path / "half.ckpt")
    model = tiny(WithAScheduler)
    fit(model, tmp_path / "half.ckpt")
    assert model.env_steps == 96


# ---------------------------------------------------------------- a fast dev run

SLOW_TO_LEARN = {"learning_starts": 1000, "buffer_size": 2000}
SEQUENCES = {"memory": LSTM(4, 8), "batch_size": 16}


@pytest.mark.parametrize("settings", [{}, {"train_freq": 40, "gradient_steps": 2}, {"n_steps": 20}, SEQUENCES])
@pytest.mark.parametrize("algorithm", [SAC, TD3, DQN])
def test_a_fast_dev_run_runs_the_loss(algorithm, settings, capsys):
    model = tiny(algorithm, **SLOW_TO_LEARN | settings)
    before = weights(model)
    trainer = fit(model, fast_dev_run=True)
    assert trainer.global_step == 1 and 2 <= model.updates <= 8 and model.env_steps < 96
    assert not torch.equal(weights(model), before)  # TD3's policy too, which waits for the second update
    assert "ends before it learns" not in capsys.readouterr().out
