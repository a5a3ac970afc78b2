"""Running statistics: equal to Stable-Baselines3's, exact in one batch or many, frozen outside `update`."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Tuple
from torch import nn

from lightning_rl.networks.normalization import NoNormalizer, ObservationNormalizer, RunningMeanStd, make_normalizer


def stream():
    """Observations `[9, 2, 3]`: a reset and 8 steps of 2 environments."""
    return torch.as_tensor((10 * np.random.default_rng(7).random((9, 2, 3)) - 2).astype(np.float32))


# `obs_rms` and the last normalized observation of stable_baselines3 2.9.2's VecNormalize around a VecEnv that plays `stream()`
SB3_COUNT = 18.0001
SB3_MEAN = [2.132154911218918, 3.326620217354451, 3.063347533529582]
SB3_VAR = [6.02019891724796, 10.323081458935118, 7.571526562993516]
SB3_LAST = [[0.38537812, 1.0540992, -0.52721524], [0.75386316, -1.4734422, -0.43138975]]


@pytest.mark.parametrize("rows", [1, 2, 5, 18])
def test_statistics_equal_stable_baselines3_in_one_batch_or_many(rows):
    statistics = RunningMeanStd((3,))
    for batch in stream().flatten(0, 1).split(rows):
        statistics.update(batch)
    assert statistics.count.item() == pytest.approx(SB3_COUNT, abs=1e-9)
    assert statistics.mean.tolist() == pytest.approx(SB3_MEAN, abs=1e-6)
    assert statistics.var.tolist() == pytest.approx(SB3_VAR, abs=1e-6)


def test_normalized_observations_equal_stable_baselines3():
    normalizer = ObservationNormalizer(Box(-20, 20, (3,)))
    normalizer.update(stream().flatten(0, 1))
    torch.testing.assert_close(normalizer(stream()[-1]), torch.tensor(SB3_LAST), rtol=0, atol=1e-6)


def test_variance_survives_a_mean_a_million_times_larger():
    statistics = RunningMeanStd()
    batch = 1e6 + torch.randn(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for part in batch.split(100):
        statistics.update(part)
    # the first 1e-4 of a row, at 0, adds 1e-4 · 1e12 / 1e4
    assert statistics.var.item() - 1e4 == pytest.approx(batch.var(correction=0).item(), abs=1e-3)


def test_merge_of_two_halves_equals_the_whole():
    whole, left, right = RunningMeanStd((3,)), RunningMeanStd((3,)), stream().flatten(0, 1)[7:].double()
    whole.update(stream().flatten(0, 1))
    left.update(stream().flatten(0, 1)[:7])
    left.merge(torch.tensor(11.0, dtype=torch.float64), right.mean(0), right.var(0, correction=0))
    torch.testing.assert_close(dict(left.state_dict()), dict(whole.state_dict()), rtol=1e-12, atol=0)


def update_on_one_of_two_ranks(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    statistics, rows = RunningMeanStd((3,)), stream().flatten(0, 1)
    for mine in ((rows[:3], rows[3:8])[rank], (rows[:0], rows[8:])[rank]):
        statistics.update(mine)
    torch.save(statistics.state_dict(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_with_different_rows_end_with_the_statistics_of_all_rows(tmp_path):
    torch.multiprocessing.start_processes(update_on_one_of_two_ranks, (str(tmp_path),), nprocs=2, start_method="fork")
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert states[0]["count"].item() == pytest.approx(SB3_COUNT, abs=1e-9)
    assert states[0]["mean"].tolist() == pytest.approx(SB3_MEAN, abs=1e-6)
    assert states[0]["var"].tolist() == pytest.approx(SB3_VAR, abs=1e-6)


def test_an_empty_batch_changes_nothing():
    statistics = RunningMeanStd((3,))
    statistics.update(torch.zeros(0, 3))
    assert (statistics.count.item(), statistics.mean.tolist(), statistics.var.tolist()) == (1e-4, [0] * 3, [1] * 3)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, lambda module: module.to(torch.bfloat16), nn.Module.float])
def test_a_cast_of_the_network_leaves_every_bit_of_the_moments(cast):
    network = nn.Sequential(ObservationNormalizer(Box(-20, 20, (3,))), nn.Linear(3, 1).double())
    network[0].update(1000 * stream().flatten(0, 1))
    before = {key: value.clone() for key, value in network[0].state_dict().items()}
    cast(network)
    assert network[1].weight.dtype != torch.float64
    assert before.keys() == network[0].state_dict().keys()
    for key, value in network[0].state_dict().items():
        assert value.dtype == torch.float64
        assert torch.equal(value, before[key])


def test_moments_follow_the_network_to_another_device():
    statistics = RunningMeanStd((2,)).to("meta")
    assert {buffer.device.type for buffer in statistics.buffers()} == {"meta"}


def test_normalized_observations_are_clipped_at_10():
    normalizer = ObservationNormalizer(Box(-np.inf, np.inf, (2,)))
    normalizer.update(torch.tensor([[-1.0, 5.0], [1.0, 5.0]]))
    # the second entry does not vary: any other value is far away
    assert normalizer(torch.tensor([[100.0, 5.5], [-0.5, -9.0]])).tolist() == [
        [10, pytest.approx(10)],
        [pytest.approx(-0.5, abs=1e-3), -10],
    ]


def test_only_real_vectors_are_normalized_each_by_its_own_statistics():
    space = Dict(b=Box(-9, 9, (1,)), a=Tuple([Box(-9, 9, (2,)), Discrete(3)]), image=Box(0, 255, (2, 2, 3), np.uint8))
    normalizer = ObservationNormalizer(space)
    obs = {
        "b": torch.tensor([[0.0], [4.0]]),
        "image": torch.full((2, 2, 2, 3), 9, dtype=torch.uint8),
        "a": (torch.tensor([[10.0, 1.0], [20.0, 3.0]]), torch.tensor([0, 2])),
    }
    for _ in range(50):
        normalizer.update(obs)
    seen = normalizer(obs)
    torch.testing.assert_close(seen["b"], torch.tensor([[-1.0], [1.0]]), rtol=0, atol=1e-3)
    torch.testing.assert_close(seen["a"][0], torch.tensor([[-1.0, -1.0], [1.0, 1.0]]), rtol=0, atol=1e-3)
    assert seen["a"][1] is obs["a"][1]
    assert seen["image"] is obs["image"]


def test_flags_are_normalized_as_zeros_and_ones():
    normalizer = ObservationNormalizer(Box(0, 1, (2,), dtype=bool))
    flags = torch.tensor([[True, False], [True, True], [True, False], [False, True]])
    normalizer.update(flags)
    torch.testing.assert_close(normalizer(flags), normalizer(flags.float()), atol=0, rtol=0)
    torch.testing.assert_close(normalizer(flags)[:, 1], torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("setting", ["running", "frozen"])
def test_sets_of_entities_are_not_normalized(setting):
    normalizer = make_normalizer(setting, Dict(agents=Box(-9, 9, (2, 3)), table=Box(-9, 9, (2, 3))), ["agents"])
    obs = {name: stream() for name in ("agents", "table")}
    normalizer.update(obs)
    seen = normalizer(obs)
    assert seen["agents"] is obs["agents"] and [len(list(part.buffers())) for part in normalizer.statistics] == [0, 3]
    assert seen["table"].mean(0).abs().max() < 1e-3


@pytest.mark.parametrize("mode", [True, False])
def test_forward_changes_no_statistic(mode):
    normalizer = ObservationNormalizer(Box(-20, 20, (3,))).train(mode)
    normalizer.update(stream()[0])
    before = {key: value.clone() for key, value in normalizer.state_dict().items()}
    normalizer(stream())
    assert all(torch.equal(value, before[key]) for key, value in normalizer.state_dict().items())


def test_statistics_are_saved_with_the_network():
    saved, loaded = ObservationNormalizer(Box(-20, 20, (3,))), ObservationNormalizer(Box(-20, 20, (3,)))
    saved.update(stream().flatten(0, 1))
    loaded.load_state_dict(saved.state_dict())
    torch.testing.assert_close(loaded(stream()), saved(stream()), rtol=0, atol=0)
    assert loaded.statistics[0].mean.tolist() == pytest.approx(SB3_MEAN, abs=1e-6)


def test_without_a_normalizer_observations_pass_unchanged():
    normalizer, obs = NoNormalizer(), {"a": torch.ones(2, 3)}
    normalizer.update(obs)
    assert normalizer(obs) is obs
    assert not normalizer.state_dict()
