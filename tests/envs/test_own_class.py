"""A class or function of the user's own in the place of an id: from Python, in a config and on the command line, and in files."""

from __future__ import annotations

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml

import lightning_rl as lrl
from lightning_rl.envs.make import make_env, make_vector_env
from lightning_rl.errors import SettingError
from lightning_rl.settings.dotted_paths import path_of
from lightning_rl.training.arguments import describe_unnamed
from tests.command_line import TINY, run, run_python
from tests.environments import Scripted
from tests.fitting import fit, tiny
from tests.videos import read

PAGE = Path(__file__).parents[2] / "docs" / "your_own.md"
PATH = "tests.environments.Scripted"


class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward


def build(period: int = 3):
    return Scripted(period)


def stepped(env):
    """Return rewards [4, N] and truncations of four steps of action 1."""
    envs = make_vector_env(env)
    try:
        envs.reset(seed=0)
        steps = [envs.step(np.ones(envs.num_envs, np.int64)) for _ in range(4)]
    finally:
        envs.close()
    return [each[1].tolist() for each in steps], [each[3].tolist() for each in steps]


@pytest.mark.parametrize("vectorization", ["sync", pytest.param("async", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "env_id", [Scripted, build, lambda period=3: Scripted(period), partial(Scripted, period=5), PATH, f"{__name__}.build"]
)
def test_a_class_a_function_or_a_path_takes_all_settings_of_an_id(env_id, vectorization):
    given = {"kwargs": {"period": 9}, "wrappers": [Doubled], "vectorization": vectorization, "max_episode_steps": 3}
    for config in (lrl.EnvConfig(env_id, num_envs=2, **given), lrl.PPO({"id": env_id, "num_envs": 2, **given}).env):
        rewards, truncated = stepped(config)  # t + 1 / 10, doubled; the second episode pays 10 more
        assert np.allclose(rewards, [[0.2] * 2, [2.2] * 2, [4.2] * 2, [20.2] * 2])
        assert truncated == [[False] * 2, [False] * 2, [True] * 2, [False] * 2]


def slippery():
    env = gym.make("CartPole-v1")
    env.unwrapped.step = lambda action: (np.zeros(4, np.float32), 7.0, False, False, {})
    return env


def test_what_a_function_changes_is_stepped_as_it_is():
    assert stepped(lrl.EnvConfig(slippery, num_envs=8))[0] == [[7.0] * 8] * 4


def test_parameters_reach_an_environment_that_a_class_builds():
    env = make_env(lrl.EnvConfig(Scripted, parameters={"period": 7}, observe_parameters=True))
    assert env.reset(seed=0)[0].tolist() == [0, 0, 7] and env.unwrapped.period == 7


def test_settings_hold_the_path_of_what_can_be_imported():
    class Local(Scripted): ...

    assert lrl.PPO(Scripted).hparams["env"]["id"] == lrl.PPO(lrl.EnvConfig(Scripted)).hparams["env"]["id"] == PATH
    assert lrl.PPO(build).hparams["env"]["id"] == f"{__name__}.build"
    assert all(lrl.PPO(env).hparams["env"] is None for env in (Local, lrl.EnvConfig(Local), lambda: Scripted()))
    assert [path_of(each) for each in (None, 3, Scripted(), Local, partial(build))] == [None] * 5


@pytest.mark.thorough
def test_a_file_that_names_a_class_is_played_and_resumed_without_env(folder):
    def trained(name, env_id, steps=-1, ckpt_path=None):
        model = tiny(lrl.PPO, max_env_steps=96, env={"id": env_id})
        quiet = {"evaluation": None, "enable_progress_bar": False, "accelerator": "cpu"}
        lrl.Trainer(default_root_dir=name, max_steps=steps, **quiet).fit(model, ckpt_path=ckpt_path)
        return model.state_dict()

    trained("half", Scripted, steps=3)
    shutil.copy(next(Path("half").rglob("last.ckpt")), "half.ckpt")
    assert lrl.PPO.load_from_checkpoint("half.ckpt").env.id == PATH
    assert lrl.evaluate("half.ckpt", episodes=4) == lrl.evaluate("half.ckpt", episodes=4, env=Scripted)
    assert lrl.evaluate("half.ckpt", episodes=4, env={"id": build, "kwargs": {"period": 1}})["length_mean"] == 1
    whole, resumed = trained("whole", Scripted), trained("resumed", PATH, ckpt_path="half.ckpt")
    assert all(whole[name].equal(resumed[name]) for name in whole)


def test_an_evaluator_takes_a_class_or_an_id():
    assert lrl.RolloutEvaluator(env=Scripted).env.id is Scripted and lrl.RolloutEvaluator(env=PATH).env.id == PATH


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", ["gymnasium.envs.classic_control.cartpole.CartPoleEnv", "tests.environments.Scripted"])
def test_a_file_may_name_an_environment_of_gymnasium_and_of_an_imported_module(env_id, folder):
    fit(tiny(lrl.PPO, env_id, max_env_steps=16)).save_checkpoint(folder / "a.ckpt")
    assert lrl.evaluate("a.ckpt", episodes=1, max_episode_steps=5)["episodes"] == 1


@pytest.mark.thorough
def test_a_file_may_not_name_other_classes_of_a_library(folder):
    fit(model := tiny(lrl.PPO, max_env_steps=16))
    for path in ("torch.nn.Linear", "gymnasium.vector.SyncVectorEnv"):
        model.hparams["env"]["id"] = path
        model.trainer.save_checkpoint(folder / "a.ckpt")
        with pytest.raises(SettingError, match=f"names {path} as its environment, which is part of a library"):
            lrl.load_policy("a.ckpt")


@pytest.mark.thorough
def test_a_run_begins_with_a_line_about_what_its_checkpoints_cannot_name(folder, capsys):
    class Local(Scripted): ...

    class Waves(torch.nn.Module): ...

    model = tiny(lrl.PPO, env={"id": Local}, max_env_steps=16)
    lrl.Trainer(evaluation=None, enable_progress_bar=False, accelerator="cpu").fit(model)
    line = "checkpoints do not hold the environment Local, which has no id or import path with plain arguments"
    assert capsys.readouterr().out.startswith(f"{line}: pass env= to evaluate or record them\n")
    model = tiny(lrl.PPO, max_env_steps=16)
    assert describe_unnamed(model) is None and describe_unnamed(tiny(lrl.PPO, env={"id": Scripted})) is None
    model.hparams.update(encoder="__main__.Enc")
    line = "checkpoints name __main__.Enc, which only this program defines: no other program can load them; move what they name to a module"
    assert describe_unnamed(model) == line


@pytest.fixture
def my_envs(folder, monkeypatch):
    """A folder with the environment of the page on own code, and one with a function."""
    (folder / "my_envs.py").write_text(re.search(r"```python\n(# my_envs\.py.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1])
    (folder / "my_builder.py").write_text("from my_envs import Corridor\n\n\ndef short():\n    return Corridor(3)\n")
    monkeypatch.syspath_prepend(folder)
    for name in ("my_envs", "my_builder"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", ["my_envs.Corridor", "my_builder.short"])
def test_the_command_line_and_a_config_take_the_path_of_a_class_or_function(env_id, my_envs, capfd):
    status, out, _ = run(f"fit {TINY} --model.env.id {env_id} --model.env.max_episode_steps 20", capfd)
    assert status == 0 and f"evaluate it: lightning-rl evaluate --import {env_id.partition('.')[0]} " in out
    best = next(Path("runs").glob("**/best.ckpt"))
    assert str(best).startswith(f"runs/PPO/{env_id}/version_0")
    options = f"--import {env_id.partition('.')[0]} --ckpt_path {best} --episodes 2"
    assert run(f"evaluate {options}", capfd)[0] == 0
    settings = yaml.safe_load((best.parents[1] / "config.yaml").read_text())["model"]["init_args"]
    assert settings["env"]["id"] == env_id
    (my_envs / "mine.yaml").write_text(yaml.safe_dump({"model": {"class_path": "PPO", "init_args": {"env": {"id": env_id}}}}))
    more = "--config mine.yaml --model.max_env_steps 2048 --evaluation null --model.env.max_episode_steps 20 --trainer.accelerator cpu"
    assert run(f"fit {more}", capfd)[0] == 0
    resume = f"--config {best.parents[1] / 'config.yaml'} --ckpt_path last --trainer.run_name version_0 --model.max_env_steps 128"
    assert run(f"fit {resume}", capfd)[0] == 0


ROOM = """
from my_envs import Corridor
import numpy as np


class Room(Corridor):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, length=3, render_mode=None):
        super().__init__(length)
        self.render_mode = render_mode

    def render(self):
        return np.full((16, 16, 3), 200, np.uint8)
"""


@pytest.mark.thorough
def test_a_class_is_recorded_from_its_checkpoint_alone(my_envs, capfd, monkeypatch):
    (my_envs / "my_rooms.py").write_text(ROOM)
    monkeypatch.delitem(sys.modules, "my_rooms", raising=False)
    quiet = "--trainer.enable_progress_bar false --evaluation null"
    assert run(f"fit {TINY} {quiet} --model.env.id my_rooms.Room --model.env.max_episode_steps 5", capfd)[0] == 0
    last = next(Path("runs").rglob("last.ckpt"))
    status, out, err = run(f"record --import my_rooms --ckpt_path {last} --episodes 2", capfd)
    assert (status, err) == (0, "")
    lengths = [int(length) for length in re.findall(r"episode_\d\.mp4: return .*, length (\d), ", out)]
    frames = [len(read(last.parents[1] / "videos" / f"episode_{number}.mp4")[1]) for number in (0, 1)]
    assert len(lengths) == 2 and frames == [length + 1 for length in lengths]


SCRIPT = """
import lightning_rl as lrl
import torch
from gymnasium.envs.classic_control import CartPoleEnv


class Mine(CartPoleEnv): ...


class Enc(torch.nn.Linear):
    def __init__(self, space, features):
        super().__init__(4, 4)


if __name__ == "__main__":
    model = lrl.PPO({"id": Mine, "num_envs": 2, "vectorization": "async"}, encoder=Enc, n_steps=8, batch_size=8, max_env_steps=32)
    trainer = lrl.Trainer(enable_progress_bar=False, accelerator="cpu")
    trainer.fit(model)
    print(lrl.evaluate(trainer.run_folder, episodes=2)["episodes"])
"""


@pytest.mark.thorough
def test_classes_of_the_program_itself_are_named_at_its_start_and_load_in_it(folder):
    (folder / "program.py").write_text(SCRIPT)
    status, out, err = run_python(("program.py",), "", folder)
    assert (status, err) == (0, "")
    assert out.startswith("checkpoints name __main__.Enc, __main__.Mine, which only this program defines") and out.endswith("\n2\n")
