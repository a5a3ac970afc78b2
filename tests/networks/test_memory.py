"""Recurrent memory: the layer itself, and each network that has one."""

import math

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl import GRU, LSTM, SettingError
from lightning_rl.networks.acting import NumpyActor, TorchActor, make_actor, reset_memory
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.memory import as_memory
from lightning_rl.networks.off_policy import Actor
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.spaces import Spaces
from lightning_rl.types import tree_leaves, tree_map

T, N, F = 20, 5, 3
KINDS = pytest.mark.parametrize("kind", [LSTM, GRU])


def sequences(ends=0.2, seed=0):
    """Features, memories before them, and episode starts with this frequency."""
    torch.manual_seed(seed)
    return torch.randn(T, N, F), torch.rand(T, N) < ends


def before(memory, seed=1):
    torch.manual_seed(seed)
    return tree_map(torch.randn_like, memory.initial(N))


def step_by_step(memory, features, state, start):
    outputs = []
    for row, begins in zip(features, start, strict=True):
        output, state = memory(row, state, begins)
        outputs.append(output)
    return torch.stack(outputs), state


@KINDS
@pytest.mark.parametrize("ends", [0.0, 0.2, 1.0])
def test_a_whole_sequence_equals_its_single_steps(kind, ends):
    memory, (features, start) = kind(12, 4).build(F), sequences(ends)
    state = before(memory)
    outputs, after = memory(features, state, start)
    expected, expected_after = step_by_step(memory, features, state, start)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(after, expected_after, atol=1e-6, rtol=0)
    flat, _ = memory(features.flatten(0, 1), state, start)
    assert torch.equal(flat, outputs.flatten(0, 1))


@KINDS
def test_one_sequence_in_which_an_episode_begins_is_read_alike_again_and_keeps_its_flags(kind):
    memory, (features, start) = kind(12, 4).build(F), sequences()
    features, start = features[:, :1], start[:, :1].contiguous()
    start[0], start[5] = False, True
    state, flags = tree_map(torch.randn_like, memory.initial(1)), start.clone()
    outputs, _ = memory(features, state, start)
    assert torch.equal(start, flags)
    torch.testing.assert_close(outputs, step_by_step(memory, features, state, start)[0], atol=1e-6, rtol=0)
    assert torch.equal(outputs, memory(features, state, start)[0])


@KINDS
def test_the_gradients_of_a_whole_sequence_are_those_of_its_steps(kind):
    memory, (features, start) = kind(12, 4).build(F), sequences()
    weight = torch.randn(T, N, memory.num_features)
    whole = torch.autograd.grad((memory(features, before(memory), start)[0] * weight).sum(), tuple(memory.parameters()))
    steps = torch.autograd.grad((step_by_step(memory, features, before(memory), start)[0] * weight).sum(), tuple(memory.parameters()))
    torch.testing.assert_close(whole, steps, atol=1e-5, rtol=1e-5)


@KINDS
def test_observations_before_a_reset_change_nothing_after_it(kind):
    memory, (features, _) = kind(12, 4).build(F), sequences()
    start = torch.zeros(T, N, dtype=torch.bool)
    start[7] = True
    other = features.clone()
    other[:7] += 1
    outputs, after = memory(features, before(memory), start)
    changed, changed_after = memory(other, before(memory, seed=2), start)
    assert not torch.isclose(outputs[:7], changed[:7]).all(-1).any()
    torch.testing.assert_close(outputs[7:], changed[7:], atol=1e-6, rtol=0)
    torch.testing.assert_close(after, changed_after, atol=1e-6, rtol=0)
    # and without a reset it does
    start[7] = False
    assert (memory(features, before(memory), start)[0][8] != memory(other, before(memory), start)[0][8]).all()


