"""Parameters and lessons where several agents are in an environment: with one policy, with several behaviors, and in self-play."""

from functools import partial

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl import A2C, DQN, POCA, PPO, SAC, Curriculum, EnvConfig, EvaluationConfig, SettingError, evaluate
from lightning_rl.callbacks.curriculum import need_increment
from lightning_rl.callbacks.self_play import SelfPlay
from lightning_rl.data.episodes import Finished
from lightning_rl.envs.lessons import CompletionCriteria
from lightning_rl.envs.make import make_env, probe_spaces
from lightning_rl.envs.stepping import make_agent_stepper, make_world
from lightning_rl.loggers import read_rows
from tests.agents import Sized, Together
from tests.callbacks.test_curriculum import Judge, lessons
from tests.fitting import fit

SMALL = {"net_arch": [8], "compile": False}
EARLY = {"measure": "reward", "threshold": 3.0, "min_lesson_length": 2, "signal_smoothing": False}


def sized(*criteria, name="Sized", **more):
    """Settings of Sized, whose size is 1 in its first lesson and 2 in the last one."""
    easy = [{"name": f"size {k + 1}", "value": 1.0 + k, "completion_criteria": each} for k, each in enumerate(criteria)]
    large = {"name": "large", "value": 1.0 + len(criteria)}
    return {"id": f"tests.agents.{name}", "num_envs": 2, "parameters": {"size": {"curriculum": [*easy, large]}}, **more}


def stepper_of(env):
    return make_agent_stepper(EnvConfig(**env), probe_spaces(EnvConfig(**env)), 0)


@pytest.mark.parametrize(("name", "shift"), [("Sized", 0.0), ("SizedTeller", 0.5), ("SizedByOptions", 0.0)])
def test_copies_receive_their_parameters_as_attributes_by_a_method_or_as_options_of_a_reset(name, shift):
    stepper = stepper_of({"id": f"tests.agents.{name}", "num_envs": 2, "parameters": {"size": 3.0}})
    obs, _ = stepper.reset(0)
    assert obs.tolist() == [[0, 3 + shift], [1, 3 + shift]] * 2
    assert stepper.step(np.zeros(4, int)).reward.tolist() == [3 + shift, 30 + 10 * shift] * 2


def test_each_copy_draws_its_own_numbers_for_each_episode_and_reports_them_for_each_agent():
    uniform = {"sampler_type": "uniform", "sampler_parameters": {"min_value": 1.0, "max_value": 2.0}}
    stepper = stepper_of({"id": "tests.agents.Sized", "num_envs": 2, "parameters": {"size": uniform}})
    first = stepper.reset(5)[0][:, 1]
    assert first[0] == first[1] != first[2] == first[3]
    steps = [stepper.step(np.zeros(4, int)) for _ in range(4)]
    drawn = steps[-1].info["env_parameters"]["size"]
    np.testing.assert_allclose(drawn, first, rtol=1e-6)
    assert steps[-1].info["env_lessons"]["size"].tolist() == [0, 0, 0, 0] and "env_parameters" not in steps[0].info
    assert not np.isin(steps[-1].obs[:, 1], first).any()


def test_who_leaves_early_reports_the_lesson_of_its_own_episode():
    stepper = stepper_of({"id": "tests.agents.Mortal", "num_envs": 1, "parameters": {"length": 4}})
    stepper.set_lessons({"length": {"values": [3.0], "replay": 0.0, "first": 1}})
    stepper.reset(0)
    stepper.set_lessons({"length": {"values": [2.0], "replay": 0.0, "first": 2}})
    steps = [stepper.step(np.zeros(2, int)) for _ in range(5)]
    ends = [(step.ended.tolist(), step.info["env_lessons"]["length"][step.ended].tolist()) for step in steps if len(step.ended)]
    assert ends == [([1], [1]), ([0], [1]), ([0, 1], [2, 2])]  # b dies in the second step; then an episode of two steps


