"""Curiosity, RND and GAIL: their values, what they learn, and how algorithms use them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete

from lightning_rl import A2C, DQN, GRU, IMPALA, PPO, SAC, TD3, SettingError
from lightning_rl.distributions import make_distribution
from lightning_rl.rewards import SIGNALS
from lightning_rl.rewards.gail import GAIL
from lightning_rl.rewards.intrinsic import RND, Curiosity
from lightning_rl.rewards.signal import RewardSignal
from lightning_rl.spaces import Spaces
from lightning_rl.types import Experience, tree_map
from tests.fitting import ALL, OFF_POLICY, ON_POLICY, Rows, fit, tiny, twins_slow, weights

SPACES = Spaces(Box(-1, 1, (2,), np.float32), Discrete(3))
MIXED = Spaces(
    Dict({"image": Box(0, 255, (8, 8, 1), np.uint8), "which": Discrete(3), "where": Box(-1, 1, (2,), np.float32)}),
    Dict({"choice": Discrete(2), "turn": Box(-2, 2, (2,), np.float32)}),
)
every_algorithm = pytest.mark.parametrize("algorithm", twins_slow(ALL))


def actions_of(spaces):
    distribution = make_distribution(spaces.action)
    return lambda: distribution


def vectors(center, rows=64, seed=0):
    """Return steps around a point, with the choice 1."""
    torch.manual_seed(seed)
    obs, next_obs = (center + 0.1 * torch.randn(rows, 2) for _ in range(2))
    return Experience(
        obs, torch.ones(rows, dtype=torch.long), next_obs, torch.zeros(rows), torch.zeros(rows, dtype=torch.bool), weight(rows)
    )


def weight(rows):
    return torch.full((rows,), 1 / rows)


def mixed(rows=8):
    """Return steps with images, choices and vectors, and mixed actions."""
    obs = {
        "image": torch.randint(0, 256, (rows, 8, 8, 1), dtype=torch.uint8),
        "which": torch.randint(0, 3, (rows,)),
        "where": torch.randn(rows, 2),
    }
    action = {"choice": torch.randint(0, 2, (rows,)), "turn": torch.randn(rows, 2)}
    flag = torch.zeros(rows, dtype=torch.bool)
    return Experience(obs, action, tree_map(lambda leaf: leaf.flip(0), obs), torch.zeros(rows), flag, weight(rows))


def learn(signal, experience, updates=200):
    optimizer = signal.configure_optimizer()
    for group in optimizer.param_groups:
        group["lr"] = 3e-3
    for _ in range(updates):
        optimizer.zero_grad()
        loss, metrics = signal.loss(experience)
        loss.backward()
        optimizer.step()
    return metrics


def shown(signal, experience, seed=0):
    """Give a GAIL signal these steps as demonstrations."""
    signal.show(experience.obs, experience.action, experience.terminated, seed)
    return signal


# ---------------------------------------------------------------- numbers


def test_curiosity_is_clipped_to_pay_at_most_one():
    signal = Curiosity(SPACES, actions_of(SPACES), strength=0.02)
    signal.learned.fill_(True)
    with torch.no_grad():
        signal.forward_model[-1].bias.fill_(10.0)  # far from every code: ½ · 128 · 100
    assert signal(vectors(0.0)).tolist() == pytest.approx([1.0] * 64)


def test_curiosity_pays_half_the_squared_distance_of_the_codes():
    signal = Curiosity(SPACES, actions_of(SPACES), strength=1e-9, encoding_size=3)
    signal.learned.fill_(True)
    experience = vectors(0.0, 4)
    action = torch.nn.functional.one_hot(experience.action, 3).float()
    with torch.no_grad():
        predicted = signal.forward_model(torch.cat([signal.encode(experience.obs), action], -1))
        expected = 0.5 * (signal.encode(experience.next_obs) - predicted).square().sum(-1)
    torch.testing.assert_close(signal.reward(experience), expected)


def test_curiosity_pays_nothing_before_its_first_update():
    signal = Curiosity(SPACES, actions_of(SPACES))
    assert signal(vectors(0.0)).abs().sum() == 0
    signal.loss(vectors(0.0))
    assert (signal(vectors(0.0)) > 0).all()


@pytest.mark.parametrize("kind", [Curiosity, RND, GAIL])
def test_a_strength_of_zero_pays_nothing(kind):
    arguments = (SPACES,) if kind is RND else (SPACES, actions_of(SPACES), *(["none"] if kind is GAIL else []))
    assert kind(*arguments, strength=0.0)(vectors(0.0)).tolist() == [0.0] * 64


# ---------------------------------------------------------------- what they learn


@pytest.mark.thorough
@pytest.mark.parametrize("make", [lambda: Curiosity(SPACES, actions_of(SPACES), strength=1e-6), lambda: RND(SPACES, normalize=False)])
def test_known_observations_are_paid_less_than_new_ones(make):
    torch.manual_seed(1)
    signal, known, new = make(), vectors(-0.8), vectors(0.8)
    signal.loss(known)
    before = signal.reward(known).mean()
    learn(signal, known)
    assert signal.reward(known).mean() < 0.2 * before
    assert signal.reward(new).mean() > 3 * signal.reward(known).mean()


@pytest.mark.parametrize("kind", [Curiosity, RND, GAIL])
def test_signals_learn_from_images_choices_and_mixed_actions(kind):
    torch.manual_seed(0)
    arguments = (MIXED,) if kind is RND else (MIXED, actions_of(MIXED), *(["none"] if kind is GAIL else []))
    signal = kind(*arguments, encoding_size=8, **({"use_actions": True} if kind is GAIL else {}))
    if kind is GAIL:
        shown(signal, mixed(16))
    before = [parameter.detach().clone() for parameter in signal.parameters() if parameter.requires_grad]
    learn(signal, mixed(), 3)
    after = [parameter for parameter in signal.parameters() if parameter.requires_grad]
    assert all(not torch.equal(x, y) for x, y in zip(before, after, strict=True))
    assert signal(mixed()).shape == (8,) and signal(mixed()).isfinite().all()


def test_the_target_of_distillation_never_changes():
    signal = RND(SPACES)
    before = torch.nn.utils.parameters_to_vector(signal.target.parameters()).clone()
    learn(signal, vectors(0.0), 5)
    assert torch.equal(torch.nn.utils.parameters_to_vector(signal.target.parameters()), before)


# ---------------------------------------------------------------- in algorithms


class Paid(RewardSignal):
    """Pays 100 · next episode + next t of `Scripted`, seen and next."""

    def __init__(self, gamma: float = 0.5, strength: float = 1.0, ignore_done: bool = False) -> None:
        super().__init__(gamma, strength, ignore_done)

    def forward(self, experience):
        return self.strength * (experience.next_obs[..., 1] + 0.01 * experience.obs[..., 1])


class Constant(Paid):
    """Pays 2."""

    def forward(self, experience):
        return torch.full(experience.terminated.shape, 2.0 * self.strength)


@pytest.fixture
def paid(monkeypatch):
    monkeypatch.setitem(SIGNALS, "paid", Paid)
    monkeypatch.setitem(SIGNALS, "constant", Constant)


@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("algorithm", twins_slow(ON_POLICY))
def test_a_rollout_holds_next_observations(algorithm, autoreset, paid):
    model = tiny(algorithm, reward_signals={"paid": {}}, env={"autoreset": autoreset})
    seen, prepare = [], model.prepare
    model.prepare = lambda rollout: seen.append(tree_map(torch.clone, prepare(rollout)[0])) or prepare(rollout)
    fit(model)
    for rollout in seen:
        valid = rollout.valid
        assert torch.equal(rollout.next_obs[..., 0][valid], rollout.obs[..., 0][valid])  # of the same episode
        assert torch.equal(rollout.next_obs[..., 1][valid], rollout.obs[..., 1][valid] + 1)
        torch.testing.assert_close(rollout.reward[..., 1][valid], rollout.obs[..., 1][valid] * 1.01 + 1)


@pytest.mark.variants
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("memory", [None, GRU(4, 4, 1)], ids=["", "with a memory"])
@pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
def test_a_replayed_window_is_paid_step_by_step(algorithm, memory, n_steps, paid):
    model = tiny(algorithm, reward_signals={"paid": {"gamma": 0.5}}, n_steps=n_steps, memory=memory)
    batches, end_update = [], model.end_update
    model.end_update = lambda batch: batches.append(batch) or end_update(batch)
    fit(model)
    compared = 0
    for batch in batches:
        for i in torch.nonzero(batch.weight > 0).flatten():
            t, rest = float(batch.obs[i, 1]), 3 - int(batch.obs[i, 1])
            steps = range(min(n_steps, rest))  # an episode has three steps
            expected = sum(0.5**k * ((t + k + 1) + 0.01 * (t + k)) for k in steps)
            assert batch.reward[i, 1].item() == pytest.approx(expected, abs=1e-4)
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("ignore_done", [False, True])
@every_algorithm
def test_a_stream_can_ignore_terminations(algorithm, ignore_done, paid):
    model = tiny(algorithm, reward_signals={"constant": {"gamma": 0.5, "ignore_done": ignore_done}})
    seen = []
    if algorithm in ON_POLICY:
        prepare = model.prepare
        model.prepare = lambda rollout: seen.append((rollout.terminated.clone(), prepare(rollout)[1])) or prepare(rollout)
    else:
        end_update = model.end_update
        model.end_update = lambda batch: seen.append((batch.experience.terminated, batch.discount)) or end_update(batch)
    fit(model)
    over = torch.cat([terminated.flatten() for terminated, _ in seen])
    discount = torch.cat([discount.reshape(-1, 2) for _, discount in seen])
    assert 0 < over.sum() < len(over)
    assert (discount[over, 0] == 0).all() and (discount[~over, 0] > 0.9).all()
    assert (discount[over, 1] == (0.5 if ignore_done else 0)).all() and (discount[~over, 1] == 0.5).all()


@pytest.mark.parametrize("algorithm", twins_slow(ON_POLICY))
def test_the_value_after_a_termination_is_that_of_the_last_observation(algorithm, paid):
    model = tiny(algorithm, reward_signals={"constant": {"ignore_done": True}})
    seen, prepare = [], model.prepare

    def watched(rollout):
        with torch.no_grad():
            expected = model.network.value(rollout.next_obs)
        torch.testing.assert_close(rollout.next_value[rollout.valid], expected[rollout.valid], atol=1e-5, rtol=1e-5)
        seen.append(int(rollout.terminated.sum()))
        return prepare(rollout)

    model.prepare = watched

    fit(model)
    assert sum(seen) > 0


LEARNERS = {
    PPO: {"n_steps": 8, "batch_size": 32, "n_epochs": 4, "learning_rate": 0.01, "max_env_steps": 6_000},
    A2C: {"n_steps": 8, "use_rms_prop": False, "learning_rate": 0.01, "max_env_steps": 6_000},
    IMPALA: {"n_steps": 8, "use_rms_prop": False, "learning_rate": 0.01, "max_env_steps": 6_000},
    SAC: {"tau": 0.1, "ent_coef": 1e-4},
    DQN: {"target_update_interval": 10, "exploration_final_eps": 0.2},
    TD3: {"tau": 0.2},
}
REPLAY = {"batch_size": 64, "learning_starts": 600, "buffer_size": 4_000, "steps_per_iteration": 100, "max_env_steps": 3_000}


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, DQN, *(pytest.param(each, marks=pytest.mark.slow) for each in (SAC, A2C, IMPALA, TD3))])
def test_two_signals_have_separate_values(algorithm, paid):
    # 1 / (1 - 0.9) for the environment's 1, 2 / (1 - 0.5) for the other's 2
    replay = {} if algorithm in ON_POLICY else REPLAY | {"learning_rate": {"schedule": "linear", "start": 0.02}}
    env = {"num_envs": 4, "kwargs": {"action": "box" if algorithm is TD3 else "discrete"}}
    settings = {"gamma": 0.9, "reward_signals": {"constant": {"gamma": 0.5}}, "net_arch": [16]} | replay | LEARNERS[algorithm]
    model = tiny(algorithm, "tests.environments:Endless-v0", env=env, **settings)
    fit(model)
    obs = torch.zeros(1, 1)
    with torch.no_grad():
        if algorithm in ON_POLICY:
            values = model.network.value(obs)[0]
        elif algorithm is DQN:
            values = model.network.value(obs)[0, 0]
        else:
            action = model.network.sample(obs, deterministic=True)[0]
            values = model.critic(obs, model.actions.continuous(action) if algorithm is SAC else action)[0, 0, 0]
    assert values.tolist() == pytest.approx([10, 4], rel=0.04)


@pytest.mark.variants
@every_algorithm
@pytest.mark.parametrize("name", ["curiosity", "rnd"])
def test_signals_learn_with_the_policy_and_are_saved_in_checkpoints(algorithm, name, tmp_path):
    model = tiny(algorithm, reward_signals={name: {"encoding_size": 4}})
    signal = model.reward_signals[name]
    before = torch.nn.utils.parameters_to_vector(signal.parameters()).clone()
    trainer = fit(model)
    after = torch.nn.utils.parameters_to_vector(signal.parameters())
    assert model.signal_learner.updates == model.updates and not torch.equal(before, after)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = algorithm.load_from_checkpoint(tmp_path / "model.ckpt")
    assert torch.equal(torch.nn.utils.parameters_to_vector(loaded.reward_signals[name].parameters()), after)


@every_algorithm
def test_signals_can_learn_at_their_own_rate(algorithm):
    model = tiny(algorithm, reward_signals={"rnd": {}}, reward_signal_steps_per_update=8)
    fit(model)
    # A2C has one for each update at most; learning_starts are 16
    assert model.signal_learner.updates == {PPO: 96 // 8, A2C: 6, IMPALA: 6}.get(algorithm, (96 - 16) // 8)
    assert model.updates > model.signal_learner.updates or algorithm in (A2C, IMPALA)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
def test_signals_can_learn_more_often_than_the_policy(algorithm):
    model = tiny(algorithm, reward_signals={"rnd": {}}, reward_signal_steps_per_update=0.5)
    fit(model)
    assert model.signal_learner.updates == (96 - 16) / 0.5 > model.updates


def test_signals_do_not_make_up_for_the_time_before_learning():
    model = tiny(DQN, reward_signals={"rnd": {}}, reward_signal_steps_per_update=1, learning_starts=80)
    counts, end_update = [], model.end_update
    model.end_update = lambda batch: (end_update(batch), counts.append(model.signal_learner.updates))
    fit(model)
    assert counts == [4, 8, 12, 16]


@pytest.mark.variants
@every_algorithm
def test_the_logged_return_is_that_of_the_environment(algorithm):
    plain, other = Rows(), Rows()
    fit(tiny(algorithm, learning_rate=0.0), logger=plain)
    fit(tiny(algorithm, learning_rate=0.0, reward_signals={"extrinsic": {"strength": 0.0}, "rnd": {}}), logger=other)
    returns, others = ([row["rollout/ep_rew_mean"] for _, row in log.rows if "rollout/ep_rew_mean" in row] for log in (plain, other))
    # three scripted rewards, of which an action moves 0.2 up or down at most, however little a policy is paid
    assert others == pytest.approx(returns, abs=1.2) and others[-1] > 200


@pytest.mark.thorough
@every_algorithm
def test_a_signal_changes_what_is_learned_and_the_extrinsic_one_can_be_removed(algorithm):
    def learned(reward_signals):
        model = tiny(algorithm, reward_signals=reward_signals)
        fit(model)
        assert len(model.reward_signals) == len(model.discounts)
        return weights(model)

    only, both = learned({"extrinsic": None, "rnd": {}}), learned({"rnd": {}})
    assert len(only) <= len(both) and not torch.equal(only, both[: len(only)])


@pytest.mark.parametrize(
    ("signals", "message"),
    [
        ({"extrinsic": None}, "no signal is left; a policy needs one"),
        ({"extrinsic": None, "rnd": None}, "no signal is left; a policy needs one"),
        ({"rdn": {}}, "reward_signals.rdn is not a reward signal; did you mean rnd"),
        ({"rnd": {"strenght": 1}}, "reward_signals.rnd.strenght is not a setting; did you mean strength"),
        ({"rnd": {"gamma": 2}}, "reward_signals.rnd.gamma must be"),
        ({"curiosity": {"encoding_size": 0}}, "reward_signals.curiosity.encoding_size"),
        ({"gail": {}}, "reward_signals.gail.demo_path is missing"),
        ({"rnd": {"ignore_done": "yes"}}, "reward_signals.rnd.ignore_done must be true or false"),
        ({"rnd": {"normalize": 3}}, "reward_signals.rnd.normalize must be true or false, got 3"),
        ({"curiosity": {"normalize": None}}, "reward_signals.curiosity.normalize must be true or false"),
        ({"extrinsic": {"normalize": "no"}}, "reward_signals.extrinsic.normalize must be true or false"),
        ({"extrinsic": {"scale": "abc"}}, "reward_signals.extrinsic.scale must be a number"),
        ({"extrinsic": {"clip": -1}}, "reward_signals.extrinsic.clip must be > 0, got -1"),
        ({"rnd": 3}, "reward_signals.rnd must be a mapping"),
        ([], "reward_signals must be a mapping"),
    ],
)
def test_invalid_signals_are_one_line(signals, message):
    with pytest.raises(SettingError, match=message):
        tiny(PPO, reward_signals=signals)


def test_null_removes_a_signal():
    assert list(tiny(PPO, reward_signals={"rnd": None, "curiosity": {}}).reward_signals) == ["extrinsic", "curiosity"]
