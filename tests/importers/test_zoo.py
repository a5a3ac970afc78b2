"""Files of rl-baselines3-zoo as configs: what becomes of each setting, and that entries of every algorithm train."""

from __future__ import annotations

import gymnasium as gym
import pytest
import torch
import yaml
from gymnasium.envs.registration import EnvSpec

from lightning_rl import PPO
from lightning_rl.errors import SettingError
from lightning_rl.importers.zoo import import_zoo
from lightning_rl.importers.zoo_settings import ALGORITHMS
from lightning_rl.settings.yaml_files import Loader
from tests.command_line import run
from tests.importers.converting import FILES, comments, remark, settings, trains

ENTRIES = [
    pytest.param(path, name, id=f"{path.stem} {name}")
    for path in sorted(FILES.glob("*.yml"))
    for name in yaml.load(path.read_text(), Loader)
    if name != "atari"
]


@pytest.fixture
def convert(tmp_path):
    """Convert a section of CartPole-v1 that is written here."""

    def convert(section, algorithm="ppo", env_id="CartPole-v1"):
        path = tmp_path / "mine.yml"
        path.write_text(f"CartPole-v1: {section}")
        return import_zoo(str(path), env_id, algorithm)

    return convert


def imported(name, env_id):
    return import_zoo(str(FILES / f"{name}.yml"), env_id)


@pytest.mark.variants
@pytest.mark.parametrize(("path", "name"), ENTRIES)
def test_every_entry_trains(path, name, tmp_path):
    trains(import_zoo(str(path), name), tmp_path)


def test_there_are_entries_of_every_algorithm():
    assert len(ENTRIES) >= 10 and {each.values[0].stem for each in ENTRIES} == set(ALGORITHMS)


@pytest.mark.thorough
def test_the_command_prints_a_config_that_fit_reads(folder, capfd):
    status, out, err = run(f"import-zoo {FILES / 'ppo.yml'} CartPole-v1", capfd)
    assert (status, err) == (0, "")
    (folder / "cartpole.yaml").write_text(out)
    status, out, err = run("fit --config cartpole.yaml --print_config", capfd)
    assert (status, err) == (0, "")
    assert settings(out)["clip_range"] == {"schedule": "linear", "start": 0.2, "end": 0}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("expression", "actor", "critic"),
    [("dict(pi=[64], vf=[256])", [(64, 4), (2, 64)], [(256, 4), (1, 256)]), ("dict(vf=[64])", [(2, 4)], [(64, 4), (1, 64)])],
)
def test_widths_of_policy_and_value_reach_the_networks_of_a_run(expression, actor, critic, folder, capfd):
    (folder / "ppo.yml").write_text(f'CartPole-v1: {{n_timesteps: 64, n_steps: 16, policy_kwargs: "dict(net_arch={expression})"}}')
    status, out, err = run("import-zoo ppo.yml CartPole-v1", capfd)
    assert (status, err) == (0, "")
    (folder / "mine.yaml").write_text(out)
    quick = "--model.batch_size 16 --evaluation null --trainer.accelerator cpu --trainer.enable_progress_bar false"
    assert run(f"fit --config mine.yaml {quick}", capfd)[0] == 0
    learned = torch.load(next(folder.rglob("last.ckpt")), weights_only=True)["state_dict"]
    for part, widths in {"actor": actor, "critic": critic}.items():
        shapes = [
            tuple(weight.shape) for name, weight in learned.items() if name.startswith(f"network.{part}.") and name.endswith("weight")
        ]
        assert shapes == widths


def test_cartpole_of_ppo_is_what_the_file_says():
    text = imported("ppo", "CartPole-v1")
    assert settings(text) == {
        "env": {"id": "CartPole-v1", "num_envs": 8},
        "max_env_steps": 100_000,
        "n_steps": 32,
        "batch_size": 256,
        "learning_rate": {"schedule": "linear", "start": 1e-3, "end": 0},
        "clip_range": {"schedule": "linear", "start": 0.2, "end": 0},
        "gamma": 0.98,
        "gae_lambda": 0.8,
        "ent_coef": 0,
        "n_epochs": 20,
    }
    assert comments(text) == []


