"""What a run keeps of its updates for the log."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from lightning_rl.errors import SettingError
from lightning_rl.training.state import RunLog
from lightning_rl.types import tree_leaves
from tests.fitting import OFF_POLICY, PPO, fit, tiny, twins_slow


def begun(most):
    """An algorithm in an iteration after which the run is at `most` at the furthest, with a row due at 100."""
    model = tiny(PPO)
    model.own_optimizers, model.run.log_rows = [], RunLog(100, 0)
    model.run.log_rows.begin(most)
    return model


def test_a_row_has_the_means_of_numbers_and_of_what_functions_return():
    model, weight = begun(most=100), torch.tensor(3.0, requires_grad=True)
    for k in range(4):
        model.record(loss=torch.tensor(float(k)), **{"rewards/own": lambda k=k: weight * k})
    assert model.run.log_rows.is_due(100) and model.learner.metrics() == {"train/loss": 1.5, "rewards/own": 4.5}


def test_of_a_tensor_of_many_numbers_the_mean_is_kept():
    model = begun(most=100)
    model.record(many=torch.tensor([1.0, 2.0, 6.0]), flags=torch.tensor([True, False]))
    assert model.learner.metrics() == {"train/many": 3.0, "train/flags": 0.5}


def test_plain_numbers_are_recorded_as_tensors_are():
    model = begun(most=100)
    model.record(seen=3, share=0.5, done=True, ours=np.float64(1.5), theirs=torch.tensor(2), made=lambda: 7)
    model.record(seen=4)
    assert model.learner.metrics() == {
        "train/seen": 3.5, "train/share": 0.5, "train/done": 1.0, "train/ours": 1.5, "train/theirs": 2.0, "train/made": 7.0
    }  # fmt: skip


@pytest.mark.parametrize("most", [99, 100])
def test_a_value_that_is_not_a_number_is_refused_with_its_name(most):
    with pytest.raises(SettingError, match=r"^record\(phase='late'\): record takes tensors, numbers, and functions that return one$"):
        begun(most).record(phase="late")


def test_an_iteration_that_cannot_reach_the_next_row_calls_no_function():
    model = begun(most=99)
    model.record(loss=torch.tensor(1.0), never=lambda: pytest.fail("called"))
    model.record(loss=torch.tensor(2.0))
    assert model.recorded == {"loss": [torch.tensor(2.0)]} and not model.run.log_rows.is_due(99)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, *twins_slow(OFF_POLICY)])
@pytest.mark.parametrize("log_interval", [1, 96])
def test_no_batch_outlives_its_update(algorithm, log_interval):
    class Watched(algorithm):
        seen, alive = (), ()

        def end_update(self, batch):
            self.alive += (sum(each() is not None for each in self.seen),)
            self.seen += (weakref.ref(tree_leaves(batch.obs)[0]),)
            super().end_update(batch)

    model = tiny(Watched, log_interval=log_interval, **({"n_epochs": 12} if algorithm is PPO else {}))
    fit(model)
    assert len(model.alive) > 10 and max(model.alive) == 0
