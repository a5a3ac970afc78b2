"""Several learners: two ranks on a CPU learn one thing from experience of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import pytorch_lightning as pl
import torch

from lightning_rl.callbacks.csv_logger import read_rows
from lightning_rl.types import tree_map
from tests.two_ranks import ALONE, CASES, StopAfter, build, first_update, trainer

ROOT = Path(__file__).parent.parent


def two_processes(folder, *command):
    """Begin the two ranks of a run by hand."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [env | {"LOCAL_RANK": str(rank)} for rank in (0, 1)]
    return [subprocess.Popen([sys.executable, *command], cwd=folder, env=each, stdout=PIPE, stderr=PIPE, text=True) for each in ranks]


def test_two_ranks_learn_together_stop_together_and_go_on(tmp_path, capsys):
    for case in ALONE:
        model = build(case)
        with pytest.raises(SystemExit):
            trainer(tmp_path / case / "alone", model, 1, StopAfter(7)).fit(model)
    ranks = two_processes(tmp_path, "-m", "tests.two_ranks", str(tmp_path))
    said = [rank.communicate(timeout=300) for rank in ranks]
    wrong = {}
    for case in CASES:
        files = [tmp_path / f"{case}.{rank}.pt" for rank in (0, 1)]
        assert all(file.exists() for file in files), (case, said[0][1][-3000:], said[1][1][-3000:])
        ours, theirs = (torch.load(file, weights_only=False) for file in files)
        for check in (weights_are_equal, experience_differs, first_gradients_are_those_of_one_rank, what_continues_is_the_same, logs_are_shared):
            try:
                check(case, ours, theirs)
            except AssertionError as error:
                wrong[f"{case}: {check.__name__}"] = str(error)[:2000]
    assert wrong == {}
    out = said[0][0]
    assert out.count("(ranks x env.num_envs), not 2 x 2") == len(ALONE) and "holds no replay buffer" not in out
    for case in ALONE:
        alone_from_two(tmp_path / case / "stopped", case, capsys)


def weights_are_equal(case, ours, theirs):
    for run in ("whole", "parts", *(["alone"] if case in ALONE else [])):
        assert differing(ours[run]["weights"], theirs[run]["weights"]) == [], run
        assert ours[run]["counts"] == theirs[run]["counts"]
        counts = ours[run]["counts"]
        assert 40 in counts if case == "BehavioralCloning" else counts[0] >= 640
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
    double = {"batch_size": 32} if case == "PPO" else {}
    model = build(case, env={"num_envs": 4}, **double)
    model.load_state_dict(ours["first"]["state"])
    with first_update(model, joined(batches, rollout), noise) as seen:
        plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        pl.Trainer(**plain, accelerator="cpu", max_epochs=-1).fit(model)
    own = ours["first"]["gradients"]
    assert len(own) == len(seen["gradients"]) > 0
    largest = [(a - b).abs().max().item() for a, b in zip(own, seen["gradients"], strict=True)]
    assert max(largest) <= 1e-6, largest
    assert all(each.abs().max() > 1e-4 for each in own[:1])


def joined(batches, rollout):
    """The rows of both ranks as one batch."""
    axis = {"episode_start": 1} if not rollout else {}
    both = {}
    for name in batches[0]._fields:
        pair = [getattr(batch, name) for batch in batches]
        if isinstance(pair[0], torch.Tensor):
            pair = torch.cat(pair, 1 if rollout else axis.get(name, 0))
        else:
            pair = pair[0] if name != "rows" else [*pair[0], *pair[1]]
        both[name] = pair
    joint = batches[0]._replace(**both)
    return joint if rollout else joint._replace(weight=joint.weight / 2)


def what_continues_is_the_same(case, ours, theirs):
    assert differing(ours["whole"]["weights"], ours["parts"]["weights"]) == []
    assert ours["whole"]["counts"] == ours["parts"]["counts"]
    for file in ("metrics.csv", "evaluations.csv"):
        whole, parts = (read_rows(Path(ours[run]["folder"]) / file) for run in ("whole", "parts"))
        assert len(whole) > 2 and [without_time(row) for row in whole] == [without_time(row) for row in parts]


def logs_are_shared(case, ours, theirs):
    if case == "BehavioralCloning":
        return
    for name, mine in ours["whole"]["mean"].items():
        logged = ours["whole"]["logged"][name]
        assert logged == pytest.approx((mine + theirs["whole"]["mean"][name]) / 2, rel=1e-5)
    assert ours["whole"]["mean"] != theirs["whole"]["mean"] and ours["whole"]["lessons"] == theirs["whole"]["lessons"]
    if case == "PPO":
        assert len({str(each) for each in ours["whole"]["lessons"]}) > 1


def alone_from_two(folder, case, capsys):
    """One rank goes on with what two began: one line says what is not the same, and it ends."""
    capsys.readouterr()
    model = build(case)
    trainer(folder, model, 1).fit(model, ckpt_path="last")
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("run:", "evaluate it:", "replay buffer:"))]
    assert said == ["environments start new episodes: the checkpoint has 2 x 2 (ranks x env.num_envs), not 1 x 2"]
    assert model.env_steps == 640
    if case == "SAC":
        assert len(model.trainer.callback_metrics)


def differing(weights, others):
    assert weights.keys() == others.keys()
    return [name for name in weights if not torch.equal(weights[name], others[name])]


def without_time(row):
    return {name: value for name, value in row.items() if not name.startswith("time/") and value != ""}
