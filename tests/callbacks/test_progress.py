"""What a run prints while it learns."""

from __future__ import annotations

import io
import re
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import pytorch_lightning as pl
from gymnasium import spaces
from rich.console import Console

from lightning_rl import (
    DQN,
    IMPALA,
    PPO,
    BehavioralCloning,
    DAgger,
    EvolutionStrategies,
    MultiAgent,
    MultiEvaluator,
    RolloutEvaluator,
)
from lightning_rl.callbacks.progress import BAR_WIDTH, EnvStepsProgressBar, join_progress
from lightning_rl.data.episodes import EpisodeStatistics, Finished
from lightning_rl.errors import short_number
from lightning_rl.spaces import describe_space
from tests.agents import Together
from tests.environments import Scripted
from tests.fitting import fit, tiny

NUMBER = r"-?[\d,]+(\.\d+)?(e-\d+)?%?"
TEXT = rf"[\d,]+/160 steps · return {NUMBER} ·( [a-zA-Z ]+ {NUMBER} ·)* [\d,]+ steps/s · ETA \d:\d\d:\d\d"


def run(bar, model=None, **arguments):
    model = model or tiny(PPO, max_env_steps=160)
    fit(model, callbacks=[bar, RolloutEvaluator(80, episodes=1)], enable_progress_bar=True, **arguments)
    return model


def on_a_clock(monkeypatch, model, seconds_per_step):
    """The bar's time passes by the environment steps of the model."""
    clock = SimpleNamespace(monotonic=lambda: 100.0 + seconds_per_step * model.count)
    monkeypatch.setattr("lightning_rl.callbacks.progress.time", clock)
    monkeypatch.setattr("lightning_rl.callbacks.progress.SECONDS_BETWEEN_LOOKS", 3_600.0)  # of another clock


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
    assert all(re.search(r"mean return -?[\d.]+ ± [\d.]+, success \d+%$", line) for line in told)


def test_what_an_algorithm_prints_stands_above_the_bar(capsys):
    class Prints(pl.Callback):
        def on_train_batch_end(self, trainer, algorithm, *batch):
            algorithm.print("at", algorithm.count)

    bar, screen = EnvStepsProgressBar(), io.StringIO()
    bar.console = Console(file=screen, force_terminal=True, width=80, highlight=False)
    fit(tiny(PPO, max_env_steps=160), callbacks=[bar, Prints()], enable_progress_bar=True)
    assert "at 16" in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue()).splitlines()
    bar.disable()
    fit(tiny(PPO, max_env_steps=32), callbacks=[bar, Prints()], enable_progress_bar=True)
    assert "at 16" in capsys.readouterr().out.splitlines()


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
    statistics = EpisodeStatistics(1)  # no episode has ended
    model.dataset = model.run.dataset = SimpleNamespace(
        collector=SimpleNamespace(statistics=statistics, num_envs=1, n_steps=8, name="CartPole-v1", steps_made=0)
    )
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("lightning_rl.callbacks.progress.time.monotonic", lambda: next(clock))
    model.env_steps, model.max_env_steps = 1_000, 21_000
    model.trainer.callback_metrics.clear()
    bar.on_train_start(model.trainer, model)  # continues at 1,000
    bar.teardown(model.trainer, model, "fit")
    model.env_steps = 6_000
    assert bar.text(model) == "6,000/21,000 steps · return – · 500 steps/s · ETA 0:00:30"


def test_a_run_begins_with_what_it_is(capsys):
    model = tiny(PPO, "CartPole-v1", max_env_steps=160)
    fit(model, callbacks=[EnvStepsProgressBar(), RolloutEvaluator(episodes=3)], enable_progress_bar=True)
    lines = capsys.readouterr().out.splitlines()
    begin = lines.index("PPO on CartPole-v1, 2 copies")
    assert lines[begin : begin + 8] == [
        "PPO on CartPole-v1, 2 copies",
        "  observations  Box(4)",
        "  actions       Discrete(2)",
        "  learns        107 parameters on the CPU, 1 thread",  # 4·8 + 8 and 8·2 + 2 of the policy, 4·8 + 8 and 8 + 1 of the value
        "  length        160 environment steps, no seed",
        "  evaluation    3 episodes after each iteration, postponed if evaluations would play over 10% of the steps",
        "  returns       training: the last 100 episodes, as explored; evaluations: the newest weights, the most likely actions",
        f"  folder        {Path.cwd()}",
    ]


