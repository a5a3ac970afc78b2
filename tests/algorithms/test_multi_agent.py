"""Several behaviors in one world, each with an algorithm of its own."""

import json
import shutil
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Discrete
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks

import lightning_rl as lrl
from lightning_rl.errors import SettingError
from lightning_rl.loggers import read_rows
from lightning_rl.training.behaviors import UNCALLED
from tests.agents import Mortal, Together
from tests.command_line import run as command

SMALL = {"net_arch": [8], "compile": False}
PPO = partial(lrl.PPO, n_steps=6, batch_size=12, n_epochs=1, **SMALL)
POCA = partial(lrl.POCA, n_steps=6, batch_size=6, n_epochs=1, **SMALL)
A2C = partial(lrl.A2C, n_steps=4, **SMALL)
DQN = partial(lrl.DQN, learning_starts=8, train_freq=4, steps_per_iteration=8, batch_size=8, buffer_size=200, **SMALL)


class OnlyA(Together):
    """Together without b."""

    names: ClassVar = ("a",)


class StopAt(pl.Callback):
    """Ends a run after so many iterations."""

    def __init__(self, iterations):
        self.iterations = iterations

    def on_train_batch_end(self, trainer, *others):
        if trainer.global_step == self.iterations:
            trainer.should_stop = True


class Items(pl.Callback):
    """Keeps the names of the behaviors of each iteration."""

    def __init__(self):
        self.names = []

    def on_train_batch_start(self, trainer, algorithm, batch, batch_idx):
        self.names.append(list(batch))


def made(env=Together, max_env_steps=96, copies=2, parameters=None, kind=lrl.MultiAgent, **learners):
    pl.seed_everything(3, verbose=False)
    learners = learners or {"a": PPO, "b": DQN}
    return kind(
        {"id": f"{env.__module__}.{env.__name__}", "num_envs": copies, "parameters": parameters or {}},
        {name: lrl.Behavior(name, learner) for name, learner in learners.items()},
        max_env_steps,
    )


