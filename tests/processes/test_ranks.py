"""Several learners: two ranks on a CPU learn one thing from experience of their own.

An algorithm joins in by a row of the table in `two_ranks.py`.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from lightning_rl import EvolutionStrategies
from lightning_rl.loggers import read_rows
from tests.apart import ROOT, Apart
from tests.fitting import TWINS, fit, tiny
from tests.two_ranks import ALONE, CARTPOLE_JOBS, CASES, SendAt, build, first_update, learned, trainer


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def address():
    """Where ranks meet."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


def two_processes(folder, command):
    """Begin the two ranks of a run by hand."""
    env = os.environ | address() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    return [Apart(command, folder, env | {"LOCAL_RANK": str(rank)}) for rank in (0, 1)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param([case for case in CASES if CASES[case][0] not in TWINS], marks=pytest.mark.thorough),
        pytest.param([*CASES], marks=pytest.mark.slow),
    ],
    ids=["but twins", "all"],
)
def test_two_ranks_learn_together_stop_together_and_go_on(cases, tmp_path, capsys):
    for case in ALONE:
        model = build(case)
        with pytest.raises(SystemExit):
            trainer(tmp_path / case / "alone", model, 1, SendAt(7)).fit(model)
    ranks = two_processes(tmp_path, f"-m tests.two_ranks {shlex.join([str(tmp_path), *cases])}")
    said = [rank.communicate(timeout=300) for rank in ranks]
    wrong = {}
    for case in cases:
        files = [tmp_path / f"{case}.{rank}.pt" for rank in (0, 1)]
        assert all(file.exists() for file in files), (case, said[0][1][-3000:], said[1][1][-3000:])
        ours, theirs = (torch.load(file, weights_only=False) for file in files)
        for check in CHECKS:
            try:
                check(case, ours, theirs)
            except AssertionError as error:
                wrong[f"{case}: {check.__name__}"] = str(error)[:2000]
    assert wrong == {}
    jobs_are_shared(*(torch.load(tmp_path / f"jobs.{rank}.pt") for rank in (0, 1)))
    assert all("REFUSED rank 1 starts at 0 environment steps and rank 0 at " in out for out, _ in said)
    out = said[0][0]
    assert out.count("rank 1: final observation of environment 0 is nan at environment step") == 1 and "REPLACED 1.0" in out
    assert ranks[1].returncode == -signal.SIGKILL and "LOST another process of this run died at " in out
    assert out.count("(ranks x env.num_envs), not 2 x 2") == len(ALONE) and "holds no replay buffer" not in out
    for case in ALONE:
        alone_from_two(tmp_path / case / "stopped", case, capsys)


def jobs_are_shared(ours, theirs):
    """Evolution strategies: weights are those of one rank, but for statistics that are summed in another order."""
    assert torch.equal(ours["learned"], theirs["learned"])
    assert min(ours["steps"][0], theirs["steps"][0]) > 200 and ours["steps"][0] + theirs["steps"][0] == ours["steps"][1]
    fit(alone := tiny(EvolutionStrategies, "CartPole-v1", **CARTPOLE_JOBS))
    torch.testing.assert_close(ours["learned"], learned(alone), rtol=0, atol=1e-6)


def videos_are_made_by_one_rank(case, ours, theirs):
    """At each of three evaluations; the other waits for it where they next tell each other something."""
    assert (len(set(ours["films"])), theirs["films"]) == (3 if case == "PPO" else 0, [])


def weights_are_equal(case, ours, theirs):
    for run in ("whole", "parts", *(["alone"] if case in ALONE else [])):
        assert differing(ours[run]["weights"], theirs[run]["weights"]) == [], run
        assert ours[run]["counts"] == theirs[run]["counts"]
        counts = ours[run]["counts"]
        assert 40 in counts if case in OFFLINE else counts[0] >= 640
    assert ours["whole"]["counts"][3] >= 20 and ours["whole"]["counts"][1] > 0
    assert (ours["status"], theirs["status"]) == (143, 0)


def experience_differs(case, ours, theirs):
    mine, other = (found["first"]["batches"][0].obs.flatten(0, -2) for found in (ours, theirs))
    assert (mine.unsqueeze(1) - other).abs().sum(-1).gt(0).double().mean() > 0.9


def first_gradients_are_those_of_one_rank(case, ours, theirs):
    """One rank with all environments, that is with the experience of both."""
    batches = [found["first"]["batches"][0] for found in (ours, theirs)]
    rollout = hasattr(batches[0], "valid")
    noise = [torch.cat(pair) for pair in zip(ours["first"]["noise"], theirs["first"]["noise"], strict=True)]
    double = {"batch_size": 32} if case in ("PPO", "PQN", "TRPO") else {}
    model = build(case, env={"num_envs": 4}, **double)
    model.load_state_dict(ours["first"]["state"])
    with first_update(model, joined(batches, rollout), noise) as seen:
        plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(**plain, accelerator="cpu", max_epochs=-1).fit(model)
    own = ours["first"]["gradients"]
    assert len(own) == len(seen["gradients"]) > 0
    largest = [((a - b).abs().max() / a.abs().max().clamp(min=1)).item() for a, b in zip(own, seen["gradients"], strict=True)]
    assert max(largest) <= 1e-6, largest
    assert own[0].abs().max() > 1e-3


