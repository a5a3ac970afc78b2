"""IQL, AWAC, TD3+BC and CQL: learning from a dataset alone, and from the environment after it."""

from __future__ import annotations

from dataclasses import fields

import gymnasium as gym
import numpy as np
import pytest
import torch

from lightning_rl import AWAC, CQL, DQN, GRU, IQL, SAC, TD3BC, RolloutEvaluator, SettingError, Trainer, load_policy
from lightning_rl.callbacks.progress import EnvStepsProgressBar
from lightning_rl.training.arguments import settings_of
from lightning_rl.types import tree_to_numpy
from tests.algorithms.test_probes import BEST, learned_values
from tests.environments import ConstantReward, DelayedReward, Endless, ObservedAction
from tests.experts import at_random, played
from tests.fitting import OFFLINE, fit, tiny, weights

every_offline_algorithm = pytest.mark.parametrize("algorithm", OFFLINE)
BOX = "tests.environments:ScriptedBox-v0"
PRIORITIZED = {"replay": {"prioritized": True}}
SHARED = {
    "dataset": [({}, at_random(BOX, "{}", episodes=7))],
    "updates_per_iteration": [({"learning_rate": {"schedule": "linear", "start": 0.01}}, 8)],
    "batch_size": [({}, 16)],
    "gamma": [({}, 0.5)],
    "n_steps": [({}, 3)],
    "reward_scale": [({}, 0.1)],
    "normalize_obs": [({"normalize_obs": "off"}, "running")],
    "replay": [({}, {"prioritized": True}), (PRIORITIZED, {"prioritized": True, "beta": 1.0}), ({}, {"replace": False})],
    "tau": [({}, 0.5)],
    "online": [({"max_env_steps": 96}, True)],
    "n_critics": [({}, 3)],
    "critic_subset": [({"n_critics": 3}, 1)],
    "critic_net_arch": [({}, [6])],
    "critic_layers": [({}, "layer_norm")],
    "critic_dropout": [({}, 0.5)],
    "actor_layers": [({}, "simba")],
}
ONLINE = {
    "buffer_size": 60,  # the dataset and some of the run's own
    "learning_starts": 24,
    "train_freq": 8,
    "gradient_steps": 2,
    "steps_per_iteration": 32,
    "warmup": "random",
}
QUANTILES = {"n_quantiles": [({}, 5)], "drop_quantiles": [({"n_quantiles": 5}, 2)]}
WEIGHTED = {
    "beta": [({}, 0.1)],
    "max_weight": [({}, 0.1)],
    "log_std_init": [({}, -1.0)],
    "memory": [({}, GRU(4, 4))],
}
OWN = {
    IQL: SHARED | QUANTILES | WEIGHTED | {"expectile": [({}, 0.9)]},
    AWAC: SHARED | QUANTILES | WEIGHTED,
    TD3BC: SHARED | QUANTILES | {"alpha": [({}, 0.1)], "memory": [({}, GRU(4, 4))]},
    CQL: SHARED | {"cql_alpha": [({}, 0.1)], "cql_actions": [({}, 2)], "backup_entropy": [({}, True)]},
}


def learned(algorithm, env_id=BOX, **settings):
    model = tiny(algorithm, env_id, **settings)
    fit(model)
    parts = [model.network, model.critic]
    return torch.cat([torch.nn.utils.parameters_to_vector(part.parameters()).detach() for part in parts])


@pytest.mark.thorough
@pytest.mark.parametrize(
    "algorithm, name, given, value",
    [
        pytest.param(
            *(algorithm, name, given, value),
            id=f"{algorithm.__name__}-{name}-{k}",
            marks=[pytest.mark.slow] if algorithm is not IQL and name in SHARED else [],
        )
        for algorithm, options in OWN.items()
        for name, rows in options.items()
        for k, (given, value) in enumerate(rows)
    ],
)
def test_every_option_changes_what_is_learned(algorithm, name, given, value):
    given = {"max_updates": 32, **given}
    if name == "online":
        del given["max_updates"]
        changed = learned(algorithm, online=True, **given)
        given = {"max_updates": 96}
    else:
        changed = learned(algorithm, **{**given, name: value})
    assert changed.isfinite().all()
    same_shape = learned(algorithm, **given)
    assert changed.shape != same_shape.shape or not torch.equal(changed, same_shape)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ONLINE)
def test_options_of_acting_and_learning_in_turn_count_online(name):
    falls = {"online": True, "learning_rate": {"schedule": "linear", "start": 0.01}}  # once an iteration
    assert not torch.equal(learned(IQL, **falls, **{name: ONLINE[name]}), learned(IQL, **falls))


