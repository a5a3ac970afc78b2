"""Algorithms whose networks remember."""

from __future__ import annotations

import csv
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lightning_rl import A2C, DQN, GRU, IMPALA, LSTM, PPO, SAC, TD3, Demonstration, RolloutEvaluator, SettingError, Trainer, load_policy
from lightning_rl.networks.acting import reset_memory
from lightning_rl.types import tree_index, tree_leaves, tree_map, tree_stack
from tests.command_line import run
from tests.fitting import ALL, OFF_POLICY, fit, tiny, twins_slow, weights

KINDS = pytest.mark.parametrize("kind", [LSTM, GRU])
MEMORIES = {PPO: LSTM(4, 4), A2C: GRU(4, 4), IMPALA: GRU(4, 4), SAC: LSTM(4, 4), DQN: GRU(4, 4), TD3: LSTM(4, 4)}
every_algorithm = pytest.mark.parametrize("algorithm", twins_slow(ALL))


def memories_that_act_and_learn():
    """Environments with lengths of sequences, modes, ways to share and kinds; every two of these occur together in a fast row."""
    environments, modes = [("Scripted-v0", 4), ("ScriptedBox-v0", 8), ("ScriptedDict-v0", 3)], ["SAME_STEP", "NEXT_STEP", "DISABLED"]
    for (i, env), (k, mode), share_encoder, kind in product(enumerate(environments), enumerate(modes), (True, False), (LSTM, GRU)):
        fast = share_encoder == ((i + k) % 2 == 0) and (kind is LSTM) == ((2 * i + k) % 3 != 1)
        yield pytest.param(*env, mode, share_encoder, kind, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.variants
@pytest.mark.parametrize(("env_id", "sequence_length", "autoreset", "share_encoder", "kind"), memories_that_act_and_learn())
def test_the_ratio_is_one_before_the_first_step_of_every_iteration(env_id, sequence_length, autoreset, share_encoder, kind):
    settings = {"normalize_obs": "running", "learning_rate": 0.01, "share_encoder": share_encoder, "n_steps": 8}
    rows = -(-8 // sequence_length) * sequence_length
    model = tiny(
        PPO, f"tests.environments:{env_id}", memory=kind(6, sequence_length), batch_size=rows, env={"autoreset": autoreset}, **settings
    )
    deviation: dict[int, list[float]] = {}
    loss = model.loss

    def watched(batch, *scheduled):
        assert batch.episode_start.shape == (sequence_length, rows // sequence_length)
        with torch.no_grad():
            log_prob, _, value = model.network.evaluate(batch.obs, batch.action, batch.memory, batch.episode_start)
            counts = batch.weight > 0
            ratio = (log_prob - batch.log_prob).exp().sub(1).abs().amax(-1)[counts]
            first = len(deviation.setdefault(model.trainer.global_step, [])) == 0
            if first:
                torch.testing.assert_close(value[counts], batch.value[counts], atol=1e-5, rtol=1e-6)
            deviation[model.trainer.global_step].append(float(ratio.max()))
        return loss(batch, *scheduled)

    model.loss = watched
    fit(model)
    assert len(deviation) >= 6
    assert max(first for first, *_ in deviation.values()) <= 1e-6
    assert min(last for *_, last in deviation.values()) > 1e-4  # later minibatches meet a policy that has moved


@KINDS
def test_the_first_ratio_of_one_environment_is_one_where_episodes_begin_in_a_rollout(kind):
    model = tiny(PPO, "CartPole-v1", memory=kind(6, 32), env={"num_envs": 1}, n_steps=32, batch_size=32, n_epochs=1, max_env_steps=320)
    ratios, begun, loss = [], [], model.loss

    def watched(batch, *scheduled):
        with torch.no_grad():
            log_prob = model.network.evaluate(batch.obs, batch.action, batch.memory, batch.episode_start)[0]
        ratios.append((log_prob - batch.log_prob).exp()[batch.weight > 0])
        begun.append((bool(batch.episode_start[0]), int(batch.episode_start[1:].sum())))
        return loss(batch, *scheduled)

    model.loss = watched
    fit(model)
    assert sum(not first and within > 0 for first, within in begun) > 5
    torch.testing.assert_close(torch.cat(ratios), torch.ones(320, 1), atol=1e-5, rtol=0)


@KINDS
def test_a_rollout_holds_the_memory_before_each_of_its_sequences(kind):
    model = tiny(PPO, memory=kind(6, 3), batch_size=9, n_steps=8)
    seen = []
    model.training_step = lambda rollout, batch_idx: seen.append(tree_map(torch.clone, rollout))
    fit(model)
    memory, network = model.network.initial_memory(2), model.network
    for rollout in seen:  # the weights never change: all of it is one long sequence
        for t in range(8):
            if t % 3 == 0:
                expected = tree_map(lambda leaf: torch.as_tensor(leaf), memory)
                torch.testing.assert_close(tree_index(rollout.memory, t // 3), expected, atol=1e-6, rtol=0)
            _, memory = network.policy(rollout.obs[t], memory, rollout.episode_start[t])
        assert tree_leaves(rollout.memory)[0].shape == (3, 2, network.memory.num_features)


def test_rows_that_fill_a_last_sequence_do_not_count():
    model = tiny(PPO, memory=LSTM(4, 5), batch_size=10, n_steps=8)  # 5 + 3 rows of 2 environments
    seen = []
    loss = model.loss
    model.loss = lambda batch, *scheduled: (seen.append((batch.weight > 0).sum()), loss(batch, *scheduled))[1]
    fit(model)
    assert len(seen) == 6 * 2 * 2  # iterations, epochs, minibatches
    assert sum(map(int, seen)) == 6 * 2 * 16
    assert {int(count) for count in seen} <= {6, 8, 10}


@every_algorithm
def test_every_network_of_an_algorithm_learns_to_remember(algorithm):
    model = tiny(algorithm, memory=MEMORIES[algorithm])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters() if "memory." in name}
    fit(model)
    moved = {name for name, parameter in before.items() if not torch.equal(model.get_parameter(name), parameter)}
    assert len(before) >= 4 and moved == before.keys()


REPLAY = {"batch_size": 64, "learning_starts": 400, "train_freq": 4, "tau": 0.1, "buffer_size": 4_000, "steps_per_iteration": 100}
LEARNING: dict[type, tuple[dict[str, Any], int]] = {
    PPO: ({"n_steps": 16, "batch_size": 32, "n_epochs": 4}, 3_000),
    A2C: ({"n_steps": 8, "use_rms_prop": False}, 6_000),
    IMPALA: ({"n_steps": 8, "use_rms_prop": False}, 6_000),
    SAC: (REPLAY | {"ent_coef": 1e-3}, 3_000),
    DQN: (REPLAY | {"tau": 1.0, "target_update_interval": 10}, 3_000),
    TD3: (REPLAY, 3_000),
}
TASKS = [
    (PPO, "discrete"),
    (DQN, "discrete"),
    (SAC, "discrete"),
    (PPO, "box"),
    (A2C, "discrete"),
    (IMPALA, "discrete"),
    (SAC, "box"),
    (SAC, "hybrid"),
    (TD3, "box"),
]
FAST = {(PPO, "discrete", LSTM), (DQN, "discrete", LSTM), (PPO, "discrete", None)}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "action", "kind"),
    [pytest.param(*task, kind, marks=[] if (*task, kind) in FAST else pytest.mark.slow) for task in TASKS for kind in (LSTM, GRU, None)],
)
def test_what_was_seen_a_step_before_is_acted_on(kind, algorithm, action):
    settings, steps = LEARNING[algorithm]
    if action == "hybrid":
        settings, steps = settings | {"gradient_steps": 2}, 2 * steps
    env = {"num_envs": 4, "kwargs": {"action": action}}
    settings = {"learning_rate": {"schedule": "linear", "start": 0.01}, "max_env_steps": steps, "net_arch": [16]} | settings
    returns = []
    for seed in range(3 if action == "hybrid" else 1):  # one of three may learn to act without looking
        memory = None if kind is None else kind(16, 8)
        model = tiny(algorithm, "tests.environments:Recall-v0", env=env, memory=memory, seed=seed, **settings)
        fit(model)
        returns.append(np.mean([episode.return_ for episode in RolloutEvaluator(episodes=40, num_envs=4).play(model)]))
    best, blind = {"discrete": (1, 0), "box": (0, -0.5), "hybrid": (1, -0.5)}[action]
    assert max(returns) < blind + 0.4 if kind is None else np.median(returns) > best - 0.15


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, SAC, *(pytest.param(each, marks=pytest.mark.slow) for each in (A2C, IMPALA, DQN, TD3))])
@pytest.mark.parametrize("setting", [{"memory_size": 6}, {"sequence_length": 2}])
def test_each_setting_of_a_memory_changes_what_is_learned(algorithm, setting):
    def learned(**settings):
        model = tiny(algorithm, memory=LSTM(**({"memory_size": 4, "sequence_length": 4} | settings)))
        fit(model)
        return weights(model)

    plain, other = learned(), learned(**setting)
    assert len(plain) != len(other) or not torch.equal(plain, other)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
