"""A run that is stopped and continued is the run that was never stopped, bit for bit."""

from __future__ import annotations

import os
import random
import signal
from collections import deque

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EMAWeightAveraging

from lightning_rl import (
    A2C,
    AWAC,
    CQL,
    DQN,
    GRU,
    IMPALA,
    IQL,
    LSTM,
    PPO,
    PQN,
    SAC,
    TD3,
    TD3BC,
    TQC,
    TRPO,
    BehavioralCloning,
    CheckpointConfig,
    CrossQ,
    DAgger,
    EvaluationConfig,
    EvolutionStrategies,
    Trainer,
    load_policy,
)
from lightning_rl.loggers import read_rows
from tests.experts import at_random
from tests.fitting import ALL, tiny, twins_slow

STEPS = 192
GAUSSIAN = {"sampler_type": "gaussian", "sampler_parameters": {"mean": 1.0, "st_dev": 0.1}}
LESSONS = {
    "curriculum": [
        {"name": "easy", "value": -2.0, "completion_criteria": {"measure": "progress", "threshold": 0.1}},
        {"name": "middle", "value": -4.0, "completion_criteria": {"threshold": 1e6, "min_lesson_length": 20}},
        {"name": "hard", "value": -8.0},
    ]
}
POLE = {
    "curriculum": [
        {"name": "short", "value": 0.3, "completion_criteria": {"threshold": 5, "min_lesson_length": 2, "require_reset": True}},
        {"name": "middle", "value": GAUSSIAN, "completion_criteria": {"measure": "progress", "threshold": 0.8}},
        {"name": "long", "value": 2.0},
    ],
    "replay_old_lessons": 0.3,
}
DROPPED = {"n_critics": 3, "critic_subset": 2, "critic_layers": "layer_norm", "critic_dropout": 0.1, "policy_delay": 3}
CURRICULUM = {"id": "CartPole-v1", "parameters": {"length": POLE, "gravity": LESSONS | {"replay_old_lessons": 0.1}}}
"""Interrupted in lesson 2 of both parameters."""
# slow are cases that take long, and those whose parts others have: another memory, a mode of resetting or workers
CASES = [
    pytest.param(PPO, {"id": "CartPole-v1"}, {"normalize_obs": "running", "normalize_reward": True}, id="PPO CartPole"),
    pytest.param(PPO, {"id": "CartPole-v1", "vectorization": "async"}, {}, id="PPO CartPole async", marks=pytest.mark.slow),
    pytest.param(
        PPO,
        {"id": "Pendulum-v1", "autoreset": "NEXT_STEP", "max_episode_steps": 11},
        {},
        id="PPO Pendulum NEXT_STEP",
        marks=pytest.mark.slow,
    ),
    pytest.param(PPO, {"id": "LunarLander-v3"}, {}, id="PPO LunarLander", marks=pytest.mark.slow),
    pytest.param(PPO, {"id": "HalfCheetah-v5", "max_episode_steps": 40}, {}, id="PPO HalfCheetah", marks=pytest.mark.slow),
    pytest.param(PPO, {"id": "ALE/Pong-v5", "atari": True}, {"net_arch": [], "encoder": "simple"}, id="PPO Pong", marks=pytest.mark.slow),
    pytest.param(
        PPO,
        {"id": "ALE/Pong-v5", "atari": True, "vectorization": "async"},
        {"encoder": "simple"},
        id="PPO Pong async",
        marks=pytest.mark.slow,
    ),
    pytest.param(A2C, {"id": "CartPole-v1", "vectorization": "native"}, {}, id="A2C CartPole native"),
    pytest.param(
        PPO, {"id": "Torch/CartPole-v1", "max_episode_steps": 11}, {"normalize_obs": "running", "memory": GRU(8, 4)}, id="PPO on a device"
    ),
    pytest.param(SAC, {"id": "Torch/Pendulum-v1", "max_episode_steps": 30}, {}, id="SAC on a device"),
    pytest.param(SAC, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"normalize_obs": "running"}, id="SAC Pendulum"),
    pytest.param(PPO, {"id": "Pendulum-v1", "max_episode_steps": 11}, {"use_sde": True, "sde_sample_freq": 5}, id="PPO smooth"),
    pytest.param(SAC, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"use_sde": True, "sde_sample_freq": 7}, id="SAC smooth"),
    pytest.param(
        PPO,
        {"id": "tests.environments:Choosy-v0", "autoreset": "NEXT_STEP", "kwargs": {"action": "nested"}},
        {"use_sde": True, "sde_sample_freq": 3, "threaded": True, "memory": LSTM(8, 4)},
        id="PPO smooth threaded",
    ),
    pytest.param(
        IMPALA,
        {"id": "Pendulum-v1", "max_episode_steps": 11},
        {"max_env_steps": 384, "use_sde": True, "sde_sample_freq": 3, "actors": {"num_actors": 2, "backend": "in_process"}},
        id="IMPALA smooth",
        marks=pytest.mark.slow,
    ),
    pytest.param(PQN, {"id": "CartPole-v1"}, {"normalize_obs": "running", "exploration_fraction": 1.0}, id="PQN CartPole"),
    pytest.param(TRPO, {"id": "CartPole-v1"}, {"normalize_obs": "running"}, id="TRPO CartPole"),
    pytest.param(TQC, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"policy_delay": 2}, id="TQC Pendulum"),
    pytest.param(CrossQ, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"critic_net_arch": [8]}, id="CrossQ Pendulum"),
    pytest.param(SAC, {"id": "Pendulum-v1", "max_episode_steps": 30}, DROPPED, id="SAC of dropped critics"),
    pytest.param(SAC, {"id": "Ant-v5", "vectorization": "async"}, {"n_steps": 3}, id="SAC Ant async", marks=pytest.mark.slow),
    pytest.param(SAC, {"id": "CartPole-v1"}, {"value_network": True, "replay": {"optimize_memory_usage": True}}, id="SAC CartPole"),
    pytest.param(DQN, {"id": "CartPole-v1"}, {"double": True, "dueling": True}, id="DQN CartPole", marks=pytest.mark.slow),
    pytest.param(
        DQN,
        {"id": "CartPole-v1", "frame_stack": 2},
        {"noisy": True, "distribution": "c51", "n_steps": 3, "replay": {"prioritized": True, "optimize_memory_usage": True}},
        id="DQN CartPole rainbow",
    ),
    pytest.param(
        DQN,
        {"id": "CartPole-v1"},
        {"n_steps": 3, "replay": {"demonstrations": at_random("CartPole-v1", "{}"), "demonstration_share": 0.25, "prioritized": True}},
        id="DQN CartPole demonstrations",
    ),
    pytest.param(
        PPO, {"id": "CartPole-v1"}, {"memory": LSTM(8, 4), "normalize_obs": "running"}, id="PPO CartPole LSTM", marks=pytest.mark.slow
    ),
    pytest.param(A2C, {"id": "Pendulum-v1", "autoreset": "NEXT_STEP", "max_episode_steps": 11}, {"memory": GRU(4, 8)}, id="A2C GRU"),
    pytest.param(PPO, {"id": "CartPole-v1"}, {"threaded": True, "memory": LSTM(8, 4), "normalize_obs": "running"}, id="PPO threaded"),
    pytest.param(SAC, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"threaded": True, "memory": GRU(8, 4)}, id="SAC threaded"),
    pytest.param(IMPALA, {"id": "CartPole-v1"}, {"memory": LSTM(8, 16)}, id="IMPALA LSTM"),
    pytest.param(
        IMPALA,
        {"id": "Pendulum-v1", "max_episode_steps": 30, "num_envs": 1},
        {"actors": {"num_actors": 2, "ordered": True}, "normalize_obs": "running"},
        id="IMPALA ordered processes",
        marks=pytest.mark.slow,
    ),
    pytest.param(PPO, {"id": "CartPole-v1"}, {"memory": GRU(8, 3), "batch_size": 9, "share_encoder": False}, id="PPO two memories"),
    pytest.param(
        SAC,
        {"id": "Pendulum-v1", "max_episode_steps": 30},
        {"memory": LSTM(8, 4), "n_steps": 2},
        id="SAC Pendulum LSTM",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        DQN,
        {"id": "CartPole-v1"},
        {"memory": LSTM(8, 4, 2), "replay": {"prioritized": True, "optimize_memory_usage": True}, "n_steps": 3},
        id="DQN CartPole R2D2",
    ),
    pytest.param(TD3, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"memory": GRU(8, 4)}, id="TD3 GRU", marks=pytest.mark.slow),
    pytest.param(
        PPO,
        {"id": "tests.environments:Choosy-v0", "autoreset": "NEXT_STEP", "kwargs": {"action": "nested"}},
        {},
        id="PPO masks",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        DQN,
        {"id": "tests.environments:Choosy-v0", "frame_stack": 2, "kwargs": {"way": "key"}},
        {"n_steps": 3, "replay": {"optimize_memory_usage": True}},
        id="DQN masks",
    ),
    pytest.param(
        SAC,
        {"id": "tests.environments:Choosy-v0", "vectorization": "async", "kwargs": {"way": "method", "action": "hybrid"}},
        {},
        id="SAC masks async",
        marks=pytest.mark.slow,
    ),
    pytest.param(TD3, {"id": "Pendulum-v1", "vectorization": "async"}, {"normalize_obs": "frozen", "normalize_obs_steps": 32}, id="TD3"),
    pytest.param(
        SAC,
        {"id": "tests.environments:GoalsBox-v0", "autoreset": "NEXT_STEP"},
        {"replay": {"relabel": {"k": 2}, "optimize_memory_usage": True}, "n_steps": 2, "buffer_size": 60, "normalize_reward": True},
        id="SAC hindsight",
    ),
    pytest.param(PPO, {"id": "CartPole-v1"}, {"reward_signals": {"rnd": {}, "curiosity": {"gamma": 0.9}}}, id="PPO rnd and curiosity"),
    pytest.param(
        SAC, {"id": "Pendulum-v1"}, {"train_freq": 40, "steps_per_iteration": 16, "reward_signals": {"rnd": {}}}, id="SAC rnd, rare updates"
    ),
    pytest.param(
        SAC,
        {"id": "Pendulum-v1", "max_episode_steps": 30},
        {"reward_signals": {"rnd": {}}, "reward_signal_steps_per_update": 3, "n_steps": 2},
        id="SAC rnd",
    ),
    pytest.param(PPO, {"id": "CartPole-v1"}, {"behavioral_cloning": {"steps": 160}}, id="PPO cloning", marks=pytest.mark.slow),
    pytest.param(SAC, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"behavioral_cloning": {}, "memory": GRU(8, 4)}, id="SAC cloning"),
    pytest.param(PPO, CURRICULUM, {}, id="PPO curriculum"),
    pytest.param(SAC, CURRICULUM | {"vectorization": "async"}, {}, id="SAC curriculum async", marks=pytest.mark.slow),
    pytest.param(
        PPO, {"id": "LunarLander-v3", "parameters": {"gravity": LESSONS}}, {}, id="PPO LunarLander curriculum", marks=pytest.mark.slow
    ),
    pytest.param(EvolutionStrategies, {"id": "Pendulum-v1", "max_episode_steps": 4}, {"normalize_obs": "running"}, id="ES Pendulum"),
    pytest.param(
        EvolutionStrategies,
        {"id": "CartPole-v1"},
        {
            "max_env_steps": 800,
            "max_length_ratio": 1.2,
            "optimizer": "sgd",
            "sigma": {"schedule": "linear", "start": 1},
            "memory": LSTM(8, 4),
        },
        id="ES CartPole GRU",
    ),
    pytest.param(
        BehavioralCloning, {"id": "CartPole-v1"}, {"batch_size": 20, "normalize_obs": "running"}, id="BC CartPole", marks=pytest.mark.slow
    ),
    pytest.param(BehavioralCloning, {"id": "Pendulum-v1"}, {"memory": LSTM(8, 4), "ent_coef": 0.1}, id="BC Pendulum LSTM"),
    pytest.param(
        IQL, {"id": "Pendulum-v1"}, {"replay": {"prioritized": True}, "n_steps": 2, "normalize_obs": "running"}, id="IQL Pendulum"
    ),
    pytest.param(IQL, {"id": "CartPole-v1"}, {"memory": GRU(8, 4)}, id="IQL CartPole GRU", marks=pytest.mark.slow),
    pytest.param(AWAC, {"id": "CartPole-v1"}, {}, id="AWAC CartPole", marks=pytest.mark.slow),
    pytest.param(TD3BC, {"id": "Pendulum-v1"}, {}, id="TD3BC Pendulum", marks=pytest.mark.slow),
    pytest.param(CQL, {"id": "Pendulum-v1"}, {"cql_actions": 2}, id="CQL Pendulum"),
    pytest.param(CQL, {"id": "Pendulum-v1", "max_episode_steps": 30}, {"cql_actions": 2, "online": True}, id="CQL online"),
    pytest.param(DAgger, {"id": "CartPole-v1"}, {"teacher": "tests/sharing/sb3/ppo-CartPole-v1.zip"}, id="DAgger CartPole"),
]


