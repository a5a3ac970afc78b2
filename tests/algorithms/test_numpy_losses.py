"""`compile: auto`: small losses in numpy, which is never more than another way to the same numbers."""

import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import lightning_rl as lrl
from lightning_rl.algorithms import numpy_losses
from lightning_rl.data.minibatch import make_batch
from lightning_rl.errors import NotFiniteError
from lightning_rl.networks.mlp import ACTIVATIONS
from lightning_rl.schedules import make_schedule
from tests.algorithms.test_compiled import CASES, learned
from tests.fitting import fit, tiny, weights


@pytest.fixture
def at_once(monkeypatch):
    """Numpy from the first update on."""
    monkeypatch.setattr(numpy_losses, "UPDATES_BEFORE", 0)


class Watch(pl.Callback):
    """Counts the programs of each loss after each iteration, and how often one was made, and does something before a few."""

    def __init__(self, **actions):
        self.actions, self.counts, self.made = actions, [], []

    def on_train_batch_start(self, trainer, model, *_):
        self.actions.get(f"at_{trainer.global_step}", lambda model: None)(model)

    def on_train_batch_end(self, trainer, model, *_):
        losses = model.compiled.values()
        self.counts.append([sum(program is not None for program in loss.programs.values()) for loss in losses])
        self.made.append([getattr(loss, "made", None) for loss in losses])


def both(algorithm, watch=Watch, **settings):
    """The weights of a tiny model that learned in torch, and of one that did in numpy, and what was seen of the second."""
    results = []
    for compile in (False, "auto"):
        model, watching = tiny(algorithm, compile=compile, **settings), watch()
        pl.seed_everything(3, verbose=False)
        fit(model, callbacks=[watching])
        results.append(weights(model))
    return *results, watching


@pytest.mark.parametrize("case", [case for case in CASES if case != "PPO images"])
def test_a_loss_in_numpy_learns_and_logs_the_same(case, at_once):
    watch = Watch()
    (plain, rows, _), (model, others, _) = learned(case, False), learned(case, "auto", watch)
    assert plain.updates == model.updates > 0 and watch.counts[-1] == [1] * len(model.losses)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, atol=2e-6, rtol=1e-4, msg=name)
    for (_, row), (_, other) in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in row:
            if name.startswith("train/") and name != "train/rho_clip_fraction":  # which counts ratios above 1, where most are 1
                assert other[name] == pytest.approx(row[name], abs=1e-5, rel=1e-4, nan_ok=True), name


def test_a_run_begins_as_it_is_written_and_goes_on_in_numpy():
    watch = Watch()
    model = tiny(lrl.PPO, max_env_steps=16 * 27)
    fit(model, callbacks=[watch])
    assert watch.counts == [[0]] * 25 + [[1]] * 2 and model.updates == 27 * 4  # from update 100 on


def renewed(model):
    """With a new optimizer."""
    model.trainer.optimizers = model.configure_optimizers()


CHANGES = {
    "a number": lambda model: setattr(model, "vf_coef", 3.0),
    "a schedule": lambda model: setattr(model, "ent_coef", make_schedule("ent_coef", 50.0)),
    "an object of somebody else": lambda model: setattr(model, "ent_coef", Fifty()),
    "a module": lambda model: setattr(model.network.critic, "1", nn.ReLU()),
    "a method": lambda model: setattr(model.network.value_head, "loss", lambda z, returns: (z - returns).abs()),
    "the loss": lambda model: setattr(model, "loss", lambda batch: (model.network.value(batch.obs).square().mean(), None)),
    "a hook": lambda model: model.network.critic[0].register_forward_hook(lambda module, inputs, y: 1.1 * y),
    "a hook of a parameter": lambda model: model.network.critic[0].weight.register_hook(lambda gradient: 2 * gradient),
    "the numbers of a parameter": lambda model: setattr(model.network.critic[0].weight, "data", model.network.critic[0].weight + 1),
    "a parameter": lambda model: setattr(model.network.critic[0], "weight", nn.Parameter(model.network.critic[0].weight + 1)),
    "a buffer": lambda model: setattr(
        next(iter(model.network.normalizer.statistics.children())), "mean", torch.ones(2, dtype=torch.float64)
    ),
    "the optimizer": renewed,
}


class Fifty:
    """A schedule of a user."""

    def __call__(self, progress):
        return 50.0


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_counts_from_then_on(change, at_once):
    settings = {"normalize_obs": "frozen", "normalize_obs_steps": 16} if change == "a buffer" else {}
    plain, found, watch = both(lrl.PPO, lambda: Watch(at_3=CHANGES[change]), **settings)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    unchanged, *_ = both(lrl.PPO, **settings)
    assert (plain - unchanged).abs().max() > 2e-5
    assert watch.counts[2] == [1]


def test_what_changes_inside_an_object_counts_from_then_on(at_once):
    def change(model):
        model.clips["clip_rho"] = 0.1

    plain, found, watch = both(lrl.IMPALA, lambda: Watch(at_3=change))
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    assert watch.counts == [[1]] * 6 and watch.made[2:4] == [[1], [2]]


def test_what_a_callback_changes_between_updates_counts_at_once(at_once):
    class Follows(Watch):
        def on_update_end(self, trainer, model):
            model.vf_coef += 0.5 * (model.updates % 4 == 1)

    plain, found, watch = both(lrl.PPO, Follows)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    assert watch.made[0] == [2]