def test_a_burn_in_changes_what_is_learned(algorithm):
    models = [tiny(algorithm, memory=LSTM(4, 4, burn_in)) for burn_in in (0, 2)]
    for model in models:
        fit(model)
    assert not torch.equal(*map(weights, models))


@pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
@pytest.mark.parametrize("warmup", ["random", "policy"])
def test_the_stored_memory_is_that_of_the_policy(algorithm, warmup):
    model = tiny(algorithm, memory=LSTM(4, 4), learning_rate=0.0, warmup=warmup)
    kept = []
    model.on_train_end = lambda: kept.append(model.dataset.buffer)
    fit(model)
    row, network = kept[0].layout.row, model.network
    for ring in kept[0].first:
        memory, begins = network.initial_memory(1), True
        for i in range(ring, ring + 48):
            memory = tree_map(torch.as_tensor, reset_memory(memory, np.array([begins])))
            for stored, expected in zip(tree_leaves(row.memory), tree_leaves(memory), strict=True):
                np.testing.assert_allclose(stored[i], expected[0].numpy(), atol=1e-6)
            with torch.no_grad():
                _, memory = network.policy(torch.from_numpy(row.observation.obs[i : i + 1].copy()), memory, torch.tensor([begins]))
            begins = bool(row.ended[i])
    assert np.abs(row.memory[0]).max() > 0.01


