"""What a critic says of a value, read and learned."""

from __future__ import annotations

import pytest
import torch

from lightning_rl import PPO, SettingError
from lightning_rl.networks.actor_critic import make_value_head
from tests.fitting import fit, tiny


def test_a_transformed_value_is_learned_in_its_transformed_scale():
    head = make_value_head("signed_hyperbolic", None)
    z = torch.tensor([[1.03, 10.04987562]])  # h(3) and h(100)
    torch.testing.assert_close(head.value(z), torch.tensor([[3.0, 100.0]]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(head.loss(z, torch.tensor([[8.0, 100.0]])), torch.tensor([[(2.08 - 1.03) ** 2, 0.0]]), rtol=1e-4, atol=1e-6)


def test_a_histogram_is_read_as_its_mean_and_learned_by_two_hot_targets():
    head = make_value_head("identity", [0, 10])
    z = torch.zeros(11).index_fill(0, torch.tensor([3]), 0.3).index_fill(0, torch.tensor([4]), 0.7)
    torch.testing.assert_close(head.value(z), torch.tensor([4.86141021]))
    loss = head.loss(z, torch.tensor([3.7]))  # 0.3 at 3 and 0.7 at 4
    torch.testing.assert_close(loss, -(0.3 * z.log_softmax(-1)[3] + 0.7 * z.log_softmax(-1)[4])[None])


def test_streams_have_a_histogram_each_and_returns_beyond_it_are_cut():
    head = make_value_head("identity", [-1, 1])
    z = torch.tensor([[0.0, 0.0, 50.0, 50.0, 0.0, 0.0]])
    torch.testing.assert_close(head.value(z), torch.tensor([[1.0, -1.0]]))
    torch.testing.assert_close(head.loss(z, torch.tensor([[7.0, -7.0]])), torch.zeros(1, 2))


@pytest.mark.thorough
def test_the_loss_of_a_histogram_decides_nothing_by_numbers_so_that_it_can_be_compiled_and_a_gpu_goes_on():
    head = make_value_head("symlog", [-2, 3])
    z, returns = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([[0.5], [1e6], [-1e6], [0.0]])
    compiled = torch.compile(head.loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(z, returns), head.loss(z, returns))


@pytest.mark.parametrize(
    ("support", "said"),
    [([5], "two integers, low and high, got [5]"), ([5, 5], "low 5 must be below high 5"), ([0.5, 2], "value_support must be an integer")],
)
def test_an_invalid_support_is_refused(support, said):
    with pytest.raises(SettingError, match="value_support") as error:
        make_value_head("identity", support)
    assert said in str(error.value)


def test_values_that_are_clipped_are_learned_as_they_are():
    with pytest.raises(SettingError, match=r"^clip_range_vf cannot be combined with value_transform"):
        tiny(PPO, clip_range_vf=0.2, value_transform="symlog")


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [{"value_transform": "signed_hyperbolic"}, {"value_support": [-2, 14], "value_transform": "identity"}])
def test_the_right_value_is_learned_whatever_says_it(settings):
    # reward 1 for ever, γ = 0.9: V = 10
    rollouts = {"n_steps": 16, "batch_size": 16, "max_env_steps": 3_000}
    schedule = {"schedule": "linear", "start": 0.02}
    model = tiny(PPO, "tests.environments:Endless-v0", gamma=0.9, learning_rate=schedule, **rollouts, **settings)
    fit(model)
    value = model.network.value(torch.zeros(1, *model.spaces.observation.shape))
    assert value.item() == pytest.approx(10.0, abs=0.5)