@KINDS
def test_sequences_of_a_batch_are_independent(kind):
    memory, (features, start) = kind(12, 4).build(F), sequences()
    state = before(memory)
    whole, _ = memory(features, state, start)
    for i in range(N):
        alone, _ = memory(features[:, i : i + 1], tuple(leaf[i : i + 1] for leaf in state), start[:, i : i + 1])
        torch.testing.assert_close(alone, whole[:, i : i + 1], atol=1e-6, rtol=0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_numbers_of_an_lstm_of_one_cell():
    memory = LSTM(2).build(1)
    with torch.no_grad():
        memory.weight_ih.copy_(torch.tensor([[0.1], [0.2], [0.3], [0.4]]))  # i, f, g, o
        memory.weight_hh.copy_(torch.tensor([[0.5], [0.6], [0.7], [0.8]]))
        for bias in (memory.bias_ih, memory.bias_hh):
            bias.copy_(torch.tensor([0.0, 1.0, 0.0, 0.0]))
    output, (h, c) = memory(torch.tensor([[2.0]]), (torch.tensor([[0.5]]), torch.tensor([[-1.0]])), torch.tensor([False]))
    # gates: i 0.2 + 0.25, f 0.4 + 0.3 + 2, g 0.6 + 0.35, o 0.8 + 0.4
    cell = sigmoid(2.7) * -1 + sigmoid(0.45) * math.tanh(0.95)
    assert c.item() == pytest.approx(cell, abs=1e-6)
    assert output.item() == h.item() == pytest.approx(sigmoid(1.2) * math.tanh(cell), abs=1e-6)


def test_the_numbers_of_a_gru_of_two_cells():
    memory = GRU(2).build(1)
    with torch.no_grad():
        for parameter in memory.parameters():
            parameter.zero_()
        memory.weight_ih[4:] = 1.0  # n alone sees the input
        memory.weight_hh[4:] = torch.eye(2)
        memory.bias_hh[2:4] = torch.tensor([0.0, 1.0])  # z
    output, (h,) = memory(torch.tensor([[0.3]]), (torch.tensor([[0.4, -0.8]]),), torch.tensor([False]))
    # r = 0.5, z = (0.5, σ(1)), n = tanh(0.3 + 0.5 h)
    z = sigmoid(1)
    expected = [0.5 * math.tanh(0.5) + 0.5 * 0.4, (1 - z) * math.tanh(-0.1) + z * -0.8]
    assert output[0].tolist() == h[0].tolist() == pytest.approx(expected, abs=1e-6)


@KINDS
def test_gates_of_a_new_layer_have_no_bias(kind):
    memory = kind(8).build(F)
    assert memory.bias_ih.tolist() == memory.bias_hh.tolist() == [0.0] * memory.gates * memory.size


def test_a_new_lstm_keeps_half_of_its_cell_from_one_step_to_the_next():
    torch.manual_seed(0)
    memory = LSTM(128).build(F)
    h, c = torch.zeros(1, 64), torch.full((1, 64), 100.0)  # so large that what is added does not count
    _, (_, after) = memory(torch.zeros(1, F), (h, c), torch.tensor([False]))
    torch.testing.assert_close(after / c, torch.full((1, 64), 0.5))


def test_memory_size_counts_all_numbers_kept_from_step_to_step():
    lstm, gru = LSTM(8).build(F), GRU(8).build(F)
    assert [leaf.shape for leaf in lstm.initial(2)] == [(2, 4)] * 2 and lstm.num_features == 4
    assert [leaf.shape for leaf in gru.initial(2)] == [(2, 8)] and gru.num_features == 8


@KINDS
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_size": 7}, "memory.memory_size must be even, got 7; use 6 or 8"),
        ({"memory_size": 0}, "memory.memory_size must be >= 2, got 0"),
        ({"sequence_length": 0}, "memory.sequence_length must be >= 1"),
        ({"burn_in": -1}, "memory.burn_in must be >= 0"),
    ],
)
def test_invalid_sizes_are_refused(kind, settings, message):
    with pytest.raises(SettingError, match=message):
        kind(**settings)