def test_defaults_of_stable_baselines_are_written_where_ours_differ(convert):
    given = settings(convert("{n_timesteps: 1000}"))
    assert (given["n_steps"], given["batch_size"], given["n_epochs"], given["env"]["num_envs"]) == (2048, 64, 10, 1)
    given = settings(convert("{n_timesteps: 1000}", "dqn"))
    assert (given["train_freq"], given["target_update_interval"]) == (4, 2500)
    given = settings(convert("{n_timesteps: 1000}", "td3"))
    assert (given["net_arch"], given["action_noise"]) == ([400, 300], 0)


def test_ppos_minibatches_divide_the_rollout():
    text = imported("ppo", "MountainCarContinuous-v0")
    assert (settings(text)["n_steps"], settings(text)["batch_size"]) == (8, 8)
    assert remark(text, "batch_size") == "256 there; here a part of n_steps x num_envs = 8"


def test_what_clips_the_value_is_imported_with_what_differs(convert):
    text = convert("{clip_range_vf: 0.2}")
    assert settings(text)["clip_range_vf"] == 0.2
    assert remark(text, "clip_range_vf") == "the larger of the clipped and the unclipped loss; Stable-Baselines3 takes the clipped one"
    for section in ("{clip_range_vf: -1}", "{clip_range: 0.2}"):  # where nothing is clipped nothing differs
        assert comments(convert(section)) == []


@pytest.mark.parametrize(
    ("interval", "freq", "steps", "num_envs", "updates"),
    [
        (10, 256, 128, 1, 128),  # before each training
        (600, 16, 8, 1, 304),  # 37.5 trainings of 8, rounded to 38
        (250, 4, -1, 1, 248),  # 62 of 4 steps
        (10_000, 4, 1, 1, 2500),
        (10_000, 4, 1, 8, 312),  # trainings every 32 steps
    ],
)
def test_dqns_target_moves_between_trainings_and_is_counted_in_updates(interval, freq, steps, num_envs, updates, convert):
    section = f"{{target_update_interval: {interval}, train_freq: {freq}, gradient_steps: {steps}, n_envs: {num_envs}}}"
    given = settings(convert(section, "dqn"))
    assert given["target_update_interval"] == updates
    assert (given["train_freq"], given["gradient_steps"]) == (freq * num_envs, steps)


def test_training_after_whole_episodes_becomes_training_after_steps(convert):
    text = imported("td3", "Pendulum-v1")
    assert (settings(text)["train_freq"], settings(text)["gradient_steps"]) == (1, 1)
    assert remark(text, "train_freq") == "as many updates as steps after 1 whole episodes there; here one after each step"
    given = settings(convert('{train_freq: [8, "step"], gradient_steps: 2}', "sac"))
    assert (given["train_freq"], given["gradient_steps"]) == (8, 2)


def test_noise_explores_for_td3():
    assert settings(imported("td3", "Pendulum-v1"))["action_noise"] == 0.1
    text = imported("td3", "MountainCarContinuous-v0")
    assert settings(text)["action_noise"] == 0.5
    assert remark(text, "action_noise") == "without correlation in time; an Ornstein-Uhlenbeck process there"


def test_ddpg_is_td3_with_one_critic_and_neither_delay_nor_target_noise():
    text = imported("ddpg", "Pendulum-v1")
    given = settings(text)
    assert yaml.load(text, Loader)["model"]["class_path"] == "TD3"
    assert (given["n_critics"], given["policy_delay"], given["target_policy_noise"], given["action_noise"]) == (1, 1, 0, 0.1)


def test_the_quantiles_of_tqc_and_those_dropped_are_kept():
    given = settings(imported("tqc", "LunarLanderContinuous-v2"))
    assert (given["n_quantiles"], given["learning_rate"]["start"], given["net_arch"]) == (25, 7.3e-4, [400, 300])
    text = imported("tqc", "Hopper-v3")
    given = settings(text)
    assert (given["drop_quantiles"], given["n_critics"], given["n_quantiles"]) == (5, 3, 30)
    assert yaml.load(text, Loader)["model"]["class_path"] == "TQC"


def test_the_wide_critics_of_crossq_are_kept():
    given = settings(imported("crossq", "BipedalWalker-v3"))
    assert (given["net_arch"], given["critic_net_arch"]) == ([256, 256], [1024, 1024])
    given = settings(imported("crossq", "Pendulum-v1"))
    assert (given["net_arch"], given["critic_net_arch"], given["policy_delay"]) == ([256, 256], [256, 256], 2)


