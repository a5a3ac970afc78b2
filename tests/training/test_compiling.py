"""`compile: true`: the same learning in less time, or one line that says why not."""

import math
import os
import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch
from torch.amp import GradScaler

import lightning_rl as lrl
from lightning_rl.errors import NotFiniteError, SettingError
from lightning_rl.optimization import gradient_step
from lightning_rl.training.compiling import CompiledLoss, copy_all
from tests.experts import at_random
from tests.fitting import Rows, fit, tiny

OFF = GradScaler(enabled=False)
REPLAY = {"learning_starts": 32, "batch_size": 32, "buffer_size": 500, "steps_per_iteration": 32, "net_arch": [32, 32], "train_freq": 4}
SCHEDULED = {
    "learning_rate": {"schedule": "linear", "start": 1e-3},
    "clip_range": {"schedule": "piecewise", "points": [[0, 0.3], [0.2, 0.1], [0.2, 0.2], [1, 0.05]]},
    "ent_coef": {"schedule": "linear", "start": 0.05},
    "critic_burn_in_steps": 200,
}
PPO = {"n_steps": 16, "batch_size": 32}
RAINBOW = {"double": True, "dueling": True, "noisy": True, "distribution": "c51", "n_steps": 3, "replay": {"prioritized": True}}
NESTED = {"env": {"kwargs": {"action": "nested"}}}
CASES = {
    "PPO with schedules": (lrl.PPO, "CartPole-v1", PPO | SCHEDULED),
    "PPO Box": (lrl.PPO, "Pendulum-v1", PPO | {"normalize_obs": "running", "clip_range_vf": 0.2, "target_kl": 0.02}),
    "PPO with a histogram of values": (lrl.PPO, "CartPole-v1", PPO | {"value_support": [-2, 6], "value_transform": "symlog"}),
    "PPO mixed actions and masks": (lrl.PPO, "tests.environments:Choosy-v0", PPO | {"ratio": "per_part"} | NESTED),
    "SAC mixed actions and masks": (lrl.SAC, "tests.environments:Choosy-v0", REPLAY | NESTED),
    "PPO images": (lrl.PPO, "tests.environments:Image-v0", PPO | {"encoder_features": 8}),
    "A2C": (lrl.A2C, "CartPole-v1", {}),
    "IMPALA": (lrl.IMPALA, "CartPole-v1", {"n_steps": 8}),
    "POCA": (lrl.POCA, "tests.agents.Mortal", {"n_steps": 16, "batch_size": 16, "n_epochs": 2}),
    "DQN": (lrl.DQN, "CartPole-v1", REPLAY | {"target_update_interval": 20, "learning_rate": 1e-3}),
    "DQN with everything": (lrl.DQN, "CartPole-v1", REPLAY | RAINBOW),
    "SAC": (lrl.SAC, "Pendulum-v1", REPLAY),
    "TQC": (lrl.TQC, "Pendulum-v1", REPLAY),
    # a bias before a normalization has no gradient but rounding errors, which Adam makes steps of
    "CrossQ": (lrl.CrossQ, "Pendulum-v1", REPLAY | {"critic_net_arch": [32], "learning_rate": 1e-5}),
    "SAC with a value network": (lrl.SAC, "CartPole-v1", REPLAY | {"value_network": True}),
    "TD3": (lrl.TD3, "Pendulum-v1", REPLAY),
    "BehavioralCloning": (
        lrl.BehavioralCloning,
        "CartPole-v1",
        {"dataset": at_random("CartPole-v1", "{}"), "max_updates": 64, "updates_per_iteration": 16, "batch_size": 32},
    ),
}
THOROUGH = {"PPO with schedules"}
"""A compiler takes many seconds for each of the others."""


