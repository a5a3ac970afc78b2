"""TD3: how often its policy moves."""

from __future__ import annotations

import torch

from lightning_rl import TD3
from tests.algorithms.test_off_policy import at_updates, vector
from tests.fitting import tiny, weights


def test_the_policy_of_td3_waits_for_its_critics():
    model = tiny(TD3, policy_delay=3)
    actors, critics = [weights(model)], [vector(model.critic)]
    at_updates(model, lambda model: (actors.append(weights(model)), critics.append(vector(model.critic))))
    assert [k for k in range(1, 21) if not torch.equal(actors[k], actors[k - 1])] == list(range(3, 21, 3))
    assert [k for k in range(1, 21) if not torch.equal(critics[k], critics[k - 1])] == list(range(1, 21))
