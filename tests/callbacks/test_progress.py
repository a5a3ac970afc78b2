"""What a run prints while it learns."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

from rich.console import Console

from lightning_rl import PPO, RolloutEvaluator
from lightning_rl.callbacks.progress import EnvStepsProgressBar
from lightning_rl.data.episodes import EpisodeStatistics
from tests.fitting import fit, tiny

TEXT = r"[\d,]+/160 steps · [\d,]+ steps/s · return -?\d+\.\d · ETA \d:\d\d:\d\d"


def run(bar, model=None, **arguments):
    model = model or tiny(PPO, max_env_steps=160)
    fit(model, callbacks=[bar, RolloutEvaluator(80, episodes=1)], enable_progress_bar=True, **arguments)
    return model


def on_a_clock(monkeypatch, model, seconds_per_step):
    """The bar's time passes by the environment steps of the model."""
    clock = SimpleNamespace(monotonic=lambda: 100.0 + seconds_per_step * model.count)
    monkeypatch.setattr("lightning_rl.callbacks.progress.time", clock)


def test_a_log_file_gets_about_one_line_a_minute_and_one_at_the_end(capsys, monkeypatch):
    model = tiny(PPO, max_env_steps=160)
    on_a_clock(monkeypatch, model, 1.5)  # 24 seconds an iteration of 16 steps
    run(EnvStepsProgressBar(), model)
    lines = capsys.readouterr().out.splitlines()
    told = [line for line in lines if line.startswith("evaluation at ")]
    shown = [line for line in lines if "steps/s" in line]
    assert all(re.fullmatch(TEXT, line) for line in shown)
    assert [line.partition("/")[0] for line in shown] == ["48", "96", "144", "160"]  # after 72, 144, 216 and 240 seconds
    assert "· 1 steps/s ·" in shown[0] and shown[0].endswith("ETA 0:02:48") and shown[-1].endswith("ETA 0:00:00")
    assert [line.partition(":")[0] for line in told] == ["evaluation at 80 steps", "evaluation at 160 steps"]
    assert all(re.search(r"mean return -?\d+\.\d ± \d+\.\d$", line) for line in told)


def test_a_short_run_prints_only_its_last_line(capsys):
    run(EnvStepsProgressBar())
    shown = [line for line in capsys.readouterr().out.splitlines() if "steps/s" in line]
    assert [line.partition("/")[0] for line in shown] == ["160"]


def test_a_terminal_shows_a_bar_that_reaches_its_end():
    bar, screen = EnvStepsProgressBar(), io.StringIO()
    bar.console = Console(file=screen, force_terminal=True, width=80, highlight=False)
    run(bar)
    assert bar.bar is None  # stopped
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).splitlines()
    assert any(re.search(TEXT.replace(r"[\d,]+/", "160/"), line) and len(line) <= 80 for line in last)
    assert "evaluation at 80 steps" in screen.getvalue()


def test_speed_and_time_left_follow_from_the_clock(monkeypatch):
    bar, model = EnvStepsProgressBar(), run(EnvStepsProgressBar())
    model.dataset = SimpleNamespace(collector=SimpleNamespace(statistics=EpisodeStatistics(1)))  # no episode has ended
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("lightning_rl.callbacks.progress.time.monotonic", lambda: next(clock))
    model.env_steps, model.max_env_steps = 1_000, 21_000
    bar.on_train_start(None, model)  # continues at 1,000
    model.env_steps = 6_000
    assert bar.text(model) == "6,000/21,000 steps · 500 steps/s · return – · ETA 0:00:30"


def test_a_disabled_bar_prints_nothing(capsys):
    bar = EnvStepsProgressBar()
    bar.disable()
    run(bar)
    assert capsys.readouterr().out == ""
    bar.enable()
    bar.print("on again")
    assert capsys.readouterr().out == "on again\n"
