"""Policies as files for Unity: its tensors and constants, the same actions as the policy, legal samples, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple
from torch import nn

from lightning_rl import GRU, LSTM, PPO, SettingError, export_policy, load_policy
from lightning_rl.distributions import SDE
from lightning_rl.exporting.export import check
from lightning_rl.exporting.unity import Unity, UnityGraph, in_order, problems
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.normalization import RunningMeanStd
from lightning_rl.networks.off_policy import Actor
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.policy import Policy
from lightning_rl.spaces import Spaces, allocate
from tests.command_line import run
from tests.exporting.exported import described, save
from tests.fitting import tiny

ANY = {"low": -np.inf, "high": np.inf, "dtype": np.float32}
UNIT = {"low": -1, "high": 1, "dtype": np.float32}
VECTOR, BYTES = Box(shape=(3,), **ANY), {"low": 0, "high": 255, "dtype": np.uint8}
STACK = Box(shape=(4, 20, 20, 3), **BYTES)
SCENE = Dict([("zoom", Box(shape=(1,), **ANY)), ("Camera", Box(shape=(6, 6, 3), **BYTES)), ("agents", Box(shape=(4, 2), **ANY))])
"""In an order that sorting would change."""
HYBRID = Dict({"move": Box(shape=(2,), **UNIT), "press": MultiDiscrete([3, 2])})


def policy_of(observation, action, network=ActorCritic, masked=False, **settings):
    """A policy with random weights that differ enough, and random statistics."""
    torch.manual_seed(0)
    spaces = Spaces(observation, action, masked)
    built = network(spaces, net_arch=[8], **settings)
    with torch.no_grad():
        for part in built.modules():
            if isinstance(part, RunningMeanStd):
                part.mean.normal_()
                part.var.uniform_(0.5, 2)
        for layer in getattr(built, "actor", ())[-1:]:
            layer.weight.mul_(100)
    return Policy(built.eval(), spaces)


def file_of(policy):
    """The graph of a policy and the content of its file."""
    graph = UnityGraph(policy.network, policy.spaces)
    policy.network = graph.network
    return graph, Unity().write(graph, "{}")


def session_of(data):
    return onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])


def outputs_of(data, **inputs):
    session = session_of(data)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {name: np.asarray(each, np.float32) for name, each in inputs.items()}), strict=True))


def rich(memory=None):
    """A policy of everything: an image, a list of entities and a vector, normalized, a hybrid action, masks, a memory."""
    settings = {"encoder_features": 8, "entities": ["agents"], "normalize_obs": "running", "memory": memory or LSTM(8, 4)}
    return policy_of(SCENE, HYBRID, masked=True, **settings)


@pytest.mark.thorough
def test_a_file_has_the_tensors_and_constants_that_unity_reads():
    graph, data = file_of(rich())
    model = onnx.load_from_string(data)
    assert ([each.version for each in model.opset_import], list(problems(model))) == ([9], [])
    session = session_of(data)
    assert [(each.name, each.type, each.shape) for each in session.get_inputs()] == [
        ("obs_0", "tensor(float)", ["batch", 1]),
        ("obs_1", "tensor(float)", ["batch", 3, 6, 6]),
        ("obs_2", "tensor(float)", ["batch", 4, 2]),
        ("action_masks", "tensor(float)", ["batch", 5]),
        ("recurrent_in", "tensor(float)", ["batch", 1, 8]),
    ]
    assert [(each.name, each.type, each.shape) for each in session.get_outputs()] == [
        ("continuous_actions", "tensor(float)", ["batch", 2]),
        ("deterministic_continuous_actions", "tensor(float)", ["batch", 2]),
        ("discrete_actions", "tensor(int64)", ["batch", 2]),
        ("deterministic_discrete_actions", "tensor(int64)", ["batch", 2]),
        ("recurrent_out", "tensor(float)", ["batch", 1, 8]),
        ("version_number", "tensor(float)", [1]),
        ("memory_size", "tensor(float)", [1]),
        ("continuous_action_output_shape", "tensor(float)", [1]),
        ("discrete_action_output_shape", "tensor(float)", [1, 2]),
    ]
    zeros = {port.name: np.zeros((1, *port.shape)) for port in graph.inputs}  # what the loader runs, masks included
    found = outputs_of(data, **zeros)
    constants = [found[name].tolist() for name in list(found)[-4:]]
    assert constants == [[3.0], [8.0], [2.0], [[3.0, 2.0]]]


def test_a_file_does_the_same_as_the_policy_and_never_samples_what_is_illegal():
    policy = rich()
    graph, data = file_of(policy)
    found = check(Unity().read(data, graph), policy)
    assert found.observations == 1000 and found.max_abs_difference <= 1e-5 and found.max_abs_difference_of_memory <= 1e-5


def plain(space, action, **settings):
    return space, action, settings


CASES = {
    "a vector": plain(VECTOR, Box(shape=(2,), **UNIT)),
    "a number": plain(Box(shape=(), **ANY), Box(shape=(2, 2), **UNIT)),
    "integers": plain(Box(0, 9, (3,), np.int64), Discrete(3, start=2), normalize_obs="running"),
    "bytes that are no image": plain(Box(shape=(4,), **BYTES), Discrete(3)),
    "bits": plain(MultiBinary(4), MultiBinary(3), masked=True),
    "other bounds": plain(VECTOR, Box(np.float32([-2, 0]), np.float32([1, 10]))),
    "actions in float64": plain(VECTOR, Box(-3, 3, (2,), np.float64)),
    "tanh": plain(VECTOR, Box(-2, 2, (2,), np.float32), action_dist="tanh_normal"),
    "noise of the state": plain(VECTOR, Box(-2, 2, (2,), np.float32), sde=SDE()),
    "soft": plain(VECTOR, Box(-2, 2, (2,), np.float32), network=lambda *a, **s: Actor(*a, "squashed_normal", nn.Identity(), **s)),
    "unit": plain(VECTOR, Box(-2, 2, (2,), np.float32), network=lambda *a, **s: Actor(*a, "unit_normal", nn.Identity(), **s)),
    "noisy": plain(VECTOR, Box(-2, 2, (2,), np.float32), network=lambda *a, **s: Actor(*a, "noisy", nn.Tanh(), **s), memory=GRU(8, 4)),
    "values": plain(VECTOR, Discrete(3), masked=True, network=QNetwork, dueling=True),
    "branches": plain(VECTOR, MultiDiscrete([[2, 3], [4, 2]]), masked=True),
    "a nested action": plain(
        VECTOR, Tuple([Box(shape=(1,), **UNIT), Dict({"a": Discrete(3), "b": Box(shape=(2,), **UNIT)}), Discrete(2)]), masked=True
    ),
    "nested observations": plain(Dict({"a": Dict({"c": VECTOR, "b": Box(shape=(2,), **ANY)}), "A": VECTOR}), Discrete(2)),
    "float images, channels first": plain(Box(0, 1, (2, 20, 24), np.float32), Discrete(2), encoder_features=8),
    "bytes, channels first": plain(Box(shape=(1, 36, 40), **BYTES), Discrete(2), encoder_features=8),
    "residual": plain(Box(shape=(16, 20, 3), **BYTES), Discrete(2), encoder_features=8, encoder="resnet"),
    "flat images": plain(Box(shape=(6, 5, 3), **BYTES), Discrete(2), encoder="mlp"),
    "a goal": plain(Dict({"goal": VECTOR, "obs": VECTOR}), Discrete(2), goals=["goal"]),
    "a goal and a memory": plain(Dict({"goal": VECTOR, "obs": VECTOR}), Discrete(2), goals=["goal"], memory=GRU(8, 4)),
    "lists alone": plain(Dict({"a": Box(shape=(4, 2), **ANY), "b": Box(shape=(3, 5), **ANY)}), Discrete(2), entities=["a", "b"]),
    "GRU": plain(VECTOR, HYBRID, memory=GRU(8, 4), normalize_obs="running"),
    "a shared LSTM": plain(VECTOR, HYBRID, memory=LSTM(8, 4), share_encoder=True, masked=True),
    "what only the critic sees": plain(Dict({"a": VECTOR, "map": VECTOR}), HYBRID, memory=LSTM(8, 4), critic_obs=["map"]),
    **{name: plain(VECTOR, Discrete(2), activation=name) for name in ("relu", "silu", "elu", "leaky_relu", "gelu")},
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_files_of_all_kinds_do_the_same_as_the_policy(case):
    observation, action, settings = CASES[case]
    policy = policy_of(observation, action, **settings)
    graph, data = file_of(policy)
    found = check(Unity().read(data, graph), policy)
    assert found.max_abs_difference <= 1e-5 and found.max_abs_difference_of_memory <= 1e-5


def test_observations_are_in_the_order_of_the_space_and_images_from_0_to_1_with_channels_first():
    policy = policy_of(SCENE, Discrete(7), encoder_features=8)
    _, data = file_of(policy)
    obs = SCENE.sample()
    image = obs["Camera"].transpose(2, 0, 1) / 255
    x = policy.network.policy({name: torch.from_numpy(leaf)[None] for name, leaf in obs.items()}, (), None)[0]
    found = outputs_of(data, obs_0=[obs["zoom"]], obs_1=[image], obs_2=[obs["agents"]], action_masks=np.ones((1, 7)))
    assert found["deterministic_discrete_actions"].tolist() == [[int(x.argmax())]]


def test_the_tenth_sensor_comes_after_the_second():
    space = Dict({f"obs_{i}": Box(0, 1, (i + 1,)) for i in range(12)})  # gymnasium sorts them as text
    assert [len(leaf) for leaf in in_order(allocate(space))] == list(range(1, 13))
    assert [len(leaf) for leaf in in_order(allocate(Dict([("b", Box(0, 1, (1,))), ("a", Box(0, 1, (2,)))])))] == [1, 2]


def test_sampled_actions_follow_the_distribution_and_the_mask():
    policy = policy_of(VECTOR, HYBRID, masked=True)
    with torch.no_grad():
        policy.network.actor[-1].weight.zero_()
        policy.network.actor[-1].bias.copy_(torch.tensor([0.2, -0.5, 0, np.log(3), 50, 0, 0]))
        policy.network.distribution.parts[0].log_std.fill_(np.log(0.1))
    _, data = file_of(policy)
    rows = 20_000
    found = outputs_of(data, obs_0=np.zeros((rows, 3)), action_masks=np.tile([1, 1, 0, 0, 1], (rows, 1)))
    actions, choices = found["continuous_actions"], found["discrete_actions"]
    assert actions.mean(0) == pytest.approx([0.2, -0.5], abs=0.005) and actions.std(0) == pytest.approx(0.1, rel=0.03)
    assert np.bincount(choices[:, 0], minlength=3) / rows == pytest.approx([0.25, 0.75, 0], abs=0.015)
    assert (choices[:, 1] == 1).all() and (found["deterministic_discrete_actions"] == [1, 1]).all()


def test_a_policy_trained_with_other_bounds_acts_between_minus_1_and_1():
    policy = policy_of(VECTOR, Box(np.float32([-2, 0]), np.float32([2, 10])))
    with torch.no_grad():
        policy.network.actor[-1].weight.zero_()
        policy.network.actor[-1].bias.copy_(torch.tensor([1.0, 30.0]))
    found = outputs_of(file_of(policy)[1], obs_0=np.zeros((1, 3)))
    assert found["deterministic_continuous_actions"].tolist() == [[0.5, 1.0]]


def test_the_memory_of_the_critic_is_left_out():
    graph, data = file_of(policy_of(VECTOR, Discrete(2), memory=LSTM(8, 4)))
    assert graph.memory_size == 8
    names = {each.name for each in onnx.load_from_string(data).graph.initializer}
    assert not [name for name in names if "critic" in name]


FLOAT, INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


def constant(name, value):
    """Replace the value of a constant output."""

    def change(model):
        weight = next(each for each in model.graph.initializer if each.name == f"{name}.value")
        weight.CopyFrom(onnx.numpy_helper.from_array(np.array(value), weight.name))

    return change


def port(name, index=-1, size=None, dtype=None):
    """Change the type of a tensor."""

    def change(model):
        tensor = next(each for each in (*model.graph.input, *model.graph.output) if each.name == name).type.tensor_type
        tensor.elem_type = dtype or tensor.elem_type
        if size is not None:
            tensor.shape.dim[index].dim_value = size

    return change


def without(name):
    """Take away an input or output."""

    def change(model):
        for tensors in (model.graph.input, model.graph.output):
            for each in [each for each in tensors if each.name == name]:
                tensors.remove(each)

    return change


def renamed(name, new):
    def change(model):
        next(each for each in (*model.graph.input, *model.graph.output) if each.name == name).name = new

    return change


def with_operator(name):
    return lambda model: model.graph.node.append(onnx.helper.make_node(name, ["obs_0"], ["more"]))


def with_opset(version, domain=""):
    return lambda model: model.opset_import[0].CopyFrom(onnx.helper.make_opsetid(domain, version))


WRONG = {
    "this policy needs the operator Mod, which Unity does not read": with_operator("Mod"),
    "opset ai.onnx 16; Unity reads ai.onnx 7 to 15": with_opset(16),
    "opset com.microsoft 1; Unity reads ai.onnx 7 to 15": with_opset(1, "com.microsoft"),
    "there is no constant version_number": without("version_number"),
    "version 2 of the format, not 3": constant("version_number", np.float32([2])),
    "there is no constant memory_size": without("memory_size"),
    "constant memory_size is int64, not float32": constant("memory_size", np.int64([8])),
    "there is no constant continuous_action_output_shape": without("continuous_action_output_shape"),
    "there is no constant discrete_action_output_shape": without("discrete_action_output_shape"),
    "there is no input obs_1": renamed("obs_1", "obs_3"),
    "input camera is unknown": renamed("obs_2", "camera"),
    "obs_1 is int64 with 6 columns, not float32 with 6": port("obs_1", dtype=INT),
    "there is no action_masks": without("action_masks"),
    "action_masks is float32 with 4 columns, not float32 with 5": port("action_masks", size=4),
    "there is no recurrent_in": without("recurrent_in"),
    "there is no recurrent_out": without("recurrent_out"),
    "recurrent_out is float32 with 6 columns, not float32 with 8": port("recurrent_out", size=6),
    "there is no continuous_actions": without("continuous_actions"),
    "continuous_actions is float32 with 3 columns, not float32 with 2": port("continuous_actions", size=3),
    "deterministic_discrete_actions is float32 with 2 columns, not int64 with 2": port("deterministic_discrete_actions", dtype=FLOAT),
}


@pytest.fixture(scope="module")
def good():
    return file_of(rich())


@pytest.mark.parametrize("line", WRONG)
def test_the_check_finds_each_kind_of_wrong_file(line, good):
    graph, data = good
    model = onnx.load_from_string(data)
    WRONG[line](model)
    assert list(problems(model)) == [line]
    with pytest.raises(SettingError, match=f"^format unity: {line}$"):
        Unity().read(model.SerializeToString(), graph)


def test_a_file_without_actions_is_refused(good):
    model = onnx.load_from_string(good[1])
    for kind in ("continuous", "discrete"):
        for name in (f"{kind}_actions", f"deterministic_{kind}_actions", f"{kind}_action_output_shape"):
            without(name)(model)
    assert list(problems(model)) == ["there are no actions"]


def test_a_file_that_samples_illegal_choices_is_refused():
    policy = policy_of(VECTOR, Discrete(3), masked=True)
    graph, data = file_of(policy)
    model = onnx.load_from_string(data)
    drawn = next(node for node in model.graph.node if "discrete_actions" in node.output)
    drawn.input[0] = next(node for node in model.graph.node if node.op_type == "ArgMax").output[0]
    masked = next(node for node in model.graph.node if node.op_type == "ArgMax")
    masked.input[0] = next(node for node in model.graph.node if node.op_type == "Gemm" and "actor.2" in node.input[1]).output[0]
    with pytest.raises(SettingError, match=r"^format unity: \d+ of \d+ sampled choices are illegal$"):
        check(Unity().read(model.SerializeToString(), graph), policy)


@pytest.mark.parametrize(
    "observation, action, line",
    [
        (Dict({"a": VECTOR, "b": Discrete(3)}), Discrete(2), "observation b is Discrete(3); Unity's sensors give floats"),
        (MultiDiscrete([2, 3]), Discrete(2), "observation obs is MultiDiscrete(2, 3); Unity's sensors give floats"),
        (STACK, Discrete(2), "observation obs has shape (4, 20, 20, 3); Unity's sensors give at most 3 dimensions"),
        (VECTOR, Box(shape=(2,), **ANY), "the actions have no bounds; Unity's are from -1 to 1"),
        (VECTOR, Box(-1, np.float32([1, np.inf])), "the actions have no bounds; Unity's are from -1 to 1"),
    ],
)  # fmt: skip
def test_what_no_scene_has_is_refused(observation, action, line):
    policy = policy_of(observation, action)
    with pytest.raises(SettingError) as error:
        UnityGraph(policy.network, policy.spaces)
    assert str(error.value) == f"format unity: {line}"


class Recurrent(nn.Module):
    """A user's encoder with an operator that Unity does not have."""

    def __init__(self, space, features):
        super().__init__()
        self.gru = nn.GRU(space.shape[0], features, batch_first=True)

    def forward(self, obs):
        return self.gru(obs.unsqueeze(1))[0][:, 0]


