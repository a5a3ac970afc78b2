"""Text from files and workers reaches the terminal without control characters."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

from lightning_rl import PPO, EnvConfig, SettingError
from lightning_rl.errors import closest_of, printable
from lightning_rl.settings.fields import as_settings
from tests.command_line import TINY, run
from tests.fitting import fit

ORDERS = "\x1b]0;owned\x07\x1b[2J\r\u202e\x9b"
"""Another title, an empty screen, the start of the line, letters from right to left, and the start of a sequence in one byte."""
SHOWN = r"\x1b]0;owned\x07\x1b[2J\r\u202e\x9b"


class Raises(gym.Env):
    """Raises an error with control characters in its third step."""

    observation_space, action_space = Box(-1, 1, (2,)), Discrete(2)
    t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == 3:
            raise RuntimeError(f"lost {ORDERS}")
        return np.zeros(2, np.float32), 0.0, False, False, {}


gym.register("Raises-v0", f"{__name__}:Raises")


def test_control_characters_are_escaped_and_lines_stay():
    assert printable(f"α ± 1 · [red]\n{ORDERS}") == f"α ± 1 · [red]\n{SHOWN}"
    assert str(SettingError(f"a {ORDERS}")) == f"a {SHOWN}"


@pytest.mark.thorough
def test_control_characters_in_a_manifest_are_escaped(folder, capfd):
    assert run(f"fit --model.env.id CartPole-v1 {TINY}", capfd)[0] == 0
    checkpoint = folder / "runs/PPO/CartPole-v1/version_0/checkpoints/last.ckpt"
    manifest = checkpoint.with_name("last.ckpt.json")
    for bar in ("true", "false"):
        content = json.loads(manifest.read_text())
        content["versions"]["python"] = f"[bold]{ORDERS}"
        manifest.write_text(json.dumps(content))
        status, out, err = run(f"fit --model.env.id CartPole-v1 {TINY} --ckpt_path last --trainer.enable_progress_bar {bar}", capfd)
        assert (status, err) == (0, "") and f"python [bold]{SHOWN} (here" in out and printable(out) == out, out + err


@pytest.mark.thorough
def test_control_characters_in_an_error_of_a_worker_are_escaped(folder, capfd):
    options = f"--model.env.id {__name__}:Raises-v0 --model.env.vectorization async --evaluation null"
    status, out, err = run(f"fit {TINY} {options}", capfd)
    assert (status, err.count("\n")) == (2, 1), err  # it failed too often
    assert out.count(r"was restarted: RuntimeError: lost \x1b]0;owned\x07\x1b[2J") > 1
    assert printable(out) == out and printable(err) == err


def test_control_characters_in_a_line_of_a_run_are_escaped_and_markup_stays(capsys):
    class Says(PPO):
        def on_train_batch_end(self, *arguments):
            self.say(f"[/red] :smile: {ORDERS}")

    fit(Says("CartPole-v1", n_steps=8, batch_size=8, max_env_steps=64))
    assert f"[/red] :smile: {SHOWN}\n" in capsys.readouterr().out


@pytest.mark.thorough
def test_control_characters_in_names_of_folders_and_sections_are_escaped(folder, capfd):
    assert run(f"fit --model.env.id CartPole-v1 {TINY} --evaluation.every_n_env_steps 32", capfd)[0] == 0
    (folder / "runs/PPO/CartPole-v1/version_0").rename(folder / f"a{ORDERS}")
    status, out, err = run(f"compare 'a{ORDERS}'", capfd)
    assert (status, err) == (0, "") and SHOWN in out and printable(out) == out
    (folder / "ppo.yml").write_text(json.dumps({"CartPole-v1": {"n_timesteps": 1000, "policy": "MlpPolicy", f"b{ORDERS}": 1}}))
    status, out, err = run("import-zoo ppo.yml CartPole-v1", capfd)
    assert printable(out + err) == out + err and r"\x1b" in out + err


@pytest.mark.parametrize(
    ("name", "names", "meant"),
    [("ppo", ["PPO", "PQN"], "PPO"), ("mpl", ["mlp", "simple"], "mlp"), ("PPO2", ["PPO", "A2C"], "PPO"), ("xyz", ["PPO"], None)],
)
def test_a_name_in_another_case_or_with_two_letters_swapped_is_recognized(name, names, meant):
    assert closest_of(name, names) == meant


def test_a_mapping_without_a_required_setting_is_reported():
    with pytest.raises(SettingError, match=r"^env\.id is missing$"):
        as_settings("env", EnvConfig, {"kwargs": {}})


@pytest.mark.thorough
@pytest.mark.parametrize("out", ["file", "file/study"])
def test_a_study_without_a_writable_folder_is_reported(out, folder, capfd):
    (folder / "file").write_text("")
    status, _, err = run(f"tune --config ppo/cartpole --trials 1 --out {out}", capfd)
    assert (status, err.count("\n")) == (2, 1) and f"--out {out}: " in err and "name a folder to write to" in err


@pytest.mark.thorough
def test_a_study_whose_storage_is_not_a_database_is_reported(folder, capfd):
    (folder / "study").mkdir()
    (folder / "study" / "study.db").write_text("no database at all, only some text that is long enough for a header of SQLite")
    status, _, err = run("tune --config ppo/cartpole --trials 1 --out study", capfd)
    assert (status, err) == (2, "error: study/study.db cannot be used (file is not a database): restore it, or name another --out\n")


@pytest.mark.parametrize("words", ['evaluate --ckpt_path x ""', f"fit --config {'a' * 300}", f"evaluate --ckpt_path {'a' * 300}"])
def test_empty_values_and_impossible_file_names_are_reported(words, folder, capfd):
    status, _, err = run(words, capfd)
    assert (status, err.count("\n")) == (2, 1) and err.startswith("error: ")
