"""Off-policy learning with goals in hindsight: what it makes possible, what cannot be combined with it, and what a run stores of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_rl import DQN, GRU, SAC, TD3, TQC, CrossQ, SettingError
from tests.command_line import TINY, run
from tests.experts import at_random
from tests.fitting import fit, tiny, weights

GOALS, BOX = "tests.environments:Goals-v0", "tests.environments:GoalsBox-v0"
HINDSIGHT = {"relabel": {"strategy": "future", "k": 4}}


def batches(model: Any) -> list[Any]:
    """What a model learns from."""
    found, end_update = [], model.end_update
    model.end_update = lambda batch: (found.append(batch), end_update(batch))
    fit(model)
    return found


@pytest.mark.variants
@pytest.mark.parametrize(
    ("algorithm", "env_id"), [(SAC, BOX), (SAC, GOALS), (DQN, GOALS), (TD3, BOX), (TQC, BOX), (CrossQ, BOX)], ids=lambda each: str(each)
)
def test_rewards_of_every_algorithm_are_those_of_the_goals_in_its_batches(algorithm, env_id):
    for batch in batches(tiny(algorithm, env_id, replay=HINDSIGHT, reward_scale=0.5, batch_size=32)):
        reached = batch.next_obs["achieved_goal"] == batch.obs["desired_goal"]
        assert torch.equal(batch.reward, torch.where(reached, 0.0, -0.5))
        assert torch.equal(batch.obs["desired_goal"], batch.next_obs["desired_goal"])
        goal, start = batch.obs["desired_goal"], batch.obs["achieved_goal"]
        assert torch.equal(goal // 100, start // 100) and (goal > start).float().mean() > 0.5


@pytest.mark.parametrize(
    "settings",
    [
        {"n_steps": 3, "replay": {"prioritized": True, "optimize_memory_usage": True}},
        {"env": {"autoreset": "NEXT_STEP"}},
        {"env": {"autoreset": "DISABLED"}},
        {"threaded": True, "normalize_reward": True},
    ],
)
def test_it_goes_with_windows_priorities_resets_and_collection_in_a_thread(settings):
    replay = HINDSIGHT | settings.get("replay", {})
    model = tiny(SAC, BOX, **(settings | {"replay": replay}))
    for batch in batches(model):
        assert torch.equal(batch.obs["desired_goal"] // 100, batch.obs["achieved_goal"] // 100)
    assert weights(model).isfinite().all()


@pytest.mark.parametrize("share", [None, 0.5])
def test_it_goes_with_demonstrations(share):
    replay = HINDSIGHT | {"demonstrations": at_random(GOALS, "{}"), "demonstration_share": share}
    goals = np.concatenate([batch.obs["desired_goal"][:, 0] for batch in batches(tiny(DQN, GOALS, replay=replay))])
    assert set(goals % 100) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"memory": GRU(4, 4)}, "replay.relabel cannot be combined with memory"),
        (
            {"reward_signals": {"rnd": {}}},
            "replay.relabel cannot be combined with reward_signals.rnd, which learns from the original goals",
        ),
        (
            {"reward_signals": {"extrinsic": {"ignore_done": True}}},
            "replay.relabel cannot be combined with reward_signals.extrinsic.ignore_done",
        ),
        ({"env": {"frame_stack": 2}}, "replay.relabel cannot be combined with env.frame_stack"),
    ],
)
def test_what_it_does_not_go_with_is_named_in_one_line(settings, words):
    with pytest.raises(SettingError) as error:
        fit(tiny(SAC, BOX, replay=HINDSIGHT, **settings))
    assert str(error.value).startswith(words) and "\n" not in str(error.value)


def test_agents_have_no_goals():
    with pytest.raises(SettingError, match=r"^replay\.relabel is for environments of one agent; leave it out$"):
        fit(tiny(SAC, "tests.agents.Together", replay=HINDSIGHT))


@pytest.mark.thorough
def test_the_command_line_takes_each_setting_and_refuses_in_one_line_with_status_2(folder, capfd):
    start = TINY.replace("--model PPO", "fit --model DQN").replace("--model.n_steps 16", "").replace("--model.n_epochs 1", "")
    start += "--model.learning_starts 16 "
    status, _, err = run(f"{start} --model.env.id lightning_rl/BitFlipping-v0 --model.replay.relabel.k 2", capfd)
    assert (status, err) == (0, "")
    (config,) = (folder / "runs").rglob("config.yaml")
    assert "strategy: future" in config.read_text() and "k: 2" in config.read_text()
    for arguments, words in (
        ("--model.env.id CartPole-v1 --model.replay.relabel.k 2", "replay.relabel needs observations with achieved_goal and desired_goal"),
        ("--model.env.id CartPole-v1 --model.replay.relabel.k 0", "replay.relabel.k must be >= 1, got 0"),
        ("--model.env.id CartPole-v1 --model.replay.relabel.kk 2", "did you mean k?"),
        ("--model.env.id CartPole-v1 --model.replay.relabel.strategy last", "relabel.strategy must be one of future, final, episode"),
    ):
        status, _, err = run(f"{start} {arguments}", capfd)
        assert status == 2 and words in err and err.count("\n") == 1, err


def test_a_checkpoint_keeps_the_settings(tmp_path):
    model = tiny(DQN, GOALS, replay={"relabel": {"strategy": "final", "k": 2}})
    trainer = fit(model)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = DQN.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert (loaded.replay.relabel.strategy, loaded.replay.relabel.k) == ("final", 2)
    assert loaded.hparams["replay"]["relabel"] == {"strategy": "final", "k": 2}


@pytest.mark.slow
@pytest.mark.parametrize(("replay", "low", "high"), [(HINDSIGHT, 0.9, 1.0), ({}, 0.0, 0.1)], ids=["with", "without"])
def test_ten_bits_are_flipped_with_hindsight_and_not_without(replay, low, high):
    settings = {"learning_rate": 1e-3, "buffer_size": 50_000, "learning_starts": 200, "train_freq": 4, "gamma": 0.98}
    settings |= {"target_update_interval": 100, "net_arch": [128], "batch_size": 128, "steps_per_iteration": 100}
    model = tiny(DQN, "lightning_rl/BitFlipping-v0", replay=replay, max_env_steps=20_000, env={"num_envs": 4}, **settings)
    found = []
    model.on_train_end = lambda: found.append(model.dataset.collector.metrics()["rollout/success_rate"])
    fit(model)
    assert low <= found[0] <= high
