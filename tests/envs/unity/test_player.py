"""Players are started, exchange messages, and fail in one line; nothing is left running."""

import os
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from lightning_rl.envs.unity.player import Actions, Player, PlayerError
from lightning_rl.envs.unity.settings import UnitySettings, find_executable
from lightning_rl.errors import SettingError
from tests.unity.scenes import build, find_players


def start(folder, *arguments, **settings):
    return Player(build(folder, *arguments), UnitySettings(**settings), 0, 7, b"", folder / "Player-0.log")


def act(player, turn):
    """Return actions of zeros for all that ask."""

    def of(name, num):
        spec = player.specs[name]
        whole = np.zeros((num, len(spec.branches)), dtype=np.int64) if spec.branches else None
        return Actions(np.zeros((num, spec.continuous)) if spec.continuous else None, whole)

    return {name: of(name, len(agents.ids)) for name, agents in turn.asking.items() if agents.ids}


def play(player, turns):
    turn = player.finish()
    for _ in range(turns):
        player.start(act(player, turn))
        turn = player.finish()
    return turn


@pytest.mark.thorough
def test_a_player_plays_until_it_is_closed(tmp_path):
    player = start(tmp_path)
    turn = play(player, 40)
    assert {name: spec[1:] for name, spec in player.specs.items()} == {
        "Walker?team=0": (2, ()),
        "Fighter?team=0": (1, (3, 2)),
        "Fighter?team=1": (1, (3, 2)),
    }
    shapes = [(each.name, each.shape, each.dtype, each.is_goal) for each in player.specs["Fighter?team=0"].observations]
    assert shapes == [("camera", (5, 20, 21), np.uint8, False), ("gray", (1, 20, 22), np.float32, False),
                      ("near", (6, 4), np.float32, False), ("own", (5,), np.float32, False)]  # fmt: skip
    assert player.specs["Walker?team=0"].observations[1].is_goal
    assert set(turn.asking) == set(player.specs)
    assert player.stats[-1][0] == "scene/tick"
    assert find_players(player.log)
    player.close()
    assert find_players(player.log) == []


@pytest.mark.thorough
def test_a_player_that_is_killed_is_noticed(tmp_path):
    player = start(tmp_path, "--scene", "ball", "--crash-at", 5)
    with pytest.raises(PlayerError, match=r"Scene.x86_64 was ended by SIGKILL; see .*Player-0.log"):
        play(player, 10)
    player.close()


@pytest.mark.thorough
def test_a_player_that_hangs_is_killed(tmp_path):
    player = start(tmp_path, "--scene", "ball", "--hang-at", 5, timeout_wait=2.0)
    began = time.monotonic()
    with pytest.raises(PlayerError, match=r"no message from Unity on port \d+ in 2 s: the scene needs an agent with a Decision Requester"):
        play(player, 10)
    assert 1.5 < time.monotonic() - began < 4.0
    player.close(0.0)
    assert find_players(player.log) == []


@pytest.mark.thorough
def test_a_player_that_quits_is_noticed_at_once(tmp_path):
    player = start(tmp_path, "--scene", "ball", "--quit-at", 5)
    with pytest.raises(PlayerError, match=r"Scene.x86_64 was closed"):
        play(player, 10)
    player.close()


@pytest.mark.thorough
def test_a_player_that_ignores_the_end_is_killed(tmp_path):
    player = start(tmp_path, "--scene", "ball", "--stubborn")
    player.close(0.5)
    assert find_players(player.log) == []


def test_an_executable_that_is_no_player(tmp_path):
    file = tmp_path / "Other"
    file.write_text("#!/bin/sh\nexit 3\n")
    file.chmod(0o755)
    with pytest.raises(PlayerError, match=r"Other exited with code 3; see "):
        Player(file, UnitySettings(), 0, 7, b"", tmp_path / "log")
    file.chmod(0o644)
    with pytest.raises(SettingError, match=r"Other cannot be started: Permission denied; chmod \+x .*Other makes it executable"):
        Player(file, UnitySettings(), 0, 7, b"", tmp_path / "log")


@pytest.mark.thorough
def test_an_executable_that_never_connects(tmp_path):
    file = tmp_path / "Idle"
    file.write_text("#!/bin/sh\nsleep 3600\n")
    file.chmod(0o755)
    with pytest.raises(PlayerError, match="in 1 s: the scene needs"):
        Player(file, UnitySettings(timeout_wait=1.0), 0, 7, b"", tmp_path / "log")
    assert find_players(tmp_path / "log") == []