class StopAt(pl.Callback):
    """Sends this process a signal at the first such moment from iteration k on."""

    def __init__(self, iteration, moment="batch", number=signal.SIGTERM):
        self.iteration, self.moment, self.number, self.sent = iteration, moment, number, False

    def send(self, moment, iteration):
        if moment == self.moment and iteration >= self.iteration and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.send("batch", trainer.global_step)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.send("evaluation", trainer.global_step - 1)  # before ours: the evaluation is given up

    def on_evaluation_end(self, trainer, algorithm, metrics):
        self.send("judged", trainer.global_step - 1)


def run(
    root,
    algorithm,
    env,
    settings,
    seed=1,
    stop=None,
    ckpt_path=None,
    steps=STEPS,
    callbacks=(),
    checkpoint=None,
):
    """Train as a user would, six or more iterations; the model and the run's folder."""
    pl.seed_everything(seed, verbose=False)
    counter = "env_steps" if settings.get("online") else algorithm.counter
    settings = {"log_interval": 16, f"max_{counter}": steps} | settings
    if "behavioral_cloning" in settings:
        settings["behavioral_cloning"] = settings["behavioral_cloning"] | {"demo_path": at_random(env["id"], "{}")}
    model = tiny(algorithm, env=env, env_id=env["id"], seed=seed, **settings)
    every = f"every_n_{counter}"
    trainer = Trainer(
        default_root_dir=root,
        accelerator="cpu",
        enable_progress_bar=False,
        evaluation=EvaluationConfig(**{every: 48}, episodes=2, num_envs=2, max_episode_steps=20),
        checkpoint=checkpoint or CheckpointConfig(**{every: 32}),
        callbacks=[*callbacks, *([] if stop is None else [stop])],
        torch_threads=1,
    )
    if stop is None:
        trainer.fit(model, ckpt_path=ckpt_path)
    else:
        with pytest.raises(SystemExit) as left:
            trainer.fit(model, ckpt_path=ckpt_path)
        assert left.value.code == 143
    return model, trainer.run_folder


