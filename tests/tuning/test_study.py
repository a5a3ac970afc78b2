"""Studies: trials are runs, bad ones are pruned or fail alone, and a study that was killed ends like one that was not."""

from __future__ import annotations

import csv
import math
import os
import re
import resource
import shutil
import signal
import sqlite3
import time
from contextlib import closing, contextmanager
from pathlib import Path

import optuna
import pytest
import yaml
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from lightning_rl.cli.tune import Results
from lightning_rl.errors import SettingError, UnsavedError
from lightning_rl.reports.runs import find_runs
from lightning_rl.training.run_processes import Message
from lightning_rl.tuning.comparison import Objective
from lightning_rl.tuning.search_space import Dimension, SearchSpace, as_text
from lightning_rl.tuning.study import Study, StudySettings, open_storage, take_folder
from tests.apart import Apart
from tests.command_line import run, run_apart

PAYING = """
import os
import resource
import gymnasium as gym, numpy as np

class Paying(gym.Env):
    '''Pays the same in each of five steps; in its hundredth it may fail, or the disk of its process may become full.'''

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)
    steps = 0

    def __init__(self, reward=0.0, fault=""):
        self.reward, self.fault = reward, fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t, self.steps = self.t + 1, self.steps + 1
        if self.steps == 100 and self.fault == "raise":
            raise RuntimeError("no more coins")
        if self.steps == 100 and self.fault == "die":
            os._exit(9)
        if self.steps == 100 and self.fault == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        return np.full(2, self.t / 10, np.float32), self.reward, self.t == 5, False, {}

gym.register("Paying-v0", f"{__name__}:Paying")
"""
PPO = (
    "--model PPO --model.env.num_envs 2 --model.n_steps 32 --model.batch_size 64 --model.n_epochs 1 --model.net_arch [8] "
    "--model.max_env_steps 320 --evaluation.every_n_env_steps 64 --evaluation.episodes 2 --evaluation.num_envs 2 --trainer.accelerator cpu "
    "--evaluation.max_episode_steps 50"
)
"""Five iterations, each with an evaluation."""
CARTPOLE = "--model.env.id CartPole-v1"
OF_REWARDS = "--import paying --model.env.id Paying-v0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paying.py").write_text(PAYING)
    (tmp_path / "rates.yaml").write_text("model.learning_rate: {low: 1e-4, high: 1e-2, log: true}\nmodel.n_epochs: {low: 1, high: 4}\n")
    return tmp_path


def rows(file):
    """The trials of a study, without their times."""
    with file.open() as lines:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(lines)]


def trials(folder):
    return optuna.load_study(study_name="study", storage=open_storage(folder)).trials


def recorded(folder):
    """All that a study recorded of its trials but for their times, and of the runs that the best had again."""
    study = optuna.load_study(study_name="study", storage=open_storage(folder))
    trials = [
        (each.number, each.state, each.value, each.params, each.intermediate_values, each.user_attrs["evaluations"])
        for each in study.trials
    ]
    return [*trials, study.user_attrs.get("confirmation")]


