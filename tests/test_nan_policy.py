"""NaN or infinity stops a run in the step in which it appears, with one line that says where; or the run goes on without it."""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from pytorch_lightning import Callback
from pytorch_lightning.plugins.precision import MixedPrecision

import lightning_rl as lrl
from lightning_rl import A2C, DQN, IMPALA, PPO, SAC, TD3
from lightning_rl.errors import NotFiniteError
from lightning_rl.nan_policy import first_bad
from lightning_rl.types import is_finite
from tests.apart import ROOT, Apart
from tests.fitting import ALL, TINY, TWINS, Rows, fit, twins_slow, weights
from tests.poisoned import two

VALUES = (math.nan, math.inf, -math.inf)
TOLERANT = ("skip_update", "restore_last")
ACTION = {PPO: "box", A2C: "discrete", IMPALA: "box", SAC: "box", DQN: "discrete", TD3: "box"}
LOSSES = {PPO: "loss", A2C: "loss", IMPALA: "loss", SAC: "actor_loss", DQN: "loss", TD3: "actor_loss"}
AT = {"reward": 3, "observation": 7, "final observation": 10}
"""Which step of the second environment is bad; episodes have 5 steps."""


def build(algorithm, env, **settings):
    torch.manual_seed(0)
    return algorithm(
        env, **({"net_arch": [8], "max_env_steps": 96} | TINY[next(cls for cls in algorithm.__mro__ if cls in TINY)] | settings)
    )


def poisoned(algorithm, door, value, at, env=None, **settings):
    """An algorithm with two environments, the second of which says `value` in its step `at`."""
    return build(algorithm, two(door.removeprefix("final "), value, at, **{"action": ACTION[algorithm]} | (env or {})), **settings)


def bad_loss(algorithm):
    """What an error calls the loss that `bad_losses` spoils."""
    return "loss" if LOSSES[algorithm] == "loss" else f"loss {LOSSES[algorithm]}"


def bad_losses(algorithm, value, first=1, last=10**6):
    """The same algorithm with a loss that has another value in its calls `first` to `last`."""
    name = LOSSES[algorithm]

    def loss(self, *args):
        self.calls = getattr(self, "calls", 0) + 1
        found = getattr(algorithm, name)(self, *args)
        if not first <= self.calls <= last:
            return found
        return (found[0] * value, *found[1:]) if isinstance(found, tuple) else found * value

    return type(f"Bad{algorithm.__name__}", (algorithm,), {name: loss})  # the command line must find one of a name


def spoil_gradients(model, value, first=1, last=10**6):
    """Gradients of the policy have another value in their passes `first` to `last`."""
    passes = []

    def spoil(gradient):
        passes.append(1)
        return gradient * value if first <= len(passes) <= last else gradient

    next(model.network.parameters()).register_hook(spoil)
    return model


# ---------------------------------------------------------------- raise


@pytest.mark.thorough
@pytest.mark.parametrize("value", [VALUES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in VALUES[1:])])
@pytest.mark.parametrize("door", AT)
@pytest.mark.parametrize("algorithm", twins_slow(ALL))
def test_what_an_environment_says_stops_the_run_in_the_same_step(algorithm, door, value):
    model = poisoned(algorithm, door, value, AT[door])
    with pytest.raises(NotFiniteError, match=f"^{door} of environment 1 is {value} at environment step {2 * AT[door]}$"):
        fit(model)
    assert weights(model).isfinite().all()


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["NEXT_STEP", "DISABLED"])
@pytest.mark.parametrize("door", AT)
def test_the_step_is_exact_in_all_modes_of_resetting(door, mode):
    with pytest.raises(NotFiniteError, match=f"^{door} of environment 1 is nan at environment step {2 * AT[door]}$"):
        fit(poisoned(A2C, door, math.nan, AT[door], {"mode": mode}))


