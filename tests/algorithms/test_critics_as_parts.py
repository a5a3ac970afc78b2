"""TQC, CrossQ, REDQ and DroQ: what their names and options do."""

from __future__ import annotations

import pytest

from lightning_rl import SAC, TD3, TQC, CrossQ, SettingError
from tests.fitting import tiny

BOX = "tests.environments:ScriptedBox-v0"


def test_a_critic_that_a_subclass_builds_by_critic_settings_has_the_critics_own_layers():
    settings = tiny(SAC, BOX, net_arch=[8], critic_net_arch=[6], critic_layers="layer_norm", critic_dropout=0.1).critic_settings
    assert (settings["net_arch"], settings["layers"], settings["dropout"]) == ([6], "layer_norm", 0.1)
    assert tiny(SAC, BOX, net_arch=[8]).critic_settings["net_arch"] == [8]


@pytest.mark.parametrize(
    ("algorithm", "env", "settings", "message"),
    [
        (
            TQC,
            "tests.environments:Scripted-v0",
            {},
            "TQC with n_quantiles needs Box actions only, got Discrete(3); use SAC without n_quantiles, or",
        ),
        (CrossQ, BOX, {"batch_size": 1}, "batch_size must be >= 2, got 1"),
        (SAC, BOX, {"n_quantiles": 5, "value_network": True}, "n_quantiles cannot be combined with value_network"),
        (SAC, BOX, {"critic_subset": 3}, "critic_subset must be >= 1 and <= 2, got 3"),
        (TD3, BOX, {"critic_layers": "batch_renorm"}, "critic_layers must be one of plain, layer_norm, simba, got"),
        (SAC, BOX, {"critic_layers": "simba", "critic_net_arch": [8, 4]}, "simba layers need one width for all blocks"),
        (CrossQ, BOX, {"memory": {"class_path": "LSTM"}}, "memory is not a setting of CrossQ"),
        (CrossQ, BOX, {"tau": 0.1}, "tau is not a setting of CrossQ"),
    ],
)
def test_settings_that_exclude_each_other_are_reported_in_one_line(algorithm, env, settings, message):
    with pytest.raises(SettingError) as raised:
        tiny(algorithm, env, **settings)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