@pytest.mark.thorough
def test_a_study_leaves_runs_a_table_a_picture_and_the_best_config_and_goes_on(folder, capfd):
    options = f"tune {PPO} --model.env.id CartPole-v1 --space rates.yaml --seeds 2 --pruner none --confirm 0 --out mine"
    status, out, err = run(f"{options} --trials 1", capfd)
    assert (status, err) == (0, "") and "importances need 4 complete trials, and there are 1" in out
    before = rows(folder / "mine" / "trials.csv")
    status, out, err = run(f"{options} --trials 2", capfd)
    assert (status, err) == (0, "") and "continuing the study in mine: 1 trials ended, 0 interrupted" in out
    assert "trial 1: " in out and "trial 0: " not in out
    table = rows(folder / "mine" / "trials.csv")
    assert [row["state"] for row in table] == ["complete"] * 2 and table[0] == before[0]
    for row in table:
        assert float(row["value"]) == (float(row["seed_1"]) + float(row["seed_2"])) / 2
    best = max(table, key=lambda row: float(row["value"]))
    assert f"best: trial {best['trial']}, eval/mean_reward {as_text(float(best['value']))}: learning_rate" in out
    runs, empty = find_runs([folder / "mine"])
    assert not empty and {each.folder.name for each in runs} == {f"trial_{number}_seed_{seed}" for number in (0, 1) for seed in (1, 2)}
    first = next(each for each in runs if each.folder.name == "trial_0_seed_2")
    assert first.seed == 2 and max(first.returns) == pytest.approx(float(table[0]["seed_2"])) and len(first.returns) == 5
    assert (first.folder / "checkpoints" / "best.ckpt").is_file()
    assert (folder / "mine" / "study.png").stat().st_size > 10_000
    config = yaml.safe_load((folder / "mine" / "best.yaml").read_text())
    settings = config["model"]["init_args"]
    assert settings["learning_rate"] == float(best["learning_rate"])
    length = f"that run learns for {settings['max_env_steps']:,} environment steps, as each trial did, in whole iterations"
    assert f"{length}; --model.max_env_steps N changes that\n" in out
    assert run("fit --config mine/best.yaml --print_config", capfd)[0] == 0

    status, out, err = run(f"{options} --trials 3 --model.gamma 0.5", capfd)
    assert status == 2 and err.startswith("error: the study in mine has another model.gamma: repeat its command") and err.count("\n") == 1


@pytest.mark.slow
def test_a_trial_that_is_worse_than_the_others_is_pruned_and_one_that_fails_does_not_end_the_study(folder, capfd):
    rewards = "{choices: [{reward: 1.0}, {reward: 0.0}, {reward: 1.0, fault: raise}, {reward: 1.0, fault: die}]}"
    (folder / "rewards.yaml").write_text(f"model.env.kwargs: {rewards}\n")
    options = f"tune {OF_REWARDS} {PPO} --space rewards.yaml --sampler random --startup_trials 1 --trials 5 --jobs 2 --seed 374 --confirm 0"
    status, out, err = run(options, capfd)
    assert (status, err) == (0, "")
    table = rows(folder / "studies" / "PPO_Paying-v0" / "trials.csv")
    kinds = {row["env.kwargs"]: row for row in table}
    assert len(table) == 5 and len(kinds) == 4, "another --seed draws all four"
    for row in table:
        if "raise" in row["env.kwargs"]:
            assert row["state"] == "fail" and "no more coins" in row["error"]
        elif "die" in row["env.kwargs"]:
            assert row["state"] == "fail" and "exit code" in row["error"]
        elif row["env.kwargs"] == '{"reward": 1.0}':
            assert row["state"] == "complete" and float(row["value"]) == 5.0
    pruned = [each for each in trials(folder / "studies" / "PPO_Paying-v0") if each.state == optuna.trial.TrialState.PRUNED]
    assert pruned and all(each.params["model.env.kwargs"] == '{"reward": 0.0}' for each in pruned)
    assert all(len(each.intermediate_values) < 5 for each in pruned)
    assert out.count("raised RuntimeError: no more coins (paying.py:") == 2 and out.count("failed (it died with exit code 9)") == 1
    assert all(f"trial {each.number}: pruned with 0 at" in out for each in pruned)


@pytest.mark.thorough
def test_a_study_of_failures_ends_with_the_error_of_the_last(folder, capfd):
    (folder / "rewards.yaml").write_text("model.env.kwargs: {choices: [{fault: raise}]}\n")
    status, _, err = run(f"tune {OF_REWARDS} {PPO} --space rewards.yaml --trials 1", capfd)
    assert status == 2 and err.startswith("error: none of 1 trials is complete; the last failed: ") and "no more coins" in err