@pytest.mark.thorough
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_the_leaf_of_a_nested_observation_is_named(algorithm, apart):
    for door in ("observation", "final observation"):
        with pytest.raises(NotFiniteError, match=rf"^{door} where\.1 of environment 1 is -inf at environment step {2 * AT[door]}$"):
            fit(poisoned(algorithm, door, -math.inf, AT[door], {"observation": "nested", "apart": apart}))


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [PPO, TD3])
def test_the_first_observation_is_looked_at(algorithm):
    with pytest.raises(NotFiniteError, match=r"^observation of environment 1 is nan at environment step 0$"):
        fit(poisoned(algorithm, "reset", math.nan, 0))


@pytest.mark.thorough
def test_random_steps_before_learning_are_looked_at():
    with pytest.raises(NotFiniteError, match=r"^observation of environment 1 is nan at environment step 14$"):
        fit(poisoned(PPO, "observation", math.nan, 7, normalize_obs="frozen", normalize_obs_steps=30))


@pytest.mark.parametrize("door", ["observation", "reward"])
def test_a_number_that_float32_cannot_hold_counts_as_bad(door):
    with pytest.raises(NotFiniteError, match=rf"^{door} of environment 1 is 1e\+300 at environment step 14$"):
        fit(poisoned(A2C, door, 1e300, 7, {"observation": "double"}))


def test_large_numbers_are_numbers():
    assert is_finite(np.full((8, 4), 3e38, np.float32)) and is_finite(np.full((8, 4), -3e38))
    assert is_finite(np.full(4, 65504, np.float16)) and not is_finite(np.full(4, np.inf, np.float16))
    assert first_bad("x", np.full((1, 1), -np.inf, np.float16), [0]) == "x of environment 0 is -inf"
    assert not is_finite(np.full((8, 4), 3.5e38)) and is_finite({"a": (np.arange(3), np.zeros(2, np.uint8))})
    assert first_bad("reward", np.array([1.0, -math.inf]), [3, 5]) == "reward of environment 5 is -inf"
    assert first_bad("reward", np.array([math.nan]), [1], ["agent a", "agent b"]) == "reward of agent b is nan"


@pytest.mark.thorough
@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("algorithm", twins_slow(ALL))
def test_a_bad_loss_stops_the_run_before_its_gradient_step(algorithm, value):
    model = build(bad_losses(algorithm, value, first=3), two("none", 0.0, 0, action=ACTION[algorithm]))
    with pytest.raises(NotFiniteError, match=rf"^{bad_loss(algorithm)} is (-?{value}|nan) at environment step \d+, update \d+; lower"):
        fit(model)
    assert model.calls == 3 and all(each.isfinite().all() for each in model.state_dict().values())


@pytest.mark.thorough
@pytest.mark.parametrize("value", [pytest.param(math.nan, marks=pytest.mark.slow), math.inf])
@pytest.mark.parametrize("algorithm", twins_slow(ALL))
def test_a_bad_gradient_stops_the_run_before_its_step(algorithm, value):
    model = spoil_gradients(build(algorithm, two("none", 0.0, 0, action=ACTION[algorithm])), value, first=3)
    with pytest.raises(
        NotFiniteError, match=rf"^gradient norm of {LOSSES[algorithm]} is (inf|nan) at environment step \d+, update \d+; lower"
    ):
        fit(model)
    assert all(each.isfinite().all() for each in model.state_dict().values())


@pytest.mark.thorough
def test_the_part_of_the_loss_that_is_bad_is_named():
    model = poisoned(PPO, "reward", 1e30, 3)  # a number, but its square is none
    with pytest.raises(NotFiniteError, match=r"^loss value_loss is inf at environment step 16, update 0"):
        fit(model)


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", twins_slow(ALL))
def test_the_batch_is_saved_in_the_runs_folder_and_named(algorithm, tmp_path):
    for k, model in enumerate(
        (
            poisoned(algorithm, "observation", math.nan, 7),
            build(bad_losses(algorithm, math.nan), two("none", 0, 0, action=ACTION[algorithm])),
        )
    ):
        trainer = lrl.Trainer(default_root_dir=tmp_path, evaluation=None, accelerator="cpu", enable_progress_bar=False, checkpoint=None)
        with pytest.raises(NotFiniteError) as raised:
            trainer.fit(model)
        file = trainer.run_folder / "bad_batch.pt"
        assert f"; its batch is in {file}" in str(raised.value)
        batch = torch.load(file, weights_only=True)
        assert batch["obs"].shape[-1] == 3
        assert k or (batch["next_obs"][1, 1].isnan() and batch["next_obs"].isnan().sum() == 1)


