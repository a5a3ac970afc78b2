"""What a checkpoint holds of a run is data of others: it is refused in one line before a kernel, a loop or a generator takes it."""

from __future__ import annotations

import copy
from math import inf, nan

import pytest
import torch
from torch.optim import RMSprop

from lightning_rl import A2C, DQN, PPO, SAC, TD3, SettingError, Trainer
from lightning_rl.checkpoints.validation import check_optimizer
from lightning_rl.optimization import FlatAdam
from lightning_rl.training.loading import check_fits
from tests.command_line import run
from tests.fitting import fit, tiny

RMSPROP = {"use_rms_prop": True}
MODELS = {"PPO": (PPO, {}), "A2C": (A2C, RMSPROP), "A2C with Adam": (A2C, {"use_rms_prop": False}), "SAC": (SAC, {})}
MODELS |= {"DQN": (DQN, {}), "TD3": (TD3, {})}
SETTINGS = "--model PPO --model.env.id tests.environments:Scripted-v0 --model.env.num_envs 2 --model.n_steps 8 --model.batch_size 8"
RANK = "lightning_rl", "ranks", 0
COLLECTOR = *RANK, "data", "collector"
STATISTICS = *COLLECTOR, "statistics"
OPTIMIZER = "optimizer_states", 0
GROUP = *OPTIMIZER, "param_groups", 0
STATE = *OPTIMIZER, "state", 0
PROGRESS = "loops", "fit_loop", "epoch_progress"
GONE = object()


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """What the checkpoints of two iterations hold, one of each model."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name, (algorithm, settings) in MODELS.items():
        model = tiny(algorithm, max_env_steps=64, **settings)
        trainer = Trainer(default_root_dir=folder / name, accelerator="cpu", enable_progress_bar=False)
        trainer.fit(model)
        made[name] = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    return made


@pytest.fixture
def changed(contents, tmp_path):
    """A file with something else at a place of such a checkpoint."""

    def change(value, *place, model="PPO"):
        content = copy.deepcopy(contents[model])
        inner = content
        for name in place[:-1]:
            inner = inner[name]
        if value is GONE:
            del inner[place[-1]]
        elif place:
            inner[place[-1]] = value
        torch.save(content, tmp_path / "changed.ckpt")
        return tmp_path / "changed.ckpt"

    return change


def refused(path, model="PPO"):
    algorithm, settings = MODELS[model]
    with pytest.raises(SettingError) as error:
        check_fits(tiny(algorithm, **settings), path)
    assert "\n" not in str(error.value) and len(str(error.value)) <= 190
    return str(error.value)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_was_saved_is_fit_to_go_on_and_the_model_is_as_it_was(changed, model):
    algorithm, settings = MODELS[model]
    here = tiny(algorithm, **settings)
    before = [(parameter.data_ptr(), parameter.grad) for parameter in here.parameters()]
    assert check_fits(here, changed(None, model=model)) == 64
    assert [(parameter.data_ptr(), parameter.grad) for parameter in here.parameters()] == before


BAD_VECTORS = {
    "short": lambda v: torch.zeros(1),
    "long": lambda v: torch.zeros(len(v) + 1),
    "repeated": lambda v: torch.zeros(1).expand(len(v)),
    "strided": lambda v: torch.zeros(2 * len(v))[::2],
    "wide": lambda v: v.double(),
    "half": lambda v: v.half(),
    "whole": lambda v: v.long(),
    "nan": lambda v: torch.full_like(v, nan),
    "infinite": lambda v: torch.full_like(v, inf),
    "sparse": lambda v: v.to_sparse(),
    "list": lambda v: v.tolist(),
    "none": lambda v: None,
    "gone": lambda v: GONE,
}


@pytest.mark.parametrize("bad", BAD_VECTORS)
@pytest.mark.parametrize("model", MODELS)
def test_an_optimizer_state_that_does_not_lie_as_its_parameter_is_refused_before_a_kernel_writes_there(changed, contents, model, bad):
    for number, optimizer in enumerate(contents[model]["optimizer_states"]):
        for name in optimizer["state"][0].keys() - {"step"}:
            if bad in ("short", "repeated", "strided") and len(optimizer["state"][0][name]) == 1:
                continue  # SAC's temperature is one number
            value = BAD_VECTORS[bad](optimizer["state"][0][name])
            refused(changed(value, "optimizer_states", number, "state", 0, name, model=model), model)


@pytest.mark.parametrize("model", MODELS)
def test_negative_squares_are_refused(changed, contents, model):
    for number, optimizer in enumerate(contents[model]["optimizer_states"]):
        name = "square_avg" if "square_avg" in optimizer["state"][0] else "exp_avg_sq"
        value = optimizer["state"][0][name] - 1e9
        assert name in refused(changed(value, "optimizer_states", number, "state", 0, name, model=model), model)


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_has_as_many_optimizers_as_the_model(changed, contents, model):
    states = contents[model]["optimizer_states"]
    for some in (states[1:], [*states, states[0]], []):
        assert "optimizers" in refused(changed(some, "optimizer_states", model=model), model)


@pytest.mark.parametrize("bad", ["short", "long", "repeated", "strided", "wide", "whole", "nan", "sparse", "list", "gone"])
def test_adam_itself_takes_no_state_of_another_shape(bad):
    network = torch.nn.Linear(3, 2)
    optimizer = FlatAdam(network)
    optimizer.step()
    good = optimizer.state_dict()
    FlatAdam(network).load_state_dict(copy.deepcopy(good))
    for name in ("exp_avg", "exp_avg_sq"):
        state = copy.deepcopy(good)
        value = BAD_VECTORS[bad](state["state"][0].pop(name))
        state["state"][0] |= {} if value is GONE else {name: value}
        with pytest.raises(SettingError):
            FlatAdam(network).load_state_dict(state)


def test_a_momentum_that_the_optimizer_has_no_memory_of_is_refused():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = RMSprop([parameter])
    optimizer.step()
    check_optimizer(optimizer.state_dict(), optimizer)
    for name, value in {"momentum": 0.9, "centered": True, "lr": "x", "alpha": nan, "eps": None}.items():
        state = copy.deepcopy(optimizer.state_dict())
        state["param_groups"][0][name] = value
        with pytest.raises(SettingError, match=name):
            check_optimizer(state, optimizer)


CASES = [
    *[((*STATE, "step"), value) for value in ("x", -1, nan, inf, None, torch.zeros(2), torch.tensor(-1.0), torch.tensor(3), GONE)],
    *[((*GROUP, "betas"), value) for value in ("ab", (0.9,), (0.9, "x"), (nan, 0.9), 3, None, GONE)],
    *[((*GROUP, name), value) for name in ("lr", "eps") for value in ("x", nan, -1.0, True, 1 << 2000, GONE)],
    *[((*GROUP, "params"), value) for value in ([1], [], [0, 1], 3, ["x"], GONE)],
    *[(OPTIMIZER, value) for value in (3, None, {}, {"state": {}, "param_groups": []}, {"state": 3, "param_groups": [{"params": [0]}]})],
    *[((*OPTIMIZER, "state"), value) for value in ({5: {}}, {"x": {}}, {0: 3}, {0: {}}, 3, GONE)],
    *[(("optimizer_states",), value) for value in (3, {}, "x", None, [3], GONE)],
    *[(("lr_schedulers",), value) for value in (3, GONE)],
    *[(("pytorch-lightning_version",), value) for value in (3, None, "", "x", "1.0.0", "2", GONE)],
    *[(("global_step",), value) for value in ("x", -1, nan)],
    *[(("loops",), value) for value in (3, {}, [], "x", {"fit_loop": 3}, {"fit_loop": {"epoch_progress": 3}}, {"fit_loop": {3: {}}})],
    *[(PROGRESS, value) for value in (3, {}, {"total": {}}, {"total": 3, "current": 3}, {"total": {"x": 3}, "current": {}})],
    *[((*PROGRESS, "total", "ready"), value) for value in (nan, "x", -1, 1.5, None, 1 << 70)],
    (("loops", "fit_loop", "epoch_loop.batch_progress", "is_last_batch"), GONE),
    (("loops", "fit_loop", "epoch_loop.state_dict", "_batches_that_stepped"), "x"),
    *[(("callbacks",), value) for value in (3, [], "x", None, {"BestModel": 3}, {"BestModel": {}}, {"BestModel": {"best": "x"}}, {3: {}})],
    *[(("callbacks",), {"RolloutEvaluator{'seed': 1}": {"evaluated_at": value}}) for value in ("x", None, nan)],
    (("callbacks",), {"RolloutEvaluator": {"evaluated_at": 1, "reports_success": 1}}),
    (("callbacks",), {"Curriculum": {"lessons": {"a": 0}, "smoothed": {"a": 0.0}, "windows": {"a": []}, "unreported": "x"}}),
    *[
        (("callbacks",), {"Curriculum": {"lessons": {"a": lesson}, "smoothed": {"a": smoothed}, "windows": {"a": window}}})
        for lesson, smoothed, window in ((-1, 0.0, []), ("x", 0.0, []), (0, nan, []), (0, None, []), (0, 0.0, 3), (0, 0.0, ["x"]))
    ],
    *[(("callbacks",), {"Curriculum": value}) for value in ({}, {"lessons": {}}, {"lessons": {"a": 0}, "smoothed": {}, "windows": {}})],
    *[(("lightning_rl", "ranks"), value) for value in (3, [3], [{}], [None], "a", {}, None)],
    *[((*RANK, "num_envs"), value) for value in (0, -1, 2.0, "x", True, nan, 1 << 70, 3, GONE)],
    *[((*COLLECTOR, name), value) for name in ("env_steps", "rows") for value in (nan, -5, "x", inf, 1.5, None, 1 << 70, GONE)],
    ((*COLLECTOR, "env_steps"), 63),
    *[((*STATISTICS, "episodes"), value) for value in (nan, -5, "x", GONE)],
    *[((*STATISTICS, "running_length"), value) for value in ([1 << 70, 1], torch.zeros(2), torch.zeros(3, dtype=torch.int64), GONE)],
    *[((*STATISTICS, "running_return"), value) for value in ([1.0, 1.0], torch.zeros(2), torch.full((2,), nan).double())],
    *[((*STATISTICS, "returns"), value) for value in (["a"], [nan], 3, "ab", [[1]], GONE)],
    *[((*STATISTICS, "parameters"), value) for value in (3, {"a": 3}, {"a": ["x"]}, {3: []})],
    ((*COLLECTOR, "episodes", "begin_anew"), torch.zeros(2)),
    *[((*COLLECTOR, "episodes", "obs"), value) for value in (torch.zeros(7), torch.zeros(2), 3, {"x": torch.zeros(2, 3)}, GONE)],
    *[((*COLLECTOR, "episodes", name), 3) for name in ("start", "envs")],
    *[((*COLLECTOR, "episodes"), value) for value in (3, {}, "x")],
    *[((*RANK, "log", name), value) for name in ("logged_env_steps", "elapsed") for value in ("x", nan, None, GONE)],
    *[((*RANK, "guard", "bad_updates"), value) for value in (3, {"loss": "x"}, {3: 3}, GONE)],
    *[((*RANK, "guard", "bad_steps"), value) for value in ("x", -1, nan, GONE)],
    *[((*RANK, "beside"), value) for value in (3, [3], {}, GONE)],
    *[((*RANK, name), value) for name in ("data", "log", "guard", "random", "learning", "noise") for value in (3, {}, GONE)],
    *[((*RANK, "random", "python"), value) for value in ((3, (1 << 70,) * 625, None), (3, (1, 2), None), (2, (1,) * 625, None), 3, GONE)],
]
WORDS = torch.zeros(624, dtype=torch.uint32)
CASES += [
    ((*RANK, "random", "numpy"), ("MT19937", *rest)) for rest in ((1 << 70, 1), (WORDS, 10**6), (WORDS, -1), (WORDS[:3], 1), (WORDS,))
]


@pytest.mark.parametrize(
    ("place", "value"), CASES, ids=[f"{'.'.join(map(str, place))}-{number}" for number, (place, _) in enumerate(CASES)]
)
def test_a_run_with_something_else_in_a_place_is_refused_in_one_line(changed, place, value):
    refused(changed(value, *place))


DATA = *RANK, "data"
REPLAYED = [((*DATA, name), value) for name in ("learning_starts", "random_until", "phases") for value in ("x", nan, inf, [])]
REPLAYED += [((*DATA, "rows"), value) for value in ("x", 3, torch.zeros(3), torch.tensor([-1]))] + [((*DATA, "replay"), 3)]


@pytest.mark.parametrize(("place", "value"), REPLAYED)
def test_a_replay_with_something_else_in_a_place_is_refused_in_one_line(changed, place, value):
    refused(changed(value, *place, model="DQN"), "DQN")


HARDEST = [((*STATE, "exp_avg"), torch.zeros(1)), ((*COLLECTOR, "env_steps"), nan), (("loops",), {}), (("callbacks",), 3)]
HARDEST += [(("optimizer_states",), GONE), (("pytorch-lightning_version",), 3), ((*RANK, "guard", "bad_updates"), 3)]


@pytest.mark.parametrize(("place", "value"), HARDEST)
def test_the_program_ends_with_one_line_and_leaves_nothing(changed, place, value, capfd, tmp_path, monkeypatch):
    path = changed(value, *place)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    status, _, said = run(f"fit {SETTINGS} --model.net_arch [8] --ckpt_path {path}", capfd)
    assert (status, said.count("\n")) == (2, 1) and len(said) <= 201, said
    assert list((tmp_path / "work").iterdir()) == []


def test_a_checkpoint_that_lightning_alone_saved_goes_on(tmp_path):
    model = tiny(PPO, max_env_steps=32)
    fit(model).save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert check_fits(tiny(PPO), tmp_path / "a.ckpt") == 32
