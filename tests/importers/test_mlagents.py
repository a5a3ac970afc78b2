"""Trainer files of ML-Agents as configs: what becomes of each setting, and that all of it trains."""

from __future__ import annotations

from inspect import signature

import pytest
import yaml

from lightning_rl import POCA, PPO, SAC, SettingError
from lightning_rl.cli.names import read_options
from lightning_rl.cli.settings import read_arguments
from lightning_rl.envs.config import EnvConfig
from lightning_rl.importers.mlagents import import_mlagents
from lightning_rl.settings.yaml_files import Loader
from tests.command_line import run
from tests.importers.converting import FILES, comments, remark, settings, trains

SAC_FILE, GAIL_FILE, NEW = (str(FILES / name) for name in ("sac_trainer_config.yaml", "gail_config.yaml", "wall_jump.yaml"))
CONTINUOUS = ("Bouncer", "3DBall", "3DBallHard", "Tennis", "CrawlerStatic", "CrawlerDynamic", "Walker", "Reacher")
SECTIONS = [name for name in yaml.load((FILES / "sac_trainer_config.yaml").read_text(), Loader) if name != "default"]


@pytest.fixture
def convert(tmp_path):
    """Convert a file that is written here."""

    def convert(text, **arguments):
        path = tmp_path / "trainer.yaml"
        path.write_text(text)
        return import_mlagents(str(path), **arguments)

    return convert


def ppo(**hyperparameters):
    return yaml.safe_dump({"A": {"trainer": "ppo", **hyperparameters}})


FAST = ("3DBall", "Hallway", "Pyramids", "VisualPyramids", "Walker", "PushBlock", "Tennis")
"""Sections with different settings; the others repeat them."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SECTIONS])
def test_every_section_of_the_first_sac_file_trains(name, tmp_path):
    env = "tests.agents.Together" if name == "Tennis" else "Pendulum-v1" if name in CONTINUOUS else "CartPole-v1"
    trains(import_mlagents(SAC_FILE, name, env), tmp_path)


@pytest.mark.thorough
def test_every_section_of_the_first_sac_file_is_a_config_that_fit_reads(tmp_path):
    for name in SECTIONS:
        (tmp_path / "c.yaml").write_text(import_mlagents(SAC_FILE, name, "CartPole-v1"))
        assert read_arguments(read_options([f"--config={tmp_path / 'c.yaml'}"]))[0] == "--model=SAC"


POCA_FILE = """
behaviors:
  Group:
    trainer_type: poca
    hyperparameters: {batch_size: 16, buffer_size: 64, learning_rate: 5.0e-3, beta: 0.01, lambd: 0.9, learning_rate_schedule: constant}
    network_settings: {num_layers: 1, hidden_units: 32}
    time_horizon: 16
    max_steps: 600
