"""Lessons follow one another as their criteria say, the same on all ranks and over a resume."""

import math
import re
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import OnExceptionCheckpoint

from lightning_rl import PPO, SAC, BehavioralCloning, CheckpointConfig, Curriculum, EnvConfig, EvaluationConfig, SettingError, Trainer
from lightning_rl.callbacks.curriculum import make_curriculum, need_increment, with_lessons
from lightning_rl.data.episodes import Finished
from lightning_rl.envs.lessons import CompletionCriteria, as_parameters
from lightning_rl.envs.parameters import EnvParameters
from lightning_rl.loggers import read_rows
from tests.fitting import fit, tiny


def lessons(*criteria, **more):
    """A curriculum of CartPole's pole, a lesson for each criterion and a final one."""
    each = [{"name": f"lesson {k}", "value": 0.5 + k / 4, "completion_criteria": each} for k, each in enumerate(criteria)]
    return {"curriculum": [*each, {"name": "final", "value": 2.0}], **more}


def smoothed(measures, **settings):
    """The smoothed measure after each of some windows of one episode."""
    value, values = 0.0, []
    for measure in measures:
        _, value = need_increment(CompletionCriteria(threshold=10, **settings), 0.0, [measure], value)
        values.append(value)
    return values


def test_a_measure_is_smoothed_once_for_each_episode():
    assert smoothed([1, 1, 1, 1]) == [0.75, 0.9375, 0.984375, 0.99609375]


def test_a_measure_must_exceed_the_threshold_and_smoothing_may_be_off():
    criteria = CompletionCriteria(threshold=0.75)
    assert need_increment(criteria, 0.0, [1.0], 0.0) == (False, 0.75)
    assert need_increment(criteria, 0.0, [1.0], 0.01) == (True, 0.7525)
    assert need_increment(CompletionCriteria(threshold=0.75, signal_smoothing=False), 0.0, [1.0, 0.6], 0.3) == (True, 0.3)


def test_smoothing_begins_at_the_first_mean_if_that_is_negative():
    assert smoothed([-19, -19, -3]) == [-19, -19, -7]
    assert need_increment(CompletionCriteria(threshold=-15), 0.0, [-19.0], 0.0) == (False, -19.0)


def test_a_lesson_needs_its_episodes_whatever_it_measures():
    assert need_increment(CompletionCriteria(min_lesson_length=2), 0.0, [9.0], 0.5) == (False, 0.5)
    assert need_increment(CompletionCriteria(measure="progress", min_lesson_length=2), 0.9, [9.0], 0.5) == (False, 0.5)
    assert need_increment(CompletionCriteria(measure="progress", threshold=0.5, min_lesson_length=1), 0.6, [9.0], 0.5) == (True, 0.5)
    assert need_increment(CompletionCriteria(measure="progress", threshold=0.5), 0.5, [], 0.0) == (False, 0.0)


def test_neither_an_empty_window_nor_nan_ends_a_lesson():
    assert need_increment(CompletionCriteria(threshold=-5), 0.0, [], 0.5) == (False, 0.5)
    assert need_increment(CompletionCriteria(threshold=-5), 0.0, [math.nan], 0.5) == (False, 0.5)


class Judge:
    """An algorithm to a curriculum that judges episodes."""

    count = 1000

    def __init__(self):
        self.said = []

    def say(self, line):
        self.said.append(line)


def play(curriculum, judge, *episodes):
    """Judge episodes that play the current lessons; whether one asked for a reset."""
    return [curriculum.add_episode(judge, Finished(return_, None, dict(curriculum.lessons)), 0.0) for return_ in episodes]


def test_a_lesson_is_measured_by_the_mean_of_its_last_episodes():
    wanted = {"threshold": 10, "min_lesson_length": 3, "signal_smoothing": False}
    curriculum, judge = Curriculum({"length": lessons(wanted)}), Judge()
    play(curriculum, judge, 20, 20)
    assert curriculum.lessons == {"length": 0}
    play(curriculum, judge, -40, 0, 40)  # means 0, -20/3, 0
    assert curriculum.lessons == {"length": 0} and judge.said == []
    play(curriculum, judge, -9)
    assert curriculum.lessons == {"length": 1}  # 31 / 3 > 10
    assert judge.said == [
        "curriculum: length goes to lesson 2 of 2, final (2): reward 10.33 > 10 in lesson 0, 3 of 3 episodes, at 1,000 environment steps"
    ]