@KINDS
def test_no_gradient_flows_into_the_rows_of_a_burn_in(kind):
    burning, plain, (features, start) = kind(12, 4, burn_in=7).build(F), kind(12, 4).build(F), sequences()
    plain.load_state_dict(burning.state_dict())
    features.requires_grad_()
    outputs, after = burning(features, before(burning), start)
    torch.testing.assert_close((outputs, after), plain(features, before(plain), start), atol=1e-6, rtol=0)
    outputs.sum().backward()
    assert (features.grad[:7] == 0).all() and (features.grad[7:] != 0).all()


def test_a_burn_in_is_refused_where_nothing_is_replayed():
    with pytest.raises(SettingError, match=r"^memory\.burn_in 2 is for replayed sequences"):
        ActorCritic(SPACES, memory=LSTM(4, 4, burn_in=2))


@KINDS
def test_an_episode_begins_with_zeros_even_after_nan(kind):
    memory, (features, start) = kind(12, 4).build(F), sequences()
    spoilt = tree_map(lambda leaf: torch.full_like(leaf, math.nan), memory.initial(N))
    start[0] = True
    for rows in (1, T):
        expected = memory(features[:rows], memory.initial(N), start[:rows])
        assert torch.equal(memory(features[:rows], spoilt, start[:rows])[0], expected[0])
    for leaf in reset_memory(spoilt, np.array([True, False, True, True, True])):
        assert np.isnan(leaf[1]).all() and (leaf[[0, 2, 3, 4]] == 0).all() and leaf.dtype == np.float32


def test_a_memory_is_rebuilt_from_its_settings():
    again = as_memory(GRU(6, 5, 4).settings)
    assert type(again) is GRU and again.settings == GRU(6, 5, 4).settings
    assert as_memory(None) is None and as_memory("LSTM").settings == as_memory(LSTM).settings == LSTM().settings
    for wrong in ("LSTMs", int, 3, {"class_path": "LSTMs"}, {"class_path": "LSTM", "init_args": {"size": 3}}, {"memory_size": 4}):
        with pytest.raises(SettingError, match="memory"):
            as_memory(wrong)


class Deep(LSTM):
    def __init__(self, depth=1, **arguments):
        super().__init__(**arguments)
        self.depth = depth


def test_a_users_memory_is_rebuilt_with_all_its_settings():
    again = as_memory(Deep(2, memory_size=6).settings)
    assert type(again) is Deep and (again.depth, again.memory_size) == (2, 6)


# ---------------------------------------------------------------- in networks

SPACES = Spaces(Box(-1, 1, (F,), np.float32), Discrete(3))
BOX = Spaces(SPACES.observation, Box(-2, 2, (2,), np.float32))
NETWORKS = {
    "actor-critic": lambda memory: ActorCritic(SPACES, net_arch=[8], memory=memory),
    "actor-critic of two memories": lambda memory: ActorCritic(BOX, net_arch=[8], memory=memory, share_encoder=False),
    "actor": lambda memory: Actor(BOX, "squashed_normal", torch.nn.Identity(), net_arch=[8], memory=memory),
    "q-network": lambda memory: QNetwork(SPACES, net_arch=[8], memory=memory),
}


def actors(make, memory):
    """The two that may ask a network, with the same draws, and what they see."""
    torch.manual_seed(0)
    network = make(memory)
    obs = np.random.default_rng(0).uniform(-1, 1, (T, N, F)).astype(np.float32)
    fast, plain = (build(network, obs, torch.Generator().manual_seed(0)) for build in (make_actor, TorchActor))
    assert isinstance(fast, NumpyActor)
    return network, fast, plain, sequences()[1].numpy()


@KINDS
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_numpy_remembers_as_torch_does(kind, make):
    network, fast, plain, start = actors(make, kind(8))
    fast.noise[:] = 0
    network.distribution.noise = lambda x, generator: torch.zeros_like(x[..., : fast.noise.shape[-1]])
    network.distribution.sample = lambda x, mask, generator: network.distribution.mode(x)
    memory = other = network.initial_memory(N)
    for t in range(T):
        action, memory = fast.act(t, memory, start[t])
        expected, other = plain.act(t, other, start[t])
        np.testing.assert_allclose(action, expected, atol=1e-6)
        for leaf, same in zip(tree_leaves(memory), tree_leaves(other), strict=True):
            np.testing.assert_allclose(leaf, same.numpy(), atol=1e-6)


