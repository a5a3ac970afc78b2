"""Evaluations: the right episodes, the same each time, and without effect on learning."""

from __future__ import annotations

import random
import re
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Box, Dict, Discrete

import lightning_rl as lrl
from lightning_rl import PPO, BestModel, EnvConfig, MultiEvaluator, RolloutEvaluator, StopOnEvaluation
from lightning_rl.data.episodes import Episode, summarize
from lightning_rl.data.players import check_shapes, make_player
from lightning_rl.errors import SettingError
from lightning_rl.loggers import read_rows
from tests.environments import Endless, Reported, Scripted
from tests.fitting import Rows, fit, tiny, weights


class Episodes(pl.Callback):
    """Hears of evaluations."""

    def __init__(self):
        self.heard = []

    def on_evaluation_end(self, trainer, model, metrics):
        self.heard.append((model.env_steps, metrics))


def play(model, **settings):
    evaluator = RolloutEvaluator(**settings)
    try:
        return evaluator.play(model)
    finally:
        evaluator.teardown(None, model, "fit")


def test_each_environment_plays_its_own_share_however_short_its_episodes_are():
    periods = iter([2, 10])
    model = tiny(PPO)
    player = make_player(lambda: Scripted(period=next(periods), endings=("termination",)), 2, None)
    assert sorted(episode.length for episode in player.play(model.network, 2, 0, True)) == [2, 10]
    episodes = player.play(model.network, 5, 0, True)
    assert [(episode.seed, episode.length) for episode in episodes] == [(0, 2), (1, 10), (2, 2), (3, 10), (4, 2)]
    player.close()


def test_state_keys_stay_those_of_earlier_checkpoints():
    settings = "'episodes': 10, 'seed': 3, 'deterministic': True"
    assert RolloutEvaluator(episodes=10, seed=3).state_key == "RolloutEvaluator{'env': None, " + settings + "}"
    assert RolloutEvaluator(episodes=10, seed=3, env=Scripted).state_key == "RolloutEvaluator{'env': 'Scripted', " + settings + "}"
    several = MultiEvaluator([RolloutEvaluator(episodes=3, deterministic=False)])
    assert several.state_key == "MultiEvaluator{'env': None, 'episodes': 10, 'seed': 10000, 'deterministic': True}"


def test_ranks_share_the_episodes_of_an_evaluation():
    model = tiny(PPO, "CartPole-v1")
    evaluator, watched = (RolloutEvaluator(episodes=5, num_envs=2, max_episode_steps=20) for _ in range(2))
    shares = [evaluator.part(rank, 3).play(model) for rank in range(3)]
    assert [[episode.seed for episode in share] for share in shares] == [[10_000], [10_001, 10_002], [10_003, 10_004]]
    assert [episode for share in shares for episode in share] == evaluator.play(model)
    assert [evaluator.part(rank, 6) is None for rank in range(6)] == [True] + [False] * 5
    watched.wrappers.append(lambda env: env)  # it must see all of them
    assert [watched.part(rank, 2) for rank in range(2)] == [watched, None]
    several = [MultiEvaluator([evaluator, watched]).part(rank, 2).play(model) for rank in range(2)]
    assert [len(share) for share in several] == [2 + 5, 3]


def test_returns_lengths_and_successes_are_those_of_the_environment():
    model = tiny(PPO)
    with torch.no_grad():
        model.network.actor[-1].bias.copy_(torch.tensor([0.0, 0.0, 50.0]))  # always action 2: 0.2 a step
    env = EnvConfig("tests.environments:Scripted-v0", kwargs={"period": 3})
    episodes = play(model, env=env, episodes=3, num_envs=1, seed=7)
    # 10 · episode + t + action / 10 over t = 0, 1, 2; ends in termination, truncation, both
    assert episodes == [
        Episode(7, pytest.approx(3.6), 3, 1.0),
        Episode(8, pytest.approx(33.6), 3, 0.0),
        Episode(9, pytest.approx(63.6), 3, 1.0),
    ]