def test_parameters_are_in_lessons_of_their_own_and_a_new_lesson_empties_all_windows():
    plain = {"signal_smoothing": False}
    gravity = {"threshold": 5, "min_lesson_length": 3, **plain}
    curriculum = Curriculum({"length": lessons({"threshold": 1, "min_lesson_length": 2, **plain}), "gravity": lessons(gravity, gravity)})
    play(curriculum, Judge(), 6, 6)
    assert curriculum.lessons == {"length": 1, "gravity": 0}
    assert [len(window) for window in curriculum.windows.values()] == [0, 0]
    play(curriculum, Judge(), 6, 6)
    assert curriculum.lessons == {"length": 1, "gravity": 0}
    play(curriculum, Judge(), 6)
    assert curriculum.lessons == {"length": 1, "gravity": 1}


def test_an_episode_is_measured_for_all_parameters_before_any_window_is_emptied():
    criteria = {"threshold": 5, "min_lesson_length": 2}
    curriculum = Curriculum({name: lessons(criteria) for name in ("length", "gravity")})
    play(curriculum, Judge(), 9, 9)
    assert curriculum.lessons == {"length": 1, "gravity": 1}


def test_a_curriculum_has_the_parameters_in_their_order_in_every_process():
    names = ["length", "gravity", "masspole", "masscart", "force_mag", "tau", "x_threshold", "theta_threshold_radians"]
    (curriculum,) = make_curriculum(EnvConfig("CartPole-v1", parameters={name: lessons(EASY) for name in names}))
    assert list(curriculum.parameters) == names  # a set would order them by its process


def test_episodes_of_earlier_lessons_do_not_count():
    curriculum = Curriculum({"length": lessons({"threshold": 5}, {"threshold": 5})})
    play(curriculum, Judge(), 100)
    assert curriculum.lessons == {"length": 1}
    curriculum.add_episode(Judge(), Finished(1000.0, None, {"length": 0}), 0.0)
    assert curriculum.lessons == {"length": 1}


def test_an_episode_that_reports_no_success_is_a_failure():
    criteria = {"measure": "success", "threshold": 0.4, "signal_smoothing": False, "min_lesson_length": 2}
    curriculum = Curriculum({"length": lessons(criteria)})
    for success in (None, 0.0, None):
        curriculum.add_episode(Judge(), Finished(0.0, success, {"length": 0}), 0.0)
    assert curriculum.lessons == {"length": 0}
    curriculum.add_episode(Judge(), Finished(0.0, 1.0, {"length": 0}), 0.0)
    assert curriculum.lessons == {"length": 1}  # one of the last two


@pytest.mark.parametrize("reported", [False, True])
def test_a_hundred_episodes_without_a_reported_success_print_one_warning(reported):
    curriculum, judge = Curriculum({"length": lessons({"measure": "success", "threshold": 0.5})}), Judge()
    if reported:
        curriculum.add_episode(judge, Finished(0.0, 0.0, {"length": 0}), 0.0)
    for _ in range(250):
        again = Curriculum({"length": lessons({"measure": "success", "threshold": 0.5})})
        again.load_state_dict(curriculum.state_dict())
        curriculum = again
        curriculum.add_episode(judge, Finished(0.0, None, {"length": 0}), 0.0)
    assert len(judge.said) == (0 if reported else 1)
    assert reported or "none of the first 100 episodes reported is_success" in judge.said[0]


def test_state_comes_back_whole_and_into_fewer_lessons():
    settings = {"length": lessons({"threshold": 5}, {"threshold": 90, "min_lesson_length": 4}, {"threshold": 99})}
    one, other = Curriculum(settings), Curriculum(settings)
    play(one, Judge(), 100, 8, 9)
    other.load_state_dict(one.state_dict())
    assert (
        other.state_dict()
        == one.state_dict()
        == {
            "lessons": {"length": 1},
            "smoothed": {"length": 75.0},
            "windows": {"length": [8, 9]},
            "unreported": 0,
        }
    )
    assert other.windows["length"].maxlen == 4
    shorter = Curriculum({"length": lessons({"threshold": 5})})
    shorter.load_state_dict({"lessons": {"length": 3}, "smoothed": {"length": 75.0}, "windows": {"length": []}})
    assert shorter.lessons == {"length": 1}


