"""What is recorded is what is loaded, in every bit."""

from __future__ import annotations

import gymnasium as gym
import minari
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.demonstrations.dataset import Demonstration, load_demonstrations, summarize, transitions
from lightning_rl.demonstrations.recorder import RecordEpisodes
from lightning_rl.envs.masks import Masks
from lightning_rl.spaces import Spaces, legal_sample
from lightning_rl.types import tree_index
from tests.demonstrations.episodes import Drawn, differences, minari_dataset, recorded, spaces_of
from tests.environments import Anything, Choosy, Scripted, ScriptedDict, legal

ODD = {
    "float64 without bounds": Box(-np.inf, np.inf, (2, 3), np.float64),
    "float16": Box(-1, 1, (3,), np.float16),
    "one number": Box(-1, 1, (), np.float32),
    "uint16": Box(0, 60_000, (2,), np.uint16),
    "int64": Box(-(2**60), 2**60, (2,), np.int64),
    "discrete from -3": Discrete(5, start=-3),
    "discrete int32": Discrete(5, start=2, dtype=np.int32),
    "multi-discrete of two dimensions": MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, -2]]),
    "bits of two dimensions": MultiBinary([2, 3]),
    "picture": Box(0, 255, (40, 36, 3), np.uint8),
    "grey picture": Box(0, 255, (40, 36), np.uint8),
    "keys out of order": Dict([("b", Discrete(2)), ("a", Tuple((Dict({"c": MultiBinary(2)}), Box(0, 1, (1,), np.float64))))]),
}


@pytest.mark.variants
@pytest.mark.parametrize("observation", Anything.observation_spaces)
@pytest.mark.parametrize("action", Anything.action_spaces)
def test_episodes_are_loaded_as_they_were_played(datasets, observation, action):
    env = Anything(observation, action)
    recorder, beside = recorded(env, episodes=2)
    recorder.save("any/thing-v0")
    assert differences(load_demonstrations("any/thing-v0", spaces_of(env)), beside) == []


@pytest.mark.parametrize("kind", ODD)
def test_every_kind_of_number_keeps_its_bits(datasets, kind):
    env = Drawn(ODD[kind], ODD[kind])
    recorder, beside = recorded(env)
    assert differences(recorder.demonstrations, beside) == []
    assert recorder.save("odd-v0") == datasets / "odd-v0"
    loaded = load_demonstrations("odd-v0", spaces_of(env))
    assert differences(loaded, beside) == []
    assert [bool(each.truncated[-1]) for each in loaded] == [False, True, False]


def test_one_name_is_an_id_a_short_form_a_path_and_a_link(datasets, tmp_path, monkeypatch):
    recorder, beside = recorded(Scripted())
    folder = recorder.save("scripted/v3")
    assert folder == datasets / "scripted-v3"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    for name in ("scripted/v3", "scripted-v3", str(folder), "datasets/scripted-v3", "datasets/scripted-v3/data", "link"):
        assert differences(load_demonstrations(name, spaces_of(Scripted())), beside) == []


def test_minari_reads_what_is_saved_and_builds_the_environment_again(datasets):
    env = gym.make("CartPole-v1", max_episode_steps=9)
    recorder, beside = recorded(env, episodes=1)
    recorder.save("cart/pole-v1")
    dataset = minari.load_dataset("cart/pole-v1")
    assert (dataset.total_episodes, dataset.total_steps) == (1, 9)
    assert differences(dataset[0].observations, beside[0].obs) == [] and differences(dataset[0].rewards, beside[0].reward) == []
    assert dataset.recover_environment().spec.max_episode_steps == 9
    assert minari.list_local_datasets().keys() == {"cart/pole-v1"} and minari.namespace.list_local_namespaces() == ["cart"]
    assert sorted(path.name for path in datasets.iterdir()) == ["cart"]  # nothing of the way there is left


def test_an_environment_that_cannot_be_written_down_is_left_out(datasets):
    recorder, beside = recorded(gym.make("Endless-v0", action="box", disable_env_checker=True, max_episode_steps=3))
    recorder.env.spec.kwargs["clock"] = print
    recorder.save("endless-v0")
    assert minari.load_dataset("endless-v0").env_spec is None
    assert differences(load_demonstrations("endless-v0", spaces_of(recorder.env)), beside) == []


def test_lists_of_numbers_that_minari_wrote_are_read(datasets):
    spaces = Dict({"a": Box(-1, 1, (2,), np.float32), "b": Discrete(4)}), Tuple((Discrete(2), Box(-1, 1, (1,), np.float64)))
    seen = {"a": [np.float32([i / 10, -1]) for i in range(3)], "b": [3, 0, 1]}
    minari_dataset("lists-v0", seen, ([1, 0], [np.array([0.1]), np.array([-0.2])]), spaces, steps=2, terminated=False)
    (episode,) = load_demonstrations("lists-v0", Spaces(*spaces))
    expected = Demonstration(
        {"a": np.float32([[0, -1], [0.1, -1], [0.2, -1]]), "b": np.array([3, 0, 1])},
        (np.array([1, 0]), np.array([[0.1], [-0.2]])),
        np.array([1.0, 1.0]),
        np.array([False, False]),
        np.array([False, True]),  # it did not end, so that it is cut off where its steps are
    )
    assert differences([episode], [expected]) == []


