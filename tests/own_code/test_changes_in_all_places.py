"""What a user changes in an algorithm's network after it is built counts in each place that uses the network, or one line names it.

Acting, learning and evaluations of single networks are in `test_changes.py`; here are copies, files, and other processes.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from threading import Event

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box
from torch import nn

import lightning_rl as lrl
from lightning_rl.actors.processes import ProcessWorkers
from lightning_rl.actors.workers import ThreadWorkers
from lightning_rl.networks.normalization import eval_mode
from tests.experts import at_random
from tests.fitting import REPLAY, fit, tiny, weights
from tests.own_code.changes import (
    ALGORITHMS,
    EQUAL,
    IN_TORCH,
    IN_WEIGHTS,
    NAMED,
    NETWORK,
    OF_A_CLASS,
    OF_ALL,
    PARAMETRIZED,
    REFUSED,
    Scaled,
    in_turn,
    last,
    note,
    replace_last,
    restore_torch,
)

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")
FAST = [(name, change) for name in ("actor-critic", "actor") for change in ("hook of the last layer", "another known activation")]


def build(name):
    torch.manual_seed(0)
    algorithm = ALGORITHMS[name]()
    for parameter in algorithm.network.parameters():
        nn.init.normal_(parameter, std=0.5)
    return algorithm


def inputs(algorithm):
    return np.random.default_rng(0).uniform(-1, 1, (50, *algorithm.spaces.observation.shape)).astype(np.float32)


def acts(policy, obs):
    """Outputs of the network of a policy or an algorithm, and the best actions."""
    network = policy.network
    with torch.no_grad(), eval_mode(network.modules()):
        return outputs(network, torch.from_numpy(obs))


def outputs(network, obs):
    x = network.policy(obs, (), None)[0]
    return x.numpy(), network.distribution.mode(x).numpy()


def save(algorithm, path):
    """Save without a run, whose updates would be most of the time of a test."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False)
    trainer.strategy.connect(algorithm)
    trainer.save_checkpoint(path)
    return path


@pytest.mark.parametrize(("name", "change"), in_turn(1, FAST))
def test_a_copy_of_the_policy_acts_as_the_changed_network_and_does_not_learn_with_it(name, change):
    algorithm = build(name)
    NETWORK[change](algorithm.network)
    obs = inputs(algorithm)
    policy, expected = lrl.load_policy(algorithm), acts(algorithm, obs)
    if change != OF_ALL:  # the hook of this test asks for one layer
        np.testing.assert_equal(acts(policy, obs), expected)
    with torch.no_grad():
        for parameter in algorithm.network.parameters():
            parameter.add_(1)
    if change != OF_ALL:
        np.testing.assert_equal(acts(policy, obs), expected)


@pytest.mark.parametrize(("name", "change"), in_turn(4, FAST))
def test_a_checkpoint_holds_a_change_or_it_is_named_when_it_is_saved_and_when_it_is_loaded(name, change, tmp_path, capsys):
    algorithm = build(name)
    NETWORK[change](algorithm.network)
    path = save(algorithm, tmp_path / "a.ckpt")
    lines = [line for line in capsys.readouterr().out.splitlines() if "checkpoints do not hold" in line]
    obs, changed = inputs(algorithm), [*algorithm.run.changes.values()]
    assert len(lines) == bool(changed) and all(text in lines[0] for text in changed[:3])
    restore_torch()  # as in another program
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            policy = lrl.load_policy(path)
        except lrl.SettingError as error:  # of other weights than the settings ask for
            assert changed and "these had been changed: " + ", ".join(changed[:3]) in str(error)
            note(change, name, "load_policy", NAMED)
            return
    said = [str(each.message) for each in caught if "had been changed" in str(each.message)]
    if not changed:
        assert change in IN_WEIGHTS and not said
        np.testing.assert_equal(acts(policy, obs), acts(algorithm, obs))
    else:
        assert len(said) == 1 and all(text in said[0] for text in changed[:3])
    note(change, name, "load_policy", NAMED if changed else EQUAL)


@pytest.mark.parametrize("again", [False, True])
def test_a_resumed_run_names_a_change_that_it_lacks_and_the_export_of_the_checkpoint_is_refused(again, tmp_path, capsys):
    algorithm = build("actor-critic")
    NETWORK["another known activation"](algorithm.network)
    path = save(algorithm, tmp_path / "a.ckpt")
    resumed = ALGORITHMS["actor-critic"](max_env_steps=16)
    if again:
        NETWORK["another known activation"](resumed.network)
    capsys.readouterr()
    fit(resumed, ckpt_path=path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "had been changed" in line]
    assert (
        lines == []
        if again
        else lines
        == [
            "the checkpoint does not hold what had been changed in its networks: network.actor.1 (ReLU for Tanh); "
            "change it again, or results differ"
        ]
    )
    with (
        pytest.warns(UserWarning, match="had been changed"),
        pytest.raises(
            lrl.SettingError, match=r"^this checkpoint does not hold what had been changed in its policy: network\.actor\.1 \(ReLU"
        ),
    ):
        lrl.export_policy(path)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "change"), in_turn(16, FAST))