"""


@pytest.mark.thorough
def test_poca_is_a_config_that_trains(convert, tmp_path):
    text = convert(POCA_FILE, env_id="lightning_rl.envs.games.walkers")
    given = settings(text)
    assert yaml.safe_load(text)["model"]["class_path"] == "POCA"
    names = ("n_steps", "batch_size", "n_epochs", "learning_rate", "gae_lambda", "net_arch", "attention_size", "share_encoder")
    assert [given[name] for name in names] == [16, 16, 3, 5e-3, 0.9, [32], 32, False] and given["env"]["num_envs"] == 4
    assert given["ent_coef"] == 0.01 and given["ratio"] == "per_dim"
    assert remark(text, "batch_size") == "steps of groups; theirs counts those of each agent"
    trains(text, tmp_path)


@pytest.mark.parametrize(("file", "name"), [(GAIL_FILE, "Pyramids"), (GAIL_FILE, "Hallway"), (NEW, "BigWallJump"), (NEW, "Hallway")])
def test_ppo_and_new_files_train(file, name, tmp_path):
    trains(import_mlagents(file, name, "Pendulum-v1"), tmp_path)


@pytest.mark.thorough
def test_the_command_prints_a_config_that_fit_reads(folder, capfd):
    status, out, err = run(f"import-mlagents {SAC_FILE} --behavior 3DBall --env Pendulum-v1", capfd)
    assert (status, err) == (0, "")
    (folder / "ball.yaml").write_text(out)
    status, out, err = run("fit --config ball.yaml --print_config", capfd)
    assert (status, err) == (0, "")
    assert settings(out)["buffer_size"] == 12_000


def test_a_section_wins_over_the_defaults():
    text = import_mlagents(SAC_FILE, "3DBall", "Pendulum-v1")
    assert settings(text) == {
        "env": {"id": "Pendulum-v1", "num_envs": 1},
        "max_env_steps": 50_000,
        "log_interval": 1_000,
        "batch_size": 64,
        "learning_starts": 64,
        "train_freq": 1,
        "gradient_steps": 1,
        "learning_rate": {"schedule": "linear", "start": 3e-4, "end": 0},
        "ent_coef": "auto_0.5",
        "tau": 0.005,
        "buffer_size": 12_000,
        "net_arch": [64, 64],
        "encoder": "simple",
        "encoder_features": 64,
        "normalize_obs": "running",
        "value_network": True,
        "warmup": "policy",
        "target_entropy_scale": 0.2,
        "activation": "silu",
        "gamma": 0.99,
    }
    assert comments(text) == [
        "memory_size, sequence_length dropped: nothing is remembered without use_recurrent",
        "time_horizon dropped: episodes are not cut for a replay buffer",
    ]


def test_old_train_interval_and_num_update_are_environment_steps_and_updates(convert):
    walker = settings(import_mlagents(SAC_FILE, "Walker"))
    assert (walker["train_freq"], walker["gradient_steps"], walker["gamma"]) == (3, 1, 0.995)
    assert walker["net_arch"] == [512, 512, 512]
    signals = "reward_signals: {reward_signal_num_update: 2, extrinsic: {strength: 2, gamma: 0.9}, curiosity: {strength: 0.1}}"
    given = settings(convert(f"A: {{trainer: sac, train_interval: 6, num_update: 3, {signals}}}"))
    assert (given["train_freq"], given["gradient_steps"], given["reward_signal_steps_per_update"]) == (2, 1, 3)
    assert given["reward_signals"]["extrinsic"] == {"strength": 1, "gamma": 0.9}  # two strengths are averaged there


def test_updates_of_the_signals_may_be_next_to_those_of_the_policy(convert):
    signals = "reward_signals: {extrinsic: {strength: 1}, curiosity: {strength: 0.1}}"
    text = convert(f"A: {{trainer: sac, train_interval: 6, num_update: 3, reward_signals_num_update: 4, {signals}}}")
    assert settings(text)["reward_signal_steps_per_update"] == 1.5
    text = convert("A: {trainer: sac, num_update: 2, reward_signals_num_update: 4}")
    assert "reward_signal_steps_per_update dropped: no reward signal learns" in comments(text)
    assert "reward_signals_num_update dropped: not a setting of PPO" in comments(convert(ppo(reward_signals_num_update=4)))


def test_updates_of_signals_that_do_not_learn_are_dropped(convert):
    text = convert(
        "A: {trainer: sac, train_interval: 6, num_update: 3, reward_signals: {reward_signal_num_update: 2, extrinsic: {gamma: 0.9}}}"
    )
    assert "reward_signal_steps_per_update" not in settings(text)
    assert "reward_signal_steps_per_update dropped: no reward signal learns" in comments(text)


@pytest.mark.parametrize(("steps", "freq", "updates"), [("20", 20, 1), ("0.5", 1, 2), ("1.5", 3, 2)])
def test_steps_per_update_may_be_a_fraction(steps, freq, updates, convert):
    given = settings(convert(f"behaviors: {{A: {{trainer_type: sac, hyperparameters: {{steps_per_update: {steps}}}}}}}"))
    assert (given["train_freq"], given["gradient_steps"]) == (freq, updates)
    assert "reward_signal_steps_per_update" not in given


@pytest.mark.parametrize(
    ("buffer", "horizon", "batch", "num_envs", "n_steps", "batch_size"),
    [
        (2048, 128, 128, 16, 128, 128),
        (12_000, 1000, 64, 12, 992, 64),  # 12 · 992 = 11,904 = 186 · 64
        (20_480, 1000, 2048, 20, 1024, 2048),
        (256, 3, 32, 32, 8, 32),
        (100, 1000, 500, 1, 100, 100),
    ],
)
def test_a_buffer_becomes_whole_minibatches_of_as_many_environments_as_it_holds_horizons(
    buffer, horizon, batch, num_envs, n_steps, batch_size, convert
):
    text = convert(ppo(buffer_size=buffer, time_horizon=horizon, batch_size=batch))
    given = settings(text)
    assert (given["env"]["num_envs"], given["n_steps"], given["batch_size"]) == (num_envs, n_steps, batch_size)
    assert bool(remark(text, "n_steps")) == (num_envs * n_steps != buffer)
    assert bool(remark(text, "batch_size")) == (batch_size != batch)


def test_with_a_memory_minibatches_hold_whole_sequences(convert):
    given = settings(import_mlagents(GAIL_FILE, "Hallway"))
    assert (given["env"]["num_envs"], given["n_steps"], given["batch_size"]) == (16, 64, 128)
    assert given["memory"] == {"class_path": "LSTM", "init_args": {"memory_size": 256, "sequence_length": 64}}
    text = import_mlagents(NEW, "Hallway")
    assert settings(text)["batch_size"] == 448
    assert remark(text, "batch_size") == "500 there; in whole sequences"
    shared = "memory_size: policy, value and both critics shared it there, here each of them has as much"
    assert shared in comments(import_mlagents(SAC_FILE, "Hallway")) and shared not in comments(text)


def test_numbers_fall_over_the_run_as_in_ml_agents(convert):
    old = settings(convert(ppo(learning_rate=1e-3, beta=1e-2, epsilon=0.3, learning_rate_schedule="constant")))
    assert old["learning_rate"] == 1e-3
    assert old["clip_range"] == {"schedule": "linear", "start": 0.3, "end": 0.1}
    assert old["ent_coef"] == {"schedule": "linear", "start": 1e-2, "end": 1e-5}
    text = convert(ppo(epsilon=0.05))
    assert settings(text)["clip_range"] == {"schedule": "linear", "start": 0.05, "end": 0.05}
    assert remark(text, "learning_rate") == "it falls there by default"
    entropy = "theirs is for the mean entropy of a continuous action's dimensions, here it is for the sum"
    assert remark(text, "ent_coef") == f"it falls there by default; {entropy}"
    assert remark(import_mlagents(NEW, "BigWallJump"), "ent_coef") == entropy
    today = settings(import_mlagents(NEW, "BigWallJump"))
    assert (today["learning_rate"], today["clip_range"], today["ent_coef"]) == (3e-4, 0.2, 0.005)


def test_the_learning_rate_of_sac_falls_in_old_files_and_is_constant_in_new_ones(convert):
    assert settings(convert("A: {trainer: sac, learning_rate: 0.1}"))["learning_rate"] == {"schedule": "linear", "start": 0.1, "end": 0}
    assert settings(convert("behaviors: {A: {trainer_type: sac}}"))["learning_rate"] == 3e-4


def test_the_settings_that_make_ppo_that_of_ml_agents_are_written():
    text = import_mlagents(NEW, "BigWallJump")
    given = settings(text)
    wanted = {"ratio": "per_dim", "max_grad_norm": None, "share_encoder": False, "activation": "silu", "gae_lambda": 0.95, "n_epochs": 3}
    assert given.items() >= wanted.items()
    assert remark(text, "max_grad_norm") == "they do not clip gradients"
    assert given["encoder"] == "nature_cnn"


def test_averaged_signals_are_compensated_where_sums_differ():
    text = import_mlagents(SAC_FILE, "Pyramids")
    signals = settings(text)["reward_signals"]
    assert (signals["extrinsic"]["strength"], signals["gail"]["strength"]) == (1.0, 0.01)  # 2 and 0.02, halved
    assert signals["gail"]["ignore_done"] is True
    assert "reward_signals: signals add up here and are averaged there: strengths are divided by 2" in comments(text)
    text = import_mlagents(GAIL_FILE, "Pyramids")
    assert settings(text)["reward_signals"]["curiosity"] == {"strength": 0.02, "gamma": 0.99, "encoding_size": 256}
    assert "reward_signals: signals add up here and are averaged there, which is the same for normalized advantages" in comments(text)


def test_signals_of_new_files_have_networks(convert):
    text = import_mlagents(NEW, "BigWallJump")
    rnd = {"strength": 0.01, "gamma": 0.99, "normalize": False, "normalize_reward": False, "encoding_size": 64, "learning_rate": 1e-4}
    assert settings(text)["reward_signals"]["rnd"] == rnd
    assert any("reward_signals.rnd.network_settings.num_layers dropped" in line for line in comments(text))
    given = settings(convert("A: {reward_signals: {curiosity: {strength: 0.1}}}"))
    assert given["reward_signals"]["extrinsic"] is None


def test_pretraining_is_behavioral_cloning():
    text = import_mlagents(GAIL_FILE, "Pyramids")
    assert settings(text)["behavioral_cloning"] == {"demo_path": "./demos/ExpertPyramid.demo", "strength": 0.5, "steps": 10_000}
    assert not any("demo_path" in line for line in comments(text))
    text = import_mlagents(NEW, "Hallway")
    assert settings(text)["behavioral_cloning"]["demo_path"] == "hallway/expert-v0"
    assert not any("Minari" in line for line in comments(text))


def test_a_network_of_the_environments_own_reward_is_dropped_with_a_comment(convert):
    text = convert("A: {reward_signals: {extrinsic: {strength: 1, network_settings: {hidden_units: 32}}}}")
    dropped = "A.reward_signals.extrinsic.network_settings dropped: the environment's own reward needs no network"
    assert dropped in comments(text)


def test_a_file_that_ml_agents_wrote_is_read():
    text = import_mlagents(str(FILES / "configuration.yaml"))
    given, config = settings(text), yaml.load(text, Loader)
    assert (given["ent_coef"], given["gamma"], given["n_steps"]) == (0.01, 0.9, 64)
    assert given["clip_range"] == {"schedule": "linear", "start": 0.2, "end": 0.1}
    assert given["behavioral_cloning"] == {"demo_path": "a/b-v0", "steps": 10, "strength": 1, "samples_per_update": 0}
    assert config["checkpoint"] == {"every_n_env_steps": 100_000, "keep": 5}  # five, evenly
    assert config["trainer"] == {"run_name": "ppo", "default_root_dir": "results"}
    assert comments(text)[1:] == [
        "base_port, engine_settings dropped: Unity's",
        "timeout_wait dropped: Unity's; see model.env.step_timeout",
        "behaviors.A.reward_signals.extrinsic.network_settings dropped: the environment's own reward needs no network",
        "goal_conditioning_type dropped: name the observations that contain the goal in model.goals",
    ]


UNITY = """
behaviors: {Walker: {trainer_type: ppo, hyperparameters: {batch_size: 100, buffer_size: 4800}, time_horizon: 290}}
env_settings: {env_path: builds/Other, env_args: [--level, '3'], base_port: 5010, num_envs: 3, num_areas: 2, timeout_wait: 20,
  max_lifetime_restarts: 4, restarts_rate_limit_n: 2}
