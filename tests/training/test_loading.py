"""Loading an algorithm from a file: what the file may and may not do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_rl import A2C, PPO, SAC, Algorithm, EnvConfig, SettingError, Trainer, load_policy
from lightning_rl.data.players import make_player
from lightning_rl.data.replay.storage import ReplayConfig
from lightning_rl.training.arguments import plain
from tests.fitting import fit, tiny


class OwnPPO(PPO):
    """A user's algorithm."""


@pytest.fixture
def saved(tmp_path):
    """Save a tiny model, and change the file on request."""

    def save(algorithm=PPO, change=lambda checkpoint: None):
        model = (
            tiny(PPO) if algorithm is PPO else algorithm({"id": "tests.environments:Scripted-v0", "num_envs": 2}, n_steps=8, batch_size=8)
        )
        model.max_env_steps = 16
        trainer = fit(model)
        path = tmp_path / "model.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        checkpoint = torch.load(path, weights_only=True)
        change(checkpoint)
        torch.save(checkpoint, path)
        return path

    return save


def test_wrappers_stored_in_a_file_cannot_run_code(saved, tmp_path):
    proof = tmp_path / "code_ran"
    payload = f"open({str(proof)!r}, 'w')#"
    chain = ["builtins.repr", {"class_path": "textwrap.indent", "init_args": {"prefix": payload}}, "builtins.eval"]
    path = saved(change=lambda checkpoint: checkpoint["hyper_parameters"]["env"].update(wrappers=chain))
    with pytest.raises(SettingError, match="do not trust it"):
        load_policy(path)
    assert not proof.exists()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("agents", "groups", "words"),
    [
        ([], 2, "0 agents in 2 groups of equal size"),
        (["a", "b", "c"], 2, "3 agents in 2 groups"),
        (["a"], -1, "groups"),
        (["a"], "1", "groups"),
    ],
)
def test_groups_in_a_file_that_its_agents_cannot_form_are_refused(saved, agents, groups, words):
    path = saved(change=lambda checkpoint: checkpoint["lightning_rl"].update(agents=agents, groups=groups))
    with pytest.raises(SettingError, match=words):
        load_policy(path)


@pytest.mark.thorough
def test_an_environment_with_an_argument_that_no_file_can_hold_is_not_stored_as_another_one(tmp_path):
    env = EnvConfig("CartPole-v1", num_envs=3, wrappers=[{"class_path": "TransformReward", "init_args": {"func": abs}}])
    trainer = fit(PPO(env, n_steps=8, batch_size=12, max_env_steps=24))
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    load_policy(tmp_path / "model.ckpt")
    loaded = PPO.load_from_checkpoint(tmp_path / "model.ckpt")
    assert loaded.hparams["env"] is None
    with pytest.raises(SettingError, match="loaded without an environment; pass env="):
        fit(loaded)
    fit(PPO.load_from_checkpoint(tmp_path / "model.ckpt", env=env, max_env_steps=48))


class Mode(IntEnum):
    FAST = 2


@dataclass
class Task:
    goal: float


@pytest.mark.parametrize("argument", [Task(1.0), {"tasks": [Task(1.0)]}, np.array([abs], dtype=object), {1}])
def test_arguments_that_would_come_back_as_something_else_are_lost_and_not_replaced(argument):
    assert plain(EnvConfig("CartPole-v1", kwargs={"argument": argument})) is None


def test_arguments_that_come_back_as_they_were_are_stored():
    arguments = {"speed": np.float32(0.5), "path": Path("there"), "mode": Mode.FAST, "sizes": (1, None), "goal": np.zeros(2)}
    stored = plain(EnvConfig("CartPole-v1", kwargs=arguments))
    assert stored["kwargs"] == {"speed": 0.5, "path": "there", "mode": 2, "sizes": [1, None], "goal": [0.0, 0.0]}
    assert type(stored["kwargs"]["mode"]) is int