class Restless(Scripted):
    """Draws from the global generators, as an environment should not, and keeps the mode of a network."""

    def __init__(self, network):
        super().__init__()
        self.network, self.modes = network, set()

    def step(self, action):
        self.modes |= {module.training for module in self.network.modules()}
        random.random(), np.random.rand(), torch.rand(1)
        return super().step(action)


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_in_evaluation_mode_and_then_as_before(training):
    model = tiny(PPO, normalize_obs="running")
    env = Restless(model.network.train(training))
    play(model, env=lambda: env, episodes=2, num_envs=1)
    assert env.modes == {False} and {module.training for module in model.network.modules()} == {training}


def test_the_global_random_generators_keep_their_state():
    model = tiny(PPO)

    def draws():
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        yield
        yield random.random(), np.random.rand(), torch.rand(1).item()

    undisturbed, disturbed = draws(), draws()
    next(undisturbed)
    expected = next(undisturbed)
    next(disturbed)
    play(model, env=lambda: Restless(model.network), episodes=3, deterministic=False)
    assert next(disturbed) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("env_id", ["CartPole-v1", "tests.environments:ScriptedBox-v0"])
def test_learning_is_the_same_with_and_without_evaluation(env_id):
    settings = {"normalize_obs": "running", "normalize_reward": True}
    without, judged = tiny(PPO, env_id, **settings), tiny(PPO, env_id, **settings)
    fit(without)
    fit(judged, callbacks=[RolloutEvaluator(16, episodes=3, deterministic=False, max_episode_steps=20)])
    assert torch.equal(weights(without), weights(judged))
    first, second = (model.network.normalizer.state_dict() for model in (without, judged))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.thorough
def test_evaluations_are_reproducible_and_drawn_actions_differ_from_the_likeliest():
    model = tiny(PPO, "CartPole-v1")
    likeliest, drawn = ([play(model, episodes=6, num_envs=3, deterministic=kind) for _ in range(2)] for kind in (True, False))
    assert likeliest[0] == likeliest[1] and drawn[0] == drawn[1] and likeliest[0] != drawn[0]
    assert play(model, episodes=6, num_envs=3, seed=3) != likeliest[0]
    assert play(model, episodes=6, num_envs=5) == likeliest[0]  # how many act together does not matter


def test_an_environment_without_a_limit_is_cut_off_and_the_cut_counts_as_an_end():
    model = tiny(PPO, "CliffWalking-v1", env={"num_envs": 1}, n_steps=16)
    with torch.no_grad():
        model.network.actor[-1].bias.copy_(torch.tensor([50.0, 0.0, 0.0, 0.0]))  # upwards for ever
    assert play(model, episodes=2, max_episode_steps=30) == [Episode(10_000, -30.0, 30, None), Episode(10_001, -30.0, 30, None)]
    player = make_player(model.env, 1, None)
    assert player.max_episode_steps == 10_000
    player.close()


@pytest.mark.parametrize("settings, given, limit", [({}, None, 500), ({"max_episode_steps": 20}, None, 20), ({}, 7, 7)])
def test_episodes_end_at_the_limit_given_or_the_environments_own(settings, given, limit):
    player = make_player(EnvConfig("CartPole-v1", **settings), 1, given)
    assert player.max_episode_steps == limit
    player.close()


@pytest.mark.parametrize("every, at", [(16, [16, 32, 48, 64, 80, 96]), (40, [48, 80, 96]), (1_000, [96])])
def test_evaluations_come_every_so_many_steps_and_at_the_end(every, at):
    heard = Episodes()
    fit(tiny(PPO), callbacks=[RolloutEvaluator(every, episodes=1), heard])
    assert [env_steps for env_steps, _ in heard.heard] == at


def evaluated_at(max_env_steps, **settings):
    """Return where a run was evaluated whose environment has episodes of four steps, and how many steps evaluations played until then."""
    return evaluated_by(RolloutEvaluator(**settings), max_env_steps)


def evaluated_by(evaluator, max_env_steps):
    heard = Episodes()
    fit(tiny(PPO, env={"kwargs": {"period": 4}}, max_env_steps=max_env_steps), callbacks=[evaluator, heard])
    return [env_steps for env_steps, _ in heard.heard], evaluator.played


