"""Every option of every algorithm changes what is learned: an option without a row here is a failure."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_rl import A2C, DQN, GRU, IMPALA, LSTM, POCA, PPO, PQN, SAC, TD3, TRPO, BehavioralCloning, EvolutionStrategies
from lightning_rl.data.replay.buffer import ReplayBuffer
from lightning_rl.data.replay.storage import DerivedNext, ReplayConfig, StoredNext
from lightning_rl.errors import SettingError
from lightning_rl.spaces import Spaces
from lightning_rl.training.arguments import settings_of
from tests.environments import Scripted, ScriptedBox
from tests.experts import at_random
from tests.fitting import ALL, OFF_POLICY, ON_POLICY, TWINS, Rows, fit, tiny, weights


class Option(NamedTuple):
    """A value that must lead to other weights than the one in `given`, of the tiny model, or by default."""

    value: Any
    env_id: str = "Scripted-v0"
    given: dict[str, Any] = {}  # noqa: RUF012


GAME = "tests.agents.FirstWins"
PAST = {"self_play": {"save_steps": 8}}
TEAMS = {"self_play": {"save_steps": 8, "teams": ["red_*", "blue_*"]}}
BOX = {
    "Scripted-v0": "ScriptedBox-v0",
    "Image-v0": "ImageBox-v0",
    "Crowd-v0": "CrowdBox-v0",
    "Goals-v0": "GoalsBox-v0",
    GAME: "tests.agents.Duel",
}
"""What TD3 is trained on instead."""
CRITIC_OBS = [Option(["goal"], "Crowd-v0"), Option(["body"], "Crowd-v0", given={"critic_obs": ["goal"]})]
COMMON = {
    "learning_rate": [Option(0.01), Option({"schedule": "linear", "start": 0.01}, given={"learning_rate": 0.01})],
    "gamma": [Option(0.5)],
    "max_grad_norm": [Option(0.01), Option(None, given={"max_grad_norm": 0.01})],
    "net_arch": [Option([6]), Option([8, 8]), Option([])],
    "activation": [Option("silu"), Option("gelu", given={"activation": "relu"})],
    "encoder": [Option("mlp", "Image-v0"), Option("fully_connected", "Image-v0")],
    "encoder_features": [Option(4, "Image-v0")],
    "entities": [Option(["agents"], "Crowd-v0")],
    "goals": [Option(["goal"], "Crowd-v0"), Option(["body"], "Crowd-v0", given={"goals": ["goal"]})],
    "normalize_obs": [Option("running"), Option("frozen", given={"normalize_obs": "running", "normalize_obs_steps": 20})],
    "normalize_obs_steps": [Option(20, given={"normalize_obs": "frozen", "normalize_obs_steps": 40})],
    "normalize_reward": [Option(True)],
    "clip_reward": [Option(1.0)],
    "reward_scale": [Option(0.1)],
    "reward_signals": [
        Option({"extrinsic": {"strength": 0.5}}),
        Option({"rnd": {}}),
        Option({"rnd": {"strength": 0.0}}, given={"reward_signals": {"rnd": {}}}),
        Option({"curiosity": {}}, given={"reward_signals": {"rnd": {}}}),
        Option({"extrinsic": None, "rnd": {}}, given={"reward_signals": {"rnd": {}}}),
    ],
    "reward_signal_steps_per_update": [Option(40.0, given={"reward_signals": {"rnd": {}}})],
    "behavioral_cloning": [
        Option({}),
        *(
            Option(setting, given={"behavioral_cloning": {}})
            for setting in ({"strength": 0.1}, {"steps": 40}, {"batch_size": 4}, {"n_epochs": 2}, {"samples_per_update": 16, "n_epochs": 1})
        ),
    ],
    "self_play": [
        Option(PAST["self_play"], GAME),
        Option({"save_steps": 48}, GAME, given=PAST),
        Option({"save_steps": 8, "window": 1}, GAME, given=PAST),
        Option({"save_steps": 8, "play_against_latest_model_ratio": 0.0}, GAME, given=PAST),
        Option({"save_steps": 8, "opponents": ["random"]}, GAME, given=PAST),
        Option(TEAMS["self_play"], "tests.agents.Squads", given=PAST),
    ],
    "memory": [Option(LSTM(4, 4)), Option(GRU(4, 4), given={"memory": LSTM(8, 4)})],
}
EXPLORING = {"use_sde": True}
SDE = {
    "use_sde": [Option(True, "ScriptedBox-v0")],
    "sde_sample_freq": [Option(1, "ScriptedBox-v0", given=EXPLORING), Option(3, "ScriptedBox-v0", given=EXPLORING)],
    "use_expln": [Option(True, "ScriptedBox-v0", given={**EXPLORING, "log_std_init": 0.5})],
    "full_std": [Option(False, "ScriptedBox-v0", given={**EXPLORING, "learning_rate": 0.05})],
}
ON = SDE | {
    "n_steps": [Option(4)],
    "gae_lambda": [Option(0.5)],
    "ent_coef": [Option(0.1), Option({"schedule": "linear", "start": 0.1}, given={"ent_coef": 0.1})],
    "vf_coef": [Option(0.1)],
    "critic_burn_in_steps": [Option(16)],
    "value_transform": [Option("signed_hyperbolic"), Option("symlog", given={"value_transform": "signed_hyperbolic"})],
    "value_support": [Option([-5, 5]), Option([-5, 6], given={"value_support": [-5, 5]})],
    "share_encoder": [Option(False, "Image-v0")],
    "critic_obs": CRITIC_OBS,
    "action_dist": [Option("tanh_normal", "ScriptedBox-v0")],
    "log_std_init": [Option(-1.0, "ScriptedBox-v0")],
    "ortho_init": [Option(False)],
}
PRIORITIZED = {"replay": {"prioritized": True}}


class Demonstrations(list[Any]):
    """Random episodes of an environment, whose name is their representation."""

    def __init__(self, env_id: str) -> None:
        super().__init__(at_random(f"tests.environments:{env_id}", "{}"))
        self.env_id = env_id

    def __repr__(self) -> str:
        return f"Demonstrations({self.env_id!r})"


def replaying(env_id: str) -> list[Option]:
    """Return the options of the replay buffer, with demonstrations of an environment."""
    half = {"demonstrations": Demonstrations(env_id), "demonstration_share": 0.5}
    return [
        Option({"prioritized": True}),
        Option({"prioritized": True, "alpha": 0.1}, given=PRIORITIZED),
        Option({"prioritized": True, "beta": 1.0}, given=PRIORITIZED),
        Option({"replace": False}),
        Option({"demonstrations": Demonstrations(env_id)}),
        Option({"demonstrations": Demonstrations(env_id)}, given={"replay": half}),
        Option({**half, "demonstration_share": 0.25}, given={"replay": half}),
        Option({"relabel": {}}, "Goals-v0"),
        *(
            Option({"relabel": setting}, "Goals-v0", given={"replay": {"relabel": {}}})
            for setting in ({"k": 1}, {"strategy": "final"}, {"strategy": "episode"})
        ),
    ]


MIXED = {"env": {"kwargs": {"action": "hybrid"}}}
OFF = {
    "buffer_size": [Option(20)],
    "batch_size": [Option(16)],
    "learning_starts": [Option(24)],
    "train_freq": [Option(8)],
    "gradient_steps": [Option(2), Option(-1)],
    "steps_per_iteration": [Option(32)],
    "n_steps": [Option(3)],
    "warmup": [Option("policy")],
    "replay": replaying("Scripted-v0"),
    "tau": [Option(0.5)],
}
CRITICS = {
    "n_critics": [Option(1), Option(3)],
    "critic_subset": [Option(1), Option(1, given={"n_critics": 3, "critic_subset": 2})],
    "n_quantiles": [Option(5, "ScriptedBox-v0"), Option(6, "ScriptedBox-v0", given={"n_quantiles": 5})],
    "drop_quantiles": [Option(2, "ScriptedBox-v0", given={"n_quantiles": 5})],
    "critic_net_arch": [Option([6]), Option([])],
    "critic_layers": [Option("layer_norm"), Option("simba"), Option("simba", given={"critic_layers": "layer_norm"})],
    "critic_dropout": [Option(0.5), Option(0.5, given={"critic_layers": "simba"}), Option(0.5, given={"critic_layers": "layer_norm"})],
    "actor_layers": [Option("layer_norm"), Option("simba")],
}
OWN = {
    PPO: ON
    | {
        "batch_size": [Option(16)],
        "n_epochs": [Option(1)],
        "clip_range": [
            Option(0.01, given={"learning_rate": 0.01}),
            Option({"schedule": "linear", "start": 0.01}, given={"clip_range": 0.01, "learning_rate": 0.01}),
        ],
        "clip_range_vf": [Option(0.1, given={"learning_rate": 0.01}), Option(0.01, given={"clip_range_vf": 0.1, "learning_rate": 0.01})],
        "normalize_advantage": [Option(False)],
        "target_kl": [Option(1e-9)],
        "threaded": [Option(True)],
        "ratio": [Option("per_dim", "ScriptedBox-v0"), Option("per_part", "Anything-v0", given=MIXED)],
    },
    A2C: ON
    | {
        "normalize_advantage": [Option(True)],
        "use_rms_prop": [Option(False)],
        "rms_prop_eps": [Option(0.1)],
    },
    IMPALA: {name: rows for name, rows in ON.items() if name != "gae_lambda"}
    | {
        "actors": [Option({"num_actors": 2, "backend": "in_process"})],
        "clip_rho": [],  # the largest weights are those of older policies, see test_impala.py
        "clip_c": [Option(0.1)],
        "clip_pg_rho": [Option(0.5)],
        "lambda_": [Option(0.5)],
        "use_rms_prop": [Option(False)],
        "rms_prop_eps": [Option(0.1)],
    },
    PQN: {
        "max_grad_norm": [Option(0.01)],
        "n_steps": [Option(4)],
        "batch_size": [Option(16)],
        "n_epochs": [Option(1)],
        "q_lambda": [Option(0.1)],
        "exploration_fraction": [Option(0.9)],
        "exploration_initial_eps": [Option(0.5, given={"exploration_fraction": 0.9})],
        "exploration_final_eps": [Option(0.5)],
        "layer_norm": [Option(False)],
        "goals": [
            Option(["goal"], "Crowd-v0", given={"layer_norm": False}),
            Option(["body"], "Crowd-v0", given={"goals": ["goal"], "layer_norm": False}),
        ],
    },
    TRPO: {name: rows for name, rows in ON.items() if name not in ("ent_coef", "vf_coef", "critic_burn_in_steps", "share_encoder")}
    | {
        "max_grad_norm": [Option(0.01)],
        "batch_size": [Option(16)],
        "normalize_advantage": [Option(False)],
        "target_kl": [Option(0.001)],
        "cg_max_steps": [Option(1)],
        "cg_damping": [Option(1.0)],
        "line_search_shrinking_factor": [Option(0.3, given={"cg_damping": 0.0, "target_kl": 1.0})],
        "line_search_max_iter": [Option(1, given={"cg_damping": 0.0, "target_kl": 1.0})],
        "n_critic_updates": [Option(1)],
    },
    POCA: {name: rows for name, rows in ON.items() if name != "ortho_init"}
    | {
        "batch_size": [Option(8)],
        "n_epochs": [Option(1)],
        "clip_range": [Option(0.01, given={"learning_rate": 0.01})],
        "clip_range_vf": [Option(0.1, given={"learning_rate": 0.01})],
        "normalize_advantage": [Option(False)],
        "target_kl": [Option(1e-9)],
        "ratio": [Option("per_dim", "ScriptedBox-v0")],
        "counterfactual": [Option(False)],
        "baseline_coef": [Option(1.0)],
        "group_reward": [Option("mean")],
        "attention_size": [Option(8)],
        "self_play": [
            Option(TEAMS["self_play"], "tests.agents.Squads"),
            Option({"save_steps": 8, "teams": ["*_0", "*_1"]}, "tests.agents.Squads", given=TEAMS),
        ],
    },
    SAC: OFF
    | CRITICS
    | SDE
    | {
        "log_std_init": [Option(-1.0, "ScriptedBox-v0", given=EXPLORING)],
        "target_update_interval": [Option(4)],
        "critic_obs": CRITIC_OBS,
        "policy_delay": [Option(2)],
        "adam_beta1": [Option(0.5)],
        "ent_coef": [Option(0.1), Option(0, given={"ent_coef": 0.1}), Option("auto_0.1"), Option("auto_0.1", given={"ent_coef": 0.1})],
        "target_entropy": [Option(0.1), Option({"continuous": 5.0}, "ScriptedBox-v0")],
        "target_entropy_multiplier": [Option(2.0, "ScriptedBox-v0", given={"learning_rate": 0.05})],
        "target_entropy_scale": [Option(0.2)],
        "value_network": [Option(True)],
        "threaded": [Option(True)],
    },
    DQN: OFF
    | {
        "target_update_interval": [Option(1)],
        "exploration_fraction": [Option(0.9)],
        "exploration_initial_eps": [Option(0.5, given={"exploration_fraction": 0.9})],
        "exploration_final_eps": [Option(0.5)],
        "double": [Option(True, given={"learning_rate": 0.1})],
        "dueling": [Option(True)],
        "noisy": [Option(True)],
        "distribution": [Option("c51"), Option("quantiles", given={"distribution": "c51", "n_atoms": 50})],
        "n_atoms": [Option(11, given={"distribution": "c51"})],
        "v_min": [Option(-20.0, given={"distribution": "c51"})],
        "v_max": [Option(20.0, given={"distribution": "c51"})],
        "n_quantiles": [Option(10, given={"distribution": "quantiles"})],
        "value_transform": [Option("signed_hyperbolic"), Option("symlog", given={"value_transform": "signed_hyperbolic"})],
        "adam_eps": [Option(0.1)],
    },
    TD3: OFF
    | CRITICS
    | {
        "replay": replaying("ScriptedBox-v0")[:1],
        "policy_delay": [Option(1)],
        "action_noise": [Option(0.5)],
        "target_policy_noise": [Option(0.0)],
        "target_noise_clip": [Option(0.1)],
    },
    BehavioralCloning: {
        "dataset": [Option(at_random("tests.environments:Scripted-v0", "{}", episodes=7))],
        "batch_size": [Option(16)],
        "updates_per_iteration": [Option(8, given={"learning_rate": {"schedule": "linear", "start": 0.01}})],
        "loss": [Option("mse", "ScriptedBox-v0")],
        "label_smoothing": [Option(0.1)],
        "ent_coef": [Option(0.1), Option({"schedule": "linear", "start": 0.1}, given={"ent_coef": 0.1})],
        "validation_fraction": [Option(0.5)],
        "split_seed": [Option(1)],
        "normalize_obs": [Option("running"), Option("frozen")],
        "share_encoder": [Option(False, "Image-v0")],
        "action_dist": [Option("tanh_normal", "ScriptedBox-v0")],
        "log_std_init": [Option(-1.0, "ScriptedBox-v0")],
    },
    EvolutionStrategies: {
        "episodes_per_generation": [Option(6)],
        "min_steps_per_generation": [Option(13)],
        "sigma": [Option(0.1), Option({"schedule": "linear", "start": 0.1}, given={"sigma": 0.1})],
        "shaping": [
            Option("centred_ranks"),
            Option("z_scores"),
            *(Option(name, given={"shaping": "centred_ranks"}) for name in ("signs", "centred_sign_ranks")),
        ],
        "top_directions": [Option(1)],
        "alive_bonus_offset": [Option(-1.0, "CartPole-v1", given={"max_env_steps": 200})],
        "zero_policy": [Option(True)],
        "l2": [Option(0.1)],
        "optimizer": [Option("sgd")],
        "momentum": [Option(0.5, given={"optimizer": "sgd"})],
        "stochastic": [Option(True)],
        "action_noise": [Option(0.5, "ScriptedBox-v0", given={"stochastic": True})],
        "max_length_ratio": [Option(1.0, "CartPole-v1", given={"max_env_steps": 200})],
        "normalize_obs_share": [Option(1.0, given={"normalize_obs": "running"})],
        "action_dist": [Option("tanh_normal", "ScriptedBox-v0")],
    },
}
OTHERS = {"env", "spaces", "log_interval", "on_nan", "compile"}
"""Options, as well as the length of the run, that do not change weights; see the tests below."""
WITHOUT_EFFECT = {EvolutionStrategies: {"actors"}}
REPLAY_WITHOUT_EFFECT = {"optimize_memory_usage", "directory"}

EVERYONE = [*ALL, TRPO, PQN, POCA, BehavioralCloning, EvolutionStrategies]
EXAMPLES = {PPO, SAC}
"""Algorithms that are tested with all values of options that several algorithms share; the others with the first one."""
OF_NETWORKS = {
    "activation",
    "net_arch",
    "encoder",
    "encoder_features",
    "entities",
    "goals",
    "memory",
    "reward_signals",
    "behavioral_cloning",
    "self_play",
}
"""Options of parts that are built in one place for all."""
everyone = pytest.mark.parametrize("algorithm", EVERYONE)
every_algorithm = pytest.mark.parametrize("algorithm", ALL)
every_replaying_algorithm = pytest.mark.parametrize("algorithm", OFF_POLICY)


def train(algorithm: type, env_id: str, settings: dict[str, Any]) -> Any:
    """Return a model after three iterations."""
    env_id = BOX.get(env_id, env_id) if algorithm is TD3 else env_id
    if "behavioral_cloning" in settings:
        shown = {"demo_path": at_random(f"tests.environments:{env_id}", "{}")}
        settings = settings | {"behavioral_cloning": settings["behavioral_cloning"] | shown}
    model = tiny(
        algorithm,
        env_id if "." in env_id else f"tests.environments:{env_id}",
        **({f"max_{algorithm.counter}": 48, "encoder_features": 8} | settings),
    )
    fit(model)
    return model


def trained(algorithm: type, env_id: str, settings: dict[str, Any]) -> Tensor:
    """Return the heads and hidden layers after three iterations."""
    model = train(algorithm, env_id, settings)
    networks = [model.network, getattr(model, "critic", model.network)]
    parts = [part for network in networks for name, part in network.named_children() if name in ("actor", "critic", "layers", "head")]
    return torch.nn.utils.parameters_to_vector([parameter for part in parts for parameter in part.parameters()])


@cache
def trained_once(algorithm: type, env_id: str, settings: str) -> Tensor:
    """Return the same, for settings that many options start from."""
    return trained(algorithm, env_id, eval(settings, {"LSTM": LSTM, "GRU": GRU, "Demonstrations": Demonstrations}))


def is_shared(algorithm: type, name: str) -> bool:
    """Whether the code behind an option is that of another algorithm too, which is tested with it."""
    return (algorithm not in EXAMPLES and name in OF_NETWORKS) or (algorithm in TWINS and name in COMMON | ON | OFF)


def meaningless(algorithm: type) -> set[str]:
    """Return the settings of the base that an algorithm does not have."""
    return {field.name for field in fields(algorithm) if not field.init}


def options(algorithm: type) -> dict[str, list[Option]]:
    """Return the options of an algorithm; it may have some of the common ones in its own way, and others not at all."""
    found = {name: rows for name, rows in COMMON.items() if name not in meaningless(algorithm)} | OWN[algorithm]
    shared = [] if algorithm in EXAMPLES else [*COMMON.values(), *ON.values(), *OFF.values(), *CRITICS.values(), *SDE.values()]
    return {name: rows[:1] if any(rows is each for each in shared) else rows for name, rows in found.items()}


@everyone
def test_every_option_is_tested(algorithm):
    others = OTHERS - ({"compile"} & meaningless(algorithm)) | WITHOUT_EFFECT.get(algorithm, set()) | {f"max_{algorithm.counter}"}
    assert settings_of(algorithm).keys() == options(algorithm).keys() | others
    assert meaningless(algorithm) <= COMMON.keys() | ON.keys() | {"max_env_steps", "compile"}


def test_every_option_of_the_replay_buffer_is_tested():
    tested = {name for option in OFF["replay"] for name in option.value}
    assert {field.name for field in fields(ReplayConfig)} == tested | REPLAY_WITHOUT_EFFECT


@pytest.mark.variants("PPO-")
@pytest.mark.parametrize(
    "algorithm, name",
    [
        pytest.param(
            *(algorithm, name),
            id=f"{algorithm.__name__}-{name}",
            marks=[pytest.mark.slow] if is_shared(algorithm, name) else [],
        )
        for algorithm in EVERYONE
        for name in options(algorithm)
    ],
)
def test_an_option_changes_what_is_learned(algorithm, name):
    for option in options(algorithm)[name]:
        plain = trained_once(algorithm, option.env_id, repr(option.given))
        assert plain.isfinite().all()
        changed = trained(algorithm, option.env_id, option.given | {name: option.value})
        assert not torch.equal(changed, plain), option.value


@pytest.mark.variants
@everyone
def test_without_a_change_the_same_is_learned(algorithm):
    for env_id in ("Scripted-v0", "ScriptedBox-v0", "Image-v0") if algorithm in EXAMPLES else ("Scripted-v0",):
        assert torch.equal(trained(algorithm, env_id, {}), trained_once(algorithm, env_id, "{}"))


@pytest.mark.variants
@everyone
def test_the_seed_and_the_environment_change_what_is_learned(algorithm):
    plain = trained_once(algorithm, "Scripted-v0", "{}")
    for settings in ({"seed": 1}, {"env": {"kwargs": {"period": 2}}}):
        assert not torch.equal(trained(algorithm, "Scripted-v0", settings), plain)


@every_algorithm
def test_with_spaces_no_environment_is_built(algorithm):
    env = ScriptedBox if algorithm is TD3 else Scripted
    spaces = Spaces(env.observation_space, env.action_space)
    model = tiny(algorithm, "Nowhere-v0", spaces=spaces)
    assert len(model.network.sample(torch.zeros(5, 2))[0]) == 5
    with pytest.raises(SettingError, match="Nowhere-v0"):
        tiny(algorithm, "Nowhere-v0")
    with pytest.raises(SettingError, match="spaces"):  # those of another environment
        fit(tiny(algorithm, "CartPole-v1", spaces=spaces))


@every_algorithm
def test_a_run_has_the_fewest_iterations_that_reach_its_environment_steps(algorithm):
    for max_env_steps, iterations in ((1, 1), (32, 2), (33, 3)) if algorithm in EXAMPLES else ((33, 3),):
        model = tiny(algorithm, max_env_steps=max_env_steps)
        assert fit(model).global_step == iterations and model.env_steps == 16 * iterations


@everyone
def test_the_log_interval_sets_the_rows_and_the_last_one_is_always_there(algorithm):
    rows = {40: [48, 96]}
    if algorithm in EXAMPLES:
        rows |= {1: [16, 32, 48, 64, 80, 96], 1_000: [96], None: [16, 32, 48, 64, 80, 96]}
    for log_interval, steps in rows.items():
        logger = Rows()
        fit(tiny(algorithm, log_interval=log_interval), logger=logger)
        assert [step for step, _ in logger.rows] == steps


@every_algorithm
def test_statistics_are_frozen_after_random_steps_that_count(algorithm):
    model = tiny(algorithm, normalize_obs="frozen", normalize_obs_steps=20)
    seen, training_step = [], model.training_step

    def watched(batch, batch_idx):
        seen.append((float(model.network.normalizer.statistics[0].count), model.env_steps, model.progress))
        training_step(batch, batch_idx)

    model.training_step = watched
    fit(model)
    counts, env_steps, progress = zip(*seen, strict=True)
    first = 36 if algorithm in ON_POLICY else 20  # off-policy algorithms act during the iteration
    assert counts == pytest.approx([20] * 5, abs=1e-3)
    assert env_steps == tuple(range(first, first + 80, 16))
    assert progress == pytest.approx([(20 + 16 * k) / 96 for k in range(5)])


@pytest.mark.variants
@pytest.mark.parametrize("algorithm", [each for each in EVERYONE if each is not TRPO])  # whose policy has a trust region
def test_learning_rates_of_zero_leave_the_weights(algorithm):
    model = tiny(algorithm, learning_rate=0.0)
    before = weights(model)
    fit(model)
    assert torch.equal(weights(model), before)


# ---------------------------------------------------------------- options without effect


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", [SAC, DQN])
def test_the_storage_of_rows_does_not_change_what_is_learned(algorithm, tmp_path):
    kept = []

    def note(buffer: ReplayBuffer) -> None:
        layout = buffer.layout
        records = (layout if isinstance(layout, StoredNext) else layout.table).records
        kept.append((type(layout), isinstance(records.base, np.memmap), len(buffer), records.itemsize))

    def run(replay: dict[str, Any]) -> Tensor:
        model = tiny(algorithm, replay=replay, n_steps=2)
        model.on_train_end = lambda: note(model.dataset.buffer)
        fit(model)
        return weights(model)

    plain = run({})
    assert torch.equal(run({"optimize_memory_usage": True}), plain)
    assert torch.equal(run({"directory": str(tmp_path / "rows")}), plain)
    assert torch.equal(run({"directory": str(tmp_path / "rows"), "optimize_memory_usage": True}), plain)
    layouts, in_files, transitions, sizes = zip(*kept, strict=True)
    assert layouts == (StoredNext, DerivedNext, StoredNext, DerivedNext)
    assert in_files == (False, False, True, True) and (tmp_path / "rows").is_dir()
    assert transitions == (96,) * 4
    assert sizes[0] - sizes[1] == sizes[2] - sizes[3] == 16  # two observations of two float32 numbers lie elsewhere


@pytest.mark.thorough
@every_replaying_algorithm
def test_steps_per_iteration_only_groups(algorithm):
    def run(steps_per_iteration: int) -> tuple[int, int, list[int]]:
        model = tiny(algorithm, steps_per_iteration=steps_per_iteration, gradient_steps=2, max_env_steps=48)
        seen, end_update = [], model.end_update
        model.end_update = lambda batch: (seen.append(model.collector.env_steps), end_update(batch))
        return fit(model).global_step, model.env_steps, seen

    # two updates at 20 steps, two at 24, …, whatever an iteration is; rates, ε and statistics are those of the iteration's beginning
    updates = [steps for steps in range(20, 49, 4) for _ in range(2)]
    assert run(16) == (3, 48, updates)
    assert run(2) == (24, 48, updates)
    assert run(48) == (1, 48, updates)
    assert run(1) == (24, 48, updates)  # an iteration is a step of each environment at least


@pytest.mark.thorough
def test_without_randomness_the_groups_change_no_weight():
    settings = {"action_noise": 0.0, "target_policy_noise": 0.0, "warmup": "policy"}
    first, *others = [tiny(TD3, steps_per_iteration=steps, **settings) for steps in (16, 2, 96)]
    for model in (first, *others):
        fit(model)
    assert all(torch.equal(weights(model), weights(first)) for model in others)