@pytest.mark.parametrize("n_steps", [1, 3])
def test_the_targets_of_a_sequence_are_those_of_its_rows_taken_one_by_one(n_steps):
    model = tiny(DQN, memory=LSTM(4, 4, 1), n_steps=n_steps, learning_rate=0.0, double=True, gamma=0.9)
    compared = []
    loss = model.loss

    def watched(batch):
        if not compared:
            compared.append((float(loss(batch)[0].detach()), one_by_one(model, batch)))
        return loss(batch)

    model.loss = watched
    fit(model)
    assert compared[0][0] == pytest.approx(compared[0][1], rel=1e-4)


@torch.no_grad()
def one_by_one(model, batch):
    """The loss of double Q-learning, asking the networks for one slot of one sequence after the other."""
    slots, num = batch.episode_start.shape
    known = []
    for network in (model.network, model.target):
        table = torch.zeros(slots, num, 3)
        for k in range(num):
            memory = tree_map(lambda leaf, k=k: leaf[k : k + 1], batch.memory)
            for t in range(slots):
                features, memory = network.memory(network.encoder(batch.obs[t * num + k][None]), memory, batch.episode_start[t, k][None])
                table[t, k] = network._z(features)[0, :, 0, 0]
        known.append(table.flatten(0, 1))
    q, target_q = known
    total = 0.0
    for i, weight in enumerate(batch.weight):
        j = int(batch.successor[i])
        target = batch.reward[i, 0] + batch.discount[i, 0] * target_q[j, q[j].argmax()]
        total += float(weight * torch.nn.functional.huber_loss(q[i, batch.action[i]], target))
    return total


@pytest.mark.thorough
@pytest.mark.parametrize(("algorithm", "settings"), [*((each, {}) for each in ALL), (PPO, {"share_encoder": False})])
def test_a_policy_from_a_file_remembers_from_call_to_call(algorithm, settings, tmp_path):
    model = tiny(algorithm, memory=MEMORIES[algorithm], **settings)
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, enable_progress_bar=False)
    trainer.fit(model)
    policy = load_policy(trainer.run_folder / "checkpoints" / "last.ckpt")
    obs = np.random.default_rng(0).normal(size=(6, 3, 2)).astype(np.float32)
    memory, steps = None, []
    for row in obs:
        action, memory = policy.act(row, memory)
        steps.append(action)
    one, singles = None, []
    for row in obs[:, 1]:
        action, one = policy.act(row, one)
        singles.append(action)
    np.testing.assert_allclose(np.stack(steps)[:, 1], np.stack(singles), atol=1e-6)
    start = torch.zeros(6, 3, dtype=torch.bool)
    start[0] = True
    x = torch.from_numpy(obs)
    whole, _ = policy.network.policy(x, policy.network.initial_memory(3), start)
    expected = policy.network.distribution.to_env(policy.network.distribution.mode(whole[-1]).detach().numpy())
    np.testing.assert_allclose(steps[-1], expected, atol=1e-5)
    with pytest.raises(SettingError, match=r"^the memory is for 1 observations, not 3"):
        policy.act(obs[0], one)