def test_a_parameter_of_an_environment_of_pettingzoo_is_found_behind_its_wrappers():
    env = make_env(EnvConfig("mpe2.simple_spread_v3", parameters={"max_cycles": 3, "world.damping": 0.5}))
    env.reset(seed=0)
    core = env.unwrapped.core
    assert (type(core).__name__, core.max_cycles, core.world.damping) == ("raw_env", 3, 0.5)
    with pytest.raises(SettingError, match=r"env.parameters.max_cycle is not a parameter of raw_env; did you mean max_cycles\?"):
        make_env(EnvConfig("mpe2.simple_spread_v3", parameters={"max_cycle": 3}))


@pytest.mark.parametrize("env_id", ["vmas.balance", "lightning_rl.envs.games.tic_tac_toe", "lightning_rl.envs.games.rock_paper_scissors"])
def test_environments_that_step_many_copies_at_once_have_no_parameters(env_id):
    with pytest.raises(SettingError, match=f"env.parameters: {env_id} has none that a reset can set; leave them out"):
        EnvConfig(env_id, parameters={"size": 1.0})


@pytest.mark.thorough
def test_lessons_need_parameters_in_the_settings():
    together = {"all": lrl.Behavior("*", partial(PPO, n_steps=6, batch_size=12, **SMALL))}
    for model in (lrl.MultiAgent(Together, together, 96), PPO(Together, n_steps=6, batch_size=12, max_env_steps=96)):
        with pytest.raises(SettingError, match=r"Together takes no lessons; build it from settings with env\.parameters"):
            fit(model, callbacks=[Curriculum({"size": lessons(EARLY)})])


@pytest.mark.thorough
def test_a_policy_of_all_agents_goes_to_the_next_lesson_by_the_episodes_of_each_agent(tmp_path, capsys):
    model = PPO(sized(EARLY | {"min_lesson_length": 4}), n_steps=4, batch_size=16, max_env_steps=64, log_interval=16, **SMALL)
    trainer = lrl.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, evaluation=EvaluationConfig(32, episodes=2))
    trainer.fit(model)
    said = capsys.readouterr().out
    # a gets 4, b 40, in each of two copies
    assert "curriculum: size goes to lesson 2 of 2, large (2): reward 22 > 3 in size 1, 4 of 4 episodes, at 16 environment steps" in said
    rows = read_rows(trainer.run_folder / "metrics.csv")
    assert [row["curriculum/size/lesson"] for row in rows if row["curriculum/size/lesson"]][-1] == "1.0"
    # the second episodes had begun already, of the first lesson
    assert [float(row["rollout/ep_rew_mean"]) for row in rows if row["rollout/ep_rew_mean"]] == pytest.approx([22, 22, 88 / 3, 33])
    assert [float(row["eval/mean_reward"]) for row in rows if row["eval/mean_reward"]] == [44, 44]
    assert evaluate(trainer.run_folder / "checkpoints" / "last.ckpt", episodes=1)["return_mean"] == 44


@pytest.mark.thorough
def test_an_evaluation_before_the_final_lesson_plays_both(tmp_path):
    model = PPO(sized(EARLY | {"threshold": 1e6}), n_steps=4, batch_size=16, max_env_steps=32, **SMALL)
    trainer = lrl.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, evaluation=EvaluationConfig(32, episodes=2))
    trainer.fit(model)
    assert float(trainer.callback_metrics["eval/mean_reward"]) == 44
    assert float(trainer.callback_metrics["eval/mean_reward_lesson"]) == 22


def behaviors(env=Sized, a=None, b=None, max_env_steps=96, **settings):
    learner = partial(PPO, n_steps=6, batch_size=12, n_epochs=1, **SMALL)
    both = {"a": lrl.Behavior("a", a or learner), "b": lrl.Behavior("b", b or partial(learner, n_steps=5, batch_size=10))}
    return lrl.MultiAgent(settings or {"id": f"tests.agents.{env.__name__}", "num_envs": 2}, both, max_env_steps)


@pytest.mark.thorough
@pytest.mark.parametrize(("judge", "line"), [("a", None), ("b", "reward 40 > 20 in size 1, 2 of 2 episodes, at 10 environment steps")])
def test_the_behavior_named_by_the_criteria_decides_about_a_lesson(judge, line, capsys):
    model = behaviors(**sized(EARLY | {"behavior": judge, "threshold": 20}))
    fit(model)  # a gets 4 in an episode, b 40
    (curriculum,) = model.curriculum
    assert curriculum.lessons == {"size": int(judge == "b")}
    assert (line or "") in capsys.readouterr().out


