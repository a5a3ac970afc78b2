"""The environment's reward: clipped, scaled, and divided by the deviation of the return so far."""

import numpy as np
import pytest
import torch

from lightning_rl.rewards.signal import Extrinsic
from lightning_rl.types import Experience, Rollout


def make_rollout(reward, terminated=None, truncated=None, valid=None):
    """Return a rollout of rewards `[T, N]` and flags; the rest is empty."""
    flag = torch.zeros(reward.shape, dtype=torch.bool)
    terminated, truncated = (flag if given is None else given for given in (terminated, truncated))
    valid = ~flag if valid is None else valid
    return Rollout((), (), (), reward.unsqueeze(-1), (), (), terminated, truncated, valid, flag)


def paid(signal, rollout):
    """Return the rewards of a signal after it gathered a rollout."""
    signal.gather(rollout)
    return signal(Experience((), (), (), rollout.reward))


def stream():
    """Return rewards and episode ends `[8, 2]`."""
    rng = np.random.default_rng(7)
    rng.random((9, 2, 3))  # the observations of the recorded run
    reward = (6 * rng.random((8, 2)) - 1).astype(np.float32)
    return torch.as_tensor(reward), torch.as_tensor(rng.random((8, 2)) < 0.3)


# `ret_rms`, `returns` and the last normalized reward of stable_baselines3 2.9.2's VecNormalize(gamma=0.9) around a VecEnv that
# plays `stream()`
SB3_COUNT, SB3_MEAN, SB3_VAR = 16.0001, 3.359148458475987, 7.800138018418277
SB3_RETURNS = [6.0804590582847595, 0.2900242209434509]
SB3_LAST = [1.7211555, 0.10384441]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("steps", [1, 3, 4, 8])
def test_return_statistics_equal_stable_baselines3_in_rollouts_of_any_length(steps, end):
    signal = Extrinsic(gamma=0.9, normalize=True)
    for reward, done in zip(*(x.split(steps) for x in stream()), strict=True):
        scaled = paid(signal, make_rollout(reward, **{end: done}))
    statistics = signal.returns.statistics
    assert statistics.count.item() == pytest.approx(SB3_COUNT, abs=1e-9)
    assert statistics.mean.item() == pytest.approx(SB3_MEAN, abs=1e-6)
    assert statistics.var.item() == pytest.approx(SB3_VAR, abs=1e-6)
    assert signal.returns.running.tolist() == pytest.approx([0.9 * x for x in SB3_RETURNS], abs=1e-6)
    assert scaled.shape == (len(reward), 2, 1)
    assert scaled[-1].flatten().tolist() == pytest.approx(SB3_LAST, abs=1e-6)


@pytest.mark.parametrize("row", ["resets", "starts"])
def test_the_return_of_an_abandoned_episode_does_not_go_on_in_the_next_one(row):
    signal = Extrinsic(gamma=0.5, normalize=True)
    signal.gather(make_rollout(torch.tensor([[8.0], [8.0]])))
    assert signal.returns.running.tolist() == [6.0]  # ½ (8 + ½ 8)
    reward, start = torch.tensor([[0.0], [1.0], [1.0]]), torch.tensor([[row == "starts"], [row == "resets"], [False]])
    after = make_rollout(reward, valid=torch.tensor([[row == "starts"], [True], [True]]))
    signal.gather(after._replace(episode_start=start))
    assert signal.returns.running.tolist() == [0.75]  # ½ (1 + ½ 1)


