"""A callback that sets a parameter of the environments: from the next episodes on, in evaluations, in checkpoints and over a resume."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
import yaml

import lightning_rl as lrl
from lightning_rl import BehavioralCloning, BestModel, EvolutionStrategies, MultiAgent, SettingError, StopOnEvaluation
from lightning_rl.callbacks import callbacks_of
from tests.command_line import TINY
from tests.command_line import run as command_line
from tests.fitting import fit, tiny

QUIET = {"enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": "runs"}


class Longer(pl.Callback):
    """Lengthens episodes after each evaluation."""

    def __init__(self, step=1):
        self.step = step

    def on_evaluation_end(self, trainer, algorithm, metrics):
        algorithm.set_parameter("period", algorithm.current_env.parameters["period"] + self.step)


class Once(pl.Callback):
    """Sets the length of episodes after an iteration."""

    def __init__(self, value, iteration=2):
        self.value, self.iteration, self.lengths = value, iteration, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.lengths += [each.length for each in pl_module.finished_episodes()[""]]
        if trainer.global_step == self.iteration:
            pl_module.set_parameter("period", self.value)


def made(cls=lrl.PPO, period=3, **settings):
    env = {"parameters": {"period": period}} | settings.pop("env", {})
    return tiny(cls, env=env, **settings)


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.thorough)])
def test_the_next_episodes_have_the_new_value(vectorization):
    callback = Once(5)
    fit(made(env={"vectorization": vectorization}), callbacks=[callback])
    # 16 steps of each of two environments before the change: five episodes of 3, and a sixth that ends as it began
    assert callback.lengths == [3] * 12 + [5] * 12


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cls", "settings"), [(EvolutionStrategies, {}), (lrl.IMPALA, {"actors": {"num_actors": 1, "backend": "processes"}}), (lrl.SAC, {})]
)
def test_actors_generations_and_replay_get_the_new_value_too(cls, settings):
    callback = Once(5)
    fit(made(cls, period=4, max_env_steps=192, **settings), callbacks=[callback])
    assert set(callback.lengths) == {4, 5} and callback.lengths == sorted(callback.lengths)


def evaluations(folder):
    with next(Path(folder).rglob("evaluations.csv")).open() as file:
        return [int(row["length"]) for row in csv.DictReader(file)]


def run(*callbacks, evaluation, ckpt_path=None, root="runs", steps=-1, **settings):
    """Return the model after a run, and its trainer."""
    model = made(**settings)
    trainer = lrl.Trainer(**QUIET | {"default_root_dir": root}, callbacks=[*callbacks], evaluation=evaluation, max_steps=steps)
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


EVERY_ITERATION = {"every_n_env_steps": 16, "episodes": 2}


@pytest.mark.thorough
def test_evaluations_have_the_new_value_and_best_is_judged_at_it(folder):
    model, trainer = run(Longer(-1), evaluation=EVERY_ITERATION, period=9)
    lengths = [9, 8, 7, 6, 5, 4]
    assert evaluations("runs") == [length for length in lengths for _ in range(2)]
    (best,) = callbacks_of(trainer, BestModel)
    assert best.best == -float("inf")  # the last evaluation set another value
    assert (
        lrl.evaluate(trainer.run_folder / "checkpoints/best.ckpt", episodes=2)["length_mean"] == 3
    )  # the value that was set when it was saved
    assert lrl.evaluate(model, episodes=2)["length_mean"] == 3 and lrl.make_env(model).reset()[0].tolist() == [0, 0]
    assert model.hparams["env"]["parameters"] == {"period": 9}  # `config.yaml` repeats the run


@pytest.mark.thorough
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_callback_that_is_named_on_the_command_line_or_in_a_config_sets_it(in_a_file, folder, capfd):
    path = f"{__name__}.Longer"
    (folder / "mine.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [{"class_path": path, "init_args": {"step": 2}}]}}))
    callback = "--config mine.yaml" if in_a_file else f"--trainer.callbacks+={path} --trainer.callbacks.step 2"
    parameters = "--model.env.id tests.environments.Scripted --model.env.parameters '{period: 3}'"
    evaluation = "--evaluation.every_n_env_steps 32 --trainer.enable_progress_bar false"
    assert command_line(f"fit {TINY} {parameters} {evaluation} {callback}", capfd)[0] == 0
    assert evaluations("runs") == [3, 3, 5, 5]
    last = next(Path("runs").rglob("last.ckpt"))
    status, out, _ = command_line(f"evaluate --import tests --ckpt_path {last} --episodes 2", capfd)
    assert status == 0 and "length 7" in out


@pytest.mark.thorough
def test_scores_of_another_value_are_not_compared(folder):
    class Shorter(Longer):
        def on_evaluation_end(self, trainer, algorithm, metrics):
            if metrics["eval/mean_ep_length"] == 6:
                algorithm.set_parameter("period", 2)

    patience = StopOnEvaluation(patience=3)
    _, trainer = run(Shorter(), patience, evaluation=EVERY_ITERATION, period=6)
    (best,) = callbacks_of(trainer, BestModel)
    assert 1 <= best.best <= 2  # 0 + 1, and at most 0.2 for each action; 15 before
    assert 1 <= patience.best <= 2


@pytest.mark.thorough
def test_a_resumed_run_continues_bit_for_bit(folder):
    whole, _ = run(Longer(), evaluation=EVERY_ITERATION, root="whole")
    run(Longer(), evaluation=EVERY_ITERATION, root="half", steps=3)
    shutil.copytree("half", "copy")
    resumed, _ = run(Longer(), evaluation=EVERY_ITERATION, root="half", ckpt_path="last")
    assert resumed.run.parameter_values == whole.run.parameter_values == {"period": 9}
    assert evaluations("half") == evaluations("whole") == [length for length in range(3, 9) for _ in range(2)]
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert all(ours[name].equal(theirs[name]) for name in ours)
    changed, _ = run(evaluation=EVERY_ITERATION, root="copy", ckpt_path="last", period=20)  # settings given explicitly win
    assert changed.run.parameter_values == {} and evaluations("copy")[-1] == 20


def test_a_value_that_is_set_before_a_run_holds_in_it_and_the_same_value_changes_nothing():
    model = made()
    model.set_parameter("period", 4)
    callback = Once(4)
    fit(model, callbacks=[callback])
    assert set(callback.lengths) == {4} and model.collector is None
    model.set_parameter("period", {"sampler_type": "uniform", "sampler_parameters": {"min_value": 2, "max_value": 3}})
    assert model.run.parameter_values["period"]["sampler_parameters"] == {"min_value": 2, "max_value": 3, "seed": -1}


def test_an_environment_that_is_given_to_a_file_keeps_its_own_value(folder):
    model = made()
    model.set_parameter("period", 4)
    fit(model, max_steps=1).save_checkpoint("a.ckpt")
    given = {"id": "tests.environments:Scripted-v0", "parameters": {"period": 7}}
    assert [lrl.evaluate("a.ckpt", episodes=1, env=env)["length_mean"] for env in (None, given)] == [4, 7]
    checkpoint = torch.load("a.ckpt", weights_only=True)
    checkpoint["lightning_rl"]["parameters"] = {"period": "os.system"}
    torch.save(checkpoint, "b.ckpt")
    with pytest.raises(SettingError, match=r"lightning_rl/parameters/period"):
        lrl.evaluate("b.ckpt")


LESSONS = {"curriculum": [{"value": 3, "completion_criteria": {"threshold": 1}}, {"value": 5}]}


@pytest.mark.parametrize(
    ("model", "value", "line"),
    [
        (lambda: made(), ("perod", 4), "set_parameter: perod is not in env.parameters, which give its first value; did you mean period?"),
        (lambda: tiny(lrl.PPO), ("period", 4), "set_parameter: period is not in env.parameters, which give its first value"),
        (lambda: made(period=LESSONS), ("period", 4), "set_parameter: period follows its lessons in env.parameters"),
        (lambda: made(), ("period", "four"), "set_parameter: period must be a finite number, got 'four'"),
        (
            lambda: tiny(BehavioralCloning),
            ("period", 4),
            "set_parameter: BehavioralCloning steps no environments",
        ),
    ],
)
def test_what_cannot_be_set_is_refused_in_one_line(model, value, line):
    with pytest.raises(SettingError) as error:
        model().set_parameter(*value)
    assert str(error.value) == line


@pytest.mark.thorough
def test_several_agents_and_behaviors_get_the_new_value():
    env = {"id": "tests.agents.Sized", "num_envs": 2, "parameters": {"size": 2}}
    model = MultiAgent(env, {"all": {"agents": "*", "learner": {"class_path": "PPO", "init_args": {"n_steps": 8, "batch_size": 8}}}}, 96)
    model.set_parameter("size", 3)
    assert model.current_env.parameters == {"size": 3}
    fit(model, max_steps=1)
