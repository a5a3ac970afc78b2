"""Demonstrations in `.demo` files of Unity ML-Agents."""

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

import lightning_rl as lrl
from lightning_rl.cli.main import main
from lightning_rl.demonstrations.dataset import load_demonstrations
from lightning_rl.envs.unity.wire import messages
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces

ANY = Box(-np.inf, np.inf, (2,), np.float32)
PUSH = Box(-1, 1, (1,), np.float32)


def with_length(message):
    data = message.SerializeToString()
    size, length = len(data), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([*length, size]) + data


def request(obs, reward=0.0, done=False, interrupted=False, mask=(), **action):
    """One step as Unity's recorder writes it; obs: by the name of the sensor."""
    classes = messages()
    seen = [{"shape": rows.shape, "float_data": {"data": rows.ravel()}, "name": name} for name, rows in obs.items()]
    info = {"reward": reward, "done": done, "max_step_reached": interrupted, "action_mask": mask, "observations": seen}
    return classes.AgentInfoActionPairProto(agent_info=info, action_info=action)


def write(path, requests, number_steps=None, version=1, continuous=1, branches=()):
    classes = messages()
    number_steps = len(requests) if number_steps is None else number_steps
    header = classes.DemonstrationMetaProto(api_version=version, demonstration_name="demo", number_steps=number_steps)
    spec = {"num_continuous_actions": continuous, "num_discrete_actions": len(branches), "discrete_branch_sizes": branches}
    parameters = classes.BrainParametersProto(brain_name="Walker?team=0", action_spec=spec)
    parts = [with_length(header).ljust(33, b"\0"), with_length(parameters), *map(with_length, requests)]
    path.write_bytes(b"".join([*parts, *([header.SerializeToString()] if number_steps else [])]))
    return path


def vector(*numbers):
    return {"rays": np.array(numbers, np.float32)}


def two_episodes():
    """Episodes of two steps and of one; the action beside a request is the one that led to it."""
    return [
        request(vector(0, 0), continuous_actions=[0.9]),
        request(vector(1, 0), 0.5, continuous_actions=[0.1]),
        request(vector(2, 0), 1.5, True, continuous_actions=[0.2]),
        request(vector(7, 0), continuous_actions=[0.9]),
        request(vector(8, 0), 2.0, True, True, continuous_actions=[0.3]),
    ]


def load(path, observation=ANY, action=PUSH, masked=False, said=None):
    return load_demonstrations(str(path), Spaces(observation, action, masked), [].append if said is None else said.append)


def test_an_action_answers_the_request_before_it(tmp_path):
    first, second = load(write(tmp_path / "a.demo", two_episodes()))
    assert first.obs[:, 0].tolist() == [0, 1, 2] and second.obs[:, 0].tolist() == [7, 8]
    assert first.action[:, 0].tolist() == pytest.approx([0.1, 0.2]) and second.action[:, 0].tolist() == pytest.approx([0.3])
    assert first.reward.tolist() == [0.5, 1.5] and second.reward.tolist() == [2.0]
    assert first.terminated.tolist() == [False, True] and first.truncated.tolist() == [False, False]
    assert second.terminated.tolist() == [False] and second.truncated.tolist() == [True]


def test_the_pairing_can_be_set(tmp_path):
    path = write(tmp_path / "a.demo", two_episodes())
    said = []
    (first, _), (following, _) = load(f"{path}:own", said=said), load(f"{path}:next", said=said)
    assert first.action[:, 0].tolist() == pytest.approx([0.9, 0.1])
    assert following.action[:, 0].tolist() == pytest.approx([0.1, 0.2])
    assert [line.partition("; ")[2] for line in said] == [
        "actions are those of the same request (as set)",
        "actions are those of the next request (as set)",
    ]


