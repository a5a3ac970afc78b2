"""Algorithms train in scenes of Unity, through the command line as a user does."""

import hashlib
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import yaml

import lightning_rl as lrl
from lightning_rl.cli.main import main
from lightning_rl.envs.unity.scene import KEPT
from lightning_rl.errors import SettingError
from lightning_rl.exporting.formats import open_session
from lightning_rl.loggers import read_rows
from tests.apart import Apart, read
from tests.unity.scenes import build, find_players


@contextmanager
def built(folder, name):
    """Build a scene in the current folder, and look for its processes afterwards."""

    def build_(*arguments):
        build(folder, "--scene", name.lower(), *arguments, name=name)
        return [f"--model.env.id=unity:{name}", f"--model.env.kwargs.log_folder={folder}/logs"]

    yield build_
    for kept in KEPT.values():  # as at the end of a program, if a run did not begin
        kept.player.close()
    KEPT.clear()
    assert find_players(folder / "logs" / "Player-0.log") == []


@pytest.fixture
def scene(folder):
    with built(folder, "Reach") as build_:
        yield build_


@pytest.fixture
def coop(folder):
    with built(folder, "Coop") as build_:
        yield build_


@pytest.fixture
def race(folder):
    with built(folder, "Race") as build_:
        yield build_


def read_last(folder, algorithm, metric):
    """Return a metric at the end of the only run of an algorithm."""
    (file,) = (folder / "runs" / algorithm).rglob("metrics.csv")
    return float(read_rows(file)[-1][metric])


def fit(scene, *options, steps=512, num_envs=1):
    """Train PPO or another model for some steps."""
    own = [] if any(option.startswith("--model=") for option in options) else ["--model=PPO"]
    return main(["fit", *own, *scene, f"--model.env.num_envs={num_envs}", f"--model.max_env_steps={steps}", *options])


def test_ppo_trains_and_the_policy_is_evaluated(scene, folder, capsys):
    assert fit(scene(), "--seed_everything=1", "--model.n_steps=64", steps=2048) == 0
    out = capsys.readouterr().out
    assert "PPO on unity:Reach, 1 copy of 16 agents that learn" in out
    assert "no evaluations: unity:Reach plays no episodes from seeds; best.ckpt follows training's return" in out
    run = folder / "runs" / "PPO" / "Reach" / "version_0"
    assert (
        f"evaluate it: lightning-rl evaluate --ckpt_path {run.relative_to(folder)}/checkpoints/best.ckpt --episodes 100 --env unity:Reach"
        in out
    )
    assert 0 <= float(read_rows(run / "metrics.csv")[-1]["scene/arrives"]) <= 1
    assert yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["env"]["id"] == "unity:Reach"
    assert main(["evaluate", "--ckpt_path", str(run), "--episodes=20", "--env={id: unity:Reach, kwargs: {log_folder: logs}}"]) == 0
    assert "over 20 episodes" in capsys.readouterr().out
    assert main(["evaluate", "--ckpt_path", str(run)]) == 2
    assert "was trained in a program, unity:Reach; if you trust it, add --env unity:Reach" in capsys.readouterr().err


