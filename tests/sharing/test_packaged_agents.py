"""The trained agents that come with the package."""

from __future__ import annotations

import pytest

import lightning_rl as lrl
from lightning_rl.errors import SettingError
from lightning_rl.processes.startup import config_folder, packaged_agents
from tests.command_line import run

LEAST = {
    "ppo/cartpole": 475,
    "ars/cartpole": 475,
    "trpo/cartpole": 475,
    "ppo/lunarlander": 150,
    "ppo/acrobot": -95,
    "ppo/pendulum": -300,
    "es/mountaincar_continuous": 90,
}
"""What each reaches in the mean of ten episodes, less than what its config says by as much as ten episodes differ."""


def test_each_is_named_as_the_config_that_trained_it_and_all_are_small():
    agents = packaged_agents()
    assert len(agents) >= 6
    for name, folder in agents.items():
        assert (config_folder() / f"{name}.yaml").is_file()
        assert {file.name for file in folder.iterdir()} == {"agent.json", "agent.safetensors"}
    assert sum(file.stat().st_size for folder in agents.values() for file in folder.iterdir()) < 20e6


@pytest.mark.variants
@pytest.mark.parametrize("name", packaged_agents())
def test_an_agent_plays_as_well_as_its_config_says(name):
    assert lrl.evaluate(f"zoo:{name}", episodes=10, seed=1)["return_mean"] >= LEAST[name]


def test_an_agent_is_evaluated_by_the_command_line(capfd):
    status, out, err = run("evaluate --ckpt_path zoo:ppo/cartpole --episodes 2", capfd)
    assert (status, err) == (0, "") and "500" in out


@pytest.mark.parametrize("name, hint", [("ppo/cartpol", "did you mean ppo/cartpole"), ("x", "choose from ")])
def test_an_unknown_name_is_one_line(name, hint, capfd):
    with pytest.raises(SettingError, match=f"zoo:{name} is not one of the agents that come with this package.*{hint}"):
        lrl.load_policy(f"zoo:{name}")
    status, _, err = run(f"evaluate --ckpt_path zoo:{name}", capfd)
    assert status == 2 and err.count("\n") == 1 and hint[:10] in err