@pytest.mark.thorough
def test_the_batch_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("years of work")
    trainer = lrl.Trainer(default_root_dir=tmp_path, evaluation=None, accelerator="cpu", enable_progress_bar=False)
    model = poisoned(PPO, "observation", math.nan, 7)

    class Plant(Callback):
        def on_train_start(self, trainer, module):
            (trainer.run_folder / "bad_batch.pt").symlink_to(tmp_path / "mine")

    trainer.callbacks.append(Plant())
    with pytest.raises(NotFiniteError):
        trainer.fit(model)
    assert (tmp_path / "mine").read_text() == "years of work" and "obs" in torch.load(
        trainer.run_folder / "bad_batch.pt", weights_only=True
    )


@pytest.mark.parametrize("door", ["observation", "reward", "reset"])
def test_an_evaluation_looks_too(door):
    env = lrl.EnvConfig("tests.poisoned:Poisoned-v0", num_envs=2, kwargs={"door": "none", "value": 0.0, "at": 0})
    model = build(PPO, env, max_env_steps=16)
    bad = lrl.EnvConfig("tests.poisoned:Poisoned-v0", kwargs={"door": door, "value": math.nan, "at": 3})
    evaluator = lrl.RolloutEvaluator(every_n_env_steps=16, episodes=2, env=bad)
    step = 0 if door == "reset" else 3
    line = rf"^{door.replace('reset', 'observation')} is nan in evaluation, at step {step} of the episode with seed 10000$"
    with pytest.raises(NotFiniteError, match=line):
        fit(model, callbacks=[evaluator])


# ---------------------------------------------------------------- skip_update, restore_last


def each_goes_on_once_and_some_in_both_ways():
    """Every algorithm but twins skips updates, PPO and SAC restore weights too; the rest is slow."""
    for algorithm, on_nan in itertools.product(ALL, TOLERANT):
        second = algorithm in TWINS or (on_nan == "restore_last" and algorithm not in (PPO, SAC))
        yield pytest.param(algorithm, on_nan, marks=[pytest.mark.slow] if second else [])


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm, on_nan", each_goes_on_once_and_some_in_both_ways())
@pytest.mark.parametrize("door", AT)
def test_a_run_continues_without_the_bad_values_of_an_environment_and_reports_the_first(algorithm, door, on_nan, capsys):
    rows = Rows()
    model = poisoned(algorithm, door, math.nan, AT[door], on_nan=on_nan, log_interval=1)
    fit(model, logger=rows)
    assert model.env_steps == 96 and weights(model).isfinite().all()
    assert rows.rows[-1][1]["rollout/replaced_steps"] == 1
    assert capsys.readouterr().out.count("replaced by the last finite one (reward: 0)") == 1
    assert all(math.isfinite(value) for _, row in rows.rows for value in row.values())


@pytest.mark.thorough
def test_the_last_good_observation_and_reward_0_stand_in():
    seen = []

    class Watching(A2C):
        def training_step(self, rollout, batch_idx):
            seen.append((rollout.obs.clone(), rollout.reward.clone()))
            super().training_step(rollout, batch_idx)

    for door in ("observation", "reward"):
        fit(build(Watching, two(door, math.inf, 3), on_nan="skip_update", max_env_steps=16))
    (obs, _), (_, reward) = seen
    assert obs[:5, 1, 1].tolist() == pytest.approx([0, 0.2, 0.4, 0.4, 0.8])  # of the leaf's whole row
    assert reward[:, 1, 0].tolist() == [1, 1, 0, 1, 1, 1, 1, 1]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("algorithm, on_nan", each_goes_on_once_and_some_in_both_ways())
