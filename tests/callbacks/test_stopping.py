"""When a run ends before its time, worked by hand from the returns of its evaluations."""

from __future__ import annotations

import pytest

from lightning_rl import PPO, StopOnEvaluation
from lightning_rl.errors import SettingError
from tests.callbacks.evaluations import Scores
from tests.fitting import fit, tiny


@pytest.mark.parametrize(
    "returns, patience, evaluations",
    [
        ([1, 3, 2, 3, 4], 1, 3),  # 2 does not beat 3
        ([1, 3, 2, 3, 4], 2, 4),  # nor does the 3 after it: a tie is no improvement
        ([1, 3, 2, 3, 4], 3, 5),
        ([1, 2, 3, 4, 5], 1, 5),
        ([3, 3, 3, 3, 3], 1, 2),
        ([1, 3, 2, 4, 3], 2, 5),  # the 4 starts the count anew
    ],
)
def test_patience_counts_evaluations_in_a_row_that_are_not_better(returns, patience, evaluations):
    model = tiny(PPO, max_env_steps=80)
    fit(model, callbacks=[Scores(returns), StopOnEvaluation(patience=patience)])
    assert model.env_steps == 16 * evaluations


@pytest.mark.parametrize("stop_at, evaluations", [(3, 2), (3.5, 5), (1, 1), (9, 5), (None, 5)])
def test_a_run_stops_at_its_goal(stop_at, evaluations):
    model = tiny(PPO, max_env_steps=80)
    fit(model, callbacks=[Scores([1, 3, 2, 3, 4]), StopOnEvaluation(stop_at=stop_at)])
    assert model.env_steps == 16 * evaluations


def test_a_run_that_continues_remembers_its_best_evaluation(tmp_path):
    fit(tiny(PPO, max_env_steps=48), callbacks=[Scores([1, 3, 2]), StopOnEvaluation(patience=3)]).save_checkpoint(tmp_path / "a.ckpt")
    model = tiny(PPO, max_env_steps=160)
    fit(model, tmp_path / "a.ckpt", callbacks=[Scores([3, 2, 9]), StopOnEvaluation(patience=3)])
    assert model.env_steps == 48 + 2 * 16


def test_patience_is_at_least_one():
    with pytest.raises(SettingError, match=r"evaluation.patience must be >= 1, got 0"):
        StopOnEvaluation(patience=0)
