"""What a user changes counts in each place, whichever way computes it, or one line names it: see the table in `changes.py`."""

from __future__ import annotations

import multiprocessing
import shutil
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

import lightning_rl as lrl
from lightning_rl.data.collector import Collector
from lightning_rl.distributions.distribution import masked
from lightning_rl.envs import make as making
from lightning_rl.envs.config import ChangedEnv
from lightning_rl.envs.stepping import Stepper
from lightning_rl.networks import acting
from lightning_rl.networks.acting import NumpyActor
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.off_policy import Actor
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.spaces import Spaces
from tests.fitting import TINY, Rows, fit
from tests.own_code.changes import (
    ALGORITHMS,
    EQUAL,
    FAST,
    NAMED,
    NETWORK,
    PLACES,
    REFUSED,
    RUNS,
    UNLEARNED,
    as_it_is,
    in_turn,
    mark_of_run,
    note,
    restore_torch,
)

NUM, STEPS, WIDTH = 3, 4, 5
OBS, DISCRETE, BOX = Box(-2, 2, (WIDTH,)), Discrete(3), Box(-1, 1, (2,))
NETWORKS = {
    "actor-critic": lambda: ActorCritic(Spaces(OBS, DISCRETE), net_arch=[8, 8], normalize_obs="running"),
    "separate critic": lambda: ActorCritic(Spaces(OBS, BOX), net_arch=[8], share_encoder=False),
    "q network": lambda: QNetwork(Spaces(OBS, DISCRETE), net_arch=(8, 8)),
    "actor": lambda: Actor(Spaces(OBS, BOX), "squashed_normal", nn.Identity(), net_arch=[8, 8]),
}


class Seen(gym.Env):
    """Pays nothing and lasts for ever; observations are random."""

    def __init__(self, action_space):
        self.observation_space, self.action_space = OBS, action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-2, 2, WIDTH).astype(np.float32), {}

    def step(self, action):
        return self.np_random.uniform(-2, 2, WIDTH).astype(np.float32), 0.0, False, False, {}


def make_collector(name):
    torch.manual_seed(0)
    network = NETWORKS[name]()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.5)
    network.normalizer.update(torch.randn(100, WIDTH) + 1)
    action = BOX if name in ("separate critic", "actor") else DISCRETE
    envs = SyncVectorEnv([lambda: Seen(action)] * NUM, autoreset_mode=AutoresetMode.SAME_STEP, copy=False)
    made = Collector(Stepper(envs, AutoresetMode.SAME_STEP), Spaces(OBS, action), network, STEPS, seed=0, log_probs=False)
    begin(made)
    return made


def begin(collector):
    """Begin an iteration, and return its actor."""
    collector.t = 0
    collector.act()
    return collector._actor


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("change", NETWORK)
def test_a_change_of_a_network_counts_in_acting_learning_and_evaluations_from_the_next_iteration_on(name, change):
    made = make_collector(name)
    network, obs = made.network, torch.randn(STEPS * NUM, WIDTH)
    before = network.policy(obs, (), None)[0]
    NETWORK[change](network)
    with torch.no_grad():
        x = network.policy(obs, (), None)[0]
        changed = not torch.allclose(before, x, atol=1e-6)
        assert changed or change in ("another layer", "orthogonal weights", "dropout", "batch normalization", "mode of the distribution")

        # learning
        if change == UNLEARNED and not isinstance(network, ActorCritic):
            with pytest.raises(lrl.SettingError, match=r"policy is replaced, but losses read forward"):
                network.check_methods()
            note(change, name, "learning", REFUSED)
        else:
            if isinstance(network, ActorCritic):
                action = network.distribution.sample(x)
                expected = network.distribution.evaluate(x, action)[0]
                torch.testing.assert_close(network.evaluate(obs, action)[0], expected)
            else:  # these learn from `forward`
                learned = network(network.normalizer(obs))
                torch.testing.assert_close(learned.squeeze(-2).squeeze(-1) if isinstance(network, QNetwork) else learned, x)
            note(change, name, "learning", EQUAL)

        # evaluations
        best = network.distribution.mode(x)
        torch.testing.assert_close(network.sample(obs, deterministic=True)[0], best)
        note(change, name, "evaluation", EQUAL)

        # acting
        actor = begin(made)
        rows = obs.view(STEPS, NUM, WIDTH)
        actor.begin(rows.numpy())
        if isinstance(actor, NumpyActor):
            actor.noise = np.zeros_like(actor.noise)
            for t in range(STEPS):
                actor.act(t, (), np.zeros(NUM, bool))
            taken = actor.actions()
            torch.testing.assert_close(taken, best.reshape(taken.shape).to(taken.dtype), rtol=1e-4, atol=1e-5)
        else:
            assert made.take_notices() == ["the policy was changed from outside: torch computes its actions from now on, which is slower"]
            generator = made.generator.get_state()
            sent = actor.act(0, (), np.zeros(NUM, bool))[0]
            made.generator.set_state(generator)
            action = network.sample(rows[0], generator=made.generator)[0]
            np.testing.assert_array_equal(sent, network.distribution.to_env(action.numpy()))
        note(change, name, "acting", EQUAL)


