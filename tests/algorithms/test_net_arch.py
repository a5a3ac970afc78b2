"""Widths of policy and critic: one list for both, or one for each."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import lightning_rl as lrl
from lightning_rl import (
    A2C,
    AWAC,
    CQL,
    DQN,
    IMPALA,
    IQL,
    POCA,
    PPO,
    PQN,
    SAC,
    TD3,
    TD3BC,
    TQC,
    TRPO,
    BehavioralCloning,
    CrossQ,
    EvolutionStrategies,
    SettingError,
)
from lightning_rl.networks.acting import NumpyActor, make_actor
from lightning_rl.networks.mlp import EnsembleLinear
from tests.command_line import TINY, run
from tests.fitting import fit, tiny

ON_POLICY = [PPO, A2C, IMPALA, TRPO, POCA, BehavioralCloning, EvolutionStrategies]
OFF_POLICY = [SAC, TD3, TQC, CrossQ, CQL, IQL, AWAC, TD3BC]
BOX = "tests.environments:ScriptedBox-v0"
ARCH = {"pi": [6, 5], "vf": [7]}


def widths(module):
    """Return the outputs of a module's linear layers."""
    return [each.bias.shape[-1] for each in module.modules() if type(each) in (nn.Linear, EnsembleLinear)]


@pytest.mark.parametrize("algorithm", ON_POLICY)
def test_policy_and_value_have_their_own_widths(algorithm):
    network = tiny(algorithm, net_arch=ARCH).network
    assert widths(network.actor)[:-1] == [6, 5]
    assert widths(getattr(network.critic, "head", network.critic))[:-1] == [7]


@pytest.mark.parametrize("algorithm", OFF_POLICY)
def test_policy_and_critics_have_their_own_widths(algorithm):
    model = tiny(algorithm, BOX, net_arch={"pi": [6, 5], "qf": [7]})
    assert widths(model.network.layers)[:-1] == [6, 5] and widths(model.critic.layers)[:-1] == [7]
    assert all(widths(value.layers)[:-1] == [7] for value in [getattr(model, "value", None)] if value is not None)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ON_POLICY + OFF_POLICY)
def test_networks_of_unequal_widths_learn(algorithm):
    model = tiny(
        algorithm, BOX if algorithm in OFF_POLICY else None, net_arch={"pi": [6], "qf" if algorithm in OFF_POLICY else "vf": [7, 3]}
    )
    before = {name: each.clone() for name, each in model.network.named_parameters()}
    fit(model)
    assert any(not each.equal(before[name]) for name, each in model.network.named_parameters())


@pytest.mark.parametrize(
    ("algorithm", "settings", "line"),
    [
        (
            PPO,
            {"net_arch": {"pi": [8], "qf": [8]}},
            "net_arch must be a list of widths, or {pi: [64, 64], vf: [64, 64]}; got {'pi': [8], 'qf': [8]}",
        ),
        (PPO, {"net_arch": {"pi": [8]}}, "net_arch must be a list of widths, or {pi: [64, 64], vf: [64, 64]}; got {'pi': [8]}"),
        (PPO, {"net_arch": {"pi": [8], "vf": [0]}}, "net_arch must be >= 1, got 0"),
        (PPO, {"net_arch": {"pi": [8], "vf": 8}}, "net_arch must be a list of widths such as [64, 64], got 8"),
        (
            SAC,
            {"net_arch": {"pi": [8], "vf": [8]}},
            "net_arch must be a list of widths, or {pi: [64, 64], qf: [64, 64]}; got {'pi': [8], 'vf': [8]}",
        ),
        (
            SAC,
            {"net_arch": {"pi": [8], "qf": [8]}, "critic_net_arch": [8]},
            "critic_net_arch and qf in net_arch are the same widths: set one of them",
        ),
        (DQN, {"net_arch": {"pi": [8], "qf": [8]}}, "net_arch must be a list of integers such as [64, 64], got {'pi': [8], 'qf': [8]}"),
        (PQN, {"net_arch": {"pi": [8], "qf": [8]}}, "net_arch must be a list of integers such as [64, 64], got {'pi': [8], 'qf': [8]}"),
    ],
)
def test_other_keys_are_refused_in_one_line(algorithm, settings, line):
    with pytest.raises(SettingError) as error:
        tiny(algorithm, BOX if algorithm is SAC else None, **settings)
    assert str(error.value) == line


def test_the_numpy_actor_computes_what_torch_does():
    network = tiny(PPO, "CartPole-v1", net_arch=ARCH).network
    obs = np.random.default_rng(0).normal(size=(1, 16, 4)).astype(np.float32)
    actor = make_actor(network, obs, torch.Generator().manual_seed(1))
    assert isinstance(actor, NumpyActor)
    actor.act(0, (), np.zeros(16, bool))
    x, _ = network.policy(torch.from_numpy(obs), (), None)
    noise = network.distribution.noise(torch.empty_like(x), torch.Generator().manual_seed(1))
    torch.testing.assert_close(actor.actions(), network.distribution.draw(x, noise).detach())


@pytest.mark.parametrize(("algorithm", "arch"), [(PPO, ARCH), (SAC, {"pi": [6], "qf": [7, 3]})])
def test_a_checkpoint_keeps_the_widths(algorithm, arch, folder):
    model = tiny(algorithm, BOX, net_arch=arch)
    fit(model, max_steps=1).save_checkpoint(folder / "a.ckpt")
    loaded = algorithm.load_from_checkpoint("a.ckpt")
    assert loaded.hparams["net_arch"] == arch
    obs = np.ones((3, 2), np.float32)
    assert np.array_equal(lrl.load_policy("a.ckpt").act(obs)[0], lrl.load_policy(model).act(obs)[0])
    assert lrl.evaluate("a.ckpt", episodes=1)["episodes"] == 1


@pytest.mark.thorough
def test_the_command_line_and_a_config_take_both_widths(folder, capfd):
    short = TINY.replace("--model.net_arch [8] ", "") + "--model.env.id CartPole-v1 --evaluation null"
    (folder / "mine.yaml").write_text("model: {class_path: PPO, init_args: {net_arch: {pi: [6, 5], vf: [7]}}}\n")
    for k, options in enumerate(
        ["--model.net_arch '{pi: [6, 5], vf: [7]}'", "--model.net_arch.pi [6,5] --model.net_arch.vf [7]", "--config mine.yaml"]
    ):
        status, _, err = run(f"fit {short} {options} --trainer.run_name r{k}", capfd)
        assert (status, err) == (0, "")
        config = yaml.safe_load((folder / f"runs/PPO/CartPole-v1/r{k}/config.yaml").read_text())
        assert config["model"]["init_args"]["net_arch"] == ARCH
    assert run("export --ckpt_path runs/PPO/CartPole-v1/r0/checkpoints/last.ckpt --out a.onnx", capfd)[0] == 0