@pytest.mark.parametrize("shape", [(40, 36, 3), (40, 36)])
def test_images_that_minari_compressed_are_read_as_minari_reads_them(datasets, shape):
    drawn = np.random.default_rng(0).integers(0, 255, (4, *shape), np.uint8)
    drawn[0] = 7  # a file of another length
    spaces = Dict({"camera": Box(0, 255, shape, np.uint8)}), Discrete(2)
    dataset = minari_dataset("jpeg-v0", {"camera": drawn}, [0, 1, 0], spaces)
    (episode,) = load_demonstrations("jpeg-v0", Spaces(*spaces))
    assert differences(episode.obs, dataset[0].observations) == [] and (episode.obs["camera"] != drawn).any()


@pytest.mark.parametrize("action", Choosy.action_spaces)
@pytest.mark.parametrize("way", ["info", "key", "method"])
def test_masks_are_kept_flat_whatever_form_the_environment_gives(datasets, way, action):
    env = Choosy(way, action, period=4, endings=("termination", "truncation"))
    recorder = RecordEpisodes(env)
    env.action_space.seed(0)
    for _ in range(2):
        recorder.reset()
        for t in range(4):
            recorder.step(legal_sample(env.action_space, legal([env.episode, t], env.sizes[action])))
    recorder.save("choosy-v0")
    loaded = load_demonstrations("choosy-v0", spaces_of(env, masked=True))
    assert differences(loaded, recorder.demonstrations) == []
    for number, episode in enumerate(loaded):
        mask = np.array([legal([number, t], env.sizes[action]) for t in range(5)])
        mask[-1] |= number == 0  # nothing follows a termination
        assert differences(episode.action_mask[: 5 - number], mask[: 5 - number]) == []
        where = episode.obs["where"] if way == "key" else episode.obs
        assert where.tolist() == [[number, t] for t in range(5)]


@pytest.mark.parametrize("place", ["infos", "observations"])
def test_masks_that_others_recorded_are_read_and_nothing_need_be_legal_after_the_end(datasets, place):
    mask = np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]], np.int8)
    where = np.zeros((3, 2), np.float32)
    space = Dict({"where": Box(-1, 1, (2,), np.float32), "action_mask": MultiBinary(3)}) if place == "observations" else Box(-1, 1, (2,))
    obs = {"where": where, "action_mask": mask} if place == "observations" else where
    minari_dataset("masks-v0", obs, [0, 1], (space, Discrete(3)), infos={"action_mask": mask} if place == "infos" else None)
    own = Dict({"where": Box(-1, 1, (2,), np.float32)}) if place == "observations" else space
    (episode,) = load_demonstrations("masks-v0", Spaces(own, Discrete(3), masked=True))
    assert differences(episode.action_mask, mask.astype(bool) | [[False], [False], [True]]) == []
    assert load_demonstrations("masks-v0", Spaces(own, Discrete(3)))[0].action_mask == ()
    steps = transitions([episode])
    assert steps[0]["action_mask"].tolist() == [1, 0, 1] and steps[0]["next_action_mask"].tolist() == [0, 1, 0]
    assert differences(steps[1]["obs"], tree_index(episode.obs, 1)) == []


def test_steps_fill_a_replay_buffer_episode_by_episode(datasets):
    recorder, _ = recorded(ScriptedDict())
    recorder.save("steps-v0")
    steps = transitions(load_demonstrations("steps-v0", spaces_of(recorder.env)))
    assert [step["terminated"] for step in steps] == [False, False, True, False, False, False, False, False, True]
    assert [step["truncated"] for step in steps] == [False, False, False, False, False, True, False, False, True]
    buffer = ReplayBuffer(recorder.observation_space, np.zeros((), np.int64), 10, n_steps=2)
    buffer.extend(steps, lambda action: action)
    assert len(buffer) == 9
    rows = buffer.layout.row
    assert rows.observation.obs["where"]["t"][:9].tolist() == [0, 1, 2] * 3
    assert rows.terminated[:9].tolist() == [s["terminated"] for s in steps]
    assert rows.reward[:9].tolist() == np.float32([step["reward"] for step in steps]).tolist()
    assert rows.action[:9].tolist() == [step["action"] for step in steps]


def test_masked_steps_fill_a_replay_buffer(datasets):
    env = Choosy(endings=("termination",))
    recorder = RecordEpisodes(env)
    recorder.reset()
    for t in range(3):
        recorder.step(legal_sample(env.action_space, legal([0, t], [4])))
    buffer = ReplayBuffer(env.observation_space, np.zeros((), np.int64), 10, action_mask=np.ones(4, dtype=bool))
    buffer.extend(transitions(recorder.demonstrations), lambda action: action, Masks(env.action_space, "step {}"))
    assert buffer.layout.row.observation.mask[:3].tolist() == [legal([0, t], [4]).tolist() for t in range(3)]


def test_a_summary_has_episodes_steps_return_and_length():
    def episode(rewards):
        end = np.zeros(len(rewards), dtype=bool)
        return Demonstration(np.zeros(len(rewards) + 1), np.zeros(len(rewards)), np.array(rewards), end, end)

    assert summarize([episode([1.0, 2.0]), episode([0.0, 0.0, 0.0, 5.0])]) == "2 episodes, 6 steps, return 4.00 ± 1.00, mean length 3.0"
    assert summarize([]) == "0 episodes, 0 steps"
