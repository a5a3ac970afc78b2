"""Rollouts of environments that live on a device are those of environments that do not."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rl import GRU, LSTM, PPO, EnvConfig
from lightning_rl.data.collector import Collector
from lightning_rl.data.tensor_collector import TensorCollector
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.stepping import make_stepper
from lightning_rl.envs.tensors import HostView, on_host
from lightning_rl.errors import NotFiniteError, SettingError
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.spaces import MASK, single_spaces
from lightning_rl.types import tree_leaves, tree_map, tree_stack, tree_to_numpy
from tests.environments import Choosy, Scripted, ScriptedBox, ScriptedDict

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")
"""Operations whose result the host waits for."""


class OnDevice(VectorWrapper):
    """Environments that give and take tensors; `final_obs` of all copies, as contracted."""

    device = "cpu"

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        return tensors(obs), self.told(info)

    def step(self, actions):
        obs, reward, terminated, truncated, info = self.env.step(tree_to_numpy(actions))
        told = self.told(info)
        if self.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
            last = info.get("final_obs", [None] * self.num_envs)
            rows = [tree_map(lambda leaf, i=i: leaf[i], obs) if each is None else each for i, each in enumerate(last)]
            ending = info.get("final_info", {})
            told = self.told(ending) | {"final_obs": tensors(tree_stack(rows))} | told
            if MASK in info:
                told["final_action_mask"] = tensors(ending.get(MASK, np.ones_like(info[MASK])))
        return tensors(obs), tensors(reward), tensors(terminated), tensors(truncated), told

    def told(self, info):
        return {name: tensors(info[name]) for name in (MASK, "is_success") if name in info}


def tensors(tree):
    return tree_map(lambda leaf: torch.from_numpy(np.array(leaf)), tree)


def collect(kind, environments, mode, n_steps, rollouts, next_obs=False, **network):
    torch.manual_seed(0)
    envs = SyncVectorEnv(environments, autoreset_mode=AutoresetMode[mode])
    if kind is TensorCollector:
        envs = HostView(OnDevice(envs))
    stepper = make_stepper(envs, None, masked=environments[0] is Choosy)
    spaces = single_spaces(envs)._replace(masked=stepper.masked)
    actor_critic = ActorCritic(spaces, activation="silu", **network)  # which no numpy actor draws for
    collector = kind(stepper, spaces, actor_critic, n_steps, 0, True, torch.no_grad, next_obs)
    return [tree_map(torch.clone, collector.collect()) for _ in range(rollouts)], collector


@pytest.mark.variants
@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize(
    "environment, network",
    [(Scripted, {}), (ScriptedDict, {}), (ScriptedBox, {"memory": LSTM(8, 3)}), (Scripted, {"memory": GRU(8, 2), "share_encoder": False})],
    ids=["plain", "nested observations", "continuous actions and memory", "two memories"],
)
def test_rollouts_are_those_of_the_collector_on_the_host(environment, network, mode):
    environments = [environment, lambda: environment(period=2, first_episode=1), lambda: environment(period=5)]
    for next_obs in (False, True):
        (ours, there), (theirs, here) = (
            collect(kind, environments, mode, 7, 3, next_obs, **network) for kind in (TensorCollector, Collector)
        )
        for one, other in zip(tree_leaves(tuple(ours)), tree_leaves(tuple(theirs)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert there.metrics() == pytest.approx(here.metrics(), rel=1e-6)  # rewards are summed as float32 there
        assert there.env_steps == here.env_steps and there.rows == here.rows
        assert there.metrics()["rollout/success_rate"] > 0
        assert [each.length for each in there.statistics.finished] == [each.length for each in here.statistics.finished]


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_masks_are_kept_and_obeyed(mode):
    environments = [Choosy, lambda: Choosy(period=2)]
    ours, theirs = (collect(kind, environments, mode, 6, 2)[0] for kind in (TensorCollector, Collector))
    for one, other in zip(tree_leaves(tuple(ours)), tree_leaves(tuple(theirs)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not ours[1].action_mask.all()


class Reads(TorchDispatchMode):
    """Counts what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        self.count[name] += name in READS
        return function(*args, **(kwargs or {}))


def reads_of(n_steps: int, env: str) -> int:
    model = PPO(EnvConfig(env, 4, max_episode_steps=5), n_steps=n_steps, batch_size=4)
    stepper = make_stepper(make_vector_env(model.env), model.env)
    collector = TensorCollector(stepper, model.spaces, model.network, n_steps, 0)
    collector.collect()
    with Reads() as reads:
        collector.collect()
    return sum(reads.count.values())


@pytest.mark.parametrize("env", ["Torch/CartPole-v1", "Torch/Pendulum-v1"])
def test_the_host_waits_for_the_device_no_more_often_in_a_longer_rollout(env):
    assert reads_of(40, env) == reads_of(8, env) <= 3


