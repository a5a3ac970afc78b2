"""The state of a run in a checkpoint is data from others: it is refused in one line before a kernel, a loop or a generator takes it."""

from __future__ import annotations

import copy
import itertools
from math import inf, nan

import pytest
import torch
from torch.optim import Adam, RMSprop

from lightning_rl import A2C, DQN, LSTM, PPO, SAC, TD3, SettingError, Trainer
from lightning_rl.checkpoints.validation import check_optimizer
from lightning_rl.optimization import ScheduledAdam
from lightning_rl.training.resuming import check_fits
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
    """Train each model for a few iterations; what its checkpoint holds."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name, (algorithm, settings) in MODELS.items():
        model = tiny(algorithm, max_env_steps=64, **settings)
        trainer = Trainer(default_root_dir=folder / name, accelerator="cpu", enable_progress_bar=False, evaluation=None)
        trainer.fit(model)
        made[name] = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)
    return made


@pytest.fixture(scope="module")
def models():
    return {name: tiny(algorithm, **settings) for name, (algorithm, settings) in MODELS.items()}


def replaced(tree, place, value):
    """Copy a tree with another value at a place; what is not on the way there is shared."""
    if not place:
        return value
    tree = copy.copy(tree)
    if value is GONE and len(place) == 1:
        del tree[place[0]]
    else:
        tree[place[0]] = replaced(tree[place[0]], place[1:], value)
    return tree


@pytest.fixture
def refusals(contents, models, tmp_path):
    """Continue each model from checkpoints with one place changed; the message of each, which is one short line."""

    def refuse(cases, model="PPO"):
        for place, value in cases:
            torch.save(replaced(contents[model], place, value), tmp_path / "changed.ckpt")
            try:
                check_fits(models[model], tmp_path / "changed.ckpt")
            except SettingError as error:
                assert "\n" not in str(error) and len(str(error)) <= 200, (place, value, str(error))
                yield place, value, str(error)
            else:
                pytest.fail(f"{model}: {value!r} at {place} was not refused")

    return lambda cases, model="PPO": list(refuse(cases, model))


@pytest.mark.thorough
def test_a_saved_run_can_continue_and_checking_leaves_the_model_as_it_was(contents, models, tmp_path):
    for name, model in models.items():
        before = [(parameter.data_ptr(), parameter.grad) for parameter in model.parameters()]
        torch.save(contents[name], tmp_path / "a.ckpt")
        assert check_fits(model, tmp_path / "a.ckpt") == 64
        assert [(parameter.data_ptr(), parameter.grad) for parameter in model.parameters()] == before


def in_one_vector(state):
    """The state of an optimizer as version 0.1.0 wrote it: one vector for all parameters."""
    states = [state["state"][number] for number in state["param_groups"][0]["params"]]
    moments = {name: torch.cat([each[name].flatten() for each in states]) for name in states[0].keys() - {"step"}}
    return {"state": {0: {"step": states[0]["step"], **moments}}, "param_groups": [state["param_groups"][0] | {"params": [0]}]}


@pytest.mark.thorough
def test_optimizers_with_one_vector_as_in_version_0_1_0_are_accepted(contents, models, tmp_path):
    for name, model in models.items():
        states = list(map(in_one_vector, contents[name]["optimizer_states"]))
        torch.save(contents[name] | {"optimizer_states": states}, tmp_path / "a.ckpt")
        assert check_fits(model, tmp_path / "a.ckpt") == 64


@pytest.mark.parametrize("name", ["PPO", "A2C", "A2C with Adam"])
def test_a_run_whose_optimizers_have_one_vector_as_in_version_0_1_0_continues_as_that_of_today(name, contents, tmp_path):
    def continued(states):
        algorithm, settings = MODELS[name]
        torch.save(contents[name] | {"optimizer_states": states}, tmp_path / "run.ckpt")
        model = tiny(algorithm, max_env_steps=96, **settings)
        trainer = Trainer(
            default_root_dir=tmp_path / str(states[0]["param_groups"][0]["params"]),
            accelerator="cpu",
            enable_progress_bar=False,
            evaluation=None,
        )
        trainer.fit(model, ckpt_path=tmp_path / "run.ckpt")
        return torch.nn.utils.parameters_to_vector(model.parameters())

    states = contents[name]["optimizer_states"]
    assert torch.equal(continued(list(map(in_one_vector, states))), continued(states))


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


@pytest.mark.variants
@pytest.mark.parametrize("model", [pytest.param(name, marks=[] if name in ("A2C", "SAC") else [pytest.mark.slow]) for name in MODELS])
def test_optimizer_state_in_another_layout_than_its_parameter_is_refused_before_a_kernel_writes_there(refusals, contents, model):
    for number, optimizer in enumerate(contents[model]["optimizer_states"]):
        state = optimizer["state"][0]
        for name in state.keys() - {"step"}:
            bad = {key: make(state[name]) for key, make in BAD_VECTORS.items()}
            if len(state[name]) == 1:  # SAC's temperature is one number
                bad = {key: value for key, value in bad.items() if key not in ("short", "repeated", "strided")}
            refusals([(("optimizer_states", number, "state", 0, name), value) for value in bad.values()], model)
        squares = "square_avg" if "square_avg" in state else "exp_avg_sq"
        ((_, _, message),) = refusals([(("optimizer_states", number, "state", 0, squares), state[squares] - 1e9)], model)
        assert squares in message


@pytest.mark.thorough
def test_a_checkpoint_has_as_many_optimizers_as_the_model(refusals, contents):
    for model in MODELS:
        states = contents[model]["optimizer_states"]
        found = refusals([(("optimizer_states",), some) for some in (states[1:], [*states, states[0]], [])], model)
        assert all("optimizers" in message for *_, message in found)


def test_adam_itself_takes_no_state_of_another_shape():
    network = torch.nn.Linear(3, 2)
    optimizer = ScheduledAdam(network)
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    good = optimizer.state_dict()
    ScheduledAdam(network).load_state_dict(copy.deepcopy(good))
    for name, bad in itertools.product(("exp_avg", "exp_avg_sq"), BAD_VECTORS.values()):
        with pytest.raises(SettingError):
            ScheduledAdam(network).load_state_dict(replaced(good, ("state", 0, name), bad(good["state"][0][name])))


def test_every_state_of_torchs_optimizers_is_checked():
    """Fails when torch adds or renames what its kernels read."""
    for kind, settings in [(Adam, {"amsgrad": True}), (RMSprop, {"centered": True, "momentum": 0.9})]:
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = torch.ones(3)
        optimizer = kind([parameter], **settings)
        optimizer.step()
        good = optimizer.state_dict()
        check_optimizer(good, optimizer)
        for name in good["state"][0]:
            with pytest.raises(SettingError, match=name):
                check_optimizer(replaced(good, ("state", 0, name), torch.zeros(7)), optimizer)


@pytest.mark.thorough
def test_every_count_of_lightnings_loops_is_checked(refusals, contents):
    """Fails when Lightning adds or renames what its loops take over from a file."""

    def counts(tree, place):
        if isinstance(tree, dict):
            return [found for key, child in tree.items() for found in counts(child, (*place, key))]
        return [place] if type(tree) in (int, bool) else []

    places = counts(contents["PPO"]["loops"]["fit_loop"], ("loops", "fit_loop"))
    assert len(places) > 40
    refusals([(place, "x") for place in places])


def test_a_momentum_that_the_optimizer_has_no_state_for_is_refused():
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


@pytest.mark.thorough
def test_a_run_with_something_else_in_a_place_is_refused_in_one_line(refusals):
    refusals(CASES)


def test_a_refusal_names_the_place_and_what_is_allowed_there(refusals):
    ((_, _, message),) = refusals([((*COLLECTOR, "env_steps"), nan)])
    assert message.endswith("cannot be continued: lightning_rl/ranks/0/data/collector/env_steps must be an integer >= 0, got nan")


DATA = *RANK, "data"
REPLAYED = [((*DATA, name), value) for name in ("learning_starts", "random_until", "phases") for value in ("x", nan, inf, [])]
REPLAYED += [((*DATA, "rows"), value) for value in ("x", 3, torch.zeros(3), torch.tensor([-1]))] + [((*DATA, "replay"), 3)]


@pytest.mark.thorough
def test_a_replay_with_something_else_in_a_place_is_refused_in_one_line(refusals):
    refusals(REPLAYED, "DQN")


@pytest.mark.thorough
def test_the_program_ends_with_one_line_and_leaves_nothing(contents, capfd, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for place, value in [((*STATE, "exp_avg"), torch.zeros(1)), ((*COLLECTOR, "env_steps"), nan), (("optimizer_states",), GONE)]:
        torch.save(replaced(contents["PPO"], place, value), tmp_path / "changed.ckpt")
        status, _, message = run(f"fit {SETTINGS} --model.net_arch [8] --ckpt_path {tmp_path / 'changed.ckpt'}", capfd)
        assert (status, message.count("\n")) == (2, 1) and len(message) <= 201, message
        assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"net_arch": [6]}, "net_arch"),
        ({"normalize_obs": "running", "max_env_steps": 64}, "normalize_obs"),
        ({"gamma": 0.5, "memory": LSTM(4, 4)}, "gamma, memory"),
    ],
)
def test_weights_of_other_settings_are_refused_with_the_settings_that_changed(settings, changed, tmp_path):
    fit(tiny(PPO, max_env_steps=32)).save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    with pytest.raises(SettingError, match=rf"does not fit the model: .*; use the same settings; changed: .*{changed}$"):
        check_fits(tiny(PPO, **settings), tmp_path / "a.ckpt")


def test_a_checkpoint_that_lightning_alone_saved_can_be_continued(tmp_path):
    model = tiny(PPO, max_env_steps=32)
    fit(model).save_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert check_fits(tiny(PPO), tmp_path / "a.ckpt") == 32
