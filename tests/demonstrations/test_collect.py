"""`lightning-rl collect`: a checkpoint's policy as a dataset."""

from __future__ import annotations

import errno
import json
import sys
from copy import deepcopy

import minari
import numpy as np
import pytest
import pytorch_lightning as pl
from minari.dataset.minari_storage import MinariStorage

from lightning_rl import DQN, GRU, PPO, SAC, Trainer, load_demonstrations, load_policy
from lightning_rl.data import episodes
from lightning_rl.data.players import make_player
from lightning_rl.demonstrations.dataset import Demonstration
from lightning_rl.envs.masks import detect_masks
from lightning_rl.spaces import MASK
from lightning_rl.types import tree_index, tree_leaves
from tests.command_line import run
from tests.demonstrations.episodes import differences, stacked
from tests.fitting import fit, tiny

KINDS = [
    pytest.param(PPO, "CartPole-v1", {}, {}, id="CartPole"),
    pytest.param(PPO, "Pendulum-v1", {"max_episode_steps": 20}, {"memory": GRU(4, 8), "normalize_obs": "running"}, id="Pendulum GRU"),
    pytest.param(PPO, "tests.environments:Anything-v0", {"kwargs": {"observation": "dict", "action": "nested"}}, {}, id="nested"),
    pytest.param(SAC, "tests.environments:Anything-v0", {"kwargs": {"observation": "image", "action": "hybrid"}}, {}, id="hybrid"),
    pytest.param(PPO, "tests.environments:Choosy-v0", {"kwargs": {"action": "nested", "way": "key"}}, {}, id="masks by key"),
    pytest.param(PPO, "tests.environments:Choosy-v0", {"kwargs": {"action": "multi-discrete", "way": "method"}}, {}, id="masks by method"),
    pytest.param(PPO, "CartPole-v1", {"frame_stack": 3, "vectorization": "async"}, {}, id="frames async"),
]


@pytest.fixture
def checkpoint(tmp_path):
    def checkpoint(algorithm=PPO, env_id="tests.environments:Scripted-v0", env=None, **settings):
        model = tiny(algorithm, env_id, env=env or {}, max_env_steps=16, **({"encoder_features": 4} | settings))
        fit(model).save_checkpoint(tmp_path / "a.ckpt")
        return model, tmp_path / "a.ckpt"

    return checkpoint


def replayed(model, path, seeds, actions=None):
    """Episodes of an environment of one's own with `load_policy`, or with given actions, one observation at a time."""
    player = make_player(model.env, 1, None)
    policy, (env,) = load_policy(path), player.envs
    for number, seed in enumerate(seeds):
        obs, info = env.reset(seed=seed)
        masks = detect_masks(env, info, "environment {}")
        memory, over, done = None, False, []
        obs, mask = masks.one(obs, info)
        seen = [(obs, mask)]
        while not over:
            if actions is None:
                action, memory = policy.act(obs, memory, **({MASK: mask} if len(mask) else {}))
            else:
                t = len(done)
                action = actions(number, t)
            obs, reward, terminated, truncated, info = env.step(action)
            over = terminated or truncated
            obs, mask = masks.one(obs, info, over=over)
            seen.append((obs, mask))
            done.append((action, reward, terminated, truncated))
        action, *flags = zip(*done, strict=True)
        obs, mask = stacked(seen)
        yield Demonstration(obs, stacked(action), *map(np.array, flags), mask)
    player.close()


@pytest.mark.variants
@pytest.mark.parametrize(("algorithm", "env_id", "env", "settings"), KINDS)
def test_what_is_collected_is_what_the_policy_plays_with_those_seeds(datasets, capfd, checkpoint, algorithm, env_id, env, settings):
    model, path = checkpoint(algorithm, env_id, env, **settings)
    status, out, err = run(f"collect --ckpt_path {path} --dataset played/mine-v0 --episodes 3 --seed 7", capfd)
    assert (status, err) == (0, "")
    loaded = load_demonstrations("played/mine-v0", model.spaces)
    assert differences(loaded, list(replayed(model, path, [7, 8, 9]))) == []
    said = out.splitlines()
    assert said[0] == f"dataset played/mine-v0: {datasets / 'played' / 'mine-v0'}" and said[1].startswith("3 episodes, ")


