"""Every algorithm learns from several agents that share its policy, and from no row of one that is not there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from lightning_rl import A2C, ARS, DQN, GRU, IMPALA, LSTM, POCA, PPO, SAC, TD3, EvolutionStrategies, MultiAgent, SettingError
from lightning_rl.errors import NotFiniteError
from lightning_rl.types import tree_leaves
from tests.agents import Mortal
from tests.fitting import fit, tiny, weights

GAMMA = 0.9
CASES = [
    pytest.param(PPO, "Mortal", {}, id="PPO"),
    pytest.param(PPO, "Visited", {"memory": LSTM(8, 4), "normalize_obs": "running"}, id="PPO LSTM"),
    pytest.param(PPO, "InTurn", {"memory": GRU(8, 4)}, id="PPO in turn"),
    pytest.param(A2C, "Continuous", {}, id="A2C"),
    pytest.param(IMPALA, "MaskedTogether", {"memory": GRU(8, 8)}, id="IMPALA"),
    pytest.param(POCA, "Mortal", {}, id="POCA"),
    pytest.param(POCA, "Visited", {"memory": LSTM(8, 4), "normalize_obs": "running"}, id="POCA LSTM"),
    pytest.param(POCA, "Continuous", {"counterfactual": False}, id="POCA continuous"),
    pytest.param(POCA, "MaskedTogether", {"memory": GRU(8, 4), "share_encoder": True}, id="POCA masks"),
    pytest.param(POCA, "Nested", {}, id="POCA nested"),
    pytest.param(SAC, "Continuous", {"normalize_obs": "running"}, id="SAC"),
    pytest.param(SAC, "MaskedInfo", {}, id="SAC in turn"),
    pytest.param(DQN, "Visited", {"n_steps": 3, "replay": {"prioritized": True}}, id="DQN"),
    pytest.param(DQN, "MaskedInTurn", {"memory": LSTM(8, 4)}, id="DQN in turn"),
    pytest.param(DQN, "Nested", {"replay": {"optimize_memory_usage": True}}, id="DQN nested"),
    pytest.param(TD3, "Continuous", {"memory": GRU(8, 4)}, id="TD3"),
]


def watch(model):
    """The steps that a model's collector makes."""
    made, make = [], model.experience

    def experience():
        dataset = make()
        stepper = dataset.collector.stepper
        step = stepper.step
        stepper.step = lambda action: made.append(step(action)) or made[-1]
        return dataset

    model.experience = experience
    return made


@pytest.mark.thorough
@pytest.mark.parametrize(("algorithm", "env", "settings"), CASES)
def test_an_algorithm_learns_and_counts_the_rows_of_those_who_are_there(algorithm, env, settings):
    model = tiny(algorithm, f"tests.agents.{env}", max_env_steps=300, **settings)
    before, made = weights(model), watch(model)
    fit(model)
    valid = np.array([step.valid for step in made])
    assert model.env_steps == valid.sum() >= 300
    assert valid.all() == (env in ("InTurn", "MaskedInfo", "MaskedInTurn")) and model.num_envs == valid.shape[1]
    assert torch.isfinite(weights(model)).all() and not torch.equal(before, weights(model))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [SAC, DQN])
def test_no_row_of_who_is_not_there_is_in_a_replay_buffer(algorithm):
    model, kept = tiny(algorithm, "tests.agents.Visited", max_env_steps=200), []
    model.on_train_end = lambda: kept.append(model.dataset.buffer.sample(500))
    fit(model)
    batch = kept[0]
    seen = Counter((int(a), int(t)) for a, t in batch.obs.tolist())
    assert set(seen) == {(0, t) for t in range(6)} | {(1, t) for t in (1, 2, 4, 5)}
    number, t = batch.obs[:, 0], batch.obs[:, 1]
    assert np.array_equal(batch.next_obs, np.stack([number, t + 1], 1))  # the dead see their last, and nobody another episode
    over = (t == 5) | ((number == 1) & (t == 2))
    assert np.array_equal(batch.steps == 0, over)


class Spoiled:
    """A stepper whose rows of the absent hold numbers at random."""

    def __init__(self, stepper):
        self.stepper, self.draw = stepper, np.random.default_rng(0)

    def __getattr__(self, name):
        return getattr(self.stepper, name)

    def spoil(self, obs):
        absent = ~self.stepper.side.present
        for leaf in tree_leaves(obs):
            leaf[absent] = self.draw.integers(0, 2, leaf[absent].shape)
        return obs

    def reset(self, seed=None):
        obs, mask = self.stepper.reset(seed)
        return self.spoil(obs), mask

    def step(self, action):
        step = self.stepper.step(action)
        return step._replace(obs=self.spoil(step.obs))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (PPO, {"normalize_obs": "running", "normalize_reward": True}),
        (PPO, {"memory": GRU(8, 4)}),
        (A2C, {"normalize_obs": "running"}),
        (IMPALA, {"memory": LSTM(8, 8)}),
        (POCA, {"normalize_obs": "running", "normalize_reward": True}),
        (POCA, {"memory": LSTM(8, 4)}),
        (POCA, {"reward_signals": {"rnd": {}, "curiosity": {}}}),
        (SAC, {"normalize_obs": "running", "normalize_reward": True}),
        (DQN, {"memory": GRU(8, 4)}),
        (PPO, {"reward_signals": {"rnd": {}, "curiosity": {}}}),
        (SAC, {"reward_signals": {"rnd": {}}}),
    ],
)
def test_what_stands_in_the_rows_of_the_absent_changes_nothing(algorithm, settings):
    found = []
    for spoiled in (False, True):
        model = tiny(algorithm, "tests.agents.Visited", max_env_steps=150, **settings)
        if spoiled:
            make = model.experience

            def experience(make=make):
                dataset = make()
                dataset.collector.stepper = Spoiled(dataset.collector.stepper)
                return dataset

            model.experience = experience
        fit(model)
        found.append((weights(model), model.env_steps, model.state_dict()))
    (ours, steps, state), (theirs, others, other) = found
    assert torch.equal(ours, theirs) and steps == others
    assert [name for name in state if not torch.equal(state[name], other[name])] == []


