"""CQL: the gap of its critics."""

from __future__ import annotations

import pytest
import torch

from lightning_rl import CQL, SAC
from tests.fitting import tiny

BOX = "tests.environments:ScriptedBox-v0"


def test_cql_without_its_gap_has_the_critic_loss_of_sac():
    model, plain = tiny(CQL, BOX, cql_alpha=0.0, backup_entropy=True), tiny(SAC, BOX)
    plain.load_state_dict(model.state_dict())
    batch = next(iter(next(iter(model.experience()))))
    model.noise = torch.Generator().manual_seed(0)
    noise = model.actions.noise(8, torch.Generator().manual_seed(1))
    ours, theirs = (each.critic_loss(batch, batch.obs, noise)[0].item() for each in (model, plain))
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_the_gap_of_cql_grows_where_critics_expect_more_of_actions_that_the_data_do_not_show():
    losses = {}
    for alpha in (0.0, 5.0):
        model = tiny(CQL, BOX, cql_alpha=alpha)
        batch = next(iter(next(iter(model.experience()))))
        model.noise = torch.Generator().manual_seed(0)
        loss, _, metrics = model.critic_loss(batch, batch.obs, model.actions.noise(8, torch.Generator().manual_seed(1)))
        losses[alpha] = loss.item(), metrics["conservative_gap"].item()
    gap = losses[5.0][1]
    assert gap == losses[0.0][1]
    assert losses[5.0][0] - losses[0.0][0] == pytest.approx(0.5 * 5 * 2 * gap, rel=1e-5)  # two critics