def test_the_export_of_a_changed_algorithm_acts_as_it_does(name, change, tmp_path):
    algorithm = build(name)
    NETWORK[change](algorithm.network)
    obs, named = inputs(algorithm), [*algorithm.run.changes.values()]
    try:
        file = lrl.export_policy(algorithm, tmp_path / "policy.pt2")  # which compares it with the algorithm
    except lrl.SettingError as error:
        assert change == OF_ALL and "it differs from the checkpoint's policy, so nothing was written" in str(error)
        note(change, name, "export", REFUSED)
        return
    (action,) = torch.export.load(file).module()(torch.from_numpy(obs))
    expected = lrl.Policy(algorithm.network, algorithm.spaces).act(obs)[0]
    np.testing.assert_allclose(action.numpy(), expected, atol=1e-5)
    note(change, name, "export", EQUAL)
    if named:
        with pytest.raises(lrl.SettingError, match=r"^format safetensors holds only weights, not "):
            lrl.export_policy(algorithm, tmp_path / "policy.safetensors")


def test_policy_of_ones_own_that_off_policy_losses_would_not_read_is_refused_when_a_run_begins():
    algorithm = build("actor")
    NETWORK["policy of the network"](algorithm.network)
    with pytest.raises(
        lrl.SettingError, match=r"^Actor\.policy is replaced, but losses read forward, which it calls: replace that instead$"
    ):
        fit(algorithm)
    algorithm = lrl.SAC("Pendulum-v1", net_arch=[8], max_env_steps=32, memory=lrl.GRU(8, 4), **REPLAY)
    NETWORK["forward of the network"](algorithm.network)
    with pytest.raises(lrl.SettingError, match=r"^Actor\.forward is replaced, but with a memory actions come from policy: replace both$"):
        fit(algorithm)


def test_a_method_that_is_put_back_is_no_change():
    algorithm = build("actor")
    forward = algorithm.forward
    algorithm.forward = lambda *arguments: None
    assert [*algorithm.run.changes.values()] == ["forward (replaced)"]
    algorithm.forward = forward  # as Lightning does with several ranks
    assert not algorithm.run.changes


def test_policy_of_ones_own_is_refused_during_a_run_too():
    class Replaces(pl.Callback):
        def on_train_batch_end(self, trainer, algorithm, *_):
            NETWORK["policy of the network"](algorithm.network)

    with pytest.raises(lrl.SettingError, match=r"^Actor\.policy is replaced"):
        fit(build("actor"), callbacks=[Replaces()])


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough) for name in ("actor-critic", "actor")])
@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_that_are_added_in_a_run_count_in_compiled_losses_from_the_next_iteration_on(name, of_all, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # its guards are those of all, without a C++ compiler

    def learned(compile):
        torch.manual_seed(0)
        algorithm = ALGORITHMS[name](compile=compile, max_env_steps=64)

        class Adds(pl.Callback):
            def on_train_batch_end(self, trainer, model, *_):
                if trainer.global_step == 1:
                    self.hook = NETWORK[OF_ALL if of_all else "hook of the last layer"](model.network)

        adds = Adds()
        fit(algorithm, callbacks=[adds])
        adds.hook.remove()
        return weights(algorithm)

    torch.testing.assert_close(learned(True), learned(False), atol=1e-5, rtol=1e-4)


class Answers:
    """A worker that returns the outputs of a network, one of several."""

    def __init__(self, index, restarts, networks):
        self.networks = networks

    @torch.no_grad()
    def outputs(self, number, obs):
        return outputs(self.networks[number].eval(), obs)

    def close(self):
        pass


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, ThreadWorkers) for name in ALGORITHMS),
        *(pytest.param(name, ProcessWorkers, marks=pytest.mark.slow) for name in ALGORITHMS),
    ],
)
def test_actors_act_as_the_network_that_was_changed_before_they_start_and_with_its_newest_weights(name, kind):
    changed = [change for change in NETWORK if change not in IN_TORCH | PARAMETRIZED]
    networks = nn.ModuleList(build(name).network for _ in changed)
    for change, network in zip(changed, networks, strict=True):
        NETWORK[change](network)
    obs = torch.from_numpy(inputs(build(name)))
    with closing(kind(Answers, 1, networks)) as workers, torch.no_grad():
        for version in (1, 2):
            workers.publish(version)
            for number in range(len(changed)):
                workers.call(0, "outputs", number, obs)
            for change, network in zip(changed, networks, strict=True):
                for found, expected in zip(workers.receive().value, outputs(network.eval(), obs), strict=True):
                    np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=change)
                if kind is ProcessWorkers:
                    note(change, name, "another process", EQUAL)
            for parameter in networks.parameters():
                parameter.mul_(0.9)
        assert workers.notices == []
        for change, text in {OF_ALL: "hooks of all modules", OF_A_CLASS: "Linear.forward (replaced)"}.items():
            NETWORK[change](networks[0])
            workers.publish(3)
            workers.publish(4)
            named = f"actors act without what was changed in all of this process: {text}; change the network instead"
            assert workers.notices == ([named] if kind is ProcessWorkers else [])
            workers.notices.clear()
            if kind is ProcessWorkers:
                note(change, name, "another process", NAMED)


