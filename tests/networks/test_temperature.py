"""The temperature: fixed or learned, one for each kind of action."""

from __future__ import annotations

import pytest
import torch

from lightning_rl.errors import SettingError
from lightning_rl.losses.soft_actor_critic import temperature_loss
from lightning_rl.networks.off_policy import Temperature

BOTH = ["continuous", "discrete"]


@pytest.mark.parametrize(
    ("ent_coef", "alpha", "learned"), [(0.2, 0.2, False), (1, 1, False), (0, 0, False), ("auto", 1, True), ("auto_0.1", 0.1, True)]
)
@pytest.mark.parametrize("kinds", [BOTH, BOTH[:1]])
def test_a_temperature_is_a_number_or_learned_from_a_first_value(ent_coef, alpha, learned, kinds):
    temperature = Temperature(kinds, ent_coef)
    assert temperature().tolist() == pytest.approx([alpha] * len(kinds))
    assert temperature.learned is learned
    assert not temperature().requires_grad
    assert [parameter.requires_grad for parameter in temperature.parameters()] == [learned]


def test_a_learned_temperature_goes_up_for_one_kind_while_it_goes_down_for_the_other():
    temperature = Temperature(BOTH, "auto")
    optimizer = torch.optim.SGD(temperature.parameters(), 0.1)
    entropy, target = torch.tensor([[-3.0, 0.6]]), torch.tensor([-2.0, 0.5])
    temperature_loss(temperature.log_alpha, entropy, target).sum().backward()
    optimizer.step()
    assert temperature.log_alpha.tolist() == pytest.approx([0.1, -0.01])


def test_a_temperature_is_saved_with_its_network():
    saved, loaded = Temperature(BOTH, "auto_0.3"), Temperature(BOTH, "auto")
    loaded.load_state_dict(saved.state_dict())
    assert loaded().tolist() == pytest.approx([0.3, 0.3])


@pytest.mark.parametrize("ent_coef", ["automatic", "auto_", "auto_x", "0.2", "", "learned_0.1", "auto_0.1_0.2"])
def test_an_invalid_word_is_refused_in_one_line(ent_coef):
    message = f"^ent_coef '{ent_coef}' must be a number, auto, or auto_<initial value> such as auto_0.1$"
    with pytest.raises(SettingError, match=message):
        Temperature(BOTH, ent_coef)


@pytest.mark.parametrize(
    ("ent_coef", "message"),
    [
        (-0.1, "ent_coef must be >= 0, got -0.1"),
        (float("nan"), "ent_coef must be >= 0, got nan"),
        ("auto_0", "ent_coef must be > 0, got 0.0"),
        ("auto_-1", "ent_coef must be > 0, got -1.0"),
        ("auto_nan", "ent_coef must be > 0, got nan"),
        (True, "ent_coef must be a number >= 0, got True"),
        (None, "ent_coef must be a number >= 0, got None"),
        ([0.1], "ent_coef must be a number >= 0, got [0.1]"),
    ],
)
def test_an_invalid_number_is_refused_in_one_line(ent_coef, message):
    with pytest.raises(SettingError) as error:
        Temperature(BOTH, ent_coef)
    assert str(error.value) == message