def joined(batches, rollout):
    """The rows of both ranks as one batch."""
    names = [name for name in batches[0]._fields if isinstance(getattr(batches[0], name), torch.Tensor) and name != "actors"]
    axis = {name: 1 if rollout or name == "episode_start" else 0 for name in names}
    joint = batches[0]._replace(**{name: torch.cat([getattr(batch, name) for batch in batches], axis[name]) for name in names})
    if hasattr(joint, "actors"):
        joint = joint._replace(actors=())  # each rank numbers its own
    if hasattr(joint, "rows"):
        joint = joint._replace(rows=np.concatenate([batch.rows for batch in batches]))
    return joint if rollout else joint._replace(weight=joint.weight / 2)


def what_continues_is_the_same(case, ours, theirs):
    assert differing(ours["whole"]["weights"], ours["parts"]["weights"]) == []
    assert ours["whole"]["counts"] == ours["parts"]["counts"]
    for file in ("metrics.csv", "evaluations.csv"):
        whole, parts = (read_rows(Path(ours[run]["folder"]) / file) for run in ("whole", "parts"))
        assert len(whole) > 2 and [without_time(row) for row in whole] == [without_time(row) for row in parts]


def what_is_told_is_shared(case, ours, theirs):
    rows = read_rows(Path(ours["whole"]["folder"]) / "evaluations.csv")
    assert [row["seed"] for row in rows] == ["10000", "10001", "10002"] * (len(rows) // 3) and len(rows) >= 9
    if case in OFFLINE:
        return
    for name, mine in ours["whole"]["mean"].items():
        logged = ours["whole"]["logged"][name]
        assert logged == pytest.approx((mine + theirs["whole"]["mean"][name]) / 2, rel=1e-5)
    assert ours["whole"]["mean"] != theirs["whole"]["mean"] and ours["whole"]["lessons"] == theirs["whole"]["lessons"]
    if case == "PPO":
        assert len({str(each) for each in ours["whole"]["lessons"]}) > 1


OFFLINE = ("BehavioralCloning", "IQL")
"""Cases that step no environment."""

CHECKS = (weights_are_equal, experience_differs, first_gradients_are_those_of_one_rank, what_continues_is_the_same, what_is_told_is_shared)
CHECKS += (videos_are_made_by_one_rank,)


def alone_from_two(folder, case, capsys):
    """One rank goes on with what two began: one line says what is not the same, and it ends."""
    capsys.readouterr()
    model = build(case)
    trainer(folder, model, 1).fit(model, ckpt_path="last")
    usual = ("run:", "evaluate it:", "replay buffer:", "curriculum:")
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(usual)]
    assert said == ["environments start new episodes: the checkpoint has 2 x 2 (ranks x env.num_envs), not 1 x 2"]
    assert model.env_steps >= 640


def differing(weights, others):
    assert weights.keys() == others.keys()
    return [name for name in weights if not torch.equal(weights[name], others[name])]


def without_time(row):
    return {name: value for name, value in row.items() if not name.startswith("time/") and value != ""}


# ---------------------------------------------------------------- ways to begin, and to end

FIT = (
    "--model PPO --model.env.id CartPole-v1 --model.env.num_envs 2 --model.n_steps 64 --model.batch_size 64 --model.net_arch [8] "
    "--model.log_interval 256 --checkpoint.every_n_env_steps 256 --trainer.accelerator cpu --trainer.enable_progress_bar false "
)
DDP = FIT + "--trainer.strategy ddp --trainer.devices 2 "


@contextmanager
def running(folder, *commands, env=None):
    """Processes that train, from their first checkpoint on."""
    begun = [
        subprocess.Popen([sys.executable, "-m", *shlex.split(each)], cwd=folder, env=own, stdout=PIPE, stderr=PIPE, text=True)
        for each, own in zip(commands, env or [None] * len(commands), strict=True)
    ]
    try:
        until = time.monotonic() + 180
        while not any(folder.rglob("last.ckpt")):
            assert all(each.poll() is None for each in begun), [each.communicate(timeout=10) for each in begun if each.poll() is not None]
            assert time.monotonic() < until, "no checkpoint within three minutes"
            time.sleep(0.05)
        yield begun
    finally:
        for each in begun:
            each.kill()
            each.communicate()