def learned(case, compile, *callbacks):
    """A model after some updates, what it logged, and how many functions were compiled in each iteration."""
    algorithm, env_id, settings = CASES[case]
    settings = {f"max_{algorithm.counter}": 400, "log_interval": 1} | settings
    rows, programs = Rows(), []

    class Counts(pl.Callback):
        def on_train_batch_end(self, trainer, model, *_):
            programs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    pl.seed_everything(1, verbose=False)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    env = lrl.EnvConfig(**({"id": env_id, "num_envs": 4} | settings.pop("env", {})))
    model = algorithm(env, compile=compile, **settings)
    fit(model, logger=rows, callbacks=[Counts(), *callbacks])
    return model, rows.rows, programs


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.thorough if case in THOROUGH else pytest.mark.slow) for case in CASES]
)
def test_a_compiled_loss_learns_and_logs_the_same_and_is_compiled_once(case):
    (plain, rows, none), (compiled, others, programs) = learned(case, False), learned(case, True)
    assert plain.updates == compiled.updates > 0
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    graphs = len(compiled.losses) + ("critic_burn_in_steps" in CASES[case][2])  # without the policy, and with it
    assert not any(none) and programs[-1] == max(programs) == graphs
    assert not any(hasattr(vars(compiled).get(name), "compute") for name in compiled.losses), "the methods are back"
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
    assert len(rows) == len(others) and "compiled" not in compiled.state_dict()
    for (_, row), (_, other) in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for name in row:
            if name.startswith("train/"):
                assert other[name] == pytest.approx(row[name], abs=5e-3, rel=1e-2, nan_ok=True), name


class Looked(Exception):
    """The run has begun, and nothing is compiled yet."""


def compiled_names(algorithm, env_id, **settings):
    """Return the losses that a run would compile."""

    class Looks(pl.Callback):
        def on_train_batch_start(self, trainer, model, *_):
            raise Looked(list(model.learner.compiled))

    with pytest.raises(Looked) as found:
        fit(algorithm(env_id, **settings), callbacks=[Looks()])
    return found.value.args[0]


@pytest.mark.thorough
def test_auto_compiles_long_runs_without_convolutions():
    long = {"max_env_steps": 320_000, "n_steps": 16, "batch_size": 32}  # 320,000 · 4 / 32 = 40,000 updates
    assert compiled_names(lrl.PPO, "CartPole-v1", **long) == ["loss"]
    assert compiled_names(lrl.PPO, "CartPole-v1", **long | {"max_env_steps": 319_999}) == []
    assert compiled_names(lrl.PPO, "tests.environments:Image-v0", **long) == []
    assert compiled_names(lrl.PPO, "CartPole-v1", **long, compile=False) == []
    assert compiled_names(lrl.A2C, "CartPole-v1", max_env_steps=10_000, n_steps=8) == []


@pytest.mark.thorough
def test_what_auto_cannot_compile_runs_as_it_is_written(capfd):
    class Slow(Deciding):
        planned_updates = 40_000

    model = tiny(Slow)
    fit(model)
    assert model.updates > 0
    assert capfd.readouterr().out.count("compile auto: Slow.loss cannot be compiled: Python decides by the value of a tensor; it runs") == 1


class Deciding(lrl.PPO):
    """Decides by a value, which no compiled function can follow."""

    def loss(self, minibatch, *scheduled):
        loss, metrics = super().loss(minibatch, *scheduled)
        return (loss if loss.item() > 0 else -loss), metrics


@pytest.mark.thorough
def test_what_cannot_be_compiled_is_refused_in_one_line():
    with pytest.raises(SettingError, match=r"^compile: Deciding\.loss cannot be compiled: Python decides by the value of a tensor$"):
        fit(tiny(Deciding, compile=True))
    with pytest.raises(SettingError, match="compile does not support memory"):
        tiny(lrl.PPO, memory=lrl.LSTM(4, 4), compile=True)
    with pytest.raises(SettingError, match="compile is not a setting of EvolutionStrategies"):
        tiny(lrl.EvolutionStrategies, compile=True)
    with pytest.raises(SettingError, match="compile must be auto, true or false, got 1"):
        tiny(lrl.PPO, compile=1)

    class Renamed(lrl.A2C):
        losses = ("objective",)

    with pytest.raises(SettingError, match="compile: Renamed has no method objective; name its losses in the attribute `losses`"):
        fit(tiny(Renamed, compile=True))


def test_a_loss_that_is_given_a_graph_is_not_compiled():
    weight = torch.tensor([2.0], requires_grad=True)
    optimizer, given, said = torch.optim.SGD([weight]), 3 * weight, []
    message = "compile: SAC.actor_loss cannot be compiled: an input tensor requires a gradient; compute it in the loss, or detach it"
    with pytest.raises(SettingError, match=f"^{message}$"):
        CompiledLoss("SAC.actor_loss", torch.square, optimizer, OFF)(given)
    loss = CompiledLoss("SAC.actor_loss", torch.square, optimizer, OFF, said.append)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(loss(given), [weight], retain_graph=True)
        assert gradient.item() == 2 * 6 * 3
    assert said == [message.replace("compile:", "compile auto:") + "; it runs uncompiled"]


