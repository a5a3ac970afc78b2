"""What holds in every run of every algorithm, with a plain Lightning Trainer; `test_off_policy.py` has what holds of replay alone."""

from __future__ import annotations

import copy
import os
import pickle
from collections import Counter
from dataclasses import dataclass

import pytest
import pytorch_lightning as pl
import torch
from torch.nn.utils import parameters_to_vector

from lightning_rl import A2C, DQN, IMPALA, LSTM, PPO, SAC, TD3, EnvConfig, EvolutionStrategies, SettingError
from lightning_rl.data.collector import Collector
from tests.environments import Scripted, ScriptedBox
from tests.fitting import ALL, OFF_POLICY, ON_POLICY, UPDATES, Rows, fit, tiny, twins_slow, weights

ITERATIONS = 6
every_algorithm = pytest.mark.parametrize("algorithm", twins_slow(ALL))
with_or_without_gradients = pytest.mark.parametrize("algorithm", twins_slow([*ALL, EvolutionStrategies]))
every_on_policy_algorithm = pytest.mark.parametrize("algorithm", ON_POLICY)
STEPS_OF_AN_UPDATE = {PPO: 1, A2C: 1, IMPALA: 1, DQN: 1, SAC: 3, TD3: 1.5, EvolutionStrategies: 1}
"""How many optimizers step in one, on average."""


@pytest.mark.variants
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP"])
@pytest.mark.parametrize("env_id", ["Scripted-v0", "ScriptedBox-v0", "ScriptedDict-v0"])
def test_the_ratio_is_one_before_the_first_step_of_every_iteration(autoreset, env_id):
    model = tiny(PPO, f"tests.environments:{env_id}", normalize_obs="running", learning_rate=0.01, env={"autoreset": autoreset})
    deviation: dict[int, list[float]] = {}
    loss = model.loss

    def watched(batch, *scheduled):
        with torch.no_grad():
            log_prob, _, _ = model.network.evaluate(batch.obs, batch.action)
            deviation.setdefault(model.trainer.global_step, []).append(float((log_prob - batch.log_prob).exp().sub(1).abs().max()))
        return loss(batch, *scheduled)

    model.loss = watched
    trainer = fit(model)
    assert len(deviation) == trainer.global_step >= ITERATIONS
    assert max(first for first, *_ in deviation.values()) <= 1e-6
    assert min(last for *_, last in deviation.values()) > 1e-4  # later minibatches meet a policy that has moved