@pytest.mark.thorough
def test_without_an_interval_evaluations_play_at_most_a_tenth_of_the_runs_steps_and_are_spread_evenly():
    assert evaluated_at(1_600, episodes=5) == ([208, 400, 608, 800, 1_008, 1_200, 1_408, 1_600], 8 * 20)
    assert evaluated_at(1_600, episodes=10) == ([400, 800, 1_200, 1_600], 4 * 40)
    assert evaluated_at(1_600, episodes=10, max_share=0.05) == ([800, 1_600], 2 * 40)
    assert evaluated_at(1_600, episodes=100) == ([1_600], 400)  # the last weights are always evaluated


@pytest.mark.thorough
def test_without_an_interval_there_are_at_most_twenty_evaluations():
    assert evaluated_at(1_600, episodes=5, max_share=10.0) == (list(range(80, 1_601, 80)), 20 * 20)


@pytest.mark.parametrize("arguments", [{"max_steps": 4}, {"limit_train_batches": 4, "max_epochs": 1}])
def test_a_run_that_is_stopped_early_is_evaluated_at_its_end(arguments):
    heard = Episodes()
    fit(tiny(PPO), callbacks=[RolloutEvaluator(48, episodes=1), heard], **arguments)
    assert [env_steps for env_steps, _ in heard.heard] == [48, 64]


def test_callbacks_of_the_package_lightning_stay_and_follow_evaluations():
    heard = []
    hook = {"on_evaluation_end": lambda self, trainer, model, metrics: heard.append(model.env_steps)}
    foreign = type("Foreign", (), {**vars(pl.Callback), **hook})()  # a callback, but no subclass of pytorch_lightning's
    assert foreign in fit(tiny(PPO), callbacks=[RolloutEvaluator(48, episodes=1), foreign]).callbacks
    assert heard == [48, 96]


def test_a_run_stopped_by_an_evaluation_is_not_evaluated_twice():
    heard = Episodes()
    fit(tiny(PPO), callbacks=[RolloutEvaluator(32, episodes=1), StopOnEvaluation(stop_at=-1e9), heard])
    assert [env_steps for env_steps, _ in heard.heard] == [32]


@pytest.mark.thorough
def test_an_episode_that_reports_no_success_is_a_failure_once_any_of_the_run_has(tmp_path):
    heard, file = Episodes(), tmp_path / "evaluations.csv"
    env = EnvConfig("tests.environments:Scripted-v0", wrappers=["tests.environments.Reported"])
    model = tiny(PPO, env={"wrappers": ["tests.environments.Reported"]})
    heard.on_evaluation_end = lambda trainer, model, metrics: (
        Reported.seeds.symmetric_difference_update({6}),  # in every second evaluation
        heard.heard.append((model.env_steps, metrics)),
    )
    fit(model, callbacks=[RolloutEvaluator(16, episodes=4, num_envs=2, seed=5, env=env, file=file), heard])
    rates = [metrics.get("eval/success_rate") for _, metrics in heard.heard]
    assert rates[:3] == [None, 0.25, 0.0]  # nobody reported; one of four; none, after a report
    assert [row["success"] for row in read_rows(file)][:12] == [""] * 4 + ["0.0", "1.0", "0.0", "0.0"] + ["0.0"] * 4


@pytest.mark.parametrize(("kind", "decides"), [(lrl.Trainer, []), (pl.Trainer, [StopOnEvaluation(patience=1)])])
def test_two_evaluators_are_refused_where_their_evaluations_would_be_one_series(kind, decides, tmp_path):
    evaluators = [RolloutEvaluator(16, episodes=2), MultiEvaluator([RolloutEvaluator(16, deterministic=False)])]
    trainer = kind(default_root_dir=tmp_path, callbacks=[*evaluators, *decides], accelerator="cpu", max_epochs=-1)
    with pytest.raises(SettingError, match=r"^2 evaluators: .*; combine them, MultiEvaluator\(\[RolloutEvaluator\(…\), …\]\)$"):
        trainer.fit(tiny(PPO))
    assert not list(tmp_path.rglob("config.yaml"))