@pytest.mark.thorough
def test_another_protocol_is_refused(tmp_path):
    with pytest.raises(
        SettingError, match=r"Unity's package speaks protocol 0.14.0, and 1.x is read: use com.unity.ml-agents 1.0 or newer"
    ):
        start(tmp_path, "--version", "0.14.0")
    assert find_players(tmp_path / "Player-0.log") == []


def test_a_port_that_is_in_use(tmp_path, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"port {port} is in use; stop the other trainer, or set env.kwargs.port"):
            Player(None, UnitySettings(port=port), 0, 7, b"", None)
    assert capfd.readouterr().err == "", "gRPC says nothing"


@pytest.mark.thorough
def test_the_editor_connects_when_play_is_pressed(tmp_path, capfd):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    editor = subprocess.Popen([build(tmp_path, "--scene", "ball", "--quit-at", 5), "--mlagents-port", str(port)])
    player = Player(None, UnitySettings(port=port), 0, 7, b"", None)
    assert capfd.readouterr().out == f"waiting for Unity on port {port}: press Play\n"
    with pytest.raises(PlayerError, match="Play was stopped in Unity's editor"):
        play(player, 10)
    player.close()
    assert editor.wait(10) == 0


@pytest.mark.thorough
def test_a_program_that_ends_leaves_no_player(tmp_path):
    build(tmp_path, "--scene", "ball")
    code = (
        "from pathlib import Path; from lightning_rl.envs.unity.player import Player; from lightning_rl.envs.unity.settings import *;"
        f"folder = Path({str(tmp_path)!r}); player = Player(folder / 'Scene.x86_64', UnitySettings(), 0, 1, b'', folder / 'Player-0.log');"
        "player.finish(); raise ValueError('stop')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ValueError: stop" in ended.stderr
    assert find_players(tmp_path / "Player-0.log") == []


def test_a_command_has_the_arguments_that_unity_reads(tmp_path):
    settings = UnitySettings(no_graphics=True, env_args=["--level", 3])
    command = settings.make_command(tmp_path / "Scene", 5010, tmp_path / "log")
    assert command[1:] == ["-nographics", "-batchmode", "--mlagents-port", "5010", "-logFile", str(tmp_path / "log"), "--level", "3"]


def test_the_suffix_of_an_executable_may_be_left_out(tmp_path):
    file = build(tmp_path, name="Soccer")
    assert find_executable(f"unity:{file}") == find_executable(f"unity:{tmp_path}/Soccer") == file
    assert find_executable("unity") is None
    bundle = tmp_path / "Game.app"
    bundle.mkdir()
    assert find_executable(f"unity:{tmp_path}/Game", "darwin") == bundle / "Contents" / "MacOS" / "Game"
    (tmp_path / "Win").mkdir()
    for name in ("Soccer.exe", "UnityCrashHandler64.exe"):
        (tmp_path / "Win" / name).touch()
    assert find_executable(f"unity:{tmp_path}/Win", "win32") == tmp_path / "Win" / "Soccer.exe"


def test_an_executable_that_does_not_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("builds")
    build(tmp_path / "builds", name="Soccer")
    with pytest.raises(SettingError, match=r"^env.id unity:builds/Socer: there is no executable; did you mean builds/Soccer\?$"):
        find_executable("unity:builds/Socer")
    with pytest.raises(SettingError, match=r"^env.id unity:builds: this is a folder; name its executable; did you mean builds/Soccer\?$"):
        find_executable("unity:builds")
    with pytest.raises(SettingError, match=r"^env.id unity:build: there is no executable; did you mean builds\?$"):
        find_executable("unity:build", "win32")  # where a build is a folder


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70_000}, "env.kwargs.port"),
        ({"timeout_wait": 0.0}, "env.kwargs.timeout_wait"),
        ({"behavior": 3}, "env.kwargs.behavior must be text, got 3"),
        ({"env_args": "--level"}, "env.kwargs.env_args must be a list of arguments, got '--level'"),
        ({"no_graphics": "yes"}, "env.kwargs.no_graphics"),
    ],
)
def test_settings_are_checked(settings, words):
    with pytest.raises(SettingError, match=words):
        UnitySettings(**settings)