def test_a_run_leaves_the_file_that_unity_runs(scene, folder, capsys):
    assert fit(scene(), "--model.n_steps=16", "--checkpoint.every_n_env_steps=256", steps=1024) == 0
    run = folder / "runs" / "PPO" / "Reach" / "version_0"
    assert "for Unity: runs/PPO/Reach/version_0/unity/Reach.onnx" in capsys.readouterr().out.splitlines()
    written = json.loads((run / "unity" / "Reach.onnx.json").read_text())
    last = hashlib.sha256((run / "checkpoints" / "last.ckpt").read_bytes()).hexdigest()
    assert (written["format"], written["env_steps"], written["checkpoint"]["sha256"]) == ("unity", 1024, last)
    session = open_session((run / "unity" / "Reach.onnx").read_bytes())
    assert [port.name for port in session.get_inputs()] == ["obs_0"]
    action = session.run(["deterministic_continuous_actions"], {"obs_0": np.zeros((3, 4), np.float32)})[0]
    expected, _ = lrl.load_policy(run / "checkpoints" / "last.ckpt").act(np.zeros((3, 4), np.float32))
    assert np.abs(action - expected).max() < 1e-5


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough)])
def test_a_run_that_is_stopped_leaves_the_file_too(scene, folder, number, status):
    options = "--model=PPO --model.n_steps=16 --model.log_interval=256 --model.compile=false --model.max_env_steps=10000000"
    run = folder / "runs" / "PPO" / "Reach" / "version_0"
    program = Apart(shlex.join(["-m", "lightning_rl", "fit", *scene(), *options.split()]), folder)
    until = time.monotonic() + 60
    while not read_rows(run / "metrics.csv") and time.monotonic() < until:
        time.sleep(0.05)
    program.send_signal(number)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (status, "")
    assert "for Unity: runs/PPO/Reach/version_0/unity/Reach.onnx" in out.splitlines()
    assert out.splitlines()[-1].startswith(f"stopped by {number.name} at ")
    assert (run / "unity" / "Reach.onnx").is_file()


@pytest.mark.thorough
def test_logs_of_players_are_in_the_folder_of_the_run(scene, folder):
    scene()
    assert fit(["--model.env.id=unity:Reach"], "--model.n_steps=16", steps=1024, num_envs=2) == 0
    logs = folder / "runs" / "PPO" / "Reach" / "version_0" / "unity"
    assert [(logs / f"Player-{k}.log").is_symlink() for k in (0, 1)] == [False, False]
    assert [(logs / f"Player-{k}.log").read_text() for k in (0, 1)] == ["seed 0\n", "seed 1\n"]


@pytest.mark.thorough
def test_a_log_that_is_linked_during_a_run_is_whole_after_a_restart(scene, folder, capsys):
    scene("--crash-at", 20)
    assert fit(["--model.env.id=unity:Reach"], "--model.n_steps=32", steps=512) == 0
    log = folder / "runs" / "PPO" / "Reach" / "version_0" / "unity" / "Player-0.log"
    assert f"was ended by SIGKILL; see {log}" in capsys.readouterr().out
    assert log.read_text().split("\n")[:2] == ["seed 0", "seed 0"]
    assert not log.is_symlink()


def test_refused_settings_leave_no_log_and_no_folder(scene, folder, capsys):
    scene()
    assert fit(["--model.env.id=unity:Reach"], "--evaluation.stop_at=1") == 2
    assert not (folder / "runs").exists()


