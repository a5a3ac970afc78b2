"""Groups of runs: how they are named, and told apart."""

from __future__ import annotations

import pytest
import yaml

from lightning_rl.reports.tables import cut
from tests.command_line import run
from tests.reports.folders import write_run


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    """Bootstraps of a fraction of the time; what they come to is the subject of test_tables.py."""
    monkeypatch.setattr("lightning_rl.reports.tables.REPS", 50)


def test_of_many_groups_the_best_is_compared_with_each_other_and_names_are_few(folder, capfd):
    for rate in range(1, 8):
        write_run(folder / f"v{rate}", {100: [0], 100 + rate: [rate % 5]}, seed=1, learning_rate=rate / 1000)
    status, out, err = run("compare .", capfd)
    assert (status, err) == (0, "")
    pairs = [line.split(" over ") for line in out.splitlines() if line.startswith("  PPO") and " over " in line]
    assert len(pairs) == 6 and all(one.strip() == "PPO learning_rate=0.004" for one, _ in pairs)
    assert sum("one seed: there is no interval" in line for line in out.splitlines()) == 1
    assert "and 4 more have one seed: there is no interval." in out
    assert "environment steps: from 101 to 107. " in out


def test_groups_of_different_tasks_are_named_with_the_settings_that_make_them_different(folder, capfd):
    env = {"id": "CartPole-v1", "num_envs": 8, "kwargs": {}, "atari": False, "wrappers": [], "frame_stack": None}
    changed = {"num_envs": 16, "max_episode_steps": 50, "kwargs": {"sutton_barto_reward": False}}
    for name, settings in {"as_it_is": env, "old": {"id": "CartPole-v1"}, "changed": env | changed}.items():
        config = yaml.safe_load((write_run(folder / name, {100: [1]}) / "config.yaml").read_text())
        config["model"]["class_path"], config["model"]["init_args"]["env"] = f"lightning_rl.{name}", settings
        (folder / name / "config.yaml").write_text(yaml.safe_dump(config))
    _, out, _ = run("compare as_it_is old", capfd)
    assert "different tasks" not in out
    _, out, _ = run("compare as_it_is old changed", capfd)
    (line,) = [line for line in out.splitlines() if "different tasks" in line]
    assert line == (
        "The groups have different tasks, whose returns are not comparable: env.kwargs.sutton_barto_reward is not set in as_it_is and old, "
        "False in changed; env.max_episode_steps is not set in as_it_is and old, 50 in changed."
    )


def test_long_settings_are_shown_where_they_differ():
    one, two = (f"lesson: {{name: easy, {'x' * 80}, size: {size}{'y' * 80}" for size in (3, 4))
    assert cut(["0.1", "0.2"]) == ["0.1", "0.2"]
    assert cut([one, two]) == [f"…{'x' * 12}, size: {size}{'y' * 38}…" for size in (3, 4)]
    assert cut([one, two, "none"]) == [one, two, "none"], "cut at the start they would look alike"