def test_where_successes_are_monitored_none_is_a_rate_of_0_from_the_beginning_and_one_line_says_so(tmp_path, capsys):
    heard = Episodes()
    evaluator, best = RolloutEvaluator(16, episodes=2), BestModel(tmp_path, "eval/success_rate")
    fit(tiny(PPO, "CartPole-v1", max_env_steps=48), enable_checkpointing=True, callbacks=[evaluator, best, heard])
    assert [metrics["eval/success_rate"] for _, metrics in heard.heard] == [0.0] * 3
    assert capsys.readouterr().out.count("no episode has reported is_success in its last info: eval/success_rate") == 1


@pytest.mark.thorough
def test_an_evaluator_that_is_used_again_forgets_that_another_environment_reported_success():
    heard, trainer = Episodes(), pl.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, max_epochs=-1)
    evaluator = RolloutEvaluator(96, episodes=2)
    trainer.callbacks += [evaluator, heard]
    for env_id in ("tests.environments:Scripted-v0", "CartPole-v1"):
        trainer.fit(tiny(PPO, env_id))
        trainer.should_stop = False
    assert ["eval/success_rate" in metrics for _, metrics in heard.heard] == [True, False]


def test_a_success_in_training_makes_evaluations_without_one_failures():
    heard = Episodes()
    quiet = EnvConfig("tests.environments:Scripted-v0", wrappers=["tests.environments.Reported"])
    fit(tiny(PPO), callbacks=[RolloutEvaluator(48, episodes=2, seed=5, env=quiet), heard])  # Scripted reports in training
    assert [metrics["eval/success_rate"] for _, metrics in heard.heard] == [0.0, 0.0]


def test_metrics_rows_and_the_file_agree(tmp_path):
    logger, heard, file = Rows(), Episodes(), tmp_path / "evaluations.csv"
    model = tiny(PPO, log_interval=1_000)
    trainer = fit(model, logger=logger, callbacks=[RolloutEvaluator(48, episodes=3, num_envs=1, seed=5, file=file), heard])
    rows = read_rows(file)
    assert [(row["env_steps"], row["seed"]) for row in rows] == [(str(n), str(seed)) for n in (48, 96) for seed in (5, 6, 7)]
    assert list(rows[0]) == ["env_steps", "seed", "return", "length", "success"]
    logged = {step: metrics for step, metrics in logger.rows if "eval/mean_reward" in metrics}
    for env_steps, metrics in heard.heard:
        own = [row for row in rows if int(row["env_steps"]) == env_steps]
        assert metrics["eval/mean_reward"] == pytest.approx(np.mean([float(row["return"]) for row in own]))
        assert metrics["eval/std_reward"] == pytest.approx(np.std([float(row["return"]) for row in own]))
        assert metrics["eval/mean_ep_length"] == 3 and metrics["eval/success_rate"] == pytest.approx(2 / 3)
        assert logged[env_steps] == {"env_steps": env_steps, **metrics}
    assert trainer.callback_metrics["eval/mean_reward"] == pytest.approx(heard.heard[-1][1]["eval/mean_reward"])


@pytest.mark.thorough
def test_several_evaluators_keep_to_the_share_of_all_their_episodes():
    one, two = RolloutEvaluator(episodes=10, max_share=0.05), RolloutEvaluator(episodes=10, deterministic=False)
    together = evaluated_by(MultiEvaluator([one, two]), 3_200)
    assert together == evaluated_at(3_200, episodes=20, max_share=0.05) == ([1_600, 3_200], 2 * 80)


@pytest.mark.thorough
def test_several_evaluators_are_evaluated_together():
    heard, model = Episodes(), tiny(PPO)
    closed = []

    class Closing(Scripted):
        def close(self):
            closed.append(self)

    short, long = (RolloutEvaluator(48, 2, env=lambda period=period: Closing(period, ("truncation",))) for period in (2, 10))
    fit(model, callbacks=[MultiEvaluator([short, long]), heard])
    assert [(env_steps, metrics["eval/mean_ep_length"]) for env_steps, metrics in heard.heard] == [(48, 6.0), (96, 6.0)]
    assert len(set(map(id, closed))) == 2 * 2 * 2  # evaluators, evaluations, environments of each
    with pytest.raises(SettingError, match="at least one"):
        MultiEvaluator([])