def test_another_rank_opens_a_player_of_its_own(scene, folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    own = {"id": "unity:Reach", "num_envs": 2, "kwargs": {"log_folder": "logs"}}
    scene()
    lrl.PPO(own)
    assert [path.name for path in (folder / "logs").iterdir()] == ["Player-2.log"]


@pytest.mark.thorough
@pytest.mark.parametrize("begins", [True, False], ids=["in a run", "before it"])
def test_ctrl_c_while_the_editor_is_waited_for_ends_at_once(folder, begins):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = "--model=PPO --model.env.id=unity --model.n_steps=16 --model.max_env_steps=100000 --model.compile=false"
    program = Apart(f"-m lightning_rl fit {options} --model.env.kwargs.port={port}", folder)

    def wait_for_lines(number):
        until = time.monotonic() + 60
        while read(program.streams[0]).count(f"waiting for Unity on port {port}: press Play") < number and time.monotonic() < until:
            time.sleep(0.05)

    wait_for_lines(1)
    if begins:
        editor = build(folder, "--scene", "reach", "--quit-at", 60)
        assert subprocess.run([editor, "--mlagents-port", str(port)], timeout=60).returncode == 0
        wait_for_lines(2)
    began = time.monotonic()
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (130, "")
    assert time.monotonic() - began < 15.0, "on a busy machine; without an end it would be more than a minute"
    if begins:
        assert out.splitlines()[-1].startswith("stopped by SIGINT at ")
        assert "; continue: lightning-rl fit --config runs/PPO/unity/version_0/config.yaml --ckpt_path last" in out.splitlines()[-1]
        assert "for Unity: runs/PPO/unity/version_0/unity/Reach.onnx" in out.splitlines()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.thorough
def test_a_trainer_file_and_a_build_are_enough(scene, folder, capsys):
    scene("--log", folder / "sent")
    behavior = "{trainer_type: ppo, hyperparameters: {batch_size: 64, buffer_size: 1024}, time_horizon: 64, max_steps: 4096}"
    players = "env_settings: {num_envs: 2, num_areas: 3, env_args: [--count, '4']}\nengine_settings: {time_scale: 5}"
    (folder / "reach.yaml").write_text(f"behaviors: {{Reach: {behavior}}}\n{players}\nenvironment_parameters: {{distance: 0.5}}\n")
    assert main(["import-mlagents", "reach.yaml", "--env=unity:Reach"]) == 0
    (folder / "x.yaml").write_text(capsys.readouterr().out)
    assert main(["fit", "--config=x.yaml", "--trainer.run_name=X"]) == 0
    assert "for Unity: runs/PPO/Reach/X/unity/Reach.onnx" in capsys.readouterr().out.splitlines()
    sent = [json.loads(line) for line in (folder / "sent").read_text().splitlines()]
    assert [(each["areas"], each["engine"]["2"], each["parameters"]) for each in sent] == [(3, [5.0], {"distance": 0.5})] * 2
    assert {len(actions) for each in sent for actions in each["actions"]} == {4}


@pytest.mark.thorough
def test_a_policy_that_cannot_be_exported_is_one_line_and_no_failure(scene, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert fit(scene(), "--model.n_steps=16") == 0
    out, err = capsys.readouterr()
    line = "runs/PPO/Reach/version_0/unity/Reach.onnx was not written: export to unity needs the package onnxruntime, which is not"
    assert ([text.startswith(line) for text in out.splitlines() if "Reach.onnx" in text], err) == ([True], "")


@pytest.mark.thorough
@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_run_continues_with_new_episodes(scene, capsys, num_envs):
    own = scene()
    assert fit(own, "--model.n_steps=16", num_envs=num_envs) == 0
    again = "--config runs/PPO/Reach/version_0/config.yaml --ckpt_path last --trainer.run_name version_0"
    assert main(["fit", *again.split(), "--model.max_env_steps=1024"]) == 0
    out = capsys.readouterr().out
    assert "environments start new episodes: unity:Reach cannot be saved in the middle of an episode" in out
    assert "1,024/1,024 steps" in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "kind", "spaces"),
    [
        ("SAC", "", "Box(2)"),
        ("A2C", "", "Box(2)"),
        ("TD3", "", "Box(2)"),
        ("DQN", "discrete", "Discrete(5), masked"),
        ("PPO", "discrete", "Discrete(5), masked"),
        ("PPO", "hybrid", "Dict(continuous: Box(1), discrete: MultiDiscrete(2, 2)), masked"),
        ("PPO", "visual", "Box(3, 20, 20) uint8"),
        ("PPO", "hwc", "Box(20, 20, 3) uint8"),
        ("PPO", "goals", "Dict(obs_0: Box(2), obs_1: Box(2), obs_2: Box(4, 3))"),
        ("PPO", "team", "16 agents"),
        ("IMPALA", "", "Box(2)"),
    ],
)
def test_algorithms_train_where_the_spaces_allow_it(scene, capsys, algorithm, kind, spaces):
    assert fit(scene("--kind", kind), f"--model={algorithm}", steps=320) == 0
    assert spaces in capsys.readouterr().out


@pytest.mark.thorough
def test_lists_of_entities_and_goals_are_found(scene):
    assert fit(scene("--kind", "goals"), steps=320) == 0
    algorithm = lrl.PPO.load_from_checkpoint("runs/PPO/Reach/version_0/checkpoints/last.ckpt")
    assert (algorithm.entities, algorithm.goals, algorithm.env) == (["obs_2"], ["obs_1"], None)


