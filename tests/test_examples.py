"""The files in examples/: what a user's own algorithm, environment, callback or encoder may do."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_rl as lrl
from lightning_rl.checkpoints.files import last_generation
from tests.apart import Apart
from tests.fitting import fit, tiny, weights

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_unrolled_loop_learns_the_weights_of_ppo(monkeypatch, env_id):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from ppo_unrolled import train

    own = {"max_env_steps": 2048, "n_steps": 64, "batch_size": 64, "ent_coef": 0.01, "learning_rate": 1e-3}
    torch.manual_seed(7)
    model = lrl.PPO({"id": env_id, "num_envs": 8}, **own)
    fit(model)
    torch.testing.assert_close(
        torch.nn.utils.parameters_to_vector(train(env_id, seed=7, **own).parameters()), weights(model), atol=2e-5, rtol=1e-4
    )


@pytest.fixture
def lightning_dqn(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import lightning_dqn

    yield lightning_dqn.DQNLightning
    del sys.modules["lightning_dqn"]


def test_lightnings_own_example_takes_less_than_thirty_lines_and_its_page_shows_them():
    program = (EXAMPLES / "lightning_dqn.py").read_text()
    assert len(program.splitlines()) < 30 and program in (EXAMPLES.parent / "docs" / "coming_from.md").read_text()


def test_the_loss_of_lightnings_example_is_the_squared_error_of_the_bootstrapped_value(lightning_dqn):
    model = tiny(lightning_dqn, gamma=0.5)
    batch = next(batch for iteration in model.experience() for batch in iteration)
    rows = []
    for k in range(len(batch.reward)):
        q, following = (net(obs[k : k + 1]).flatten() for net, obs in ((model.network, batch.obs), (model.target, batch.next_obs)))
        rows.append((q[int(batch.action[k])] - batch.reward[k, 0] - batch.discount[k, 0] * following.max()).item())
    loss, errors, _ = model.loss(batch)
    assert loss.item() == pytest.approx(sum(row**2 for row in rows) / len(rows), rel=1e-5)
    assert errors.tolist() == pytest.approx([abs(row) for row in rows], rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_lightnings_example_learns_cartpole(tmp_path):
    program = str(EXAMPLES / "lightning_dqn.py")
    out = subprocess.run([sys.executable, program], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert float(re.search(r"'test/mean_reward': ([\d.]+)", out)[1]) >= 400


EXTENSIONS = {
    "auxiliary_head": "head.2.weight",
    "temperature_rule": "target_entropies",
    "socket_world": "network.actor.0.weight",
    "success_curriculum": "network.actor.0.weight",
    "running_encoder": "network.actor_encoder.own.variance",
}
"""Programs, and what changes during a run of each."""


def changes(program, folder, name):
    """Wait until a file below a folder is there, or another one than before."""
    before = [path.stat().st_mtime_ns for path in folder.rglob(name)]
    while [path.stat().st_mtime_ns for path in folder.rglob(name)] in ([], before):
        assert program.poll(timeout=0.01) is None, program.communicate()


def result(run):
    """What a run learned, the state of its callbacks, and its tables without what the clock says."""
    checkpoint = torch.load(last_generation(run / "checkpoints"), weights_only=True)
    tables = []
    for name in ("metrics.csv", "evaluations.csv"):
        with (run / name).open(newline="") as file:
            tables.append([{key: value for key, value in row.items() if not key.startswith("time/")} for row in csv.DictReader(file)])
    weights = {name: value.tolist() for name, value in checkpoint["state_dict"].items()}
    return weights, checkpoint["callbacks"].get("MoreWind"), checkpoint["lightning_rl"]["parameters"], tables


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name == "auxiliary_head" else pytest.mark.slow) for name in EXTENSIONS]
)
def test_an_extension_that_is_killed_and_started_again_learns_the_same_weights_bit_for_bit(name, tmp_path):
    script, whole, killed = str(EXAMPLES / f"{name}.py"), tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    undisturbed, program = Apart(script, whole), Apart(script, killed)
    for file in ("last.ckpt", "last.ckpt", "metrics.csv"):  # the second checkpoint lacks what is logged after it
        changes(program, killed, file)
    program.kill()
    assert program.wait() == -signal.SIGKILL
    run = next(killed.rglob("checkpoints")).parent
    before = result(run)[0]
    again = Apart(script, killed)
    assert (undisturbed.wait(), again.wait()) == (0, 0), again.communicate()
    assert "continued at" in again.communicate()[0]
    assert result(run) == result(next(whole.rglob("checkpoints")).parent)
    assert result(run)[0][EXTENSIONS[name]] != before[EXTENSIONS[name]]
