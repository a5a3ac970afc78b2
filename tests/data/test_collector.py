"""What a collector writes down of scripted episodes, row by row."""

from __future__ import annotations

from collections.abc import Callable

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Generator, Tensor, nn

from lightning_rl import A2C, PPO, EnvConfig
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.collector import Collector
from lightning_rl.data.episodes import EpisodeStatistics, Finished
from lightning_rl.data.rollout import make_batch, minibatches
from lightning_rl.distributions import Categorical
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.stepping import Stepper, make_stepper
from lightning_rl.networks.acting import PolicyNetwork
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.memory import NoMemory
from lightning_rl.spaces import Spaces
from lightning_rl.types import Rollout, tree_map
from tests.environments import Scripted

GAMMA = 0.9
SPACES = Spaces(Scripted.observation_space, Scripted.action_space)
MODES = ("SAME_STEP", "NEXT_STEP", "DISABLED")


def scripted_action(obs: Tensor) -> Tensor:
    """(episode + t) mod 3."""
    return obs.sum(-1).long() % 3


class Clock(PolicyNetwork):
    """Acts by the script; the value of an observation is 100 · episode + t unless another function is given."""

    def __init__(self, value: Callable[[Tensor], Tensor] = lambda obs: 100 * obs[..., 0] + obs[..., 1]) -> None:
        super().__init__()
        self.memory, self.distribution, self.of = NoMemory(), Categorical(Scripted.action_space), value
        self.unused = nn.Parameter(torch.zeros(()))

    def sample(self, obs, memory, episode_start, action_mask, *, generator):
        return scripted_action(obs), memory

    def evaluate(self, obs, action, memory=(), episode_start=None, action_mask=()):
        log_prob, entropy = self.distribution.evaluate(torch.zeros(*action.shape, 3), action)
        return log_prob, entropy, self.value(obs)

    def log_prob(self, obs, action, memory=(), episode_start=None, action_mask=()):
        return self.evaluate(obs, action)[0]

    def log_prob_and_value(self, obs, action, memory=(), episode_start=None, action_mask=()):
        return self.log_prob(obs, action), self.value(obs)

    def value(self, obs, memory=(), episode_start=None):
        return self.of(obs).unsqueeze(-1)


class ScriptedActorCritic(ActorCritic):
    """A real network that acts by the script."""

    def sample(self, obs, memory=(), episode_start=None, action_mask=(), *, deterministic=False, generator=None):
        return scripted_action(obs), memory


def collector(envs: list[Callable[[], gym.Env]], network: nn.Module, n_steps: int, mode: str = "SAME_STEP") -> Collector:
    stepper = Stepper(SyncVectorEnv(envs, autoreset_mode=AutoresetMode[mode], copy=False), AutoresetMode[mode])
    return Collector(stepper, SPACES, network, n_steps, seed=0)


def copied(rollout: Rollout) -> Rollout:
    """A rollout that stays when the next one is collected."""
    return tree_map(torch.clone, rollout)


def batch_of(rollout: Rollout, gae_lambda: float = 0.95):
    return make_batch(rollout, GAMMA * ~rollout.terminated.unsqueeze(-1), gae_lambda)


