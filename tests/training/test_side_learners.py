"""Behavioural cloning beside reinforcement learning."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from lightning_rl import DQN, GRU, IQL, LSTM, PPO, SAC, TD3
from lightning_rl.distributions import make_distribution
from lightning_rl.errors import SettingError
from lightning_rl.training.side_learners import CloningConfig
from tests.experts import at_random
from tests.fitting import ALL, UPDATES, Rows, fit, tiny, weights

CLONING = [algorithm for algorithm in ALL if algorithm is not DQN]
every_algorithm = pytest.mark.parametrize("algorithm", CLONING)


def shown(algorithm):
    """Demonstrations for a tiny algorithm."""
    return at_random(tiny(algorithm).env.id, "{}")


def steps_made(algorithm, settings, **others):
    """How many gradient steps there were towards demonstrations, and what was logged."""
    model, logger = tiny(algorithm, behavioral_cloning={"demo_path": shown(algorithm), **settings}, log_interval=1, **others), Rows()
    fit(model, logger=logger)
    state, *_ = model.side_learners[1].optimizer.state.values()
    return int(state["step"]), [row for _, row in logger.rows]


@pytest.mark.thorough
def test_on_policy_all_demonstrations_come_three_times_after_each_iteration():
    rows = sum(len(episode.reward) for episode in shown(PPO))
    made, logged = steps_made(PPO, {})
    assert made == 6 * 3 * (rows // 8)  # iterations, passes, minibatches of eight rows
    assert steps_made(PPO, {"n_epochs": 1, "samples_per_update": 16})[0] == 6 * 2
    assert steps_made(PPO, {"batch_size": 4, "n_epochs": 2, "samples_per_update": 8})[0] == 6 * 2 * 2
    assert logged[-1]["behavioral_cloning/loss"] < logged[0]["behavioral_cloning/loss"]


@pytest.mark.thorough
def test_off_policy_one_minibatch_follows_each_update():
    assert steps_made(SAC, {})[0] == UPDATES[SAC]
    assert steps_made(SAC, {"n_epochs": 2, "samples_per_update": 16})[0] == UPDATES[SAC] * 2 * 2
    rows = sum(len(episode.reward) for episode in shown(SAC))
    assert steps_made(SAC, {"samples_per_update": 0})[0] == UPDATES[SAC] * (rows // 8)


@pytest.mark.thorough
def test_with_offline_learning_one_minibatch_follows_each_update_and_steps_are_updates(capsys):
    assert steps_made(IQL, {})[0] == 96
    made, logged = steps_made(IQL, {"steps": 48}, learning_rate=0.01)
    assert made == 48  # in three iterations of 16, which began before it
    assert [row["behavioral_cloning/learning_rate"] for row in logged][-1] == 0
    assert "the policy imitates them over 48 updates" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(("algorithm", "made"), [(PPO, 6 * 3 * (6 // 2)), (SAC, UPDATES[SAC])])
def test_with_a_memory_a_pass_has_all_sequences(algorithm, made):
    """Six episodes of three steps are six sequences, two of which fill a minibatch of eight rows."""
    assert steps_made(algorithm, {"batch_size": 8}, memory=LSTM(4, 4))[0] == made


@every_algorithm
def test_the_learning_rate_falls_to_nothing_over_the_steps(algorithm):
    settings = {"learning_rate": 0.01, "behavioral_cloning": {"demo_path": shown(algorithm), "strength": 0.5, "steps": 64}}
    model, logger = tiny(algorithm, log_interval=1, **settings), Rows()
    fit(model, logger=logger)
    rates = {step: row["behavioral_cloning/learning_rate"] for step, row in logger.rows if "behavioral_cloning/learning_rate" in row}
    assert rates[48] == pytest.approx(0.005 * (1 - 32 / 64))  # an iteration has 16 steps, and its rate is that of its beginning
    assert rates[96] == 0
    assert "behavioral_cloning/loss" in logger.rows[2][1] and "behavioral_cloning/loss" not in logger.rows[-1][1]


@pytest.mark.thorough
def test_steps_that_the_first_iteration_has_are_followed_in_it():
    once = steps_made(PPO, {})[0] // 6  # of six iterations of 16 steps
    assert [steps_made(PPO, {"steps": steps}, learning_rate=0.01)[0] // once for steps in (1, 16, 17, 32)] == [1, 1, 2, 2]


def with_and_without_memory():
    """Each algorithm, and the memories of one that acts on and one that replays what it sees; those of the others are slow."""
    for algorithm, memory in product(CLONING, (None, LSTM(8, 4), GRU(8, 4))):
        fast = memory is None or (algorithm, type(memory)) in ((PPO, LSTM), (SAC, GRU))
        yield pytest.param(algorithm, memory, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.thorough
@pytest.mark.parametrize(("algorithm", "memory"), with_and_without_memory())
def test_a_policy_that_is_paid_nothing_learns_what_is_shown(algorithm, memory):
    settings = {"learning_rate": 0.01, "reward_signals": {"extrinsic": {"strength": 0.0}}, "net_arch": [16]}
    if algorithm is SAC:
        settings["ent_coef"] = 0.0
    settings["behavioral_cloning"] = {"demo_path": [each._replace(action=0 * each.action) for each in shown(algorithm)], "n_epochs": 4}
    model, logger = tiny(algorithm, memory=memory, log_interval=1, max_env_steps=320, **settings), Rows()
    fit(model, logger=logger)
    last = logger.rows[-1][1]
    if algorithm is TD3:
        assert last["behavioral_cloning/mean_abs_deviation"] < 0.1
    else:
        assert last["behavioral_cloning/accuracy"] > 0.9


def test_a_value_function_does_not_follow_demonstrations():
    model = tiny(PPO, share_encoder=False, behavioral_cloning={"demo_path": shown(PPO)})
    alone = tiny(PPO, share_encoder=False)
    cloning, seen = model.side_learners[1], []
    end_iteration = cloning.end_iteration

    def watched(algorithm):
        before = [each.clone() for each in algorithm.network.critic.parameters()]
        end_iteration(algorithm)
        seen.append(all(map(torch.equal, before, algorithm.network.critic.parameters())))

    cloning.end_iteration = watched
    fit(model)
    fit(alone)
    assert seen == [True] * 6
    assert not torch.equal(weights(model), weights(alone))


def test_the_error_of_drawn_actions_is_that_of_the_mean_and_of_the_deviation_together():
    space = Box(np.float32([-1, -3]), np.float32([1, 3]))
    gaussian = make_distribution(space, log_std_init=np.log(0.5))
    x, action = torch.tensor([[0.5, 3.0]]).expand(200_000, 2), torch.tensor([[1.0, -1.5]])
    error = gaussian.drawn_error(x, action, torch.Generator().manual_seed(0))
    # (0.5 − 1)² + 0.5², and a third of 3 − (−1.5) and of σ, squared
    assert error.mean(0).tolist() == pytest.approx([0.5, 1.5**2 + (0.5 / 3) ** 2], rel=0.01)
    x = torch.tensor([[4.0, 4.0]], requires_grad=True)
    half = make_distribution(Box(np.float32([-3, -np.inf]), np.float32([3, np.inf])), log_std_init=-20)
    half.drawn_error(x, torch.tensor([[1.0, 1.0]]), torch.Generator().manual_seed(0)).sum().backward()
    assert x.grad.flatten().tolist() == pytest.approx([2 * 3 / 9, 2 * 3])  # only the first has bounds to be scaled by


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"demo_path": "nowhere/expert-v0"}, "nowhere/expert-v0"),
        ({"demo_path": "a/b-v0", "strenght": 1.0}, "behavioral_cloning.strenght is not a setting; did you mean strength"),
        ({}, "behavioral_cloning.demo_path is missing"),
        ({"demo_path": []}, "behavioral_cloning.demo_path: there are no demonstrations to imitate"),
        ({"demo_path": 3}, "behavioral_cloning.demo_path must be the name of a dataset, got 3"),
        ({"strength": -1}, "behavioral_cloning.strength must be >= 0, got -1"),
        ({"steps": 0.5}, "behavioral_cloning.steps must be an integer"),
        ({"n_epochs": 0}, "behavioral_cloning.n_epochs must be >= 1, got 0"),
        ({"batch_size": 0}, "behavioral_cloning.batch_size must be >= 1, got 0"),
        ("a/b-v0", r"behavioral_cloning must be CloningConfig\(…\) or a mapping of its settings"),
    ],
)
def test_settings_that_do_not_allow_cloning_are_reported_in_one_line(setting, said, tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(SettingError, match=said):
        fit(tiny(PPO, behavioral_cloning=setting))


def test_sequences_longer_than_minibatches_are_reported():
    with pytest.raises(SettingError, match=r"memory.sequence_length 8 is longer than behavioral_cloning.batch_size 4"):
        fit(tiny(PPO, memory=LSTM(4, 8), behavioral_cloning={"demo_path": shown(PPO), "batch_size": 4}))


def test_values_of_actions_cannot_follow_demonstrations():
    with pytest.raises(SettingError, match="behavioral_cloning is not a setting of DQN"):
        tiny(DQN, behavioral_cloning=CloningConfig("a/b-v0"))


class Forgetful(PPO):
    """Its optimizer is one alone."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.network.parameters())


@pytest.mark.parametrize("beside", [{"reward_signals": {"rnd": {}}}, {"behavioral_cloning": {"demo_path": "a/b-v0"}}])
def test_an_algorithm_whose_optimizers_leave_no_room_for_others_is_reported(beside):
    fit(tiny(Forgetful))
    with pytest.raises(SettingError, match=r"Forgetful.configure_optimizers must return self.with_side_learners\("):
        fit(tiny(Forgetful, **beside))


class OfItsOwn(PPO):
    """An optimizer over parameters as they are."""

    def configure_optimizers(self):
        return self.with_side_learners(torch.optim.SGD(self.network.parameters()))


def test_cloning_follows_any_optimizer():
    before = weights(tiny(OfItsOwn))
    model = tiny(OfItsOwn, reward_signals={"extrinsic": {"strength": 0.0}}, behavioral_cloning={"demo_path": shown(PPO)})
    fit(model)
    moved = model.side_learners[1].optimizer.state
    assert {id(each) for each in moved} <= {id(each) for each in model.network.parameters()}
    assert not torch.equal(weights(model), before)