engine_settings: {time_scale: 5, width: 100, height: 84, no_graphics: true, no_graphics_monitor: true}
environment_parameters: {gravity: 9.8}
"""


def test_a_scene_of_unity_keeps_the_settings_of_its_players(tmp_path):
    file = tmp_path / "walker.yaml"
    file.write_text(UNITY)
    text = import_mlagents(str(file), env_id="unity:builds/Walker")
    given = settings(text)
    kwargs = {"env_args": ["--level", "3"], "port": 5010, "timeout_wait": 20, "num_areas": 2}
    kwargs |= {"time_scale": 5, "width": 100, "no_graphics": True}  # 84 is Unity's default here, too
    parameters = {"gravity": 9.8}
    assert given["env"] == {"id": "unity:builds/Walker", "num_envs": 3, "max_restarts": 4, "kwargs": kwargs, "parameters": parameters}
    assert EnvConfig(**given["env"]).num_envs == 3
    assert (given["n_steps"], given["batch_size"]) == (300, 100)
    assert remark(text, "n_steps") == "time_horizon in whole minibatches; x agents of all players, set it to buffer_size 4800 / agents"
    assert comments(text) == [
        "no_graphics_monitor dropped: all players have the same graphics",
        "restarts_rate_limit_n dropped: see model.env.max_restarts",
    ]


def test_behaviors_of_a_scene_share_its_players(tmp_path):
    file = tmp_path / "soccer.yaml"
    file.write_text(UNITY.replace("behaviors: {", "behaviors: {Goalie: {trainer_type: sac}, "))
    given = settings(import_mlagents(str(file), env_id="unity:builds/Soccer"))
    assert (given["env"]["num_envs"], given["env"]["max_restarts"], given["env"]["kwargs"]["port"]) == (3, 4, 5010)
    assert [behavior["agents"] for behavior in given["behaviors"].values()] == ["Goalie/*", "Walker/*"]
    assert "env" not in given["behaviors"]["Walker"]["learner"]["init_args"]


def test_self_play_keeps_its_names_and_says_what_has_nothing_to_do_here(tmp_path):
    tennis = yaml.safe_load(import_mlagents(SAC_FILE, "Tennis"))["model"]["init_args"]["self_play"]
    assert tennis == {"window": 10, "save_steps": 50000, "play_against_latest_model_ratio": 0.5, "initial_elo": 1200.0}
    file = tmp_path / "soccer.yaml"
    own = "{window: 5, save_steps: 1e4, swap_steps: 2000, team_change: 200000, play_against_latest_model_ratio: 0.3, initial_elo: 1000}"
    file.write_text(f"behaviors: {{SoccerTwos: {{trainer_type: ppo, self_play: {own}}}}}")
    text = import_mlagents(str(file))
    found = yaml.safe_load(text)["model"]["init_args"]["self_play"]
    assert found == {"window": 5, "save_steps": 10000, "play_against_latest_model_ratio": 0.3, "initial_elo": 1000}
    assert {line for line in comments(text) if line.startswith("self_play")} == {
        "self_play.swap_steps dropped: an opponent is drawn for each episode of each copy",
        "self_play.team_change dropped: the seat of the learner changes with each episode",
    }


def test_self_play_in_a_scene_of_unity_keeps_all_its_settings(tmp_path):
    file = tmp_path / "soccer.yaml"
    file.write_text("behaviors: {SoccerTwos: {trainer_type: poca, self_play: {swap_steps: 2000, team_change: 200000}}}")
    text = import_mlagents(file, env_id="unity:builds/Soccer")
    found = yaml.safe_load(text)["model"]["init_args"]["self_play"]
    assert (found["swap_steps"], found["team_change"]) == (2000, 200_000)
    assert not [line for line in comments(text) if line.startswith("self_play")]


@pytest.mark.thorough
def test_behaviors_of_a_scene_of_unity_have_the_agents_of_their_name(tmp_path):
    file = tmp_path / "strikers.yaml"
    file.write_text("behaviors: {Striker: {self_play: {swap_steps: 7}}, StrikerTwo: {self_play: {}}}")
    found = yaml.safe_load(import_mlagents(file, env_id="unity:builds/Soccer"))["model"]["init_args"]["behaviors"]
    assert [each["agents"] for each in found.values()] == ["Striker/*", "StrikerTwo/*"]
    assert found["Striker"]["learner"]["init_args"]["self_play"]["swap_steps"] == 7


@pytest.mark.thorough
def test_a_group_with_self_play_needs_its_teams(tmp_path):
    file = tmp_path / "soccer.yaml"
    file.write_text("behaviors: {SoccerTwos: {trainer_type: poca, self_play: {save_steps: 5e4, team_change: 200000}}}")
    text = import_mlagents(str(file))
    wanted = "self_play.teams must name the agents of each team, such as [agent_team0_*, agent_team1_*]: such files do not"
    assert wanted in comments(text)
    settings = yaml.safe_load(text)["model"]["init_args"]["self_play"]
    assert "teams" not in settings and settings["save_steps"] == 50_000
    with pytest.raises(SettingError, match=r"^self_play of POCA needs self_play.teams, a pattern of agents for each team"):
        POCA("tests.agents.Squads", self_play=settings)
    assert POCA("tests.agents.Squads", batch_size=64, n_steps=64, self_play=settings | {"teams": ["red_*", "blue_*"]}).num_envs % 2 == 0


def test_behaviors_that_all_have_self_play_keep_it_with_team_change(tmp_path):
    file = tmp_path / "strikers.yaml"
    goalie = "{trainer_type: poca, self_play: {save_steps: 5e4, team_change: 200000, swap_steps: 1000}}"
    file.write_text(f"behaviors: {{Goalie: {goalie}, Striker: {{self_play: {{save_steps: 5e4}}}}}}")
    text = import_mlagents(str(file))
    found = {
        name: each["learner"]["init_args"]["self_play"] for name, each in yaml.safe_load(text)["model"]["init_args"]["behaviors"].items()
    }
    common = {"window": 10, "save_steps": 50000, "play_against_latest_model_ratio": 0.5, "initial_elo": 1200.0}
    assert found == {"Goalie": common | {"team_change": 200000}, "Striker": common}
    assert {line for line in comments(text) if "self_play" in line} == {
        "self_play.swap_steps dropped: an opponent is drawn for each episode of each copy"
    }


def test_self_play_of_only_one_of_several_behaviors_is_dropped_with_a_comment(tmp_path):
    file = tmp_path / "one.yaml"
    file.write_text("behaviors: {A: {self_play: {team_change: 5}}, B: {}}")
    text = import_mlagents(str(file))
    assert "self_play" not in yaml.safe_load(text)["model"]["init_args"]["behaviors"]["A"]["learner"]["init_args"]
    assert "A.self_play dropped: no other behavior has it; import this one by --behavior A" in comments(text)


def test_other_settings_are_dropped_with_a_comment():
    assert "beta dropped: not a setting of SAC" in comments(import_mlagents(SAC_FILE, "PushBlock"))
    assert any(line.startswith("curiosity_enc_size dropped") for line in comments(import_mlagents(SAC_FILE, "VisualPyramids")))
    said = "--model.threaded true of PPO and SAC steps environments during learning, with a policy that is one iteration old"
    assert f"threaded dropped: {said}" in comments(import_mlagents(NEW, "BigWallJump"))
    assert all("threaded" in signature(algorithm).parameters for algorithm in (PPO, SAC))


def test_sections_next_to_the_behaviors_are_converted():
    text = import_mlagents(NEW, "BigWallJump")
    config = yaml.load(text, Loader)
    assert config["seed_everything"] == 7
    assert config["trainer"] == {"accelerator": "cpu", "run_name": "walls"}
    assert config["checkpoint"] == {"every_n_env_steps": 500_000, "keep": 5}
    assert settings(text)["env"]["num_envs"] == 4
    assert settings(text)["n_steps"] == 512
    assert {
        "resume dropped: continue by --ckpt_path last",
        "env_path dropped: a file starts no programs here; for this scene, import with --env unity:PATH",
    } <= set(comments(text))
    assert yaml.load(import_mlagents(NEW, "Hallway"), Loader)["checkpoint"] == {"save_replay_buffer": False}


def test_old_environment_parameters_are_converted_to_the_new_form(convert):
    text = convert("""