class Faulty(OnDevice):
    """Pays or shows NaN in the fourth step, or does not tell last observations."""

    def __init__(self, what: str) -> None:
        super().__init__(SyncVectorEnv([Scripted, Scripted], autoreset_mode=AutoresetMode.SAME_STEP))
        self.what, self.steps = what, 0

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        self.steps += 1
        if self.steps == 4 and self.what == "reward":
            reward[1] = np.nan
        if self.steps == 4 and self.what == "observation":
            obs[0, 1] = np.inf
        if self.what == "final":
            del info["final_obs"]
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize(
    "what, line",
    [
        ("reward", "reward of environment 1 is nan at environment step 8"),
        ("observation", "observation of environment 0 is inf at environment step 8"),
    ],
)
def test_a_value_that_is_not_finite_ends_the_run_and_is_named(what, line):
    envs = HostView(Faulty(what))
    spaces = single_spaces(envs)
    collector = TensorCollector(make_stepper(envs), spaces, ActorCritic(spaces), 6, 0)
    with pytest.raises(NotFiniteError) as error:
        collector.collect()
    assert line in str(error.value)


def test_environments_that_do_not_return_last_observations_are_refused():
    envs = HostView(Faulty("final"))
    spaces = single_spaces(envs)
    with pytest.raises(SettingError, match='ended an episode without info\\["final_obs"\\]'):
        TensorCollector(make_stepper(envs), spaces, ActorCritic(spaces), 6, 0).collect()


def test_abandoned_episodes_start_again_and_count_for_nothing():
    _, collector = collect(TensorCollector, [Scripted, Scripted], "SAME_STEP", 2, 1)
    collector.restart_episodes()
    again = collector.collect()
    assert again.episode_start[0].all() and again.obs[0, :, 0].tolist() == [1, 1]
    assert collector.statistics.running_length.tolist() == [2, 2] and isinstance(again.obs, Tensor)


class Overwritten(OnDevice):
    """Shows NaN where no episode ended, and writes whether episodes succeeded into the same tensor each time."""

    def __init__(self) -> None:
        super().__init__(SyncVectorEnv([Scripted, lambda: Scripted(period=2)], autoreset_mode=AutoresetMode.SAME_STEP))
        self.success = torch.zeros(2)

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        info["final_obs"][~(terminated | truncated)] = torch.nan
        self.success.copy_(terminated)
        return obs, reward, terminated, truncated, info | {"is_success": self.success}


def test_rows_of_last_observations_that_are_none_are_not_read_and_what_is_overwritten_is_copied():
    envs = HostView(Overwritten())
    spaces = single_spaces(envs)
    collector = TensorCollector(make_stepper(envs), spaces, ActorCritic(spaces), 4, 0, True, torch.no_grad, True)
    assert collector.collect().next_obs.isfinite().all()
    assert [each.success for each in collector.statistics.finished] == [1.0, 1.0, 0.0]


class Numbered(OnDevice):
    """Says by numbers how episodes end."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, reward, terminated.to(torch.uint8), truncated.to(torch.int64), info


@pytest.mark.parametrize("mode", ["SAME_STEP", "NEXT_STEP"])
def test_flags_of_a_device_may_be_numbers(mode):
    found = []
    for kind in (OnDevice, Numbered):
        envs = HostView(kind(SyncVectorEnv([Scripted, lambda: Scripted(period=2)], autoreset_mode=AutoresetMode[mode])))
        spaces = single_spaces(envs)
        torch.manual_seed(0)
        found.append(TensorCollector(make_stepper(envs), spaces, ActorCritic(spaces), 9, 0, True, torch.no_grad).collect())
    for one, other in zip(tree_leaves(tuple(found[0])), tree_leaves(tuple(found[1])), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_episodes_after_a_restart_are_not_those_before():
    model = PPO(EnvConfig("Torch/CartPole-v1", 4), n_steps=8, batch_size=4)
    collector = TensorCollector(make_stepper(make_vector_env(model.env), model.env), model.spaces, model.network, 8, 0)
    first = collector.collect().obs[0].clone()
    collector.restart_episodes()
    assert not torch.equal(collector.collect().obs[0], first)


def test_random_steps_obey_masks_over_time_limits():
    _, collector = collect(TensorCollector, [Choosy, lambda: Choosy(endings=("truncation",))], "SAME_STEP", 2, 1)
    assert len(collector.random_steps(30)) >= 30


def test_the_host_gets_arrays_for_tensors_wherever_they_are():
    seen = on_host({"final_obs": (torch.zeros(2), {"a": torch.ones(2)}), "name": "x"})
    assert isinstance(seen["final_obs"][0], np.ndarray) and isinstance(seen["final_obs"][1]["a"], np.ndarray) and seen["name"] == "x"
