"""Exported policies: what a file alone does is what the policy does, and a file that does not is never written."""

from __future__ import annotations

import hashlib
import io
import logging
import shutil
import sys
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import lightning_rl
from lightning_rl import DQN, GRU, LSTM, PPO, SAC, TD3, CrossQ, SettingError, export_policy, load_policy
from lightning_rl.exporting.export import FORMATS, check
from lightning_rl.exporting.formats import PolicyGraph, quiet, unique
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.policy import Policy
from lightning_rl.processes.startup import packaged_agents
from lightning_rl.spaces import Spaces
from tests.command_line import run
from tests.environments import Anything, Choosy, Scripted, ScriptedBox
from tests.exporting.exported import described, play_both, save
from tests.fitting import tiny

HOME = "tests.environments:"
RICH = {"env": {"kwargs": {"way": "key", "action": "nested"}}, "memory": LSTM(8, 4), "normalize_obs": "running", "share_encoder": False}
CASES = {
    "masks, memory and a nested action": (PPO, "Choosy-v0", RICH),
    "squashed, with memory": (SAC, "ScriptedBox-v0", {"memory": GRU(8, 4), "normalize_obs": "running"}),
    "batch renormalization": (CrossQ, "ScriptedBox-v0", {"critic_net_arch": [8]}),
    "noisy, dueling, histograms": (DQN, "Scripted-v0", {"noisy": True, "dueling": True, "distribution": "c51"}),
    "images": (TD3, "ImageBox-v0", {"encoder_features": 8}),
    "entities and goals": (PPO, "Crowd-v0", {"entities": ["agents"], "goals": ["goal"], "encoder_features": 8}),
}