@pytest.mark.thorough
def test_lessons_reach_the_scene(scene, folder, capsys):
    first = {"name": "near", "value": 0.25, "completion_criteria": {"measure": "progress", "threshold": 0.4, "min_lesson_length": 1}}
    curriculum = json.dumps({"distance": {"curriculum": [first, {"name": "far", "value": 0.75}]}})
    own = scene("--log", folder / "sent")
    assert fit(own, "--model.n_steps=64", f"--model.env.parameters={curriculum}", steps=4096) == 0
    out = capsys.readouterr().out
    assert "curriculum: distance goes to lesson 2 of 2, far (0.75)" in out
    (sent,) = [json.loads(line) for line in (folder / "sent").read_text().splitlines()]
    assert sent["parameters"] == {"distance": 0.75}


@pytest.mark.thorough
def test_evaluations_during_a_run_play_in_a_player_of_their_own(scene, folder, capsys):
    assert fit(scene(), "--model.n_steps=16", "--evaluation.every_n_env_steps=256", "--evaluation.episodes=4") == 0
    rows = (folder / "runs" / "PPO" / "Reach" / "version_0" / "evaluations.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 4
    assert (folder / "logs").is_dir()


@pytest.mark.thorough
def test_an_evaluation_ends_though_the_scene_never_ends(folder, capsys):
    build(folder, "--scene", "ball", name="Reach")
    own = ["--model.env.id=unity:Reach", "--model.n_steps=16", "--evaluation.every_n_env_steps=512", "--evaluation.episodes=3"]
    assert fit(own, "--evaluation.max_episode_steps=20") == 0
    rows = (folder / "runs" / "PPO" / "Reach" / "version_0" / "evaluations.csv").read_text().splitlines()
    assert [row.split(",")[3] for row in rows[1:]] == ["20"] * 3


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            "--model=POCA",
            "no agent of Reach is in a SimpleMultiAgentGroup, so there are no groups to learn; use PPO (trainer_type: ppo in a",
        ),
        (
            "--model=PPO --model.env.kwargs.behavior=Rech",
            "env.kwargs.behavior Rech: the scene has Reach; did you mean Reach?",
        ),
        ("--model=PPO --model.env.id=./Reach.x86_64", "env.id ./Reach.x86_64 looks like a build of a scene of Unity: use unity:./Reach"),
        ("--model=PPO --model.env.id=./Reach", "env.id ./Reach looks like a build of a scene of Unity: use unity:./Reach"),
        ("--model=PPO --model.env.id=unity:gone/Reach", "env.id unity:gone/Reach: there is no folder gone"),
        ("--model=PPO --timeout-wait=9", "--timeout-wait is not a setting; here it is model.env.kwargs.timeout_wait"),
        ("--model=PPO --run-id=X", "--run-id is not a setting; here it is trainer.run_name"),
        ("--model=PPO --model.self_play={}", "self_play needs agents of two teams, but those of the scene are all in one, Reach/0/*"),
        ("--model=EvolutionStrategies", "EvolutionStrategies does not support multi-agent environments such as unity:Reach"),
        ("--model=PPO --evaluation.stop_at=1", "evaluation.stop_at and evaluation.patience need evaluation.every_n_env_steps"),
        ("--model=PPO --model.env.id=unity:Rech", "env.id unity:Rech: there is no executable; did you mean Reach?"),
    ],
)
def test_what_is_not_supported_is_one_line(scene, capsys, options, line):
    assert fit(scene(), *options.split()) == 2
    err = capsys.readouterr().err.strip()
    assert line in err
    assert "\n" not in err


ON_POLICY = "--model.n_steps=64 --model.gamma=0.95 --model.learning_rate=1e-3"
FADING = '--model.learning_rate={"schedule":"linear","start":1e-3,"end":1e-4}'
OFF_POLICY = "--model.gamma=0.95 --model.learning_rate=1e-3 --model.train_freq=1 --model.batch_size=128"


@pytest.mark.thorough
def test_a_trainer_file_of_ml_agents_is_named_as_such(folder, capsys):
    (folder / "reach.yaml").write_text("behaviors: {Reach: {trainer_type: ppo}}")
    assert main(["fit", "--config=reach.yaml"]) == 2
    command = "lightning-rl import-mlagents reach.yaml --env unity:BUILD > mine.yaml"
    assert capsys.readouterr().err.strip() == f"error: behaviors in reach.yaml are of ML-Agents; convert them: {command}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_learns_to_reach(scene, folder, capsys, seed):
    own = f"{ON_POLICY} --model.batch_size=256 --model.n_epochs=4 --seed_everything={seed}"
    assert fit(scene(), *own.split(), steps=40_000) == 0
    assert read_last(folder, "PPO", "rollout/ep_rew_mean") >= 1.7