@pytest.mark.thorough
@with_or_without_gradients
def test_a_model_can_be_copied_and_pickled_after_a_run_and_the_copy_learns_on(algorithm):
    model = tiny(algorithm)
    fit(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(weights(other), weights(model))
        other.max_env_steps = 2 * model.env_steps
        fit(other)
        assert other.env_steps > model.env_steps and not torch.equal(weights(other), weights(model))


@every_on_policy_algorithm
def test_every_rollout_is_collected_with_the_newest_weights(algorithm, monkeypatch):
    model, seen = tiny(algorithm), []
    collect, training_step = Collector.collect, model.training_step

    def watched_collect(collector):
        seen.append(("collect", weights(model)))
        return collect(collector)

    def watched_step(rollout, batch_idx):
        training_step(rollout, batch_idx)
        seen.append(("update", weights(model)))

    monkeypatch.setattr(Collector, "collect", watched_collect)
    model.training_step = watched_step
    fit(model)
    assert [kind for kind, _ in seen] == ["collect", "update"] * ITERATIONS
    for (_, before), (_, after) in zip(seen[::2], seen[1::2], strict=True):
        assert not torch.equal(before, after)
    for (_, learned), (_, acting) in zip(seen[1:-1:2], seen[2::2], strict=True):
        assert torch.equal(learned, acting)


@with_or_without_gradients
def test_global_step_counts_iterations_and_updates_count_gradient_steps(algorithm):
    model, steps = tiny(algorithm), []
    step = model.step
    model.step = lambda *arguments: steps.append(1) or step(*arguments)
    trainer = fit(model)
    assert trainer.global_step == ITERATIONS and model.env_steps == 96
    assert model.updates == UPDATES[algorithm]
    assert len(steps) == UPDATES[algorithm] * STEPS_OF_AN_UPDATE[algorithm]


def test_an_iteration_that_stops_early_counts_as_one():
    model = tiny(PPO, target_kl=1e-9, learning_rate=0.01)
    assert fit(model).global_step == ITERATIONS
    assert model.updates == ITERATIONS  # the first minibatch has a divergence of 0, the second more than 1.5e-9


@with_or_without_gradients
def test_callbacks_are_called_for_every_update(algorithm):
    heard = []

    class Listener(pl.Callback):
        def on_update_end(self, trainer, model):
            heard.append(model.updates)

    model = tiny(algorithm)
    fit(model, callbacks=[Listener()])
    assert heard == list(range(1, UPDATES[algorithm] + 1))


@with_or_without_gradients
def test_rows_are_logged_at_environment_steps(algorithm):
    logger = Rows()
    fit(tiny(algorithm, log_interval=32), logger=logger)
    assert [step for step, _ in logger.rows] == [32, 64, 96]
    assert [metrics["time/iterations"] for _, metrics in logger.rows] == [2, 4, 6]


@with_or_without_gradients
def test_the_x_axis_is_exact_where_float32_is_not(algorithm, tmp_path):
    start = 2**24 + 1  # the first whole number that float32 cannot hold
    fit(tiny(algorithm), max_steps=1).save_checkpoint(tmp_path / "early.ckpt")
    checkpoint = torch.load(tmp_path / "early.ckpt", weights_only=True)
    checkpoint["lightning_rl"]["env_steps"] = start
    torch.save(checkpoint, tmp_path / "late.ckpt")
    eager = {} if algorithm is EvolutionStrategies else {"compile": False}  # a run that is so long by its settings would be compiled
    logger, model = Rows(), tiny(algorithm, max_env_steps=start + 40, log_interval=1, **eager)
    fit(model, tmp_path / "late.ckpt", logger=logger)
    assert [step for step, _ in logger.rows] == [start + 16, start + 32, start + 48]
    assert model.env_steps == start + 48


@with_or_without_gradients
def test_few_keys_go_through_lightning_each_iteration(algorithm):
    model, calls = tiny(algorithm, log_interval=1), Counter()
    log = model.log
    model.log = lambda *arguments, **options: calls.update([model.trainer.global_step]) or log(*arguments, **options)
    fit(model)
    assert max(calls.values(), default=0) <= 8


def test_every_row_is_learned_from_once_in_each_epoch():
    model, rows = tiny(PPO, env={"num_envs": 1}, n_steps=16, n_epochs=3, max_env_steps=64), Counter()
    loss = model.loss

    def watched(batch, *scheduled):
        rows.update((*row, model.trainer.global_step) for row in batch.obs.tolist())  # (episode, t) occur once in one environment
        return loss(batch, *scheduled)

    model.loss = watched
    fit(model)
    assert len(rows) == 64 and set(rows.values()) == {3}


@every_on_policy_algorithm
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP"])
def test_batches_of_one_row_and_rows_that_do_not_count_give_numbers(algorithm, autoreset):
    # with a period of 1 under NEXT_STEP every other row is a reset: a minibatch may have no row that counts
    settings = {PPO: {"batch_size": 1, "normalize_advantage": True}, A2C: {"normalize_advantage": True}}.get(algorithm, {})
    env = {"num_envs": 1, "autoreset": autoreset, "kwargs": {"period": 1}}
    for n_steps in (1, 2):
        model = tiny(algorithm, env=env, n_steps=n_steps, max_env_steps=8, **settings)
        actor = [p.detach().clone() for p in model.network.actor.parameters()]
        fit(model)
        assert weights(model).isfinite().all()
        assert not all(map(torch.equal, actor, model.network.actor.parameters()))  # one advantage alone is not cut to zero


@pytest.mark.variants
@every_algorithm
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP"])
def test_running_statistics_count_each_valid_row_once(algorithm, autoreset):
    model = tiny(algorithm, normalize_obs="running", env={"autoreset": autoreset})
    fit(model)
    statistics = model.network.normalizer.statistics[0]  # of 2 · 16 episodes 0 … 15, each with t = 0, 1, 2
    assert statistics.count == pytest.approx(96, abs=1e-3)
    assert statistics.mean.tolist() == pytest.approx([7.5, 1.0], abs=1e-3)
    assert statistics.var.tolist() == pytest.approx([(16**2 - 1) / 12, 2 / 3], abs=1e-3)


@pytest.mark.variants
@every_algorithm
@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_environments_are_closed_after_a_run_and_after_an_exception(algorithm, vectorization):
    for error in (None, RuntimeError("in the middle"), KeyboardInterrupt()):
        model, opened, processes = tiny(algorithm, max_env_steps=16, env={"vectorization": vectorization}), [], []
        training_step = model.training_step

        def watched(rollout, batch_idx, model=model, error=error, opened=opened, processes=processes, training_step=training_step):
            opened.append(model.collector.stepper.envs)
            processes.extend(process.pid for process in getattr(model.collector.stepper.envs, "processes", ()))
            if error is not None:
                raise error
            training_step(rollout, batch_idx)

        model.training_step = watched
        if error is None:
            fit(model)
        else:
            with pytest.raises((RuntimeError, SystemExit)):
                fit(model)
        assert [envs.closed for envs in opened] == [True] and model.collector is None
        assert len(processes) == (2 if vectorization == "async" else 0)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in processes)