def test_the_trust_region_of_trpo_is_kept():
    text = imported("trpo", "HalfCheetah-v4")
    given = settings(text)
    assert (given["cg_max_steps"], given["target_kl"], given["n_critic_updates"], given["n_steps"]) == (25, 0.04, 20, 1024)
    assert "sub_sampling_factor dropped: the Fisher matrix is that of all rows here" in comments(text)


def test_the_directions_of_ars_are_pairs_of_episodes():
    given = settings(imported("ars", "Pendulum-v1"))
    assert (given["episodes_per_generation"], given["top_directions"], given["sigma"], given["net_arch"]) == (8, 1, 0.1, [])
    assert given["learning_rate"] == {"schedule": "linear", "start": 0.018, "end": 0} and given["normalize_obs"] == "off"
    given = settings(imported("ars", "HalfCheetah-v3"))
    assert given["normalize_obs"] == "running" and given["net_arch"] == [64, 64] and "normalize_reward" not in given


def test_the_lstm_of_ppo_lstm_is_a_memory_of_ppo_and_hidden_velocities_are_masked():
    text = imported("ppo_lstm", "CartPoleNoVel-v1")
    given = settings(text)
    assert yaml.load(text, Loader)["model"]["class_path"] == "PPO" and comments(text) == []
    mask = {"class_path": "lightning_rl.envs.MaskObservation", "init_args": {"indices": [1, 3]}}
    assert given["env"] == {"id": "CartPole-v1", "num_envs": 8, "wrappers": [mask]}
    assert given["memory"] == {"class_path": "LSTM", "init_args": {"memory_size": 128, "sequence_length": 32}}  # h and c of 64 each
    assert (given["n_steps"], given["batch_size"], given["net_arch"], "share_encoder" in given) == (32, 256, [64], False)


def test_the_defaults_of_ppo_lstm_are_those_of_sb3_contrib():
    text = imported("ppo_lstm", "LunarLanderContinuousNoVel-v2")
    given = settings(text)
    assert comments(text) == ["gymnasium has LunarLanderContinuous-v3 instead of LunarLanderContinuous-v2"]
    assert given["env"]["id"] == "LunarLanderContinuous-v3" and given["env"]["wrappers"][0]["init_args"] == {"indices": [2, 3, 5]}
    assert given["memory"]["init_args"] == {"memory_size": 512, "sequence_length": 128}
    assert (given["batch_size"], given["n_epochs"]) == (128, 10)


@pytest.mark.parametrize(
    ("n_steps", "n_envs", "wanted", "length", "batch"),
    [
        (16, 16, 128, 16, 128),  # 8 of 16 sequences
        (1024, 8, 256, 256, 256),
        (500, 1, 128, 125, 125),  # 4 equal parts
        (32, 6, 128, 32, 96),  # 3 of 6 sequences: 4 do not divide them
        (5, 2, 64, 5, 10),
        (7, 1, 4, 4, 4),  # 2 parts, of which the last is padded
    ],
)
def test_minibatches_of_ppo_lstm_are_the_longest_sequences_that_divide_a_rollout(n_steps, n_envs, wanted, length, batch, convert, tmp_path):
    text = convert(f"{{n_steps: {n_steps}, n_envs: {n_envs}, batch_size: {wanted}, n_timesteps: 1000}}", "ppo_lstm")
    given = settings(text)
    assert (given["memory"]["init_args"]["sequence_length"], given["batch_size"]) == (length, batch)
    assert bool(remark(text, "batch_size")) == (batch != wanted)
    PPO(**given)  # which refuses minibatches that do not fit


