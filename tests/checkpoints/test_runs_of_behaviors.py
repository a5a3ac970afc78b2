"""The state of a run of several behaviors in a checkpoint is checked as that of one algorithm is, before anything takes it."""

from __future__ import annotations

from functools import partial
from math import inf, nan

import pytest
import torch

from lightning_rl import Behavior, FrozenPolicy, MultiAgent, SettingError
from lightning_rl.training.resuming import check_fits
from tests.algorithms.test_multi_agent import A2C, PPO, StopAt, fit, made
from tests.checkpoints.test_validation import GONE, replaced

RANK = "lightning_rl", "ranks", 0
WORLD = *RANK, "data", "collector", "world"
B = *RANK, "data", "behaviors", "b", "collector"
OPEN = *B, "open_iteration"
STEP = *OPEN, "steps", 0


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """A checkpoint after 4 steps of the world: the iteration of a is full, that of b has 4 of 6 steps."""
    folder = tmp_path_factory.mktemp("run")
    trainer = fit(made(a=A2C, b=PPO), folder, StopAt(1))
    return torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.fixture
def refusals(content, tmp_path):
    """Continue from checkpoints with one place changed; the message of each, which is one short line."""
    model = made(a=A2C, b=PPO)

    def refuse(cases):
        for place, value in cases:
            torch.save(replaced(content, place, value), tmp_path / "changed.ckpt")
            try:
                check_fits(model, tmp_path / "changed.ckpt")
            except SettingError as error:
                assert "\n" not in str(error) and len(str(error)) <= 240, (place, value, str(error))
                yield str(error)
            else:
                pytest.fail(f"{value!r} at {place} was not refused")

    return lambda cases: list(refuse(cases))


def test_a_saved_run_can_continue(content, tmp_path):
    torch.save(content, tmp_path / "a.ckpt")
    assert check_fits(made(a=A2C, b=PPO), tmp_path / "a.ckpt") == 8


TWO, ONE = torch.zeros(2, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
FLAGS = torch.zeros(2, dtype=torch.bool)
CASES = [
    *[((*B, name), value) for name in ("env_steps", "rows") for value in (nan, -5, "x", None, GONE)],
    *[((*B, "statistics", "running_return"), value) for value in (ONE, torch.full((2,), nan).double(), 3)],
    *[((*B, "episodes", name), value) for name, value in (("obs", torch.zeros(7)), ("start", FLAGS[:1]), ("start", 3), ("envs", 3))],
    *[((*B, "episodes"), value) for value in (3, {}, "x")],
    *[(OPEN, value) for value in (3, [], {}, GONE)],
    *[((*OPEN, "generator"), value) for value in (3, None, torch.zeros(3), GONE)],
    *[((*OPEN, name), value) for name in ("actions", "steps") for value in (3, [], [3], {}, GONE)],
    *[((*STEP, "reward"), value) for value in (ONE, TWO * nan, TWO + inf, FLAGS, 3, None, GONE)],
    *[((*STEP, name), value) for name in ("terminated", "valid", "episode_start") for value in (FLAGS[:1], TWO, 3, None, GONE)],
    *[((*STEP, "ended"), value) for value in (torch.tensor([7]), torch.tensor([-1]), torch.tensor([0]), TWO, 3, GONE)],
    *[((*STEP, "obs"), value) for value in (torch.zeros(2, 3), torch.zeros(2), 3, GONE)],
    ((*STEP, "info"), 3),
    *[(WORLD, value) for value in (3, {}, GONE)],
    *[((*WORLD, "num_copies"), value) for value in (0, 3, "x", nan, GONE)],
    *[((*WORLD, "lengths"), value) for value in (torch.zeros(2), torch.zeros(1, dtype=torch.int64), 3, GONE)],
    *[((*WORLD, "states"), value) for value in (3, [], [3], GONE)],
    *[((*WORLD, "sides"), value) for value in (3, {}, {"a": 3}, GONE)],
    *[((*WORLD, "sides", "a", "present"), value) for value in (FLAGS[:1], TWO, 3, GONE)],
    *[((*RANK, "data", "collector", "steps"), value) for value in (-1, nan, "x", GONE)],
    *[((*RANK, "data", "behaviors"), value) for value in (3, {}, {"a": 3}, GONE)],
    *[((*RANK, "behaviors"), value) for value in (3, {}, {"a": 3}, GONE)],
    *[((*RANK, "behaviors", "a", name), value) for name in ("began_at", "progress", "guard", "noise") for value in ("x", nan, GONE)],
    *[((*RANK, "num_envs"), value) for value in (0, 3, GONE)],
    *[(("lightning_rl", "behaviors", "b", name), 10**6) for name in ("env_steps", "episodes")],
]


@pytest.mark.thorough
def test_a_run_of_behaviors_with_something_else_in_a_place_is_refused_in_one_line(refusals):
    refusals(CASES)


@pytest.mark.thorough
def test_a_refusal_names_the_behavior(refusals):
    short, fewer = refusals([((*STEP, "reward"), ONE), (("lightning_rl", "behaviors", "b", "env_steps"), 10**6)])
    assert short.endswith("cannot be continued: behavior b: rank 0 does not have one number for each of 2 environments")
    assert fewer.endswith("cannot be continued: behavior b: all ranks together have fewer env_steps than the run")


def test_an_open_iteration_that_is_full_is_refused_in_one_line(content, tmp_path):
    done = content["lightning_rl"]["ranks"][0]["data"]["behaviors"]["b"]["collector"]["open_iteration"]
    for name in ("actions", "steps"):
        content = replaced(content, (*OPEN, name), [*done[name], *done[name][:2]])
    torch.save(content, tmp_path / "full.ckpt")
    with pytest.raises(SettingError, match="its iteration has 6 steps and is full"):
        fit(made(a=A2C, b=PPO), tmp_path / "run", ckpt_path=tmp_path / "full.ckpt")


@pytest.mark.thorough
def test_the_guard_of_a_frozen_behavior_is_checked_too(tmp_path):
    run = fit(made(), tmp_path / "first").run_folder / "checkpoints" / "last.ckpt"

    def model():
        behaviors = {"a": Behavior("a", partial(PPO)), "b": Behavior("b", FrozenPolicy(run, "b"))}
        return MultiAgent({"id": "tests.agents.Together", "num_envs": 2}, behaviors, 96)

    trainer = fit(model(), tmp_path / "second", StopAt(1))
    content = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert content["lightning_rl"]["ranks"][0]["frozen"]["b"]["guard"]["bad_steps"] == 0
    for place, value in [(("b", "guard", "bad_steps"), -1), (("b", "guard"), 3), (("b",), GONE), ((), GONE)]:
        torch.save(replaced(content, (*RANK, "frozen", *place), value), tmp_path / "changed.ckpt")
        with pytest.raises(SettingError, match="cannot be continued"):
            check_fits(model(), tmp_path / "changed.ckpt")