@pytest.mark.thorough
def test_drawn_actions_are_those_that_were_played(datasets, capfd, checkpoint):
    model, path = checkpoint(env_id="CartPole-v1")
    for seed in (0, 0, 1):
        options = f"--dataset drawn/v0 --episodes 4 --seed {seed} --deterministic false --force"
        status, out, _ = run(f"collect --ckpt_path {path} {options}", capfd)
        assert status == 0 and "drawn-v0" in out
        loaded = load_demonstrations("drawn/v0", model.spaces)
        again = list(replayed(model, path, range(seed, seed + 4), lambda number, t, loaded=loaded: loaded[number].action[t]))
        assert differences(loaded, again) == []
    assert {len(set(each.action.tolist())) for each in loaded} == {2}  # the most likely action of so young a policy is always the same
    metadata = json.loads((datasets / "drawn-v0" / "data" / "metadata.json").read_text())
    assert (metadata["algorithm_name"], metadata["total_episodes"]) == ("PPO", 4)
    assert minari.load_dataset("drawn-v0").recover_environment().spec.id == "CartPole-v1"


def test_the_statistics_are_those_of_the_episodes(datasets, capfd, checkpoint):
    _, path = checkpoint(env={"kwargs": {"period": 4, "endings": ("termination",)}})
    status, out, _ = run(f"collect --ckpt_path {path} --dataset any/thing-v0 --episodes 2", capfd)
    model = load_demonstrations("any/thing-v0", load_policy(path).spaces)
    returns = [each.reward.sum() for each in model]
    assert status == 0 and out.splitlines()[1] == (
        f"2 episodes, 8 steps, return {np.mean(returns):.2f} ± {abs(returns[1] - returns[0]) / 2:.2f}, mean length 4.0"
    )


def test_an_episode_without_end_is_cut_at_the_limit(datasets, capfd, checkpoint, monkeypatch):
    assert episodes.MAX_EPISODE_STEPS == 10_000
    monkeypatch.setattr(episodes, "MAX_EPISODE_STEPS", 6)
    model, path = checkpoint(env_id="tests.environments:Endless-v0", env={"kwargs": {"period": 1_000_000}})
    status, out, _ = run(f"collect --ckpt_path {path} --dataset endless-v0 --episodes 2", capfd)
    assert status == 0 and "2 episodes, 12 steps" in out
    assert [each.truncated.tolist() for each in load_demonstrations("endless-v0", model.spaces)] == [[False] * 5 + [True]] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dataset x-v0", "the following arguments are required: --ckpt_path"),
        ("--ckpt_path a.ckpt", "the following arguments are required: --dataset"),
        ("--ckpt_path nowhere.ckpt --dataset x-v0", "ckpt_path 'nowhere.ckpt' is not a file"),
        (
            "--ckpt_path a.ckpt --dataset x",
            "dataset 'x' is not a valid name for Minari: letters, digits, - and _ (two or more before a /), such as cartpole-v0",
        ),
        ("--ckpt_path a.ckpt --dataset ../x-v0", "dataset '../x-v0' is not a valid name for Minari"),
        ("--ckpt_path a.ckpt --dataset there-v0", "dataset 'there-v0' already exists, in"),
        ("--ckpt_path a.ckpt --dataset x-v0 --episodes 0", "--episodes must be >= 1, got 0"),
        ("--ckpt_path a.ckpt --dataset x-v0 --episodes many", "argument --episodes: invalid int value: 'many'"),
        ("--ckpt_path a.ckpt --dataset x-v0 --seed -1", "--seed must be >= 0 and <= 4294967295, got -1"),
        ("--ckpt_path a.ckpt --dataset x-v0 --deterministic maybe", "argument --deterministic: invalid choice: 'maybe'"),
        ("--ckpt_path a.ckpt --dataset x-v0 --episode 3", "did you mean --episodes?"),
        ("--ckpt_path a.ckpt --dataset", "argument --dataset: expected one argument"),
        ("--ckpt_path a.ckpt --dataset x-v0 --replay", "this checkpoint holds no replay buffer; name a run with replay, or its last.ckpt"),
        ("--ckpt_path a.ckpt --dataset x-v0 --replay --episodes 3", "leave out --episodes, --seed and --deterministic"),
    ],
)
def test_wrong_input_ends_in_one_line(datasets, capfd, checkpoint, tmp_path, monkeypatch, options, message):
    checkpoint()
    monkeypatch.chdir(tmp_path)
    (datasets / "there-v0" / "data").mkdir(parents=True)
    status, out, err = run(f"collect {options}", capfd)
    assert (status, out, err.count("\n")) == (2, "", 1) and message in err
    assert [path.name for path in datasets.iterdir()] == ["there-v0"]