def test_a_function_is_refused_as_a_wrapper():
    for path, said in {
        "numpy.copy": r"numpy\.copy is not a gymnasium\.Wrapper",
        "builtins.repr": r"env\.wrappers: builtins is a module of Python's standard library",
    }.items():
        with pytest.raises(SettingError, match=said):
            make_player(PPO("CartPole-v1", n_steps=8, batch_size=8).env.__class__("CartPole-v1", wrappers=[path]), 1, None)


@pytest.mark.parametrize(
    "change",
    [
        lambda checkpoint: checkpoint["lightning_rl"].pop("algorithm"),
        lambda checkpoint: checkpoint["lightning_rl"].update(algorithm="lightning_rl.os"),
        lambda checkpoint: checkpoint["hyper_parameters"].update(no_such_setting=1),
        lambda checkpoint: checkpoint["hyper_parameters"]["env"].update(wrappers=[5]),
        lambda checkpoint: checkpoint["lightning_rl"].update(spaces=[{}, {}]),
        lambda checkpoint: checkpoint["state_dict"].pop(next(iter(checkpoint["state_dict"]))),
    ],
    ids=["no algorithm", "foreign algorithm", "setting", "wrapper", "spaces", "weights"],
)
def test_a_broken_file_is_refused_in_one_line(saved, change):
    with pytest.raises(SettingError) as error:
        load_policy(saved(change=change))
    assert "\n" not in str(error.value)


def test_a_file_loads_as_its_own_class_only(saved):
    path = saved(OwnPPO)
    assert type(PPO.load_from_checkpoint(path)) is OwnPPO and type(Algorithm.load_from_checkpoint(path)) is OwnPPO
    with pytest.raises(SettingError, match="not A2C"):
        A2C.load_from_checkpoint(path)
    plain = saved()
    assert type(Algorithm.load_from_checkpoint(plain)) is PPO
    with pytest.raises(SettingError, match="not OwnPPO"):
        OwnPPO.load_from_checkpoint(plain)


def test_a_loaded_algorithm_continues_its_counts(saved):
    loaded = PPO.load_from_checkpoint(saved(), max_env_steps=32)
    assert (loaded.env_steps, loaded.updates) == (16, 4)
    fit(loaded)
    assert (loaded.env_steps, loaded.updates) == (32, 8)


def test_an_off_policy_algorithm_is_loaded_with_its_settings_and_fills_its_buffer_again(tmp_path):
    model = tiny(SAC, replay=ReplayConfig(prioritized=True, alpha=0.7), target_entropy={"discrete": 0.3})
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert stored["replay"] == asdict(ReplayConfig(prioritized=True, alpha=0.7)) and stored["target_entropy"] == {"discrete": 0.3}
    loaded = SAC.load_from_checkpoint(tmp_path / "a.ckpt", max_env_steps=128)
    assert loaded.replay == model.replay and loaded.replay_settings == model.replay_settings
    assert (loaded.env_steps, loaded.updates, loaded.temperature.target.item()) == (96, 20, pytest.approx(0.3))
    fit(loaded)
    assert (loaded.env_steps, loaded.updates) == (128, 24)  # 16 of 32 steps fill the memory


def test_whole_floats_are_integers_and_others_are_refused():
    assert PPO("CartPole-v1", max_env_steps=1e5, n_steps=8.0, batch_size=8).hparams["max_env_steps"] == 100_000
    with pytest.raises(SettingError, match=r"max_env_steps must be an integer >= 1, got 1000\.5"):
        PPO("CartPole-v1", max_env_steps=1000.5)


def test_a_finished_run_reports_it_and_trains_nothing(saved, capfd, tmp_path):
    model = PPO.load_from_checkpoint(saved(), max_env_steps=16)
    Trainer(default_root_dir=tmp_path / "runs").fit(model)
    assert "already at 16 of 16 environment steps; raise max_env_steps" in capfd.readouterr().out
    assert model.updates == 4 and not (tmp_path / "runs").exists()
