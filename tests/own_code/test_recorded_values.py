"""A value that a hook records stands in the row of its iteration, and a resumed run writes the same rows."""

import csv
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.callbacks.evaluation import EvaluationConfig

HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_update_end",
    "on_validation_start",
    "on_validation_end",
    "on_evaluation_end",
    "on_train_batch_end",
)
ENV = lrl.EnvConfig("CartPole-v1", num_envs=1)
ALGORITHMS = {
    "PPO": lambda steps, kind=lrl.PPO: kind(ENV, n_steps=64, batch_size=64, n_epochs=2, max_env_steps=steps, log_interval=1),
    "DQN": lambda steps, kind=lrl.DQN: kind(ENV, learning_starts=64, train_freq=32, max_env_steps=steps, log_interval=1),
}


class Everywhere(pl.Callback):
    """Record in each hook the global step, under the hook's name, and keep how often it was called."""

    def __init__(self):
        self.calls = 0

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state_dict):
        self.calls = state_dict["calls"]


def record_in(hook):
    def method(self, trainer, algorithm, *arguments):
        self.calls += 1
        finished = hook in ("on_validation_start", "on_validation_end", "on_evaluation_end", "on_train_batch_end")
        algorithm.record(**{f"mine/{hook}": float(trainer.global_step - finished), f"calls/{hook}": float(self.calls)})

    return method


for name in HOOKS:
    setattr(Everywhere, name, record_in(name))


class Own:
    """The module's own hooks: they count iterations in a plain attribute, and record it."""

    seen = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += 1
        self.record(**{"mine/own_hook": float(self.seen - 1)})


def own(kind):
    return type(f"Own{kind.__name__}", (Own, kind), {"__module__": __name__})


OwnPPO, OwnDQN = own(lrl.PPO), own(lrl.DQN)
OWN = {"PPO": OwnPPO, "DQN": OwnDQN}


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return the rows of training, without the times and without empty cells."""
    rows = csv.DictReader((folder / "metrics.csv").read_text().splitlines())
    return [
        {name: text for name, text in row.items() if text and not name.startswith("time/f") and name != "time/time_elapsed"} for row in rows
    ]


def fit(name, steps, folder, ckpt_path=None, callbacks=()):
    pl.seed_everything(3)
    algorithm = ALGORITHMS[name](steps, OWN[name])
    trainer = lrl.Trainer(
        default_root_dir=folder,
        run_name="run",
        enable_progress_bar=False,
        callbacks=[Everywhere(), *callbacks],
        evaluation=EvaluationConfig(every_n_env_steps=128, episodes=1, max_episode_steps=10),
    )
    trainer.fit(algorithm, ckpt_path=ckpt_path)
    return algorithm, trainer.run_folder


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_value_stands_in_the_row_of_its_iteration_from_whatever_hook(name, tmp_path):
    algorithm, folder = fit(name, 640, tmp_path)
    rows = [row for row in rows_of(folder) if "time/iterations" in row]
    assert len(rows) >= 5 and algorithm.seen == len(rows)
    for number, row in enumerate(rows):
        assert float(row["time/iterations"]) == number + 1
        mine = {key: float(value) for key, value in row.items() if key.startswith("mine/")}
        assert {"mine/on_train_batch_end", "mine/own_hook"} <= mine.keys()
        assert set(mine.values()) == {float(number)}, row
    everything = {key for row in rows for key in row if key.startswith("mine/")}
    assert everything == {f"mine/{hook}" for hook in (*HOOKS, "own_hook")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_resumed_run_writes_the_rows_of_an_uninterrupted_one(name, tmp_path):
    _, whole = fit(name, 640, tmp_path / "whole")
    fit(name, 256, tmp_path / "parts")  # evaluations are due every 128 steps, and at the end
    algorithm, parts = fit(name, 640, tmp_path / "parts", "last")
    assert rows_of(parts) == rows_of(whole) and algorithm.seen >= 5


def test_a_value_that_is_recorded_after_the_last_iteration_is_named(tmp_path, capsys):
    class AtTheEnd(pl.Callback):
        def on_train_end(self, trainer, algorithm):
            algorithm.record(at_the_end=1.0)

    fit("PPO", 128, tmp_path, callbacks=[AtTheEnd()])
    assert "at_the_end: recorded after the last iteration, so no row holds them" in capsys.readouterr().out


def test_the_row_of_an_iteration_whose_hook_fails_is_written(tmp_path):
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer, algorithm, *arguments):
            if trainer.global_step == 3:
                algorithm.record(last_words=5.0)
                raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fit("PPO", 640, tmp_path, callbacks=[Fails()])
    (folder,) = tmp_path.rglob("run")
    last = [row for row in rows_of(folder) if "time/iterations" in row][-1]
    assert (last["env_steps"], float(last["train/last_words"])) == ("192", 5.0)
    assert (folder / "checkpoints" / "last.ckpt").is_file()


def test_means_of_recorded_numbers_and_tensors_are_numbers():
    model = lrl.PPO("CartPole-v1")
    model.recorded.update({"loss": [0.25, 0.5], "rollout/error": [torch.tensor(1.0), torch.tensor(2.0)]})
    means = model.learner.recorded_metrics()
    assert means == {"train/loss": 0.375, "rollout/error": 1.5}
    assert all(isinstance(mean, float) for mean in means.values())