@pytest.mark.slow
def test_four_players_learn_to_reach_as_one(scene, folder, capsys):
    own = f"{ON_POLICY} --model.batch_size=256 --model.n_epochs=4 --seed_everything=1"
    assert fit(scene("--count", "4"), *own.split(), steps=40_000, num_envs=4) == 0
    assert read_last(folder, "PPO", "rollout/ep_rew_mean") >= 1.7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "kind", "steps", "options"),
    [
        ("SAC", "", 20_000, OFF_POLICY),
        ("PPO", "visual", 300_000, f"{ON_POLICY} --model.batch_size=256 --model.n_epochs=4 {FADING} --model.net_arch=[256]"),
        ("PPO", "", 60_000, f"{ON_POLICY} --model.batch_size=256 --model.n_epochs=4 --model.memory=LSTM"),
    ],
)
def test_others_learn_to_reach(scene, folder, capsys, algorithm, kind, steps, options):
    assert fit(scene("--kind", kind), f"--model={algorithm}", *options.split(), "--seed_everything=1", steps=steps) == 0
    assert read_last(folder, algorithm, "rollout/ep_rew_mean") >= 1.6


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_poca_learns_to_arrive_as_a_group(coop, folder, capsys, seed):
    own = ["--model=POCA", *ON_POLICY.replace("0.95", "0.97").split(), "--model.batch_size=64", f"--seed_everything={seed}"]
    assert fit(coop(), *own, steps=100_000) == 0
    assert read_last(folder, "POCA", "rollout/group_ep_rew_mean") >= 1.0


@pytest.mark.thorough
def test_poca_trains_groups_that_lose_members_and_continues(coop, folder, capsys):
    own = [*coop("--count", "2"), "--model=POCA", "--model.n_steps=64", "--model.batch_size=64", "--model.log_interval=1"]
    assert fit(own, steps=1_000) == 0
    assert "POCA on unity:Coop, 1 copy of 6 agents in 2 groups that learn" in capsys.readouterr().out
    assert -1.0 < read_last(folder, "POCA", "rollout/group_ep_rew_mean") < 1.5, "at most 3 x 0.5, at least 40 ticks x 0.02"
    run = folder / "runs" / "POCA" / "Coop" / "version_0"
    assert (run / "unity" / "Coop.onnx").is_file()
    assert fit(own, f"--ckpt_path={run}/checkpoints/last.ckpt", steps=2_000) == 0
    assert "a resumed run starts new episodes" in capsys.readouterr().out
    assert main(["evaluate", "--ckpt_path", str(run), "--episodes=6", "--env={id: unity:Coop, kwargs: {log_folder: logs}}"]) == 0


@pytest.mark.thorough
def test_batches_of_groups_divide_the_steps_of_groups(coop, folder, capsys):
    assert fit(coop(), "--model=POCA", "--model.batch_size=60") == 2
    line = "error: model.batch_size 60 does not divide n_steps * groups = 128 * 8 = 1024 steps of groups; use 32 or 64"
    assert capsys.readouterr().err.strip() == line


@pytest.mark.thorough
def test_groups_of_one_behavior_of_several_learn(coop, folder, capsys):
    behaviors = json.dumps({"coop": {"agents": "*", "learner": {"class_path": "POCA", "init_args": {"n_steps": 32, "batch_size": 64}}}})
    assert fit([*coop("--count", "2"), "--model=MultiAgent", f"--model.behaviors={behaviors}"], "--model.log_interval=32", steps=64) == 0
    assert read_last(folder, "MultiAgent", "coop/train/n_updates") > 0
    assert lrl.MultiAgent.load_from_checkpoint(folder / "runs/MultiAgent/Coop/version_0").algorithms["coop"].spaces.groups == 2