@pytest.mark.thorough
def test_an_episode_of_a_behavior_counts_once_though_another_one_ends_its_iterations_meanwhile():
    never = EARLY | {"behavior": "a", "threshold": 1e6, "min_lesson_length": 100}
    model = behaviors(a=partial(A2C, n_steps=12, **SMALL), b=partial(A2C, n_steps=2, **SMALL), **sized(never))
    fit(model)
    assert len(model.curriculum[0].windows["size"]) == model.algorithms["a"].episodes == 24


@pytest.mark.thorough
def test_a_single_behavior_that_learns_needs_no_name():
    learner = partial(PPO, n_steps=6, batch_size=24, **SMALL)
    model = lrl.MultiAgent(sized(EARLY), {"all": lrl.Behavior("*", learner)}, 96)
    fit(model)
    assert model.curriculum[0].lessons == {"size": 1}


@pytest.mark.thorough
def test_progress_is_that_of_the_run_whichever_behavior_is_named():
    model = behaviors(**sized({"measure": "progress", "threshold": 0.5}, {"measure": "progress", "threshold": 0.8, "behavior": "b"}))
    fit(model)
    assert model.curriculum[0].lessons == {"size": 2}


PLACE = "env.parameters.size.curriculum[0].completion_criteria"


@pytest.mark.parametrize(
    ("criteria", "line"),
    [
        ({"behavior": "good_"}, f"{PLACE}.behavior 'good_' is not a learning behavior; did you mean good?"),
        ({}, f"{PLACE}.behavior is missing: several behaviors learn; name one of bad, good"),
        ({"measure": "elo", "behavior": "good"}, f"{PLACE}.measure elo needs self_play of good; use reward, progress or success"),
    ],
)
def test_criteria_that_no_behavior_can_meet_are_one_line(criteria, line):
    learner = partial(PPO, n_steps=6, batch_size=12, **SMALL)
    model = lrl.MultiAgent(sized(criteria), {"good": lrl.Behavior("a", learner), "bad": lrl.Behavior("b", learner)}, 96)
    with pytest.raises(SettingError) as error:
        fit(model)
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("criteria", "line"),
    [
        ({"behavior": "good"}, f"{PLACE}.behavior 'good': this run has one policy, without a name; remove it"),
        ({"measure": "elo"}, f"{PLACE}.measure elo needs self_play of the algorithm; use reward, progress or success"),
    ],
)
def test_criteria_that_a_run_with_one_policy_cannot_meet_are_one_line(criteria, line):
    with pytest.raises(SettingError) as error:
        fit(PPO(sized(criteria), n_steps=6, batch_size=24, max_env_steps=96, **SMALL))
    assert str(error.value) == line


def test_a_rating_is_compared_as_it_is_after_the_episodes_of_a_lesson():
    criteria = CompletionCriteria("Elo", 1210, min_lesson_length=2)
    assert need_increment(criteria, 0.5, [1.0], 0.0, 1300.0) == (False, 0.0)
    assert need_increment(criteria, 0.5, [1.0, 1.0], 0.0, 1210.0) == (False, 0.0)
    assert need_increment(criteria, 0.5, [1.0, 1.0], 0.0, 1210.5) == (True, 0.0)
    assert need_increment(criteria, 0.5, [1.0, 1.0], 0.0) == (False, 0.0)  # no game has been rated