def assert_equal_runs(expected, found):
    (model, folder), (other, other_folder) = expected, found
    weights, others = model.state_dict(), other.state_dict()
    assert weights.keys() == others.keys()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    for file in ("metrics.csv", "evaluations.csv"):
        rows, other_rows = (read_rows(each / file) for each in (folder, other_folder))
        assert [without_time(row) for row in rows] == [without_time(row) for row in other_rows]


def without_time(row):
    return {name: value for name, value in row.items() if not name.startswith("time/") and value != ""}


@pytest.mark.variants("PPO CartPole", "SAC Pendulum", "ES Pendulum")
@pytest.mark.parametrize(("algorithm", "env", "settings"), CASES)
def test_a_run_that_was_stopped_and_continued_is_the_run_that_was_not(algorithm, env, settings, tmp_path):
    expected = run(tmp_path / "whole", algorithm, env, settings)
    for seed, stop in ((1, StopAt(3)), (5, StopAt(5, "evaluation")), (8, StopAt(6, "judged"))):
        run(tmp_path / "parts", algorithm, env, settings, seed, stop, "last")
    found = run(tmp_path / "parts", algorithm, env, settings, 99, None, "last")
    assert_equal_runs(expected, found)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_a_run_with_averaged_weights_that_was_stopped_and_continued_is_the_run_that_was_not(algorithm, tmp_path):
    average, env = lambda: [EMAWeightAveraging(decay=0.5)], {"id": "Pendulum-v1"}
    expected = run(tmp_path / "whole", algorithm, env, {}, callbacks=average())
    for seed, stop in ((1, StopAt(3)), (5, StopAt(5))):
        run(tmp_path / "parts", algorithm, env, {}, seed, stop, "last", callbacks=average())
    assert_equal_runs(expected, run(tmp_path / "parts", algorithm, env, {}, 99, None, "last", callbacks=average()))