# ---------------------------------------------------------------- changes of runs


class SlowActor(NumpyActor):
    """Acts by the network itself, with the random numbers of the numpy actor."""

    @torch.no_grad()
    def act(self, t, memory, episode_start, action_mask=()):
        x = self.network.policy(torch.from_numpy(self.obs[t]), (), None)[0].numpy()
        action = self.distribution.draw(masked(x, action_mask) if len(action_mask) else x, self.noise[t])
        self.taken.append(action)
        return self.distribution.to_env(action), memory


@contextmanager
def without_fast_paths():
    """Act in torch, step environments one by one, and let torch's Adam make its steps as in any program."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(acting, "NumpyActor", SlowActor)
        patches.setattr(making, "should_step_at_once", lambda *arguments: False)
        patches.setattr(ScheduledAdam, "step", torch.optim.Adam.step)
        yield


class Run(NamedTuple):
    """What came of a run: the actions and weights of each iteration, the recorded rows, and the folder of its second checkpoint."""

    model: Any
    actions: list[Any]
    weights: list[torch.Tensor]
    rows: list[Any]


class Looks(pl.Callback):
    """Keeps what a run does, and its checkpoints after the second iteration."""

    def __init__(self, folder):
        self.folder, self.actions, self.weights = folder, [], []

    def on_train_batch_start(self, trainer, model, *_):
        if trainer.global_step == 2 and self.folder is not None and not self.folder.exists():
            shutil.copytree(trainer.run_folder / "checkpoints", self.folder)

    def on_train_batch_end(self, trainer, model, *_):
        actor = getattr(model.collector, "_actor", None)  # offline there is none
        self.actions.append([np.array(each) for each in getattr(actor, "taken", ())])
        self.weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())


def run(made, root=None, kept=None, ckpt_path=None):
    model, callbacks = made
    looks, rows = Looks(kept), Rows()
    torch.manual_seed(1)
    if kept is None and ckpt_path is None:
        fit(model, callbacks=[*callbacks, looks], logger=rows)
    else:
        trainer = lrl.Trainer(
            default_root_dir=root, accelerator="cpu", logger=rows, evaluation=None, enable_progress_bar=False,
            callbacks=[*callbacks, looks], checkpoint=lrl.CheckpointConfig(**{f"every_n_{model.counter}": 32}),
        )  # fmt: skip
        trainer.fit(model, ckpt_path=ckpt_path)
    mine = [(step, {name: value for name, value in row.items() if not name.startswith("time/")}) for step, row in rows.rows]
    return Run(model, looks.actions, looks.weights, mine)


@pytest.fixture(scope="module")
def unchanged():
    """The run of an algorithm as a function makes it, made once."""
    return cache(lambda make, algorithm: run(make(algorithm)))


def same(ours, theirs):
    """Whether two runs acted and learned alike, to rounding."""
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    for one, other in ((ours.actions, theirs.actions), (ours.weights, theirs.weights)):
        try:
            for mine, its in zip(one, other, strict=True):
                close(mine, its)
            yield True
        except AssertionError:
            yield False


CASES = [
    pytest.param(name, kind, marks=() if name in FAST and kind is lrl.PPO else mark_of_run(name, kind), id=f"{name}-{kind.__name__}")
    for name, change in RUNS.items()
    for kind in change.to
]


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_a_change_of_a_run_counts_in_each_place_as_without_fast_paths(name, algorithm, tmp_path, unchanged):
    change = RUNS[name]
    unchanged(change.base, algorithm)  # outside of what changes classes
    with change.around():
        outcomes = refused(change, algorithm, tmp_path) or dict(examined(change, algorithm, tmp_path, unchanged))
    for place, outcome in outcomes.items():
        note(name, algorithm.__name__, place, outcome)


def refused(change, algorithm, folder):
    """The outcomes of a change that is to be refused, in one line, when it is made or when the run comes to it."""
    if change.outcomes.get("acting") != REFUSED:
        return {}
    with pytest.raises(lrl.SettingError) as error:
        run(change.make(algorithm), folder)
    assert len(str(error.value).splitlines()) == 1
    return dict.fromkeys(PLACES, REFUSED)


def examined(change, algorithm, folder, unchanged):
    """Yield each place and what comes of a change there."""
    ours = run(change.make(algorithm), folder / "ours", folder / "kept")
    with without_fast_paths() if change.reference is None else nullcontext():
        theirs = run((change.reference or change.make)(algorithm))
        expected = evaluate(theirs.model)
    assert [*same(ours, theirs)] == [True, True]
    assert all(same(ours, unchanged(change.base, algorithm))) != change.counts
    yield from {"acting": EQUAL, "learning": EQUAL}.items()

    assert evaluate(ours.model) == pytest.approx(expected, rel=1e-4)
    yield "evaluation", EQUAL

    path, obs, named = next(folder.joinpath("ours").rglob("last.ckpt")), inputs(ours.model), [*ours.model.run.changes.values()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            policy = lrl.load_policy(path)
        except lrl.SettingError as error:
            caught.append(error)
    said = [str(getattr(each, "message", each)) for each in caught if "had been changed" in str(getattr(each, "message", each))]
    assert all(named[0] in text for text in said) and bool(said) == bool(named)
    if not named:
        assert ours.model.hparams == torch.load(path, weights_only=True)["hyper_parameters"]
        for one, other in zip(acts(policy, obs), acts(ours.model, obs), strict=True):
            np.testing.assert_array_equal(one, other)
    yield "load_policy", NAMED if named else EQUAL

    lrl.export_policy(ours.model, folder / ("policy.pt2" if named else "policy.safetensors"))  # which compares it with the algorithm
    yield "export", EQUAL

    try:
        resumed = run(change.make(algorithm), folder / "resumed", ckpt_path=folder / "kept" / "last.ckpt")
    except lrl.SettingError as error:
        assert "these had been changed: " in str(error)
        yield "resume", REFUSED
    else:
        for mine, its in zip(resumed.weights, ours.weights[2:], strict=True):
            assert torch.equal(mine, its)
        assert resumed.rows == ours.rows[-len(resumed.rows) :]
        yield "resume", EQUAL


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "algorithm"), [(name, kind) for name, change in RUNS.items() if change.base is not as_it_is for kind in change.to]
)
def test_a_changed_environment_is_the_same_in_processes_of_its_own(name, algorithm):
    children = []

    class Counts(pl.Callback):
        def on_train_batch_end(self, *_):
            children.append(len(multiprocessing.active_children()))

    def made(vectorization):
        env = RUNS[name].make(algorithm)[0].env
        if callable(env):
            env = lrl.EnvConfig(env)
        copies = {"num_envs": 2, "vectorization": vectorization}
        env = replace(env, config=replace(env.config, **copies)) if isinstance(env, ChangedEnv) else replace(env, **copies)
        torch.manual_seed(0)
        return algorithm(env, net_arch=[8], **TINY[algorithm], max_env_steps=64), [Counts()]

    with RUNS[name].around():
        assert [*same(run(made("async")), run(made("sync")))] == [True, True]
    assert children == [2] * 4 + [0] * 4
    note(name, algorithm.__name__, "another process", EQUAL)


evaluate = partial(lrl.evaluate, episodes=2, num_envs=2, max_episode_steps=50)


def inputs(model):
    space = model.spaces.observation
    space.seed(0)
    return [space.sample() for _ in range(20)]


def acts(source, obs):
    policy = source if isinstance(source, lrl.Policy) else lrl.load_policy(source)
    return [policy.act(each)[0] for each in obs]


# ---------------------------------------------------------------- a run of a changed network is resumed


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.parametrize(("name", "change"), in_turn(24))
def test_a_resumed_run_goes_on_exactly_with_a_change_of_its_network_and_names_it_without(name, change, tmp_path, capsys):
    def made(is_changed=True):
        torch.manual_seed(0)
        model = ALGORITHMS[name](max_env_steps=256 if "critic" in name else 48)
        if is_changed:
            NETWORK[change](model.network)
        return model, []

    last = tmp_path / "kept" / "last.ckpt"
    if change == UNLEARNED and name in ("q network", "actor"):
        with pytest.raises(lrl.SettingError, match="is replaced"):
            run(made(), tmp_path / "whole")
        return note(change, name, "resume", REFUSED)
    whole = run(made(), tmp_path / "whole", tmp_path / "kept")
    changed = [*whole.model.run.changes.values()]
    capsys.readouterr()
    again = run(made(), tmp_path / "again", ckpt_path=last)
    assert torch.equal(again.weights[-1], whole.weights[-1]) and "had been changed" not in capsys.readouterr().out
    restore_torch()  # as in another program
    try:
        other = run(made(is_changed=False), tmp_path / "other", ckpt_path=last)
        same, said = torch.equal(other.weights[-1], whole.weights[-1]), capsys.readouterr().out
    except lrl.SettingError as error:  # of other weights than the settings ask for
        same, said = False, str(error)
    assert "had been changed" in said and all(text in said for text in changed[:3]) if changed else same
    return note(change, name, "resume", NAMED if changed else EQUAL)
