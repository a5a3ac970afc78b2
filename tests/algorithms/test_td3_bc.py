"""TD3+BC: its policy climbs the critic and clones."""

from __future__ import annotations

import pytest

from lightning_rl import TD3BC
from tests.fitting import tiny

BOX = "tests.environments:ScriptedBox-v0"


def test_td3_bc_climbs_the_critic_in_units_of_its_size_and_clones():
    model = tiny(TD3BC, BOX)
    batch = next(iter(next(iter(model.experience()))))
    obs = model.network.normalizer(batch.obs)
    action = model.network(obs)
    q = model.critic(obs, action)[0, :, 0, 0]
    by_hand = (action - batch.action).square().mean() - 2.5 * q.mean() / q.abs().mean()
    assert model.actor_loss(batch, obs).item() == pytest.approx(by_hand.item(), rel=1e-5)