@pytest.mark.slow
def test_a_study_begins_with_the_values_of_its_config_and_random_trials_are_drawn_anywhere(folder, capfd):
    options = (
        f"tune {PPO} --model.env.id CartPole-v1 --model.n_epochs 3 --model.learning_rate 0.0037 --space rates.yaml --trials 1 --confirm 0"
    )
    for sampler in ("tpe", "random"):
        status, out, err = run(f"{options} --sampler {sampler} --out {sampler}", capfd)
        assert (status, err) == (0, "") and ("at first the config's own values\n" in out) is (sampler == "tpe")
    assert trials(folder / "tpe")[0].params == {"model.learning_rate": 0.0037, "model.n_epochs": 3}
    assert trials(folder / "random")[0].params["model.learning_rate"] != 0.0037


@pytest.mark.thorough
def test_a_study_says_what_it_will_do(folder, capfd):
    options = (
        f"tune {PPO} --model.env.id CartPole-v1 --model.n_epochs 3 --space rates.yaml --trials 1 --confirm 1 --confirm_seeds 1 --out mine"
    )
    status, out, err = run(options, capfd)
    assert (status, err) == (0, "") and "(mean of 2 seeds): learning_rate 0.0003, n_epochs 3\n" in out
    assert "running the best trials again, 0, with 1 new seed each" in out.splitlines()
    assert out.splitlines()[:7] == [
        "study of PPO on CartPole-v1",
        "  trials        1, each a run of 320 environment steps",
        "  at the end    the best 1 again, with 1 new seed each",
        "  settings      learning_rate, n_epochs (rates.yaml)",
        "  values        drawn by tpe, at first the config's own values",
        "  compared by   the max of eval/mean_reward in at most 5 evaluations; pruner median",
        "  folder        mine",
    ]


LUCKY = """
import gymnasium as gym, numpy as np, torch

class Lucky(gym.Env):
    '''Pays `reward` in each of five steps, in runs with seed 1 also `luck`; fails in runs with seed `fault`.'''

    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, reward=0.0, luck=0.0, fault=None):
        self.reward, self.luck, self.fault = reward, luck, fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        if torch.initial_seed() == self.fault:
            raise RuntimeError("no second chance")
        self.pays = self.reward + self.luck * (torch.initial_seed() == 1)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.full(2, self.t / 10, np.float32), self.pays, self.t == 5, False, {}

gym.register("Lucky-v0", f"{__name__}:Lucky")
"""


@pytest.mark.slow
def test_a_trial_that_was_best_by_luck_is_found_out_by_new_seeds_as_is_one_that_fails_with_them(folder, capfd):
    (folder / "lucky.py").write_text(LUCKY)
    rewards = "{choices: [{reward: 1.0, luck: 2.0}, {reward: 1.8}, {reward: 2.0, fault: 2}]}"
    (folder / "rewards.yaml").write_text(f"model.env.kwargs: {rewards}\n")
    options = f"--import lucky --model.env.id Lucky-v0 {PPO} --space rewards.yaml --sampler random --pruner none --seed 3"
    options = f"tune {options} --trials 3 --jobs 2 --out mine --confirm_seeds"
    status, out, err = run(f"{options} 1", capfd)
    assert (status, err) == (0, "")
    table = {row["env.kwargs"]: row for row in rows(folder / "mine" / "trials.csv")}
    lucky, steady, failed = table['{"luck": 2.0, "reward": 1.0}'], table['{"reward": 1.8}'], table['{"fault": 2, "reward": 2.0}']
    names = ("value", "seed_1", "seed_2", "confirmed")
    assert [float(lucky[name]) for name in names] == [15, 15, 5, 10] and [float(steady[name]) for name in names] == [9, 9, 9, 9]
    assert (failed["value"], failed["seed_2"], failed["confirmed"]) == ("10.0", "", "") and "no second chance" in failed["error"]
    assert f"trial {lucky['trial']} again: 5 with new seeds; 10 (mean of 2 seeds)\n" in out
    assert f"trial {failed['trial']} again: failed (" in out and f"best: trial {lucky['trial']}, " in out
    status, out, err = run(f"{options} 2", capfd)
    assert (status, err) == (0, "") and f"best: trial {steady['trial']}, eval/mean_reward 9 (mean of 3 seeds): env.kwargs" in out
    assert yaml.safe_load((folder / "mine" / "best.yaml").read_text())["model"]["init_args"]["env"]["kwargs"] == {"reward": 1.8}