@pytest.mark.parametrize("kind", [ThreadWorkers, pytest.param(ProcessWorkers, marks=pytest.mark.slow)])
def test_buffers_reach_actors_during_a_run_and_other_changes_are_named_once(kind):
    network = build("actor").network
    replace_last(network, Scaled)
    obs = torch.from_numpy(inputs(build("actor")))

    def difference():
        workers.call(0, "outputs", 0, obs)
        return float((torch.from_numpy(workers.receive().value[0]) - network.policy(obs, (), None)[0]).abs().max())

    with closing(kind(Answers, 1, nn.ModuleList([network.eval()]))) as workers, torch.no_grad():
        last(network).shift.fill_(3.0)
        workers.publish(1)
        assert difference() < 1e-6 and workers.notices == []
        last(network).factor = 2.0
        NETWORK["hook of an activation"](network)
        workers.publish(2)
        workers.publish(3)
        assert workers.notices == [
            "actors act without what was changed after they started: hooks of network.0.layers.1, network.0.layers.4.factor (2.0 for 1.0); "
            "change it before fit"
        ]


GAIL = {"gail": {"demo_path": at_random("CartPole-v1", "{}"), "use_vail": True, "normalize": True}}
UNCHANGED = [
    (lrl.PPO, {"env_id": "CartPole-v1", "normalize_reward": True, "reward_signals": {"extrinsic": {}, "rnd": {}, "curiosity": {}, **GAIL}}),
    (lrl.PPO, {"env_id": "Pendulum-v1", "use_sde": True, "normalize_obs": "running"}),
    (lrl.PPO, {"memory": lrl.LSTM(8, 4), "threaded": True}),
    *((kind, {}) for kind in (lrl.A2C, lrl.IMPALA, lrl.SAC, lrl.TD3, lrl.PQN, lrl.TRPO, lrl.POCA, lrl.IQL, lrl.CQL)),
    *((kind, {}) for kind in (lrl.BehavioralCloning, lrl.EvolutionStrategies)),
    (lrl.DQN, {"noisy": True}),
    (lrl.CrossQ, {"critic_net_arch": [8]}),
]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [pytest.param(*each, marks=() if k in (1, 6) else pytest.mark.thorough) for k, each in enumerate(UNCHANGED)],
)
def test_runs_themselves_change_nothing_that_would_be_named(algorithm, settings):
    found = set()

    class Looks(pl.Callback):
        def on_train_batch_end(self, trainer, model, *_):
            found.update(model.run.changes.values())

    fit(tiny(algorithm, **settings), callbacks=[Looks()])
    assert found == set()


class Waits(gym.Env):
    """Its first step waits until the test has looked at the network."""

    observation_space, action_space = Box(-1, 1, (3,)), Box(-2, 2, (1,))
    stepped, may_end = Event(), Event()

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.stepped.set()
        assert self.may_end.wait(60)
        return np.zeros(3, np.float32), 1.0, True, False, {}


def test_an_evaluation_in_a_thread_leaves_the_modes_of_the_network_to_the_run():
    algorithm = lrl.SAC(Waits, net_arch=[8], max_env_steps=32, **REPLAY)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(lrl.evaluate, algorithm, episodes=1)
        try:
            assert Waits.stepped.wait(60) and all(part.training for part in algorithm.network.modules())
        finally:
            Waits.may_end.set()
        assert result.result()["return_mean"] == 1.0