@every_offline_algorithm
def test_every_option_is_tested(algorithm):
    base = {IQL: SAC, AWAC: SAC, TD3BC: TD3BC.__mro__[2], CQL: SAC}[algorithm]
    own = settings_of(algorithm).keys() - settings_of(base).keys() | SHARED.keys()
    assert own - OWN[algorithm].keys() == {"max_updates"}
    assert OWN[algorithm].keys() | ONLINE.keys() <= {each.name for each in fields(algorithm)}


@pytest.mark.thorough
@every_offline_algorithm
def test_a_run_counts_updates_and_steps_no_environment(algorithm):
    model = tiny(algorithm, max_updates=40)
    fit(model)
    assert (model.updates, model.env_steps, model.global_step) == (40, 0, 3)  # 16, 16 and 8


@pytest.mark.thorough
@every_offline_algorithm
def test_online_it_steps_the_environment_with_the_dataset_in_its_buffer(algorithm):
    model = tiny(algorithm, online=True)
    shown = sum(len(each.reward) for each in model.source)
    sizes = []
    model.on_train_batch_start = lambda batch, batch_idx: sizes.append(len(model.dataset.buffer))
    fit(model)
    assert model.env_steps == 96 and model.updates > 0
    assert sizes == [min(200, shown + 16 * k) for k in range(6)]


@every_offline_algorithm
def test_a_policy_that_learned_offline_is_finetuned_online(algorithm, tmp_path):
    Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False).fit(model := tiny(algorithm, max_updates=16))
    (run,) = tmp_path.glob("*/*/version_0")
    finetuned = tiny(algorithm, online=True, learning_starts=1000)
    Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False).fit(finetuned, init_from=run)
    assert torch.equal(weights(finetuned), weights(model))
    assert finetuned.env_steps == 96


@pytest.mark.parametrize("share", [None, 0.5])
def test_online_observations_are_normalized_by_the_dataset_wherever_it_is_kept(share):
    model = tiny(IQL, BOX, normalize_obs="frozen", online=True, replay={"demonstration_share": share})
    fit(model)
    (statistics,) = model.network.normalizer.statistics
    seen = np.concatenate([each.obs[:-1] for each in model.source])
    np.testing.assert_allclose(statistics.mean, seen.mean(0), rtol=1e-4)


@pytest.mark.variants
@pytest.mark.parametrize("memory", [None, GRU(4, 4, burn_in=2)])
def test_observations_are_normalized_by_all_steps_of_the_dataset(memory):
    model = tiny(TD3BC, BOX, memory=memory)
    fit(model)
    (statistics,) = model.network.normalizer.statistics
    seen = np.concatenate([each.obs[:-1] for each in model.source])
    np.testing.assert_allclose(statistics.mean, seen.mean(0), rtol=1e-4)


@pytest.mark.thorough
def test_evaluations_are_announced_for_the_iterations_that_they_wait_for(capsys):
    model = tiny(IQL, BOX, updates_per_iteration=8)
    fit(model, callbacks=[EnvStepsProgressBar(), RolloutEvaluator(every_n_updates=5, episodes=1)], enable_progress_bar=True)
    assert "  evaluation    1 episode after each iteration" in capsys.readouterr().out.splitlines()


PROBES = {
    "the value of a constant reward": (ConstantReward, {}, [0], [1]),
    "the discount of a reward one step later": (DelayedReward, {}, [0, 1], [0.9, 1]),
    "the value beyond a time limit": (Endless, {}, [0], [10]),
}
FAST_PROBES = ("the value beyond a time limit",)
"""The value of this one takes a reward, its discount and the bootstrap; the others say which is wrong."""
FAST = {"learning_rate": {"schedule": "linear", "start": 0.02}, "batch_size": 64, "net_arch": [16], "gamma": 0.9, "tau": 0.1}
SOFT = {"ent_coef": 1e-4}


def shown(env, action, episodes, **kwargs):
    return played(env(action=action, **kwargs), episodes)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(each, marks=[] if each in FAST_PROBES else [pytest.mark.slow]) for each in PROBES])
@every_offline_algorithm
def test_what_a_probe_teaches_offline(algorithm, name):
    env, kwargs, obs, values = PROBES[name]
    own = {CQL: SOFT | {"cql_alpha": 0.0}, IQL: {"expectile": 0.5}, TD3BC: {"tau": 0.2, "normalize_obs": "off"}}
    settings = FAST | own.get(algorithm, {})
    data = shown(env, "box", 300, **kwargs)
    model = tiny(
        algorithm, f"tests.environments:{env.__name__}-v0", env={"kwargs": {"action": "box"}}, dataset=data, max_updates=1500, **settings
    )
    fit(model)
    for row, value in zip(learned_values(model, torch.tensor(obs).float().unsqueeze(-1)).tolist(), values, strict=True):
        assert row == pytest.approx([value] * len(row), abs=0.03 * max(values))