@pytest.mark.parametrize(
    ("policy", "kwargs", "shares", "said"),
    [
        ("Mlp", "shared_lstm=True, enable_critic_lstm=False", True, "the value's gradient changes the LSTM, too; there it does not"),
        ("Cnn", "enable_critic_lstm=False", True, "enable_critic_lstm false: the value sees no LSTM there, but the same image encoder"),
        ("Mlp", "enable_critic_lstm=False", None, "enable_critic_lstm false dropped: the value has an LSTM of its own, as the policy has"),
        ("Cnn", "", None, "policy and value share the image encoder there; here each has its own in front of its LSTM"),
        ("Cnn", "share_features_extractor=False", None, ""),
        ("Mlp", "n_lstm_layers=2", None, "n_lstm_layers 2 dropped: a memory has one layer here"),
        ("Mlp", "lstm_kwargs=dict(dropout=0.1)", None, "lstm_kwargs dropped: an LSTM has no other settings here"),
    ],
)
def test_what_an_lstm_of_contrib_has_and_ours_has_not_is_said(policy, kwargs, shares, said, convert):
    text = convert(f'{{policy: {policy}LstmPolicy, policy_kwargs: "dict({kwargs})"}}', "ppo_lstm")
    assert settings(text).get("share_encoder") is shares
    found = [*comments(text), *([remark(text, "share_encoder")] if shares else [])]
    assert found == ([said] if said else [])


def test_a_perceptron_of_ars_has_the_activation_of_contrib(convert):
    given = settings(convert("{policy: 'MlpPolicy', n_timesteps: 1000, n_delta: 4, policy_kwargs: 'dict(net_arch=[16])'}", "ars"))
    assert (given["net_arch"], given["activation"]) == ([16], "relu")
    assert "activation" not in settings(imported("ars", "Pendulum-v1"))  # which is linear


def test_a_perceptron_of_ars_is_squashed_and_a_linear_policy_is_not_unless_they_say_so(convert):
    for policy, kwargs, squashed in (
        ("MlpPolicy", "", True),
        ("MlpPolicy", "squash_output=False", False),
        ("LinearPolicy", "", False),
        ("LinearPolicy", "squash_output=True", True),
    ):
        text = convert(f"{{policy: {policy}, policy_kwargs: 'dict({kwargs})'}}", "ars")
        assert (settings(text).get("action_dist") == "tanh_normal") == squashed and not comments(text)
        assert remark(text, "net_arch") == ("with a bias; there without" if policy == "LinearPolicy" else "")


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "trpo", "dqn", "qrdqn"])
def test_nothing_is_hidden_behind_images(algorithm, convert):
    assert settings(convert("{policy: CnnPolicy}", algorithm))["net_arch"] == []


@pytest.mark.parametrize(("steps", "freq", "interval", "ours"), [(1, 1, 4, 1), (8, 8, 4, 4), (-1, 8, 16, 8), (6, 6, 4, 4)])
def test_the_target_of_sac_moves_as_often_where_each_training_counts_from_0(steps, freq, interval, ours, convert):
    text = convert(f"{{gradient_steps: {steps}, train_freq: {freq}, target_update_interval: {interval}}}", "sac")
    updates = freq if steps == -1 else steps
    said = f"{interval} there, counted from 0 in each training of {updates} updates"
    assert settings(text)["target_update_interval"] == ours
    assert remark(text, "target_update_interval") == (said if updates % interval else "")


def test_qrdqn_is_dqn_with_quantiles():
    text = imported("qrdqn", "CartPole-v1")
    given = settings(text)
    assert yaml.load(text, Loader)["model"]["class_path"] == "DQN"
    assert (given["distribution"], given["n_quantiles"], given["adam_eps"]) == ("quantiles", 10, 0.01 / 64)
    assert given["max_grad_norm"] is None and given["exploration_fraction"] == 0.16
    assert settings(imported("qrdqn", "MountainCar-v0"))["n_quantiles"] == 200


def test_policies_are_expressions_that_are_read_and_not_run():
    text = imported("ppo", "Hopper-v3")
    given = settings(text)
    assert (given["net_arch"], given["activation"], given["log_std_init"], given["gamma"]) == ([256, 256], "relu", -2, 0.999)
    assert given["normalize_obs"] == "running" and "normalize_reward" not in given
    assert given["ortho_init"] is False