def test_a_run_continues_after_a_bad_update_and_reports_it_once(algorithm, kind, on_nan, capsys):
    rows, settings = Rows(), {"on_nan": on_nan, "log_interval": 1}
    env = two("none", 0.0, 0, action=ACTION[algorithm])
    model = build(bad_losses(algorithm, math.inf, 2, 3), env, **settings) if kind == "loss" else build(algorithm, env, **settings)
    if kind == "gradient":
        spoil_gradients(model, math.nan, 2, 3)
    fit(model, logger=rows)
    assert model.env_steps == 96
    assert all(each.isfinite().all() for each in model.state_dict().values())
    assert rows.rows[-1][1]["train/skipped_updates" if on_nan == "skip_update" else "train/restored"] == 2
    said = "that gradient step is skipped" if on_nan == "skip_update" else "restored the weights of the last finished iteration"
    assert capsys.readouterr().out.count(said) == 1


@pytest.mark.thorough
def test_a_skipped_update_leaves_the_weights_as_they_were_and_restoring_brings_back_those_of_the_last_iteration():
    after = {}
    for on_nan in TOLERANT:
        model = build(bad_losses(PPO, math.nan, 4, 4), two("none", 0, 0), on_nan=on_nan, max_env_steps=32)
        start = weights(model)
        model_steps = []
        step = model.step
        model.step = lambda *args, step=step, model=model, kept=model_steps: (step(*args), kept.append(weights(model)))[0]
        fit(model)
        after[on_nan] = [start, *model_steps]
    skipped, restored = after["skip_update"], after["restore_last"]
    assert torch.equal(skipped[3], skipped[4]) and not torch.equal(skipped[2], skipped[3])
    assert torch.equal(restored[0], restored[4]) and torch.equal(restored[3], skipped[3])


@pytest.mark.thorough
def test_the_optimizers_of_reward_signals_go_back_too():
    """The loss of the third iteration's second update is bad: what the signal learned beside the first is undone."""
    steps = []

    class Watching(bad_losses(PPO, math.nan, 10, 10)):
        def on_train_batch_end(self, *arguments):
            steps.append(int(self.signal_learner.own[0].state_dict()["state"][0]["step"]))

    fit(build(Watching, two("none", 0, 0, action="box"), on_nan="restore_last", reward_signals={"rnd": {}}))
    assert steps == [4, 8, 11, 15, 19, 23]


@pytest.mark.thorough
@pytest.mark.parametrize("on_nan", TOLERANT)
def test_a_run_that_is_bad_for_ever_ends_with_the_line(on_nan):
    often = "100 updates" if on_nan == "skip_update" else "10 iterations"
    for algorithm in (PPO, SAC):
        model = build(bad_losses(algorithm, math.nan, 2), two("none", 0, 0, action=ACTION[algorithm]), on_nan=on_nan, max_env_steps=5_000)
        with pytest.raises(NotFiniteError, match=rf"^{bad_loss(algorithm)} is nan .*, for \d+ \w+ in a row") as raised:
            fit(model)
        assert often in str(raised.value) or "100 updates" in str(raised.value)
    model = build(A2C, two("reward", math.nan, 3, length=10**6), on_nan=on_nan, max_env_steps=5_000)
    with pytest.raises(NotFiniteError, match=r"^reward of environment 1 is nan at environment step 204, for 100 steps in a row"):
        fit(model)