@pytest.mark.slow
def test_a_compiled_loss_is_scaled_before_it_is_differentiated():
    weight = torch.tensor([2.0], requires_grad=True)
    torch._dynamo.config.trace_autograd_ops = True
    scaler = GradScaler("cpu", init_scale=1024.0)
    loss = CompiledLoss("tests.loss", lambda x: (x * weight.square().sum(), x), torch.optim.SGD([weight]), scaler)
    value, rest = loss(torch.tensor(3.0))
    assert value.item() == 12 and rest.item() == 3
    assert value.grad_fn.gradient.item() == 3 * 2 * 2
    assert torch.autograd.grad(value, [weight])[0].item() == 3 * 2 * 2


class Twice(lrl.A2C):
    """Names two losses, of which one optimizer steps on the first."""

    losses = ("loss", "other")
    planned_updates = 40_000

    def other(self, batch):
        return batch.returns.mean()


TWICE = "Twice.losses names 2, loss, other, for 1 optimizer; name one for each, in their order"


def test_each_compiled_loss_needs_an_optimizer(capfd):
    with pytest.raises(SettingError, match=f"^compile: {TWICE}$"):
        fit(tiny(Twice, compile=True))
    fit(model := tiny(Twice))
    assert model.updates > 0 and capfd.readouterr().out.count(f"compile auto: {TWICE}; losses run uncompiled") == 1


@pytest.mark.slow
def test_a_group_that_is_added_in_a_run_has_a_gradient_too():
    weight, more = (torch.tensor([value], requires_grad=True) for value in (2.0, 5.0))
    torch._dynamo.config.trace_autograd_ops = True
    optimizer = torch.optim.SGD([weight], 0.1)
    loss = CompiledLoss("tests.loss", lambda x: (x * weight * more).sum(), optimizer, OFF)
    gradient_step(loss(torch.tensor(1.0)), optimizer, OFF, math.inf, 1)
    assert (weight.item(), more.item()) == (1.5, 5.0)
    optimizer.add_param_group({"params": [more]})
    gradient_step(loss(torch.tensor(1.0)), optimizer, OFF, math.inf, 1)
    assert (weight.item(), more.item()) == pytest.approx((1.0, 4.85))


@pytest.mark.slow
def test_a_compiled_loss_learns_the_same_in_half_precision():
    models = []
    for compile in (False, True):
        pl.seed_everything(1, verbose=False)
        models.append(tiny(lrl.A2C, compile=compile, max_grad_norm=None))
        fit(models[-1], precision="bf16-mixed")
    for plain, compiled in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(compiled, plain, atol=5e-3, rtol=5e-2)


@pytest.mark.slow
def test_a_bad_compiled_loss_is_met_as_any_other():
    class Spoils(pl.Callback):
        def on_train_batch_start(self, trainer, model, *_):
            if trainer.global_step == 2:
                next(model.network.critic.parameters()).data.fill_(math.nan)

    with pytest.raises(NotFiniteError, match="loss value_loss is nan"):
        fit(tiny(lrl.A2C, compile=True), callbacks=[Spoils()])
    model = tiny(lrl.A2C, compile=True, on_nan="restore_last")
    fit(model, callbacks=[Spoils()])
    assert model.learner.guard.restored == 1 and all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.slow
def test_without_a_compiler_there_is_one_line(tmp_path):
    command = "fit --model A2C --model.env.id CartPole-v1 --model.max_env_steps 64 --model.compile true"
    env = os.environ | {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PATH": ""}
    process = subprocess.run(
        [sys.executable, "-m", "lightning_rl", *command.split()], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert process.returncode == 2
    assert process.stderr.startswith("error: compile: A2C.loss cannot be compiled: there is no C++ compiler")
    assert process.stderr.count("\n") == 1


def test_what_a_graph_returned_is_copied_number_by_number_whatever_its_type():
    whole = torch.tensor([1.0, 2.0, 3.0])
    given = (
        whole[0],
        whole[1:],
        {"steps": torch.tensor(2**24 + 1), "loss": whole[2], "exact": torch.tensor(0.1, dtype=torch.float64), "n": 3},
    )
    value, vector, rest = copy_all(given)
    whole.zero_()
    assert value == 1 and vector.tolist() == [2, 3] and rest["loss"] == 3
    assert rest["steps"] == 2**24 + 1 and rest["exact"].item() == 0.1 and rest["n"] == 3
