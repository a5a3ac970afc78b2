"""Recording by hand, and files that are there whole or not at all."""

from __future__ import annotations

import errno
import os

import gymnasium as gym
import h5py
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Text

from lightning_rl import RecordEpisodes
from lightning_rl.checkpoints.atomic import SaveError
from lightning_rl.demonstrations.dataset import load_demonstrations, summarize
from lightning_rl.demonstrations.recorder import record_1d, save_demonstrations
from lightning_rl.errors import NotFiniteError, SettingError
from tests.demonstrations.episodes import Drawn, differences, recorded, spaces_of
from tests.environments import Anything, Choosy, Scripted, ScriptedBox


class Seen(Scripted):
    """Remembers the actions it gets."""

    action_space = Box(-2, 2, (2,), np.float32)
    taken: list

    def step(self, action):
        self.taken = [*getattr(self, "taken", []), action]
        return super().step(action)


def test_the_environment_gets_the_actions_that_are_recorded(datasets):
    env = Seen()
    recorder = RecordEpisodes(env)
    recorder.reset()
    for action in ([0.1, -2], np.array([0.1, 1 / 3]), np.float16([0.1, 1])):
        recorder.step(action)
    (episode,) = recorder.demonstrations
    assert differences(episode.action, np.float32([[0.1, -2], [0.1, 1 / 3], [np.float16(0.1), 1]])) == []
    assert differences(np.stack(env.taken), episode.action) == []


def test_what_is_observed_is_copied_in_the_type_of_its_space():
    class Reuses(ScriptedBox):
        array = np.zeros(2)

        def observe(self):
            self.array[:] = self.episode, self.t
            return self.array

    recorder, _ = recorded(Reuses(), episodes=1)
    assert differences(recorder.demonstrations[0].obs, np.float32([[0, 0], [0, 1], [0, 2], [0, 3]])) == []


@pytest.mark.parametrize(
    ("env", "action"),
    [
        (Scripted(), 3),
        (Scripted(), -1),
        (Scripted(), 0.5),
        (Scripted(), [1, 1]),
        (ScriptedBox(), [0.5]),
        (ScriptedBox(), [0.5, 1.5]),
        (ScriptedBox(), [0.5, np.nan]),
        (ScriptedBox(), "left"),
        (Anything(action="hybrid"), {"choice": 1}),
        (Anything(action="hybrid"), 1),
        (Anything(action="multi-binary"), [1, 0, 257]),
        (Anything(action="discrete"), 0),
    ],
)
def test_an_action_that_is_not_in_the_space_is_refused(env, action):
    recorder = RecordEpisodes(env)
    recorder.reset(seed=0)
    with pytest.raises(SettingError, match=rf"the action .* is not in the space .* of {type(env).__name__}"):
        recorder.step(action)
    assert not hasattr(env, "t") or env.t == 0