behaviors:
  A:
    trainer: ppo
    curriculum: {measure: progress, thresholds: [0.1, 0.3], min_lesson_length: 100, parameters: {touch: [1.0, 0.5, 0.0]}}
environment_parameters:
  height:
    curriculum:
    - Low: {completion_criteria: {measure: progress, behavior: A, threshold: 0.1}, value: 1.5}
    - {name: High, value: 2}
parameter_randomization:
  resampling-interval: 2000
  mass: {sampler-type: uniform, min_value: 0.5, max_value: 10}
""")
    criteria = {"measure": "progress", "min_lesson_length": 100}
    expected = {
        "height": {
            "curriculum": [
                {"name": "Low", "completion_criteria": {"measure": "progress", "threshold": 0.1}, "value": 1.5},
                {"name": "High", "value": 2},
            ]
        },
        "mass": {"sampler_type": "uniform", "sampler_parameters": {"min_value": 0.5, "max_value": 10}},
        "touch": {
            "curriculum": [
                {"value": 1.0, "completion_criteria": {**criteria, "threshold": 0.1}},
                {"value": 0.5, "completion_criteria": {**criteria, "threshold": 0.3}},
                {"value": 0.0},
            ]
        },
    }
    assert settings(text)["env"]["parameters"] == expected
    assert "completion_criteria.behavior A dropped: lessons are decided by the behavior that learns" in comments(text)
    assert "resampling-interval dropped: parameters are drawn again for each episode" in comments(text)


TWO = """
default_settings: {trainer_type: ppo, hyperparameters: {batch_size: 50, buffer_size: 800, learning_rate: 1.0e-3}, time_horizon: 100}
behaviors:
  adversary: {max_steps: 900, network_settings: {hidden_units: 16}}
  agent: {trainer_type: sac, hyperparameters: {buffer_size: 5000, batch_size: 32}, max_steps: 600, summary_freq: 100}
