"""The number of threads that torch computes with, and the memory that it frees."""

import ctypes
import itertools
import os
import subprocess
import sys
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl import DQN, PPO, SAC, EnvConfig
from lightning_rl.envs.make import make_vector_env
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.memory import LSTM
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.spaces import Spaces
from lightning_rl.training import threads
from lightning_rl.training.threads import choose_threads, is_wide, learning_step, measure_seconds, suits_cpu

VECTOR = Spaces(Box(-1, 1, (256,)), Discrete(2))
IMAGE = Spaces(Box(0, 255, (20, 20, 3), np.uint8), Discrete(2))


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def model(spaces=IMAGE, **settings):
    return SimpleNamespace(network=ActorCritic(spaces, **settings), spaces=spaces)


def test_convolutions_and_layers_with_256_inputs_and_outputs_are_wide():
    assert is_wide(model().network)
    assert not is_wide(model(VECTOR, net_arch=[255, 255]).network)
    assert is_wide(model(VECTOR, net_arch=[256]).network)
    assert is_wide(QNetwork(VECTOR, net_arch=[256], noisy=True))


def test_more_than_one_thread_is_chosen_where_it_is_clearly_faster(monkeypatch):
    wide, narrow = model(VECTOR, net_arch=[256]), model(VECTOR)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for many, number in ((0.0084, 3), (0.0086, 1), (0.2, 1)):
        monkeypatch.setattr(threads, "measure_seconds", lambda step, most, many=many: (0.010, many))
        found, line = choose_threads(wide)
        assert found == number
        times = f"10 ms with 1, {1000 * many:.3g} ms with 3"
        assert line == f"trainer.torch_threads {number} (measured: 64 rows forward and backward take {times})"
    assert choose_threads(narrow) == (1, None)


def test_with_one_core_or_without_a_network_nothing_is_measured(three_threads, monkeypatch):
    monkeypatch.setattr(threads, "measure_seconds", None)
    assert choose_threads(torch.nn.Conv2d(1, 1, 1)) == (1, None)
    assert choose_threads(SimpleNamespace(network=torch.nn.Conv2d(1, 1, 1))) == (1, None), "a network that is not a policy"
    torch.set_num_threads(1)
    assert choose_threads(model()) == (1, None)


def test_one_long_wait_counts_in_the_mean(three_threads, monkeypatch):
    clock, asked = itertools.count(), []

    def step():
        asked.append(torch.get_num_threads())
        if len(asked) == 6:  # of the second round that counts, the first with more threads
            for _ in range(99):
                next(clock)

    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    monkeypatch.setattr(threads, "MEASURED_SECONDS", 12.0)
    one, many = measure_seconds(step, 3)
    assert asked == [1, 3, 1, 3, 1, 3] and torch.get_num_threads() == 3
    assert (one, many) == (1.0, (1.0 + 100.0) / 2)


@pytest.mark.parametrize("build", [ActorCritic, QNetwork, lambda spaces: ActorCritic(spaces, memory=LSTM(8))])
def test_measuring_changes_neither_the_network_nor_any_draw(build):
    network = build(IMAGE)
    before, draws = {name: value.clone() for name, value in network.state_dict().items()}, torch.get_rng_state()
    learning_step(network, IMAGE.observation)()
    assert torch.equal(torch.get_rng_state(), draws) and network.training
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())


PAGE_FAULTS = """
import resource, numpy
from lightning_rl.training.threads import keep_freed_memory

def update():
    return [numpy.ones(600_000, numpy.float32) for _ in range(8)]  # 19 MB, as quantile losses of 256 rows have

for _ in range(3):
    update()
for keep in (lambda: None, keep_freed_memory):
    keep()
    update()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        update()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's malloc alone is told")
@pytest.mark.parametrize("variables", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_memory_that_an_update_frees_is_used_by_the_next_unless_the_user_says_how_malloc_does(variables):
    printed = subprocess.run(
        [sys.executable, "-c", PAGE_FAULTS], capture_output=True, text=True, check=True, env=os.environ | variables
    ).stdout
    before, after = map(int, printed.split())
    assert before > 1_000, "pages that the kernel clears in each update"
    assert (after < 10) == (not variables)


def test_small_networks_suit_a_cpu_unless_their_environments_are_on_the_gpu():
    assert suits_cpu(PPO("CartPole-v1")) and suits_cpu(DQN(lambda: gym.make("CartPole-v1")))
    assert not suits_cpu(SAC("Pendulum-v1"))  # two layers of 256
    assert not suits_cpu(PPO(EnvConfig("Torch/CartPole-v1", 64)))
    assert not suits_cpu(PPO(make_vector_env(EnvConfig("Torch/CartPole-v1", 64)).env))
