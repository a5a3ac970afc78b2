"""The files in examples/: what a user's own algorithm may do."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lightning_rl as lrl
from tests.fitting import fit, tiny, weights

EXAMPLES = Path(__file__).parent.parent / "examples"


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