@pytest.mark.thorough
def test_an_evaluation_that_is_given_up_again_and_again_is_made_in_the_end_once(tmp_path):
    env = {"id": "CartPole-v1"}
    expected = run(tmp_path / "whole", PPO, env, {})
    for stop in (StopAt(2, "evaluation"), StopInEvaluation(), StopInEvaluation()):
        run(tmp_path / "parts", PPO, env, {}, 1, stop, "last")
    assert_equal_runs(expected, run(tmp_path / "parts", PPO, env, {}, 9, None, "last"))


@pytest.mark.thorough
def test_the_last_evaluation_of_a_run_is_made_when_it_continues_though_it_was_finished(tmp_path, capsys):
    env = {"id": "CartPole-v1"}
    expected = run(tmp_path / "whole", PPO, env, {})
    run(tmp_path / "parts", PPO, env, {}, 1, StopAt(11, "evaluation"))
    found = run(tmp_path / "parts", PPO, env, {}, 9, None, "last")
    assert "already at 192 of 192 environment steps" in capsys.readouterr().out
    assert_equal_runs(expected, found)


class StopInEvaluation(pl.Callback):
    """Sends the signal as soon as an evaluation looks for it."""

    iteration = None

    def on_train_start(self, trainer, pl_module):
        os.kill(os.getpid(), signal.SIGTERM)