def test_an_episode_that_is_cut_off_counts_as_truncated(datasets):
    recorder = RecordEpisodes(Scripted(period=9, endings=("termination",)))
    recorder.reset()
    recorder.reset()  # no step, no episode
    for _ in range(2):
        recorder.step(0)
    recorder.reset()
    recorder.step(1)
    recorder.save("cut-v0")
    loaded = load_demonstrations("cut-v0", spaces_of(recorder))
    assert [each.truncated.tolist() for each in loaded] == [[False, True], [True]]
    assert not any(each.terminated.any() for each in loaded)
    assert [each.obs[:, 0].tolist() for each in loaded] == [[1, 1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("obs", "reward", "words"),
    [
        (np.nan, 0.0, "observation is nan at step 2 of an episode in Bad"),
        (1e300, 0.0, "observation is inf at step 2 of an episode in Bad"),
        (0.0, -np.inf, "reward is -inf at step 2 of an episode in Bad"),
    ],
)
def test_a_step_that_no_dataset_may_hold_is_refused_and_the_steps_before_it_can_be_saved(obs, reward, words, datasets):
    class Bad(ScriptedBox):
        def step(self, action):
            good = super().step(action)
            return (np.array([obs, 0.0]), reward, *good[2:]) if self.t == 2 else good

    recorder = RecordEpisodes(Bad(period=9))
    recorder.reset()
    recorder.step([0.0, 0.0])
    with pytest.raises(NotFiniteError, match=f"^{words}$"):
        recorder.step([0.0, 0.0])
    recorder.save("bad-v0")
    (loaded,) = load_demonstrations("bad-v0", spaces_of(recorder))
    assert len(loaded.reward) == 1 and loaded.truncated.tolist() == [True]


def test_an_episode_begins_with_a_reset():
    recorder = RecordEpisodes(Scripted(period=1))
    with pytest.raises(gym.error.ResetNeeded):
        recorder.step(0)
    recorder.reset()
    recorder.step(0)
    with pytest.raises(gym.error.ResetNeeded):
        recorder.step(0)
    assert len(recorder.demonstrations) == 1


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (Text(5), "the space Text.* is not supported"),
        (Dict({"a/b": Discrete(2)}), "the key 'a/b' of a Dict space cannot be a name in a dataset"),
        (Dict({"a": Dict({".": Discrete(2)})}), "the key '.' of a Dict space"),
        (Dict({"": Discrete(2)}), "the key '' of a Dict space"),
        (Dict([(1, Discrete(2))]), "the key 1 of a Dict space"),
    ],
)
def test_spaces_that_cannot_be_recorded_are_refused_at_the_door(space, message):
    with pytest.raises(SettingError, match=message):
        RecordEpisodes(Drawn(space, Discrete(2)))


def test_an_observation_that_is_not_in_its_space_is_refused():
    env = Drawn(Box(-1, 1, (2,)), Discrete(2))
    recorder = RecordEpisodes(env)
    env.observation_space = Box(-1, 1, (3,))
    with pytest.raises(SettingError, match=r"Drawn returned an observation outside Box\(2,\): shape \(3,\) instead of \(2,\)"):
        recorder.reset()


def test_masks_that_allow_no_action_are_refused():
    recorder = RecordEpisodes(Choosy(stuck=1))
    recorder.reset()
    with pytest.raises(SettingError, match="environment 0 of Choosy allows no action"):
        recorder.step(1)


@pytest.mark.parametrize(
    "name", ["cartpole", "", "a/b-v0", "../ab-v0", "/tmp/ab-v0", "ab-v0/", "a b-v0", "ab-v", "ab-v0\n", "x.y-v0", "ab-v9x"]
)
def test_an_invalid_name_is_refused_with_an_example(datasets, name):
    with pytest.raises(SettingError, match=r"is not a valid name for Minari: .* such as cartpole-v0 or cartpole/expert-v0"):
        recorded(Scripted(), 1)[0].save(name)
    assert not datasets.exists() or list(datasets.iterdir()) == []


def test_a_name_that_is_taken_is_refused_unless_forced(datasets):
    recorder, beside = recorded(Scripted(), 2)
    recorder.save("taken/one-v0")
    with pytest.raises(SettingError, match=r"dataset 'taken/one-v0' already exists, in .*replace it: --force, in Python force=True"):
        recorded(Scripted(), 1)[0].save("taken/one-v0")
    assert differences(load_demonstrations("taken/one-v0", spaces_of(recorder)), beside) == []
    other, beside = recorded(ScriptedBox(), 1)
    other.save("taken/one-v0", force=True)
    assert differences(load_demonstrations("taken/one-v0", spaces_of(other)), beside) == []
    assert sorted(path.name for path in datasets.rglob("*")) == [
        "data",
        "main_data.hdf5",
        "metadata.json",
        "namespace_metadata.json",
        "one-v0",
        "taken",
    ]


def test_force_replaces_a_dataset_and_nothing_else(datasets):
    recorder, _ = recorded(Scripted(), 1)
    inner = recorder.save("outer-v0/inner-v0")
    with pytest.raises(SettingError, match=r"dataset 'outer-v0' cannot be replaced: .* holds other things too"):
        recorder.save("outer-v0", force=True)
    assert (inner / "data" / "main_data.hdf5").is_file()
    (inner.parent.parent / "file-v0").touch()
    with pytest.raises(SettingError, match=r"dataset 'file-v0' cannot be replaced: '.*file-v0' is a file; choose another name"):
        recorder.save("file-v0", force=True)