@pytest.mark.thorough
def test_a_ready_vector_environment_cannot_be_copied_but_another_may_be_given():

    def ready():
        return gym.vector.SyncVectorEnv([Endless] * 2, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

    def evaluate_by(evaluator):
        heard = Episodes()
        fit(PPO(ready(), n_steps=8, batch_size=16, max_env_steps=16), callbacks=[evaluator, heard])
        return heard.heard[0][1]["eval/mean_reward"]

    copies, builds = RolloutEvaluator(), RolloutEvaluator(episodes=2, env=Endless)
    for evaluator in (copies, MultiEvaluator([builds, copies])):
        with pytest.raises(SettingError, match="an evaluator with env="):
            evaluate_by(evaluator)
    assert evaluate_by(builds) == evaluate_by(MultiEvaluator([builds])) == 8


def test_environments_are_closed_after_an_exception():
    closed = []

    class Break(Scripted):
        def step(self, action):
            raise RuntimeError("in the middle")

        def close(self):
            closed.append(self)

    with pytest.raises(SettingError, match="environment 0 of Break raised RuntimeError: in the middle"):
        fit(tiny(PPO), callbacks=[RolloutEvaluator(16, episodes=2, env=Break)])
    assert len(closed) == 2


def test_what_environments_keep_over_their_resets_does_not_reach_the_next_evaluation():
    class Tired(Scripted):
        """Pays less in each episode of its life."""

        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, -float(self.episode), *rest

    heard = Episodes()
    fit(tiny(PPO), callbacks=[RolloutEvaluator(48, 4, num_envs=2, env=Tired), heard])
    first, second = (metrics["eval/mean_reward"] for _, metrics in heard.heard)
    assert first == second == -1.5  # three steps of an episode that is an environment's first or second


def test_statistics_of_returns_worked_by_hand():
    statistics = summarize([Episode(i, float(value), 2 * i, None) for i, value in enumerate([0, 1, 2, 3, 4, 5, 6, 100])])
    assert statistics["return_mean"] == 121 / 8 and statistics["return_median"] == 3.5
    assert statistics["iqm"] == (2 + 3 + 4 + 5) / 4 and (statistics["return_min"], statistics["return_max"]) == (0, 100)
    assert statistics["length_mean"] == 7 and 1 < statistics["ci_low"] < 121 / 8 < statistics["ci_high"] < 60


def test_one_episode_has_no_interval():
    statistics = summarize([Episode(0, 5.0, 7, None)])
    assert statistics["return_mean"] == statistics["iqm"] == 5 and statistics["ci_low"] is statistics["ci_high"] is None


@pytest.mark.thorough
def test_only_the_limit_of_our_own_is_hinted_at_and_also_in_a_later_evaluation(capsys):
    class Growing(Endless):
        """Ends its first episode at once."""

        episodes = 0

        def reset(self, **arguments):
            Growing.episodes += 1
            self.period = 1 if Growing.episodes == 1 else 20_000
            return super().reset(**arguments)

    settings = {"n_steps": 8, "batch_size": 8, "n_epochs": 1, "max_env_steps": 128, "net_arch": [8]}
    given = partial(Endless, period=20_000)
    fit(PPO(given, **settings), callbacks=[RolloutEvaluator(8, 1, max_episode_steps=10_000)])
    assert "hint: episodes of the evaluation" not in capsys.readouterr().out
    fit(PPO(given, **settings), callbacks=[RolloutEvaluator(8, 1, env=Growing)])
    assert capsys.readouterr().out.count("hint: episodes of the evaluation") == 1


@pytest.mark.thorough
def test_an_evaluation_that_had_to_end_episodes_says_so_once(capsys):
    model = PPO(partial(Endless, period=20_000), n_steps=8, batch_size=8, n_epochs=1, max_env_steps=16, net_arch=[8])
    fit(model, callbacks=[RolloutEvaluator(8, 1)])
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint")] == [
        "hint: episodes of the evaluation were truncated after 10,000 steps; evaluation.max_episode_steps ends them earlier, "
        "env.max_episode_steps also those of training"
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"seed": 2**64}, "evaluation.seed must be >= 0 and <= 4294967295, got 18446744073709551616"),
        ({"deterministic": "x"}, "evaluation.deterministic must be true or false, got 'x'"),
        ({"opponent": None}, "evaluation.opponent must be random, a run's folder, or a function or its path, got None"),
    ],
)
def test_wrong_settings_of_an_evaluation_are_reported_before_a_run_begins(settings, expected):
    with pytest.raises(SettingError, match=re.escape(expected)):
        RolloutEvaluator(**settings)


