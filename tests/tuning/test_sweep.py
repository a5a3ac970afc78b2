"""The example of a sweep of Weights & Biases: what its agent runs is accepted by `fit`."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from tests.command_line import run

SWEEP = yaml.safe_load((Path(__file__).parents[2] / "examples" / "sweep.yaml").read_text())


def ends_of(parameter):
    """The values of a parameter that are most likely to be refused."""
    return parameter.get("values") or [parameter["min"], parameter["max"]]


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(max(len(ends_of(each)) for each in SWEEP["parameters"].values())))
def test_the_command_of_an_agent_is_accepted_by_fit(number, capfd):
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args  # takes seconds

    chosen = {name: {"value": ends_of(each)[number % len(ends_of(each))]} for name, each in SWEEP["parameters"].items()}
    variables = create_sweep_command_args({"args": chosen})
    parts = create_sweep_command(SWEEP["command"])
    program, subcommand, *options = [word for part in parts for word in (variables["args"] if part == "${args}" else [part])]
    assert (program, subcommand) == ("lightning-rl", "fit")
    status, out, err = run(f"fit {shlex.join(options)} --print_config", capfd)
    assert (status, err) == (0, "")
    settings = yaml.safe_load(out)["model"]["init_args"]
    assert {f"model.{name}": settings[name] for name in ("learning_rate", "n_steps", "gamma", "activation", "normalize_advantage")} == {
        name: each["value"] for name, each in chosen.items() if name != "model.ent_coef"
    }
    assert SWEEP["metric"]["name"] == yaml.safe_load(out)["checkpoint"]["monitor"]