@pytest.mark.parametrize("stored", [[], [2.0], [2.0, 6.0]], ids=["new", "of_fewer_columns", "of_all"])
def test_each_actor_continues_its_own_return_in_whichever_column_its_rollout_is(stored):
    signal = Extrinsic(gamma=0.5, normalize=True)
    signal.set_state({"running": np.array(stored, np.float32)})
    first, second = [*stored, 0.0, 0.0][:2]
    signal.gather(make_rollout(torch.tensor([[8.0, 4.0, 2.0]]))._replace(actors=torch.tensor([1, 1, 0])))
    # actor 1 was paid 8 and then 4: ½ (4 + ½ 8); actor 0 was paid 2: ½ 2
    assert signal.returns.running.tolist() == [1 + first / 2, 4 + second / 4]
    signal.gather(make_rollout(torch.tensor([[0.0, 0.0, 16.0]]))._replace(actors=torch.tensor([0, 0, 1])))
    assert signal.returns.running.tolist() == [0.25 + first / 8, 10 + second / 8]
    returns = [8 + second, 8 + second / 2, 2 + first, 1 + first / 2, 0.5 + first / 4, 20 + second / 4]
    assert signal.returns.statistics.mean.item() == pytest.approx(np.mean(returns), abs=1e-3)


def test_stored_returns_that_are_no_row_are_refused():
    with pytest.raises(ValueError, match=r"returns of environments have shape \(1, 2\)"):
        Extrinsic(normalize=True).set_state({"running": np.zeros((1, 2), np.float32)})


def test_invalid_rows_are_in_no_statistic():
    # NEXT_STEP: environment 0 ends at row 1, and its row 2 only resets it
    reward = torch.tensor([[1.0, 1.0], [2.0, 1.0], [100.0, 1.0], [4.0, 1.0]])  # what a signal may pay for a reset
    done, valid = torch.zeros(4, 2, dtype=torch.bool), torch.ones(4, 2, dtype=torch.bool)
    done[1, 0], valid[2, 0] = True, False
    signal = Extrinsic(gamma=0.5, normalize=True)
    paid(signal, make_rollout(reward, terminated=done, valid=valid))
    returns = torch.tensor([1, 2.5, 4, 1, 1.5, 1.75, 1.875], dtype=torch.float64)
    assert signal.returns.statistics.count.item() == pytest.approx(7, abs=1e-3)
    assert signal.returns.statistics.mean.item() == pytest.approx(returns.mean().item(), abs=1e-4)
    assert signal.returns.running.tolist() == pytest.approx([2, 0.9375])


def test_scaled_rewards_are_not_centred_and_are_clipped_at_10():
    signal = Extrinsic(gamma=0.0, normalize=True)
    reward = torch.cat([torch.ones(999, 1), torch.full((1, 1), 101.0)])
    scaled = paid(signal, make_rollout(reward)).flatten()
    # variance 100² · 0.001 · 0.999
    assert scaled[0].item() == pytest.approx(1 / 9.99**0.5, rel=1e-4)
    assert scaled[-1].item() == 10


def test_statistics_are_saved_with_the_signal():
    saved, loaded = Extrinsic(normalize=True), Extrinsic(normalize=True)
    paid(saved, make_rollout(stream()[0]))
    loaded.load_state_dict(saved.state_dict())
    assert loaded.returns.statistics.var == saved.returns.statistics.var != 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [-3.0, 0.5, 8.0]),
        ({"scale": 0.1}, [-0.3, 0.05, 0.8]),
        ({"clip": 1.0}, [-1.0, 0.5, 1.0]),
        ({"clip": 1.0, "scale": 2.0}, [-2.0, 1.0, 2.0]),
    ],
)
def test_rewards_are_clipped_and_then_scaled(settings, expected):
    reward = torch.tensor([[-3.0], [0.5], [8.0]])
    rollout = make_rollout(reward.clone())
    assert Extrinsic(**settings)(Experience((), (), (), rollout.reward)).flatten().tolist() == pytest.approx(expected)
    assert torch.equal(rollout.reward.squeeze(-1), reward)


def test_a_rescaled_reward_is_normalized_to_the_same_size():
    one, hundred = Extrinsic(gamma=0.9, normalize=True), Extrinsic(gamma=0.9, scale=100.0, normalize=True)
    reward, done = stream()
    a, b = (paid(signal, make_rollout(reward, terminated=done)) for signal in (one, hundred))
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