def scaled():
    """16-mixed as on a GPU, with a scale that none of these gradients is too large for."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


@pytest.mark.thorough
@pytest.mark.parametrize("on_nan", TOLERANT)
@pytest.mark.parametrize("algorithm", [PPO, SAC])
def test_a_run_with_scaled_gradients_goes_on_after_a_bad_loss_with_its_scale(algorithm, on_nan):
    rows, plugin = Rows(), scaled()
    model = build(bad_losses(algorithm, math.nan, 2, 3), two("none", 0.0, 0, action=ACTION[algorithm]), on_nan=on_nan, log_interval=1)
    fit(model, logger=rows, plugins=[plugin])
    assert model.env_steps == 96 and weights(model).isfinite().all() and plugin.scaler.get_scale() == 1024
    assert rows.rows[-1][1]["train/skipped_updates" if on_nan == "skip_update" else "train/restored"] == 2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_stays_bad_however_small_its_scale_ends_the_run(value):
    model = spoil_gradients(build(PPO, two("none", 0.0, 0), max_env_steps=5_000), value)
    before = weights(model)
    with pytest.raises(NotFiniteError, match=r"^gradient norm of loss is (inf|nan) at environment step \d+, update 10; lower"):
        fit(model, plugins=[scaled()])
    assert torch.equal(weights(model), before)


@pytest.mark.thorough
def test_gradients_that_were_scaled_too_far_are_left_out_without_a_word(capsys):
    plugin, rows = scaled(), Rows()
    model = spoil_gradients(build(PPO, two("none", 0.0, 0), on_nan="skip_update", log_interval=1), math.nan, 2, 4)
    fit(model, logger=rows, plugins=[plugin])
    assert model.env_steps == 96 and plugin.scaler.get_scale() == 128
    assert rows.rows[-1][1]["train/skipped_updates"] == 0 and "left out" not in capsys.readouterr().out


def test_an_evaluation_goes_on_where_the_run_does():
    env = lrl.EnvConfig("tests.poisoned:Poisoned-v0", num_envs=2, kwargs={"door": "none", "value": 0.0, "at": 0})
    bad = lrl.EnvConfig("tests.poisoned:Poisoned-v0", kwargs={"door": "reward", "value": math.nan, "at": 3})
    trainer = fit(build(PPO, env, max_env_steps=16, on_nan="skip_update"), callbacks=[lrl.RolloutEvaluator(16, 1, env=bad)])
    assert trainer.callback_metrics["eval/mean_reward"] == 4.0


# ---------------------------------------------------------------- actors, threads and generations

IN_TURN, APART = ({"num_actors": 1, "backend": backend} for backend in ("in_process", "processes"))
WAYS = {
    "threaded": (PPO, {"threaded": True}, 8),
    "replay threaded": (SAC, {"threaded": True}, 8),
    "actors": (IMPALA, {"actors": IN_TURN}, 8),
    "random steps of an actor": (IMPALA, {"actors": IN_TURN, "normalize_obs": "frozen", "normalize_obs_steps": 32}, 3),
    "generations": (lrl.EvolutionStrategies, {}, 8),
    "actors in processes": (IMPALA, {"actors": APART}, 8),
}


@pytest.mark.thorough
@pytest.mark.parametrize("on_nan", ["raise", "skip_update"])
@pytest.mark.parametrize("way", WAYS)
def test_bad_values_are_counted_reported_once_and_their_batch_saved_however_experience_is_collected(way, on_nan, tmp_path, capsys):
    algorithm, settings, at = WAYS[way]
    env = {"id": "tests.poisoned:Poisoned-v0", "num_envs": 1, "kwargs": {"door": "reward", "value": math.nan, "at": at}}
    env["kwargs"]["action"] = "discrete" if algorithm is PPO else "box"
    model, rows = build(algorithm, env, on_nan=on_nan, log_interval=1, **settings), Rows()
    trainer = lrl.Trainer(default_root_dir=tmp_path, accelerator="cpu", evaluation=None, enable_progress_bar=False, logger=rows)
    line = r"reward (of environment 0 )?is nan .*at .*step \d+.*"
    if on_nan == "raise":
        with pytest.raises(NotFiniteError, match=rf"^{line}; its batch is in \S+bad_batch\.pt$"):
            trainer.fit(model)
    else:
        trainer.fit(model)
        assert rows.rows[-1][1]["rollout/replaced_steps"] == 1.0
        assert len(re.findall(rf"{line}: replaced by .*; its batch is in \S+bad_batch\.pt", capsys.readouterr().out)) == 1
    batch = torch.load(trainer.run_folder / "bad_batch.pt", weights_only=True)
    assert batch["reward"].isnan().any() and batch["next_obs"].isfinite().all() and batch["obs"].isfinite().all()


def test_generations_that_are_bad_for_ever_end_with_the_line():
    env = {"id": "tests.poisoned:Poisoned-v0", "num_envs": 1, "kwargs": {"door": "reward", "value": math.nan, "at": 1, "length": 10**6}}
    with pytest.raises(NotFiniteError, match=r"^reward is nan in a generation, .*, for 100 steps in a row$"):
        fit(build(lrl.EvolutionStrategies, env, max_env_steps=400, on_nan="skip_update"))


# ---------------------------------------------------------------- several ranks

RANKS = """
import itertools, math, os
from lightning_rl.errors import NotFiniteError
from tests.fitting import fit
from tests.test_nan_policy import ACTION, A2C, SAC, bad_losses, build, poisoned, two, weights