class Snapshot(pl.Callback):
    """All running state of the run after iteration k: every number that can be reached from the algorithm and the callbacks."""

    def __init__(self, iteration):
        self.iteration, self.state = iteration, None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.iteration:
            roots = {"algorithm": pl_module, "callbacks": [each for each in trainer.callbacks if not isinstance(each, Snapshot | StopAt)]}
            optimizers = [optimizer.state_dict() for optimizer in pl_module.own_optimizers]
            self.state = dict(leaves({**roots, "optimizers": optimizers, "python": random.getstate(), "numpy": np.random.get_state()}))
            self.state["torch"] = torch.get_rng_state()


OTHERWISE = {
    *("started", "logged_at", "logged_env_steps_at", "seconds", "tried_when", "open_rows"),  # the clock
    *("made_before", "arrived", "steps_played"),  # of the progress bar
    *("folder", "file", "left_as", "path", "received", "continues", "ranks", "count_at_start"),  # of this process
    *("_trainer", "trainer", "_before", "hparams", "_hparams_initial", "given_arguments", "bar", "console", "resumed", "seed", "_seed"),
    *("_manifests", "store", "best_model_path"),  # what was saved, and where
    *("template", "action_space", "single_action_space", "observation_space", "single_observation_space"),  # only their shapes count
    "contracts",  # the same spaces
    *("processes", "parent_pipes", "error_queue", "shared_memory", "_state"),  # of workers
    "compiled",  # made of the losses
    "own_optimizers",  # compared by their state_dict
    "accepted",  # identities of this process's modules, parameters and hooks
}
"""Names of what differs between processes by right."""