def opened(folder, said, mode="max", **settings):
    """A study of runs of ten evaluations that varies the learning rate."""
    space = SearchSpace("space.yaml", (Dimension("model.learning_rate", FloatDistribution(1e-4, 1e-2)),))
    folder.mkdir(exist_ok=True)
    return Study(folder, space, StudySettings(**settings), Objective("eval/mean_reward", mode, 100, 1000), {}, {}, said.append)


def played(folder, value, fails=lambda run: False, **settings):
    """A study that was trained, and what it said; `value` of a run and the number of an evaluation."""
    said = []
    study = opened(folder, said, **settings)
    play(study, value, fails)
    return study, said


def play(study, value, fails=lambda run: False):
    """Train the runs of a study."""
    while (run := study.next_run()) is not None:
        if fails(run):
            study.fail(run, "no more coins")
        elif not any(study.record(run, Message("evaluation", 100 * k, value(run, k), k == 10)) for k in range(1, 11)):
            study.end_run(run)


EDITS = {
    "DELETE FROM trials WHERE number = 1": "has a row without its row in trials",
    "DELETE FROM trials": "has a row without its row in trials",
    "DELETE FROM trial_values WHERE trial_id = 1": "values should be set for a complete trial",
    "DELETE FROM trial_params WHERE trial_id = 1": "trial 0 has other settings",
    "DELETE FROM trial_intermediate_values WHERE trial_id = 1": "trial 0 has no evaluation",
    "DELETE FROM trial_user_attributes WHERE trial_id = 1": "the value of trial 0 is not that of its evaluations",
    "DELETE FROM study_user_attributes": "the settings of its trials are missing",
    "DELETE FROM study_directions": "",
    "DELETE FROM studies": "",
    "DROP TABLE trials": "has a row without its row in trials",
    "DROP TABLE trial_values": "values should be set for a complete trial",
    "DROP TABLE trial_params": "trial 0 has other settings",
    "DROP TABLE trial_intermediate_values": "trial 0 has no evaluation",
    "DROP TABLE trial_user_attributes": "the value of trial 0 is not that of its evaluations",
    "DROP TABLE studies": "",
    "UPDATE studies SET study_name = 'mine'": "it holds mine, not a study of tune",
    "UPDATE study_directions SET direction = 'MINIMIZE'": "its direction is minimize, that of its config is maximize",
    "UPDATE study_directions SET direction = 'up'": "",
    "UPDATE study_user_attributes SET value_json = '[]' WHERE key = 'definition'": "",
    "UPDATE study_user_attributes SET value_json = '{' WHERE key = 'definition'": "",
    "UPDATE study_user_attributes SET value_json = '{\"0 1\": {\"ended\": 1}}' WHERE key = 'confirmation'": "confirmation/0 1/",
    "UPDATE trials SET state = 'done' WHERE number = 0": "",
    "UPDATE trials SET state = 'WAITING' WHERE number = 0": "trials/0/state must be one of running, complete, pruned and fail",
    "UPDATE trials SET state = 'RUNNING' WHERE number = 0": "`datetime_complete` is supposed to be None",
    "UPDATE trials SET number = 7 WHERE number = 0": "trial 0 is missing",
    "UPDATE trials SET number = NULL": "",
    "UPDATE trials SET study_id = 7 WHERE number = 0": "trials has a row without its row in studies",
    "UPDATE trials SET datetime_start = 'today'": "",
    "UPDATE trial_values SET value = 'good' WHERE trial_id = 1": "",
    "UPDATE trial_values SET value = 1e9 WHERE trial_id = 1": "the value of trial 0 is not that of its evaluations",
    "UPDATE trial_values SET value_type = 'NONE'": "",
    "UPDATE trial_intermediate_values SET intermediate_value = 'good'": "trials/0/values/0 must be a count and a number",
    "UPDATE trial_intermediate_values SET step = 'first' WHERE step = 1": "",
    "UPDATE trial_params SET distribution_json = '{}'": "",
    "UPDATE trial_params SET distribution_json = '{'": "",
    "UPDATE trial_params SET param_value = 'fast'": "",
    "UPDATE trial_params SET param_value = 3.0": "isn't contained in the distribution",
    "UPDATE trial_params SET param_name = 'model.gamma'": "trial 0 has other settings",
    "UPDATE trial_user_attributes SET value_json = '{}' WHERE key = 'evaluations'": "evaluations must be a list",
    "UPDATE trial_user_attributes SET value_json = '[[[1]]]' WHERE key = 'evaluations'": "must be a count and a number",
    "UPDATE trial_user_attributes SET value_json = '\"all\"' WHERE key = 'ended_runs'": "ended_runs must be an integer",
}
"""Changes of a study's file, and how they are reported; an empty text where the words are those of Optuna or SQLite."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The file of a study that has ended."""
    folder = tmp_path_factory.mktemp("studies") / "mine"
    played(folder, lambda run, k: float(run.number), trials=2, confirm=1, confirm_seeds=1)
    return folder / "study.db"


