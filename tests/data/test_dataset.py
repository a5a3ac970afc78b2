"""When a replay dataset acts, when it gives a batch to learn from, and what is in it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from lightning_rl import DQN
from lightning_rl.data.collector import Collector
from lightning_rl.data.dataset import ReplayDataset, ReplaySettings
from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.segments import SegmentStore
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.distributions import Categorical
from lightning_rl.envs.stepping import Stepper
from lightning_rl.errors import SettingError
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.networks.memory import NoMemory
from lightning_rl.networks.off_policy import Actor
from lightning_rl.rewards.signal import Extrinsic
from lightning_rl.spaces import Spaces
from lightning_rl.types import Transition
from tests.data.recordings import MODES, diary, starts
from tests.environments import Scripted, ScriptedBox, ScriptedDict
from tests.fitting import tiny


class Always(PolicyNetwork):
    """Takes action 1."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.distribution = NoMemory(), Categorical(Scripted.action_space)
        self.unused = nn.Parameter(torch.zeros(()))

    def sample(self, obs, memory, episode_start, action_mask, *, generator):
        return torch.ones(len(episode_start), dtype=torch.long), memory


class Run:
    """A dataset on real environments that write down each of their steps, and a learner that writes down its batches.

    `story`: an `s` for each environment step and a `b` for each batch, in their order; `actions`: of all environment steps.
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        kind: type[Scripted] = Scripted,
        mode: str = "SAME_STEP",
        length: int = 10,
        period: int = 3,
        ranks: int = 1,
        network: nn.Module | None = None,
        config: ReplayConfig = ReplayConfig(),
        gammas: Iterable[tuple[float, float]] = ((0.9, 1.0),),
        resumed: bool = False,
        **settings: Any,
    ) -> None:
        self.story, self.actions, self.batches, self.ranks = "", [], [], ranks
        run = self

        class Diarist(kind):
            def step(self, action):
                run.story += "s"
                run.actions.append(action)
                return super().step(action)

        envs = [lambda i=i: Diarist(period=period, first_episode=100 * i) for i in range(num_envs)]
        stepper = Stepper(SyncVectorEnv(envs, autoreset_mode=AutoresetMode[mode], copy=False), AutoresetMode[mode])
        self.collector = Collector(stepper, Spaces(kind.observation_space, kind.action_space), network or Always(), length, 0, False)
        standard = {"buffer_size": 1000, "batch_size": 4, "learning_starts": 0, "train_freq": 1, "gradient_steps": 1}
        self.settings = ReplaySettings(**{**standard, "steps_per_iteration": length, "n_steps": 1, "warmup": "random", **settings})
        action = np.zeros_like(kind.action_space.sample())
        n_steps = self.settings.n_steps
        self.buffer = ReplayBuffer(kind.observation_space, action, self.settings.buffer_size, num_envs, n_steps=n_steps, config=config)
        signals = {f"signal {k}": Extrinsic(gamma, scale) for k, (gamma, scale) in enumerate(gammas)}
        self.dataset = ReplayDataset(self.collector, self.buffer, signals, self.settings, torch.device("cpu"), 100, ranks, resumed)

    def iterate(self, iterations: int, progress: float = 0.0) -> Run:
        for iteration in islice(self.dataset, iterations):
            self.dataset.begin_iteration(self.ranks * self.collector.env_steps, progress)
            for batch in iteration:
                self.story += "b"
                self.batches.append(batch)
            self.dataset.end_iteration()
        return self

    def told(self) -> str:
        """The story, step by step of all environments."""
        return self.story.replace("s" * self.collector.num_envs, " " + "s" * self.collector.num_envs).strip()


# ---------------------------------------------------------------- when


@pytest.mark.parametrize(
    "num_envs, settings, story",
    [
        (1, {}, "sb sb sb sb sb sb sb sb sb sb"),
        (1, {"gradient_steps": 2, "learning_starts": 5}, "s s s s s sbb sbb sbb sbb sbb"),
        (1, {"train_freq": 2, "gradient_steps": 3, "learning_starts": 4}, "s s s s s sbbb s sbbb s sbbb"),
        (1, {"train_freq": 4, "gradient_steps": -1}, "s s s sbbbb s s s sbbbb s s"),
        (1, {"gradient_steps": -1}, "sb sb sb sb sb sb sb sb sb sb"),
        (1, {"learning_starts": 10}, "s s s s s s s s s s"),
        (3, {"learning_starts": 24}, "sss sss sss sss sss sss sss sss sssbbb sssbbb"),
        (3, {"learning_starts": 22, "gradient_steps": -1}, "sss sss sss sss sss sss sss sssbb sssbbb sssbbb"),
        (3, {"train_freq": 3}, "sssb sssb sssb sssb sssb sssb sssb sssb sssb sssb"),
        # 4, 8, 12, 16 … steps hold 0, 1, 2, 2, 3, 4, 4, 5, 6, 6 times 6
        (4, {"train_freq": 6}, "ssss ssssb ssssb ssss ssssb ssssb ssss ssssb ssssb ssss"),
        (4, {"train_freq": 6, "gradient_steps": 2}, "ssss ssssbb ssssbb ssss ssssbb ssssbb ssss ssssbb ssssbb ssss"),
    ],
)
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_acting_and_learning_take_turns(num_envs, settings, story, iterations):
    run = Run(num_envs, length=10 // iterations, **settings)
    assert run.iterate(iterations).told() == story


def test_a_batch_is_drawn_only_after_learning_from_the_one_before():
    run = Run(gradient_steps=3)
    iteration = next(iter(run.dataset))
    run.dataset.begin_iteration(0, 0.0)
    drawn = []
    for _ in iteration:
        drawn.append((len(run.buffer), run.buffer.drawn // 4))
    assert drawn == [(t, 3 * (t - 1) + i) for t in range(1, 11) for i in (1, 2, 3)]


def test_a_row_can_be_drawn_as_soon_as_it_happened():
    run = Run(config=ReplayConfig(replace=False), batch_size=7, learning_starts=6).iterate(1)
    assert {tuple(obs) for obs in run.batches[0].obs.int().tolist()} == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)}


@pytest.mark.variants
@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("train_freq, gradient_steps, batches_per_step", [(1, 1, 1), (1, 4, 4), (4, -1, 1), (5, 2, 0.4), (50, 10, 0.2)])
def test_batches_per_environment_step_are_kept_on_average(num_envs, mode, train_freq, gradient_steps, batches_per_step):
    run = Run(num_envs, mode=mode, length=20, learning_starts=30, train_freq=train_freq, gradient_steps=gradient_steps)
    run.iterate(8)
    steps, batches = run.story.count("s"), run.story.count("b")
    assert steps == run.collector.env_steps == (20 * 8 if mode != "NEXT_STEP" else 20 * 8 * 3 // 4) * num_envs
    once = train_freq * batches_per_step
    exact = (steps - 30) * batches_per_step
    # rows that only reset count until the iteration ends, then no more: a fourth of 20 of each environment
    ahead = 5 * num_envs * batches_per_step if mode == "NEXT_STEP" else 0
    assert exact - once < batches <= exact + ahead


@pytest.mark.parametrize("num_envs", [1, 3])
def test_nothing_is_learned_before_learning_starts(num_envs):
    run = Run(num_envs, learning_starts=50).iterate(60 // num_envs // 10 + 2)
    assert 50 <= run.story.index("b") - 1 < 50 + num_envs
    late = Run(num_envs, learning_starts=10_000).iterate(5)
    assert late.batches == [] and len(late.buffer) == 50 * num_envs


@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_warm_up_acts_at_random_until_learning_starts(num_envs):
    run = Run(num_envs, learning_starts=60, warmup="random").iterate(8)
    assert np.bincount(run.actions[:60], minlength=3).min() >= 10  # of three actions, 20 times each on average
    assert set(run.actions[60:]) == {1}
    assert set(Run(num_envs, learning_starts=60, warmup="policy").iterate(8).actions) == {1}


def test_random_actions_are_kept_as_the_policy_would_sample_them():
    spaces = Spaces(ScriptedBox.observation_space, ScriptedBox.action_space)
    run = Run(3, kind=ScriptedBox, network=Actor(spaces, "squashed_normal", nn.Identity(), net_arch=[4]), learning_starts=15, period=50)
    run.iterate(1)
    stored = run.buffer.layout.row.action.reshape(3, -1, 2)[:, :10].swapaxes(0, 1).reshape(30, 2)
    assert np.abs(stored[:15]).max() > 0.9 and np.abs(stored).min() > 0
    assert np.allclose(stored, np.array(run.actions), atol=1e-6)  # the environment's actions lie between -1 and 1 too


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize("gradient_steps", [1, -1])
def test_a_resumed_run_fills_its_buffer_again_and_catches_up_on_nothing(num_envs, gradient_steps):
    run = Run(num_envs, length=5, learning_starts=20, gradient_steps=gradient_steps, resumed=True)
    run.collector.env_steps = 1000
    run.iterate(12)
    steps = 5 * 12 * num_envs
    assert run.story[:20] == "s" * 20 and run.story.count("b") == steps - 20
    assert run.told().split()[-1] == "s" * num_envs + "b" * num_envs
    assert set(run.actions) == {1}  # its policy acts, not chance


@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_resumed_run_with_its_buffer_learns_at_once_but_catches_up_on_nothing(num_envs, tmp_path):
    before = Run(num_envs, length=5, learning_starts=20).iterate(6)
    run = Run(num_envs, length=5, learning_starts=20, resumed=True)
    SegmentStore(tmp_path).load(SegmentStore(tmp_path).save(before.buffer), run.buffer)
    run.collector.env_steps = 1000
    assert run.iterate(2).told() == " ".join(["s" * num_envs + "b" * num_envs] * 10)


def test_demonstrations_do_not_hasten_learning():
    run = Run(learning_starts=6)
    shown = {"obs": [7, 7], "action": 0, "reward": 1.0, "next_obs": [7, 8], "terminated": True, "truncated": False}
    run.buffer.extend([shown] * 50, lambda action: action)
    assert run.iterate(1).told() == "s s s s s s sb sb sb sb"
    assert len(run.buffer) == 60


def test_a_resumed_run_remembers_when_it_learned():
    run = Run(train_freq=7, length=5)
    assert run.iterate(2).iterate(3).told() == Run(train_freq=7, length=25).iterate(1).told()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_share_the_steps_before_learning(ranks):
    run = Run(2, ranks=ranks, learning_starts=24, warmup="random", period=50).iterate(2)
    alone = Run(2, learning_starts=24 // ranks, warmup="random", period=50).iterate(2)
    assert run.story == alone.story and run.story.startswith("s" * (24 // ranks + 2) + "bb")
    assert run.actions == alone.actions and set(run.actions[24 // ranks :]) == {1}


def test_a_continued_run_on_several_ranks_fills_its_buffers_again_together():
    run = Run(2, ranks=2, learning_starts=24, resumed=True)
    run.collector.env_steps = 500  # 1000 of both
    run.iterate(2)
    assert run.story.startswith("s" * 14 + "bb") and run.story.count("b") == 40 - 12


# ---------------------------------------------------------------- what


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("layout", [False, True])
def test_rewards_and_discounts_of_two_signals_are_those_of_a_plain_loop(n_steps, layout):
    signals = ((0.9, 1.0), (0.5, -2.0))
    config = ReplayConfig(optimize_memory_usage=layout)
    run = Run(length=40, period=4, gammas=signals, n_steps=n_steps, batch_size=32, learning_starts=10, config=config).iterate(1)
    rows = diary(Scripted(period=4), np.array(run.actions), "SAME_STEP")
    expected = {tuple(start.obs): start for start in starts(rows, n_steps)}
    seen = set()
    for batch in run.batches:
        assert isinstance(batch, Transition)
        assert batch.reward.shape == batch.discount.shape == (32, 2)
        assert {batch.reward.dtype, batch.discount.dtype, batch.weight.dtype, batch.next_obs.dtype} == {torch.float32}
        for i in range(32):
            start = expected[tuple(batch.obs[i].tolist())]
            assert batch.next_obs[i].tolist() == start.next_obs.tolist() and int(batch.action[i]) == start.action
            for s, (gamma, scale) in enumerate(signals):
                reward = sum(scale * gamma**k * r for k, r in enumerate(start.reward))
                assert float(batch.reward[i, s]) == pytest.approx(reward, rel=1e-5, abs=1e-4)
                assert float(batch.discount[i, s]) == pytest.approx(gamma**start.steps if start.steps else 0.0, rel=1e-6)
            seen.add(start.steps)
    assert seen == set(range(n_steps + 1))


def test_rewards_and_discounts_by_hand():
    class Zero(Always):
        def sample(self, *args, **kwargs):
            return torch.zeros(1, dtype=torch.long), ()

    run = Run(network=Zero(), gammas=((0.5, 1.0), (0.1, 10.0)), n_steps=2, batch_size=50, learning_starts=6, warmup="policy").iterate(1)
    batch = run.batches[-1]
    found = {tuple(obs): i for i, obs in enumerate(batch.obs.int().tolist())}
    # the episodes pay 0, 1, 2 and terminate; 10, 11, 12 and are truncated
    by_hand = {
        (0, 0): ([0 + 0.5 * 1, 0 + 1.0], [0.25, 0.01]),
        (0, 1): ([1 + 0.5 * 2, 10 + 2.0], [0, 0]),
        (0, 2): ([2, 20], [0, 0]),
        (1, 1): ([11 + 0.5 * 12, 110 + 12], [0.25, 0.01]),
        (1, 2): ([12, 120], [0.5, 0.1]),
    }
    for place, (reward, discount) in by_hand.items():
        assert batch.reward[found[place]].tolist() == pytest.approx(reward, rel=1e-5)
        assert batch.discount[found[place]].tolist() == pytest.approx(discount, rel=1e-6)


def test_rewards_are_kept_as_paid_and_scaled_by_what_is_known_when_they_are_drawn():
    run = Run(learning_starts=5)
    run.dataset.signals = {"extrinsic": Extrinsic(0.9, normalize=True)}
    run.iterate(1)
    returns, total = [], 0.0
    for row in diary(Scripted(), np.array(run.actions), "SAME_STEP"):
        total = row.reward + 0.9 * total
        returns.append(total)
        total = 0.0 if row.ended else total
    batch = run.iterate(1).batches[-1]  # the iteration under way is not merged yet
    paid = run.buffer.layout.row.reward[batch.rows]
    assert len(set(paid.tolist())) > 2
    assert batch.reward[:, 0].numpy() == pytest.approx(paid / np.std(returns), rel=1e-4)


def test_nested_observations_are_trees_of_tensors():
    batch = Run(kind=ScriptedDict, learning_starts=5).iterate(1).batches[-1]
    assert batch.next_obs["image"].dtype == torch.uint8 and batch.obs["where"]["t"].dtype == torch.int64
    assert (batch.obs["where"]["episode"] == batch.next_obs["where"]["episode"]).all()
    assert (batch.obs["where"]["t"] + 1 == batch.next_obs["where"]["t"]).all()


def test_errors_of_rows_become_their_priorities():
    run = Run(config=ReplayConfig(prioritized=True, alpha=1.0), batch_size=2, length=5).iterate(1)
    errors = torch.tensor([3.0, 3.0])
    run.dataset.buffer.update(run.batches[-1].rows, lambda: errors.mean(-1))
    tree = run.buffer.priorities.tree
    assert tree[run.batches[-1].rows].tolist() == pytest.approx([3.0, 3.0], rel=1e-5)
    assert sorted(tree[np.arange(5)].tolist())[:3] == [1, 1, 1]


def test_weights_follow_the_progress_of_the_run():
    run = Run(config=ReplayConfig(prioritized=True, alpha=1.0, beta=0.5), batch_size=5, length=5, learning_starts=4)
    iteration = next(iter(run.dataset))
    run.dataset.begin_iteration(0, 1.0)
    next(iteration)
    run.dataset.buffer.update(np.arange(5), lambda: torch.tensor([1.0, 1.0, 1.0, 1.0, 16.0]))
    for progress, least in ((1.0, 1 / 16), (0.0, 1 / 4)):  # β = 1, and ½
        run.dataset.begin_iteration(5, progress)
        batch = run.dataset.sample()
        assert 4 in batch.rows and set(batch.rows) != {4}
        assert float(batch.weight.min() / batch.weight.max()) == pytest.approx(least, rel=1e-4)


def test_metrics_are_size_picks_and_age():
    run = Run(2, length=10, learning_starts=16, batch_size=5, train_freq=2)
    assert run.dataset.metrics() == {"replay/size": 0, "replay/mean_picks": 0}
    run.iterate(1)
    # two batches of 5, from 20 rows, 10 in each ring
    assert len(run.batches) == 2
    slot = run.batches[-1].rows % 500
    assert run.dataset.metrics() == {"replay/size": 20, "replay/mean_picks": 0.5, "replay/age_mean": pytest.approx((9 - slot).mean())}


def test_a_run_resumed_without_its_buffer_has_no_age_before_it_draws_again():
    before = Run(learning_starts=4).iterate(1)
    assert before.dataset.metrics()["replay/age_mean"] < 10
    run = Run(learning_starts=4, resumed=True)
    run.dataset.set_own_state(before.dataset.own_state(), None)
    assert run.dataset.metrics() == {"replay/size": 0, "replay/mean_picks": 0}


def test_the_dataset_is_as_long_as_planned():
    assert len(Run().dataset) == 100


# ---------------------------------------------------------------- settings


def test_settings_out_of_range_are_refused_by_name():
    wholes = ("buffer_size", "batch_size", "train_freq", "steps_per_iteration", "n_steps")
    others = [("n_steps", 1.5), ("learning_starts", -1), ("gradient_steps", -2), ("gradient_steps", 0), ("warmup", "uniform")]
    for name, value in [*((name, 0) for name in wholes), *others]:
        with pytest.raises(SettingError, match=name):
            tiny(DQN, **{name: value})


def test_a_batch_larger_than_the_buffer_without_replacement_is_refused_with_a_way_out():
    run = Run(config=ReplayConfig(replace=False), batch_size=8, learning_starts=4)
    with pytest.raises(SettingError, match="8 rows without replacement of 5: raise learning_starts or lower batch_size"):
        run.iterate(1)