@pytest.mark.parametrize(
    ("expression", "widths", "said"),
    [
        ("[64, 32]", [64, 32], ""),
        ("[]", [], ""),
        ("dict(pi=[64], vf=[64])", [64], ""),
        ("dict(pi=[64])", {"pi": [64], "vf": []}, ""),
        ("dict(vf=[64])", {"pi": [], "vf": [64]}, ""),
        ("[dict(vf=[64])]", {"pi": [], "vf": [64]}, ""),
        ("dict(pi=[64, 32], vf=[16])", {"pi": [64, 32], "vf": [16]}, ""),
        ("[128, dict(pi=[64], vf=[32])]", {"pi": [128, 64], "vf": [128, 32]}, "shared by policy and value there, two networks here"),
        ("[128, dict(pi=[64], vf=[64])]", [128, 64], "shared by policy and value there, two networks here"),
    ],
)
def test_widths_come_in_many_forms(expression, widths, said, convert):
    text = convert(f'{{policy_kwargs: "dict(net_arch={expression})"}}')
    assert (settings(text)["net_arch"], remark(text, "net_arch")) == (widths, said)


@pytest.mark.parametrize(("algorithm", "first"), [("ppo", -3.29), ("sac", -3.67)])
def test_state_dependent_exploration_is_read_with_its_first_scale(algorithm, first):
    text = imported(algorithm, "MountainCarContinuous-v0")
    given = settings(text)
    assert (given["use_sde"], given["log_std_init"]) == (True, first) and "sde_sample_freq" not in given
    assert not any("sde" in line for line in comments(text))


@pytest.mark.parametrize(
    ("algorithm", "section", "expected", "said"),
    [
        ("ppo", "{n_steps: 8, sde_sample_freq: 4}", {"sde_sample_freq": 4}, ""),
        ("ppo", "{n_steps: 8, sde_sample_freq: 3}", {"sde_sample_freq": 3}, "and again after each 8 there"),
        ("ppo", "{n_steps: 8, sde_sample_freq: 64}", {}, ""),
        ("a2c", "{sde_sample_freq: 4}", {"sde_sample_freq": 4}, "and again after each 5 there"),
        ("sac", "{train_freq: 8, n_envs: 2, use_sde_at_warmup: true}", {"train_freq": 16, "warmup": "policy"}, ""),
        ("tqc", "{train_freq: [1, episode]}", {"sde_sample_freq": 64}, "those of an episode there"),
        ("tqc", "{train_freq: [1, episode], sde_sample_freq: 8}", {"sde_sample_freq": 8}, ""),
        ("crossq", '{policy_kwargs: "dict(use_expln=True, full_std=False)"}', {"use_expln": True, "full_std": False}, ""),
        ("a2c", '{policy_kwargs: "dict(squash_output=True)"}', {"action_dist": "tanh_normal"}, ""),
    ],
)
def test_state_dependent_exploration_is_drawn_as_often_as_there(algorithm, section, expected, said, convert):
    text = convert(section.replace("{", "{use_sde: true, ", 1), algorithm)
    given = settings(text)
    assert given["use_sde"] and {name: given[name] for name in expected} == expected
    assert ("sde_sample_freq" in given) == ("sde_sample_freq" in expected)
    assert not said or remark(text, "sde_sample_freq") == said


def test_settings_of_exploration_that_is_off_are_dropped(convert):
    text = convert('{sde_sample_freq: 4, policy_kwargs: "dict(use_expln=True)"}')
    assert "sde_sample_freq" not in settings(text)
    assert "sde_sample_freq, use_expln dropped: without effect there unless use_sde explores" in comments(text)


def test_the_optimizer_of_a2c_is_read_from_policy_kwargs(convert):
    text = convert('{policy_kwargs: "dict(optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(eps=1e-4))"}', "a2c")
    assert settings(text)["rms_prop_eps"] == 1e-4
    assert remark(text, "rms_prop_eps") == "outside the square root; inside it there"


def test_arguments_inside_other_settings_that_are_not_used_are_reported(convert):
    extractor = "features_extractor_kwargs=dict(features_dim=64, cnn_output_dim=32)"
    text = convert(f'{{policy_kwargs: "dict({extractor})"}}', "sac")
    assert settings(text)["encoder_features"] == 64
    assert comments(text) == ["features_extractor_kwargs.cnn_output_dim dropped: not a setting of SAC"]
    optimizer = "optimizer_class=RMSpropTFLike, optimizer_kwargs=dict(eps=1e-4, alpha=0.9)"
    text = convert(f'{{policy_kwargs: "dict({optimizer})"}}', "a2c")
    assert settings(text)["rms_prop_eps"] == 1e-4
    assert comments(text) == ["optimizer_kwargs.alpha dropped: not a setting of A2C"]
    text = convert("{env_wrapper: {a.AtariWrapper: {clip_reward: false, terminal_on_life_loss: false, frame_skip: 2, noop_max: 0}}}")
    assert "clip_reward" not in settings(text)
    assert comments(text)[1:] == [
        "AtariWrapper.frame_skip 2 dropped: not a setting of env.atari",
        "AtariWrapper.noop_max 0 dropped: not a setting of env.atari",
    ]
    text = convert("{normalize: {norm_reward: false, clip_obs: 5, epsilon: 0.1}}")
    assert comments(text) == [
        "normalize.clip_obs 5 dropped: normalized values are clipped at 10 here",
        "normalize.epsilon 0.1 dropped: not a setting of PPO",
    ]