def test_a_curriculum_comes_with_lessons_only():
    assert make_curriculum(EnvConfig("CartPole-v1", parameters={"length": 0.3})) == []
    assert make_curriculum(lambda: gym.make("CartPole-v1")) == []
    (curriculum,) = make_curriculum(EnvConfig("CartPole-v1", parameters={"length": lessons({}), "gravity": 9.8}))
    assert list(curriculum.parameters) == ["length"]
    with pytest.raises(SettingError, match="Curriculum: no parameter has lessons"):
        Curriculum({"length": 0.3})


EASY = {"measure": "reward", "threshold": 1, "min_lesson_length": 2}
ENV = {"id": "CartPole-v1", "max_episode_steps": 10}
LEARNED = ENV | {"parameters": {"length": lessons(EASY, {"threshold": 1e6})}}
"""The second lesson is played after a few episodes, and to the end."""


@pytest.mark.thorough
def test_what_is_decided_by_the_return_in_the_current_lesson_stays_decided_in_the_last_one(tmp_path):
    env = EnvConfig("CartPole-v1", 2, parameters={"length": lessons(EASY, {"measure": "progress", "threshold": 0.5})}, max_episode_steps=10)
    model = PPO(env, net_arch=[8], max_env_steps=160, n_steps=8, batch_size=8)
    trainer = Trainer(
        default_root_dir=tmp_path,
        evaluation=EvaluationConfig(every_n_env_steps=32, episodes=2),
        checkpoint=CheckpointConfig(monitor="eval/mean_reward_lesson"),
        callbacks=[pl.callbacks.EarlyStopping("eval/mean_reward_lesson", mode="max", patience=2)],
    )
    trainer.fit(model)  # of five evaluations the first two are in lessons before the last
    best = torch.load(trainer.run_folder / "checkpoints" / "best.ckpt", weights_only=True)
    assert model.env_steps == 160 and best["lightning_rl"]["env_steps"] in (32, 64)


def test_a_run_without_lessons_has_no_return_in_the_current_one(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, checkpoint=CheckpointConfig(monitor="eval/mean_reward_lesson"))
    with pytest.raises(SettingError, match=r"^checkpoint\.monitor 'eval/mean_reward_lesson' is not a metric of evaluations"):
        trainer.fit(tiny(PPO))


def test_a_run_goes_from_lesson_to_lesson_and_shows_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lightning_rl.callbacks.progress.SECONDS_BETWEEN_LINES", 0.0)  # a line an iteration
    halfway = {"measure": "progress", "threshold": 0.5}
    env = EnvConfig("CartPole-v1", 2, parameters={"length": lessons(EASY, halfway), "gravity": 9.8}, max_episode_steps=10)
    model = PPO(env, net_arch=[8], max_env_steps=160, n_steps=8, batch_size=8, log_interval=16)
    trainer = Trainer(default_root_dir=tmp_path, evaluation=EvaluationConfig(every_n_env_steps=32, episodes=2))
    trainer.fit(model)
    said = capsys.readouterr().out
    rows = read_rows(trainer.run_folder / "metrics.csv")
    shown = [float(row["curriculum/length/lesson"]) for row in rows if row["curriculum/length/lesson"]]
    assert shown == sorted(shown) and set(shown) == {0.0, 1.0, 2.0}
    assert "curriculum: length goes to lesson 2 of 3, lesson 1 (0.75): reward" in said and "length 2/3" in said
    assert "lesson 3 of 3, final (2): progress 0.6 > 0.5 in lesson 1" in said
    told = [line for line in said.splitlines() if line.startswith("evaluation at")]
    shown_of = [re.search(r" ± [\d.]+ in the final lesson, [\d.]+ in the current one$", line) is not None for line in told]
    assert shown_of == [True, True, False, False, False]
    judged = [(int(row["env_steps"]), row["eval/mean_reward_lesson"] != "") for row in rows if row["eval/mean_reward"]]
    assert judged == [(32, True), (64, True), (96, False), (128, False), (160, False)]  # the final lesson alone once it is reached
    lengths = [float(row["parameters/length"]) for row in rows if row["parameters/length"]]
    assert lengths[0] == 0.5 and lengths == sorted(lengths)
    assert [float(row["parameters/gravity"]) for row in rows if row["parameters/gravity"]] == pytest.approx([9.8] * len(lengths))


