"""Windows of n steps as a loss sees them, with a reward of 1 in each step and an episode that ends within some of them.

The cases are those of Stable-Baselines3's test: no end, a termination, a truncation, and n = 1, which is a buffer without windows.
"""

from __future__ import annotations

import pytest
import torch

from lightning_rl import DQN
from tests.fitting import fit, tiny

GAMMA, PERIOD = 0.99, 5


@pytest.mark.variants
@pytest.mark.parametrize("ending", ["termination", "truncation"])
@pytest.mark.parametrize("n_steps", [1, 3, 5])
def test_a_window_sums_the_rewards_up_to_the_end_and_bootstraps_unless_it_terminates(n_steps, ending):
    env = {"kwargs": {"ending": ending, "period": PERIOD, "clock": True}}
    model = tiny(DQN, "tests.environments:Endless-v0", env=env, n_steps=n_steps, gamma=GAMMA, learning_rate=0.0)
    batches, loss = [], model.loss
    model.loss = lambda batch: (batches.append(batch), loss(batch))[1]
    fit(model)

    t = torch.cat([batch.obs for batch in batches]).squeeze(-1) * PERIOD
    steps = (PERIOD - t).clamp(max=n_steps)
    over = (t + n_steps >= PERIOD) & (ending == "termination")
    assert sorted(set(t.round().int().tolist())) == [0, 1, 2, 3, 4]
    # 1 + γ + … + γᵏ⁻¹ over the k steps of a window
    torch.testing.assert_close(torch.cat([batch.reward for batch in batches]).squeeze(-1), (1 - GAMMA**steps) / (1 - GAMMA))
    torch.testing.assert_close(torch.cat([batch.discount for batch in batches]).squeeze(-1), torch.where(over, 0.0, GAMMA**steps))
    torch.testing.assert_close(torch.cat([batch.next_obs for batch in batches]).squeeze(-1), (t + steps) / PERIOD)