@pytest.mark.variants
@with_or_without_gradients
@pytest.mark.parametrize(
    "arguments, iterations, epochs",
    [
        ({}, 6, 1),
        ({"fast_dev_run": True}, 1, 1),
        ({"max_steps": 3}, 3, 1),
        ({"max_epochs": 1}, 6, 1),
        ({"max_epochs": 1, "limit_train_batches": 2}, 2, 1),
        ({"limit_train_batches": 2}, 6, 3),
    ],
)
def test_limits_of_the_trainer_do_what_they_say(algorithm, arguments, iterations, epochs):
    model = tiny(algorithm)
    trainer = fit(model, **arguments)
    assert (trainer.global_step, model.env_steps, trainer.current_epoch) == (iterations, 16 * iterations, epochs)


@every_algorithm
def test_a_run_ends_after_its_valid_steps_though_reset_rows_take_longer(algorithm):
    model = tiny(algorithm, env={"autoreset": "NEXT_STEP"})
    trainer = fit(model)  # period 3: 12 of 16 rows are valid
    assert (trainer.global_step, model.env_steps) == (8, 96)


@pytest.mark.variants
@every_algorithm
def test_schedules_follow_environment_steps_whatever_the_number_of_environments(algorithm):
    def rates(num_envs: int) -> list[tuple[int, float, float]]:
        schedule = {"schedule": "linear", "start": 1e-3, "end": 1e-4}
        iteration = {"n_steps": 32 // num_envs} if algorithm in ON_POLICY else {"steps_per_iteration": 32}
        model = tiny(algorithm, env={"num_envs": num_envs}, **iteration, learning_rate=schedule, max_env_steps=320)
        training_step, seen = model.training_step, []

        def watched(rollout, batch_idx):
            seen.append((model.env_steps, model.own_optimizers[0].param_groups[0]["lr"], model.progress))
            training_step(rollout, batch_idx)

        model.training_step = watched
        fit(model)
        return seen

    alone, eight = rates(1), rates(8)
    assert alone == eight
    # the rate of an iteration is that of its beginning: 1e-3 - 9e-4 · k / 10
    assert [rate for _, rate, _ in eight] == pytest.approx([1e-3 - 9e-5 * k for k in range(10)])
    first = 32 if algorithm in ON_POLICY else 0  # who learns while acting has made no step of the iteration yet
    assert [steps for steps, _, _ in eight] == [first + 32 * k for k in range(10)]


@every_algorithm
def test_checkpoints_are_plain_data_and_bring_the_weights_back(algorithm, tmp_path):
    model = tiny(algorithm, normalize_obs="running")
    fit(model).save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert checkpoint["lightning_rl"]["env_steps"] == 96 and checkpoint["lightning_rl"]["updates"] == model.updates
    assert checkpoint["hyper_parameters"]["env"]["id"] == model.env.id
    loaded = algorithm.load_from_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(weights(loaded), weights(model)) and loaded.collector is None
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))  # critics, targets and temperature too
    statistics = loaded.network.normalizer.statistics[0]
    assert statistics.count == pytest.approx(96, abs=1e-3) and torch.equal(statistics.mean, model.network.normalizer.statistics[0].mean)