def test_evaluations_play_the_final_lesson_and_the_current_one():
    (curriculum,) = make_curriculum(EnvConfig("CartPole-v1", parameters={"length": lessons(EASY, EASY)}))
    envs = [EnvParameters(gym.make("CartPole-v1"), curriculum.parameters) for _ in range(2)]
    curriculum.lessons = {"length": 1}
    with_lessons(curriculum, envs[1])
    assert [env.reset(seed=0)[1]["env_parameters"] for env in envs] == [{"length": 2.0}, {"length": 0.75}]


def test_criteria_of_the_last_lesson_are_ignored_with_a_warning(capsys):
    settings = {"curriculum": [*lessons(EASY)["curriculum"][:1], {"value": 1, "completion_criteria": {"threshold": 3}}]}
    fit(tiny(PPO, "CartPole-v1", env={"parameters": {"length": settings}}, max_env_steps=16))
    assert "env.parameters.length: completion_criteria of the last lesson have no effect and are ignored" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP"])
def test_a_lesson_that_requires_a_reset_abandons_the_current_episodes(vectorization, autoreset):
    criteria = {"measure": "progress", "threshold": 0.1, "require_reset": True}
    env = {"parameters": {"length": lessons(criteria)}, "vectorization": vectorization, "autoreset": autoreset, "max_episode_steps": 40}
    model = tiny(PPO, "CartPole-v1", env=env, gamma=0.9, max_env_steps=30)
    seen = []
    training_step = model.training_step

    def spy(rollout, batch_idx):
        seen.append((rollout.valid[:, :].clone(), rollout.episode_start.clone()))
        return training_step(rollout, batch_idx)

    model.training_step = spy
    fit(model)
    (first, _), (second, start) = seen[:2]
    assert first.all()
    assert not second[0].any() and second[1:].all() and start[1].all()  # a row that only begins the new episodes
    assert model.env_steps == 16 + 14


@pytest.mark.thorough
def test_parameters_of_a_function_are_wrapped_by_hand_and_those_without_are_refused():
    curriculum = Curriculum({"length": lessons(EASY)})
    fit(PPO(wrapped, n_steps=8, batch_size=8, max_env_steps=128), callbacks=[curriculum])
    assert curriculum.lessons == {"length": 1}
    with pytest.raises(SettingError, match="CartPoleEnv takes no lessons; build it from settings"):
        fit(PPO(lambda: gym.make("CartPole-v1"), max_env_steps=128), callbacks=[Curriculum({"length": lessons(EASY)})])
    with pytest.raises(SettingError, match=r"Curriculum: length is not in env.parameters; choose from gravity"):
        fit(tiny(PPO, "CartPole-v1", env={"parameters": {"gravity": 9}}), callbacks=[Curriculum({"length": lessons(EASY)})])


@pytest.mark.thorough
def test_a_callback_begins_another_run_with_the_first_lesson():
    curriculum = Curriculum({"length": lessons(EASY)})
    for watch in (Watch(), Watch()):
        fit(PPO(wrapped, n_steps=8, batch_size=8, max_env_steps=256), callbacks=[curriculum, watch])
        assert (watch.lessons[0], curriculum.lessons) == ({"length": 0}, {"length": 1})


@pytest.mark.thorough
def test_a_model_that_is_fitted_again_continues_with_its_lesson():
    model = tiny(PPO, "CartPole-v1", max_env_steps=64, env={"parameters": {"length": lessons(EASY)}})
    own = Curriculum({"length": lessons(EASY)})
    for lesson in (0, 1):
        watch = Watch()
        fit(model, callbacks=[own, watch])
        assert (watch.lessons[0], own.lessons) == ({"length": lesson}, {"length": 1})
        model.max_env_steps *= 2


def wrapped():
    return EnvParameters(gym.make("CartPole-v1", max_episode_steps=10), as_parameters({"length": 1.0}))


def test_behavioral_cloning_has_no_lessons():
    env = {"parameters": {"length": lessons(EASY)}}
    assert fit(tiny(BehavioralCloning, "CartPole-v1", env=env, max_updates=16)).global_step == 1
    with pytest.raises(SettingError, match="Curriculum: BehavioralCloning steps no environments"):
        fit(tiny(BehavioralCloning, "CartPole-v1", max_updates=16), callbacks=[Curriculum({"length": lessons(EASY)})])


