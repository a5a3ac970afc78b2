"""A set of entities, pictures, vectors and a goal in one observation, for every algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightning_rl import LSTM, TD3, Algorithm, load_policy
from lightning_rl.networks.encoders import EntityAttention
from lightning_rl.networks.mlp import HyperLinear
from lightning_rl.types import tree_map
from tests.environments import Crowd
from tests.fitting import ALL, OFF_POLICY, fit, tiny, twins_slow

SETTINGS = {"entities": ["agents"], "goals": ["goal"], "encoder_features": 8, "normalize_obs": "running"}


def crowded(algorithm, **settings):
    env_id = "CrowdBox-v0" if algorithm is TD3 else "Crowd-v0"
    return tiny(algorithm, f"tests.environments:{env_id}", **({"max_env_steps": 48} | SETTINGS | settings))


def paths(model, kind):
    """Where the modules of a kind are, but for target networks."""
    return [path for path, module in model.named_modules() if type(module) is kind and not path.startswith("target")]


def observation():
    """With two agents and two places for more."""
    env = Crowd()
    env.reset(seed=0)
    env.step(0)
    return env.step(0)[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm, memory",
    [
        pytest.param(
            algorithm,
            memory,
            id=f"{algorithm.__name__}-{words}",
            marks=[] if memory is None or algorithm.__name__ in ("PPO", "SAC") else pytest.mark.slow,
        )
        for algorithm in ALL
        for memory, words in ((None, ""), (LSTM(4, 4), "with a memory"))
    ],
)
def test_entities_and_goals_are_learned_from_and_load_back(algorithm, memory, tmp_path):
    model = crowded(algorithm, memory=memory)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer = fit(model)
    moved = [name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])]
    attentions, generated = paths(model, EntityAttention), paths(model, HyperLinear)
    assert attentions and generated
    for path in (*attentions, *generated):
        assert all(name in moved for name in before if name.startswith(path) and name.endswith("weight")), path

    trainer.save_checkpoint(tmp_path / "model.ckpt")
    stored = Algorithm.load_from_checkpoint(tmp_path / "model.ckpt").hparams
    assert (stored["entities"], stored["goals"]) == (["agents"], ["goal"])
    obs, network = observation(), model.network.eval()
    x, _ = network.policy(tree_map(lambda leaf: torch.as_tensor(leaf)[None], obs), (), None)
    expected = network.distribution.to_env(network.distribution.mode(x).detach().numpy())[0]
    np.testing.assert_array_equal(load_policy(tmp_path / "model.ckpt").act(obs)[0], expected)


@pytest.mark.parametrize("algorithm", twins_slow(ALL))
def test_only_vectors_are_normalized(algorithm):
    statistics = crowded(algorithm).network.normalizer.statistics
    # agents, body, goal, camera, map
    assert [len(list(part.buffers())) for part in statistics] == [0, 3, 0, 0, 0]


@pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
def test_every_network_sees_entities_and_the_goal(algorithm):
    model = crowded(algorithm)
    for name, network in model.named_children():
        if any("encoder" in path for path, _ in network.named_modules()):
            found = {type(module) for module in network.modules()}
            assert {EntityAttention, HyperLinear} <= found, name


@pytest.mark.parametrize("algorithm", twins_slow(ALL))
def test_a_policy_does_not_mind_the_order_of_entities(algorithm):
    network = crowded(algorithm).network.eval()
    obs = tree_map(lambda leaf: torch.as_tensor(leaf)[None], observation())
    x, _ = network.policy(obs, (), None)
    shuffled, _ = network.policy({**obs, "agents": obs["agents"][:, [3, 1, 2, 0]]}, (), None)
    other, _ = network.policy({**obs, "agents": obs["agents"] + 1}, (), None)
    torch.testing.assert_close(shuffled, x, rtol=0, atol=1e-6)
    assert (other - x).abs().max() > 1e-6