def test_a_rollout_that_is_no_number_is_refused_where_exploration_needs_it(convert):
    with pytest.raises(SettingError, match=r"CartPole-v1\.n_steps must be an integer >= 1, got 'many'"):
        convert("{use_sde: true, sde_sample_freq: 4, n_steps: many}", "a2c")


def test_atari_games_share_a_section():
    text = imported("ppo", "ALE/Pong-v5")
    given = settings(text)
    assert given["env"] == {"id": "ALE/Pong-v5", "num_envs": 8, "atari": True, "kwargs": {"repeat_action_probability": 0}}
    assert (given["net_arch"], given["encoder"], given["clip_reward"]) == ([], "nature_cnn", 1)
    assert settings(imported("ppo", "PongNoFrameskip-v4"))["env"]["id"] == "ALE/Pong-v5"


def test_arguments_of_a_game_are_kept_next_to_those_of_atari(convert):
    text = convert("{env_wrapper: AtariWrapper, env_kwargs: {mode: 1, repeat_action_probability: 0.25}}")
    assert settings(text)["env"]["kwargs"] == {"repeat_action_probability": 0.25, "mode": 1}


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{train_freq: [1, week]}", "CartPole-v1.train_freq must be one of step, episode, got 'week'"),
        ("{noise_type: lin-normal, noise_std: 0.1}", "CartPole-v1.noise_type must be one of normal, ornstein-uhlenbeck, got 'lin-normal'"),
    ],
)
def test_units_and_noises_that_are_not_known_are_refused(section, said, convert):
    with pytest.raises(SettingError) as error:
        convert(section, "td3")
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("algorithm", ["dqn", "sac", "td3"])
def test_returns_of_several_steps_are_kept_off_policy(algorithm, convert):
    assert settings(convert("{n_steps: 3}", algorithm))["n_steps"] == 3


@pytest.mark.parametrize(
    ("name", "asked", "today", "said"),
    [
        ("ppo", "LunarLander-v2", "LunarLander-v3", ["gymnasium has LunarLander-v3 instead of LunarLander-v2"]),
        ("ppo", "LunarLander-v3", "LunarLander-v3", ["these are the settings of LunarLander-v2"]),
        ("sac", "HalfCheetah-v3", "HalfCheetah-v5", ["gymnasium has HalfCheetah-v5 instead of HalfCheetah-v3"]),
        ("sac", "HalfCheetah-v4", "HalfCheetah-v4", ["these are the settings of HalfCheetah-v3"]),
        ("sac", "Pendulum-v1", "Pendulum-v1", []),
    ],
)
def test_an_environment_is_found_in_its_newest_version(name, asked, today, said):
    text = imported(name, asked)
    assert (settings(text)["env"]["id"], comments(text)[: len(said)]) == (today, said)


def test_an_old_mujoco_environment_is_found_in_its_newest_version_also_where_gymnasium_robotics_registered_it(monkeypatch):
    old = EnvSpec("HalfCheetah-v3", entry_point="gymnasium_robotics.envs.mujoco.half_cheetah_v3:HalfCheetahEnv")
    monkeypatch.setitem(gym.registry, old.id, old)
    assert settings(imported("sac", "HalfCheetah-v3"))["env"]["id"] == "HalfCheetah-v5"


def test_an_old_robot_is_found_in_its_newest_version(tmp_path):
    path = tmp_path / "tqc.yml"
    path.write_text("FetchReach-v1: {n_timesteps: 1000}")
    text = import_zoo(str(path), "FetchReach-v1")
    assert settings(text)["env"]["id"] == "FetchReach-v4" and comments(text) == ["gymnasium has FetchReach-v4 instead of FetchReach-v1"]


