"""Runs go on after a save that failed, with other settings, from elsewhere: nothing is lost on the way."""

from __future__ import annotations

from functools import partial

import gymnasium as gym
import pytest
import pytorch_lightning as pl
import torch

import lightning_rl as lrl
from lightning_rl.callbacks.checkpoints import BestModel
from lightning_rl.checkpoints import files
from lightning_rl.checkpoints.files import SaveError
from lightning_rl.cli.main import main
from lightning_rl.data.collector import Collector
from lightning_rl.training.state import RunLog
from tests.agents import Duel, Together
from tests.callbacks.evaluations import Scores
from tests.environments import Scripted
from tests.fitting import tiny, weights

TIC_TAC_TOE = "lightning_rl.envs.games.tic_tac_toe"
SMALL = partial(lrl.PPO, n_steps=5, batch_size=10, n_epochs=1, net_arch=[8])


def trainer(folder, name="a", **settings):
    given = {"evaluation": None, "enable_progress_bar": False, "logger": False} | settings
    return lrl.Trainer(default_root_dir=folder, run_name=name, **given)


@pytest.mark.thorough
def test_weights_that_could_not_be_saved_as_the_best_are_not_taken_for_it(tmp_path, monkeypatch):
    run, stage = trainer(tmp_path, callbacks=[Scores([50, 100, 90, 95])]), files.stage
    best = next(each for each in run.callbacks if isinstance(each, BestModel))

    def full_once(path, write):
        if best.best == 100:
            raise SaveError(f"{path} could not be saved (No space left on device); what was saved before is unchanged")
        return stage(path, write)

    monkeypatch.setattr(files, "stage", full_once)
    run.fit(tiny(lrl.PPO, max_env_steps=64))
    assert best.best == 95  # 100 was lost; 90 and 95 are better than 50
    assert torch.load(best.path, weights_only=True)["lightning_rl"]["env_steps"] == 64


@pytest.mark.thorough
def test_a_run_that_cannot_be_resumed_with_other_settings_can_be_resumed_with_its_own(tmp_path):
    def go(steps, **self_play):
        past = {"save_steps": 10, **self_play}
        model = SMALL(TIC_TAC_TOE, max_env_steps=steps, self_play=past)
        trainer(tmp_path).fit(model, ckpt_path="last" if self_play or steps > 80 else None)
        return model

    go(80)
    config = next(tmp_path.rglob("config.yaml"))
    before = config.read_bytes()
    with pytest.raises(lrl.SettingError, match=r"self_play.opponents"):
        go(160, opponents=["random"])
    assert config.read_bytes() == before
    assert go(160).env_steps == 160 and config.read_bytes() != before


@pytest.mark.thorough
def test_a_renamed_copy_is_kept_and_does_not_interfere(tmp_path):
    checkpoints = tmp_path / "PPO/CartPole-v1/a/checkpoints"

    def go(steps, ckpt_path=None):
        model = lrl.PPO("CartPole-v1", max_env_steps=steps, n_steps=8, batch_size=64, net_arch=[8])
        trainer(tmp_path, checkpoint={"every_n_env_steps": 64, "keep": 2}).fit(model, ckpt_path=ckpt_path)

    go(128)
    (checkpoints / "env_steps=64.ckpt").rename(checkpoints / "env_steps=64 good.ckpt")
    go(256, "last")
    names = {path.stem.partition("=")[2] for path in checkpoints.glob("env_steps=*.ckpt")}
    assert names == {"64 good", "192", "256"}