def children(pid):
    found = subprocess.run(["ps", "--no-headers", "-o", "pid", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(each) for each in found]


def has_ended(pid, within):
    until = time.monotonic() + within
    while alive := os.path.exists(f"/proc/{pid}") and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    return not alive


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_other_with_one_line(victim, tmp_path):
    with running(tmp_path, f"lightning_rl fit {DDP} --model.max_env_steps 1e8") as (first,):
        ranks = [first.pid, *children(first.pid)]
        os.kill(ranks[victim], signal.SIGKILL)
        assert len(ranks) == 2 and all(has_ended(each, within=30) for each in ranks)
        out, err = first.communicate()
    assert first.returncode == (1 if victim else -signal.SIGKILL)
    assert err.count("\n") == 1 and err.startswith("error: another process of this run died at "), err
    assert ("continue it: lightning-rl fit --config runs/PPO/CartPole-v1/version_0/config.yaml" in out) == bool(victim)


DDP_SCRIPT = """
from pathlib import Path
import lightning_rl as lrl
trainer = lrl.Trainer(devices=2, accelerator="cpu", strategy="ddp", enable_progress_bar=False, evaluation=None)
for _ in range(2):
    trainer.fit(lrl.PPO("CartPole-v1", n_steps=8, batch_size=16, net_arch=[8], max_env_steps=64))
    saved = trainer.checkpoint_callback.last_model_path
    print("FOUND", trainer.run_folder, trainer.log_dir, Path(trainer.logger.log_dir), saved, flush=True)
"""


@pytest.mark.thorough
def test_all_ranks_of_a_script_find_the_folder_of_each_run(tmp_path):
    (tmp_path / "script.py").write_text(DDP_SCRIPT)
    out, err = Apart("script.py", tmp_path, os.environ | {"PYTHONPATH": str(ROOT)}).communicate(timeout=120)
    runs = [f"runs/PPO/CartPole-v1/version_{number}" for number in (0, 1)]
    found = [line for line in out.splitlines() if line.startswith("FOUND")]
    assert sorted(found) == sorted(2 * [f"FOUND {run} {run} {run} {run}/checkpoints/last.ckpt" for run in runs]), err[-2000:]


UNGUARDED = """
import lightning_rl as lrl
lrl.Trainer(devices=2, accelerator="cpu", strategy="ddp_spawn").fit(lrl.PPO("CartPole-v1", max_env_steps=64))
"""


@pytest.mark.slow
def test_a_script_that_spawns_ranks_on_import_gets_an_error_that_names_the_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(UNGUARDED)
    script = Apart("script.py", tmp_path, os.environ | {"PYTHONPATH": str(ROOT)})
    _, err = script.communicate(timeout=120)
    last = 'SettingError: spawned processes import the program: put the training below `if __name__ == "__main__":`'
    assert script.returncode == 1 and err.splitlines()[-1].endswith(last), err[-2000:]
    assert err.count("Traceback") == 1 and list(tmp_path.rglob("runs/*")) == []


SPAWN = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from lightning_rl import Trainer
from lightning_rl.loggers import read_rows
from tests.two_ranks import build

def ask_to_stop():
    while not any(read_rows(file) for file in Path().rglob("metrics.csv")):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    model = build("SAC", max_env_steps=10_000_000)
    threading.Thread(target=ask_to_stop, daemon=True).start()
    trainer = Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], enable_progress_bar=False, evaluation=None)
    try:
        trainer.fit(model)
    finally:
        saved = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
        brought = all(torch.equal(value, saved["state_dict"][name]) for name, value in model.state_dict().items())
        same = all(getattr(model, name) == saved["lightning_rl"][name] for name in model.COUNTS)
        print("FOUND", len(saved["lightning_rl"]["ranks"]), brought, same, f"{model.env_steps:,}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_spawned_processes_receive_the_signal_and_their_run_is_returned(strategy, tmp_path):
    (tmp_path / "script.py").write_text(SPAWN)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "script.py", strategy], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 143, result.stderr[-3000:]
    (found,) = [line.split() for line in result.stdout.splitlines() if line.startswith("FOUND")]
    assert found[1:4] == ["2", "True", "True"] and f"stopped by SIGTERM at {found[4]} environment steps; continue: " in result.stdout


SPAWN_SEVERAL = """
import torch
import lightning_rl as lrl

if __name__ == "__main__":
    learner = {"class_path": "PPO", "init_args": {"n_steps": 8, "batch_size": 8}}
    lessons = {"size": {"curriculum": [
        {"value": 2.0, "completion_criteria": {"measure": "progress", "threshold": 0.5}}, {"value": 1.0}
    ]}}
    model = lrl.MultiAgent(
        {"id": "tests.agents.Sized", "num_envs": 2, "parameters": lessons},
        {name: {"agents": name, "learner": learner} for name in "ab"},
        max_env_steps=128,
    )
    trainer = lrl.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", enable_progress_bar=False, evaluation=None)
    trainer.fit(model)
    saved = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    for name, algorithm in model.algorithms.items():
        print("FOUND", all(getattr(algorithm, count) == saved["lightning_rl"]["behaviors"][name][count] for count in model.COUNTS))
        print("FOUND", algorithm.env_steps > 0)
    print("FOUND", model.curriculum[0].lessons == {"size": 1} and "lightning_rl" not in trainer.callback_metrics)
"""