@with_or_without_gradients
def test_a_run_that_continues_counts_on(algorithm, tmp_path):
    fit(tiny(algorithm), max_steps=2).save_checkpoint(tmp_path / "a.ckpt")
    model = tiny(algorithm)
    trainer = fit(model, tmp_path / "a.ckpt")
    assert (trainer.global_step, model.env_steps) == (ITERATIONS, 96)
    # a new buffer takes 16 steps to learn from: 4 updates in the first two iterations, 4 in each of the last three
    assert model.updates == (16 if algorithm in OFF_POLICY else UPDATES[algorithm])


@every_algorithm
def test_the_same_environment_stores_the_same_settings_however_it_is_given(algorithm):
    env_id = "Pendulum-v1" if algorithm is TD3 else "CartPole-v1"
    ways = [EnvConfig(env_id), env_id, {"id": env_id}]
    first, *others = [dict(algorithm(env=env).hparams) for env in ways] + [dict(algorithm(ways[0]).hparams)]
    assert first["env"]["id"] == env_id and first["env"]["num_envs"] == 8 and first["gamma"] == 0.99
    assert all(other == first for other in others)


@every_algorithm
def test_a_function_that_builds_an_environment_trains_and_is_not_stored(algorithm):
    torch.manual_seed(0)
    settings = {PPO: {"n_steps": 2, "batch_size": 16}, A2C: {"n_steps": 2}, IMPALA: {"n_steps": 2}}.get(
        algorithm, {"steps_per_iteration": 16, "learning_starts": 8}
    )
    model = algorithm((lambda: ScriptedBox()) if algorithm is TD3 else lambda: Scripted(), max_env_steps=16, **settings)
    assert model.hparams["env"] is None
    assert fit(model).global_step == 1 and model.env_steps == 16


@every_on_policy_algorithm
@pytest.mark.parametrize("steps, actor_moves", [(17, False), (16, True)])
def test_the_critic_alone_learns_while_it_is_burnt_in(algorithm, steps, actor_moves):
    model = tiny(algorithm, critic_burn_in_steps=steps, max_env_steps=32)  # two rollouts
    actor, critic = ([p.detach().clone() for p in part.parameters()] for part in (model.network.actor, model.network.critic))
    fit(model)
    assert all(map(torch.equal, actor, model.network.actor.parameters())) != actor_moves
    assert not all(map(torch.equal, critic, model.network.critic.parameters()))


@pytest.mark.thorough
@pytest.mark.parametrize(("algorithm", "settings"), [(PPO, {"n_epochs": 50}), (A2C, {"n_steps": 1, "use_rms_prop": False})])
def test_the_first_step_after_a_burn_in_is_as_long_as_the_learning_rate(algorithm, settings):
    """Adam's is lr · g / |g|; a thousand steps of gradient 0 before it would make it 2.5 times as long, ten of them half as long."""
    longest: list[float] = []

    class Watched(algorithm):
        def step(self, loss, optimizer):
            before = parameters_to_vector(self.network.actor.parameters()).detach()
            norm = super().step(loss, optimizer)
            longest.append(float((parameters_to_vector(self.network.actor.parameters()).detach() - before).abs().max()))
            return norm

    per_rollout = 2 * settings.get("n_steps", 8)
    steps = {"critic_burn_in_steps": 10 * per_rollout, "max_env_steps": 11 * per_rollout}
    steep = {"learning_rate": 0.001, "max_grad_norm": None, "reward_scale": 1e4, "normalize_advantage": False}  # far above Adam's ε
    fit(tiny(Watched, **steps, **steep, **settings))
    first = next(k for k, length in enumerate(longest) if length > 0)
    assert first == len(longest) // 11 * 10 and longest[first] == pytest.approx(0.001, rel=1e-3)