@pytest.mark.parametrize(("shift", "word"), [(1, "next"), (0, "same")])
def test_the_pairing_is_found_from_what_actions_do(shift, word, tmp_path):
    random = np.random.default_rng(0)
    pushes = random.uniform(-1, 1, 121).astype(np.float32)
    place = np.concatenate([[0], np.cumsum(pushes[:-1])]).astype(np.float32)  # push t moves from place t to place t + 1
    beside = np.roll(pushes, shift)
    requests = [request(vector(x, random.normal()), continuous_actions=[push]) for x, push in zip(place, beside, strict=True)]
    said = []
    (episode,) = load(write(tmp_path / "a.demo", requests), said=said)
    assert np.array_equal(episode.action[:, 0], pushes[:-1]) and f"the {word} request (they explain best" in said[0]


def test_actions_that_explain_nothing_are_paired_as_unity_records_them(tmp_path):
    requests = [request(vector(t % 7, 0), continuous_actions=[t % 3 / 3]) for t in range(100)]
    said = []
    load(write(tmp_path / "a.demo", requests), said=said)
    assert said[0].endswith("actions are those of the next request (as Unity's recorder writes them)")


def test_choices_masks_and_several_observations_have_the_form_of_the_environment(tmp_path):
    obs = {"lidar": np.zeros((2, 3), np.float32), "speed": np.ones(1, np.float32)}
    requests = [
        request(obs, mask=[False, False, True, False, False], discrete_actions=[0, 0], continuous_actions=[0.0]),
        request(obs, done=True, discrete_actions=[1, 1], continuous_actions=[3.0]),
    ]
    path = write(tmp_path / "a.demo", requests, branches=(3, 2))
    boxes = Box(-9, 9, (2, 3), np.float32), Box(-9, 9, (1,), np.float32)
    action = Dict(continuous=PUSH, discrete=MultiDiscrete([3, 2]))
    for names in (("obs_0", "obs_1"), ("lidar", "speed")):
        (episode,) = load(path, Dict(dict(zip(names, boxes, strict=True))), action, masked=True)
        assert {name: rows.shape for name, rows in episode.obs.items()} == {names[0]: (2, 2, 3), names[1]: (2, 1)}
        assert episode.action["discrete"].tolist() == [[1, 1]] and episode.action["continuous"].tolist() == [[1.0]]  # clipped
        assert episode.action_mask.tolist() == [[True, True, False, True, True], [True] * 5]
    assert load(path, Dict(dict(zip(names, boxes, strict=True))), action)[0].action_mask == ()


def test_a_single_choice_is_a_number(tmp_path):
    requests = [request(vector(0, 0), discrete_actions=[0]), request(vector(0, 0), discrete_actions=[2])]
    path = write(tmp_path / "a.demo", requests, continuous=0, branches=(3,))
    assert load(path, action=Discrete(3, start=5))[0].action.tolist() == [7]


def test_files_of_before_protocol_1_3_are_read(tmp_path):
    classes = messages()
    requests = [request(vector(0, 0), old_actions=[0, 0]), request(vector(0, 0), old_actions=[1, 2])]
    path = write(tmp_path / "a.demo", requests, continuous=0)
    old = classes.BrainParametersProto(old_action_size=[2, 3], old_space_type=0)
    data = path.read_bytes()
    size = data[33]
    path.write_bytes(data[:33] + with_length(old) + data[34 + size :])
    assert load(path, action=MultiDiscrete([2, 3]))[0].action.tolist() == [[1, 2]]


def test_a_recording_that_was_cut_off_is_read_to_its_end(tmp_path):
    path = write(tmp_path / "a.demo", two_episodes()[:3], number_steps=0)
    (whole,) = load(path)
    path.write_bytes(path.read_bytes()[:-5])
    (cut,) = load(path)
    assert (len(whole.reward), len(cut.reward)) == (2, 1)
    assert whole.terminated.tolist() == [False, True] and cut.truncated.tolist() == [True]


def test_a_folder_holds_all_its_files(tmp_path):
    write(tmp_path / "b.demo", two_episodes()[3:])
    write(tmp_path / "a.demo", two_episodes()[:3])
    said = []
    assert [len(episode.reward) for episode in load(tmp_path, said=said)] == [2, 1]
    assert ["a.demo" in said[0], "b.demo" in said[1]] == [True, True]


