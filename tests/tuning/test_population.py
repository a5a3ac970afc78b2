"""Population-based training: members continue exactly from others, with settings that may change in a run, and leave a schedule."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import yaml
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_rl import A2C, CQL, DQN, IMPALA, PPO, PQN, SAC, TD3, TRPO, EvolutionStrategies, SettingError
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.schedules import make_schedule
from lightning_rl.training.arguments import settings_of
from lightning_rl.training.loading import algorithm_class
from lightning_rl.training.run_processes import Message
from lightning_rl.tuning.comparison import Objective
from lightning_rl.tuning.population import MUTABLE, Population, mutable_space, restore_run, save_run
from lightning_rl.tuning.ray_population import mutation
from lightning_rl.tuning.search_space import Dimension, SearchSpace, find_space, read_space
from tests.apart import Apart
from tests.command_line import run
from tests.fitting import OFFLINE, fit, tiny, weights

RATE, EPOCHS, CLIP = "model.learning_rate", "model.n_epochs", "model.clip_range"
SPACE = SearchSpace(
    "space.yaml",
    (
        Dimension(RATE, FloatDistribution(1e-4, 1e-2, log=True)),
        Dimension(EPOCHS, IntDistribution(1, 9, step=2)),
        Dimension(CLIP, CategoricalDistribution([0.1, 0.2, 0.3])),
    ),
)
OBJECTIVE = Objective("eval/mean_reward", "max", 100, 1_000)
PPO_OPTIONS = (
    "--model PPO --model.env.id CartPole-v1 --model.env.num_envs 2 --model.n_steps 32 --model.batch_size 64 --model.net_arch [8] "
    "--model.max_env_steps 192 --evaluation.every_n_env_steps 64 --evaluation.episodes 2 --evaluation.num_envs 2 "
    "--evaluation.max_episode_steps 50 --trainer.accelerator cpu"
)
WATCH = '''
import hashlib, json, os
import pytorch_lightning as pl

class Watch(pl.Callback):
    """Write a hash of weights and optimizer's state when a process begins and ends to train."""

    def on_train_start(self, trainer, pl_module):
        self.write(trainer, pl_module, "begins")

    def on_train_end(self, trainer, pl_module):
        self.write(trainer, pl_module, "ends")

    def write(self, trainer, pl_module, when):
        digest = hashlib.sha256()
        moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        for tensor in [*pl_module.state_dict().values(), *moments]:
            digest.update(tensor.numpy().tobytes())
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        row = [trainer.run_folder.name, pl_module.env_steps, when, digest.hexdigest(), pl_module.n_epochs, rate]
        with open(os.environ["WATCHED"], "a") as file:
            file.write(json.dumps(row) + "\\n")