OPTIONS = {
    "PPO": "--model.n_steps=16 --model.batch_size=64",
    "SAC": "--model.learning_starts=64 --model.train_freq=16",
    "POCA": "--model.n_steps=16 --model.batch_size=32",
}
SELF_PLAY = "--model.self_play.swap_steps=64 --model.self_play.save_steps=128 --model.self_play.team_change=256"


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", OPTIONS)
def test_a_team_learns_against_its_past_selves(race, folder, capsys, algorithm):
    own = [*race("--count", "4", "--kind", "groups"), f"--model={algorithm}", *OPTIONS[algorithm].split(), "--model.log_interval=1"]
    more = ["--model.self_play.opponents=[random]", "--model.self_play.play_against_latest_model_ratio=0"]
    assert fit(own, *SELF_PLAY.split(), *more, steps=1_500, num_envs=2) == 0
    groups = " in 4 groups" * (algorithm == "POCA")
    assert f"{algorithm} on unity:Race, 2 copies of 8 agents{groups} that learn" in capsys.readouterr().out
    rows = read_rows(folder / "runs" / algorithm / "Race" / "version_0" / "metrics.csv")
    assert float(rows[-1]["self_play/snapshots"]) >= 5
    assert sum(bool(row.get("self_play/win_rate/random")) for row in rows) > 0
    run = f"runs/{algorithm}/Race/version_0"
    assert fit(own, *SELF_PLAY.split(), *more, f"--ckpt_path={run}/checkpoints/last.ckpt", steps=2_000, num_envs=2) == 0
    assert main(["evaluate", "--ckpt_path", run, "--episodes=16", "--env={id: unity:Race, kwargs: {log_folder: logs}}"]) == 0


@pytest.mark.thorough
def test_two_behaviors_of_a_scene_take_turns(scene, folder, capsys):
    learner = {"class_path": "PPO", "init_args": {"n_steps": 16, "batch_size": 64, "self_play": {"save_steps": 64, "team_change": 256}}}
    behaviors = json.dumps({name: {"agents": f"{name}/*", "learner": learner} for name in ("Reach", "Chase")})
    own = [*scene("--kind", "pair"), "--model=MultiAgent", f"--model.behaviors={behaviors}", "--model.log_interval=16"]
    assert fit(own, steps=128) == 0
    (*_, last) = read_rows(folder / "runs" / "MultiAgent" / "Reach" / "version_0" / "metrics.csv")
    assert float(last["Reach/train/n_updates"]) > 0 < float(last["Chase/train/n_updates"])
    assert float(last["Reach/self_play/snapshots"]) > 1
    policy = lrl.load_policy(folder / "runs" / "MultiAgent" / "Reach" / "version_0", behavior="Reach")
    assert policy.act(np.zeros((2, 4), np.float32))[0].shape == (2, 2)


@pytest.mark.thorough
def test_best_weights_of_self_play_are_the_newest(race, folder, capsys):
    own = [
        *race(),
        "--model=PPO",
        "--model.n_steps=16",
        "--model.batch_size=64",
        "--model.self_play.save_steps=64",
        "--model.self_play.team_change=128",
    ]
    assert fit(own, steps=512) == 0
    checkpoints = folder / "runs" / "PPO" / "Race" / "version_0" / "checkpoints"
    best, last = (lrl.PPO.load_from_checkpoint(checkpoints / f"{name}.ckpt").env_steps for name in ("best", "last"))
    assert best == last > 0


@pytest.mark.slow
def test_self_play_learns_to_win_a_race(race, folder, capsys):
    own = [
        *race(),
        "--model=PPO",
        *ON_POLICY.replace("0.95", "0.97").split(),
        "--model.self_play.opponents=[random]",
        "--seed_everything=1",
    ]
    assert fit(own, *["--model.self_play.save_steps=5000", "--model.self_play.team_change=10000"], steps=60_000) == 0
    rows = read_rows(folder / "runs" / "PPO" / "Race" / "version_0" / "metrics.csv")
    wins = [float(row["self_play/win_rate/random"]) for row in rows if row.get("self_play/win_rate/random")]
    assert wins[-1] > 0.9
    assert float(rows[-1]["self_play/elo"]) > 1230