def test_rollouts_go_on_where_the_last_one_ended():
    both = collector([lambda: Scripted(period=2, first_episode=1), Scripted], Clock(), 4)
    first, second = copied(both.collect()), both.collect()
    rows = [torch.cat(pair) for pair in zip(first[:10], second[:10], strict=True)]
    obs, action, _, reward, value, next_value, terminated, truncated, valid, start = rows

    assert obs[:, 0].tolist() == [[1, 0], [1, 1], [2, 0], [2, 1], [3, 0], [3, 1], [4, 0], [4, 1]]
    assert obs[:, 1].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert action[:, 1].tolist() == [0, 1, 2, 1, 2, 0, 2, 0]
    assert reward[:, 1, 0].tolist() == pytest.approx([0, 1.1, 2.2, 10.1, 11.2, 12, 20.2, 21])
    assert start.int().T.tolist() == [[1, 0, 1, 0, 1, 0, 1, 0], [1, 0, 0, 1, 0, 0, 1, 0]]
    # episodes end by termination, truncation, both, and again; at row 5 one by termination and the other by truncation
    assert terminated.int().T.tolist() == [[0, 0, 0, 1, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    assert truncated.int().T.tolist() == [[0, 1, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 1, 0, 0]]
    assert valid.all()
    assert value[:, 1, 0].tolist() == [0, 1, 2, 100, 101, 102, 200, 201]
    # the successor's value: within an episode, at the end of a rollout (101, 202), and V(final_obs) where truncated (102, 402; 103)
    alive = ~terminated
    assert next_value[:, 0, 0][alive[:, 0]].tolist() == [101, 102, 201, 301, 401, 402]
    assert next_value[:, 1, 0][alive[:, 1]].tolist() == [1, 2, 101, 102, 103, 201, 202]


def test_log_probabilities_are_those_of_the_policy_that_acted():
    rollout = collector([Scripted], Clock(), 5).collect()
    assert rollout.log_prob.shape == (5, 1, 1) and torch.allclose(rollout.log_prob, torch.tensor(1 / 3).log())


def test_reset_rows_are_marked_and_change_nothing_around_them():
    rollout = collector([lambda: Scripted(endings=("truncation",))], Clock(), 8, "NEXT_STEP").collect()
    assert rollout.obs[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert rollout.valid[:, 0].int().tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    assert rollout.episode_start[:, 0].int().tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    assert rollout.truncated[:, 0].int().tolist() == [0, 0, 1, 0, 0, 0, 1, 0]
    assert rollout.next_value[rollout.valid].flatten().tolist() == [1, 2, 3, 101, 102, 103]
    assert not rollout.terminated.any()


@pytest.mark.parametrize("mode, n_steps, env_steps", [("SAME_STEP", 8, 16), ("NEXT_STEP", 8, 12), ("DISABLED", 8, 16)])
def test_only_valid_rows_count_as_environment_steps(mode, n_steps, env_steps):
    two = collector([Scripted, Scripted], Clock(), n_steps, mode)
    two.collect()
    assert two.env_steps == env_steps
    two.collect()
    assert two.env_steps == 2 * env_steps


def loss_and_gradient(algorithm: type[Algorithm], mode: str, n_steps: int) -> Tensor:
    """Of all rows of one rollout at once."""
    torch.manual_seed(0)
    model = algorithm(EnvConfig("tests.environments:Scripted-v0"), spaces=SPACES)
    model.network = ScriptedActorCritic(SPACES, net_arch=[8])
    batch = batch_of(collector([Scripted, lambda: Scripted(first_episode=1)], model.network, n_steps, mode).collect())
    batch = next(minibatches(batch, 2 * n_steps, True, Generator().manual_seed(0)))
    loss, _ = model.loss(batch, 0.2, None, 0.0, 1.0) if algorithm is PPO else model.loss(batch, 0.0, 1.0)
    loss.backward()
    return torch.cat([loss.detach().reshape(1), *(p.grad.flatten() for p in model.network.parameters())])


@pytest.mark.parametrize("algorithm", [PPO, A2C])
@pytest.mark.parametrize("same, following", [(6, 8), (6, 7), (5, 6), (3, 4), (2, 2)])
def test_reset_rows_weigh_nothing_so_that_all_modes_have_the_same_loss_and_gradient(algorithm, same, following):
    # with a period of 3, every fourth row is a reset under NEXT_STEP
    expected = loss_and_gradient(algorithm, "SAME_STEP", same)
    assert expected.abs().max() > 0.1
    assert torch.allclose(loss_and_gradient(algorithm, "NEXT_STEP", following), expected, atol=1e-6)
    assert torch.equal(loss_and_gradient(algorithm, "DISABLED", same), expected)


def test_permuting_the_environments_permutes_the_advantages():
    torch.manual_seed(0)
    network = ScriptedActorCritic(SPACES, net_arch=[8])
    envs = [lambda period=period: Scripted(period, first_episode=period) for period in (2, 3, 5)]
    rows = batch_of(collector(envs, network, 7).collect())
    turned = batch_of(collector([envs[i] for i in (2, 0, 1)], network, 7).collect())
    for name in ("advantage", "returns", "obs"):
        plain, moved = (getattr(batch, name).unflatten(0, (7, 3)) for batch in (rows, turned))
        assert torch.allclose(moved, plain[:, [2, 0, 1]], atol=1e-5)
        assert not torch.allclose(moved, plain, atol=1e-5)


def exact_value(obs: Tensor) -> Tensor:
    """Of episodes of three steps that pay 10 · episode + t + action / 10; odd ones are cut off at a state worth 7."""
    episode, t = obs.unbind(-1)
    value = torch.where(episode % 2 == 1, 7.0, 0.0)
    for k in (2, 1, 0):
        ahead = 10 * episode + k + (episode + k) % 3 / 10 + GAMMA * value
        value = torch.where(t <= k, ahead, value)
    return torch.where(t == 3, 7.0, value)


@pytest.mark.parametrize("mode, n_steps", [("SAME_STEP", 4), ("NEXT_STEP", 5), ("DISABLED", 4)])
def test_one_rollout_or_two_halves_have_the_same_returns_when_values_are_exact(mode, n_steps):
    def returns(n_steps: int, rollouts: int) -> Tensor:
        one = collector([lambda: Scripted(endings=("termination", "truncation"))], Clock(exact_value), n_steps, mode)
        batches = [tree_map(torch.clone, batch_of(one.collect(), gae_lambda=1.0)) for _ in range(rollouts)]
        return torch.cat([batch.returns[batch.weight > 0].squeeze(-1) for batch in batches])

    whole, halves = returns(2 * n_steps, 1), returns(n_steps, 2)
    assert torch.allclose(whole, halves, atol=1e-4)
    # by hand: 0 + 0.9 (1.1 + 0.9 · 2.2), 1.1 + 0.9 · 2.2, 2.2, then 10.1 + 0.9 (11.2 + 0.9 (12 + 0.9 · 7))
    assert whole[:4].tolist() == pytest.approx([2.772, 3.08, 2.2, 35.003], abs=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_statistics_are_means_over_the_last_hundred_episodes(mode):
    # 150 episodes of one step, worth 10 · episode + action / 10; under NEXT_STEP every other row is a reset
    class Idle(Clock):
        def sample(self, obs, memory, episode_start, action_mask, *, generator):
            return torch.zeros(len(obs), dtype=torch.long), memory

    one = collector([lambda: Scripted(period=1)], Idle(), 300 if mode == "NEXT_STEP" else 150, mode)
    assert one.statistics.metrics() == {}
    one.collect()
    assert one.statistics.episodes == 150
    # episodes 50 … 149 pay 500 … 1490; a third of them, 52, 55 … 148, is truncated and no success
    assert one.statistics.metrics() == {"rollout/ep_rew_mean": 995.0, "rollout/ep_len_mean": 1.0, "rollout/success_rate": 0.67}


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_counts_whole_though_it_began_in_an_earlier_rollout(mode):
    one = collector([lambda: Scripted(endings=("truncation",))], Clock(), 2, mode)
    one.collect()
    assert one.statistics.episodes == 0
    one.collect()
    assert list(one.statistics.lengths) == [3] and list(one.statistics.returns) == pytest.approx([0 + 1.1 + 2.2])
    assert list(one.statistics.successes) == [0.0]


class Renamed(gym.Wrapper):
    """Says `success` where the environment says `is_success`."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {"success": info["is_success"]} if info else {}


def test_success_is_read_under_both_names_and_only_where_an_episode_ended():
    for wrapper in (Renamed, lambda env: env):
        both = collector([lambda w=wrapper: w(Scripted(3)), lambda w=wrapper: w(Scripted(2, first_episode=1))], Clock(), 4)
        both.collect()
        # the second environment is truncated at row 1, the first terminates at row 2, the second ends by both at row 3
        assert list(both.statistics.successes) == [0.0, 1.0, 1.0]


class OnlyWhenItHappens(gym.Wrapper):
    """Reports a success, and no failure."""

    def step(self, action):
        *rest, info = super().step(action)
        return *rest, {"is_success": True} if info.get("is_success") else {}


@pytest.mark.thorough
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_an_episode_that_reports_no_success_is_a_failure_once_any_has(mode, vectorization):
    # episodes of two steps, five in each environment: by truncation, which reports nothing, and by both, a success, in turn
    settings = {
        "vectorization": vectorization,
        "autoreset": mode,
        "num_envs": 2,
        "wrappers": ["tests.data.test_collector.OnlyWhenItHappens"],
    }
    config = EnvConfig("tests.environments:Scripted-v0", kwargs={"period": 2, "endings": ("truncation", "both")}, **settings)
    stepper = make_stepper(make_vector_env(config), config)
    one = Collector(stepper, SPACES, Clock(), 15 if mode == "NEXT_STEP" else 10, seed=0)
    assert "rollout/success_rate" not in one.statistics.metrics()
    one.collect()
    assert one.statistics.episodes == 10
    assert list(one.statistics.successes) == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert one.statistics.metrics()["rollout/success_rate"] == pytest.approx(0.4)
    stepper.close()


def test_reported_successes_come_back_with_the_state():
    statistics, continued = EpisodeStatistics(1), EpisodeStatistics(1)
    for success in (None, 1.0, None):
        statistics.add(Finished(0.0, success, {}))
    continued.set_state(statistics.get_state())
    continued.add(Finished(0.0, None, {}))
    assert continued.metrics()["rollout/success_rate"] == 0.25
    old = {name: value for name, value in statistics.get_state().items() if name != "reports_success"} | {"successes": []}
    continued.set_state(old)  # of a version that stored reported successes only
    assert "rollout/success_rate" not in continued.metrics()


def test_without_success_in_the_infos_there_is_no_success_rate():
    statistics = EpisodeStatistics(1)
    stepper = make_stepper(SyncVectorEnv([lambda: gym.make("MountainCar-v0", max_episode_steps=2)], autoreset_mode="SameStep"))
    stepper.reset(0)
    for _ in range(4):
        statistics.update(stepper.step(np.array([0])))
    assert statistics.metrics() == {"rollout/ep_rew_mean": -2.0, "rollout/ep_len_mean": 2.0}


@pytest.mark.parametrize("mode", MODES)
def test_random_steps_see_only_experience_and_count_it(mode):
    two = collector([Scripted, Scripted], Clock(), 4, mode)
    rows = two.random_steps(11)
    assert len(rows) >= 11 and two.env_steps == len(rows)
    assert rows[:, 1].max() == 2  # a final observation, at t = 3, is not acted on
    assert two.collect().episode_start[0].all()


@pytest.mark.thorough
def test_policies_draw_the_same_actions_from_the_same_seed():
    def actions(seed: int) -> Tensor:
        torch.manual_seed(0)
        stepper = make_stepper(SyncVectorEnv([Scripted, Scripted], autoreset_mode=AutoresetMode.SAME_STEP))
        return Collector(stepper, SPACES, ActorCritic(SPACES, net_arch=[4]), 32, seed).collect().action

    assert torch.equal(actions(1), actions(1)) and not torch.equal(actions(1), actions(2))
