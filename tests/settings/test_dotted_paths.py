"""What settings name by a dotted path is called only if it was written for that: a file from elsewhere runs no command."""

from __future__ import annotations

import sys

import pytest

from lightning_rl import EnvConfig
from lightning_rl.envs.make import make_env
from lightning_rl.errors import SettingError
from lightning_rl.settings.dotted_paths import IMPORTED, check_function
from tests.command_line import TINY, run

MINE = """
from pathlib import Path
from subprocess import getoutput
from torch import load
from pettingzoo.utils.conversions import parallel_wrapper_fn
from mpe2.simple_spread_v3 import env, raw_env


def note(*args, **kwargs):
    Path("called").touch()
    return raw_env()


parallel_env = parallel_wrapper_fn(env)


class Note:
    def __init__(self, *args, **kwargs):
        note()
"""
COMMAND = "--model.env.kwargs '{cmd: touch called}'"
HOSTILE = {
    "a command": ("--model.env.id subprocess.getoutput", "is a module of Python's standard library"),
    "a command by a colon": ("--model.env.id subprocess:getoutput", "is a module of Python's standard library"),
    "a command in one's own module": ("--model.env.id mine.getoutput", "subprocess is a module of Python's standard library"),
    "a builtin": ("--model.env.id builtins.exec", "is a module of Python's standard library"),
    "a pickle": (
        "--model.env.id torch.load --model.env.kwargs '{f: x}'",
        "torch.load is not called: it is a function of torch.serialization",
    ),
    "a pickle in one's own module": ("--model.env.id mine.load", "mine.load is not called: it is a function of torch.serialization"),
    "a function of an environment's package": (
        "--model.env.id pettingzoo.utils.conversions.parallel_to_aec",
        "is not called: it is a function of pettingzoo.utils.conversions",
    ),
    "a class": ("--model.env.id mine.Note", "mine.Note builds Note, which is neither a gymnasium.Env nor a PettingZoo environment"),
    "a wrapper": ("--model.env.id CartPole-v1 --model.env.wrappers [mine.note]", "mine.note is not a gymnasium.Wrapper"),
    "a wrapper that is a class": ("--model.env.id CartPole-v1 --model.env.wrappers [mine.Note]", "mine.Note is not a gymnasium.Wrapper"),
    "a module of wrappers": ("--model.env.id CartPole-v1 --model.env.wrappers [antigravity.x]", "antigravity is a module of Python's"),
    "an encoder": ("--model.env.id CartPole-v1 --model.encoder mine.note", "encoder note is not a torch.nn.Module"),
    "a module of encoders": ("--model.env.id CartPole-v1 --model.encoder antigravity.x", "antigravity is a module of Python's"),
    "an algorithm": ("--model mine.note --model.env.id CartPole-v1", "'mine.note' is not an algorithm"),
    "a module of algorithms": ("--model antigravity.x --model.env.id CartPole-v1", "antigravity is a module of Python's"),
    "an opponent": (
        "--model.env.id lightning_rl.envs.games.tic_tac_toe --model.self_play.opponents [os.system]",
        "os is a module of Python's standard library",
    ),
    "an opponent of a package": (
        "--model.env.id lightning_rl.envs.games.tic_tac_toe --model.self_play.opponents [torch.hub.load]",
        "opponent torch.hub.load is not called: it is a function of torch.hub",
    ),
    "a callback": ("--model.env.id CartPole-v1 --trainer.callbacks+=mine.Note", "trainer.callbacks"),
    "a module of callbacks": ("--model.env.id CartPole-v1 --trainer.callbacks+=antigravity.x", "antigravity is a module of Python's"),
    "a logger": ("--model.env.id CartPole-v1 --trainer.logger mine.note", "trainer.logger"),
    "a function in a callback": (
        "--model.env.id CartPole-v1 --trainer.callbacks+=LambdaCallback --trainer.callbacks.setup=os.getpid",
        "is a module of Python's standard library",
    ),
}


@pytest.fixture
def mine(folder, monkeypatch):
    """A folder with a module of the user's own."""
    (folder / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv(IMPORTED, raising=False)
    sys.modules.pop("mine", None)
    yield folder
    sys.modules.pop("mine", None)


@pytest.mark.thorough
@pytest.mark.parametrize(("options", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_path_that_was_not_written_for_its_setting_is_refused_before_it_is_called(mine, capfd, options, says):
    base = TINY.removeprefix("--model PPO ") if options.startswith("--model ") else TINY
    status, _, err = run(f"fit {base} {options} {COMMAND if 'getoutput' in options else ''}", capfd)
    assert status == 2 and err.count("\n") == 1 and says in err, err
    assert not (mine / "called").exists() and "antigravity" not in sys.modules


def test_a_config_of_another_person_runs_no_command(mine, capfd):
    (mine / "c.yaml").write_text("model:\n  PPO:\n    env: {id: subprocess.getoutput, kwargs: {cmd: touch called}}\n")
    status, _, err = run("fit --config c.yaml", capfd)
    assert status == 2 and not (mine / "called").exists(), err


@pytest.mark.thorough
def test_a_function_of_ones_own_file_is_called_and_one_line_says_so_before(mine, capfd):
    options = f"{TINY.replace('64', '32')} --model.env.id mine.note"
    status, out, err = run(f"fit {options}", capfd)
    assert status == 0 and (mine / "called").exists(), err
    line = f"env.id calls the function mine.note ({mine / 'mine.py'})"
    assert out.count(line) == 1
    _, out, _ = run(f"fit --import mine {options}", capfd)
    assert "calls the function" not in out


@pytest.mark.variants
@pytest.mark.parametrize(
    "env_id", ["mpe2.simple_spread_v3", "mpe2.simple_spread_v3.parallel_env", "mpe2.simple_spread_v3.raw_env", "mine.parallel_env"]
)
def test_functions_of_packages_of_environments_are_called_by_pettingzoos_names(mine, env_id):
    assert make_env(EnvConfig(env_id)).unwrapped.agents


def test_a_function_of_an_installed_package_is_called_if_import_names_it(monkeypatch):
    monkeypatch.delenv(IMPORTED, raising=False)
    path, function = "torch.hub.list", sys.modules["torch"].hub.list
    with pytest.raises(SettingError, match=r"it is a function of torch\.hub, .* if you trust it, --import torch\.hub$"):
        check_function("env.id", path, function, builds_environment=True)
    monkeypatch.setenv(IMPORTED, "torch.hub")
    check_function("env.id", path, function, builds_environment=True)
