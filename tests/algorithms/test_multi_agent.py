"""Several behaviors in one world, each with an algorithm of its own."""

import shutil
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.errors import SettingError
from lightning_rl.loggers import read_rows
from tests.agents import Mortal, Together

SMALL = {"net_arch": [8], "compile": False}
PPO = partial(lrl.PPO, n_steps=6, batch_size=12, n_epochs=1, **SMALL)
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


def made(env=Together, max_env_steps=96, copies=2, **learners):
    pl.seed_everything(3, verbose=False)
    learners = learners or {"a": PPO, "b": DQN}
    return lrl.MultiAgent(
        {"id": f"{env.__module__}.{env.__name__}", "num_envs": copies},
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


def test_iterations_have_their_own_length_and_a_batch_holds_those_that_are_full(tmp_path):
    items, model = Items(), made(a=A2C, b=PPO, max_env_steps=24)
    fit(model, tmp_path, items)
    assert items.names == [["a"], ["b"], ["a"], ["a", "b"]]  # after 4, 6, 8 and 12 steps of the world
    assert (model.env_steps, model.each["a"].env_steps, model.each["b"].env_steps) == (24, 24, 24)
    assert (model.each["a"].updates, model.each["b"].updates, model.updates) == (3, 2, 5)


def test_each_behavior_learns_as_often_as_it_would_alone(tmp_path):
    model = made()
    fit(model, tmp_path)
    assert model.each["a"].updates == 96 // 12 and model.each["b"].updates == (96 - 8) // 4


def test_steps_count_copies_and_those_of_a_behavior_the_agents_that_were_there(tmp_path):
    model = made(Mortal, max_env_steps=48)
    fit(model, tmp_path)
    assert model.env_steps == 48 and model.each["a"].env_steps == 48
    assert model.each["b"].env_steps == 24  # it is there in the first two of four steps


@pytest.mark.parametrize("other", [DQN, PPO, A2C])
def test_a_behavior_learns_bit_for_bit_what_it_learns_without_the_others(tmp_path, other):
    alone, beside = made(OnlyA, a=PPO), made(Together, a=PPO, b=other)
    fit(alone, tmp_path / "alone")
    fit(beside, tmp_path / "beside")
    assert different(alone.each["a"], beside.each["a"]) == []


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


def test_a_frozen_behavior_acts_and_does_not_learn(tmp_path):
    run = trained(tmp_path / "first")
    model = beside_frozen(run)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = fit(model, tmp_path / "second", evaluation=lrl.EvaluationConfig(every_n_env_steps=48, episodes=2), logger=True)
    changed = {name.split(".")[1] for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {"a"} and (model.each["a"].updates, model.each["b"].updates) == (8, 0)
    assert model.each["b"].env_steps == 64 and "b/rollout/ep_rew_mean" in read_rows(trainer.run_folder / "metrics.csv")[-1]
    obs = np.array([1, 2], np.float32)
    assert lrl.load_policy(run, behavior="b").act(obs)[0] == lrl.load_policy(trainer.run_folder, behavior="b").act(obs)[0]


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_with_a_frozen_behavior_continues_exactly(tmp_path, stop):
    run = trained(tmp_path / "first")
    whole, again = beside_frozen(run), beside_frozen(run)
    fit(whole, tmp_path / "whole")
    fit(beside_frozen(run), tmp_path / "parts", StopAt(stop))
    fit(again, tmp_path / "parts", ckpt_path="last")
    assert different(whole, again) == []


def test_a_checkpoint_holds_a_frozen_policy_too_and_its_config_names_where_it_comes_from(tmp_path):
    run = trained(tmp_path / "first")
    trainer = fit(beside_frozen(run), tmp_path / "second")
    shutil.rmtree(run)
    model = lrl.MultiAgent.load_from_checkpoint(trainer.run_folder / "checkpoints" / "last.ckpt")
    assert model.frozen == ["b"] and type(model.each["b"]) is lrl.DQN
    with pytest.raises(SettingError, match=r"behavior b: ckpt_path .*version_0' is not a file"):
        beside_frozen(run)


def test_a_frozen_policy_that_cannot_play_these_agents_is_one_line(tmp_path):
    run = trained(tmp_path / "first")
    with pytest.raises(SettingError, match=r"behavior b: .* was trained with other observations or actions than these agents have"):
        lrl.MultiAgent("tests.agents.Continuous", {"a": lrl.Behavior("a", PPO), "b": lrl.Behavior("b", lrl.Frozen(run, "b"))})
    with pytest.raises(SettingError, match="behaviors: none of them learns"):
        beside_frozen(run, a=lrl.Behavior("a", lrl.Frozen(run, "a")))


MEMORY = partial(lrl.PPO, n_steps=6, batch_size=12, n_epochs=1, memory=lrl.LSTM(4, 3), **SMALL)
CASES = {
    "two kinds": (Together, {"a": PPO, "b": DQN}),
    "deaths": (Mortal, {"a": A2C, "b": PPO}),
    "deaths in a replay buffer": (Mortal, {"a": PPO, "b": DQN}),
    "memory": (Mortal, {"a": MEMORY, "b": A2C}),
}


@pytest.mark.parametrize("stop", [1, 2, 5])
@pytest.mark.parametrize("case", CASES)
def test_a_run_continues_exactly_in_the_middle_of_another_behaviors_iteration(tmp_path, case, stop, capsys):
    env, learners = CASES[case]
    whole = made(env, **learners)
    fit(whole, tmp_path / "whole")
    fit(made(env, **learners), tmp_path / "parts", StopAt(stop))
    continued = made(env, **learners)
    fit(continued, tmp_path / "parts", ckpt_path="last")
    assert "new episodes" not in capsys.readouterr().out
    assert different(whole, continued) == [] and continued.env_steps == 96
    assert [each.updates for each in continued.each.values()] == [each.updates for each in whole.each.values()]


def test_metrics_of_behaviors_stand_under_their_names(tmp_path):
    evaluation = lrl.EvaluationConfig(every_n_env_steps=48, episodes=2)
    trainer = fit(made(), tmp_path, evaluation=evaluation, logger=True)
    names = set(read_rows(trainer.run_folder / "metrics.csv")[-1])
    assert {"a/train/loss", "a/rollout/ep_rew_mean", "b/train/n_updates", "b/replay/size", "rollout/ep_rew_mean", "time/fps"} <= names
    # 0 + 1 + 2 + 3 and 40 more for b, and a tenth of the actions: 0 or 1
    a, b = (float(trainer.callback_metrics[f"eval/{name}/mean_reward"]) for name in "ab")
    assert 6 <= a <= 6.4 and 46 <= b <= 46.4 and float(trainer.callback_metrics["eval/mean_reward"]) == pytest.approx((a + b) / 2)


def test_a_checkpoint_holds_all_policies_and_gives_the_one_that_is_named(tmp_path):
    trainer = fit(made(), tmp_path, evaluation=lrl.EvaluationConfig(every_n_env_steps=48, episodes=2))
    model = lrl.MultiAgent.load_from_checkpoint(trainer.run_folder)
    assert list(model.each) == ["a", "b"] and type(model.each["b"]) is lrl.DQN and model.env_steps in (48, 96)
    obs = np.array([1, 2], np.float32)
    assert lrl.load_policy(trainer.run_folder, behavior="b").act(obs)[0] == model.each["b"](obs[None])[0]
    assert lrl.evaluate(trainer.run_folder, episodes=3)["episodes"] == 3
    with pytest.raises(SettingError, match="name a behavior: this run has a, b"):
        lrl.load_policy(trainer.run_folder)
    with pytest.raises(SettingError, match="there is no behavior 'c': this run has a, b"):
        lrl.load_policy(trainer.run_folder, behavior="c")


@pytest.mark.parametrize(
    ("behaviors", "line"),
    [
        ({"a": lrl.Behavior("a", PPO)}, "agent b has no behavior"),
        ({"a": lrl.Behavior("*", PPO), "b": lrl.Behavior("b", PPO)}, "agent b has 2 behaviors, a and b"),
        ({"all": lrl.Behavior("*", PPO), "c": lrl.Behavior("c*", PPO)}, "behavior c has no agents; those of the environment are a, b"),
        ({"all": lrl.Behavior("*", partial(lrl.SAC, threaded=True))}, "behavior all: actors and threaded are for one behavior alone"),
        ({"all": lrl.Behavior("*", partial(lrl.PPO, normalize_obs="frozen"))}, "behavior all: normalize_obs frozen"),
        ({"all": {"agents": "*", "learner": {"class_path": "PPOO"}}}, "there is no algorithm 'PPOO'"),
        (
            {"all": {"agents": "*", "learner": {"class_path": "PPO", "init_args": {"n_step": 4}}}},
            "behavior all: n_step is not a setting of PPO",
        ),
        ({"all": {"agents": "*", "learner": {"class_path": "PPO", "init_args": {"max_env_steps": 4}}}}, "max_env_steps belongs to the run"),
        ({"a.b": {"agents": "*", "learner": "PPO"}}, "the name 'a.b' must consist of letters, digits, _ and -"),
        (
            {"all": lrl.Behavior("*", "PPO")},
            "behavior all: learner must make an algorithm for its agents, got str; give a class such as PPO",
        ),
        ({"all": lrl.Behavior("*", partial(lrl.PPO, max_env_steps=3))}, "behavior all: max_env_steps belongs to the run"),
        ({}, "behaviors must name at least one, each with agents and a learner"),
        (None, "behaviors must name at least one, each with agents and a learner"),
        ({"all": {"agent": "*", "learner": "PPO"}}, "behaviors.all must be a mapping of agents and learner"),
    ],
)
def test_wrong_behaviors_are_one_line(behaviors, line):
    with pytest.raises(SettingError) as error:
        lrl.MultiAgent("tests.agents.Together", behaviors)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_games_of_turns_are_refused_in_one_line():
    with pytest.raises(SettingError, match="move in turn, and cannot learn all at once"):
        lrl.MultiAgent("tests.agents.InTurn", {"all": {"agents": "*", "learner": "PPO"}})


def test_a_run_continues_with_its_behaviors_in_another_order(tmp_path):
    whole = made(a=PPO, b=DQN)
    fit(whole, tmp_path / "whole")
    fit(made(a=PPO, b=DQN), tmp_path / "parts", StopAt(3))
    again = made(b=DQN, a=PPO)
    fit(again, tmp_path / "parts", ckpt_path="last")
    assert different(whole, again) == []


def test_successes_of_an_open_iteration_come_back(tmp_path):
    def successes(model, folder, *callbacks, **settings):
        kept = {}

        class Keep(pl.Callback):
            def on_train_batch_end(self, trainer, algorithm, *others):
                for name, each in algorithm.each.items():
                    kept[name] = list(each.collector.statistics.successes)

        fit(model, folder, Keep(), *callbacks, **settings)
        return kept

    whole = successes(made(a=A2C, b=PPO), tmp_path / "whole")
    fit(made(a=A2C, b=PPO), tmp_path / "parts", StopAt(1))
    assert successes(made(a=A2C, b=PPO), tmp_path / "parts", ckpt_path="last") == whole and 1.0 in whole["a"]


def test_another_fit_goes_on_with_the_counts_of_each_behavior(tmp_path):
    model = made()
    fit(model, tmp_path)
    model.max_env_steps = 144
    fit(model, tmp_path)
    assert model.env_steps == 144 and [each.env_steps for each in model.each.values()] == [144, 144]
    assert model.episodes == 2 * 144 // 4


class Broken(Together):
    """Pays a NaN to a in every step."""

    def pay(self, agent, action):
        return float("nan") if agent == "a" else 0.0


def test_a_behavior_that_only_gets_nans_ends_the_run_as_alone(tmp_path):
    model = made(Broken, max_env_steps=1000, a=partial(PPO, on_nan="skip_update"), b=partial(PPO, on_nan="skip_update"))
    with pytest.raises(lrl.errors.NotFiniteError, match="for 100 steps in a row"):
        fit(model, tmp_path)