@pytest.mark.thorough
def test_the_tables_of_a_run_are_kept_however_the_path_of_its_checkpoint_is_spelled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    last = tmp_path / "runs/PPO/CartPole-v1/a/checkpoints/last.ckpt"
    for steps, ckpt_path in ((64, None), (128, "runs/PPO/CartPole-v1/a/checkpoints/last.ckpt"), (192, str(last))):
        model = lrl.PPO("CartPole-v1", max_env_steps=steps, n_steps=8, batch_size=64, net_arch=[8])
        evaluation = {"every_n_env_steps": 64, "episodes": 1, "max_episode_steps": 5}
        trainer("runs", evaluation=evaluation).fit(model, ckpt_path=ckpt_path, force=ckpt_path is not None)
    rows = (last.parents[1] / "evaluations.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == ["64", "128", "192"]


def test_the_speed_of_the_first_row_after_a_stop_is_that_of_its_own_steps(monkeypatch):
    clock, rows = [100.0], []
    monkeypatch.setattr("lightning_rl.training.state.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("lightning_rl.training.state.log_row", lambda trainer, row, step, say: rows.append(row))
    log = RunLog(10, 0)
    clock[0] = 104.0  # four seconds after a row
    state = log.get_state()
    clock[0] = 1_000.0
    again = RunLog(10, 0)
    again.set_state(state)
    clock[0] = 1_001.0
    run = pl.LightningModule()
    run.count = 50
    run.counter, run.say = "env_steps", print
    trainer = type("T", (), {"global_step": 1, "callback_metrics": {}})()
    again.open(trainer, run, {})
    again.close(trainer, run, {})
    assert rows[0]["time/fps"] == 50 / 5 and rows[0]["time/time_elapsed"] == 5


class Faulty(Duel):
    """Pays what is no number once."""

    steps = 0

    def step(self, actions):
        obs, reward, *others = super().step(actions)
        Faulty.steps += 1
        return obs, dict.fromkeys(reward, float("nan")) if Faulty.steps == 40 else reward, *others


@pytest.mark.thorough
def test_a_reward_that_is_no_number_leaves_the_ratings_numbers(tmp_path):
    model = lrl.PPO(
        lambda: Faulty(), max_env_steps=400, n_steps=16, batch_size=32, net_arch=[8], on_nan="skip_update", self_play={"save_steps": 100}
    )
    trainer(tmp_path).fit(model)
    assert Faulty.steps > 40 and torch.tensor(model.past_selves[0].elo).isfinite()


def self_play(folder, window, steps, ckpt_path="last", name="a", **evaluation):
    settings = {"save_steps": 100, "window": window, "play_against_latest_model_ratio": 0.0}
    model = lrl.PPO({"id": TIC_TAC_TOE, "num_envs": 4}, max_env_steps=steps, n_steps=16, batch_size=64, net_arch=[8], self_play=settings)
    trainer(folder, name, evaluation=evaluation or None).fit(model, ckpt_path=ckpt_path)
    return model.past_selves[0]


@pytest.mark.thorough
def test_self_play_goes_on_with_a_larger_window(tmp_path):
    self_play(tmp_path, 2, 700)
    assert len(self_play(tmp_path, 4, 1_500).snapshots.numbers) == 4


@pytest.mark.thorough
def test_self_play_from_the_best_weights_rates_the_snapshots_that_it_takes_itself(tmp_path):
    pl.seed_everything(1, verbose=False)  # with others the first of two evaluations may be the best
    self_play(tmp_path, 3, 1_200, every_n_env_steps=600, episodes=2)
    best = next(tmp_path.rglob("best.ckpt"))
    later = self_play(tmp_path, 3, 1_264, best, "b", every_n_env_steps=600, episodes=2)
    assert later.snapshots.taken <= 2 and all(other < later.snapshots.taken for _, other in later.results[""].places)


@pytest.mark.thorough
def test_a_frozen_behavior_stays_frozen_however_often_it_is_loaded(tmp_path):
    env, folder = {"id": "tests.agents.Mortal", "num_envs": 2}, tmp_path / "MultiAgent/tests.agents.Mortal"
    trainer(tmp_path, "one").fit(lrl.MultiAgent(env, {name: lrl.Behavior(name, SMALL) for name in "ab"}, 40))
    frozen = lrl.FrozenPolicy(folder / "one/checkpoints/last.ckpt", "b")
    trainer(tmp_path, "two").fit(lrl.MultiAgent(env, {"a": lrl.Behavior("a", SMALL), "b": lrl.Behavior("b", frozen)}, 40))
    for before, name in (("two", "three"), ("three", "four")):
        model = lrl.MultiAgent.load_from_checkpoint(folder / before / "checkpoints/last.ckpt")
        weights = {key: value.clone() for key, value in model.algorithms["b"].state_dict().items()}
        model.max_env_steps += 40
        trainer(tmp_path, name).fit(model)
        assert model.frozen == ["b"]
        assert all(torch.equal(value, weights[key]) for key, value in model.algorithms["b"].state_dict().items())


class Turns(pl.Callback):
    """Whose turn it is when a run begins and when it ends; it stops in blue's turn, or after some iterations."""

    def __init__(self, iterations=None):
        self.iterations, self.seen = iterations, 0

    def on_train_batch_start(self, trainer, model, *_):
        if not self.seen:
            self.first = model.dataset.turns.learner
        self.seen += 1

    def on_train_batch_end(self, trainer, model, *_):
        self.last = model.dataset.turns.learner
        trainer.should_stop = self.seen == self.iterations if self.iterations else self.last == "blue"


@pytest.mark.thorough
def test_other_environments_begin_in_the_same_turn(tmp_path):
    learner = partial(SMALL, self_play={"window": 2, "save_steps": 1_000, "team_change": 100})

    def go(num_envs, iterations=None):
        turns = Turns(iterations)
        behaviors = {name: lrl.Behavior(f"{name}_*", learner) for name in ("red", "blue")}
        model = lrl.MultiAgent({"id": "tests.agents.MortalSquads", "num_envs": num_envs}, behaviors, 100_000)
        trainer(tmp_path, callbacks=[turns]).fit(model, ckpt_path="last")
        return turns

    assert go(2).last == "blue"
    assert go(4, 1).last == "blue"


def test_two_evaluators_may_differ_in_the_opponent_alone():
    one, two = lrl.RolloutEvaluator(episodes=4), lrl.RolloutEvaluator(episodes=4, opponent="lightning_rl.envs.games.players.minimax")
    assert one.state_key != two.state_key and "opponent" not in one.state_key  # which older checkpoints name like this


@pytest.mark.thorough
@pytest.mark.parametrize("envs", [4, 2])
def test_behaviors_that_replay_are_fitted_again_after_a_checkpoint_and_with_other_environments(tmp_path, envs):
    def model(num_envs, steps):
        behaviors = {
            "a": lrl.Behavior("a", SMALL),
            "b": lrl.Behavior("b", partial(lrl.DQN, learning_starts=10, batch_size=8)),
        }
        return lrl.MultiAgent({"id": "tests.agents.Mortal", "num_envs": num_envs}, behaviors, steps)

    trainer(tmp_path, "one").fit(model(2, 60))
    going_on = model(envs, 120)
    trainer(tmp_path, "two").fit(going_on, ckpt_path=tmp_path / "MultiAgent/tests.agents.Mortal/one/checkpoints/last.ckpt")
    going_on.max_env_steps = 180
    trainer(tmp_path, "three").fit(going_on)
    assert going_on.count >= 180


class Failure(pl.Callback):
    """Lets something fail after two iterations, and remembers the weights before it: a step of an environment, or a hook."""

    def __init__(self, monkeypatch, what="env"):
        self.what, self.calls_left, self.monkeypatch = what, None, monkeypatch
        for cls in (Scripted, Together):
            monkeypatch.setattr(cls, "step", self.failing(cls.step))

    def failing(self, step):
        def failing(env, action):
            if self.calls_left is not None:
                self.calls_left -= 1
                if self.calls_left < 0:
                    raise ValueError("simulator lost its connection")
            return step(env, action)

        return failing

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx == 1 and self.what == "env":
            self.calls_left = 9
        if batch_idx == 1:
            self.weights = torch.cat([each.detach().flatten() for each in model.parameters()])
        if batch_idx == 2 and self.what == "callback":
            raise ValueError("a mistake of a callback")

    def on_before_optimizer_step(self, trainer, model, optimizer):
        if self.what == "gradient step" and model.updates == 9:
            raise ValueError("a mistake of a callback")


def stopped_by_an_error(folder, model, failure, **settings):
    """The folder of a run that ended in an error, which nothing hides."""
    run = trainer(folder, callbacks=[failure], **settings)
    with pytest.raises((ValueError, lrl.SettingError), match=r"simulator lost its connection|a mistake of a callback"):
        run.fit(model)
    return run.run_folder


IN_TURN = {"num_actors": 1, "backend": "in_process"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("algorithm", "own", "steps", "updates"),
    [  # 2 iterations of 16 steps, and 4 steps of 2 environments; but actors and generations count when they are whole
        *((algorithm, {}, 40, 2 * 4) for algorithm in (lrl.PPO, lrl.PQN)),
        *((algorithm, {}, 40, 2) for algorithm in (lrl.A2C, lrl.IMPALA)),
        *((algorithm, {}, 40, (40 - 16) // 4) for algorithm in (lrl.SAC, lrl.DQN, lrl.TD3)),
        (lrl.IMPALA, {"actors": IN_TURN}, 32, 2),
        (lrl.SAC, {"threaded": True}, None, None),
        (lrl.EvolutionStrategies, {}, 32, 2),
    ],
)
def test_what_was_learned_before_an_error_of_an_environment_is_saved_and_goes_on_with_new_episodes(
    tmp_path, capsys, monkeypatch, algorithm, own, steps, updates
):
    failure, model = Failure(monkeypatch), tiny(algorithm, **own)
    run = stopped_by_an_error(tmp_path, model, failure)
    assert "continue it: " in capsys.readouterr().out
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]
    assert (saved["env_steps"], saved["updates"]) == (steps, updates) or (own == {"threaded": True} and saved["env_steps"] in (32, 48))
    if algorithm not in (lrl.SAC, lrl.DQN, lrl.TD3):
        assert torch.equal(torch.cat([each.detach().flatten() for each in model.parameters()]), failure.weights)
    failure.calls_left, going_on = None, tiny(algorithm, seed=1, **own)
    trainer(tmp_path).fit(going_on, ckpt_path="last")
    out = capsys.readouterr().out
    assert going_on.env_steps >= 96 and going_on.updates > saved["updates"]
    starts_again = "environments start new episodes: an error ended the run in the middle of an iteration" in out
    assert starts_again != (algorithm is lrl.EvolutionStrategies) and "no replay buffer" not in out


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [lrl.PPO, lrl.SAC])
def test_a_run_that_a_callback_ended_after_an_iteration_is_continued_exactly(tmp_path, monkeypatch, algorithm):
    whole = tiny(algorithm)
    trainer(tmp_path, "whole").fit(whole)
    run = stopped_by_an_error(tmp_path, tiny(algorithm), Failure(monkeypatch, "callback"))
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == 48
    going_on = tiny(algorithm, seed=1)
    trainer(tmp_path).fit(going_on, ckpt_path="last")
    assert torch.equal(weights(going_on), weights(whole))


def test_gradient_steps_of_an_iteration_that_was_not_finished_are_saved_as_the_updates_that_they_are(tmp_path, monkeypatch):
    model = tiny(lrl.PPO)
    run = stopped_by_an_error(tmp_path, model, Failure(monkeypatch, "gradient step"))
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert (saved["lightning_rl"]["env_steps"], saved["lightning_rl"]["updates"]) == (48, 9)
    assert all(torch.equal(value, saved["state_dict"][name]) for name, value in model.state_dict().items())


@pytest.mark.thorough
def test_behaviors_are_saved_before_an_error_of_their_environment_and_go_on(tmp_path, monkeypatch, capsys):
    def model(steps):
        behaviors = {"a": lrl.Behavior("a", SMALL), "b": lrl.Behavior("b", partial(lrl.DQN, learning_starts=10, batch_size=8))}
        return lrl.MultiAgent({"id": "tests.agents.Together", "num_envs": 2}, behaviors, steps)

    failure = Failure(monkeypatch)
    run = stopped_by_an_error(tmp_path, model(200), failure)
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]
    assert 0 < saved["env_steps"] < 200
    failure.calls_left, going_on = None, model(200)
    trainer(tmp_path).fit(going_on, ckpt_path="last")
    out = capsys.readouterr().out
    assert going_on.count >= 200 and "start new episodes: an error ended the run" in out and "no replay buffer" not in out


@pytest.mark.thorough
def test_weights_that_are_nan_when_an_error_comes_do_not_replace_those_that_were_saved(tmp_path, capsys, monkeypatch):
    class Spoils(Failure):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if batch_idx == 2:
                next(model.parameters()).data.fill_(torch.nan)
            super().on_train_batch_end(trainer, model, outputs, batch, batch_idx)

    run = stopped_by_an_error(tmp_path, tiny(lrl.PPO), Spoils(monkeypatch, "callback"), checkpoint={"every_n_env_steps": 32})
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert saved["lightning_rl"]["env_steps"] == 32 and all(value.isfinite().all() for value in saved["state_dict"].values())
    assert "the newest weights are NaN or infinite and are not saved" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_that_an_error_ends_in_its_first_iteration_leaves_nothing(tmp_path, monkeypatch):
    failure = Failure(monkeypatch)
    failure.on_train_start = lambda *_: setattr(failure, "calls_left", 5)
    assert stopped_by_an_error(tmp_path, tiny(lrl.PPO), failure) is None and not list(tmp_path.rglob("*.*"))


gym.register("Told-v0", Scripted)


class Episodes(pl.Callback):
    """How many episodes the statistics are of, after each iteration."""

    def __init__(self):
        self.counts = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.counts.append(len(model.collector.statistics.returns))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "named", "episodes"),
    [  # before: 4 iterations of 2 environments with 8 episodes of 4 steps, 64 in all
        ({"kwargs": {"period": 8}}, "env.kwargs", 2 * 4),
        ({"wrappers": ["tests.environments.Reported"], "max_episode_steps": 9}, "env.wrappers, env.max_episode_steps", 2 * 8),
        ({"id": "Told-v0"}, "env.id", 2 * 8),
        ({"step_timeout": 50, "max_restarts": 3, "vectorization": "async"}, None, 64 + 2 * 8),
        ({"num_envs": 1}, None, 8),  # statistics are those of so many environments
        ({}, None, 64 + 2 * 8),
    ],
)
def test_a_run_that_continues_with_another_task_forgets_the_best_score_and_the_episodes_of_the_one_before(
    tmp_path, capsys, changes, named, episodes
):
    def go(changes, steps, scores, *callbacks, **arguments):
        env = {"id": "tests.environments:Scripted-v0", "num_envs": 2, "kwargs": {"period": 4}, **changes}
        model = lrl.PPO(env, max_env_steps=steps, n_steps=32, batch_size=32, n_epochs=1, net_arch=[8])
        run = trainer(tmp_path, callbacks=[Scores(scores), *callbacks], evaluation={"patience": 4})
        run.fit(model, **arguments)
        return run

    go({}, 256, [50, 90, 80, 80])
    capsys.readouterr()
    counts = Episodes()
    run = go(changes, 512, [7, 8, 7, 7, 7], counts, ckpt_path=tmp_path / "PPO/Scripted-v0/a/checkpoints/last.ckpt", force=True)
    forgotten = "changed since the checkpoint: the best score so far and the statistics of episodes belong to another task and are reset"
    out = capsys.readouterr().out
    assert (forgotten in out, f"{named} {forgotten}" in out) == (named is not None, named is not None)
    assert counts.counts[0] == episodes
    (saver,) = (each for each in run.callbacks if isinstance(each, BestModel))
    assert saver.best == (90 if named is None else 8)
    assert len(counts.counts) == (2 if named is None else 4)  # patience ends it: two evaluations of four were made before
    saved = torch.load(tmp_path / "PPO/Scripted-v0/a/checkpoints/best.ckpt", weights_only=True)["lightning_rl"]
    assert saved["env_steps"] == (128 if named is None or "id" in changes else 256 + 128)