rank = int(os.environ["LOCAL_RANK"])
for algorithm, door in itertools.product((A2C, SAC), ("loss", "reward", "observation")):
    for on_nan in ("skip_update", "restore_last", "raise"):
        bad = rank == 1
        if door == "loss":
            cls = bad_losses(algorithm, math.inf, 3, 3) if bad else algorithm
            model = build(cls, two("none", 0.0, 0, action=ACTION[algorithm]), on_nan=on_nan)
        else:
            model = poisoned(algorithm, door if bad else "none", math.nan, 3, on_nan=on_nan)
        try:
            fit(model, devices=2, strategy="ddp")
            mine = weights(model)
            print("DONE", on_nan, door, (model.all_gather(mine)[0] - model.all_gather(mine)[1]).abs().max().item(), flush=True)
        except NotFiniteError as error:
            print("STOPPED", on_nan, door, error, flush=True)
"""


@pytest.mark.thorough
def test_all_ranks_decide_alike(tmp_path):
    (tmp_path / "distributed.py").write_text(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [Apart("distributed.py", tmp_path, env | {"LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    said = []
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        said.append([line.split(maxsplit=3) for line in out.splitlines() if line.startswith(("DONE", "STOPPED"))])
        assert len(said[-1]) == 18, err[-2000:]
    for here, there in zip(*said, strict=True):
        door = here[2]
        assert here[:3] == there[:3] == ["STOPPED" if here[1] == "raise" else "DONE", here[1], door]
        if here[0] == "DONE":
            assert float(here[3]) == 0.0
            continue
        assert here[3] == there[3]  # the line of rank 1, which one of them prints
        assert re.match(
            r"rank 1: loss (actor_loss )?is" if door == "loss" else f"rank 1: {door} of environment 1 is nan at environment step 6", here[3]
        )


SECOND = """
import math, os
import gymnasium as gym
from tests.poisoned import Poisoned

gym.register("Second-v0", lambda: Poisoned("reward", math.nan, 9 if os.environ.get("LOCAL_RANK") == "1" else 0))
"""


@pytest.mark.thorough
def test_a_bad_value_of_the_second_rank_alone_is_one_line_that_names_the_rank_and_its_batch(tmp_path):
    (tmp_path / "second.py").write_text(SECOND)
    run = "fit --import second --model A2C --model.env.id Second-v0 --model.env.num_envs 2 --model.n_steps 16 --model.max_env_steps 256"
    ranks = "--evaluation null --trainer.devices 2 --trainer.strategy ddp --trainer.accelerator cpu --trainer.enable_progress_bar false"
    command = [sys.executable, "-m", "lightning_rl", *run.split(), *ranks.split()]
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    (line,) = result.stderr.splitlines()
    assert result.returncode == 2 and line.startswith(
        "error: rank 1: reward of environment 0 is nan at environment step 18; its batch is in"
    )
    assert [each.name for each in tmp_path.rglob("*.pt")] == ["bad_batch_rank_1.pt"] and line.endswith("bad_batch_rank_1.pt")