@pytest.mark.thorough
@pytest.mark.parametrize("edit", EDITS)
def test_a_study_whose_file_was_changed_is_refused_in_one_line(edit, finished, tmp_path):
    file = tmp_path / "study.db"
    shutil.copy(finished, file)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute(edit).rowcount
        connection.commit()
    with pytest.raises(SettingError) as error:
        opened(tmp_path, [], trials=2, confirm=1, confirm_seeds=1)
    text = str(error.value)
    assert text.startswith(f"{file} cannot be used (") and text.endswith("): restore it, or name another --out")
    assert EDITS[edit] in text and "\n" not in text


@pytest.mark.thorough
def test_a_study_whose_file_was_not_changed_is_continued(finished, tmp_path):
    shutil.copy(finished, tmp_path)
    assert opened(tmp_path, [], trials=2, confirm=1, confirm_seeds=1).has_ended


@pytest.mark.thorough
def test_a_study_on_a_full_disk_ends_in_one_line_with_all_that_was_recorded_and_can_be_continued(tmp_path):
    def value(run, k):
        return float(run.number)

    before = played(tmp_path, value, trials=1, confirm=0)[0].trials
    study, file = opened(tmp_path, [], trials=2, confirm=0), tmp_path / "study.db"
    with no_room(file.stat().st_size // 2), pytest.raises(UnsavedError) as error, study.recording(lambda: None):
        play(study, value)
    line = rf"{file} could not be written \(.*\): make room there, and repeat the command, which continues the study"
    assert re.fullmatch(line, str(error.value)) and error.value.status == 4
    study = opened(tmp_path, [], trials=2, confirm=0)
    assert study.trials[:1] == before
    play(study, value)
    assert [(each.state, each.value) for each in study.trials] == [(TrialState.COMPLETE, 0.0), (TrialState.COMPLETE, 1.0)]


@pytest.mark.thorough
def test_a_run_that_cannot_be_saved_ends_the_study_and_is_not_a_failed_trial(folder, capfd):
    (folder / "rewards.yaml").write_text("model.env.kwargs: {choices: [{reward: 1.0, fault: full}]}\n")
    options = f"tune {OF_REWARDS} {PPO} --model.net_arch [64,64] --space rewards.yaml --confirm 0 --out mine --trials"
    status, out, err = run(f"{options} 3", capfd)
    assert status == 4 and err.startswith("error: trial 0: 320 of 320 environment steps are lost: ") and err.count("\n") == 1
    assert [trial.state for trial in trials(folder / "mine")] == [TrialState.RUNNING] and "trial 0: " not in out
    status, out, err = run(f"{options} 1", capfd)
    assert (status, err) == (0, "") and "0 trials ended, 1 interrupted" in out and "trial 0: 5; " in out


@pytest.mark.thorough
def test_results_that_cannot_be_written_are_reported_before_anything_runs(folder, capfd):
    (folder / "mine" / "trials.csv").mkdir(parents=True)
    status, _, err = run(f"tune {PPO} {CARTPOLE} --space rates.yaml --trials 1 --out mine", capfd)
    assert (status, err) == (2, "error: mine/trials.csv could not be saved (Is a directory)\n")
    assert not (folder / "mine" / "logs").exists()


@pytest.mark.thorough
def test_a_study_continues_without_a_table_that_cannot_be_written_and_says_so(tmp_path, capfd):
    study, file = opened(tmp_path, [], trials=2, confirm=0), tmp_path / "trials.csv"
    results = Results(study, [], [])
    file.mkdir()
    with study.recording(results.update):
        play(study, lambda run, k: 1.0)
    assert capfd.readouterr().out == f"{file} could not be saved (Is a directory); the study continues\n" * 2
    assert study.has_ended
    with pytest.raises(SettingError, match=rf"^{file} could not be saved \(Is a directory\)$"):
        results.write()


@pytest.mark.slow
def test_of_two_commands_that_start_a_study_in_the_same_instant_one_trains_it_and_the_other_names_it(folder):
    both = [Apart(f"-m lightning_rl tune {PPO} {CARTPOLE} --space rates.yaml --trials 2 --confirm 0 --out mine", folder) for _ in range(2)]
    ended = sorted((process.wait(), process.communicate()[1], process.pid) for process in both)
    assert [status for status, *_ in ended] == [0, 2] and ended[0][1] == ""
    line = rf"error: process {ended[0][2]} on \S+ is training in mine: wait until it ends, or name another --out\n"
    assert re.fullmatch(line, ended[1][1]) and len(trials(folder / "mine")) == 2


@contextmanager
def no_room(size):
    """Let no file grow beyond these bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_trial_is_pruned_in_the_seed_in_which_it_is_worse(seed, tmp_path):
    study, said = played(
        tmp_path, lambda run, k: -1000.0 if run == (4, seed) else 1 + k / 10, trials=5, seeds=2, startup_trials=3, confirm=0
    )
    assert [trial.state for trial in study.trials[3:]] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert f"at 20% of seed {seed + 1};" in said[-1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_trial_that_begins_badly_is_not_pruned_in_the_first_fifth_of_any_seeds_run(seed, tmp_path):
    study, _ = played(
        tmp_path,
        lambda run, k: (-1000.0 if k == 1 and run.seed == seed else 2.0) if run.number == 4 else 1.0,
        trials=5,
        seeds=2,
        startup_trials=3,
        confirm=0,
    )
    assert study.trials[4].state == TrialState.COMPLETE and study.trials[4].value == 2.0


def test_a_study_keeps_no_connection_to_its_file(tmp_path):
    study, _ = played(tmp_path / "study", lambda run, k: k, trials=2, confirm=0)
    names = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.exists()]
    assert len(study.trials) == 2 and [name for name in names if name.endswith("study.db")] == []


def test_a_study_whose_lock_cannot_be_made_says_so_and_not_that_another_process_has_it(tmp_path):
    (tmp_path / ".mine.lock").mkdir()
    with pytest.raises(SettingError, match=r"mine cannot be locked: .*\.mine\.lock: Is a directory$"), take_folder(tmp_path / "mine"):
        pass
    (tmp_path / ".mine.lock").rmdir()
    other = r"^process \d+ on .* is training in .*/mine: wait until it ends, or name another --out$"
    with take_folder(tmp_path / "mine"), pytest.raises(SettingError, match=other), take_folder(tmp_path / "mine"):
        pass


@pytest.mark.thorough
def test_a_trial_whose_new_seeds_fail_is_not_the_best(tmp_path):
    study, _ = played(
        tmp_path, lambda run, k: float(run.number), lambda run: run.seed > 0, trials=4, pruner="none", confirm=2, confirm_seeds=1
    )
    assert [study.confirmation.error(number) for number in range(4)] == ["", "", "no more coins", "no more coins"]
    assert study.best.number == 1


@pytest.mark.thorough
def test_a_trial_that_is_evaluated_as_nan_is_pruned_and_says_so(tmp_path):
    _, said = played(tmp_path, lambda run, k: math.nan if run.number == 3 else 1.0, trials=4, startup_trials=2, confirm=0)
    assert said[-1].startswith("trial 3: pruned with NaN at 20% of seed 1; ")


@pytest.mark.slow
def test_the_draws_depend_on_the_seed_and_on_what_was_found_alone(folder, capfd):
    options = f"tune {PPO} --model.env.id CartPole-v1 --space rates.yaml --trials 2 --startup_trials 1 --pruner none --confirm 0"
    for name in ("one", "same"):
        assert run(f"{options} --out {name}", capfd)[0] == 0
    assert recorded(folder / "one") == recorded(folder / "same")
    sampled = [StudySettings(seed=seed).make_sampler(number) for seed in (0, 1) for number in (0, 1)]
    drawn = {optuna.create_study(sampler=each).ask().suggest_float("x", 0, 1) for each in sampled}
    assert len(drawn) == 4


BAD = {
    "--trails 3": "--trails is not an option of tune; did you mean trials?",
    "--trials 0": "--trials must be >= 1, got 0",
    "--sampler tp": "--sampler must be one of tpe, random, got 'tp'; did you mean tpe?",
    "--seed_everything 3": "tune does not take --seed_everything: the runs of a trial have the seeds 1 to --seeds",
    "--trainer.run_name=x": "tune does not take --trainer.run_name: the runs of a study are named after their trials",
    "--evaluation null": "tune compares runs by their evaluations: leave out evaluation null",
    "--checkpoint null": "tune continues trials from their checkpoints: leave out checkpoint null",
    "--engine rya": "--engine must be one of local, ray, got 'rya'; did you mean ray?",
    "--address auto": "--address is the address of a Ray cluster: add --engine ray",
    "--trainer.devices 2": "tune trains each run in one process",
    "--space nowhere.yaml": "--space nowhere.yaml: there is no such file",
    "--space wrong.yaml": "wrong.yaml: model.gamma must be >= 0 and <= 1, got 1.5",
    "--model.gama 0.9": "--model.gama is not a setting of PPO; did you mean gamma?",
}


@pytest.mark.variants
@pytest.mark.parametrize("options", BAD)
def test_wrong_options_are_one_line_before_anything_runs(options, folder, capfd):
    (folder / "wrong.yaml").write_text("model.gamma: {low: 0.5, high: 1.5}")
    status, out, err = run(f"tune {PPO} --model.env.id CartPole-v1 {options}", capfd)
    assert (status, out) == (2, "") and err.startswith(f"error: {BAD[options]}") and err.count("\n") == 1
    assert not (folder / "studies").exists()


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--population 3"])
def test_the_address_of_no_cluster_is_one_line_within_seconds(more, folder):
    began = time.monotonic()
    options = f"{PPO} --model.env.id CartPole-v1 --engine ray --address 127.0.0.1:1 {more}"
    status, _, err = run_apart(f"tune {options}", folder)
    assert status == 2 and err.startswith("error: --address '127.0.0.1:1': there is no Ray cluster to join (")
    assert err.count("\n") == 1 and time.monotonic() - began < 60.0


KILLED = (
    f"{PPO} --model.env.id CartPole-v1 --space rates.yaml --trials 4 --seeds 2 --startup_trials 1 --confirm 2 --model.max_env_steps 6400 "
    "--evaluation.every_n_env_steps 640 --checkpoint.every_n_env_steps 640"
)


def interrupt(folder, number, wait):
    """Start the study, and send it a signal when `wait(folder)`."""
    study = Apart(f"-m lightning_rl tune {KILLED} --out killed", folder)
    until = time.monotonic() + 120
    while not wait(folder / "killed") and study.poll() is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(study.pid, number)
    out, err = study.communicate()
    return study.wait(), out, err


@pytest.mark.slow
def test_a_study_that_was_killed_ends_like_one_that_was_not(folder, capfd):
    assert run(f"tune {KILLED} --out whole", capfd)[0] == 0
    for saved in ("trial_0_seed_1", "trial_0_seed_2", "trial_1_seed_2", "trial_2_seed_1", "trial_*_seed_4"):
        status, *_ = interrupt(folder, signal.SIGKILL, lambda study, name=saved: any(study.glob(f"*/*/{name}/checkpoints/last.ckpt")))
        assert status == -signal.SIGKILL
        assert not (folder / "killed" / "best.yaml").exists() or not saved.startswith("trial_0")
    status, out, err = run(f"tune {KILLED} --out killed", capfd)
    assert (status, err) == (0, "") and "4 trials ended, 0 interrupted" in out
    assert recorded(folder / "killed") == recorded(folder / "whole")
    assert rows(folder / "killed" / "trials.csv") == rows(folder / "whole" / "trials.csv")
    for evaluations in (folder / "whole").glob("*/*/*/evaluations.csv"):
        assert evaluations.read_bytes() == (folder / "killed" / evaluations.relative_to(folder / "whole")).read_bytes()


@pytest.mark.slow
def test_ctrl_c_saves_the_runs_and_prints_the_command_that_continues(folder, capfd):
    status, out, err = interrupt(folder, signal.SIGINT, lambda study: any(study.glob("*/*/trial_1_seed_1/metrics.csv")))
    assert (status, err) == (130, "")
    last = out.splitlines()[-1]
    assert last.startswith("stopped by SIGINT; continue: lightning-rl tune ") and last.endswith("--out killed")
    assert list((folder / "killed").glob("*/*/trial_1_seed_1/checkpoints/last.ckpt"))
    status, out, err = run(last.partition("lightning-rl ")[2], capfd)
    assert (status, err) == (0, "") and "1 trials ended, 1 interrupted" in out
    shutil.copytree(folder / "killed", folder / "kept")
    assert run(f"tune {KILLED} --out whole", capfd)[0] == 0
    assert recorded(folder / "kept") == recorded(folder / "whole")


@pytest.mark.slow
def test_ray_goes_on_with_a_local_study_and_gives_the_same_trials(folder, capfd):
    options = f"{PPO} --model.env.id CartPole-v1 --space rates.yaml --seeds 2 --startup_trials 1 --confirm 2 --confirm_seeds 2 --trials"
    assert run(f"tune {options} 3 --out local", capfd)[0] == 0
    assert run(f"tune {options} 1 --out both", capfd)[0] == 0
    status, out, err = run_apart(f"tune {options} 3 --out both --engine ray", folder)  # Ray's threads would stay in this process
    assert (status, err) == (0, "") and "continuing the study in both: 1 trials ended, 0 interrupted" in out
    assert recorded(folder / "both") == recorded(folder / "local")
    assert [row["state"] for row in rows(folder / "both" / "trials.csv")] == [row["state"] for row in rows(folder / "local" / "trials.csv")]