def test_wrappers_of_gymnasium_are_kept_and_others_are_reported(convert):
    known = [{"class_path": "TimeAwareObservation", "init_args": {"normalize_time": True}}]
    assert settings(imported("td3", "HalfCheetah-v3"))["env"]["wrappers"] == known
    text = convert(
        """
  frame_stack: 2
  env_kwargs: "dict(sutton_barto_reward=True)"
  env_wrapper:
    - rl_zoo3.wrappers.FrameSkip: {skip: 2}
    - gym.wrappers.resize_observation.ResizeObservation: {shape: 64}
    - gym.wrappers.gray_scale_observation.GrayScaleObservation: {keep_dim: true}
    - gymnasium.wrappers.ClipReward: {max_reward: 1}
    - gym.wrappers.time_limit.TimeLimit: {max_episode_steps: 500}
    - rl_zoo3.wrappers.HistoryWrapper: {horizon: 2}
"""
    )
    assert settings(text)["env"] == {
        "id": "CartPole-v1",
        "num_envs": 1,
        "kwargs": {"sutton_barto_reward": True},
        "max_episode_steps": 500,
        "wrappers": [
            {"class_path": "RepeatAction", "init_args": {"num_repeats": 2}},
            {"class_path": "ResizeObservation", "init_args": {"shape": [64, 64]}},
            {"class_path": "GrayscaleObservation", "init_args": {}},
            {"class_path": "ClipReward", "init_args": {"max_reward": 1}},
        ],
        "frame_stack": 2,
    }
    lost = "env_wrapper rl_zoo3.wrappers.HistoryWrapper dropped: not known here; put what it does into env.wrappers"
    assert lost in comments(text)


ERRORS = [
    ("{batch_sise: 3}", "CartPole-v1.batch_sise is not a setting of the zoo's ppo; did you mean batch_size?"),
    ("{buffer_size: 3}", "CartPole-v1.buffer_size is not a setting of the zoo's ppo"),
    ("3", "CartPole-v1 must be a mapping of settings, got 3"),
    ("{learning_rate: fast}", "CartPole-v1.learning_rate must be a number or a schedule such as lin_0.001, got 'fast'"),
    ("{learning_rate: lin_fast}", "got 'lin_fast'"),
    ("{learning_rate: .nan}", "CartPole-v1.learning_rate must be a number or a schedule", "got nan"),
    ("{clip_range: exp_0.1}", "CartPole-v1.clip_range must be a number or a schedule", "got 'exp_0.1'"),
    ("!!python/object:os.system {}", "ppo.yml is not valid YAML, line 1"),
    ("{n_timesteps: many}", "CartPole-v1.n_timesteps must be an integer >= 1, got 'many'"),
    ("{normalize: 3}", "CartPole-v1.normalize must be true or a mapping", "got 3"),
    ("{policy: CnnLstmPolicy}", "CartPole-v1.policy must be one of MlpPolicy, CnnPolicy, MultiInputPolicy, got 'CnnLstmPolicy'"),
    ('{policy_kwargs: "dict(net_arhc=[3])"}', "CartPole-v1.policy_kwargs.net_arhc is not", "did you mean net_arch?"),
    ('{policy_kwargs: "dict(activation_fn=nn.ReLu)"}', "policy_kwargs.activation_fn must be one of", "did you mean ReLU?"),
    ('{policy_kwargs: "dict(net_arch=[a])"}', "policy_kwargs.net_arch must be a list of widths", "['a']"),
    ('{policy_kwargs: "os.system(1)"}', "CartPole-v1.policy_kwargs must be a mapping", "'os.system(1)'"),
    ('{policy_kwargs: "dict("}', "CartPole-v1.policy_kwargs must be a mapping", "'dict('"),
    ("{env_kwargs: 3}", "CartPole-v1.env_kwargs must be a mapping of arguments, got 3"),
    ("{env_wrapper: [3]}", "CartPole-v1.env_wrapper must be class paths", "got 3"),
]