def summary_on(screen, is_notebook, monkeypatch):
    """Return the lines that a run prints before its bar."""
    monkeypatch.setattr("lightning_rl.callbacks.progress.in_notebook", lambda: is_notebook)
    monkeypatch.setattr("IPython.display.display", lambda *shown, **settings: SimpleNamespace(update=lambda *shown, **settings: None))
    bar = EnvStepsProgressBar()
    bar.console = screen
    run(bar)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.file.getvalue()).splitlines()
    return [line.rstrip() for line in lines[: next(number for number, line in enumerate(lines) if line.startswith("  folder"))]]


@pytest.mark.parametrize(
    ("width", "returns"),
    [
        (60, ["training: the last 100 episodes, as", "explored; evaluations: the newest weights,", "the most likely actions"]),
        (80, ["training: the last 100 episodes, as explored; evaluations: the", "newest weights, the most likely actions"]),
        (200, ["training: the last 100 episodes, as explored; evaluations: the newest weights, the most likely actions"]),
    ],
)
@pytest.mark.parametrize("is_notebook", [False, True])
def test_a_summary_breaks_between_words_and_continues_below_its_value(is_notebook, width, returns, monkeypatch):
    screen = Console(file=io.StringIO(), force_terminal=not is_notebook, width=width, soft_wrap=True, highlight=False)
    lines = summary_on(screen, is_notebook, monkeypatch)
    first, *others = returns
    assert lines[-len(returns) :] == [f"  returns       {first}", *(" " * 16 + other for other in others)]
    assert all(len(line) <= width for line in lines)


def test_several_evaluators_are_announced_with_all_their_episodes(capsys):
    evaluators = [RolloutEvaluator(episodes=1), RolloutEvaluator(episodes=2)]
    fit(tiny(PPO, max_env_steps=16), callbacks=[EnvStepsProgressBar(), MultiEvaluator(evaluators)], enable_progress_bar=True)
    assert "  evaluation    3 episodes after each iteration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: tiny(PPO, "tests.agents.Together", max_env_steps=8), "PPO on Together, 2 copies of 2 agents that learn"),
        (lambda: tiny(PPO, "tests.agents.InTurn", max_env_steps=8), "PPO on InTurn, 2 copies"),
    ],
)
def test_agents_of_an_environment_are_not_counted_as_copies_of_it(model, words, capsys):
    fit(model(), callbacks=[EnvStepsProgressBar()], enable_progress_bar=True)
    assert next(line for line in capsys.readouterr().out.splitlines() if line.startswith("PPO on ")).endswith(words.partition(" on ")[2])


def test_returns_that_are_all_equal_have_a_deviation_of_zero(capsys):
    model = SimpleNamespace(count=16, counter="env_steps", collector=SimpleNamespace(statistics=EpisodeStatistics(1)))
    metrics = {"eval/mean_reward": 1.0, "eval/std_reward": 1.11e-16}
    EnvStepsProgressBar().on_evaluation_end(SimpleNamespace(callbacks=[]), model, metrics)
    assert capsys.readouterr().out.rstrip().endswith("mean return 1 ± 0")


@pytest.mark.parametrize(("every", "words"), [(15, "after each iteration"), (16, "every 16 environment steps")])
def test_an_evaluation_waits_for_the_end_of_its_iteration(every, words, capsys):
    model = tiny(PPO, "CartPole-v1", max_env_steps=100)  # iterations of 16 steps
    evaluator = RolloutEvaluator(every, episodes=3)
    fit(model, callbacks=[EnvStepsProgressBar(), evaluator], enable_progress_bar=True, limit_train_batches=1)
    assert f"  evaluation    3 episodes {words}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Box(0, 255, (64, 64, 3), np.uint8), "Box(64, 64, 3) uint8"),
        (spaces.MultiDiscrete([3, 2]), "MultiDiscrete(3, 2)"),
        (spaces.MultiBinary(4), "MultiBinary(4)"),
        (spaces.Dict(arm=spaces.Box(-1, 1, (2,)), grip=spaces.Tuple([spaces.Discrete(2)])), "Dict(arm: Box(2), grip: Tuple(Discrete(2)))"),
    ],
)
def test_a_space_is_described_in_a_few_words(space, words):
    assert describe_space(space) == words


@pytest.mark.parametrize(
    ("number", "text"), [(0.012345, "0.0123"), (-1.5, "-1.5"), (211.7, "212"), (12_345.6, "12,346"), (3e-8, "3e-08"), (0, "0")]
)
def test_numbers_have_the_digits_that_say_something(number, text):
    assert short_number(number) == text


