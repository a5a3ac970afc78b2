"""TQC: SAC with quantiles."""

from __future__ import annotations

import pytest
import torch

from lightning_rl import SAC, TQC
from tests.algorithms.test_crossq import learned

BOX = "tests.environments:ScriptedBox-v0"


@pytest.mark.thorough
def test_tqc_is_sac_with_quantiles_of_which_the_greatest_are_dropped():
    assert torch.equal(learned(TQC), learned(SAC, n_quantiles=25, drop_quantiles=2))
    assert torch.equal(learned(TQC, n_quantiles=None, drop_quantiles=0), learned(SAC))