environment_parameters: {max_cycles: 20}
env_settings: {seed: 5}
"""


def test_lessons_of_several_behaviors_keep_the_behavior_that_decides(convert):
    text = convert("""
behaviors: {Big Wall: {max_steps: 900}, Small: {curriculum: {measure: reward, thresholds: [2], parameters: {gap: [1, 2]}}}}
environment_parameters:
  height:
    curriculum:
    - Low: {completion_criteria: {measure: reward, behavior: Big Wall, threshold: 0.1}, value: 1.5}
    - {name: High, value: 2}
""")
    found = yaml.safe_load(text)["model"]["init_args"]
    low = {"name": "Low", "completion_criteria": {"measure": "reward", "behavior": "Big_Wall", "threshold": 0.1}, "value": 1.5}
    criteria = {"measure": "reward", "behavior": "Small", "threshold": 2}
    assert found["env"]["parameters"] == {
        "height": {"curriculum": [low, {"name": "High", "value": 2}]},
        "gap": {"curriculum": [{"value": 1, "completion_criteria": criteria}, {"value": 2}]},
    }
    assert set(found["behaviors"]) == {"Big_Wall", "Small"}


def test_a_lesson_that_ends_at_a_rating_is_kept(convert):
    lessons = [{"value": 1, "completion_criteria": {"measure": "Elo", "threshold": 1300}}, {"value": 2}]
    file = {"behaviors": {"A": {"self_play": {"window": 3}}}, "environment_parameters": {"x": {"curriculum": lessons}}}
    found = settings(convert(yaml.safe_dump(file)))
    assert found["env"]["parameters"] == {"x": {"curriculum": lessons}} and found["self_play"]["window"] == 3


def test_several_behaviors_become_one_run_with_a_learner_each(convert):
    text = convert(TWO)
    found = yaml.safe_load(text)
    own = found["model"]["init_args"]
    assert (found["model"]["class_path"], found["seed_everything"], own["max_env_steps"]) == ("MultiAgent", 5, 900)
    assert own["env"]["parameters"] == {"max_cycles": 20}
    adversary, agent = own["behaviors"]["adversary"], own["behaviors"]["agent"]
    assert (adversary["agents"], adversary["learner"]["class_path"]) == ("adversary*", "PPO")
    assert adversary["learner"]["init_args"]["batch_size"] == 50 and adversary["learner"]["init_args"]["net_arch"] == [16, 16]
    assert agent["learner"]["class_path"] == "SAC" and agent["learner"]["init_args"]["buffer_size"] == 5000
    assert not {"max_env_steps", "log_interval"} & {*adversary["learner"]["init_args"], *agent["learner"]["init_args"]}


def test_rollouts_of_all_behaviors_hold_their_buffers_in_as_many_environments_as_the_least_needs(convert):
    narrow = "{trainer_type: ppo, time_horizon: 1000, hyperparameters: {buffer_size: 2048, batch_size: 128}}"
    wide = "{trainer_type: ppo, hyperparameters: {buffer_size: 20480, batch_size: 2048}}"
    for text in (f"{{A: {narrow}, B: {wide}}}", f"{{S: {{trainer_type: sac}}, A: {narrow}, B: {wide}}}"):
        own = yaml.safe_load(convert(f"behaviors: {text}"))["model"]["init_args"]
        learners = {name: behavior["learner"]["init_args"] for name, behavior in own["behaviors"].items()}
        assert own["env"]["num_envs"] == 2
        assert (learners["A"]["n_steps"], learners["B"]["n_steps"], learners["B"]["batch_size"]) == (1024, 10240, 2048)


def test_settings_of_the_run_come_from_the_first_behavior_and_others_are_reported(convert):
    text = convert("behaviors: {A: {}, B: {checkpoint_interval: 1000, summary_freq: 500}}")
    found = yaml.safe_load(text)
    assert found["checkpoint"]["every_n_env_steps"] == 1000 and found["model"]["init_args"]["log_interval"] == 50000
    assert "B: model.log_interval 500 dropped: a run has one, 50000 here" in comments(text)


def test_two_behaviors_that_would_have_one_name_are_refused(convert):
    with pytest.raises(
        SettingError, match=r"^behaviors 'A B' and 'A_B' are both A_B here: names have only letters, digits, _ and -; rename one$"
    ):
        convert("behaviors: {A B: {}, A_B: {trainer_type: sac}}")


@pytest.mark.thorough
def test_a_run_of_several_imported_behaviors_trains(folder, capfd):
    (folder / "trainer.yaml").write_text(TWO)
    status, out, err = run("import-mlagents trainer.yaml --env mpe2.simple_adversary_v3", capfd)
    assert (status, err) == (0, "")
    (folder / "config.yaml").write_text(out)
    status, out, err = run(
        "fit --config config.yaml --trainer.max_steps 1 --trainer.accelerator cpu --trainer.enable_progress_bar false", capfd
    )
    assert (status, err) == (0, "") and "evaluate it: " in out


def test_names_of_behaviors_that_no_metric_can_have_are_changed(convert):
    own = yaml.safe_load(convert("behaviors: {My.Wolf: {}, 2: {}, '': {}}"))["model"]["init_args"]["behaviors"]
    assert {name: each["agents"] for name, each in own.items()} == {"My_Wolf": "My.Wolf*", "behavior_2": "2*", "behavior_": "*"}


def test_without_an_environment_a_comment_says_how_to_name_it():
    text = import_mlagents(SAC_FILE, "Basic")
    assert settings(text)["env"] == {"num_envs": 1}
    assert comments(text)[0] == "such files do not name an environment: lightning-rl fit --config THIS_FILE --model.env.id ID"


ERRORS = [
    ("[1]", "must be a mapping of names to settings"),
    ("", "must be a mapping of names to settings, got nothing"),
    ("A: {", "is not valid YAML, line 1"),
    ("A: 3", "A must be a mapping of settings, got 3"),
    ("A: {batch_sise: 3}", "A.batch_sise is not a setting of ML-Agents; did you mean batch_size?"),
    ("behaviors: {A: {hyperparameters: {betta: 3}}}", "behaviors.A.hyperparameters.betta is not", "did you mean beta?"),
    ("behaviors: {A: {trainer_type: ppo, batch_size: 3}}", "behaviors.A.batch_size is not a setting"),
    ("behaviors: {A: {network_settings: {memory: {size: 3}}}}", "network_settings.memory.size is not", "memory_size"),
    ("{behaviors: {A: {}}, behaviours: {}}", "behaviours is not a setting of an ML-Agents file; did you mean behaviors?"),
    ("{behaviors: {A: {}}, env_settings: {num_envs: 0}}", "env_settings.num_envs must be >= 1, got 0"),
    ("{behaviors: {A: {}}, env_settings: {nm_envs: 1}}", "env_settings.nm_envs is not", "did you mean num_envs?"),
    ("{behaviors: {A: {}}, engine_settings: {time_scal: 1}}", "engine_settings.time_scal is not", "did you mean time_scale?"),
    ("behaviors: {A: {self_play: {windw: 1}}}", "behaviors.A.self_play.windw is not", "did you mean window?"),
    ("behaviors: {}", "trainer.yaml has no behaviors; each has a name and settings"),
    ("A: {trainer: sac, reward_signals: {reward_signal_num_update: 0}}", "A.reward_signals.reward_signal_num_update must be >= 1, got 0"),
    (
        "{behaviors: {Red: {}, Blue: {}}, environment_parameters: "
        "{x: {curriculum: [{value: 1, completion_criteria: {behavior: Rde}}, {value: 2}]}}}",
        "environment_parameters.x.curriculum[0].completion_criteria.behavior 'Rde' is not in the file; did you mean Red?",
    ),
    (
        "{behaviors: {A: {}}, environment_parameters: {x: {sampler_type: uniform, sampler_parameters: {min_value: 2}}}}",
        "environment_parameters.x.sampler_parameters.min_value must be <= max_value, got 2 and 1.0",
    ),
    ("{A: {}, parameter_randomization: {x: {sampler-type: unifrom}}}", "parameter_randomization.x.sampler_type 'unifrom' is not known"),
    (
        "A: {curriculum: {measure: reward, thresholds: [1], parameters: {x: [1, two]}}}",
        "A.curriculum.parameters.x.curriculum[1].value must be a finite number, got 'two'",
    ),
    ("A: {reward_signals: {gial: {}}}", "A.reward_signals.gial is not", "did you mean gail?"),
    ("A: {reward_signals: {extrinsic: {gama: 1}}}", "A.reward_signals.extrinsic.gama is not", "did you mean gamma?"),
    ("A: {reward_signals: {gail: {}}}", "A.reward_signals.gail.demo_path must name demonstrations, got None"),
    ("A: {pretraining: {strength: 1}}", "A.pretraining.demo_path must name demonstrations"),
    ("A: {pretraining: {demo: x}}", "A.pretraining.demo is not", "demo_path"),
    ("A: {trainer: ppoo}", "must be one of ppo, sac, poca, got 'ppoo'; did you mean ppo?"),
    ("A: {trainer: [ppo]}", "A.trainer must be one of ppo, sac, poca, got ['ppo']"),
    ("A: {trainer: offline_bc}", "A.trainer offline_bc", "BehavioralCloning"),
    ("A: {num_layers: 1e9}", "A.num_layers must be >= 1 and <= 100, got 1000000000"),
    (
        "behaviors: {A: {trainer_type: sac, hyperparameters: {steps_per_update: .inf}}}",
        "steps_per_update must be >= 0 and <= 1e+06, got inf",
    ),
    ("A: {curriculum: {thresholds: [1], parameters: {x: [1]}}}", "A.curriculum.parameters.x must be a list of 2 values, one more than"),
    ("{behaviors: {A: {}}, parameter_randomization: {x: 3}}", "parameter_randomization.x must be a mapping with a sampler-type, got 3"),
    ("A: {batch_size: many}", "A.batch_size must be an integer >= 1, got 'many'"),
    ("A: {learning_rate: fast}", "A.learning_rate must be a number >= 0, got 'fast'"),
    ("A: {vis_encode_type: simpel}", "A.vis_encode_type must be one of", "did you mean simple?"),
    ("A: {learning_rate_schedule: cosine}", "A.learning_rate_schedule must be one of linear, constant, got 'cosine'"),
    ("behaviors: {A: {trainer_type: sac, hyperparameters: {steps_per_update: 0}}}", "steps_per_update must be at least 0.01"),
]


def test_a_wrong_file_ends_in_one_line(folder, capfd):
    for text, *parts in ERRORS:
        (folder / "trainer.yaml").write_text(text)
        status, out, err = run("import-mlagents trainer.yaml", capfd)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert all(part in err for part in parts) and len(err) < 202, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "the following arguments are required: FILE"),
        ("nowhere.yaml", "nowhere.yaml cannot be read: No such file or directory"),
        (f"{SAC_FILE} --behavior Hallways", "--behavior Hallways: there is no such behavior; did you mean Hallway?"),
        (f"{SAC_FILE} --behaviour Hallway", "--behaviour"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, said, folder, capfd):
    status, out, err = run(f"import-mlagents {arguments}", capfd)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err
