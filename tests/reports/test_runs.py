"""What a report takes from the folders of runs."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_rl.errors import SettingError
from lightning_rl.reports.groups import make_sections
from lightning_rl.reports.runs import find_runs, read_run
from tests.reports.folders import write_run


def groups_of(*folders):
    runs, _ = find_runs(folders)
    return [(section.title, {group.name: len(group.runs) for group in section.groups}) for section in make_sections(runs)]


def labels_of(*folders):
    (section,) = make_sections(find_runs(folders)[0])
    return {group.label: len(group.runs) for group in section.groups}


def notes_of(*folders):
    (section,) = make_sections(find_runs(folders)[0])
    return list(section.notes())


def test_an_evaluation_is_the_mean_of_its_episodes(tmp_path):
    run = read_run(write_run(tmp_path / "a", {100: [1, 2, 6], 200: [10, 20, 15]}, seed=7))
    assert (run.counts.tolist(), run.returns.tolist()) == ([100, 200], [3, 15])
    assert (run.algorithm, run.environment, run.seed, run.counter, run.source) == ("PPO", "CartPole-v1", 7, "env_steps", "evaluations")


def test_a_run_without_evaluations_is_shown_by_its_training(tmp_path):
    folder = write_run(tmp_path / "a", training={10: "", 20: 1.5, 30: 2.5})
    run = read_run(folder)
    assert (run.counts.tolist(), run.returns.tolist(), run.source) == ([20, 30], [1.5, 2.5], "rollout/ep_rew_mean")
    assert notes_of(folder) == [
        f"{folder} has no evaluations. All returns here are from training, with its exploration: each the mean of the last 100 episodes.",
        "PPO has one seed: there is no interval.",
    ]


def test_evaluations_and_training_are_not_mixed_in_a_section(tmp_path):
    write_run(tmp_path / "a", {100: [1], 200: [5]}, training={100: 10.0, 150: 20.0}, seed=1)
    write_run(tmp_path / "b", training={120: 3.0, 180: 4.0}, seed=2)
    write_run(tmp_path / "c", {100: [1]}, env="Acrobot-v1")
    here, there = make_sections(find_runs([tmp_path])[0])
    assert [run.returns.tolist() for run in here.groups[0].runs] == [[10, 20], [3, 4]]
    assert (here.training, there.training) == (True, False) and there.groups[0].finals().tolist() == [1]


def test_a_run_without_returns_of_training_is_left_out_where_these_are_compared(tmp_path):
    write_run(tmp_path / "a", {100: [1]}, seed=1)
    write_run(tmp_path / "b", training={100: 3.0}, seed=2)
    (section,) = make_sections(find_runs([tmp_path])[0])
    assert [run.folder.name for run in section.groups[0].runs] == ["b"]
    assert f"{tmp_path / 'a'} is left out: it has no returns of training." in notes_of(tmp_path)


def test_groups_that_ended_at_different_counts_are_named(tmp_path):
    write_run(tmp_path / "a", {100: [1], 200: [1]})
    write_run(tmp_path / "b", {200: [1]}, algorithm="A2C")
    assert not any("ended" in note for note in notes_of(tmp_path))
    write_run(tmp_path / "c", {100: [1], 3000: [1]}, algorithm="DQN")
    assert notes_of(tmp_path)[0] == (
        "The groups ended at different counts of environment steps: PPO at 200, A2C at 200, DQN at 3,000. "
        "Final returns and their comparison are those at each group's end."
    )


def test_the_threshold_is_reached_by_the_first_return_that_is_so_high_at_the_time_of_its_row(tmp_path):
    run = read_run(write_run(tmp_path / "a", {100: [50], 200: [195], 300: [90], 400: [500]}, seconds={90: 1.0, 210: 2.5, 390: 4.0}))
    assert (run.reaches(195), run.reaches(196), run.reaches(501)) == (200, 400, math.inf)
    assert (run.seconds(90), run.seconds(200), run.seconds(400)) == (1.0, 2.5, 4.0)  # between rows the next one, at the end the last
    assert math.isnan(read_run(write_run(tmp_path / "b", {100: [50]})).seconds(100))


def test_runs_that_differ_in_their_seed_alone_are_one_group_and_names_say_what_differs(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path / f"version_{seed}", {1: [1]}, seed=seed, trainer={"run_name": f"seed{seed}", "devices": "auto"})
    assert groups_of(tmp_path) == [("CartPole-v1", {"PPO": 3})]
    write_run(tmp_path / "long", {1: [1]}, max_env_steps=20000.0)
    assert groups_of(tmp_path) == [("CartPole-v1", {"PPO max_env_steps=20,000": 1, "PPO": 3})]
    shutil.rmtree(tmp_path / "long")
    write_run(tmp_path / "fast", {1: [1]}, learning_rate=0.001)
    write_run(tmp_path / "memory", {1: [1]}, memory={"class_path": "lightning_rl.LSTM", "init_args": {"memory_size": 64}})
    write_run(tmp_path / "two", {1: [1]}, trainer={"devices": 2})
    write_run(tmp_path / "other", {1: [1]}, algorithm="A2C", n_steps=5)
    assert labels_of(tmp_path) == {
        "PPO learning_rate=0.001": 1,
        "PPO learning_rate=0.0003 memory=LSTM memory.memory_size=64": 1,
        "A2C": 1,
        "PPO learning_rate=0.0003 trainer.devices=2": 1,
        "PPO learning_rate=0.0003": 3,
    }


def test_schedules_have_a_short_form(tmp_path):
    write_run(tmp_path / "a", {1: [1]}, learning_rate={"schedule": "linear", "start": 0.001})
    write_run(tmp_path / "b", {1: [1]}, learning_rate={"schedule": "piecewise", "points": [[0, 0.1], [0.5, 0.01], [1, 0.0]]})
    write_run(tmp_path / "c", {1: [1]}, learning_rate={"schedule": "constant", "value": 0.002}, seed=1)
    write_run(tmp_path / "d", {1: [1]}, learning_rate=0.002, seed=2)
    assert labels_of(tmp_path) == {
        "PPO learning_rate=linear 0.001→0": 1,
        "PPO learning_rate=piecewise 0.1@0→0.01@0.5→0@1": 1,
        "PPO learning_rate=0.002": 2,
    }


def test_numbers_in_names_have_only_the_digits_that_distinguish_them(tmp_path):
    for name, rate in {"a": 0.009859752140720513, "b": 0.00031234567, "c": 0.00031234999}.items():
        write_run(tmp_path / name, {1: [1]}, learning_rate=rate)
    assert labels_of(tmp_path) == {"PPO learning_rate=0.00985975": 1, "PPO learning_rate=0.000312346": 1, "PPO learning_rate=0.00031235": 1}
    shutil.rmtree(tmp_path / "c")
    assert labels_of(tmp_path) == {"PPO learning_rate=0.00986": 1, "PPO learning_rate=0.0003123": 1}
    write_run(tmp_path / "d", {1: [1]}, learning_rate=0.00031231111, env="Acrobot-v1")
    write_run(tmp_path / "e", {1: [1]}, learning_rate=0.5, env="Acrobot-v1")
    labels = [{group.label for group in section.groups} for section in make_sections(find_runs([tmp_path])[0])]
    assert labels == [
        {"PPO learning_rate=0.0098598", "PPO learning_rate=0.00031235"},
        {"PPO learning_rate=0.00031231", "PPO learning_rate=0.5"},
    ]


def test_text_settings_that_are_the_same_number_stay_apart(tmp_path):
    for name, version in {"a": "1.10", "b": "1.1"}.items():
        write_run(tmp_path / name, {1: [1]}, version=version)
    assert labels_of(tmp_path) == {"PPO version=1.10": 1, "PPO version=1.1": 1}


def test_groups_whose_names_would_be_long_have_numbers_that_stand_for_the_same_settings_in_all_sections(tmp_path):
    one, other = (
        {"clip_range": {"schedule": "linear", "start": 0.2, "end": 0.0}, "gae_lambda": 0.8},
        {"clip_range": 0.2, "gae_lambda": 0.95},
    )
    for env, first, second in (("A-v0", one, other), ("B-v0", other, one)):
        write_run(tmp_path / f"{env}0", {1: [1]}, env=env, **first)
        write_run(tmp_path / f"{env}1", {1: [1]}, env=env, **second)
        write_run(tmp_path / f"{env}2", {1: [1]}, env=env, algorithm="A2C")
    assert groups_of(tmp_path) == [("A-v0", {"PPO 1": 1, "PPO 2": 1, "A2C": 1}), ("B-v0", {"PPO 2": 1, "PPO 1": 1, "A2C": 1})]
    assert list(labels_of(tmp_path / "A-v00", tmp_path / "A-v01")) == [
        "PPO clip_range=linear 0.2→0 gae_lambda=0.8",
        "PPO clip_range=0.2 gae_lambda=0.95",
    ]


def test_environments_and_what_is_counted_have_sections_of_their_own(tmp_path):
    write_run(tmp_path / "a", {1: [1]})
    write_run(tmp_path / "b", {1: [1]}, env="mine:Mine-v0")
    write_run(tmp_path / "c", {1: [1]}, algorithm="BehavioralCloning", counter="updates")
    assert groups_of(tmp_path) == [
        ("CartPole-v1", {"PPO": 1}),
        ("Mine-v0", {"PPO": 1}),
        ("CartPole-v1, over updates", {"BehavioralCloning": 1}),
    ]


def test_the_folder_names_an_environment_that_no_file_can(tmp_path):
    assert groups_of(write_run(tmp_path / "PPO/Mine/version_0", {1: [1]}, env=None)) == [("Mine", {"PPO": 1})]


def test_runs_of_a_folder_come_in_their_order_and_each_once(tmp_path):
    folders = [write_run(tmp_path / f"version_{number}", {1: [1]}) for number in (10, 9, 0)]
    (tmp_path / "wandb/files").mkdir(parents=True)
    (tmp_path / "wandb/files/config.yaml").write_text("wandb_version: 1")
    runs, _ = find_runs([folders[1], tmp_path])
    assert [run.folder.name for run in runs] == ["version_9", "version_0", "version_10"]


def test_seeds_evaluated_at_different_steps_meet_on_a_grid_by_the_last_value_known(tmp_path):
    write_run(tmp_path / "a", {100: [1], 200: [2], 300: [3]}, seed=1)
    write_run(tmp_path / "b", {150: [10], 200: [20], 250: [30], 400: [40]}, seed=2)
    (section,) = make_sections(find_runs([tmp_path])[0])
    counts, returns = section.groups[0].curve()
    assert counts.tolist() == [150, 200, 250, 300]  # from where both have a value to where the first ends
    assert returns.tolist() == [[1, 2, 2, 3], [10, 20, 30, 30]]
    assert section.groups[0].finals().tolist() == [3, 40]
    assert notes_of(tmp_path) == [
        "The curve of PPO ends at 300, where its shortest run does; its longest ends at 400.",
        "Final returns of PPO are those at each run's own end, 300 to 400: a run that ended early counts with its last return.",
    ]


def test_doubtful_intervals_have_a_note(tmp_path):
    alone = write_run(tmp_path / "a", {100: [1]}, seed=4)
    assert notes_of(alone) == ["PPO has one seed: there is no interval."]
    write_run(tmp_path / "b", {200: [1]}, seed=4)
    assert notes_of(tmp_path) == [
        "PPO has seed 4 2 times: such runs are alike, which makes intervals too narrow.",
        "PPO has no curve: there is no count at which all of its seeds have a return.",
        "Final returns of PPO are those at each run's own end, 100 to 200: a run that ended early counts with its last return.",
    ]


def test_runs_without_returns_are_left_out_of_a_folder_and_refused_if_named(tmp_path):
    write_run(tmp_path / "a", {100: [1]})
    empty = write_run(tmp_path / "b", {})
    runs, left_out = find_runs([tmp_path])
    assert ([run.folder.name for run in runs], left_out) == (["a"], [empty])
    with pytest.raises(SettingError, match=r"b: neither evaluations.csv nor metrics.csv has a return in it"):
        find_runs([tmp_path / "a", empty])


@pytest.mark.variants
@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("config.yaml", "a: [", "does not name the algorithm that ran"),
        ("config.yaml", "model: PPO", "does not name the algorithm that ran"),
        ("config.yaml", "model: {class_path: PPO, init_args: [1]}", "does not name the algorithm that ran"),
        ("config.yaml", "model: {class_path: PPO}\nevaluation: often", "does not name the algorithm that ran"),
        ("config.yaml", "- 1", "does not name the algorithm that ran"),
        ("config.yaml", "model: {class_path: PPO}\nseed_everything: [1]", "does not name the algorithm that ran, or its seed"),
        ("config.yaml", "model: " + "[" * 2000 + "]" * 2000, "does not name the algorithm that ran"),
        ("evaluations.csv", "env_steps,seed,return\n100,1,high\n", "could not convert string to float: 'high'"),
        (
            "evaluations.csv",
            "frames,seed,return\n100,1,2\n",
            "does not begin with the column env_steps or updates: it was not written by a run",
        ),
        ("evaluations.csv", "env_steps,seed,length\n100,1,2\n", "has no column return: it was not written by a run"),
        ("evaluations.csv", "\0\1\2", "does not begin with the column"),
        ("metrics.csv", "\0\1\2\n\n\n\3", "does not begin with the column"),
        ("evaluations.csv", "env_steps,seed,return\n100,1,nan\n", "the column return holds numbers that are not finite"),
    ],
)
def test_a_file_that_no_run_wrote_is_named(file, text, said, tmp_path):
    folder = write_run(tmp_path / "a", {100: [1]})
    (folder / file).write_text(text)
    with pytest.raises(SettingError) as error:
        find_runs([folder])
    assert str(error.value).startswith(str(folder / file)) and said in str(error.value)


@pytest.mark.parametrize("locked", ["a", "a/config.yaml", "a/evaluations.csv"])
def test_what_may_not_be_read_is_named(locked, tmp_path, monkeypatch):
    write_run(tmp_path / "a", {100: [1]})
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)
    Path(locked).chmod(0)
    user = os.geteuid()
    try:
        os.seteuid(user or 65534)  # root may read everything
        with pytest.raises(SettingError) as error:
            find_runs([Path("a")])
    finally:
        os.seteuid(user)
        Path(locked).chmod(0o755)
    assert str(error.value) == f"{locked} cannot be read: Permission denied"


def test_an_evaluation_that_was_cut_off_is_left_out_and_named(tmp_path):
    folder = write_run(tmp_path / "a", {100: [1, 2, 3], 200: [4, 5, 6], 300: [1]})
    assert read_run(folder).returns.tolist() == [2, 5]
    assert notes_of(folder)[0] == f"{folder} has 1 episode of its last evaluation, at 300, and 3 of the one before: it is left out."


def test_the_only_evaluation_is_left_out_if_it_was_cut_off(tmp_path):
    folder = write_run(tmp_path / "a", {100: [1, 2]}, training={50: 7})
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for wanted, source in ((5, "rollout/ep_rew_mean"), (2, "evaluations")):
        (folder / "config.yaml").write_text(yaml.safe_dump(config | {"evaluation": {"episodes": wanted}}))
        assert read_run(folder).source == source
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"evaluation": {"episodes": 5}}))
    assert f"{folder} has 2 episodes of the 5 of its only evaluation, at 100: it is left out." in notes_of(folder)


@pytest.mark.parametrize("points", [5, [[0]], None])
def test_a_schedule_with_invalid_points_is_shown_as_it_is(points, tmp_path):
    folder = write_run(tmp_path / "a", {1: [1]}, learning_rate={"schedule": "piecewise", "points": points})
    assert read_run(folder).settings["learning_rate"] == f"piecewise {points}"


@pytest.mark.parametrize("episodes", [1, 2])
def test_a_run_that_continued_with_fewer_episodes_keeps_its_last_evaluation(episodes, tmp_path):
    folder = write_run(tmp_path / "a", {100: [1, 2, 3], 200: [4]})
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "evaluation": {"episodes": episodes}}))
    assert read_run(folder).counts.tolist() == ([100, 200] if episodes == 1 else [100])


@pytest.mark.parametrize(
    "text", ["", "env_st", "env_steps,seed", "env_steps,seed,return,length,success\n", "env_steps,seed,return,length,success\n1,2"]
)
def test_a_file_that_was_cut_off_at_its_beginning_is_an_empty_one(text, tmp_path):
    folder = write_run(tmp_path / "a", training={100: 3.0})
    (folder / "evaluations.csv").write_text(text)
    assert read_run(folder).source == "rollout/ep_rew_mean"


def test_means_do_not_depend_on_the_order_of_rows(tmp_path):
    folder = write_run(tmp_path / "a", {200: [4, 8], 100: [1, 1]})
    np.testing.assert_array_equal(read_run(folder).returns, [1, 6])