def test_settings_made_in_python_and_read_from_a_file_are_the_same():
    for memory in (LSTM(6, 4), {"class_path": "LSTM", "init_args": {"memory_size": 6, "sequence_length": 4}}):
        stored = tiny(PPO, memory=memory).hparams["memory"]
        assert stored == {"class_path": "LSTM", "init_args": {"memory_size": 6, "sequence_length": 4, "burn_in": 0}}
    assert tiny(PPO).hparams["memory"] is None


@pytest.mark.thorough
@pytest.mark.parametrize("in_a_file", [False, True])
def test_dqn_learns_with_its_defaults_and_a_memory_that_is_named_on_the_command_line_or_in_a_config(in_a_file, folder, capfd):
    settings = {"env": {"id": "CartPole-v1"}, "memory": "LSTM", "max_env_steps": 1_500}
    (folder / "mine.yaml").write_text(yaml.safe_dump({"model": {"class_path": "DQN", "init_args": settings}}))
    named = "--model DQN --model.env.id CartPole-v1 --model.memory LSTM --model.max_env_steps 1500"
    quiet = "--evaluation null --trainer.enable_progress_bar false --trainer.accelerator cpu"
    assert run(f"fit {'--config mine.yaml' if in_a_file else named} {quiet}", capfd)[0] == 0
    with next(folder.rglob("metrics.csv")).open() as file:
        losses = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    assert losses and np.isfinite(losses).all()


@pytest.mark.parametrize(("algorithm", "settings"), [(PPO, {}), (SAC, {}), (DQN, {}), (TD3, {})])
def test_a_sequence_longer_than_a_batch_is_refused(algorithm, settings):
    with pytest.raises(SettingError, match=r"memory\.sequence_length 64 is longer than batch_size 8"):
        tiny(algorithm, memory=LSTM(), **settings)


def test_a_batch_that_is_no_number_of_sequences_is_refused():
    with pytest.raises(SettingError, match=r"batch_size 6 does not divide .* = 16 in sequences of 4; use 4 or 8"):
        tiny(PPO, memory=LSTM(4, 4), batch_size=6)


@pytest.mark.parametrize("algorithm", twins_slow(OFF_POLICY))
def test_a_batch_to_replay_that_is_no_number_of_sequences_is_refused(algorithm):
    with pytest.raises(SettingError, match=r"^batch_size 8 is no multiple of memory\.sequence_length 5; use 5 or 10$"):
        tiny(algorithm, memory=LSTM(4, 5))


def test_demonstrations_are_remembered_with_an_empty_memory():
    over = np.zeros(12, bool)
    shown = Demonstration(np.zeros((13, 2), np.float32), np.ones(12, int), np.ones(12), over, over)
    model = tiny(DQN, memory=LSTM(4, 4), replay={"demonstrations": [shown]})
    kept = []
    model.on_train_end = lambda: kept.append(model.dataset.buffer)
    fit(model)
    assert len(kept[0]) == 12 + 96
    assert all((leaf[:12] == 0).all() for leaf in tree_leaves(kept[0].layout.row.memory))
    assert tree_stack([model.network.initial_memory(1)] * 2)[0].shape == (2, 1, 2)


@pytest.mark.thorough
def test_a_checkpoint_with_a_memory_of_another_size_continues_with_new_episodes(tmp_path, capsys):
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, enable_progress_bar=False)
    trainer.fit(tiny(PPO, memory=LSTM(4, 4), max_env_steps=32))
    as_saved = trainer.run_folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(as_saved, weights_only=True)
    episodes = checkpoint["lightning_rl"]["ranks"][0]["data"]["collector"]["episodes"]
    episodes["memory"] = tuple(torch.zeros(3, 5) for _ in episodes["memory"])
    torch.save(checkpoint, tmp_path / "other.ckpt")
    for path, is_other in ((as_saved, False), (tmp_path / "other.ckpt", True)):
        model = tiny(PPO, memory=LSTM(4, 4), max_env_steps=64)
        trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, enable_progress_bar=False)
        trainer.fit(model, ckpt_path=path)
        assert model.env_steps == 64
        assert ("start new episodes: the checkpoint holds another memory" in capsys.readouterr().out) == is_other