@pytest.mark.thorough
def test_an_error_before_the_first_iteration_of_a_model_that_was_trained_before_leaves_its_run_as_it_was(tmp_path):
    class Fails(pl.Callback):
        def on_train_start(self, trainer, model):
            raise ValueError("a mistake of a callback")

    model = tiny(lrl.SAC)
    run = trainer(tmp_path)
    run.fit(model)
    file = run.run_folder / "checkpoints/last.ckpt"
    before, model.max_env_steps = file.read_bytes(), 192
    with pytest.raises(ValueError, match="a mistake of a callback"):
        trainer(tmp_path, callbacks=[Fails()]).fit(model, ckpt_path="last")
    assert file.read_bytes() == before
    going_on = tiny(lrl.SAC, max_env_steps=128)
    trainer(tmp_path).fit(going_on, ckpt_path="last")
    assert going_on.env_steps == 128


@pytest.mark.thorough
def test_groups_are_saved_before_an_error_of_their_environment_as_interrupted(tmp_path, monkeypatch):
    run = stopped_by_an_error(tmp_path, tiny(lrl.POCA), Failure(monkeypatch))
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]
    collector = saved["ranks"][0]["data"]["collector"]
    assert collector["interrupted"] and collector["episodes"] is None and saved["env_steps"] == collector["env_steps"] == 40