def leaves(tree, path="", seen=None):
    """Everything that is a number, a word or a generator's state, with the way to it."""
    seen = set() if seen is None else seen
    if isinstance(tree, torch.Tensor):
        yield path, tree.detach().clone()
    elif isinstance(tree, np.ndarray):
        yield path, torch.from_numpy(tree.copy()) if tree.dtype.kind in "biuf" else tree.tobytes()
    elif isinstance(tree, torch.Generator):
        yield path, tree.get_state()
    elif isinstance(tree, np.random.Generator):
        yield path, repr(tree.bit_generator.state)
    elif isinstance(tree, str | bytes | int | float | np.generic):
        yield path, tree
    elif id(tree) not in seen:
        seen.add(id(tree))
        if isinstance(tree, dict):
            children = {str(key): value for key, value in tree.items()}
        elif isinstance(tree, list | tuple | deque):
            children = {str(i): value for i, value in enumerate(tree)}
        else:
            children = vars(tree) if type(tree).__module__.startswith(("lightning_rl", "torch.nn", "gymnasium", "tests")) else {}
        for name, child in children.items():
            if name not in OTHERWISE:
                yield from leaves(child, f"{path}.{name}", seen)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", twins_slow([*ALL, BehavioralCloning, EvolutionStrategies]))
def test_no_running_state_of_any_object_is_missing_from_a_checkpoint(algorithm, tmp_path):
    env = {"id": "Pendulum-v1" if algorithm is TD3 else "CartPole-v1"}
    settings = {"normalize_obs": "running", "normalize_reward": True} if algorithm in (PPO, SAC) else {}
    settings |= {"replay": {"prioritized": True}, "n_steps": 3} if algorithm is DQN else {}
    settings |= {"max_env_steps": 800} if algorithm is EvolutionStrategies else {}
    snapshots = []
    for root, stop in (("whole", None), ("parts", StopAt(5))):
        snapshots.append(Snapshot(7))
        if stop is not None:
            run(tmp_path / root, algorithm, env, settings, 1, stop)
        run(tmp_path / root, algorithm, env, settings, 1 if stop is None else 5, None, "last", callbacks=[snapshots[-1]])
    expected, found = (snapshot.state for snapshot in snapshots)
    assert expected.keys() == found.keys() and len(expected) > 100
    assert [name for name in expected if not equal(expected[name], found[name])] == []


def equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b or (a != a and b != b)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "env"), [(PPO, "CartPole-v1"), (SAC, "Pendulum-v1"), pytest.param(DQN, "CartPole-v1", marks=pytest.mark.slow)]
)
def test_a_finished_run_that_is_extended_is_the_longer_run(algorithm, env, tmp_path):
    settings = {"exploration_fraction": 0.0} if algorithm is DQN else {}
    expected = run(tmp_path / "whole", algorithm, {"id": env}, settings, steps=288)
    run(tmp_path / "parts", algorithm, {"id": env}, settings, steps=144)
    found = run(tmp_path / "parts", algorithm, {"id": env}, settings, seed=7, ckpt_path="last", steps=288)
    assert_equal_runs(expected, found)