@pytest.mark.thorough
def test_a_lesson_ends_at_a_rating_in_self_play(capsys):
    env = sized({"measure": "Elo", "threshold": 1200.0, "min_lesson_length": 1}, num_envs=1)
    past = {"save_steps": 1000, "opponents": ["random"], "play_against_latest_model_ratio": 0.0}
    model = PPO(env, n_steps=4, batch_size=4, max_env_steps=12, self_play=past, **SMALL)
    seen = []

    class Lessons(pl.Callback):
        def on_train_batch_end(self, trainer, run, *others):
            seen.append((round(run.past_selves[0].elo, 2), run.curriculum[0].lessons["size"]))

    fit(model, callbacks=[Lessons()])
    # b always gets more than a: lost in the seat of a, then won in that of b: 1199.5 + 1 - 1 / (1 + 10^(0.5 / 400)) = 1200.0007
    assert seen[:2] == [(1199.5, 0), (1200.0, 1)]
    assert "size goes to lesson 2 of 2, large (2): elo 1200 > 1200 in size 1, 1 of 1 episodes, at 8 environment" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_lesson_ends_at_the_rating_of_a_behavior_that_takes_turns(capsys):
    past = {"save_steps": 1000, "team_change": 24, "play_against_latest_model_ratio": 0.0}
    learner = partial(PPO, n_steps=6, batch_size=12, self_play=past, **SMALL)
    criteria = {"measure": "elo", "behavior": "b", "threshold": 1200.0, "min_lesson_length": 1}
    model = behaviors(a=learner, b=learner, **sized(criteria))
    fit(model)  # b always gets more than a, so the rating of a falls in its turn and that of b rises in its own
    elos = {each.behavior: each.elo for each in model.learning_callbacks() if isinstance(each, SelfPlay)}
    assert elos["a"] < 1200 < elos["b"] and model.curriculum[0].lessons == {"size": 1}
    assert "size goes to lesson 2 of 2, large (2): elo 1201 > 1200 in size 1" in capsys.readouterr().out


def test_a_curriculum_measures_only_the_behavior_of_its_criteria():
    curriculum = Curriculum({"length": lessons({"threshold": 5, "behavior": "good"})})
    curriculum.add_episode(Judge(), Finished(100.0, None, {"length": 0}), 0.0, "bad")
    assert curriculum.lessons == {"length": 0}
    curriculum.add_episode(Judge(), Finished(100.0, None, {"length": 0}), 0.0, "good")
    assert curriculum.lessons == {"length": 1}


OFF = {"learning_starts": 8, "train_freq": 4, "steps_per_iteration": 8, "batch_size": 8, "buffer_size": 200, **SMALL}
LEARNERS = {
    "A2C": partial(A2C, n_steps=7, **SMALL),
    "SAC": partial(SAC, **OFF),
    "DQN": partial(DQN, n_steps=2, **OFF),
    "POCA": partial(POCA, n_steps=6, batch_size=6, **SMALL),
    "LSTM": partial(PPO, n_steps=6, batch_size=12, memory=lrl.LSTM(4, 3), **SMALL),
}


@pytest.mark.thorough
@pytest.mark.parametrize("learner", LEARNERS)
def test_a_lesson_that_requires_a_reset_truncates_all_episodes_of_a_world(learner):
    at_once = {"measure": "progress", "threshold": 0.09, "require_reset": True}  # the first iteration ends after 5 or 6 steps of 4
    model = behaviors(a=LEARNERS[learner], **sized(at_once))
    lengths = []

    class Lengths(pl.Callback):
        def on_train_batch_end(self, trainer, run, *others):
            lengths.extend(run.collector.collectors["b"].statistics.lengths)

    fit(model, callbacks=[Lengths()])
    assert model.curriculum[0].lessons == {"size": 1}
    assert sorted({*lengths}) == [2, 4]  # one step of the second episode, and the one in which it is cut
    assert model.finished and all(torch.isfinite(weight).all() for weight in model.state_dict().values())


def step_all(world):
    world.step_all({"all": np.zeros(4, int)})
    return world.sides["all"].pop_step()


def test_a_world_that_is_cut_truncates_everyone_and_begins_new_episodes():
    spaces = probe_spaces(EnvConfig("tests.agents.Together"))
    world = make_world(EnvConfig("tests.agents.Together", 2), {"all": spaces}, 0)
    world.reset(0)
    step_all(world)
    world.cuts_all = True
    step = step_all(world)
    assert step.truncated.all() and not step.terminated.any() and step.valid.all() and step.episode_start.all()
    assert step.final_obs[:, 1].tolist() == [2] * 4 and step.obs[:, 1].tolist() == [0] * 4
    assert not step_all(world).truncated.any()
