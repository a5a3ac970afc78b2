"""The two files of an agent: what they hold, and what of them is refused."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

import lightning_rl as lrl
from lightning_rl import DQN, SettingError
from lightning_rl.sharing.agent import decode, encode, write_agent
from lightning_rl.training.loading import read_checkpoint
from tests.exporting.exported import save
from tests.fitting import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of a network with parts of several kinds."""
    model = tiny(DQN, "tests.environments:Scripted-v0", max_env_steps=32, noisy=True, dueling=True, distribution="c51")
    return save(model, tmp_path_factory.mktemp("saved") / "a.ckpt")


@pytest.fixture
def agent(checkpoint, tmp_path):
    """The two files of an agent, which are read from a folder as from the hub."""
    write_agent(tmp_path, read_checkpoint(checkpoint))
    return tmp_path


def test_damaged_files_are_refused(agent):
    weights, description = agent / "agent.safetensors", agent / "agent.json"
    whole, text = weights.read_bytes(), description.read_text()
    lrl.load_policy(agent)
    weights.write_bytes(whole[:-1])
    with pytest.raises(SettingError, match=r"is damaged .its bytes are not those of agent.json.: delete it"):
        lrl.load_policy(agent)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(SettingError, match="is damaged"):
        lrl.load_policy(agent)
    weights.unlink()
    with pytest.raises(SettingError, match=r"is not a file, although agent.json is there"):
        lrl.load_policy(agent)
    weights.write_bytes(whole)
    for content, words in {
        text[:50]: "cannot be read as the description of an agent",
        "{}": "is not the description of an agent of lightning_rl",
        text.replace('"format_version": 1', '"format_version": 2', 1): "has format 2, not 1: install a newer lightning_rl",
        text.replace('"lightning_rl": {', '"something": {', 1): "is damaged .KeyError",
        text.replace('"DQN"', '"PPO"', 1): "buffer_size is not a setting of PPO",
        text.replace('"DQN"', '"nobodys.Agent"', 1): "there is no algorithm 'nobodys.Agent'",
        text.replace("tests.environments:", "nobodys_module:"): "names the module 'nobodys_module'; if you trust it, add --import",
        text.replace("tests.environments:", "subprocess:"): "do not trust it",
    }.items():
        assert content != text
        description.write_text(content)
        with pytest.raises(SettingError, match=words):
            lrl.load_policy(agent)


def test_an_agent_whose_description_has_many_more_layers_than_weights_is_refused_before_they_are_built(agent):
    description = agent / "agent.json"
    content = json.loads(description.read_text())
    content["hyper_parameters"]["net_arch"] = [1] * 100_000
    description.write_text(json.dumps(content))
    built = []
    with (
        register_module_parameter_registration_hook(lambda *weight: built.append(weight)),
        pytest.raises(SettingError, match=r"does not fit its own settings, which have many more weights$"),
    ):
        lrl.load_policy(agent)
    assert len(built) < 1000


def test_files_hold_no_pickle_and_no_path_of_the_machine(agent, checkpoint):
    content = json.loads((agent / "agent.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content["weights"]["size"] == (agent / "agent.safetensors").stat().st_size
    assert sorted(path.name for path in agent.iterdir()) == ["agent.json", "agent.safetensors"]
    assert str(checkpoint.parent) not in json.dumps(content)


@pytest.mark.parametrize(
    "value",
    [1, 1.5, float("inf"), -float("inf"), True, None, "a", (1, (2, [3.0])), {"a": {"b": ()}}, {1: "a", "$tuple": 2}, {"$float": "x"}],
)
def test_plain_data_comes_back_as_it_was(value):
    text = json.dumps(encode(value, "x"), allow_nan=False)
    again = decode(json.loads(text))
    assert again == value and type(again) is type(value)


def test_what_is_not_plain_cannot_be_shared(checkpoint, tmp_path):
    stored = read_checkpoint(checkpoint)
    stored["hyper_parameters"]["extra"] = [torch.zeros(2)]
    with pytest.raises(SettingError, match=r"cannot be shared: hyper_parameters.extra.0 is a Tensor, which is not plain data"):
        write_agent(tmp_path, stored)