@KINDS
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_actors_update_the_memory_without_acting_too(kind, make):
    network, fast, plain, start = actors(make, kind(8))
    memory = network.initial_memory(N)
    for actor in (fast, plain):
        for acted, remembered in zip(
            tree_leaves(actor.act(3, memory, start[3])[1]), tree_leaves(actor.remember(3, memory, start[3])), strict=True
        ):
            np.testing.assert_array_equal(acted, remembered)


def test_noisy_layers_draw_from_the_runs_generator_while_another_actor_acts():
    network = QNetwork(SPACES, net_arch=[8], noisy=True, memory=GRU(8))
    generator = torch.Generator().manual_seed(0)
    plain = TorchActor(network, np.zeros((T, N, F), np.float32), generator)
    before_it, own = torch.get_rng_state(), generator.get_state()
    plain.remember(0, network.initial_memory(N), np.ones(N, bool))
    assert torch.equal(torch.get_rng_state(), before_it) and not torch.equal(generator.get_state(), own)


@KINDS
@pytest.mark.parametrize("share_encoder", [True, False])
def test_an_actor_critic_evaluates_a_sequence_as_it_acted(kind, share_encoder):
    torch.manual_seed(0)
    network = ActorCritic(SPACES, net_arch=[8], memory=kind(8), share_encoder=share_encoder)
    obs, start = sequences()
    memory = first = network.initial_memory(N)
    generator, steps = torch.Generator().manual_seed(0), []
    for t in range(T):
        steps.append(network.act(obs[t], memory, start[t], generator=generator))
        memory = steps[-1].memory
    action = torch.stack([step.action for step in steps])
    log_prob, _, value = network.evaluate(obs, action, first, start)
    torch.testing.assert_close(log_prob.squeeze(-1), torch.stack([step.log_prob for step in steps]), atol=1e-6, rtol=0)
    torch.testing.assert_close(value, torch.stack([step.value for step in steps]), atol=1e-6, rtol=0)
    torch.testing.assert_close(network.value(obs, first, start), value)
    torch.testing.assert_close(network.log_prob(obs, action, first, start), log_prob)


def test_policy_and_value_have_separate_memories_by_default():
    apart = ActorCritic(SPACES, memory=LSTM(8))
    assert apart.critic_memory is not apart.memory and apart.critic_encoder is not apart.actor_encoder
    shared = ActorCritic(SPACES, memory=LSTM(8), share_encoder=True)
    assert shared.critic_memory is shared.memory
    without = ActorCritic(SPACES)
    assert without.critic_encoder is without.actor_encoder


def test_separate_memories_of_policy_and_value_share_nothing():
    network = ActorCritic(SPACES, net_arch=[8], memory=LSTM(8))
    obs, start = sequences()
    value = network.value(obs, network.initial_memory(N), start).sum()
    value.backward()
    assert all(parameter.grad is None for parameter in network.memory.parameters())
    assert all(parameter.grad.abs().sum() > 0 for parameter in network.critic_memory.parameters())


@KINDS
def test_features_of_goals_bypass_the_memory(kind):
    memory, (features, start) = kind(8).build(F, 2), sequences()
    plain = kind(8).build(F)
    plain.load_state_dict(memory.state_dict())
    outputs, after = memory(features, before(memory), start)
    expected, expected_after = plain(features, before(plain), start)
    assert memory.num_features == plain.num_features + 2
    torch.testing.assert_close(outputs[..., :-2], expected)
    assert torch.equal(outputs[..., memory.goal], features[..., 1:])
    torch.testing.assert_close(after, expected_after)


def test_the_memory_stays_exact_under_mixed_precision():
    memory, (features, start) = LSTM(8).build(F), sequences()
    expected, _ = memory(features, before(memory), start)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = memory(features, before(memory), start)
    assert output.dtype == torch.float32 and torch.equal(output, expected)