def slowed(method, seconds=0.004):
    def slow(*arguments, **named):
        time.sleep(seconds)
        return method(*arguments, **named)

    return slow


@pytest.fixture
def each_moment(monkeypatch):
    """The progress of a run is looked at each millisecond, and each look is a line of a log file."""
    for name, seconds in {"SECONDS_BETWEEN_LOOKS": 0.001, "SECONDS_OF_A_LONG_ITERATION": 0.0, "SECONDS_BETWEEN_LINES": 0.0}.items():
        monkeypatch.setattr(f"lightning_rl.callbacks.progress.{name}", seconds)


LEARNER = partial(PPO, n_steps=8, batch_size=8, n_epochs=1, net_arch=[8])


def counts_of(lines):
    return [int(line.partition("/")[0].replace(",", "")) for line in lines]


@pytest.mark.parametrize(
    ("build", "last"),
    [
        pytest.param(lambda: tiny(PPO, max_env_steps=32), 16, id="on-policy"),
        pytest.param(lambda: tiny(DQN, max_env_steps=32), 16, id="random warm-up", marks=pytest.mark.thorough),
        pytest.param(lambda: tiny(PPO, "tests.agents.Together", max_env_steps=32), 32, id="agents", marks=pytest.mark.thorough),
        pytest.param(
            lambda: MultiAgent({"id": "tests.agents.Together", "num_envs": 2}, {"all": {"agents": "*", "learner": LEARNER}}, 32),
            16,
            id="behaviors",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            lambda: tiny(IMPALA, actors={"num_actors": 2, "rollouts_per_batch": 2, "backend": "in_process"}, max_env_steps=64),
            32,
            id="actors",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            lambda: tiny(EvolutionStrategies, episodes_per_generation=8, max_env_steps=64), 32, id="generation", marks=pytest.mark.thorough
        ),
        pytest.param(
            lambda: tiny(PPO, normalize_obs="frozen", normalize_obs_steps=16, max_env_steps=48),
            16,
            id="warm-up of the normalizer",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_long_iteration_shows_its_steps_while_it_lasts(build, last, each_moment, monkeypatch, capsys):
    """`last`: the steps of the first iteration, or of what comes before it."""
    for env in (Scripted, Together):
        monkeypatch.setattr(env, "step", slowed(env.step))
    fit(build(), callbacks=[EnvStepsProgressBar()], enable_progress_bar=True)
    shown = [line for line in capsys.readouterr().out.splitlines() if " · iteration: 0 s · " in line]
    counts = counts_of(shown)
    assert counts == sorted(counts) and any(0 < count < last for count in counts), shown


def test_a_long_evaluation_says_how_many_episodes_it_has_played(each_moment, monkeypatch, capsys):
    monkeypatch.setattr(Scripted, "step", slowed(Scripted.step))
    evaluators = [RolloutEvaluator(32, episodes=2, num_envs=1), RolloutEvaluator(episodes=1)]
    fit(tiny(PPO, max_env_steps=32), callbacks=[EnvStepsProgressBar(), MultiEvaluator(evaluators)], enable_progress_bar=True)
    shown = [line for line in capsys.readouterr().out.splitlines() if "evaluation: " in line and "of 3 episodes" in line]
    played = [int(re.search(r"^32/32 steps · evaluation: (\d) of 3 episodes · 0 s · return ", line)[1]) for line in shown]
    assert played == sorted(played) and {0, 1, 2} <= set(played)


def test_long_updates_are_counted(each_moment, capsys):
    class Slow(pl.Callback):
        def on_update_end(self, trainer, algorithm):
            time.sleep(0.02)

    fit(tiny(PPO, max_env_steps=16), callbacks=[EnvStepsProgressBar(), Slow()], enable_progress_bar=True)
    out = capsys.readouterr().out
    assert "16/16 steps · iteration: 0 s · 1 update · " in out and "16/16 steps · iteration: 0 s · 3 updates · " in out


def test_short_iterations_are_shown_as_they_end_and_no_thread_outlives_the_run(monkeypatch, capsys):
    monkeypatch.setattr("lightning_rl.callbacks.progress.SECONDS_BETWEEN_LOOKS", 0.001)
    fit(tiny(PPO, max_env_steps=96), callbacks=[bar := EnvStepsProgressBar()], enable_progress_bar=True)
    assert "iteration: " not in capsys.readouterr().out and bar.watch is None
    assert not any("show_long_iterations" in thread.name for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (60, "9,600,000/10,000,000 steps · iteration: 12 s"),
        (80, "9,600,000/10,000,000 steps · iteration: 12 s · 8 updates · KL 0.01"),
        (90, "9,600,000/10,000,000 steps · iteration: 12 s · 8 updates · return 21.5"),
        (
            200,
            "9,600,000/10,000,000 steps · iteration: 12 s · 8 updates · return 21.5 · length 30 · KL 0.01 · 48,000 steps/s · ETA 0:00:08",
        ),
        (None, "9,600,000/10,000,000 steps · return 21.5 · length 30 · KL 0.01 · 48,000 steps/s · ETA 0:00:08"),
    ],
)
def test_a_bar_fits_its_terminal_and_shows_what_matters_first(columns, text):
    run = SimpleNamespace(counter="env_steps", run=SimpleNamespace(count_so_far=9_600_000), length=10_000_000)
    width, activity = (None, []) if columns is None else (columns - BAR_WIDTH - 1, ["iteration: 12 s", "8 updates"])
    shown = join_progress(run, 0, 200.0, ["return 21.5", "length 30", "KL 0.01"], width, activity)
    assert shown == text and (width is None or len(shown) <= width)


def test_a_narrow_terminal_shows_an_evaluation_rather_than_the_count():
    run = SimpleNamespace(counter="env_steps", run=SimpleNamespace(count_so_far=9_600_000), length=10_000_000)
    assert join_progress(run, 0, 200.0, ["return 21.5"], 47, ["evaluation: 12 of 100 episodes", "12 s"]) == (
        "evaluation: 12 of 100 episodes · 12 s"
    )


def test_what_a_narrow_terminal_has_no_room_for_is_left_out():
    seen = []

    class Look(EnvStepsProgressBar):
        def text(self, algorithm, width=None, activity=()):
            seen.append((super().text(algorithm), super().text(algorithm, 75)))
            return ""

    run(Look())
    assert seen and all("entropy" in whole and "entropy" not in short and len(short) <= 75 for whole, short in seen)


ENTROPY = ", or lower the entropy bonus, model.ent_coef"


@pytest.mark.parametrize(("algorithm", "mean", "ways_out"), [(PPO, 40.0, [ENTROPY]), (PPO, 90.0, []), (DQN, 40.0, [""])])
def test_a_policy_that_is_much_worse_without_its_randomness_is_pointed_at_once(capsys, algorithm, mean, ways_out):
    model = run(bar := EnvStepsProgressBar(), tiny(algorithm, max_env_steps=160))
    statistics = EpisodeStatistics(1)
    statistics.add(Finished(100.0, None, {}, 10, {}))
    model.dataset = model.run.dataset = SimpleNamespace(collector=SimpleNamespace(statistics=statistics))
    trainer, bar.hinted = model.trainer, False
    sampled, hinted = RolloutEvaluator(deterministic=False), []
    for evaluator in (MultiEvaluator([sampled]), MultiEvaluator([sampled, RolloutEvaluator()]), RolloutEvaluator()):
        trainer.callbacks = [evaluator]
        bar.on_evaluation_end(trainer, model, {"eval/mean_reward": mean, "eval/std_reward": 5.0})
        hinted.append(bar.hinted)
    assert hinted == [False, bool(ways_out), bool(ways_out)]  # not where all actions were sampled
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint: ") and " return 100;" in line]
    assert [line.partition("evaluation.deterministic false")[2] for line in said] == ways_out


def test_a_disabled_bar_prints_nothing(capsys):
    bar = EnvStepsProgressBar()
    bar.disable()
    run(bar)
    assert capsys.readouterr().out == ""
    bar.enable()
    bar.print("on again")
    assert capsys.readouterr().out == "on again\n"


@pytest.mark.variants
@pytest.mark.parametrize("algorithm, shown", [(BehavioralCloning, r"updates · loss [\d.]+"), (DAgger, r"steps · return [\d.]+")])
def test_what_imitates_shows_its_loss_once_and_the_return_of_the_episodes_that_it_plays(algorithm, shown, capsys):
    settings = {} if algorithm is BehavioralCloning else {"teacher": "zoo:ppo/cartpole", "max_env_steps": 800, "learning_starts": 32}
    fit(tiny(algorithm, "CartPole-v1", **settings), callbacks=[EnvStepsProgressBar()], enable_progress_bar=True)
    text = next(line for line in capsys.readouterr().out.splitlines() if "ETA" in line)
    assert "–" not in text and text.count("loss") == 1 and re.search(shown, text), text