@pytest.fixture
def saved(tmp_path):
    """The checkpoint of a tiny model."""

    def saved(algorithm=PPO, env_id="Scripted-v0", settings=None, name="a.ckpt"):
        model = tiny(algorithm, HOME + env_id, **({"max_env_steps": 32} | (settings or {})))
        return save(model, tmp_path / name)

    return saved


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Export a case once for all tests."""

    @cache
    def checkpoint_of(case):
        algorithm, env_id, settings = CASES[case]
        folder = tmp_path_factory.mktemp("exported")
        return save(tiny(algorithm, HOME + env_id, max_env_steps=32, **settings), folder / "a.ckpt")

    @cache
    def exported(case, format):
        checkpoint = checkpoint_of(case)
        return checkpoint, export_policy(checkpoint, checkpoint.with_name(f"policy{FORMATS[format].suffix}"))

    return exported


FAST = {("masks, memory and a nested action", "onnx"), ("squashed, with memory", "torch")}
ROWS = [*((case, "onnx") for case in CASES), *((case, "torch") for case in list(CASES)[:2])]


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "format"), [pytest.param(*row, marks=[] if row in FAST else pytest.mark.slow) for row in ROWS])
def test_an_exported_file_does_the_same_as_the_policy(case, format, exported):
    difference, others = play_both(*exported(case, format))
    assert difference <= 1e-5 and others == 0


@pytest.mark.thorough
def test_a_description_is_next_to_the_file_and_names_no_path_of_the_machine(exported):
    for format in ("onnx", "torch"):
        checkpoint, path = exported("masks, memory and a nested action", format)
        said = described(path)
        assert (said["algorithm"], said["environment"], said["env_steps"]) == ("PPO", "tests.environments:Choosy-v0", 32)
        assert said["environment_kwargs"] == {"way": "key", "action": "nested"}
        assert said["action_space"]["spaces"][1]["spaces"]["pair"] == {
            "type": "MultiDiscrete",
            "nvec": [2, 4],
            "start": [0, 0],
            "dtype": "int64",
        }
        where = said["observation_space"]["spaces"]["where"]
        assert (where["low"], where["high"]) == ("-inf", "inf")
        assert [(each["name"], each["shape"], each["dtype"]) for each in said["inputs"]] == [
            ("where", ["batch", 2], "float32"),
            ("action_mask", ["batch", 12], "bool"),
            *((f"memory.{i}", ["batch", 4], "float32") for i in range(4)),
        ]
        assert [(each["name"], each["shape"], each["dtype"]) for each in said["outputs"]][:4] == [
            ("action.0", ["batch", 1], "float32"),
            ("action.1.pair", ["batch", 2], "int64"),
            ("action.1.bits", ["batch", 2], "int8"),
            ("action.2", ["batch"], "int64"),
        ]
        assert said["checkpoint"] == {"file": "a.ckpt", "sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest()}
        assert said["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert said["check"]["observations"] == 1000 and said["check"]["max_share_of_allowed"] <= 1
        whole = path.read_bytes() + Path(f"{path}.json").read_bytes()
        if path.suffix == ".pt2":
            archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
            whole += b"".join(archive.read(name) for name in archive.namelist())
        places = (str(path.parent), str(Path(lightning_rl.__file__).parents[1]), str(Path(torch.__file__).parents[1]), str(Path.home()))
        assert not [place for place in places if place.encode() in whole]
    assert sorted(each.name for each in path.parent.glob("policy*")) == ["policy.onnx", "policy.onnx.json", "policy.pt2", "policy.pt2.json"]


def test_safetensors_hold_the_weights_by_their_names_in_the_network(saved, tmp_path):
    from safetensors import safe_open

    checkpoint = saved(settings={"normalize_obs": "running", "share_encoder": True})
    path, network = export_policy(checkpoint, tmp_path / "policy.safetensors"), load_policy(checkpoint).network
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(network.state_dict())
        assert all(torch.equal(file.get_tensor(name), weight) for name, weight in network.state_dict().items())
        assert '"algorithm": "PPO"' in file.metadata()["lightning_rl"]
    assert described(path)["check"]["max_abs_difference"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("format", FORMATS)
def test_an_exported_file_that_differs_is_refused_and_removed(format, saved, tmp_path, monkeypatch, capfd):
    checkpoint, out = saved(), tmp_path / "out" / "policy"
    out.parent.mkdir()
    out.write_text("what lay there before")
    write = type(FORMATS[format]).write

    def then_learn(self, graph, metadata):
        data = write(self, graph, metadata)
        with torch.no_grad():
            graph.network.actor[-1].weight.neg_()
        return data

    monkeypatch.setattr(type(FORMATS[format]), "write", then_learn)
    status, _, stderr = run(f"export --ckpt_path {checkpoint} --format {format} --out {out} --import tests.environments", capfd)
    assert status == 2 and stderr.count("\n") == 1
    assert "the exported policy makes other choices in" in stderr and "nothing was written" in stderr
    assert [each.name for each in out.parent.iterdir()] == ["policy"] and out.read_text() == "what lay there before"


def graph_of(action="box", observation="vector", **settings):
    """A policy of fresh weights, and its graph."""
    torch.manual_seed(0)
    spaces = Spaces(Anything.observation_spaces[observation], Anything.action_spaces[action])
    network = ActorCritic(spaces, net_arch=[8], **settings)
    with torch.no_grad():
        network.actor[-1].weight.mul_(100)
    graph = PolicyGraph(network, spaces)
    return Policy(network, spaces), lambda arrays: [each.numpy() for each in graph(*map(torch.from_numpy, arrays))]


def changed(exact, change):
    @torch.no_grad()
    def run(arrays):
        action, *rest = exact(arrays)
        return [change(action), *rest]

    return run


def test_numbers_may_differ_by_a_hundred_thousandth_of_the_width_of_their_dimension_and_no_more():
    policy, exact = graph_of()  # widths 3 and 10
    found = check(changed(exact, lambda action: action - np.float32([2e-5, 8e-5])), policy)
    assert found.observations == 1000 and found.ties == 0
    assert found.max_abs_difference == pytest.approx(8e-5, rel=0.02) and found.max_share_of_allowed == pytest.approx(0.8, rel=0.02)
    for wrong in ([4e-5, 0], [0, 1.2e-4], [np.nan, 0]):
        with pytest.raises(SettingError, match=r"differs by .* in an action, where .* is allowed"):
            check(changed(exact, lambda action, wrong=wrong: action - np.float32(wrong)), policy)


def test_numbers_may_differ_by_what_float32_rounds_of_larger_ones_that_are_clipped():
    policy, exact = graph_of()
    with torch.no_grad():
        policy.network.actor[-1].bias.fill_(-200.0)  # beyond the bounds of both dimensions
    off = [check(changed(exact, lambda action, by=by: action + np.float32([by, 0])), policy).max_share_of_allowed for by in (1e-3, 1.9e-3)]
    assert off == pytest.approx([0.5, 0.95], rel=0.02)
    with pytest.raises(SettingError, match=r"differs by 0\.0021 in an action"):
        check(changed(exact, lambda action: action + np.float32([2.1e-3, 0])), policy)


@pytest.mark.thorough
def test_one_other_choice_in_a_thousand_is_refused_unless_the_policy_has_no_preference():
    policy, exact = graph_of("discrete")
    assert check(changed(exact, lambda action: action), policy) == (1000, 0.0, 0.0, 0.0, 0)
    calls = iter(range(100))

    def once(action):
        return action % 3 + 1 if next(calls) == 15 else action  # choices are 1, 2, 3; the sixth of the steps alone

    with pytest.raises(SettingError, match="makes other choices in 1 of 1 cases"):
        check(changed(exact, once), policy)
    last = policy.network.actor[-1]
    with torch.no_grad():
        last.weight[1], last.bias[1] = last.weight[0], last.bias[0]  # the first two are always alike
    other = changed(exact, lambda action: np.where(action == 1, 2, action))
    found = check(other, policy)
    assert found.ties == sum((exact([each])[0] == 1).sum() for each in drawn(policy)) > 100
    with torch.no_grad():
        last.bias[1] -= 1e-3
    with pytest.raises(SettingError, match="makes other choices"):
        check(other, policy)


def drawn(policy):
    """The observations of a check."""
    seen = []

    def run(arrays):
        seen.append(arrays[0])
        action, _ = policy.act(arrays[0])
        return [action]

    check(run, policy)
    return seen


@pytest.mark.parametrize(
    "wrong, words",
    [(lambda a: a.astype(np.float64), "gives float64"), (lambda a: a[:, :1], r"gives float32\[99, 1\] for float32\[99, 2\]")],
    ids=["dtype", "shape"],
)
def test_another_dtype_or_shape_is_refused(wrong, words):
    policy, exact = graph_of()
    with pytest.raises(SettingError, match=words):
        check(changed(exact, wrong), policy)


def test_a_memory_that_is_not_updated_is_refused():
    policy, exact = graph_of("discrete", memory=GRU(4, 4), share_encoder=True)
    check(exact, policy)
    with pytest.raises(SettingError, match=r"differs by .* in a memory"):
        check(lambda arrays: [exact(arrays)[0], arrays[1]], policy)


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal", "squashed_normal", "noisy"])
@pytest.mark.parametrize("space", [*Anything.action_spaces.values(), *Choosy.action_spaces.values()], ids=str)
def test_tensors_become_the_environments_actions_as_arrays_do(space, action_dist):
    from lightning_rl.distributions import make_distribution
    from lightning_rl.types import tree_map, tree_to_numpy

    distribution = make_distribution(space, action_dist)
    with torch.no_grad():
        action = distribution.sample(torch.randn(64, distribution.num_inputs) * 2)
    arrays, tensors = distribution.to_env(tree_to_numpy(action)), distribution.to_env(action)

    def same(array, tensor):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=2e-6)

    tree_map(same, arrays, tensors)


@pytest.mark.thorough
def test_the_suffix_implies_the_format_and_wrong_ones_are_refused(saved, tmp_path):
    checkpoint = saved()
    assert described(export_policy(checkpoint, tmp_path / "b.safetensors"))["format"] == "safetensors"
    assert described(export_policy(checkpoint, tmp_path / "policy.bin", "safetensors"))["format"] == "safetensors"
    wrong = {
        r"does not imply a format; give one, or a suffix \.onnx, \.pt2, \.safetensors": {"out": tmp_path / "policy"},
        "format must be one of onnx, torch, safetensors, unity, got 'onxx'; did you mean onnx": {"format": "onxx"},
        "is a checkpoint; name another file": {"out": checkpoint, "format": "torch"},
        "is a folder; name another file": {"out": tmp_path, "format": "torch"},
        "out 'p.pt2' is a name for the format torch, not onnx; leave the format out, or name a file that ends in .onnx": {
            "out": tmp_path / "p.pt2",
            "format": "onnx",
        },
        "out 'p.onnx' is a name for the format onnx, not torch": {"out": tmp_path / "p.onnx", "format": "torch"},
        "there is no folder .*nowhere; make it first": {"out": tmp_path / "nowhere" / "policy.safetensors"},
    }
    before = checkpoint.read_bytes()
    for words, arguments in wrong.items():
        with pytest.raises(SettingError, match=words):
            export_policy(checkpoint, **arguments)
    with pytest.raises(SettingError, match="is not a file"):
        export_policy(tmp_path / "none.ckpt")
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize("package, format", [("onnx", "onnx"), ("onnxscript", "onnx"), ("onnxruntime", "onnx")])
def test_a_missing_package_is_named_with_what_installs_it(package, format, saved, monkeypatch, capfd):
    checkpoint = saved()
    monkeypatch.setitem(sys.modules, package, None)
    status, _, stderr = run(f"export --ckpt_path {checkpoint} --format {format}", capfd)
    assert (status, stderr) == (
        2,
        f'error: export to {format} needs the package {package}, which is not installed; run: pip install "lightning_rl[export]"\n',
    )


@pytest.mark.thorough
def test_a_policy_that_cannot_be_traced_is_refused_in_one_line(saved, monkeypatch, capfd):
    checkpoint = saved()

    def policy(self, obs, memory, episode_start, generator=None):
        return (obs @ self.actor[0].weight.T, memory) if obs.sum() > 0 else (self.actor(obs), memory)

    monkeypatch.setattr(ActorCritic, "policy", policy)
    status, _, stderr = run(f"export --ckpt_path {checkpoint} --format torch --import tests.environments", capfd)
    assert status == 2 and stderr.startswith("error: this policy cannot be written as torch (") and stderr.count("\n") == 1
    assert [each.name for each in checkpoint.parent.iterdir()] == ["a.ckpt"]


def test_a_file_that_cannot_be_run_is_refused_in_one_line(saved, monkeypatch, capfd):
    checkpoint = saved()
    monkeypatch.setattr(type(FORMATS["onnx"]), "write", lambda self, graph, metadata: b"no model")
    status, _, stderr = run(f"export --ckpt_path {checkpoint} --import tests.environments", capfd)
    assert (
        status == 2 and stderr.startswith("error: the exported policy cannot be run by onnx (InvalidProtobuf: ") and stderr.count("\n") == 1
    )
    assert [each.name for each in checkpoint.parent.iterdir()] == ["a.ckpt"]


def test_exporters_are_silent_and_logging_is_as_before(caplog, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.DEBUG)
    with quiet():
        logging.getLogger("torch.onnx").critical("a message of an exporter")
    logging.getLogger("torch.onnx").critical("a message of another")
    assert [record.message for record in caplog.records] == ["a message of another"]
    assert not logging.getLogger("torch.onnx").isEnabledFor(logging.DEBUG)


def test_ports_of_the_same_name_get_numbers():
    assert unique(["action", "a.b", "a.b", "action", "a.b"]) == ["action", "a.b", "a.b_2", "action_2", "a.b_3"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm, env_id, found",
    [
        (SAC, "ScriptedBox-v0", "numbers differ by at most 0"),
        (PPO, "Scripted-v0", "choices are the same"),
        (PPO, "Choosy-v0", "numbers differ by at most 0, choices are the same"),
    ],
)
def test_the_command_reports_numbers_and_choices_if_there_are_any(algorithm, env_id, found, saved, capfd):
    checkpoint = saved(algorithm, env_id, RICH if env_id == "Choosy-v0" else None)
    status, stdout, stderr = run(f"export --ckpt_path {checkpoint} --format safetensors --import tests.environments", capfd)
    assert (status, stderr) == (0, "")
    assert stdout.splitlines()[-2:] == [
        f"{checkpoint.with_suffix('.safetensors')}, described in a.safetensors.json",
        f"compared with the policy at 1,000 observations: {found}",
    ]


def test_a_graph_has_no_port_for_a_mask_that_is_not_needed():
    spaces = Spaces(Scripted.observation_space, ScriptedBox.action_space)
    graph = PolicyGraph(ActorCritic(spaces, net_arch=[8]), spaces)
    assert [port.name for port in graph.inputs] == ["obs"] and [port.name for port in graph.outputs] == ["action"]


def test_an_agent_is_not_overwritten_by_its_own_export(tmp_path):
    shutil.copytree(packaged_agents()["ppo/cartpole"], tmp_path / "agent")
    weights = (tmp_path / "agent" / "agent.safetensors").read_bytes()
    with pytest.raises(SettingError, match=r"^out 'agent\.safetensors' is the source itself; name another file$"):
        export_policy(tmp_path / "agent", format="safetensors")
    assert (tmp_path / "agent" / "agent.safetensors").read_bytes() == weights


def test_the_export_of_a_model_needs_a_file_to_write():
    with pytest.raises(SettingError, match=r"^PPO is not a run on this machine: name a file to write, out$"):
        export_policy(tiny(PPO))
