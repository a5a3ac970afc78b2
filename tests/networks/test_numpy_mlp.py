"""Small perceptrons in numpy: what torch computes, forward and backward."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn
from torch.amp import GradScaler

import lightning_rl as lrl
from lightning_rl.algorithms.optimization import gradient_step
from lightning_rl.networks import tape
from lightning_rl.networks.flat import FlatAdam
from lightning_rl.networks.mlp import Layers, mlp

OFF = GradScaler(enabled=False)


def perceptron(activation: str = "tanh", out: int = 3) -> Layers:
    torch.manual_seed(0)
    layers = mlp(4, [16, 8], activation).append(nn.Linear(8, out))
    nn.init.normal_(layers[0].bias)
    return layers


def step(layers: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> list[torch.Tensor]:
    """The gradients that a gradient step leaves behind."""
    gradient_step(loss, optimizer, OFF, float("inf"), 1)
    return [parameter.grad.clone() for parameter in layers.parameters()]


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("flat", [True, False])
def test_outputs_and_gradients_are_those_of_torch(activation, flat):
    layers, x = perceptron(activation), torch.randn(7, 4)
    with torch.no_grad(), tape.in_numpy():
        torch.testing.assert_close(layers(x), nn.Sequential(*layers)(x))
    optimizer = FlatAdam(layers) if flat else torch.optim.SGD(layers.parameters(), 0.0)
    expected = torch.autograd.grad(nn.Sequential(*layers)(x).exp().sum(), list(layers.parameters()))
    with tape.in_numpy():
        y = layers(x)
        assert y.is_leaf and y.requires_grad
        torch.testing.assert_close(step(layers, optimizer, y.exp().sum()), list(expected))


def test_a_layer_that_the_optimizer_does_not_move_keeps_no_gradient_from_the_others():
    layers, x = perceptron(), torch.randn(5, 4)
    optimizer = FlatAdam(layers)
    layers[0].weight = nn.Parameter(layers[0].weight + 1)
    expected = torch.autograd.grad(nn.Sequential(*layers)(x).exp().sum(), list(layers.parameters()))
    with tape.in_numpy():
        found = step(layers, optimizer, layers(x).exp().sum())
    torch.testing.assert_close(found[1:], list(expected)[1:])


def test_a_perceptron_that_a_loss_asks_twice_gets_the_sum_and_so_do_layers_of_torch_behind_it():
    layers, behind, x = perceptron(), nn.Linear(3, 1), torch.randn(5, 4)
    both = nn.ModuleList([layers, behind])
    plain = nn.Sequential(*layers)
    expected = torch.autograd.grad(behind(plain(x) * plain(2 * x)).sum(), list(both.parameters()))
    with tape.in_numpy():
        loss = behind(layers(x) * layers(2 * x)).sum()
        torch.testing.assert_close(step(both, FlatAdam(both), loss), list(expected))


def test_rows_may_have_any_number_of_dimensions():
    layers, x = perceptron(), torch.randn(3, 5, 4)
    expected = torch.autograd.grad(nn.Sequential(*layers)(x).square().sum(), list(layers.parameters()))
    with tape.in_numpy():
        y = layers(x)
        assert y.shape == (3, 5, 3)
        torch.testing.assert_close(step(layers, FlatAdam(layers), y.square().sum()), list(expected))


def test_weights_count_as_they_are_when_the_perceptron_is_asked():
    layers, x = perceptron(), torch.randn(2, 4)
    with torch.no_grad(), tape.in_numpy():
        layers(x)
        layers[4].weight.zero_()
        torch.testing.assert_close(layers(x), layers[4].bias.expand(2, 3))


def test_an_output_waits_for_the_step_whose_loss_it_is_in():
    first, second, x = perceptron(), perceptron("relu"), torch.randn(6, 4)
    (expected,) = torch.autograd.grad(nn.Sequential(*first)(x).sum(), [first[0].weight])
    one, two = FlatAdam(first), FlatAdam(second)
    with tape.in_numpy():
        waiting = first(x)
        gradients = step(second, two, second(x).sum())
        assert all(gradient.any() for gradient in gradients) and not first[0].weight.grad.any()
        torch.testing.assert_close(step(first, one, waiting.sum())[0], expected)
        assert not tape.tape.get().waiting


def test_what_numpy_cannot_do_is_left_to_torch():
    x = torch.randn(3, 4)
    wide = mlp(4, [256, 256])
    half = perceptron().double()
    hooked = perceptron()
    hooked[0].register_forward_hook(lambda *_: None)
    watched, followed = perceptron(), perceptron()
    watched[2].bias.register_hook(lambda gradient: gradient)
    followed[2].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    frozen = perceptron()
    frozen[0].weight.requires_grad_(False)
    seen = perceptron()
    with tape.in_numpy():
        for layers, rows in (
            (wide, x),
            (half, x.double()),
            (hooked, x),
            (watched, x),
            (followed, x),
            (frozen, x),
            (seen, x.clone().requires_grad_()),
        ):
            assert layers(rows).grad_fn is not None
        with torch.autocast("cpu", torch.bfloat16):
            assert seen(x).dtype == torch.bfloat16
        assert not tape.tape.get().waiting
    assert seen(x).grad_fn is not None, "outside it all is as torch has it"


@pytest.mark.parametrize(
    "algorithm, settings",
    [
        (lrl.PPO, {"n_steps": 32, "batch_size": 32, "num_envs": 2}),
        (lrl.A2C, {"n_steps": 16, "num_envs": 2}),
        (lrl.IMPALA, {"n_steps": 16, "num_envs": 2, "actors": {"backend": "in_process", "num_actors": 1}}),
        (lrl.DQN, {"learning_starts": 32, "batch_size": 16, "train_freq": 1, "num_envs": 1}),
    ],
)
def test_an_algorithm_learns_the_same_in_numpy_and_in_torch(algorithm, settings, tmp_path, monkeypatch):
    def weights() -> np.ndarray:
        pl.seed_everything(3)
        own = dict(settings)
        model = algorithm(env=lrl.EnvConfig("CartPole-v1", num_envs=own.pop("num_envs")), max_env_steps=96, **own)
        lrl.Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False, logger=False).fit(model)
        assert model.updates > 0
        return torch.cat([parameter.detach().flatten() for parameter in model.network.parameters()]).numpy()

    in_numpy = weights()
    asked = []
    monkeypatch.setattr(tape.Tape, "run", lambda *arguments: asked.append(arguments))
    np.testing.assert_allclose(weights(), in_numpy, atol=2e-5)
    assert asked


def test_numpy_multiplies_in_one_thread_while_a_run_lasts(tmp_path):
    seen = []

    class Looks(pl.Callback):
        def on_train_batch_end(self, *_: object) -> None:
            seen.extend(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")

    with threadpool_limits(limits=2, user_api="blas"):
        model = lrl.A2C(env="CartPole-v1", max_env_steps=40)
        lrl.Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False, logger=False, callbacks=[Looks()]).fit(model)
        assert set(seen) == {1} and {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"} == {2}


def test_weights_that_were_moved_are_found_again():
    layers, x = perceptron(), torch.randn(2, 4)
    with torch.no_grad(), tape.in_numpy():
        layers(x)
    FlatAdam(layers)
    with torch.no_grad(), tape.in_numpy():
        layers[4].weight.zero_()
        torch.testing.assert_close(layers(x), layers[4].bias.expand(2, 3))
        torch.testing.assert_close(copy.deepcopy(layers).append(nn.ReLU())(x), layers[4].bias.relu().expand(2, 3))


def test_layers_that_were_exchanged_are_the_ones_that_are_asked():
    layers, x = perceptron(), torch.randn(2, 4)
    with torch.no_grad(), tape.in_numpy():
        layers(x)
    layers[4] = nn.Linear(8, 3)
    layers.append(nn.ReLU())
    with torch.no_grad(), tape.in_numpy():
        torch.testing.assert_close(layers(x), nn.Sequential(*layers)(x))
    layers.load_state_dict({name: value.clone() for name, value in perceptron().append(nn.ReLU()).state_dict().items()}, assign=True)
    with torch.no_grad(), tape.in_numpy():
        torch.testing.assert_close(layers(x), nn.Sequential(*layers)(x))


def test_a_step_of_another_network_does_not_use_up_an_output_that_its_loss_holds_too():
    first, second, x = perceptron(), perceptron("relu"), torch.randn(6, 4)
    (expected,) = torch.autograd.grad(nn.Sequential(*first)(x).sum(), [first[0].weight])
    one, two = FlatAdam(first), FlatAdam(second)
    with tape.in_numpy():
        shared = first(x)
        step(second, two, (second(x) * shared).sum())
        torch.testing.assert_close(step(first, one, shared.sum())[0], expected)


def test_an_output_that_a_step_of_its_optimizer_did_not_reach_is_spent():
    layers, x = perceptron(), torch.randn(6, 4)
    with tape.in_numpy():
        layers(x)
        step(layers, FlatAdam(layers), layers(x).sum())
        assert not tape.tape.get().waiting


def test_gradients_that_are_asked_for_in_another_way_are_refused():
    layers, x = perceptron(), torch.randn(6, 4)
    with pytest.raises(RuntimeError, match="and not by backward"), tape.in_numpy():
        layers(x).sum().backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        FlatAdam(layers).vector.differentiate(torch.zeros(()))