def test_a_missing_package_and_a_full_disk_end_in_one_line(datasets, capfd, checkpoint, monkeypatch):
    _, path = checkpoint()

    def refuse(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MinariStorage, "new", refuse)
    status, _, err = run(f"collect --ckpt_path {path} --dataset x-v0 --episodes 1", capfd)
    assert status == 2 and err.count("\n") == 1 and "dataset 'x-v0' could not be saved in" in err and "No space left" in err
    monkeypatch.setitem(sys.modules, "minari", None)
    status, _, err = run(f"collect --ckpt_path {path} --dataset x-v0", capfd)
    assert status == 2 and err == (
        'error: a dataset of demonstrations needs the package minari, which is not installed; run: pip install "lightning_rl[minari]"\n'
    )


@pytest.mark.thorough
def test_a_model_of_a_ready_environment_cannot_be_collected(datasets, capfd, tmp_path):
    from lightning_rl.envs.make import make_vector_env
    from tests.environments import Scripted

    model = PPO(make_vector_env(Scripted, 2), net_arch=[8], n_steps=8, batch_size=8, max_env_steps=16)
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    status, _, err = run(f"collect --ckpt_path {tmp_path / 'a.ckpt'} --dataset x-v0", capfd)
    assert status == 2 and "was trained on a ready environment, which a file cannot store" in err


REPLAYS = {
    "CartPole": (DQN, "CartPole-v1", {}, {}),
    "a full buffer": (DQN, "CartPole-v1", {}, {"buffer_size": 61}),
    "frames kept once": (DQN, "CartPole-v1", {"frame_stack": 3}, {"replay": {"optimize_memory_usage": True}, "n_steps": 3}),
    "nested actions and masks": (SAC, "tests.environments:Choosy-v0", {"kwargs": {"action": "nested", "way": "key"}}, {}),
    "images and hybrid actions": (SAC, "tests.environments:Anything-v0", {"kwargs": {"observation": "image", "action": "hybrid"}}, {}),
    "memory and resets": (SAC, "Pendulum-v1", {"max_episode_steps": 7, "autoreset": "NEXT_STEP"}, {"memory": GRU(4, 8), "batch_size": 16}),
}


class Remembers(pl.Callback):
    """What was done in each environment, step by step, in the form of the environment."""

    def on_train_start(self, trainer, model):
        add, self.steps = model.dataset.buffer.add, []

        def remember(obs, action, step, *others):
            taken = model.network.distribution.to_env(action)
            for env in np.flatnonzero(step.valid):
                row = (tree_index(obs, env), tree_index(taken, env), step.reward[env], step.terminated[env])
                self.steps.append((env, deepcopy(row)))
            add(obs, action, step, *others)

        model.dataset.buffer.add = remember


@pytest.mark.variants
@pytest.mark.parametrize("case", REPLAYS)
def test_the_steps_of_a_replay_buffer_become_a_dataset(case, datasets, capfd, tmp_path):
    algorithm, env_id, env, settings = REPLAYS[case]
    settings = {"learning_starts": 1_000, "buffer_size": 500, "encoder_features": 4, "max_env_steps": 90} | settings
    model, remembers = tiny(algorithm, env_id, env={"num_envs": 2} | env, **settings), Remembers()
    trainer = Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False, logger=False, callbacks=[remembers])
    trainer.fit(model)
    status, out, err = run(f"collect --ckpt_path {trainer.run_folder} --dataset kept/replay-v0 --replay", capfd)
    assert status == 0 and " episodes, " in out, err
    episodes = load_demonstrations("kept/replay-v0", model.spaces)
    per_env = [[row for env, row in remembers.steps if env == number][-(settings["buffer_size"] // 2) :] for number in (0, 1)]
    expected = [row for rows in per_env for row in rows]
    assert sum(len(each.reward) for each in episodes) == len(expected) > 40
    found = [(each, t) for each in episodes for t in range(len(each.reward))]
    for (episode, t), (obs, action, reward, terminated) in zip(found, expected, strict=True):
        theirs, ours = tree_leaves((tree_index(episode.obs, t), tree_index(episode.action, t))), tree_leaves((obs, action))
        for stored, seen in zip(theirs, ours, strict=True):
            np.testing.assert_allclose(stored, seen, rtol=1e-6)
        assert episode.reward[t] == np.float32(reward) and episode.terminated[t] == terminated
    assert all((each.terminated | each.truncated).tolist() == [False] * (len(each.reward) - 1) + [True] for each in episodes)