@pytest.mark.thorough
def test_the_weights_of_another_run_begin_with_the_first_lesson(tmp_path):
    settings = {"env": ENV | {"parameters": {"length": lessons(EASY, {"threshold": 1e6})}}, "max_env_steps": 96}
    runs = [Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False) for _ in range(2)]
    runs[0].fit(tiny(PPO, **settings))
    held = [Watch(), Watch()]
    runs[1].callbacks.append(held[0])
    runs[1].fit(tiny(PPO, **settings), init_from=runs[0].run_folder)
    assert held[0].lessons[0] == {"length": 0}
    again = Trainer(default_root_dir=tmp_path, evaluation=None, enable_progress_bar=False, callbacks=[held[1]])
    again.fit(tiny(PPO, **settings | {"max_env_steps": 128}), ckpt_path=runs[0].run_folder / "checkpoints" / "last.ckpt")
    assert held[1].lessons[0] == {"length": 1}


@pytest.mark.thorough
def test_a_checkpoint_that_is_saved_after_a_run_keeps_the_lesson(tmp_path):
    fit(tiny(PPO, env=LEARNED)).save_checkpoint(tmp_path / "a.ckpt")
    watch = Watch()
    fit(tiny(PPO, env=LEARNED, max_env_steps=128), tmp_path / "a.ckpt", callbacks=[watch])
    assert watch.lessons[0] == {"length": 1}


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint")  # as this callback has it
def test_a_checkpoint_that_lightning_saves_at_an_exception_keeps_the_lesson(tmp_path):
    failing = pl.callbacks.LambdaCallback(on_train_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(tiny(PPO, env=LEARNED), callbacks=[failing, OnExceptionCheckpoint(tmp_path, "a")], enable_checkpointing=True)
    watch = Watch()
    fit(tiny(PPO, env=LEARNED, max_env_steps=128), tmp_path / "a.ckpt", callbacks=[watch])
    assert watch.lessons[0] == {"length": 1}


class Watch(pl.Callback):
    """The lessons of each iteration as it begins."""

    def __init__(self):
        self.lessons = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.lessons.append(dict(next(each for each in trainer.callbacks if isinstance(each, Curriculum)).lessons))


@pytest.mark.thorough
@pytest.mark.parametrize("compact", [False, True])
def test_no_memory_crosses_a_reset_that_a_lesson_required(compact):
    criteria = {"measure": "progress", "threshold": 0.1, "require_reset": True}
    settings = {"curriculum": [{"value": 30, "completion_criteria": criteria}] * 3 + [{"value": 30}]}
    model = tiny(SAC, env={"parameters": {"period": settings}}, n_steps=3, replay={"optimize_memory_usage": compact})
    batches, training_step = [], model.training_step

    def spy(experience, batch_idx):
        def watch():
            for batch in experience:
                batches.append(batch)
                yield batch

        return training_step(watch(), batch_idx)

    model.training_step = spy
    fit(model)
    obs, next_obs = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("obs", "next_obs"))
    episodes = obs[:, 0].unique()
    assert len(episodes) == 4 and (obs[:, 0] == next_obs[:, 0]).all() and (obs[:, 1] < next_obs[:, 1]).all()


TWO_RANKS = """
import pytorch_lightning as pl
from tests.callbacks.test_curriculum import lessons
from tests.fitting import fit, tiny
from lightning_rl import PPO

class Tell(pl.Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        curriculum = next(each for each in trainer.callbacks if type(each).__name__ == "Curriculum")
        own = model.collector.statistics.returns
        file.write(f"{curriculum.state_dict()}\\n")
        own_file.write(f"{list(own)}\\n")

if __name__ == "__main__":
    import os
    rank = os.environ.get("LOCAL_RANK", "0")
    file, own_file = open(f"shared{rank}", "w", buffering=1), open(f"own{rank}", "w", buffering=1)
    criteria = {"threshold": 12, "min_lesson_length": 3}
    env = {"parameters": {"length": lessons(criteria, criteria, criteria, criteria)}}
    model = tiny(PPO, "CartPole-v1", env=env, max_env_steps=384)
    fit(model, devices=2, strategy="ddp", callbacks=[Tell()])
"""


@pytest.mark.slow  # test_distributed.py asks it of a whole run
def test_two_ranks_always_hold_the_same_lesson(tmp_path):
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "two_ranks.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shared, own = ([(tmp_path / f"{name}{rank}").read_text().splitlines() for rank in (0, 1)] for name in ("shared", "own"))
    assert shared[0] == shared[1] and own[0] != own[1]
    assert "{'length': 0}" in shared[0][0] and "'lessons': {'length': 0}" not in shared[0][-1]