def test_what_changes_again_and_again_is_left_to_torch_and_one_line_says_so(at_once, capsys):
    def change(model):
        model.vf_coef += 0.01

    actions = {f"at_{k}": change for k in range(30)}
    plain, found, watch = both(lrl.A2C, lambda: Watch(**actions), max_env_steps=16 * 30)
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-4)
    assert watch.counts == [[1]] * numpy_losses.MOST_PROGRAMS + [[0]] * (30 - numpy_losses.MOST_PROGRAMS)
    assert capsys.readouterr().out.count("compile auto: A2C.loss is left to torch: what it reads changed 16 times\n") == 1


def test_two_losses_of_one_step_add_up(at_once):
    class Twice(lrl.A2C):
        __module__ = lrl.A2C.__module__

        def training_step(self, rollout, batch_idx):
            batch = make_batch(*self.prepare(rollout), self.gae_lambda)
            with self.learning():
                one = self.loss(batch)
                other = self.loss(batch._replace(advantage=batch.advantage + 1))
                self.step(one + other, self.raw_optimizers()[0])
                self.end_update(batch)

    plain, found, watch = both(Twice)
    assert watch.counts[-1] == [1]
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-4)


class Own(lrl.PPO):
    """Counts in its loss, which a trace would see once."""

    calls = 0

    def loss(self, minibatch):
        self.calls += 1
        return super().loss(minibatch)


class Layer(nn.Linear):
    """Not ours, and not torch's."""


def test_a_loss_or_a_network_of_somebody_else_is_run_as_it_is_written(at_once):
    watch, model = Watch(), tiny(Own)
    fit(model, callbacks=[watch])
    assert model.calls == model.updates == 24 and watch.counts == [[]] * 6
    model = tiny(lrl.PPO)
    model.network.critic[0] = Layer(*reversed(model.network.critic[0].weight.shape))
    watch = Watch()
    fit(model, callbacks=[watch])
    assert watch.counts == [[]] * 6


@pytest.mark.parametrize(
    "settings", [{"net_arch": [256]}, {"memory": lrl.LSTM(4, 4)}, {"compile": False}, {"precision": "bf16-mixed"}], ids=str
)
def test_wide_layers_memory_and_other_precisions_are_left_to_torch(settings, at_once):
    arguments = {"precision": settings.pop("precision")} if "precision" in settings else {}
    watch = Watch()
    fit(tiny(lrl.A2C, **settings), callbacks=[watch], **arguments)
    assert watch.counts == [[]] * 6


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_learns_the_same_in_numpy(activation, at_once):
    plain, found, watch = both(lrl.A2C, activation=activation)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)
    assert watch.counts[-1] == [1]


def test_a_loss_that_numpy_cannot_compute_goes_on_in_torch_and_one_line_says_so(at_once, capsys):
    model, watch = tiny(lrl.A2C), Watch()
    model.network.critic[1] = nn.LayerNorm(model.network.critic[0].out_features)
    fit(model, callbacks=[watch])
    assert watch.counts == [[0]] * 6
    line = "compile auto: A2C.loss is left to torch: NotInNumpy: aten.native_layer_norm.default"
    assert capsys.readouterr().out.splitlines().count(line) == 1


@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.DQN])
@pytest.mark.parametrize("compile", ["auto", pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stopped_at", [10, 30])
def test_a_run_that_was_stopped_and_continued_is_the_run_that_was_not(algorithm, stopped_at, compile, tmp_path):
    def learn(folder, stop, ckpt_path=None):
        pl.seed_everything(4, verbose=False)
        model, watch = (
            tiny(algorithm, max_env_steps=16 * 40),
            Watch(**{f"at_{stop}": lambda model: setattr(model.trainer, "should_stop", True)}),
        )
        trainer = lrl.Trainer(
            default_root_dir=folder, accelerator="cpu", enable_progress_bar=False, evaluation=None, callbacks=[watch], torch_threads=1
        )
        trainer.fit(model, ckpt_path=ckpt_path)
        return weights(model), watch.counts

    whole, counts = learn(tmp_path / "whole", 40)
    assert counts[-1] == [1] and len(counts) == 40
    learn(tmp_path / "parts", stopped_at)
    parts, counts = learn(tmp_path / "parts", 40, "last")
    assert counts[-1] == [1] and len(counts) == 40 - stopped_at - 1
    assert torch.equal(parts, whole)


def test_what_a_loss_returns_is_to_be_asked_before_the_next(at_once):
    class Late(lrl.PPO):
        __module__ = lrl.PPO.__module__  # as if it were ours

        def training_step(self, rollout, batch_idx):
            super().training_step(rollout, batch_idx)
            with self.learning():
                minibatch = self.batches[0]
                (_, first), (_, second) = self.loss(minibatch), self.loss(minibatch)
                assert float(second()) == float(second())
                with pytest.raises(RuntimeError, match="before the next one is computed"):
                    first()
                raise KeyboardInterrupt

        def end_update(self, batch):
            self.batches = [batch]
            super().end_update(batch)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tiny(Late, target_kl=10.0))


def test_a_bad_part_of_a_loss_in_numpy_is_named(at_once):
    def spoil(model):
        next(model.network.critic.parameters()).data.fill_(math.nan)

    with pytest.raises(NotFiniteError, match="loss value_loss is nan"):
        fit(tiny(lrl.A2C, log_interval=90), callbacks=[Watch(at_2=spoil)])
    model = tiny(lrl.A2C, on_nan="restore_last")
    fit(model, callbacks=[Watch(at_2=spoil)])
    assert model.guard.restored == 1 and all(parameter.isfinite().all() for parameter in model.parameters())