@pytest.mark.thorough
def test_statistics_that_are_infinite_when_an_error_comes_do_not_replace_those_that_were_saved(tmp_path, monkeypatch):
    class Spoils(Failure):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if batch_idx == 2:
                next(iter(model.network.normalizer.buffers())).fill_(torch.inf)
            super().on_train_batch_end(trainer, model, outputs, batch, batch_idx)

    model = tiny(lrl.PPO, normalize_obs="running")
    run = stopped_by_an_error(tmp_path, model, Spoils(monkeypatch, "callback"), checkpoint={"every_n_env_steps": 32})
    saved = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert saved["lightning_rl"]["env_steps"] == 32 and all(value.isfinite().all() for value in saved["state_dict"].values())


@pytest.mark.thorough
def test_a_save_in_which_environments_cannot_be_asked_is_repeated_without_their_episodes(tmp_path, monkeypatch, capsys):
    model = tiny(lrl.IMPALA, actors={"num_actors": 1, "backend": "in_process"})
    state_of, asked = Collector.get_state, iter(range(100))

    def fails_from_the_third_save_on(collector):
        if next(asked) >= 2:
            raise ValueError("simulator lost its connection")
        return state_of(collector)

    monkeypatch.setattr(Collector, "get_state", fails_from_the_third_save_on)
    run = trainer(tmp_path, checkpoint={"every_n_env_steps": 16})
    with pytest.raises((ValueError, lrl.SettingError), match="simulator lost its connection"):
        run.fit(model)
    saved = torch.load(run.run_folder / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]
    assert saved["env_steps"] == model.env_steps == 48
    monkeypatch.undo()
    trainer(tmp_path).fit(tiny(lrl.IMPALA, actors={"num_actors": 1, "backend": "in_process"}), ckpt_path="last")
    assert "start new episodes: an error ended the run" in capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_that_an_unknown_metric_ends_is_saved_with_its_replay_buffer(tmp_path):
    run = trainer(tmp_path, evaluation={"every_n_env_steps": 64, "episodes": 1}, checkpoint={"monitor": "val/mine"})
    with pytest.raises(lrl.SettingError, match=r"checkpoint\.monitor 'val/mine' is not a metric of evaluations"):
        run.fit(tiny(lrl.SAC))
    (saved,) = torch.load(run.run_folder / "checkpoints/last.ckpt", weights_only=True)["lightning_rl"]["ranks"]
    assert saved["data"]["replay"] is not None


