"""The best evaluation of a run as a dataset."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import pytorch_lightning as pl
from gymnasium.spaces import Box, Discrete

from lightning_rl import PPO, MultiEvaluator, RecordDemonstrations, RolloutEvaluator, Trainer, load_demonstrations
from lightning_rl.data.players import make_player
from lightning_rl.envs.make import make_vector_env
from lightning_rl.errors import SettingError
from tests.command_line import TINY, run
from tests.fitting import fit, tiny


class Paid(gym.Env):
    """One step, which pays the next of some wages; observes how often it was paid."""

    observation_space, action_space = Box(-1, 100, (1,), np.float32), Discrete(2)
    wages: tuple[float, ...] = ()
    paid = 0

    def reset(self, *, seed=None, options=None):
        return np.float32([Paid.paid]), {}

    def step(self, action):
        Paid.paid += 1
        return np.float32([Paid.paid]), Paid.wages[Paid.paid - 1], True, False, {}


class Look(pl.Callback):
    """What the dataset holds after each evaluation: which observations, which returns."""

    def __init__(self, name):
        self.name, self.seen = name, []

    def on_evaluation_end(self, trainer, algorithm, metrics):
        loaded = load_demonstrations(self.name, algorithm.spaces)
        self.seen.append([(float(each.obs[0, 0]), float(each.reward.sum())) for each in loaded])


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def paying():
    """A run that evaluates after each iteration with two episodes, which pay these wages."""

    def paying(*wages, name="paid-v0", max_env_steps=None, ckpt_path=None, on_nan="raise", **settings):
        Paid.wages, Paid.paid = wages, 0
        length = max_env_steps or 8 * len(wages)
        model = PPO(make_vector_env(Ignored, 2), net_arch=[8], n_steps=8, batch_size=8, max_env_steps=length, on_nan=on_nan)
        look = Look(name)
        evaluator = RolloutEvaluator(every_n_env_steps=16, episodes=2, num_envs=1, env=Paid)
        trainer = fit(model, ckpt_path, callbacks=[evaluator, RecordDemonstrations(name, **settings), look])
        return trainer, look.seen

    return paying


class Ignored(Paid):
    """To learn in, with no wages."""

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, True, False, {}


@pytest.mark.thorough
def test_the_dataset_holds_the_episodes_of_the_best_evaluation(datasets, paying):
    _, seen = paying(1, 2, 5, 6, 3, 4, 6, 5, 7, 7)
    first, better, equal, best = [(0, 1), (1, 2)], [(2, 5), (3, 6)], [(6, 6), (7, 5)], [(8, 7), (9, 7)]
    assert seen == [first, better, better, equal, best]  # of equal ones the newest, as best.ckpt


@pytest.mark.thorough
def test_a_run_that_goes_on_after_nan_records_what_replaced_it(datasets, paying):
    assert paying(float("nan"), 2, on_nan="skip_update")[1] == [[(0, 0), (1, 2)]]


@pytest.mark.thorough
def test_a_run_that_continues_keeps_a_better_one_from_before(datasets, paying, tmp_path):
    trainer, _ = paying(1, 1, 5, 5)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    _, seen = paying(4, 4, 6, 6, max_env_steps=64, ckpt_path=tmp_path / "a.ckpt")
    assert seen == [[(2, 5), (3, 5)], [(2, 6), (3, 6)]]


@pytest.mark.thorough
def test_a_dataset_of_another_run_is_replaced_only_by_force(datasets, paying):
    paying(9, 9)
    with pytest.raises(SettingError, match="dataset 'paid-v0' already exists"):
        paying(1, 1)
    assert Paid.paid == 0
    assert paying(1, 1, force=True)[1] == [[(0, 1), (1, 1)]]


def test_episodes_are_those_of_the_seeds_in_order_and_evaluations_are_as_without(datasets):
    model = tiny(PPO, "CartPole-v1", max_env_steps=32)
    evaluator = RolloutEvaluator(every_n_env_steps=32, episodes=5, seed=50, num_envs=2, max_episode_steps=20)
    trainer = fit(model, callbacks=[MultiEvaluator([evaluator]), RecordDemonstrations("seeds/of-v0")])
    loaded = load_demonstrations("seeds/of-v0", model.spaces)
    with_it = evaluator.play(model)
    evaluator.wrappers.clear()
    without = evaluator.play(model)
    assert with_it == without and [each.seed for each in without] == [50, 51, 52, 53, 54]
    assert [(each.reward.sum(), len(each.reward)) for each in loaded] == [(each.return_, each.length) for each in without]
    env = gym.make("CartPole-v1")
    assert all((each.obs[0] == env.reset(seed=50 + i)[0]).all() for i, each in enumerate(loaded))
    cut = [each for each in loaded if len(each.reward) == 20]
    assert all(each.truncated[-1] for each in cut) and trainer.callback_metrics["eval/mean_ep_length"] == np.mean(
        [e.length for e in without]
    )


def test_wrappers_go_around_each_environment_the_last_one_outside():
    first, second = gym.wrappers.TimeAwareObservation, gym.wrappers.FlattenObservation
    player = make_player(lambda: gym.make("CartPole-v1"), 2, None, None, [first, second])
    assert [type(env) for env in player.envs] == [second] * 2 and [type(env.env) for env in player.envs] == [first] * 2
    player.close()


@pytest.mark.thorough
def test_lessons_before_the_last_are_not_recorded(datasets):
    lessons = [{"value": 0.0, "completion_criteria": {"measure": "progress", "threshold": 0.6}}, {"value": 10.0}]
    model = tiny(PPO, "Pendulum-v1", env={"parameters": {"g": {"curriculum": lessons}}})
    evaluator, looks = RolloutEvaluator(every_n_env_steps=16, episodes=3, max_episode_steps=4), []
    look = pl.Callback()
    look.on_evaluation_end = lambda trainer, model, metrics: looks.append(
        ("eval/mean_reward_lesson" in metrics, len(load_demonstrations("lessons-v0", model.spaces)))
    )
    fit(model, callbacks=[evaluator, RecordDemonstrations("lessons-v0"), look])
    assert looks[0] == (True, 3) and looks[-1] == (False, 3)


def test_a_run_without_evaluations_is_refused(datasets, tmp_path):
    with pytest.raises(SettingError, match="RecordDemonstrations records evaluations, and this run has none"):
        trainer = Trainer(default_root_dir=tmp_path, evaluation=None, callbacks=[RecordDemonstrations("none-v0")], accelerator="cpu")
        trainer.fit(tiny(PPO, "CartPole-v1"))


@pytest.mark.thorough
def test_a_failing_disk_does_not_end_the_run(datasets, paying, monkeypatch, capsys):
    def refuse(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("minari.dataset.minari_storage.MinariStorage.new", refuse)
    monkeypatch.setattr(Look, "on_evaluation_end", lambda *_: None)
    trainer, _ = paying(1, 1, 2, 2)
    assert trainer.lightning_module.env_steps == 32
    assert "dataset paid-v0 could not be written, the run goes on: No space left on device" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_command_line_records(datasets, folder, capfd):
    recording = "--trainer.callbacks+=lightning_rl.RecordDemonstrations --trainer.callbacks.dataset"
    status, _, err = run(f"fit --model.env.id CartPole-v1 {TINY} {recording} cli/mine-v0", capfd)
    assert (status, err) == (0, "")
    assert len(load_demonstrations("cli/mine-v0", tiny(PPO, "CartPole-v1").spaces)) == 2
    for name, message in {"cli/mine-v0": "already exists", "mine": "is not a valid name for Minari"}.items():
        status, _, err = run(f"fit --model.env.id CartPole-v1 {TINY} {recording} {name}", capfd)
        assert status == 2 and err.count("\n") == 1 and message in err


def test_of_a_loss_or_exploitability_the_least_is_the_best(datasets):
    recorder = RecordDemonstrations("aa/least-v0", monitor="eval/exploitability")
    recorder.best, found = -float("inf"), []
    for value in (1.0, 0.2, 1.5):
        before = recorder.best
        recorder.on_evaluation_end(None, None, {"eval/exploitability": value})
        found.append(recorder.best != before)
    assert found == [True, True, False]


@pytest.mark.thorough
def test_a_metric_that_evaluations_do_not_have_is_reported_with_the_nearest_name(datasets, paying):
    with pytest.raises(SettingError, match=r"RecordDemonstrations.monitor 'eval/mean_rewards' is not .* did you mean eval/mean_reward\?"):
        paying(1.0, 2.0, monitor="eval/mean_rewards")


@pytest.mark.parametrize("name", [None, 5])
def test_a_dataset_has_a_name(name):
    with pytest.raises(SettingError, match="is not a valid name for Minari"):
        RecordDemonstrations(name)