@pytest.mark.thorough
def test_a_run_that_continues_in_another_folder_takes_its_replay_buffer_along(tmp_path):
    env = {"id": "Pendulum-v1"}
    expected = run(tmp_path / "whole", SAC, env, {})
    _, folder = run(tmp_path / "parts", SAC, env, {}, stop=StopAt(6))
    model, other = run(tmp_path / "elsewhere", SAC, env, {}, seed=2, ckpt_path=folder / "checkpoints" / "last.ckpt")
    weights, others = expected[0].state_dict(), model.state_dict()
    assert [name for name in weights if not torch.equal(weights[name], others[name])] == []
    assert (other / "checkpoints" / "last.ckpt.d").is_dir()


@pytest.mark.thorough
def test_other_numbers_of_environments_start_new_episodes_and_say_so(tmp_path, capsys):
    run(tmp_path, PPO, {"id": "CartPole-v1"}, {}, stop=StopAt(3))
    capsys.readouterr()
    model, _ = run(tmp_path, PPO, {"id": "CartPole-v1", "num_envs": 4}, {"n_steps": 4}, ckpt_path="last")
    assert "environments start new episodes: the checkpoint has 1 x 2 (ranks x env.num_envs), not 1 x 4" in capsys.readouterr().out
    assert model.env_steps == STEPS


@pytest.mark.thorough
def test_a_buffer_that_shall_not_be_saved_is_not_and_fills_again(tmp_path, capsys):
    config = CheckpointConfig(every_n_env_steps=32, save_replay_buffer=False)
    _, folder = run(tmp_path, SAC, {"id": "Pendulum-v1"}, {}, stop=StopAt(6), checkpoint=config)
    assert not (folder / "checkpoints" / "last.ckpt.d").exists()
    capsys.readouterr()
    model, _ = run(tmp_path, SAC, {"id": "Pendulum-v1"}, {}, ckpt_path="last", checkpoint=config)
    assert "the checkpoint holds no replay buffer: learning continues after 16 steps" in capsys.readouterr().out
    assert len(model.state_dict()) and model.env_steps == STEPS


@pytest.mark.thorough
def test_a_run_resumed_from_best_ckpt_reports_that_it_has_no_replay_buffer(tmp_path, capsys):
    config = {"id": "Pendulum-v1"}
    _, folder = run(tmp_path, SAC, config, {}, stop=StopAt(6))
    capsys.readouterr()
    run(tmp_path / "again", SAC, config, {}, ckpt_path=folder / "checkpoints" / "best.ckpt")
    assert "the checkpoint holds no replay buffer: learning continues after 16 steps" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_best_checkpoint_holds_what_was_learned_and_nothing_of_the_run(tmp_path):
    _, folder = run(tmp_path, SAC, {"id": "Pendulum-v1"}, {})
    best, last = (torch.load(folder / "checkpoints" / name, weights_only=True)["lightning_rl"] for name in ("best.ckpt", "last.ckpt"))
    assert best["ranks"] == [] and last["ranks"][0]["data"]["replay"] is not None
    action, _ = load_policy(folder / "checkpoints" / "best.ckpt").act(np.zeros(3, np.float32))
    assert action.shape == (1,)


@pytest.mark.variants
@pytest.mark.parametrize(("rows", "asked", "saved"), [(1_000_000, None, False), (1_000_000, True, True), (1_000, None, True)])
def test_a_buffer_that_would_grow_large_is_saved_only_when_asked_for(rows, asked, saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_rl.callbacks.checkpoints.MAX_DEFAULT_BUFFER_BYTES", 20_000)  # bytes; a row of Pendulum takes about 40
    config = CheckpointConfig(every_n_env_steps=32, save_replay_buffer=asked)
    env, settings = {"id": "Pendulum-v1"}, {"buffer_size": rows, "log_interval": 10_000}
    _, folder = run(tmp_path, SAC, env, settings, stop=StopAt(6), checkpoint=config, steps=10_000 if rows > 1_000 else STEPS)
    assert ("is not saved, so a resumed run has to fill it again" in capsys.readouterr().out) != saved
    assert (folder / "checkpoints" / "last.ckpt.d").exists() == saved