def test_no_episodes_are_no_dataset(datasets):
    with pytest.raises(SettingError, match="there are no episodes to save as dataset 'none-v0'"):
        RecordEpisodes(Scripted()).save("none-v0")


def test_a_full_disk_leaves_what_was_there(datasets, monkeypatch):
    recorder, beside = recorded(Scripted(), 1)
    recorder.save("disk/full-v0")
    create = h5py.Group.create_dataset

    def refuse(group, name, *arguments, **settings):
        if name == "truncations":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(group, name, *arguments, **settings)

    monkeypatch.setattr(h5py.Group, "create_dataset", refuse)
    for name in ("disk/full-v0", "disk/other-v0"):
        with pytest.raises(SaveError, match=rf"dataset '{name}' could not be saved in .*No space left on device") as failed:
            recorder.save(name, force=True)
        assert failed.value.strerror == "No space left on device"
    assert differences(load_demonstrations("disk/full-v0", spaces_of(recorder)), beside) == []
    assert [path.name for path in datasets.iterdir()] == ["disk"] and not (datasets / "disk" / "other-v0").exists()
    assert os.environ["MINARI_DATASETS_PATH"] == str(datasets)


@pytest.mark.parametrize("error, raised", [(OSError(errno.EIO, "broken"), SaveError), (KeyboardInterrupt("broken"), KeyboardInterrupt)])
def test_a_dataset_that_cannot_be_moved_to_its_place_leaves_what_was_there(error, raised, datasets, monkeypatch):
    recorder, beside = recorded(Scripted(), 1)
    folder, replace = recorder.save("moved-v0"), os.replace

    def refuse(source, target):
        if target == folder and "replaced" not in str(source):
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(raised, match="broken"):
        recorder.save("moved-v0", force=True)
    assert differences(load_demonstrations("moved-v0", spaces_of(recorder)), beside) == []


def test_a_folder_that_cannot_be_used_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "file" / "datasets"))
    recorder, _ = recorded(Scripted(), 1)
    for use in (recorder.save, lambda name: load_demonstrations(name, spaces_of(recorder))):
        with pytest.raises(SettingError, match="MINARI_DATASETS_PATH, cannot be used: "):
            use("any-v0")


def test_the_home_folder_is_the_default(tmp_path, monkeypatch):
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    recorder, beside = recorded(Scripted(), 1)
    folder = save_demonstrations("home-v0", recorder.demonstrations, recorder.env)
    assert folder == tmp_path / ".minari" / "datasets" / "home-v0" and "MINARI_DATASETS_PATH" not in os.environ
    assert differences(load_demonstrations("home-v0", spaces_of(recorder)), beside) == []


@pytest.mark.parametrize("settings", [{}, {"action": [0, 1]}, {"action": [0, 3]}, {"action": [2, 2], "num_visual": 1, "vec_size": 2}])
def test_simple_1d_is_recorded_with_the_best_actions(datasets, settings):
    recorder = record_1d(**settings)
    recorder.save("simple1d/expert-v0")
    loaded = load_demonstrations("simple1d/expert-v0", recorder.spaces)
    assert summarize(loaded) == "20 episodes, 100 steps, return 1.02 ± 0.00, mean length 5.0"
    goals = {float(np.ravel(next(iter(each.obs.values())) if isinstance(each.obs, dict) else each.obs)[0]) for each in loaded}
    assert goals == {-1.0, 1.0}
    if not settings:
        assert all((each.action[:, 0] == each.obs[:-1, 0]).all() for each in loaded)
    if settings == {"action": [0, 1]}:
        assert all((each.action == (each.obs[:-1, 0] > 0)).all() for each in loaded)


def test_the_number_of_recorded_steps_is_exact():
    recorder = record_1d(n_demos=12, seed=3)
    assert [len(each.reward) for each in recorder.demonstrations] == [5, 5, 2]
    assert [bool(each.truncated[-1]) for each in recorder.demonstrations] == [False, False, True]
    assert differences(recorder.demonstrations, record_1d(n_demos=12, seed=3).demonstrations) == []
    with pytest.raises(SettingError, match="n_demos must be >= 1, got 0"):
        record_1d(0)