@pytest.mark.parametrize(
    "algorithm, action, settings",
    [
        pytest.param(IQL, "discrete", {"beta": 10.0}, marks=pytest.mark.slow),
        pytest.param(IQL, "box", {"beta": 20.0, "expectile": 0.9}, marks=pytest.mark.slow),
        pytest.param(IQL, "hybrid", {"beta": 20.0, "expectile": 0.9}, marks=pytest.mark.slow),
        pytest.param(AWAC, "discrete", {"beta": 10.0}, marks=pytest.mark.thorough),
        pytest.param(AWAC, "box", {"beta": 20.0}, marks=pytest.mark.slow),
        pytest.param(TD3BC, "box", {"alpha": 50.0}, marks=pytest.mark.thorough),
        pytest.param(CQL, "box", {"cql_alpha": 0.1, **SOFT}, marks=pytest.mark.slow),
    ],
)
def test_the_best_actions_are_learned_from_random_ones(algorithm, action, settings):
    data = shown(ObservedAction, action, 600)
    env = {"kwargs": {"action": action}}
    model = tiny(algorithm, "tests.environments:ObservedAction-v0", env=env, dataset=data, max_updates=1500, **FAST | settings)
    fit(model)
    actions = model.network.distribution.to_env(tree_to_numpy(model.network.sample(torch.tensor([[-1.0], [1.0]]), deterministic=True)[0]))
    leaves = [actions] if not isinstance(actions, dict) else [actions[key] for key in sorted(actions)]
    assert np.concatenate([leaf.ravel() for leaf in leaves]) == pytest.approx(BEST[action], abs=0.15)


@pytest.mark.thorough
def test_masks_hold_in_the_policy_of_a_dataset():
    env = "tests.environments:Choosy-v0"
    model = tiny(IQL, env, max_updates=64, beta=0.0)
    fit(model)
    policy = load_policy(model)
    world = gym.make(env)
    obs, info = world.reset(seed=0)
    for _ in range(20):
        action, _ = policy.act(obs, action_mask=info["action_mask"], deterministic=False)
        assert info["action_mask"][action - world.action_space.start]
        obs, _, terminated, truncated, info = world.step(action)
        if terminated or truncated:
            obs, info = world.reset()


@pytest.mark.parametrize(
    "algorithm, settings, line",
    [
        (IQL, {"dataset": None}, "dataset: name one to learn from, such as pendulum/medium-v0, or set online"),
        (IQL, {"dataset": "nobody/knows-v0"}, "nobody/knows-v0"),
        (IQL, {"replay": {"demonstrations": "a/b-v0"}}, "replay.demonstrations needs online"),
        (IQL, {"replay": {"demonstration_share": 0.5}}, "replay.demonstration_share needs online"),
        (IQL, {"online": True, "replay": {"demonstrations": "a/b-v0"}}, "have the same meaning here: use only dataset"),
        (TD3BC, {"normalize_reward": True}, "normalize_reward needs online"),
        (AWAC, {"reward_signals": {"rnd": {}}}, "reward_signals.rnd needs online"),
        (CQL, {"env_id": "CartPole-v1"}, r"CQL needs a Box action space, got Discrete\(2\)"),
        (CQL, {"memory": GRU(4, 4)}, "memory is not a setting of CQL"),
        (TD3BC, {"env_id": "CartPole-v1"}, r"TD3BC needs a Box action space, got Discrete\(2\)"),
        (IQL, {"expectile": 0.3}, "expectile"),
    ],
)
def test_what_does_not_go_offline_is_one_line(algorithm, settings, line):
    settings = dict(settings)
    with pytest.raises(SettingError, match=line):
        fit(tiny(algorithm, settings.pop("env_id", BOX), **settings))


def test_a_dataset_is_not_stored_and_a_model_without_it_says_so(tmp_path):
    model = tiny(IQL, BOX, max_updates=16)
    Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False).fit(model)
    (file,) = tmp_path.glob("*/*/version_0/checkpoints/last.ckpt")
    loaded = IQL.load_from_checkpoint(file)
    with pytest.raises(SettingError, match="dataset: name one to learn from"):
        fit(loaded)


@pytest.mark.thorough
@pytest.mark.parametrize("first, then, reason", [({}, PRIORITIZED, "no priorities"), (PRIORITIZED, {}, "priorities")])
def test_priorities_begin_or_end_with_a_notice_where_a_run_is_continued(first, then, reason, tmp_path, capsys):
    def train(updates, **arguments):
        trainer = Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False)
        trainer.fit(model := tiny(IQL, BOX, max_updates=updates, **arguments.pop("settings")), **arguments)
        return model

    train(16, settings=first)
    assert train(32, settings=then, ckpt_path="last").updates == 32
    assert f"transitions are drawn in another order: the checkpoint has {reason}\n" in capsys.readouterr().out


def test_dqn_knows_no_offline_settings():
    with pytest.raises(SettingError, match="online is not a setting of DQN"):
        DQN("CartPole-v1", online=True)