class Unwritable(nn.Module):
    """A user's encoder that the exporter cannot write."""

    def __init__(self, space, features):
        super().__init__()
        self.linear = nn.Linear(space.shape[0], features)

    def forward(self, obs):
        return self.linear(obs).cumsum(1)


@pytest.mark.parametrize(("encoder", "operator"), [(Recurrent, "GRU"), (Unwritable, "cumsum")])
def test_an_operator_that_unity_does_not_read_is_named_in_one_line(encoder, operator, tmp_path, capfd):
    model = tiny(PPO, "tests.environments:Scripted-v0", max_env_steps=32, encoder=encoder, encoder_features=4)
    with pytest.raises(SettingError, match=f"^format unity: this policy needs the operator {operator}, which Unity does not read$"):
        export_policy(model, tmp_path / "a.onnx", "unity")
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


@pytest.mark.thorough
def test_the_command_writes_a_file_next_to_the_checkpoint(tmp_path, capfd):
    checkpoint = save(tiny(PPO, "tests.environments:Scripted-v0", max_env_steps=32), tmp_path / "best.ckpt")
    status, stdout, stderr = run(f"export --ckpt_path {checkpoint} --format unity --import tests.environments", capfd)
    assert (status, stderr) == (0, "")
    assert stdout.splitlines()[-3:] == [
        f"{tmp_path / 'best.unity.onnx'}, described in best.unity.onnx.json",
        "compared with the policy at 1,000 observations: choices are the same",
        "for agents that observe obs_0 2",
    ]
    assert [each["name"] for each in described(tmp_path / "best.unity.onnx")["outputs"]] == [
        "discrete_actions",
        "deterministic_discrete_actions",
    ]
    policy, obs = load_policy(checkpoint), np.float32([[3, 1], [0, 5]])
    found = outputs_of((tmp_path / "best.unity.onnx").read_bytes(), obs_0=obs, action_masks=np.ones((2, 3)))
    assert (found["deterministic_discrete_actions"][:, 0] + policy.spaces.action.start == policy.act(obs)[0]).all()