PAIR = json.dumps(
    {
        "reach": {"agents": "Reach/*", "learner": {"class_path": "PPO", "init_args": {"n_steps": 16, "batch_size": 64}}},
        "chase": {"agents": ["Chase/*"], "learner": {"class_path": "SAC", "init_args": {"learning_starts": 64, "train_freq": 8}}},
    }
)


@pytest.mark.thorough
def test_two_behaviors_of_a_scene_have_policies_of_their_own(scene, folder, capsys):
    own = [*scene("--kind", "pair"), "--model=MultiAgent", f"--model.behaviors={PAIR}"]
    assert fit(own, "--model.log_interval=16", steps=64) == 0
    out = capsys.readouterr().out
    run = folder / "runs" / "MultiAgent" / "Reach" / "version_0"
    (*_, last) = read_rows(run / "metrics.csv")
    assert last["env_steps"] == "64"
    assert float(last["reach/train/n_updates"]) > 0 < float(last["chase/train/n_updates"])
    assert "scene/arrives" in last
    for name in ("Reach", "Chase"):
        assert f"for Unity: {run.relative_to(folder)}/unity/{name}.onnx" in out
        assert (run / "unity" / f"{name}.onnx").stat().st_size > 1000
    loaded = lrl.MultiAgent.load_from_checkpoint(run / "checkpoints" / "last.ckpt", max_env_steps=128)
    with pytest.raises(SettingError, match="this algorithm was loaded without an environment; pass env= to train it"):
        lrl.Trainer(default_root_dir=folder, evaluation=None, logger=False).fit(loaded)
    again = f"--config {run}/config.yaml --ckpt_path last --trainer.run_name version_0 --model.max_env_steps 96"
    assert main(["fit", *again.split()]) == 0
    assert "environments start new episodes: unity:Reach cannot be saved in the middle of an episode" in capsys.readouterr().out
    assert read_rows(run / "metrics.csv")[-1]["env_steps"] == "96"


@pytest.mark.thorough
def test_a_behavior_of_several_knows_its_entities_and_goals(scene, folder):
    learner = {"class_path": "PPO", "init_args": {"n_steps": 16}}
    own = [*scene("--kind", "goals"), "--model=MultiAgent", f"--model.behaviors={json.dumps({'all': {'agents': '*', 'learner': learner}})}"]
    assert fit(own, steps=16) == 0
    run = lrl.MultiAgent.load_from_checkpoint("runs/MultiAgent/Reach/version_0/checkpoints/last.ckpt")
    assert (run.algorithms["all"].entities, run.algorithms["all"].goals) == (["obs_2"], ["obs_1"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("agents", "options", "line"),
    [
        ({"reach": "Reach/*"}, "", "agent Chase/0/0 has no behavior"),
        (
            {"all": ["Reach/*", "Chase/*"], "none": "Nobody/*"},
            "",
            "behavior none: agents 'Nobody/*' matches none of the environment's agents",
        ),
        (
            {"one": "Reach/0/0", "rest": ["Reach/0/[1-9]", "Chase/*"]},
            "",
            "behavior one: Reach/0/1 is missing; the agents of a team share their policy in a scene of Unity",
        ),
        (
            {"all": "*"},
            "--model.behaviors.all.learner.self_play={}",
            "behavior all: self_play needs another behavior with self_play, which learns in turn with it",
        ),
        (
            {"all": "*"},
            "--evaluation.every_n_env_steps=100",
            "evaluation: a scene with a policy for each behavior plays no episodes; leave every_n_env_steps out",
        ),
    ],
)
def test_behaviors_that_do_not_fit_a_scene_are_one_line(scene, capsys, agents, options, line):
    behaviors = json.dumps({name: {"agents": patterns, "learner": "PPO"} for name, patterns in agents.items()})
    own = [*scene("--kind", "pair"), "--model=MultiAgent", f"--model.behaviors={behaviors}"]
    assert fit(own, *options.split(), steps=64) == 2
    err = capsys.readouterr().err.strip()
    assert line in err
    assert "\n" not in err