def test_a_burn_in_ends_also_where_the_divergence_ends_its_last_iteration():
    """A memory that both share moves the policy while the value function learns."""
    steps: list[int] = []

    class Watched(PPO):
        def on_train_batch_start(self, batch, batch_idx):
            super().on_train_batch_start(batch, batch_idx)
            steps.extend(int(state["step"]) for state in self.own_optimizers[0].state.values())

    model = tiny(Watched, memory=LSTM(4, 8), critic_burn_in_steps=16, target_kl=1e-6, learning_rate=0.05, n_epochs=10, max_env_steps=32)
    fit(model)
    assert model.updates < 2 * 20 and steps == []  # before the second iteration Adam knows of no steps


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
def test_a_precision_that_returns_cannot_bear_is_refused(precision):
    with pytest.raises(SettingError, match=f"precision {precision}.*32-true, bf16-mixed, 16-mixed"):
        fit(tiny(PPO), precision=precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_ratio_is_one_at_every_precision(precision):
    ratios = []

    class Watching(PPO):
        def loss(self, minibatch, *scheduled):
            log_prob = self.network.evaluate(minibatch.obs, minibatch.action)[0]
            ratios.append((log_prob - minibatch.log_prob).sum(-1).exp().detach())
            return super().loss(minibatch, *scheduled)

    model = tiny(Watching, "Pendulum-v1", n_epochs=1, batch_size=16, normalize_obs="running")
    before = weights(model)
    fit(model, precision=precision)
    assert len(ratios) == 6 and all((ratio - 1).abs().max() <= 1e-6 for ratio in ratios)
    assert not torch.equal(before.double(), weights(model).double())


@every_on_policy_algorithm
def test_a_continued_run_draws_on_instead_of_repeating_its_start(algorithm, tmp_path):
    first = tiny(algorithm, "CartPole-v1", max_env_steps=16)
    seen = []
    original = type(first).training_step
    for model, path in ((first, None), (tiny(algorithm, "CartPole-v1", max_env_steps=32), tmp_path / "a.ckpt")):
        model.training_step = lambda batch, batch_idx, model=model: (seen.append(batch.obs.clone()), original(model, batch, batch_idx))[1]
        trainer = fit(model, ckpt_path=path)
        trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert len(seen) == 2 and not torch.equal(seen[0][0], seen[1][0])


@every_algorithm
def test_the_statistics_that_are_evaluated_and_saved_act_next(algorithm):
    counts = {"judged": [], "acts": []}

    class Judge(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            counts["judged"].append(float(pl_module.network.normalizer.statistics[0].count))

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            counts["acts"].append(float(pl_module.network.normalizer.statistics[0].count))

    fit(tiny(algorithm, normalize_obs="running"), callbacks=[Judge()])
    assert counts["judged"] == pytest.approx([16, 32, 48, 64, 80, 96], abs=1e-3)
    assert counts["acts"] == pytest.approx([0, 16, 32, 48, 64, 80], abs=1e-3)


def test_names_that_a_run_needs_for_itself_are_no_settings():
    with pytest.raises(SettingError, match=r"Counting\.count: every run already has a count; choose another name"):

        @dataclass(kw_only=True, eq=False, repr=False)
        class Counting(PPO):
            count: int = 0

    with pytest.raises(SettingError, match=r"Long\.length: every run already has a length; choose another name"):

        class Long(PPO):
            length = 5