@pytest.mark.slow
def test_counts_of_behaviors_and_lessons_return_from_spawned_processes(tmp_path):
    (tmp_path / "script.py").write_text(SPAWN_SEVERAL)
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [line for line in result.stdout.splitlines() if line.startswith("FOUND")] == ["FOUND True"] * 5, result.stdout


SPAWN_SELF_PLAY = """
import tempfile
from pathlib import Path
import torch
import lightning_rl as lrl

if __name__ == "__main__":
    game = {"id": "lightning_rl.envs.games.tic_tac_toe", "num_envs": 2}
    setting = {"save_steps": 32, "window": 3, "play_against_latest_model_ratio": 0.2}
    model = lrl.PPO(game, n_steps=8, batch_size=16, max_env_steps=256, self_play=setting)
    trainer = lrl.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", enable_progress_bar=False, evaluation=None)
    trainer.fit(model)
    (past,) = model.past_selves
    saved = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]["SelfPlay"]
    numbers = [number for file in saved["snapshot_files"] for number in file["numbers"]]
    print("FOUND", past.snapshots.taken == saved["taken"] == 9 and [*past.snapshots.weights] == numbers == [6, 7, 8])
    print("FOUND", (past.elo, past.elos) == (saved["elo"], saved["elos"]) and past.elo != 1200)
    print("FOUND", past.results[""].rows.tolist() == saved["scores"][""].tolist())
    model.max_env_steps = 320
    lrl.Trainer(accelerator="cpu", enable_progress_bar=False, evaluation=None).fit(model)
    print("FOUND", past.snapshots.taken == 11 and not list(Path(tempfile.gettempdir()).glob("*.pt")))
"""


@pytest.mark.slow
def test_snapshots_and_ratings_of_self_play_return_from_spawned_processes(tmp_path):
    (tmp_path / "script.py").write_text(SPAWN_SELF_PLAY)
    (tmp_path / "temporary").mkdir()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary")}
    result = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-3000:]
    assert [line for line in result.stdout.splitlines() if line.startswith("FOUND")] == ["FOUND True"] * 4, result.stdout


@pytest.mark.slow
def test_torchrun_and_two_nodes_train_two_ranks(tmp_path):
    short = "--model.max_env_steps 1024 --evaluation.episodes 4"
    nodes = [os.environ | each | {"NODE_RANK": str(node)} for node, each in enumerate([address()] * 2)]
    kinds = {
        "torchrun": ([f"torch.distributed.run --nproc_per_node=2 --master_port {free_port()} -m lightning_rl fit {DDP} {short}"], None),
        "nodes": ([f"lightning_rl fit {FIT} --trainer.strategy ddp --trainer.devices 1 --trainer.num_nodes 2 {short}"] * 2, nodes),
    }
    evaluations = []
    for kind, (commands, env) in kinds.items():
        (tmp_path / kind).mkdir()
        with running(tmp_path / kind, *commands, env=env) as begun:
            said = [each.communicate(timeout=90) for each in begun]
        assert [each.returncode for each in begun] == [0] * len(begun), said
        (run,) = (tmp_path / kind).glob("runs/PPO/CartPole-v1/version_*")
        saved = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["lightning_rl"]
        assert (saved["env_steps"], len(saved["ranks"])) == (1024, 2)
        evaluations.append(read_rows(run / "evaluations.csv"))
    assert evaluations[0] == evaluations[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_ranks_learn_as_well_as_one(seed, tmp_path):
    fit = f"fit --config ppo/cartpole --seed_everything {seed} --trainer.accelerator cpu --trainer.enable_progress_bar false"
    two = "--model.env.num_envs 8 --model.batch_size 128 --trainer.strategy ddp --trainer.devices 2"  # together the rollouts of one
    for ranks, more in {"one": "", "two": two}.items():
        (tmp_path / ranks).mkdir()
        subprocess.run([sys.executable, "-m", "lightning_rl", *shlex.split(f"{fit} {more}")], cwd=tmp_path / ranks, check=True)
        (last,) = (tmp_path / ranks).rglob("last.ckpt")
        judge = [sys.executable, "-m", "lightning_rl", "evaluate", "--ckpt_path", str(last), "--seed", "50000", "--json"]
        assert json.loads(subprocess.run(judge, check=True, capture_output=True, text=True).stdout)["return_mean"] >= 490, ranks