'''


def population(folder, size=2, lines=None):
    """A population whose members have saved a best checkpoint, named by its text."""
    runs = folder / "PPO" / "CartPole-v1"
    for member in range(size):
        checkpoints = runs / f"member_{member}" / "checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "best.ckpt").write_text(f"weights of {member}")
        (checkpoints / "best.ckpt.json").write_text("{}")
    return Population(folder, runs, SPACE, size, 0, OBJECTIVE, (lines if lines is not None else []).append)


def rows(file):
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_a_member_continues_with_settings_within_their_ranges_and_takes_over_the_schedule(tmp_path):
    lines = []
    two = population(tmp_path, lines=lines)
    first = [periods[0].values for periods in two.periods]
    for member, value in enumerate((5.0, 50.0)):
        two.record(member, Message("evaluation", 128, value))
    values = two.replace(0, 1, {RATE: 0.012, EPOCHS: 4, CLIP: 0.3})
    assert values == {RATE: 1e-2, EPOCHS: 5, CLIP: 0.3}, "cut to the range, and to its steps"
    assert [(each.start, each.values, each.source) for each in two.periods[0]] == [(0, first[1], None), (128, values, 1)]
    assert lines[-1].startswith("at 128: member 0 (5) continues from member 1 (50): learning_rate ")
    two.record(0, Message("evaluation", 256, 70.0))
    two.record(1, Message("evaluation", 256, math.nan))
    table = rows(tmp_path / "population.csv")
    assert [(row["count"], row["member"], row["value"], row["continued_from"]) for row in table] == [
        *(("128", "0", "5.0", ""), ("128", "1", "50.0", "")),
        *(("256", "0", "70.0", "1"), ("256", "1", "nan", "")),
    ]
    assert table[2]["learning_rate"] == "0.01" and table[3]["learning_rate"] == str(first[1][RATE])
    assert (tmp_path / "best.ckpt").read_text() == "weights of 0" and two.best.value == 70
    assert [row["from"] for row in rows(tmp_path / "schedule.csv")] == ["0", "128"]


def test_the_best_checkpoint_stays_when_its_member_continues_from_another_one(tmp_path):
    two = population(tmp_path)
    two.record(0, Message("evaluation", 100, 90.0))
    two.record(1, Message("evaluation", 100, 10.0))
    assert (tmp_path / "best.ckpt").read_text() == "weights of 0"
    assert two.best.member == 0 and len(rows(tmp_path / "schedule.csv")) == 1


def test_the_schedule_of_the_best_member_can_be_repeated_where_settings_take_schedules(tmp_path):
    two = population(tmp_path)
    two.record(0, Message("evaluation", 100, 1.0))
    two.record(1, Message("evaluation", 100, 0.0))
    before, values = two.periods[0][0].values, two.replace(1, 0, {RATE: 1e-3, EPOCHS: 3, CLIP: 0.1})
    two.record(1, Message("evaluation", 200, 2.0))
    settings = two.replay({"learning_rate", "clip_range"})
    assert settings[EPOCHS] == 3
    for path in (RATE, CLIP):
        schedule = make_schedule(path, settings[path])
        assert [schedule(at) for at in (0.0, 0.0999, 0.1, 1.0)] == [before[path], before[path], values[path], values[path]]


@pytest.mark.parametrize("choice", [None, '{"end": 0, "schedule": "linear", "start": 0.2}'])
def test_values_that_are_no_numbers_do_not_become_points_of_a_schedule(choice, tmp_path):
    two = population(tmp_path)
    for member in (0, 1):
        two.record(member, Message("evaluation", 100, 1.0))
    two.replace(1, 0, {RATE: 1e-3, EPOCHS: 3, CLIP: choice})
    two.record(1, Message("evaluation", 200, 2.0))
    assert two.replay({"learning_rate", "clip_range"})[CLIP] == choice


def test_the_first_members_are_the_first_trials_of_a_random_study(tmp_path):
    first = [population(tmp_path / str(size), size).periods for size in (2, 3)]
    assert first[0] == first[1][:2] and first[1][1] != first[1][2]


@pytest.mark.parametrize(("low", "high", "step", "expected"), [(2, 4, 1, {2, 4}), (1, 20, 1, {2, 4}), (1, 9, 2, {1, 5})])
def test_small_integers_move_one_by_one(low, high, step, expected):
    from ray.tune.schedulers.pbt import _explore

    mutations, random_state = {"n": mutation(IntDistribution(low, high, step=step))}, np.random.get_state()
    found = {_explore({"n": 3}, mutations, 0.0, (1.2, 0.8), None)[0]["n"] for _ in range(100)}
    np.random.set_state(random_state)
    assert found == expected


def test_a_copied_run_has_the_files_of_the_other_and_none_of_its_own(tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name / "checkpoints" / "last.ckpt.d" / "rank0").mkdir(parents=True)
        for file in ("config.yaml", "evaluations.csv", "checkpoints/last.ckpt", "checkpoints/last.previous.ckpt"):
            (tmp_path / name / file).write_text(name)
        (tmp_path / name / "checkpoints" / "last.ckpt.d" / "rank0" / f"{name}.rows").write_text(name)
    save_run(tmp_path / "good", tmp_path / "copy")
    restore_run(tmp_path / "copy", tmp_path / "bad")
    found = {str(file.relative_to(tmp_path / "bad")): file.read_text() for file in (tmp_path / "bad").rglob("*") if file.is_file()}
    names = ("config.yaml", "evaluations.csv", "checkpoints/last.ckpt", "checkpoints/last.ckpt.d/rank0/good.rows")
    assert found == dict.fromkeys(names, "good")


def test_a_packaged_space_varies_except_for_settings_that_cannot_change_in_a_run():
    packaged = read_space(find_space(None, algorithm_class("PPO", Algorithm)))
    varied = [each.path for each in mutable_space(packaged, is_packaged=True).dimensions]
    assert "model.learning_rate" in varied and not {"model.net_arch", "model.n_steps", "model.batch_size"} & {*varied}
    with pytest.raises(SettingError, match=r"PPO.yaml: model.n_steps cannot change while a run is trained; --population varies action_"):
        mutable_space(packaged, is_packaged=False)


BAD = {
    "--engine local": "--population is trained by Ray Tune: add --engine ray",
    "--population 1": "--population must be >= 2, got 1",
    "--trials 5": "--trials cannot be combined with --population, whose settings change while its runs are trained",
    "--pruner none": "--pruner cannot be combined with --population",
    "--jobs 0": "--jobs must be >= 1, got 0",
    "--address auto --jobs 2": "--jobs cannot be combined with --population and --address",
    "--space fixed.yaml": "fixed.yaml: model.env.num_envs cannot change while a run is trained; --population varies ",
    "--space wrong.yaml": "wrong.yaml: model.gamma must be >= 0 and <= 1, got 1.5",
    "--out old": "there is a population in old, and it cannot be continued: name another --out, or delete it",
    "--evaluation null": "tune compares runs by their evaluations: leave out evaluation null",
}


@pytest.mark.variants
@pytest.mark.parametrize("options", BAD)
def test_wrong_options_are_one_line_before_anything_runs(options, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("fixed.yaml").write_text("model.env.num_envs: {choices: [1, 2]}")
    Path("wrong.yaml").write_text("model.gamma: {low: 0.5, high: 1.5}")
    Path("old/PPO/CartPole-v1").mkdir(parents=True)
    status, out, err = run(f"tune {PPO_OPTIONS} --engine ray --population 3 {options}", capfd)
    assert (status, out) == (2, "") and err.startswith(f"error: {BAD[options]}") and err.count("\n") == 1
    assert not Path("studies").exists()


OTHER = {
    **{"learning_rate": 0.1, "gamma": 0.3, "max_grad_norm": 1e-3, "ent_coef": 0.7, "vf_coef": 7.0, "clip_range": 1e-4},
    **{"clip_range_vf": 1e-4, "target_kl": 1e-9, "n_epochs": 5, "gae_lambda": 0.1, "q_lambda": 0.1, "lambda_": 0.1, "tau": 0.5},
    **{"gradient_steps": 3, "policy_delay": 5, "action_noise": 0.7, "target_policy_noise": 2.0, "target_noise_clip": 0.01},
    **{"exploration_final_eps": 0.9, "label_smoothing": 0.3, "baseline_coef": 5.0, "sigma": 0.1, "momentum": 0.1},
    **{"clip_rho": 0.1, "clip_c": 0.1, "clip_pg_rho": 0.1},
    **{"expectile": 0.95, "beta": 0.01, "max_weight": 0.01, "alpha": 0.1, "cql_alpha": 0.1},
}
"""Values far from the defaults."""
BEFORE = {SAC: {"ent_coef": 0.2}, CQL: {"ent_coef": 0.2}, PPO: {"clip_range_vf": 0.5}}
"""What the checkpoint was made with, where a default has another kind of value or no effect."""
HOME = {SAC: "Pendulum-v1", TD3: "Pendulum-v1", DQN: "CartPole-v1"}
"""An environment whose rewards are small enough for all settings to have an effect; the scripted one of tests otherwise."""
WITHOUT_EFFECT = {
    **{EvolutionStrategies: {"action_noise", "momentum"}, IMPALA: {"clip_rho", "clip_c", "clip_pg_rho"}, TRPO: {"max_grad_norm"}},
    **{algorithm: {"gradient_steps", "action_noise"} for algorithm in OFFLINE},
}
"""In tiny runs: no Box actions, and Adam; policies without lag, whose ratios are 1; gradients of the value alone, by Adam; no acting."""


class Save(pl.Callback):
    """Save in the middle of the run."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [PPO, A2C, IMPALA, PQN, TRPO, SAC, TD3, DQN, EvolutionStrategies, *OFFLINE])
def test_a_run_continues_with_another_value_of_each_setting_that_may_change(algorithm, tmp_path):
    own = [name for name in MUTABLE if name in settings_of(algorithm) and name not in WITHOUT_EFFECT.get(algorithm, set())]
    before = BEFORE.get(algorithm, {})
    fit(tiny(algorithm, HOME.get(algorithm), **before), callbacks=[Save(tmp_path / "half.ckpt")], max_steps=3)

    def continued(**settings):
        model = tiny(algorithm, HOME.get(algorithm), **{**before, **settings})
        fit(model, ckpt_path=tmp_path / "half.ckpt")
        return weights(model)

    same = continued()
    assert torch.equal(same, continued())
    unchanged = [name for name in own if torch.equal(same, continued(**{name: OTHER[name]}))]
    assert not unchanged


def train_population(folder, callback, members):
    """Train a population with the `space.yaml` of a folder, whose runs have a callback; returns what is printed."""
    module = callback.partition(".")[0]
    options = f"--import {module} {PPO_OPTIONS} --trainer.callbacks+={callback} --space space.yaml --jobs 2 --out mine"
    program = Apart(f"-m lightning_rl tune {options} --engine ray --population {members}", folder)  # Ray's threads would stay here
    out, err = program.communicate(timeout=900)
    assert (program.wait(), err) == (0, "")
    return out


@pytest.mark.slow
def test_a_member_continues_from_the_exact_weights_of_another_one_with_other_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("WATCHED", str(tmp_path / "watched.txt"))
    (tmp_path / "watching.py").write_text(WATCH)
    (tmp_path / "space.yaml").write_text("model.learning_rate: {low: 1e-5, high: 1e-1, log: true}\nmodel.n_epochs: {low: 1, high: 9}\n")
    out = train_population(tmp_path, "watching.Watch", 3)
    watched = [json.loads(line) for line in (tmp_path / "watched.txt").read_text().splitlines()]
    states = {(name, count, when): (digest, epochs, rate) for name, count, when, digest, epochs, rate in watched}
    table = rows(tmp_path / "mine" / "population.csv")
    assert {(row["count"], row["member"]) for row in table} == {(str(64 * k), str(m)) for k in (1, 2, 3) for m in range(3)}
    copies = {(f"member_{row['member']}", int(row["count"])): row for row in table if row["continued_from"]}
    assert len(copies) == 2, "one of three members after each evaluation but the last"
    for member in ("member_0", "member_1", "member_2"):
        for count in (128, 192):
            row = copies.get((member, count))
            source = member if row is None else f"member_{row['continued_from']}"
            begins, ends = states[member, count - 64, "begins"], states[member, count, "ends"]
            assert begins[0] == states[source, count - 64, "ends"][0], "weights and optimizer are those of the source"
            if row is not None:
                assert begins[0] != states[member, count - 64, "ends"][0]
                assert (ends[1], ends[2]) == (int(row["n_epochs"]), pytest.approx(float(row["learning_rate"])))
    assert out.count("continues from member") == 2 and not (tmp_path / "mine" / "ray").exists()
    best = max(float(row["value"]) for row in table)
    assert f"eval/mean_reward {best:.2f}: mine/best.ckpt" in out and (tmp_path / "mine" / "population.png").is_file()
    assert yaml.safe_load((tmp_path / "mine" / "best.yaml").read_text())["evaluation"]["every_n_env_steps"] == 64
    assert len(rows(tmp_path / "mine" / "schedule.csv")) >= 1


def train_two(folder, module, callback):
    """Train a population of two, whose runs have a callback of a module; returns what is printed."""
    (folder / "odd.py").write_text(module)
    (folder / "space.yaml").write_text("model.learning_rate: {low: 1e-5, high: 1e-1, log: true}")
    return train_population(folder, f"odd.{callback}", 2)


FAULT = """
import pytorch_lightning as pl

class Fail(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        if trainer.run_folder.name == "member_1" and pl_module.env_steps:
            raise RuntimeError("no more coins")
"""


@pytest.mark.slow
def test_the_others_go_on_when_a_member_fails(tmp_path):
    out = train_two(tmp_path, FAULT, "Fail")
    assert out.count("member 1: failed (") == 1 and "no more coins" in out
    found = [(int(row["count"]), int(row["member"])) for row in rows(tmp_path / "mine" / "population.csv")]
    assert sorted(found) == [(64, 0), (64, 1), (128, 0), (192, 0)]


LOST = """
import math
import pytorch_lightning as pl

class Lose(pl.Callback):
    def on_evaluation_end(self, trainer, pl_module, metrics):
        if trainer.run_folder.name == "member_1" and pl_module.env_steps == 64:
            metrics["eval/mean_reward"] = math.nan
"""


@pytest.mark.slow
def test_a_member_whose_evaluation_is_not_a_number_continues_from_another_one(tmp_path):
    out = train_two(tmp_path, LOST, "Lose")
    assert "member 1 (nan) continues from member 0" in out