def fit(model, folder, *callbacks, ckpt_path=None, evaluation=None, logger=()):
    trainer = lrl.Trainer(
        default_root_dir=folder, enable_progress_bar=False, evaluation=evaluation, callbacks=list(callbacks), logger=logger
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def different(one, other):
    weights, others = one.state_dict(), other.state_dict()
    return [name for name in weights if not torch.equal(weights[name], others[name])]


@pytest.mark.thorough
def test_iterations_have_their_own_length_and_a_batch_holds_those_that_are_full(tmp_path):
    items, model = Items(), made(a=A2C, b=PPO, max_env_steps=24)
    fit(model, tmp_path, items)
    assert items.names == [["a"], ["b"], ["a"], ["a", "b"]]  # after 4, 6, 8 and 12 steps of the world
    assert (model.env_steps, model.algorithms["a"].env_steps, model.algorithms["b"].env_steps) == (24, 24, 24)
    assert (model.algorithms["a"].updates, model.algorithms["b"].updates, model.updates) == (3, 2, 5)


@pytest.mark.thorough
def test_each_behavior_learns_as_often_as_it_would_alone(tmp_path):
    model = made()
    fit(model, tmp_path)
    assert model.algorithms["a"].updates == 96 // 12 and model.algorithms["b"].updates == (96 - 8) // 4


@pytest.mark.thorough
def test_steps_count_copies_and_those_of_a_behavior_the_agents_that_were_there(tmp_path):
    model = made(Mortal, max_env_steps=48)
    fit(model, tmp_path)
    assert model.env_steps == 48 and model.algorithms["a"].env_steps == 48
    assert model.algorithms["b"].env_steps == 24  # it is there in the first two of four steps


@pytest.mark.thorough
@pytest.mark.parametrize("other", [DQN, PPO, A2C])
def test_a_behavior_learns_bit_for_bit_what_it_learns_without_the_others(tmp_path, other):
    alone, beside = made(OnlyA, a=PPO), made(Together, a=PPO, b=other)
    fit(alone, tmp_path / "alone")
    fit(beside, tmp_path / "beside")
    assert different(alone.algorithms["a"], beside.algorithms["a"]) == []


@pytest.mark.thorough
def test_a_run_leaves_the_precision_of_products_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rl.training.learner.best_matmul", lambda modules, device: "medium")
    fit(made(max_env_steps=24), tmp_path)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.thorough
def test_the_order_of_behaviors_changes_nothing(tmp_path):
    one, other = made(a=PPO, b=DQN), made(b=DQN, a=PPO)
    fit(one, tmp_path / "one")
    fit(other, tmp_path / "other")
    assert different(one, other) == []


def trained(folder):
    return fit(made(), folder, evaluation=lrl.EvaluationConfig(every_n_env_steps=48, episodes=2)).run_folder


def beside_frozen(run, **others):
    pl.seed_everything(4, verbose=False)
    behaviors = {"a": lrl.Behavior("a", PPO), "b": {"agents": "b", "learner": {"checkpoint": str(run), "behavior": "b"}}}
    return lrl.MultiAgent({"id": "tests.agents.Together", "num_envs": 2}, {**behaviors, **others}, 96)


@pytest.mark.thorough
def test_a_frozen_behavior_acts_and_does_not_learn(tmp_path):
    run = trained(tmp_path / "first")
    model = beside_frozen(run)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = fit(model, tmp_path / "second", evaluation=lrl.EvaluationConfig(every_n_env_steps=48, episodes=2), logger=True)
    changed = {name.split(".")[1] for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {"a"} and (model.algorithms["a"].updates, model.algorithms["b"].updates) == (8, 0)
    assert model.algorithms["b"].env_steps == 96 and "b/rollout/ep_rew_mean" in read_rows(trainer.run_folder / "metrics.csv")[-1]
    obs = np.array([1, 2], np.float32)
    assert lrl.load_policy(run, behavior="b").act(obs)[0] == lrl.load_policy(trainer.run_folder, behavior="b").act(obs)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_with_a_frozen_behavior_continues_exactly(tmp_path, stop):
    run = trained(tmp_path / "first")
    whole, again = beside_frozen(run), beside_frozen(run)
    fit(whole, tmp_path / "whole")
    fit(beside_frozen(run), tmp_path / "parts", StopAt(stop))
    fit(again, tmp_path / "parts", ckpt_path="last")
    assert different(whole, again) == []


@pytest.mark.thorough
def test_a_checkpoint_holds_a_frozen_policy_too_and_its_config_names_where_it_comes_from(tmp_path):
    run = trained(tmp_path / "first")
    trainer = fit(beside_frozen(run), tmp_path / "second")
    shutil.rmtree(run)
    model = lrl.MultiAgent.load_from_checkpoint(trainer.run_folder / "checkpoints" / "last.ckpt")
    assert model.frozen == ["b"] and type(model.algorithms["b"]) is lrl.DQN
    with pytest.raises(SettingError, match=r"behavior b: ckpt_path .*version_0' is not a file"):
        beside_frozen(run)


@pytest.mark.thorough
def test_a_frozen_policy_that_cannot_play_these_agents_is_one_line(tmp_path):
    run = trained(tmp_path / "first")
    with pytest.raises(SettingError, match=r"behavior b: .* was trained with other observations or actions than these agents have"):
        lrl.MultiAgent("tests.agents.Continuous", {"a": lrl.Behavior("a", PPO), "b": lrl.Behavior("b", lrl.FrozenPolicy(run, "b"))})
    with pytest.raises(SettingError, match="behaviors: none of them learns"):
        beside_frozen(run, a=lrl.Behavior("a", lrl.FrozenPolicy(run, "a")))


MEMORY = partial(lrl.PPO, n_steps=6, batch_size=12, n_epochs=1, memory=lrl.LSTM(4, 3), **SMALL)
CASES = {
    "two kinds": (Together, {"a": PPO, "b": DQN}),
    "deaths": (Mortal, {"a": A2C, "b": PPO}),
    "groups": (Mortal, {"a": A2C, "b": POCA}),
    "deaths in a replay buffer": (Mortal, {"a": PPO, "b": DQN}),
    "memory": (Mortal, {"a": MEMORY, "b": A2C}),
    "lessons": (Together, {"a": A2C, "b": DQN}),
}
EARLY = {"behavior": "b", "threshold": 2, "min_lesson_length": 2, "require_reset": True}
LESSONS = {
    "curriculum": [
        {"value": 5.0, "completion_criteria": EARLY},
        {"value": 6.0, "completion_criteria": EARLY | {"behavior": "a", "threshold": 1e6}},
        {"value": 3.0},
    ],
    "replay_old_lessons": 0.3,
}


@pytest.mark.thorough
@pytest.mark.parametrize("stop", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_run_continues_exactly_in_the_middle_of_another_behaviors_iteration(tmp_path, case, stop, capsys):
    env, learners = CASES[case]
    learners = {**learners, "parameters": {"length": LESSONS} if case == "lessons" else {}}
    whole = made(env, **learners)
    fit(whole, tmp_path / "whole")
    fit(made(env, **learners), tmp_path / "parts", StopAt(stop))
    continued = made(env, **learners)
    fit(continued, tmp_path / "parts", ckpt_path="last")
    assert "new episodes" not in capsys.readouterr().out
    assert different(whole, continued) == [] and continued.env_steps == 96
    assert [each.updates for each in continued.algorithms.values()] == [each.updates for each in whole.algorithms.values()]
    assert [each.state_dict() for each in continued.curriculum] == [each.state_dict() for each in whole.curriculum]


@pytest.mark.thorough
def test_the_replay_buffer_of_a_behavior_with_several_agents_comes_back(tmp_path, capsys):
    def squads():
        pl.seed_everything(3, verbose=False)
        behaviors = {"red": lrl.Behavior("red_*", DQN), "blue": lrl.Behavior("blue_*", PPO)}
        return lrl.MultiAgent({"id": "tests.agents.Squads", "num_envs": 2}, behaviors, 96)

    whole, continued = squads(), squads()
    fit(whole, tmp_path / "whole")
    fit(squads(), tmp_path / "parts", StopAt(2))
    fit(continued, tmp_path / "parts", ckpt_path="last")
    out = capsys.readouterr().out
    assert "no replay buffer" not in out and "new episodes" not in out and different(whole, continued) == []


@pytest.mark.thorough
def test_metrics_of_behaviors_stand_under_their_names(tmp_path):
    evaluation = lrl.EvaluationConfig(every_n_env_steps=48, episodes=2)
    trainer = fit(made(), tmp_path, evaluation=evaluation, logger=True)
    names = set(read_rows(trainer.run_folder / "metrics.csv")[-1])
    assert {"a/train/loss", "a/rollout/ep_rew_mean", "b/train/n_updates", "b/replay/size", "rollout/ep_rew_mean", "time/fps"} <= names
    # 0 + 1 + 2 + 3 and 40 more for b, and a tenth of the actions: 0 or 1
    a, b = (float(trainer.callback_metrics[f"eval/{name}/mean_reward"]) for name in "ab")
    assert 6 <= a <= 6.4 and 46 <= b <= 46.4 and float(trainer.callback_metrics["eval/mean_reward"]) == pytest.approx((a + b) / 2)


def fixed_pay(folder):
    """The folder of a run in which a gets 4 in an episode and b 8, whatever they do."""
    evaluation = lrl.EvaluationConfig(every_n_env_steps=24, episodes=2)
    return fit(made(Paid, max_env_steps=24), folder, evaluation=evaluation).run_folder


class Paid(Together):
    """a gets 1 in each of four steps, b 2."""

    def pay(self, agent, action):
        return 1.0 if agent == "a" else 2.0


@pytest.mark.thorough
def test_evaluate_shows_the_returns_of_each_behavior(tmp_path, capfd):
    run = fixed_pay(tmp_path)
    status, out, err = command(f"evaluate --ckpt_path {run} --episodes 3 --json", capfd)
    found = json.loads(out)
    assert (status, err) == (0, "") and found == lrl.evaluate(run, episodes=3)
    assert (found["return_mean"], found["a/return_mean"], found["b/return_mean"], found["b/return_std"]) == (6.0, 4.0, 8.0, 0.0)
    lines = command(f"evaluate --ckpt_path {run} --episodes 3", capfd)[1].splitlines()
    success = f"success {found['success_rate']:.1%}"
    assert found["success_rate"] == 0.5 and lines[1] == success  # one agent of two reports it
    assert lines[2:] == ["a: return 4.00 ± 0.00 (min 4.00, max 4.00)", "b: return 8.00 ± 0.00 (min 8.00, max 8.00)"]
    lines = command(f"evaluate --ckpt_path {run} --episodes 1", capfd)[1].splitlines()
    assert lines[1:] == [success, "a: return 4.00", "b: return 8.00"]


@pytest.mark.thorough
def test_a_row_of_an_evaluation_has_the_return_of_each_behavior(tmp_path):
    rows = read_rows(fixed_pay(tmp_path) / "evaluations.csv")
    assert [(row["return"], row["a/return"], row["b/return"]) for row in rows] == [("6.0", "4.0", "8.0")] * 2


@pytest.mark.thorough
def test_a_checkpoint_holds_all_policies_and_gives_the_one_that_is_named(tmp_path):
    trainer = fit(made(), tmp_path, evaluation=lrl.EvaluationConfig(every_n_env_steps=48, episodes=2))
    model = lrl.MultiAgent.load_from_checkpoint(trainer.run_folder)
    assert list(model.algorithms) == ["a", "b"] and type(model.algorithms["b"]) is lrl.DQN and model.env_steps in (48, 96)
    obs = np.array([1, 2], np.float32)
    assert lrl.load_policy(trainer.run_folder, behavior="b").act(obs)[0] == model.algorithms["b"](obs[None])[0]
    assert lrl.evaluate(trainer.run_folder, episodes=3)["episodes"] == 3
    with pytest.raises(SettingError, match="name a behavior, --behavior: this run has a, b"):
        lrl.load_policy(trainer.run_folder)
    with pytest.raises(SettingError, match="there is no behavior 'c': this run has a, b"):
        lrl.load_policy(trainer.run_folder, behavior="c")


@pytest.mark.thorough
def test_an_exported_policy_of_a_behavior_names_the_environment_of_the_run(tmp_path):
    trainer = fit(made(), tmp_path)
    path = lrl.export_policy(trainer.run_folder / "checkpoints" / "last.ckpt", tmp_path / "a.safetensors", behavior="a")
    said = json.loads(Path(f"{path}.json").read_text())
    assert (said["environment"], said["environment_kwargs"]) == ("tests.agents.Together", {})


def test_make_env_refuses_a_run_with_several_behaviors():
    with pytest.raises(SettingError, match="make_env is for single-agent environments"):
        lrl.make_env(made())


class OwnMultiAgent(lrl.MultiAgent):
    """A run of several behaviors that a user wrote."""


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    trainer = fit(made(kind=OwnMultiAgent), tmp_path_factory.mktemp("own"))
    return trainer.run_folder / "checkpoints" / "last.ckpt"


@pytest.mark.thorough
def test_several_behaviors_take_lightnings_arguments_of_loading_as_one_algorithm_does(own_run):
    assert lrl.MultiAgent.load_from_checkpoint(own_run, weights_only=True).env_steps == 96
    for argument in ({"strict": False}, {"hparams_file": "hparams.yaml"}):
        with pytest.raises(SettingError, match="init_from"):
            lrl.MultiAgent.load_from_checkpoint(own_run, **argument)


@pytest.mark.thorough
def test_a_run_of_a_users_subclass_loads_as_what_it_is_and_not_as_one_algorithm(own_run):
    assert type(lrl.MultiAgent.load_from_checkpoint(own_run)) is OwnMultiAgent
    assert lrl.load_policy(own_run, behavior="b").act(np.array([1, 2], np.float32))[0] in (0, 1)
    with pytest.raises(SettingError, match=r"holds .*OwnMultiAgent, not Algorithm"):
        lrl.Algorithm.load_from_checkpoint(own_run)


@pytest.mark.parametrize(
    ("behaviors", "line"),
    [
        ({"a": lrl.Behavior("a", PPO)}, "agent b has no behavior"),
        ({"a": lrl.Behavior("*", PPO), "b": lrl.Behavior("b", PPO)}, "agent b has 2 behaviors, a and b"),
        (
            {"all": lrl.Behavior("*", PPO), "c": lrl.Behavior("c*", PPO)},
            "behavior c: agents 'c*' matches none of the environment's agents; choose from a, b",
        ),
        ({"all": lrl.Behavior("*", PPO), "none": lrl.Behavior([], PPO)}, "behavior none has no agents; those of the environment are a, b"),
        ({"all": lrl.Behavior("*", partial(lrl.SAC, threaded=True))}, "behavior all: actors and threaded are for runs of one behavior"),
        ({"all": lrl.Behavior("*", partial(lrl.PPO, normalize_obs="frozen"))}, "behavior all: normalize_obs frozen"),
        ({"all": lrl.Behavior("*", partial(lrl.PPO, self_play={}))}, "behavior all: self_play needs another behavior with self_play"),
        ({"all": {"agents": "*", "learner": {"class_path": "PPOO"}}}, "there is no algorithm 'PPOO'"),
        (
            {"all": {"agents": "*", "learner": {"class_path": "PPO", "init_args": {"n_step": 4}}}},
            "behavior all: n_step is not a setting of PPO",
        ),
        ({"all": {"agents": "*", "learner": {"class_path": "PPO", "init_args": {"max_env_steps": 4}}}}, "max_env_steps belongs to the run"),
        ({"a.b": {"agents": "*", "learner": "PPO"}}, "the name 'a.b' must consist of letters, digits, _ and -"),
        ({"train": lrl.Behavior("*", PPO)}, "behaviors: the name 'train' already belongs to a part of torch's modules; choose another"),
        (
            {"all": lrl.Behavior("*", "PPO")},
            "behavior all: learner must make an algorithm for its agents, got str; give a class such as PPO",
        ),
        ({"all": lrl.Behavior("*", partial(lrl.PPO, max_env_steps=3))}, "behavior all: max_env_steps belongs to the run"),
        ({"all": {"agents": 3, "learner": "PPO"}}, "behavior all: agents must be names, or patterns such as adversary_*, got 3"),
        ({"all": lrl.Behavior(None, lrl.PPO)}, "behavior all: agents must be names, or patterns such as adversary_*, got None"),
        (
            {"all": {"agents": "*", "learner": None}},
            "behavior all: learner must make an algorithm for its agents, got NoneType; give a class",
        ),
        ({"all": lrl.Behavior("*", lrl.BehavioralCloning)}, "behavior all: BehavioralCloning does not learn from the steps of agents;"),
        ({"all": lrl.Behavior("*", lrl.MultiAgent)}, "behavior all: MultiAgent does not learn from the steps of agents; choose another"),
        ({}, "behaviors must name at least one, each with agents and a learner"),
        (None, "behaviors must name at least one, each with agents and a learner"),
        ({"all": {"agent": "*", "learner": "PPO"}}, "behaviors.all.agent is not a setting; did you mean agents?"),
        ({"all": {"learner": "PPO"}}, "behaviors.all.agents is missing: a behavior is a mapping of agents and learner"),
        ({"all": "PPO"}, "behaviors.all must be a mapping of agents and learner, got 'PPO'"),
    ],
)
def test_wrong_behaviors_are_one_line(behaviors, line):
    with pytest.raises(SettingError) as error:
        lrl.MultiAgent("tests.agents.Together", behaviors)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_behavior_of_a_file_names_its_memory_as_a_run_with_one_policy_does():
    learner = {"class_path": "PPO", "init_args": {"memory": "LSTM", "batch_size": 128, "n_steps": 64}}
    run = lrl.MultiAgent("tests.agents.Together", {"all": {"agents": "*", "learner": learner}})
    assert isinstance(run.algorithms["all"].memory, lrl.LSTM)


@pytest.mark.parametrize(
    ("agents", "line"),
    [
        (["red_0", "rde_1"], "behavior reds: agents 'rde_1' matches none of the environment's agents; did you mean red_1?"),
        ("rad_*", "behavior reds: agents 'rad_*' matches none of the environment's agents; did you mean red_1?"),
    ],
)
def test_a_misspelt_pattern_of_agents_is_named_with_the_nearest_one(agents, line):
    with pytest.raises(SettingError) as error:
        lrl.MultiAgent("tests.agents.Teams", {"reds": lrl.Behavior(agents, PPO), "blue": lrl.Behavior("blue_0", PPO)})
    assert str(error.value) == line


class Unequal(Together):
    """b has an action more."""

    def action_space(self, agent):
        return Discrete(3) if agent == "b" else self.action


def test_a_behavior_of_agents_with_different_spaces_is_named():
    with pytest.raises(SettingError) as error:
        lrl.MultiAgent(Unequal, {"both": lrl.Behavior("*", PPO)})
    line = "behavior both: the spaces of a and b differ; one policy needs equal spaces: give b another behavior"
    assert str(error.value) == line


def test_games_of_turns_are_refused_in_one_line():
    with pytest.raises(SettingError, match="take turns and cannot all learn at the same time"):
        lrl.MultiAgent("tests.agents.InTurn", {"all": {"agents": "*", "learner": "PPO"}})


@pytest.mark.thorough
def test_a_run_continues_with_its_behaviors_in_another_order(tmp_path):
    whole = made(a=PPO, b=DQN)
    fit(whole, tmp_path / "whole")
    fit(made(a=PPO, b=DQN), tmp_path / "parts", StopAt(3))
    again = made(b=DQN, a=PPO)
    fit(again, tmp_path / "parts", ckpt_path="last")
    assert different(whole, again) == []


@pytest.mark.thorough
def test_successes_of_an_open_iteration_come_back(tmp_path):
    def successes(model, folder, *callbacks, **settings):
        kept = {}

        class Keep(pl.Callback):
            def on_train_batch_end(self, trainer, algorithm, *others):
                for name, each in algorithm.algorithms.items():
                    kept[name] = list(each.collector.statistics.successes)

        fit(model, folder, Keep(), *callbacks, **settings)
        return kept

    whole = successes(made(a=A2C, b=PPO), tmp_path / "whole")
    fit(made(a=A2C, b=PPO), tmp_path / "parts", StopAt(1))
    assert successes(made(a=A2C, b=PPO), tmp_path / "parts", ckpt_path="last") == whole and 1.0 in whole["a"]


@pytest.mark.thorough
def test_another_fit_goes_on_with_the_counts_of_each_behavior(tmp_path):
    model = made()
    fit(model, tmp_path)
    model.max_env_steps = 144
    fit(model, tmp_path)
    assert model.env_steps == 144 and [each.env_steps for each in model.algorithms.values()] == [144, 144]
    assert model.episodes == 2 * 144 // 4


class Lifeless(Together):
    """Cannot be stepped, and so cannot be saved."""

    def pay(self, agent, action):
        raise ValueError("no such move")


class Clock(Together):
    """Pays what a clock shows, which nobody can save."""

    def pay(self, agent, action):
        return time.perf_counter()


@pytest.mark.thorough
def test_the_error_of_an_environment_that_cannot_be_stepped_comes_before_notices_of_it(tmp_path, capfd):
    with pytest.raises(SettingError, match=r"environment 0 of .*Lifeless raised ValueError: no such move"):
        fit(made(Lifeless), tmp_path)
    assert "cannot be saved" not in capfd.readouterr().out
    fit(made(Clock), tmp_path)
    assert f"{__name__}.Clock cannot be saved in the middle of an episode" in capfd.readouterr().out


class Broken(Together):
    """Pays a NaN to a in every step."""

    def pay(self, agent, action):
        return float("nan") if agent == "a" else 0.0


@pytest.mark.thorough
def test_a_behavior_that_only_gets_nans_ends_the_run_as_alone(tmp_path):
    model = made(Broken, max_env_steps=1000, a=partial(PPO, on_nan="skip_update"), b=partial(PPO, on_nan="skip_update"))
    with pytest.raises(lrl.errors.NotFiniteError, match="for 100 steps in a row"):
        fit(model, tmp_path)


class Hooked(lrl.A2C):
    """Keeps which hooks are called, and with what."""

    def keep(self, name, *arguments):
        vars(self).setdefault("called", []).append((name, *arguments))

    def setup(self, stage):
        self.keep("setup", stage, self.trainer.max_epochs)

    def on_fit_start(self):
        self.keep("on_fit_start")

    def on_train_start(self):
        self.keep("on_train_start", self.env_steps, self.collector is not None)

    def on_train_batch_start(self, batch, batch_idx):
        self.keep("on_train_batch_start", tuple(batch.reward.shape), batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.keep("on_train_batch_end", outputs, tuple(batch.reward.shape), self.updates)
        self.log("doubled", 2.0 * self.updates)

    def training_step(self, rollout, batch_idx):
        super().training_step(rollout, batch_idx)
        return {"loss": torch.tensor(float(self.updates))}

    def on_train_end(self):
        self.keep("on_train_end", self.env_steps)


@pytest.mark.thorough
def test_hooks_of_a_learner_are_called_with_its_own_item(tmp_path):
    model = made(a=partial(Hooked, n_steps=4, **SMALL), b=PPO, max_env_steps=24)
    trainer = fit(model, tmp_path)
    start = [("setup", "fit", -1), ("on_fit_start",), ("on_train_start", 0, True)]
    items = [
        (("on_train_batch_start", (4, 2, 1), k), ("on_train_batch_end", {"loss": torch.tensor(n)}, (4, 2, 1), int(n)))
        for n, k in ((1.0, 0), (2.0, 2), (3.0, 3))  # the batch number 1 is of b alone
    ]
    assert model.algorithms["a"].called == [*start, *(each for pair in items for each in pair), ("on_train_end", 24)]
    assert float(trainer.callback_metrics["a/doubled"]) == 6.0


class Saves(lrl.A2C):
    """Adds something to checkpoints."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1


class Calls(lrl.A2C):
    """Brings a callback."""

    def configure_callbacks(self):
        return [pl.Callback()]


class MoreLearning(lrl.A2C):
    """Brings a callback in our own way."""

    def learning_callbacks(self):
        return [pl.Callback()]


@pytest.mark.parametrize(
    ("learner", "hook"), [(Saves, "on_save_checkpoint"), (Calls, "configure_callbacks"), (MoreLearning, "learning_callbacks")]
)
def test_a_hook_that_is_not_called_for_a_learner_is_refused_in_one_line(learner, hook):
    with pytest.raises(SettingError) as error:
        made(a=partial(learner, **SMALL), b=PPO)
    line = f"behavior a: {learner.__name__}.{hook} is not called if several behaviors learn; override it in a subclass of MultiAgent"
    assert str(error.value) == line


def counting(called):
    """Return a learner that overrides all methods which Lightning may call, except those that are refused."""
    parents = (ModelHooks, DataHooks, CheckpointHooks, pl.LightningModule)
    prefixes = "on_", "configure_", "optimizer_", "lr_scheduler_", "training_step"
    more = {name for parent in parents for name in vars(parent) if name.startswith(prefixes)} | {"setup", "teardown"}

    def override(name):
        def method(self, *arguments, **named):
            called.add(name)
            return getattr(super(Counting, self), name)(*arguments, **named)

        return method

    names = [name for name in more if name not in UNCALLED and callable(getattr(lrl.A2C, name))]
    Counting = type("Counting", (lrl.A2C,), {"__module__": __name__, **{name: override(name) for name in names}})
    return Counting


@pytest.mark.thorough
def test_each_hook_that_is_called_for_an_algorithm_alone_is_called_for_one_of_several(tmp_path):
    alone, several, evaluation = set(), set(), lrl.EvaluationConfig(every_n_env_steps=8, episodes=1)
    fit(counting(alone)("tests.agents.Together", max_env_steps=24, n_steps=4, **SMALL), tmp_path / "alone", evaluation=evaluation)
    fit(made(a=partial(counting(several), n_steps=4, **SMALL), b=PPO, max_env_steps=24), tmp_path / "several", evaluation=evaluation)
    assert alone == several and {"on_train_batch_end", "on_before_backward", "on_validation_end", "configure_model"} <= alone


@pytest.mark.thorough
def test_a_learner_that_asks_for_no_more_batches_ends_the_run(tmp_path):
    class Ends(lrl.A2C):
        def on_train_batch_start(self, batch, batch_idx):
            return -1

    model = made(a=partial(Ends, n_steps=4, **SMALL), b=PPO, max_env_steps=2400)
    fit(model, tmp_path)
    assert model.updates == 0


@pytest.mark.thorough
def test_frozen_behaviors_count_in_no_mean(tmp_path):
    run = trained(tmp_path / "first")
    evaluation = lrl.EvaluationConfig(every_n_env_steps=48, episodes=2)
    trainer = fit(beside_frozen(run), tmp_path / "second", evaluation=evaluation, logger=True)
    metrics = trainer.callback_metrics
    row = next(row for row in reversed(read_rows(trainer.run_folder / "metrics.csv")) if row["rollout/ep_rew_mean"])
    assert metrics["eval/mean_reward"] == metrics["eval/a/mean_reward"] != metrics["eval/b/mean_reward"]
    assert row["rollout/ep_rew_mean"] == row["a/rollout/ep_rew_mean"] != row["b/rollout/ep_rew_mean"]
    assert row["rollout/success_rate"] == "1.0"  # b, which does not learn, reports failures
    assert float(metrics["eval/success_rate"]) == 1.0
    assert 6 <= lrl.evaluate(trainer.run_folder, episodes=2)["return_mean"] <= 6.4


@pytest.mark.thorough
def test_rows_are_planned_by_the_iterations_of_those_that_learn(tmp_path):
    run, found = trained(tmp_path / "first"), []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, algorithm, *others):
            found.append(algorithm.collector.n_steps)

    fit(beside_frozen(run), tmp_path / "second", Look())
    assert set(found) == {6}


class BrokenLater(Together):
    """Pays b a NaN in its third step."""

    def pay(self, agent, action):
        return float("nan") if agent == "b" and self.t == 2 else 1.0


def test_an_evaluation_does_what_on_nan_says():
    model = made(BrokenLater, a=partial(A2C, on_nan="skip_update"), b=partial(A2C, on_nan="skip_update"))
    assert lrl.evaluate(model, episodes=2)["return_mean"] == 3.5  # a gets 4 and b 3
    with pytest.raises(lrl.errors.NotFiniteError, match="reward is nan of b in evaluation"):
        lrl.evaluate(made(BrokenLater, a=A2C, b=A2C), episodes=2)


@pytest.mark.thorough
def test_a_world_that_a_function_builds_has_a_fingerprint_and_other_agents_are_refused(tmp_path):
    behaviors = {"a": lrl.Behavior("a", A2C), "b": lrl.Behavior("b", PPO)}
    model = lrl.MultiAgent(Together, behaviors, 24)
    fit(model, tmp_path / "run", StopAt(1))
    again = lrl.MultiAgent(Mortal, behaviors, 24)
    again.sides = model.sides
    assert model.experience().world.settings != again.experience().world.settings != ""
    model.env = OnlyA
    with pytest.raises(SettingError, match="the environment's agents differ from those of the model, a, b"):
        model.experience()


@dataclass(kw_only=True, eq=False, repr=False)
class Central(lrl.PPO):
    """Its critic sees all, by default."""

    critic_obs: str = "all"


def test_a_class_says_by_its_default_what_its_critic_sees():
    model = made(a=partial(Central, n_steps=6, batch_size=12, **SMALL), b=PPO)
    assert model.sides["a"].joint == "all" and model.sides["b"].joint == ""


def test_a_function_that_hides_what_its_critic_sees_is_one_line():
    def build(env, **settings):
        return lrl.PPO(env, n_steps=6, batch_size=12, critic_obs="all", **settings)

    with pytest.raises(SettingError) as error:
        made(a=build, b=PPO)
    assert "behavior a: critic_obs all is not in the given spaces" in str(error.value) and "\n" not in str(error.value)


class BrokenB(Together):
    """Pays b a NaN in every step."""

    def pay(self, agent, action):
        return float("nan") if agent == "b" else 1.0


@pytest.mark.thorough
def test_the_nans_in_a_row_of_a_frozen_behavior_are_counted_on_in_a_continued_run(tmp_path):
    careful = partial(PPO, on_nan="skip_update")
    run = fit(made(a=careful, b=careful), tmp_path / "first", evaluation=lrl.EvaluationConfig(every_n_env_steps=48, episodes=2)).run_folder

    def half(*callbacks, **settings):
        behaviors = {"a": lrl.Behavior("a", careful), "b": lrl.Behavior("b", lrl.FrozenPolicy(run, "b"))}
        model = lrl.MultiAgent({"id": "tests.algorithms.test_multi_agent.BrokenB", "num_envs": 2}, behaviors, 1000)
        fit(model, tmp_path / "second", *callbacks, **settings)

    half(StopAt(10))  # 60 steps, all bad
    counts = []

    class Count(pl.Callback):
        def on_train_batch_end(self, trainer, algorithm, *others):
            counts.append(algorithm.algorithms["b"].learner.guard.bad_steps)

    with pytest.raises(lrl.errors.NotFiniteError, match="for 100 steps in a row"):
        half(Count(), ckpt_path="last")
    assert counts == [66, 72, 78, 84, 90, 96]


@pytest.mark.thorough
def test_lines_about_a_learner_name_its_behavior(tmp_path, capsys):
    fit(made(), tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("b: replay buffer: 200 transitions") for line in lines), lines


class Grows(lrl.A2C):
    """Makes one more layer where Lightning asks for it."""

    def configure_model(self):
        if not hasattr(self, "extra"):
            self.extra = torch.nn.Linear(2, 2)


@pytest.mark.thorough
def test_a_learner_may_make_layers_in_configure_model_and_be_frozen_later(tmp_path):
    run = fit(made(a=partial(Grows, n_steps=4, **SMALL), b=PPO), tmp_path / "first").run_folder / "checkpoints" / "last.ckpt"
    model = lrl.MultiAgent("tests.agents.Together", {"a": lrl.Behavior("a", lrl.FrozenPolicy(run, "a")), "b": lrl.Behavior("b", PPO)}, 96)
    fit(model, tmp_path / "second")
    stored = torch.load(run, weights_only=True)["state_dict"]["algorithms.a.extra.weight"]
    assert torch.equal(model.algorithms["a"].extra.weight, stored)


class Validated(lrl.A2C):
    """Logs at the end of each evaluation."""

    def on_validation_epoch_end(self):
        self.log("half", self.env_steps / 2)


@pytest.mark.thorough
def test_what_a_learner_logs_in_an_evaluation_is_a_metric_under_its_name(tmp_path):
    evaluation = lrl.EvaluationConfig(every_n_env_steps=48, episodes=2)
    learner = partial(Validated, n_steps=4, **SMALL)
    trainer = fit(made(a=learner, b=learner), tmp_path, evaluation=evaluation, logger=True)
    assert [float(trainer.callback_metrics[f"{name}/half"]) for name in "ab"] == [48.0, 48.0]
    rows = [row for row in read_rows(trainer.run_folder / "metrics.csv") if row["a/half"]]
    assert [float(row["a/half"]) for row in rows] == [24.0, 48.0]