@pytest.mark.thorough
def test_a_resumed_run_lists_the_settings_that_differ_from_the_checkpoint_with_both_values(tmp_path, capfd):
    trainer(tmp_path).fit(SMALL("CartPole-v1", max_env_steps=80))
    capfd.readouterr()
    trainer(tmp_path).fit(SMALL("CartPole-v1", max_env_steps=160), ckpt_path="last")
    assert "settings that differ" not in capfd.readouterr().out  # the length is in the summary
    trainer(tmp_path).fit(SMALL("CartPole-v1", max_env_steps=240, gamma=0.9, learning_rate=1e-4), ckpt_path="last")
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("settings that differ from the checkpoint's: ")]
    assert sorted(line.partition(": ")[2].split(", ")) == ["gamma 0.9 (was 0.99)", "learning_rate 0.0001 (was 0.0003)"]


@pytest.mark.thorough
def test_the_command_lists_changed_settings_of_the_environment_too(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = "fit --model PPO --model.env.id CartPole-v1 --model.n_steps 32 --model.batch_size 64 --trainer.run_name one --evaluation null"
    for more in ("--model.max_env_steps 256", "--model.max_env_steps 512 --model.env.max_episode_steps 40 --ckpt_path last"):
        assert main([*options.split(), *more.split()]) == 0
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("settings that differ from the checkpoint's: ")]
    assert line.endswith(": env.max_episode_steps 40 (was None)")
