"""Behavioural cloning: what it learns from whatever actions, what its runs count, and what is judged."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

import lightning_rl as lrl
from lightning_rl import GRU, LSTM, PPO, BehavioralCloning, RecordEpisodes, Trainer, load_policy
from lightning_rl.data.players import make_player
from lightning_rl.distributions import make_distribution
from lightning_rl.errors import SettingError
from lightning_rl.loggers import read_rows
from lightning_rl.training import experience
from lightning_rl.training.loading import take_weights
from lightning_rl.training.side_learners import imitate
from lightning_rl.types import tree_leaves, tree_map
from tests.command_line import run
from tests.distributions.test_joint import SEEDS, drawn
from tests.environments import Anything
from tests.experts import at_random, balance, played
from tests.fitting import Rows, fit, tiny, weights

CARTPOLE = played(gym.make("CartPole-v1", max_episode_steps=150), 5, balance)


def cloned(folder: Path, checkpoint: Any = None, ckpt_path: Any = None, **settings: Any) -> tuple[Any, Any]:
    """A short run as a user makes it, on CartPole: the model and its Trainer."""
    evaluation = {"every_n_updates": 16, "episodes": 2, "num_envs": 2, "max_episode_steps": 20}
    model = tiny(BehavioralCloning, "CartPole-v1", **({"max_updates": 40, "log_interval": 16} | settings))
    trainer = Trainer(default_root_dir=folder, evaluation=evaluation, checkpoint=checkpoint or {}, accelerator="cpu")
    trainer.fit(model, ckpt_path=ckpt_path)
    return model, trainer


# ---------------------------------------------------------------- the loss, for all spaces


@pytest.mark.parametrize("action_dist", ["clipped_normal", "tanh_normal"])
@pytest.mark.parametrize("seed", SEEDS[:12])
def test_of_nested_actions_the_loss_is_the_negative_log_likelihood_part_by_part(seed, action_dist):
    _, distribution, x = drawn(seed, action_dist)
    action = distribution.sample(x)
    loss, _ = imitate(distribution, x, action, (), "nll", 0.0)
    assert torch.allclose(loss, -distribution.evaluate(x, action)[0], atol=1e-5)


def test_the_squared_error_is_only_that_of_continuous_parts():
    space = Dict({"bits": MultiBinary(2), "choice": Discrete(3), "turn": Box(-2, 2, (2,))})
    distribution = make_distribution(space, log_std_init=0.0)
    x = torch.tensor([[1.0, -2.0, 2.0, 0.0, -1.0, 0.5, -1.0]])
    action = {"bits": torch.tensor([[1.0, 0.0]]), "choice": torch.tensor([0]), "turn": torch.tensor([[1.5, 1.0]])}
    nll, near = imitate(distribution, x, action, (), "nll", 0.0)
    mse, _ = imitate(distribution, x, action, (), "mse", 0.0)
    softplus = [math.log1p(math.exp(-1)), math.log1p(math.exp(-2))]
    assert mse[0].tolist() == pytest.approx([*softplus, 0.16984602, 1.0, 4.0])
    assert nll[0].tolist() == pytest.approx([*softplus, 0.16984602, *(0.5 * error + 0.5 * math.log(2 * math.pi) for error in (1, 4))])
    found = {name: value.tolist() for name, value in near.items()}
    assert found == {"accuracy": [1], "action_rank": [0], "mean_abs_deviation": [1.5]}


def test_metrics_of_choices_are_means_over_branches():
    distribution = make_distribution(MultiDiscrete([2, 12, 21]))
    x = torch.cat([torch.tensor([0.0, 1.0]), torch.arange(12.0), torch.arange(21.0)]).expand(2, -1)
    action = torch.tensor([[1, 11, 20], [0, 7, 12]])  # ranks 0, 0, 0 and 1, 4, 8
    _, near = imitate(distribution, x, action, (), "nll", 0.0)
    found = {name: value.tolist() for name, value in near.items()}
    assert found == {
        "accuracy": [1, 0],
        "action_rank": [0, pytest.approx(13 / 3)],
        "top_5_accuracy": [1, 0.5],
        "top_10_accuracy": [1, 1],
    }


def test_deviations_are_those_of_what_the_environment_gets():
    distribution = make_distribution(Box(np.float32([-2, 0]), np.float32([2, 100])), "tanh_normal")
    action = torch.as_tensor(distribution.from_env(np.float32([[1, 75], [-2, 50]])))
    _, near = imitate(distribution, torch.zeros(2, 2), action, (), "mse", 0.0)  # the means are 0 and 50
    assert near["mean_abs_deviation"].tolist() == pytest.approx([13, 1], rel=1e-4)


def test_choices_that_are_ruled_out_take_no_part():
    distribution = make_distribution(Discrete(4))
    mask = torch.tensor([[True, False, True, False]])
    loss, near = imitate(distribution, torch.tensor([[1.0, 9.0, 1.0, 9.0]]), torch.tensor([2]), mask, "nll", 0.4)
    assert loss.item() == pytest.approx(math.log(2)) and near["action_rank"].item() == 0


# ---------------------------------------------------------------- what is learned


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("observation", "action"),
    [
        *(pytest.param("vector", action, marks=[] if action == "box" else [pytest.mark.slow]) for action in Anything.action_spaces),
        ("dict", "nested"),  # all kinds together
    ],
)
def test_one_episode_of_any_actions_is_learned_by_heart(observation, action):
    kwargs = {"observation": observation, "action": action}
    dataset = at_random("tests.environments:Anything-v0", repr(kwargs), episodes=1)
    settings = {"net_arch": [32], "encoder_features": 16, "learning_rate": 0.02, "batch_size": 5, "max_updates": 256}
    rows = Rows()
    fit(tiny(BehavioralCloning, "tests.environments:Anything-v0", env={"kwargs": kwargs}, dataset=dataset, **settings), logger=rows)
    last = rows.rows[-1][1]
    assert last.get("train/accuracy", 1.0) > 0.99 and last.get("train/mean_abs_deviation", 0.0) < 0.1
    assert {"train/accuracy", "train/mean_abs_deviation"} & last.keys()


@pytest.mark.thorough
def test_the_clone_of_a_rule_balances_as_it_does():
    pl.seed_everything(1, verbose=False)
    model, rows = BehavioralCloning("CartPole-v1", dataset=CARTPOLE, max_updates=600, learning_rate=3e-3), Rows()
    fit(model, logger=rows)
    assert rows.rows[-1][1]["train/accuracy"] > 0.95
    episodes = make_player(model.env, 5, None).play(model.network, 5, seed=100, deterministic=True)
    assert np.mean([episode.return_ for episode in episodes]) > 400


def test_with_a_memory_a_sequence_is_learned_from_as_it_is_lived():
    model = tiny(BehavioralCloning, dataset=at_random("tests.environments:Scripted-v0", "{'period': 10}"), memory=GRU(8, 4))
    fit(model, limit_train_batches=1, max_epochs=1)
    with torch.no_grad():
        data = experience.demonstrations(attached(model), model.source, model.settings)
        batch = data.learned.batch(np.array([0, 1, 2]))  # of 4, 4 and 2 rows of one episode
        losses = []
        for start, size in ((0, 4), (4, 4), (8, 2)):
            memory = model.network.initial_memory(1)
            for row in range(start, start + size):
                x, memory = model.network.policy(data.learned.rows.obs[row : row + 1], memory, torch.tensor([False]))
                losses.append(-model.network.distribution.evaluate(x, data.learned.rows.action[row : row + 1])[0])
        assert model.imitation_loss(batch, 0.0)[0].item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def attached(model: Any) -> Any:
    """A model that can be asked without a run."""
    model.trainer = pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    return model


def test_rows_that_fill_up_a_sequence_weigh_nothing():
    model = attached(tiny(BehavioralCloning, memory=LSTM(8, 4)))  # episodes of three rows
    data = experience.demonstrations(model, model.source, model.settings)
    batch = data.learned.batch(np.arange(len(data.learned)))
    filled = batch.weight == 0
    other = batch._replace(obs=batch.obs + 100 * filled.unsqueeze(1), action=torch.where(filled, 2 - batch.action, batch.action))
    assert filled.float().mean() == 0.25
    found = []
    for each in (batch, other):
        model.zero_grad()
        loss, metrics = model.imitation_loss(each, 0.0)
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.network.parameters() if p.grad is not None])
        found.append((metrics["accuracy"].item(), loss.item(), gradients))
    assert found[0][:2] == found[1][:2] and torch.equal(found[0][2], found[1][2])


@pytest.mark.thorough
def test_masks_of_demonstrations_are_learned_with():
    masked, plain = (
        tiny(BehavioralCloning, "tests.environments:Choosy-v0", dataset=[each._replace(**without) for each in demonstrations])
        for demonstrations in [at_random("tests.environments:Choosy-v0", "{}")]
        for without in ({}, {"action_mask": ()})
    )
    for model in (masked, plain):
        fit(model)
    assert not torch.equal(weights(masked), weights(plain))
    some = [each._replace(action_mask=() if k else each.action_mask) for k, each in enumerate(masked.source)]
    fit(tiny(BehavioralCloning, "tests.environments:Choosy-v0", dataset=some))  # those without allow everything


@pytest.mark.thorough
def test_statistics_are_those_of_what_is_learned_from_and_nothing_is_stepped():
    def never() -> gym.Env:
        env = gym.make("CartPole-v1")
        env.unwrapped.step = None  # it would raise
        return env

    for normalize_obs in ("running", "frozen"):
        model = BehavioralCloning(never, dataset=CARTPOLE, max_updates=20, updates_per_iteration=10, normalize_obs=normalize_obs)
        fit(model)
        (statistics,) = model.network.normalizer.statistics
        assert statistics.count == pytest.approx(600)  # four episodes of 150 steps; one is held back
        means = [np.concatenate([each.obs[:-1] for k, each in enumerate(CARTPOLE) if k != held]).mean(0) for held in range(5)]
        assert any(np.allclose(statistics.mean, mean, atol=1e-5) for mean in means)
        assert model.env_steps == model.episodes == 0


@pytest.mark.thorough
def test_the_value_function_does_not_learn_and_ppo_begins_with_the_policy(tmp_path):
    model = tiny(BehavioralCloning, "CartPole-v1", dataset=CARTPOLE, normalize_obs="running")
    before = {name: value.clone() for name, value in model.network.critic.state_dict().items()}
    fit(model).save_checkpoint(tmp_path / "clone.ckpt")
    assert all(torch.equal(before[name], value) for name, value in model.network.critic.state_dict().items())
    ppo = tiny(PPO, "CartPole-v1", seed=5, normalize_obs="running")
    assert take_weights(ppo, tmp_path / "clone.ckpt") == []
    obs = torch.randn(50, 4)
    assert torch.equal(ppo.network.policy(obs, (), None)[0], model.network.policy(obs, (), None)[0])


# ---------------------------------------------------------------- what a run counts


@pytest.mark.thorough
def test_a_run_counts_updates(tmp_path, capsys):
    model, trainer = cloned(tmp_path, checkpoint={"every_n_updates": 32, "keep": -1})
    out, folder = capsys.readouterr().out, trainer.run_folder
    assert (model.updates, model.env_steps, trainer.global_step) == (40, 0, 3)  # 16, 16 and 8
    rows = read_rows(folder / "metrics.csv")
    assert next(iter(rows[0])) == "updates"
    assert [row["updates"] for row in rows if row["train/loss"]] == ["16", "32", "40"]
    assert [row["updates"] for row in rows if row["val/loss"] and row["eval/mean_reward"]] == ["16", "32", "40"]
    assert not {"env_steps", "rollout/episodes", "rollout/ep_rew_mean"} & rows[0].keys()
    assert {row["updates"] for row in read_rows(folder / "evaluations.csv")} == {"16", "32", "40"}
    assert {"updates=32.ckpt", "updates=40.ckpt", "best.ckpt", "last.ckpt"} <= {path.name for path in (folder / "checkpoints").iterdir()}
    assert "40/40 updates · loss " in out and " updates/s · ETA " in out
    assert "evaluation at 32 updates: mean return" in out and ", validation loss " in out
    assert "to learn from" in out


@pytest.mark.thorough
def test_a_finished_run_reports_its_count_and_can_be_made_longer(tmp_path, capsys):
    cloned(tmp_path)
    cloned(tmp_path, ckpt_path="last")
    assert "already at 40 of 40 updates; raise max_updates to continue" in capsys.readouterr().out
    model, trainer = cloned(tmp_path, ckpt_path="last", max_updates=50)
    assert model.updates == 50 and "shuffled again" not in capsys.readouterr().out
    assert [row["updates"] for row in read_rows(trainer.run_folder / "metrics.csv") if row["train/loss"]] == ["16", "32", "40", "50"]


@pytest.mark.thorough
def test_other_demonstrations_are_learned_from_after_a_word(tmp_path, capsys):
    cloned(tmp_path)
    model, _ = cloned(tmp_path, ckpt_path="last", max_updates=50, dataset=CARTPOLE)
    assert "demonstrations are shuffled again: the checkpoint has" in capsys.readouterr().out and model.updates == 50


@pytest.mark.thorough
@pytest.mark.parametrize("part", [{"began": torch.zeros(3, dtype=torch.uint8)}, {"position": "x"}, {"past": math.nan}, {"num": None}])
def test_a_checkpoint_with_another_thing_for_an_order_is_refused(part, tmp_path):
    _, trainer = cloned(tmp_path)
    checkpoint = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    checkpoint["lightning_rl"]["ranks"][0]["data"]["order"].update(part)
    torch.save(checkpoint, tmp_path / "b.ckpt")
    with pytest.raises(SettingError, match="the checkpoint's run cannot be resumed"):
        cloned(tmp_path, ckpt_path=tmp_path / "b.ckpt", max_updates=50)


@pytest.mark.thorough
def test_the_best_model_is_that_of_the_lowest_validation_loss_on_request(tmp_path):
    _, trainer = cloned(tmp_path, checkpoint={"monitor": "val/loss"}, max_updates=96, learning_rate=0.1)
    rows = [row for row in read_rows(trainer.run_folder / "metrics.csv") if row["val/loss"]]
    losses = [float(row["val/loss"]) for row in rows]
    best = torch.load(trainer.run_folder / "checkpoints" / "best.ckpt", weights_only=True)["lightning_rl"]["updates"]
    assert best == int(rows[int(np.argmin(losses))]["updates"]) and len(losses) == 6
    with pytest.raises(SettingError, match=r"checkpoint\.monitor 'val/loss' is not a metric of evaluations"):
        cloned(tmp_path / "none", checkpoint={"monitor": "val/loss"}, validation_fraction=0.0)


def test_validation_evaluates_all_held_back_data_like_one_minibatch():
    model = attached(tiny(BehavioralCloning, dataset=at_random("tests.environments:Scripted-v0", "{}", episodes=30), ent_coef=0.1))
    vars(model)["dataset"] = experience.demonstrations(model, model.source, model.settings)
    held = model.dataset.held
    found = model.validate()
    loss, told = model.imitation_loss(held.batch(np.arange(len(held))), model.ent_coef)
    assert found == {f"val/{name}": pytest.approx(value.item(), rel=1e-5) for name, value in told.items()}
    assert held.num_rows == 18 and found["val/loss"] == pytest.approx(loss.item(), rel=1e-5)
    entropy = told["entropy"].item()
    assert found["val/loss"] < 2 and 0 < entropy <= math.log(3) + 1e-6


@pytest.mark.thorough
def test_parts_of_an_action_are_logged_by_their_names():
    rows = Rows()
    model = tiny(BehavioralCloning, "tests.environments:Anything-v0", env={"kwargs": {"action": "nested"}}, learning_rate=0.0)
    fit(model, logger=rows)
    row = rows.rows[0][1]
    parts = {name: value for name, value in row.items() if name.startswith("train/loss/")}
    assert parts.keys() == {f"train/loss/{name}" for name in ("0", "1.bits", "1.pair", "2")}
    assert sum(parts.values()) == pytest.approx(row["train/loss"], rel=1e-4)


# ---------------------------------------------------------------- settings and the command line


@pytest.mark.thorough
def test_settings_without_a_meaning_here_do_not_exist(folder, capfd):
    with pytest.raises(SettingError, match="gamma is not a setting of BehavioralCloning"):
        BehavioralCloning("CartPole-v1", dataset=CARTPOLE, gamma=0.9)
    fit_bc = "fit --model BehavioralCloning --model.env.id CartPole-v1 --model.dataset a/b-v0 "
    status, _, err = run(fit_bc + "--model.gamma 0.9", capfd)
    assert status == 2 and "--model.gamma is not a setting" in err
    status, _, err = run(fit_bc + "--evaluation.every_n_env_steps 10", capfd)
    assert status == 2 and "evaluation.every_n_env_steps: a run of BehavioralCloning counts updates; use evaluation.every_n_updates" in err
    status, _, err = run("fit --model BehavioralCloning --model.env.id CartPole-v1", capfd)
    assert status == 2 and err == "error: model.dataset is missing: BehavioralCloning needs it\n"
    status, out, _ = run(fit_bc + "--print_config", capfd)
    assert status == 0 and "max_updates: 10000" in out and "max_env_steps" not in out and "reward_scale" not in out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_updates": 0}, "max_updates must be >= 1"),
        ({"max_updates": 2**70}, "max_updates must be >= 1"),
        ({"loss": "mae"}, "loss must be one of nll, mse"),
        ({"validation_fraction": 1.5}, "validation_fraction must be >= 0 and <= 1"),
        ({"label_smoothing": -0.1}, "label_smoothing must be"),
        ({"memory": LSTM(8, 64), "batch_size": 32}, r"memory\.sequence_length 64 is longer than batch_size 32"),
        ({"dataset": []}, "leave nothing to learn from"),
        ({"validation_fraction": 1.0}, "leave nothing to learn from"),
        ({"dataset": None}, "loaded without its demonstrations"),
        ({"dataset": at_random("CartPole-v1", "{}")}, "demonstration 0 does not fit"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        fit(tiny(BehavioralCloning, **settings))


@pytest.mark.thorough
def test_given_demonstrations_are_not_stored_and_a_name_is(tmp_path):
    model = tiny(BehavioralCloning, "CartPole-v1")
    assert model.hparams["dataset"] is None
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    loaded = BehavioralCloning.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (loaded.updates, loaded.max_updates, loaded.hparams["dataset"]) == (96, 96, None)
    action, _ = load_policy(tmp_path / "a.ckpt").act(np.zeros(4, np.float32))
    assert action in (0, 1)
    assert BehavioralCloning("CartPole-v1", dataset="cartpole/expert-v0").hparams["dataset"] == "cartpole/expert-v0"


@pytest.mark.thorough
def test_a_clone_is_trained_and_evaluated_from_the_command_line(folder, capfd, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
    recorder = RecordEpisodes(gym.make("CartPole-v1", max_episode_steps=150))
    played(recorder, 5, balance)
    recorder.save("cartpole/expert-v0")
    status, out, err = run(
        "fit --model BehavioralCloning --model.env.id CartPole-v1 --model.dataset cartpole/expert-v0 --model.max_updates 100 "
        "--evaluation.every_n_updates 50 --evaluation.episodes 2 --evaluation.max_episode_steps 20 --trainer.accelerator cpu",
        capfd,
    )
    assert (status, err) == (0, "") and "600 steps of 4 episodes to learn from, 150 of 1 to validate" in out
    best = folder / "runs/BehavioralCloning/CartPole-v1/version_0/checkpoints/best.ckpt"
    judge = f"evaluate --ckpt_path {best} --episodes 3 --max_episode_steps 20"
    status, out, err = run(judge, capfd)
    assert (status, err) == (0, "") and re.search("trained for (50|100) updates", out)
    result = json.loads(run(judge + " --json", capfd)[1])
    assert result["env_steps"] == 0 and result["updates"] in (50, 100) and result["return_mean"] <= 20


@pytest.mark.thorough
def test_a_policy_is_collected_cloned_and_trained_on_from_the_command_line(folder, capfd, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
    quick = "--evaluation.episodes 2 --evaluation.max_episode_steps 20 --trainer.accelerator cpu"
    ppo = f"fit --config ppo/cartpole --model.max_env_steps 512 {quick}"  # two rollouts
    runs, clone = folder / "runs/PPO/CartPole-v1", folder / "runs/BehavioralCloning/CartPole-v1/version_0"
    commands = [
        ppo,
        f"collect --ckpt_path {runs}/version_0/checkpoints/best.ckpt --dataset cartpole/expert-v0 --episodes 5",
        f"fit --config bc/cartpole --model.max_updates 200 {quick}",
        f"{ppo} --init_from {clone} --model.critic_burn_in_steps 512",
    ]
    for command in commands:
        status, _, err = run(command, capfd)
        assert (status, err) == (0, "")
    policies = []
    for path in (clone, runs / "version_1", runs / "version_0"):
        weights = torch.load(path / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        policies.append(torch.cat([weight.flatten() for name, weight in weights.items() if name.startswith("network.actor.")]))
    assert torch.equal(policies[0], policies[1]) and not torch.equal(policies[0], policies[2])  # the burn-in keeps the clone's policy


@pytest.mark.thorough
def test_a_dataset_that_is_not_there_is_one_line(folder, capfd):
    status, _, err = run(
        "fit --model BehavioralCloning --model.env.id CartPole-v1 --model.dataset no/such-v0 --trainer.accelerator cpu", capfd
    )
    assert status == 2 and "no/such-v0" in err and len(err.splitlines()) == 1


def test_demonstrations_are_a_public_noun():
    episode = lrl.Demonstration(np.zeros((3, 1)), np.zeros(2), np.zeros(2), np.zeros(2, bool), np.zeros(2, bool))
    assert episode.action_mask == () and all(isinstance(leaf, np.ndarray) for leaf in tree_leaves(tree_map(np.asarray, episode)))


def test_deviations_of_a_scalar_action_are_a_column():
    distribution = make_distribution(Box(-2, 2, ()), "tanh_normal")
    _, near = imitate(distribution, torch.zeros(2, 1), torch.as_tensor(distribution.from_env(np.float32([1, -2]))), (), "mse", 0.0)
    assert near["mean_abs_deviation"].tolist() == pytest.approx([1, 2], rel=1e-4)
