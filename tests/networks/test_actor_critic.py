"""The actor-critic network: acting and judging agree, and parts are shared or separate as asked."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete

from lightning_rl.distributions.state_dependent import SDE
from lightning_rl.errors import SettingError
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.memory import GRU, LSTM
from lightning_rl.spaces import Spaces
from lightning_rl.types import tree_leaves, tree_map

VECTOR = Box(-10, 10, (4,))
IMAGE = Dict(camera=Box(0, 255, (16, 16, 3), np.uint8), body=Box(-1, 1, (4,)))
ACTIONS = {
    "discrete": Discrete(3),
    "multi_discrete": MultiDiscrete([2, 3]),
    "box": Box(-2, 1, (2,)),
    "dict": Dict(a=Discrete(3), b=Box(-1, 1, (2,))),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def vectors(rows=6):
    return 3 * torch.randn(rows, 4, generator=seeded())


def images(rows=6):
    camera = torch.randint(0, 256, (rows, 16, 16, 3), generator=seeded(), dtype=torch.uint8)
    return {"camera": camera, "body": torch.rand(rows, 4, generator=seeded())}


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal"])
@pytest.mark.parametrize("name", ACTIONS)
def test_act_and_evaluate_agree_on_probability_and_value(name, action_dist):
    network = ActorCritic(Spaces(VECTOR, ACTIONS[name]), action_dist=action_dist, streams=2)
    step = network.act(vectors(), generator=seeded())
    log_prob, entropy, value = network.evaluate(vectors(), step.action)
    assert step.log_prob.shape == (6,)
    assert step.value.shape == (6, 2)
    assert step.memory == ()
    assert entropy.shape == log_prob.shape == (6, network.distribution.num_parts)
    torch.testing.assert_close(step.log_prob, log_prob.detach().sum(-1))
    torch.testing.assert_close(step.value, value.detach())
    torch.testing.assert_close(network.value(vectors()), value)
    assert not step.log_prob.requires_grad and log_prob.requires_grad and value.requires_grad


@pytest.mark.parametrize("name", ACTIONS)
def test_the_log_probabilities_and_values_of_a_rollout_are_those_of_its_rows(name):
    network = ActorCritic(Spaces(IMAGE, ACTIONS[name]), encoder_features=8)
    action = network.act(images(), generator=seeded()).action
    rollout = (tree_map(lambda leaf: leaf.unflatten(0, (3, 2)), tree) for tree in (images(), action))
    for rows, expected in zip(network.evaluate(*rollout), network.evaluate(images(), action), strict=True):
        torch.testing.assert_close(rows, expected.unflatten(0, (3, 2)))


def test_a_deterministic_policy_needs_no_generator_and_a_random_one_follows_it():
    network = ActorCritic(Spaces(VECTOR, Box(-1, 1, (2,))))
    mode = network.act(vectors(), deterministic=True).action
    assert torch.equal(mode, network.act(vectors(), deterministic=True).action)
    draws = [network.act(vectors(), generator=seeded(seed)).action for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], mode)


def test_masks_reach_sampling_mode_and_evaluation():
    network = ActorCritic(Spaces(VECTOR, Discrete(3)))
    obs, mask = vectors(500), torch.tensor([False, True, False]).expand(500, 3)
    for deterministic in (True, False):
        step = network.act(obs, action_mask=mask, deterministic=deterministic, generator=seeded())
        assert (step.action == 1).all()
        assert (step.log_prob == 0).all()
    assert (network.evaluate(obs, step.action, action_mask=mask)[1] == 0).all()


def test_weights_are_orthogonal_with_the_gains_of_their_layers():
    network = ActorCritic(Spaces(VECTOR, Discrete(3)), net_arch=(8, 6), streams=2)
    gains = {(network.actor, 0.01), (network.critic, 1.0)}
    for layers, head_gain in gains:
        linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
        assert [layer.out_features for layer in linear[:-1]] == [8, 6]
        for layer, gain in zip(linear, (2**0.5, 2**0.5, head_gain), strict=True):
            singular = torch.linalg.svdvals(layer.weight)
            torch.testing.assert_close(singular, torch.full_like(singular, gain), rtol=1e-4, atol=1e-5)
            assert (layer.bias == 0).all()


def test_first_weights_are_those_of_torch_without_ortho_init():
    for sde in (None, SDE()):
        network = ActorCritic(Spaces(VECTOR, Box(-1, 1, (3,))), net_arch=(8,), ortho_init=False, sde=sde)
        for layers in (network.actor, network.critic):
            for layer in [each for each in layers if isinstance(each, torch.nn.Linear)]:
                bound = layer.in_features**-0.5
                assert 0.5 * bound < layer.weight.abs().max() <= bound and (layer.bias != 0).all()


def test_hidden_layers_can_be_left_out():
    network = ActorCritic(Spaces(VECTOR, Discrete(3)), net_arch=())
    assert len(network.actor) == len(network.critic) == 1
    assert network.act(vectors()).value.shape == (6, 1)


@pytest.mark.parametrize("share_encoder", [True, False])
def test_the_value_loss_moves_the_policys_encoder_only_when_it_is_shared(share_encoder):
    network = ActorCritic(Spaces(IMAGE, Discrete(3)), encoder_features=8, share_encoder=share_encoder)
    _, _, value = network.evaluate(images(), torch.zeros(6, dtype=torch.long))
    torch.testing.assert_close(value, network.value(images()))
    value.sum().backward()
    moved = [parameter.grad is not None and bool(parameter.grad.any()) for parameter in network.actor_encoder.parameters()]
    assert any(moved) == share_encoder
    assert any(parameter.grad.any() for parameter in network.critic_encoder.parameters())
    assert all(parameter.grad is None for parameter in network.actor.parameters())


@pytest.mark.parametrize("normalize_obs", ["running", "frozen"])
@pytest.mark.parametrize("training", [True, False])
def test_acting_and_judging_change_no_byte_of_the_network(normalize_obs, training):
    network = ActorCritic(Spaces(VECTOR, Discrete(3)), normalize_obs=normalize_obs).train(training)
    network.normalizer.update(vectors())
    before = {key: value.clone() for key, value in network.state_dict().items()}
    step = network.act(vectors(), generator=seeded())
    network.evaluate(vectors(), step.action)
    network.value(vectors())
    network.sample(vectors())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert before["normalizer.statistics.0.count"].item() == pytest.approx(6, abs=1e-3)


def test_policy_value_and_evaluation_see_the_same_normalized_observation():
    plain, normalized = (ActorCritic(Spaces(VECTOR, Discrete(3)), normalize_obs=mode) for mode in ("off", "running"))
    normalized.normalizer.update(vectors())
    plain.load_state_dict({key: value for key, value in normalized.state_dict().items() if "normalizer" not in key})
    seen = normalized.normalizer(vectors())
    assert not torch.allclose(seen, vectors())
    action = torch.zeros(6, dtype=torch.long)
    torch.testing.assert_close(normalized.evaluate(vectors(), action), plain.evaluate(seen, action))
    torch.testing.assert_close(normalized.value(vectors()), plain.value(seen))


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal"])
@pytest.mark.parametrize("name", ACTIONS)
def test_a_bf16_network_hands_out_single_precision(name, action_dist):
    network = ActorCritic(Spaces(VECTOR, ACTIONS[name]), action_dist=action_dist).to(torch.bfloat16)
    obs = vectors().to(torch.bfloat16)
    step = network.act(obs, generator=seeded())
    log_prob, entropy, value = network.evaluate(obs, step.action)
    assert {tensor.dtype for tensor in (step.log_prob, step.value, log_prob, entropy, value)} == {torch.float32}


def test_the_order_of_an_observations_keys_does_not_matter():
    network = ActorCritic(Spaces(IMAGE, Discrete(3)), encoder_features=8, normalize_obs="running")
    network.normalizer.update(images())
    turned = dict(reversed(images().items()))
    torch.testing.assert_close(network.value(turned), network.value(images()))
    network.normalizer.update(turned)
    (statistics,) = [s for s in network.normalizer.statistics if hasattr(s, "mean")]
    torch.testing.assert_close(statistics.mean.float(), images()["body"].mean(0), rtol=1e-4, atol=1e-4)


def test_the_log_std_of_boxes_starts_at_its_setting():
    network = ActorCritic(Spaces(VECTOR, ACTIONS["dict"]), log_std_init=-1.5)
    (log_std,) = [parameter for name, parameter in network.named_parameters() if name.endswith("log_std")]
    assert log_std.tolist() == [-1.5, -1.5]
    assert len(tree_leaves(network.act(vectors()).action)) == 2


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"activation": "tahn"}, "did you mean tanh"),
        ({"normalize_obs": "on"}, "normalize_obs must be one of off, running, frozen"),
        ({"encoder": "simpel"}, "did you mean simple"),
        ({"encoder_features": 0}, "encoder_features must be >= 1"),
        ({"net_arch": [64, 0]}, "net_arch must be >= 1, got 0"),
        ({"net_arch": [6.5]}, "net_arch must be an integer"),
        ({"action_dist": "normal"}, "action_dist must be one of"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(setting, words):
    with pytest.raises(SettingError, match=words) as error:
        ActorCritic(Spaces(VECTOR, Box(-1, 1, (2,))), **setting)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("settings", [{}, {"share_encoder": False}, {"memory": LSTM(8)}, {"memory": GRU(8), "share_encoder": False}])
def test_judging_is_the_log_probability_of_the_actions_and_the_value_of_all_that_was_seen(settings):
    torch.manual_seed(0)
    spaces = Spaces(Box(0, 255, (20, 20, 3), np.uint8), MultiDiscrete([2, 3]), masked=True)
    network = ActorCritic(spaces, **settings)
    obs = torch.randint(0, 256, (4, 5, 20, 20, 3), dtype=torch.uint8)
    start, mask = torch.rand(4, 5) < 0.3, torch.ones(3, 5, 5, dtype=torch.bool)
    memory = tree_map(torch.randn_like, network.initial_memory(5))
    mask[..., 0] = False
    action = torch.stack([torch.ones(3, 5, dtype=torch.long), torch.randint(0, 3, (3, 5))], -1)
    log_prob, value = network.log_prob_and_value(obs, action, memory, start, mask)
    torch.testing.assert_close(log_prob, network.log_prob(obs[:-1], action, memory, start[:-1], mask))
    torch.testing.assert_close(value, network.value(obs, memory, start))
    assert log_prob.shape == (3, 5, 2) and value.shape == (4, 5, 1)


def test_a_policy_and_a_value_that_share_nothing_and_remember_nothing_return_the_memory_they_began_with():
    network = ActorCritic(Spaces(Box(-1, 1, (3,)), Discrete(2)), share_encoder=False)
    before = network.initial_memory(4)
    assert network.policy(torch.zeros(4, 3), before, None)[1] == before == ((), ())