WIDE = Box(-np.inf, np.inf, (3,), np.float32)


@pytest.mark.parametrize(
    ("change", "spaces", "line"),
    [
        (lambda data: data[:-40], {}, "is damaged: 4 of 5 steps"),
        (lambda data: data[:20], {}, "is damaged: it ends within a length"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:1", {}, "is a Git LFS pointer, not a demonstration"),
        (lambda data: data[:1] + b"\x08\x02" + data[3:], {}, "has version 2 of the format; 0 and 1 are read"),
        (lambda data: b"", {}, "is damaged: it ends within a length"),
        (lambda data: data, {"action": Discrete(3)}, "holds actions of 1 continuous, the policy has actions of branches of (3,) choices"),
        (lambda data: data, {"observation": WIDE}, "has rays of shape (2,), the policy (3,)"),
        (lambda data: data, {"observation": Dict(eye=ANY)}, "observes rays, the policy eye"),
        (lambda data: data, {"observation": Box(0, 255, (2,), np.uint8)}, "has rays as float32, the policy as uint8"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(change, spaces, line, tmp_path):
    path = write(tmp_path / "a.demo", two_episodes())
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(SettingError) as caught:
        load(path, **spaces)
    assert str(caught.value).endswith(f"a.demo' {line}") and "\n" not in str(caught.value)


def test_values_that_are_not_finite_and_choices_out_of_range_are_refused(tmp_path):
    for requests, line in (
        ([request(vector(np.nan, 0)), request(vector(0, 0))], "NaN or infinite"),
        ([request(vector(0, 0)), request(vector(0, 0), continuous_actions=[np.inf])], "NaN or infinite"),
        ([request(vector(0, 0)), request(vector(0, 0), continuous_actions=[1, 2])], "an action has 2 continuous parts, not 1"),
    ):
        with pytest.raises(SettingError, match=line):
            load(write(tmp_path / "a.demo", requests))
    choices = [request(vector(0, 0), discrete_actions=[0]), request(vector(0, 0), discrete_actions=[3])]
    with pytest.raises(SettingError, match=r"the action \[3\] is none of \(3,\) choices"):
        load(write(tmp_path / "b.demo", choices, continuous=0, branches=(3,)), action=Discrete(3))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingError, match=r"missing.demo' cannot be read: No such file"):
        load(tmp_path / "missing.demo")


class Line(gym.Env):
    """Pushes move a point; the first number of an observation is its place."""

    observation_space, action_space = ANY, PUSH

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-1, 1), 0
        return np.array([self.place, 0], np.float32), {}

    def step(self, action):
        self.place, self.steps = self.place + float(action[0]), self.steps + 1
        return np.array([self.place, 0], np.float32), -abs(self.place), False, self.steps == 5, {}


@pytest.mark.thorough
def test_cloning_learns_from_a_file_named_on_the_command_line(tmp_path, capsys):
    requests, random = [], np.random.default_rng(0)
    for _ in range(40):
        place, push = random.uniform(-1, 1), 0.0
        for step in range(6):
            requests.append(request(vector(place, 0), -abs(place), step == 5, True, continuous_actions=[push]))
            push = float(np.clip(-place / 2 + random.normal(0, 0.1), -1, 1))
            place += push
    path = write(tmp_path / "expert.demo", requests)
    options = f"--model.dataset {path} --model.env.id tests.demonstrations.test_unity_files.Line --model.max_updates 300"
    quiet = f"--evaluation null --trainer.logger false --trainer.accelerator cpu --trainer.default_root_dir {tmp_path}"
    assert main(["fit", "--model", "BehavioralCloning", *f"{options} {quiet}".split()]) == 0
    assert "40 episodes; actions are those of the next request (they explain best" in capsys.readouterr().out
    policy = lrl.load_policy(next(tmp_path.rglob("last.ckpt")))
    for place in (-0.8, 0.1, 0.6):
        assert policy.act(np.array([place, 0], np.float32))[0] == pytest.approx([-place / 2], abs=0.1)