@pytest.mark.thorough
def test_an_agent_that_is_never_there_is_never_seen():
    model = tiny(PPO, "tests.agents.Haunted", max_env_steps=200, normalize_obs="running")
    fit(model)  # its observations would be NaN
    assert model.num_envs == 6 and model.env_steps >= 200
    counts = [float(value) for name, value in model.state_dict().items() if name.endswith("normalizer.statistics.0.count")]
    assert counts == [pytest.approx(model.env_steps, rel=0.01)]


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, pytest.param(DQN, marks=pytest.mark.slow)])
def test_the_value_of_a_death_is_what_it_pays(algorithm):
    if algorithm is DQN:
        settings = {"learning_rate": {"schedule": "linear", "start": 0.02}, "batch_size": 64, "buffer_size": 2000, "train_freq": 4}
        settings |= {"learning_starts": 100, "target_update_interval": 10, "steps_per_iteration": 100, "max_env_steps": 6000}
    else:
        settings = {"learning_rate": 0.01, "n_steps": 8, "batch_size": 32, "max_env_steps": 6000}
    model = tiny(algorithm, "tests.agents.Bequest", gamma=GAMMA, net_arch=[32], env={"num_envs": 4}, **settings)
    fit(model)
    obs = torch.tensor([[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1]], dtype=torch.float32)
    with torch.no_grad():
        value = model.network.value(obs).amax(1) if algorithm is DQN else model.network.value(obs)
    assert value.flatten().tolist() == pytest.approx([3.439, 2.71, 1.9, 1, 0.9, 1], abs=0.12)


@pytest.mark.parametrize("algorithm", [EvolutionStrategies, ARS])
def test_evolution_strategies_refuse_several_agents(algorithm):
    with pytest.raises(SettingError) as raised:
        tiny(algorithm, "tests.agents.Mortal")
    name = algorithm.__name__
    assert str(raised.value) == f"{name} does not support multi-agent environments such as tests.agents.Mortal; use another algorithm"


def test_evolution_strategies_of_one_behavior_are_refused_without_a_name_of_the_environment():
    behaviors = {"all": {"agents": "*", "learner": "ARS"}}
    with pytest.raises(SettingError, match=r"^behavior all: ARS does not support multi-agent environments; use another algorithm$"):
        MultiAgent({"id": "tests.agents.Mortal"}, behaviors)


class Bad(Mortal):
    """b, the second of two agents, gets no number in the second step of the first episode."""

    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        return obs, {agent: float("nan") if agent == "b" and self.t == 2 else reward for agent, reward in rewards.items()}, *others


@pytest.mark.thorough
def test_nan_names_the_agent_and_its_environment():
    with pytest.raises(NotFiniteError, match=r"^reward of agent b of environment 0 of Bad is nan at environment step"):
        fit(PPO(lambda: Bad(), n_steps=8, batch_size=8))


def test_minibatches_that_do_not_fit_count_agents_apart_from_environments():
    with pytest.raises(
        SettingError, match=r"batch_size 48 does not divide n_steps \* num_envs \* agents = 16 \* 4 \* 2 = 128; use 32 or 64"
    ):
        PPO({"id": "tests.agents.Mortal", "num_envs": 4}, n_steps=16, batch_size=48)


@pytest.mark.variants
@pytest.mark.parametrize("env", ["Visited", "InTurn"])
@pytest.mark.parametrize(
    ("algorithm", "actors"),
    [
        (IMPALA, {"num_actors": 2, "backend": "in_process"}),
        pytest.param(IMPALA, {"num_actors": 2}, marks=pytest.mark.slow),
        (PPO, None),
        pytest.param(SAC, None, marks=pytest.mark.slow),
    ],
)
def test_actors_and_threads_step_agents(algorithm, actors, env):
    settings = {"threaded": True} if actors is None else {"actors": actors}
    model = tiny(algorithm, f"tests.agents.{env}", max_env_steps=150, **settings)
    before = weights(model)
    fit(model)
    assert model.env_steps >= 150 and not torch.equal(before, weights(model))


def test_opponents_draw_other_numbers_than_the_learner():
    experience = tiny(PPO, "tests.agents.FirstWins").experience()
    next(iter(experience))
    learner, opponent = experience.collector.generator, experience.collector.stepper.opponent.generator
    assert learner.initial_seed() != opponent.initial_seed()