def test_observations_to_evaluate_with_may_have_another_type_and_other_bounds():
    env = SimpleNamespace(observation=Dict({"a": Box(0, 9, (2,), np.float16), "b": Discrete(3)}), action=Box(-1, 1, (2,)))
    ours = SimpleNamespace(observation=Dict({"b": Discrete(3), "a": Box(-1, 1, (2,))}), action=Box(-2, 2, (2,)))
    check_shapes(env, ours)
    with pytest.raises(SettingError, match=r"has the action space Box\(3\), and the algorithm's has Box\(2\)"):
        check_shapes(SimpleNamespace(observation=env.observation, action=Box(-1, 1, (3,))), ours)


def test_several_evaluators_are_evaluators():
    with pytest.raises(SettingError, match=r"takes a list of at least one evaluator, such as \[RolloutEvaluator\(\)\], got \[5\]"):
        MultiEvaluator([5])


def test_an_evaluation_environment_in_which_the_policy_cannot_act_is_reported():
    with pytest.raises(SettingError, match=r"evaluator has the observation space Box\(3\), and the algorithm's has Box\(4\)"):
        fit(tiny(PPO, "CartPole-v1"), callbacks=[RolloutEvaluator(env=EnvConfig("Pendulum-v1"))])


def test_a_model_that_was_loaded_without_its_environment_says_so(tmp_path):
    fit(PPO(lambda: gym.make("CartPole-v1"), n_steps=8, batch_size=8, max_env_steps=64)).save_checkpoint(tmp_path / "model.ckpt")
    loaded = PPO.load_from_checkpoint(tmp_path / "model.ckpt")
    with pytest.raises(SettingError, match="loaded without an environment; pass env= to train or evaluate it"):
        lrl.Trainer(logger=False, enable_progress_bar=False).validate(loaded)


class Licensed(Scripted):
    """May be open once at a time."""

    open = 0

    def __init__(self):
        super().__init__()
        type(self).open += 1
        if self.open > 1:
            raise RuntimeError("there is one license")

    def close(self):
        type(self).open -= 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_whose_environment_cannot_be_built_for_an_evaluation_is_saved_first_and_says_how_to_go_on(tmp_path):
    settings = {"n_steps": 32, "batch_size": 32, "max_env_steps": 96}
    gym.register("Licensed-v0", Licensed)
    trainer = lrl.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, evaluation=lrl.EvaluationConfig(every_n_env_steps=64))
    way_out = r"the environment Licensed-v0 cannot be built: there is one license .*; an evaluation builds 5 of its own; --evaluation null"
    with pytest.raises(SettingError, match=way_out):
        trainer.fit(PPO(EnvConfig("Licensed-v0", 1), **settings))
    Licensed.open = 0  # the run of a program would have ended
    last, again = trainer.run_folder / "checkpoints" / "last.ckpt", PPO(EnvConfig("Licensed-v0", 1), **settings)
    assert PPO.load_from_checkpoint(last).env_steps == 64
    lrl.Trainer(default_root_dir=tmp_path, enable_progress_bar=False, evaluation=None).fit(again, ckpt_path=last)
    assert (again.env_steps, again.updates) == (96, 12)