def test_hindsight_is_what_the_file_says(convert):
    arguments = "dict(online_sampling=True, goal_selection_strategy='future', n_sampled_goal=4, max_episode_length=100)"
    text = convert(f'{{replay_buffer_class: HerReplayBuffer, replay_buffer_kwargs: "{arguments}"}}', "sac")
    assert settings(text)["replay"] == {"relabel": {"strategy": "future", "k": 4}}
    assert comments(text) == ["online_sampling, max_episode_length dropped: not needed here"]
    text = convert('{replay_buffer_class: stable_baselines3.HerReplayBuffer, replay_buffer_kwargs: "dict(copy_info_dict=True)"}', "tqc")
    assert settings(text)["replay"] == {"relabel": {"strategy": "future", "k": 4}}
    assert comments(text) == ["copy_info_dict dropped: rows have no info here; compute_reward gets an empty one"]
    named = "dict(goal_selection_strategy=GoalSelectionStrategy.FINAL, n_sampled_goal=2)"
    assert settings(convert(f'{{replay_buffer_class: HerReplayBuffer, replay_buffer_kwargs: "{named}"}}', "dqn"))["replay"] == {
        "relabel": {"strategy": "final", "k": 2}
    }
    for wrong, words in (
        ("3", "replay_buffer_kwargs must be a mapping such as dict(n_sampled_goal=4), got 3"),
        ("dict(n_sampled_goal=0)", "replay_buffer_kwargs.n_sampled_goal must be >= 1, got 0"),
        ("dict(goal_selection_strategy='last')", "goal_selection_strategy must be one of future, final, episode, got 'last'"),
        (
            "dict(n_sampled_goals=4)",
            "replay_buffer_kwargs.n_sampled_goals is not a setting of HerReplayBuffer; did you mean n_sampled_goal?",
        ),
    ):
        with pytest.raises(SettingError) as error:
            convert(f'{{replay_buffer_class: HerReplayBuffer, replay_buffer_kwargs: "{wrong}"}}', "sac")
        assert words in str(error.value)
    assert "replay" not in settings(convert('{replay_buffer_kwargs: "dict(handle_timeout_termination=False)"}', "sac"))


def test_the_time_stays_next_to_the_goals(convert):
    wrapper = "sb3_contrib.common.wrappers.TimeFeatureWrapper"
    env = settings(convert(f"{{env_wrapper: {wrapper}, replay_buffer_class: HerReplayBuffer}}", "tqc"))["env"]
    assert env["wrappers"][0]["init_args"] == {"normalize_time": True, "flatten": False}


def test_a_wrong_file_ends_in_one_line(folder, capfd):
    for text, *parts in ERRORS:
        (folder / "ppo.yml").write_text(f"CartPole-v1: {text}")
        status, out, err = run("import-zoo ppo.yml CartPole-v1", capfd)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert all(part in err for part in parts) and len(err) < 202, err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("ppo.yml", "the following arguments are required: ENV"),
        ("ppo.yml atari", "atari is the section of all games: name one of them, such as ALE/Pong-v5"),
        ("ppo.yml CratPole-v1", "ppo.yml has no section for CratPole-v1; did you mean CartPole-v1?"),
        ("ppo.yml default", "default is the section of no environment: name one of the file's"),
        (
            "ppo.yml CartPole-v1 --algo pp",
            f"--algo must be one of {', '.join(ALGORITHMS)}, got 'pp'; did you mean ppo?",
        ),
        (
            "ppo.yml CartPole-v1 --algo her",
            "--algo: there is no her here; it is replay.relabel of SAC, TQC, TD3 and DQN, and the zoo does not read her.yml any more: ",
        ),
        (
            "mine.yml CartPole-v1",
            f"mine.yml: a zoo file is named after its algorithm, {', '.join(ALGORITHMS)}; name it with --algo",
        ),
        ("her.yml CartPole-v1 --algo tqc", "her.yml: there is no her here; "),
        ("files CartPole-v1", "files cannot be read: Is a directory"),
        ("tqc.yml CartPole-v1", "tqc.yml cannot be read: No such file or directory"),
        ("td3.yml CartPole-v1", "td3.yml cannot be read: No such file or directory"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, said, folder, capfd):
    (folder / "files").mkdir()
    for name in ("ppo", "mine", "qrdqn", "her"):
        (folder / f"{name}.yml").write_text("CartPole-v1: {n_envs: 2}")
    status, out, err = run(f"import-zoo {arguments}", capfd)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said in err
