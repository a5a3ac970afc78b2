"""What a user types, and what it does."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import math
import shlex
import struct
import sys
import time
from collections import defaultdict

import pytest
import torch
import yaml

from lightning_rl import ALGORITHMS
from lightning_rl.cli.fit import Notices
from lightning_rl.cli.names import read_options
from lightning_rl.cli.settings import read_arguments
from lightning_rl.processes.startup import config_folder
from tests.command_line import MODULE, TINY, run, run_apart, run_python

WRAPPER = """
import gymnasium as gym

class Scaled(gym.RewardWrapper):
    def __init__(self, env, scale=1.0):
        super().__init__(env)
        self.scale = scale

    def reward(self, reward):
        return reward * self.scale
"""
RUN = "runs/PPO/CartPole-v1/version_"
CARTPOLE = "fit --model.env.id CartPole-v1 " + TINY


def config_of(folder, number=0):
    return yaml.safe_load((folder / f"{RUN}{number}" / "config.yaml").read_text())


def weights_of(folder, number=0):
    return torch.load(folder / f"{RUN}{number}" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def rows_of(file):
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def wandb_records(data):
    """Return the records of a `.wandb` file: a LevelDB log, in blocks of 32 KiB, of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, position, whole = [], 7, b""
    while position + 7 <= len(data):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record or the last part of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


def printed(arguments, capfd):
    """Return the settings that a command line results in."""
    status, out, err = run(arguments + " --print_config", capfd)
    assert (status, err) == (0, "")
    return yaml.safe_load(out)


@pytest.fixture
def fit(folder, capfd):
    """Run a command that must end well, and return what it printed."""

    def fit(arguments):
        status, out, err = run(arguments, capfd)
        assert (status, err) == (0, ""), err
        return out

    return fit


@pytest.mark.thorough
def test_python_m_runs_as_the_program_does_and_prints_the_runs_folder_and_nothing_on_stderr(folder):
    status, out, err = run_python(("-m", "lightning_rl"), CARTPOLE, folder)
    assert (status, err) == (0, "")
    assert f"run: {RUN}0" in out and f"lightning-rl evaluate --ckpt_path {RUN}0/checkpoints/best.ckpt" in out
    assert (folder / f"{RUN}0/checkpoints/best.ckpt").is_file()


@pytest.mark.thorough
def test_the_subcommand_stands_before_or_after_the_config(fit, folder):
    options = CARTPOLE.removeprefix("fit ")
    for arguments in (
        f"fit --config ppo/cartpole {options}",
        f"--config ppo/cartpole fit {options}",
        f"--config=ppo/cartpole fit {options}",
    ):
        fit(arguments)
    assert same(weights_of(folder, 0), weights_of(folder, 1)) and same(weights_of(folder, 0), weights_of(folder, 2))


def test_an_algorithm_and_an_environment_are_a_complete_run(folder, capfd):
    config = printed("fit --model PPO --model.env.id CartPole-v1", capfd)
    assert config["model"]["init_args"]["env"]["id"] == "CartPole-v1" and config["model"]["init_args"]["n_steps"] == 128
    assert config["seed_everything"] == 0 and config["evaluation"]["episodes"] == 5


@pytest.mark.thorough
def test_entities_and_goals_are_named_on_the_command_line(fit, folder, capfd):
    crowd = (
        "--model.env.id tests.environments:Crowd-v0 --model.entities '[agents]' --model.goals [goal,sight.map] --model.encoder_features 8 "
    )
    config = printed(f"fit {crowd} {TINY}", capfd)["model"]["init_args"]
    assert (config["entities"], config["goals"]) == (["agents"], ["goal", "sight.map"])
    fit(f"fit {crowd} {TINY}")
    (checkpoint,) = folder.glob("runs/PPO/*/version_0/checkpoints/best.ckpt")
    assert torch.load(checkpoint, weights_only=True)["hyper_parameters"]["entities"] == ["agents"]
    fit(f"evaluate --ckpt_path {checkpoint} --episodes 2")


@pytest.mark.thorough
def test_later_configs_win_and_options_win_over_those_before(folder, capfd):
    (folder / "a.yaml").write_text(
        "model: {class_path: PPO, init_args: {env: Acrobot-v1, n_steps: 32, gamma: 0.9}}\nevaluation: {episodes: 3}"
    )
    (folder / "b.yaml").write_text("model: {init_args: {env: {num_envs: 4}, n_steps: 64, vf_coef: 0.1}}\nevaluation: {seed: 7}")
    config = printed("fit --config a.yaml --config b.yaml --model.vf_coef 0.3 --model.env.frame_stack 2", capfd)
    model, env = config["model"]["init_args"], config["model"]["init_args"]["env"]
    assert (model["n_steps"], model["gamma"], model["vf_coef"]) == (64, 0.9, 0.3)
    assert (env["id"], env["num_envs"], env["frame_stack"]) == ("Acrobot-v1", 4, 2)
    assert (config["evaluation"]["episodes"], config["evaluation"]["seed"]) == (3, 7)
    turned = printed("fit --config b.yaml --config a.yaml", capfd)["model"]["init_args"]
    assert turned["n_steps"] == 32 and turned["env"]["num_envs"] == 4


@pytest.mark.thorough
def test_reward_signals_are_merged_setting_by_setting_and_null_removes_one_or_all(folder, capfd):
    (folder / "a.yaml").write_text(
        "model: {class_path: PPO, init_args: {env: Acrobot-v1, reward_signals: {rnd: {strength: 0.1, gamma: 0.9}, curiosity: {}}}}"
    )

    def signals(options):
        return printed(f"fit --config a.yaml {options}", capfd)["model"]["init_args"]["reward_signals"]

    assert signals("") == {"rnd": {"strength": 0.1, "gamma": 0.9}, "curiosity": {}}
    assert signals("--model.reward_signals.rnd.strength 1e-2")["rnd"] == {"strength": 0.01, "gamma": 0.9}
    assert signals("--model.reward_signals '{extrinsic: {strength: 0}, rnd: {gamma: 0.5}}'") == {
        "extrinsic": {"strength": 0},
        "rnd": {"strength": 0.1, "gamma": 0.5},
        "curiosity": {},
    }
    assert signals("--model.reward_signals.rnd null")["rnd"] is None
    assert signals("--model.reward_signals null") == signals("--model.reward_signals {}") == {}
    assert signals("--model.reward_signals null --model.reward_signals.curiosity.gamma 0.8") == {"curiosity": {"gamma": 0.8}}


@pytest.mark.thorough
def test_behavioral_cloning_is_set_and_removed_on_the_command_line(folder, capfd):
    (folder / "a.yaml").write_text("model: {class_path: PPO, init_args: {env: Acrobot-v1, behavioral_cloning: {demo_path: a/b-v0}}}")
    config = printed("fit --config a.yaml --model.behavioral_cloning.strength 0.5 --model.behavioral_cloning.steps 1e4", capfd)
    cloning = config["model"]["init_args"]["behavioral_cloning"]
    assert (cloning["demo_path"], cloning["strength"], cloning["steps"]) == ("a/b-v0", 0.5, 10_000)
    taken_back = printed("fit --config a.yaml --model.behavioral_cloning null", capfd)
    assert taken_back["model"]["init_args"]["behavioral_cloning"] is None


@pytest.mark.thorough
def test_null_resets_settings_of_the_replay_buffer(folder, capfd):
    named = "--model.replay.demonstrations a/b-v0 --model.replay.demonstration_share 0.5 --model.replay.directory rows"
    taken_back = named.replace("a/b-v0", "null").replace("0.5", "null").replace("rows", "null")
    replay = printed(f"fit --model SAC --model.env.id Pendulum-v1 {named} {taken_back}", capfd)["model"]["init_args"]["replay"]
    assert (replay["demonstrations"], replay["demonstration_share"], replay["directory"]) == (None, None, None)


@pytest.mark.variants
@pytest.mark.parametrize(
    "options",
    [
        "--config a.yaml --model.env.num_envs 3",
        "--model.env.num_envs 3 --config a.yaml",
        "--model PPO --model.env Acrobot-v1 --model.env.num_envs 3",
        "--model.env.num_envs 3 --model PPO --model.env.id Acrobot-v1",
        "--model PPO --model.env '{id: Acrobot-v1, num_envs: 3}'",
        "--model.env.init_args.num_envs=3 --model=lightning_rl.PPO --model.env=Acrobot-v1",
    ],
)
def test_an_environment_and_its_settings_are_merged_in_any_order(options, folder, capfd):
    (folder / "a.yaml").write_text("model: {class_path: PPO, init_args: {env: Acrobot-v1}}")
    env = printed(f"fit {options}", capfd)["model"]["init_args"]["env"]
    assert (env["id"], env["num_envs"]) == ("Acrobot-v1", 3)


@pytest.mark.thorough
def test_whole_numbers_may_be_written_with_an_exponent_or_a_point(folder, capfd):
    (folder / "a.yaml").write_text("model: {class_path: PPO, init_args: {env: Acrobot-v1, max_env_steps: 1e6, learning_rate: 3e-4}}")
    (folder / "b.yaml").write_text("model: {init_args: {max_env_steps: 5.0e4, learning_rate: 1.e-3}}\nevaluation: {every_n_env_steps: 1E3}")
    first = printed("fit --config a.yaml", capfd)["model"]["init_args"]
    assert (first["max_env_steps"], first["learning_rate"]) == (1_000_000, 3e-4) and isinstance(first["max_env_steps"], int)
    both = printed("fit --config a.yaml --config b.yaml --model.n_steps 2e2 --checkpoint.every_n_env_steps=5.0e4", capfd)
    assert (both["model"]["init_args"]["max_env_steps"], both["model"]["init_args"]["learning_rate"]) == (50_000, 1e-3)
    whole = printed("fit --config a.yaml --model.env.num_envs 8.0 --model.env.max_episode_steps=50.0 --evaluation.episodes 3.0", capfd)
    env = whole["model"]["init_args"]["env"]
    assert [repr(env["num_envs"]), repr(env["max_episode_steps"]), repr(whole["evaluation"]["episodes"])] == ["8", "50", "3"]
    assert both["model"]["init_args"]["n_steps"] == 200 and both["checkpoint"]["every_n_env_steps"] == 50_000
    assert both["evaluation"]["every_n_env_steps"] == 1_000


@pytest.mark.thorough
def test_a_printed_config_and_that_of_a_run_give_the_same_weights(fit, folder, capfd):
    fit(CARTPOLE + "--seed_everything 3")
    (folder / "printed.yaml").write_text(yaml.safe_dump(printed(CARTPOLE + "--seed_everything 3", capfd)))
    fit(f"fit --config {RUN}0/config.yaml")
    fit("fit --config printed.yaml")
    fit(CARTPOLE + "--seed_everything 4")
    assert same(weights_of(folder, 0), weights_of(folder, 1)) and same(weights_of(folder, 0), weights_of(folder, 2))
    assert not same(weights_of(folder, 0), weights_of(folder, 3))
    assert config_of(folder, 0) == config_of(folder, 1) == config_of(folder, 2)


@pytest.mark.thorough
def test_wrappers_with_arguments_are_those_that_the_user_wrote_and_a_run_with_them_continues(fit, folder):
    wrappers = [
        {"class_path": "gymnasium.wrappers.ClipReward", "init_args": {"max_reward": 0.5}},
        "FlattenObservation",
        {"class_path": "mine.Scaled", "init_args": {"scale": 10}},
    ]
    (folder / "mine.py").write_text(WRAPPER)
    (folder / "wrapped.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"env": {"id": "CartPole-v1", "wrappers": wrappers}}}}))
    fit(CARTPOLE + f"--model.env.wrappers '{json.dumps(wrappers)}'")
    fit(f"fit --config wrapped.yaml {TINY}")
    out = fit(f"fit --config {RUN}0/config.yaml --trainer.max_steps 1")
    for number in range(3):
        assert config_of(folder, number)["model"]["init_args"]["env"]["wrappers"] == wrappers
    assert all(float(row["return"]) == 5 * float(row["length"]) for row in rows_of(folder / f"{RUN}0" / "evaluations.csv"))
    line = next(line for line in out.splitlines() if line.startswith("continue it: "))
    assert "continued at 32" in fit(line.removeprefix("continue it: lightning-rl "))


def test_sections_may_be_off(fit, folder):
    fit(
        CARTPOLE.replace(
            "--evaluation.episodes 2 --evaluation.num_envs 2 --evaluation.max_episode_steps 20", "--evaluation null --checkpoint null"
        )
    )
    left = {path.name for path in (folder / f"{RUN}0").iterdir()}
    assert {"config.yaml", "metrics.csv"} <= left and not left & {"evaluations.csv", "checkpoints"}


@pytest.mark.thorough
def test_a_module_in_the_current_folder_provides_environments_and_algorithms(fit, folder):
    (folder / "mine.py").write_text(MODULE)
    fit("fit --import mine --model.env.id Mine-v0 " + TINY)
    fit("fit --model.env.id mine:Mine-v0 " + TINY)
    fit("fit --model.env.id mine:Mine-v0 " + TINY + "--model mine.MyPPO --model.factor 2.0")
    fit("fit --import=mine --model.env.id Mine-v0 " + TINY + "--model MyPPO")
    assert (folder / "runs/PPO/Mine-v0/version_1/checkpoints/best.ckpt").is_file()
    factors = [
        yaml.safe_load((folder / f"runs/MyPPO/Mine-v0/version_{n}/config.yaml").read_text())["model"]["init_args"]["factor"] for n in (0, 1)
    ]
    assert factors == [2.0, 1.0]


@pytest.mark.thorough
def test_a_checkpoint_that_needs_a_users_module_is_evaluated_if_it_is_imported(folder):
    (folder / "mine.py").write_text(MODULE)
    assert run_apart("fit --model.env.id mine:Mine-v0 " + TINY + "--model mine.MyPPO", folder)[::2] == (0, "")
    best = "runs/MyPPO/Mine-v0/version_0/checkpoints/best.ckpt"
    status, _, err = run_apart(f"evaluate --ckpt_path {best} --episodes 3 --json", folder)
    assert status == 2 and "--import" in err and err.count("\n") == 1
    status, out, err = run_apart(f"evaluate --import mine --ckpt_path {best} --episodes 3 --json", folder)
    assert (status, err) == (0, "") and json.loads(out)["return_mean"] == 5.0


def test_a_file_in_the_current_folder_does_not_shadow_a_package(folder, capfd):
    for name in ("colorsys", "mine"):  # nothing here imports that one of Python's
        (folder / f"{name}.py").write_text(f"open('{name}_ran', 'w').close()")
    for options in ("", "--import colorsys "):
        assert run(f"evaluate {options}--ckpt_path best.ckpt", capfd)[0] == 2
        assert str(folder) not in sys.path
    assert run("evaluate --import mine --ckpt_path best.ckpt", capfd)[0] == 2
    assert sys.path[-1] == str(folder) and [path.name for path in folder.glob("*_ran")] == ["mine_ran"]


@pytest.mark.parametrize(
    "arguments, looks",
    [
        ("--config ppo/cartpole", False),
        ("--model PPO --model.env.id CartPole-v1 --trainer.max_time 00:00:10:00 --model.gamma 0.9", False),
        ("--config ppo/cartpole --trainer.callbacks+=pytorch_lightning.callbacks.Timer", False),
        ("--config ppo/cartpole --trainer.callbacks+=mine.Timer", True),
        ("--config ppo/cartpole --model.env.id mine:Mine-v0", True),
        ("--config ppo/cartpole --model.env.wrappers [mine.Wrapper]", True),
        ("--config wrapped.yaml", True),
        ("--config ppo/cartpole --trainer.logger '{class_path: mine.Logger, init_args: {save_dir: runs.d}}'", True),
        ("--config ppo/cartpole --ckpt_path best.ckpt", False),
        ("--config paths.yaml --trainer.default_root_dir my.runs --init_from best.ckpt", False),
        (
            "--config ppo/cartpole --trainer.logger '{class_path: pytorch_lightning.loggers.CSVLogger, init_args: {save_dir: runs.d}}'",
            False,
        ),
    ],
)
def test_fit_looks_for_modules_in_the_current_folder_where_the_user_names_one(arguments, looks, folder):
    (folder / "wrapped.yaml").write_text("model: {class_path: PPO, init_args: {env: {id: A-v0, wrappers: [{class_path: mine.Wrapper}]}}}")
    (folder / "paths.yaml").write_text(
        "model: {class_path: PPO, init_args: {env: {id: A-v0, kwargs: {xml_file: ant.xml, id: a.b}}, "
        "reward_signals: {gail: {demo_path: expert.demo}}}}"
    )
    read_arguments(read_options(shlex.split(arguments)))
    assert (str(folder) in sys.path) == looks


@pytest.mark.slow
def test_python_m_imports_nothing_from_the_current_folder(folder):
    (folder / "torch.py").write_text("open('ran', 'w').close()")
    assert run_python(("-m", "lightning_rl"), "evaluate --ckpt_path best.ckpt", folder)[0] == 2
    assert not (folder / "ran").exists()


@pytest.mark.thorough
def test_evaluate_prints_what_was_logged_at_the_best_evaluation(fit, folder, capfd):
    fit(CARTPOLE + "--evaluation.every_n_env_steps 32 --evaluation.episodes 5 --evaluation.seed 40")
    logged = {int(row["env_steps"]): row["eval/mean_reward"] for row in rows_of(folder / f"{RUN}0/metrics.csv") if row["eval/mean_reward"]}
    assert list(logged) == [32, 64]
    options = "--episodes 5 --seed 40 --num_envs 2 --max_episode_steps 20"
    result = json.loads(fit(f"evaluate --ckpt_path {RUN}0/checkpoints/best.ckpt {options} --json"))
    assert float(logged[result["env_steps"]]) == result["return_mean"] == max(map(float, logged.values()))
    own = [float(row["return"]) for row in rows_of(folder / f"{RUN}0/evaluations.csv") if int(row["env_steps"]) == result["env_steps"]]
    assert (result["return_min"], result["return_max"], sum(own) / 5) == (min(own), max(own), result["return_mean"])
    keys = "return_mean return_std return_min return_max return_median iqm ci_low ci_high length_mean episodes env_steps seed"
    assert list(result) == keys.split() and (result["episodes"], result["seed"]) == (5, 40)
    text = fit(f"evaluate --ckpt_path {RUN}0/checkpoints/best.ckpt {options}")
    assert text.startswith(f"return {result['return_mean']:.2f} ±") and text.count("\n") == 1
    assert "95 % interval of the mean" in text and " over 5 episodes " in text
    drawn = json.loads(fit(f"evaluate --ckpt_path {RUN}0/checkpoints/best.ckpt {options} --stochastic --json"))
    assert drawn["return_mean"] != result["return_mean"]


@pytest.mark.thorough
def test_evaluate_prints_no_spread_for_one_episode(fit, folder):
    fit(CARTPOLE)
    command = f"evaluate --ckpt_path {RUN}0/checkpoints/last.ckpt --episodes 1 --max_episode_steps 5"
    assert fit(command) == "return 5.00 in 1 episode, length 5, trained for 64 environment steps\n"
    result = json.loads(fit(f"{command} --json"))
    assert (result["episodes"], result["return_mean"], result["ci_low"], result["ci_high"]) == (1, 5.0, None, None)


@pytest.mark.thorough
def test_evaluate_prints_the_share_of_successes_where_the_environment_reports_it(fit, folder):
    out = fit(
        "fit --model PPO --model.env.id tests.environments:Scripted-v0 --model.max_env_steps 64 --model.n_steps 8 --model.batch_size 8"
    )
    (folder_of_run,) = folder.glob("runs/PPO/*/version_0")
    assert ", success " in next(line for line in out.splitlines() if line.startswith("evaluation at "))
    command = f"evaluate --ckpt_path {folder_of_run} --episodes 6 --num_envs 1"
    assert json.loads(fit(f"{command} --json"))["success_rate"] == pytest.approx(2 / 3)  # termination, truncation, both
    assert "success 66.7%" in fit(command).splitlines()


@pytest.mark.thorough
def test_an_unknown_run_is_reported_with_the_existing_ones(fit, folder, capfd):
    fit(CARTPOLE)
    status, out, err = run(f"evaluate --ckpt_path {RUN}9", capfd)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert "there is no such run" in err and "version_0" in err


@pytest.mark.parametrize("way", ["config", "option"])
def test_nulls_and_infinities_inside_a_mapping_are_kept(way, fit, folder):
    kwargs = "{a: null, b: .inf, c: {d: null}}"
    (folder / "mine.yaml").write_text(f"model: {{class_path: PPO, init_args: {{env: {{kwargs: {kwargs}}}}}}}")
    given = "--config mine.yaml" if way == "config" else f"--model.env.kwargs '{kwargs}'"
    config = yaml.safe_load(fit(f"{CARTPOLE} {given} --print_config"))
    assert config["model"]["init_args"]["env"]["kwargs"] == {"a": None, "b": math.inf, "c": {"d": None}}


@pytest.mark.thorough
def test_evaluate_reports_that_it_plays_the_final_lesson(fit, folder):
    lessons = "[{name: short, value: 0.5, completion_criteria: {threshold: 5}}, {name: long, value: 2}]"
    (folder / "lessons.yaml").write_text(
        f"model: {{class_path: PPO, init_args: {{env: {{parameters: {{length: {{curriculum: {lessons}}}}}}}}}}}"
    )
    fit(CARTPOLE + "--config lessons.yaml")
    options = f"evaluate --ckpt_path {RUN}0/checkpoints/last.ckpt --episodes 2"
    assert fit(options).splitlines()[1:] == ["played in the final lessons: length long (2)"]
    assert json.loads(fit(options + " --json"))["episodes"] == 2


def test_a_run_continues_from_a_checkpoint_by_its_path_and_from_the_last(fit, folder):
    fit(CARTPOLE)
    fit(CARTPOLE + f"--model.max_env_steps 128 --ckpt_path {RUN}0/checkpoints/last.ckpt")
    fit(CARTPOLE + "--model.max_env_steps 192 --ckpt_path last")
    steps = [
        [int(row["env_steps"]) for row in rows_of(folder / f"{RUN}{number}/metrics.csv") if row["time/iterations"]] for number in (0, 1)
    ]
    assert steps == [[32, 64], [96, 128, 160, 192]]


@pytest.mark.thorough
def test_version_and_list_start_without_torch(tmp_path):
    check = "assert not {'torch', 'pytorch_lightning'} & set(sys.modules)"
    program = f"import sys; from lightning_rl.cli.main import main; main(sys.argv[1:]); {check}"
    status, out, err = run_python(("-c", program), "--version", tmp_path)
    assert (status, out, err) == (0, "lightning_rl 0.1.0\n", "")
    status, out, err = run_python(("-c", program), "list", tmp_path)
    assert (status, err) == (0, "")
    assert "PPO                  Proximal Policy Optimization" in out and "ppo/cartpole" in out and "logger/wandb" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("", ["fit", "evaluate", "list", "--import"]),
        ("--help", ["fit", "tune", "evaluate", "list", "--import"]),
        ("tune --help", ["--space FILE", "--trials", "--pruner", "--engine", "(20)"]),
        ("fit --help", ["--config FILE", "--model.max_env_steps", "--ckpt_path", "--evaluation.SETTING", "--model.help PPO"]),
        ("list --help", ["usage: lightning-rl list", "algorithms", "configs"]),
        ("list -h", ["usage: lightning-rl list"]),
        ("evaluate --help", ["--ckpt_path", "--episodes", "--json", "--stochastic"]),
        ("fit --model.help PPO", ["--model.clip_range", "surrogate", "--model.gamma", "discount"]),
    ],
)
def test_help_is_readable(arguments, words, folder, capfd):
    status, out, err = run(arguments, capfd)
    assert (status, err) == (0, "") and all(word in out for word in words)
    assert len(out.splitlines()) < 240 and "Traceback" not in out


@pytest.mark.thorough
def test_every_packaged_config_begins_with_a_comment_and_parses(folder, capfd):
    by_algorithm = defaultdict(list)
    for file in sorted(config_folder().rglob("*.yaml")):
        text = file.read_text()
        assert text.startswith("# "), file
        default = "IMPALA" if "actors:" in text else "PPO"
        algorithm = yaml.safe_load(text).get("model", {}).get("class_path", default)
        by_algorithm[algorithm].append(file.relative_to(config_folder()).with_suffix("").as_posix())
    for name in by_algorithm.pop("MultiAgent"):  # behaviors of one would be added to those of another
        printed(f"fit --config {name}", capfd)
    assert len(by_algorithm) == len(ALGORITHMS)
    for algorithm, names in by_algorithm.items():  # each config is checked, also where a later one wins
        printed(f"fit --model {algorithm} --model.env.id CartPole-v1 " + " ".join(f"--config {name}" for name in names), capfd)


@pytest.mark.thorough
def test_an_option_changes_one_setting_of_one_behavior(folder, capfd):
    changed = "--model.behaviors.good.learner.learning_rate 1e-5 --model.behaviors.good.learner.init_args.replay.prioritized true"
    whole = "--model.behaviors.adversary.learner A2C --model.behaviors.adversary.learner.n_steps 7"
    config = printed(f"fit --config multi_agent/simple_adversary {changed} {whole}", capfd)
    packaged = yaml.safe_load((config_folder() / "multi_agent" / "simple_adversary.yaml").read_text())["model"]["init_args"]["behaviors"]
    good = packaged["good"]["learner"]["init_args"] | {"learning_rate": 1e-5, "replay": {"prioritized": True}}
    assert config["model"]["init_args"]["behaviors"] == {
        "adversary": {"agents": "adversary_0", "learner": {"class_path": "A2C", "init_args": {"n_steps": 7}}},
        "good": {"agents": "agent_*", "learner": {"class_path": "PPO", "init_args": good}},
    }


@pytest.mark.variants
@pytest.mark.parametrize(
    ("option", "line"),
    [
        ("godo.learner.gamma 0.9", "--model.behaviors.godo.learner.gamma: there is no behavior godo; did you mean good?"),
        ("good.learner.gama 0.9", "behavior good: gama is not a setting of PPO; did you mean gamma?"),
        ("good.agent a", "model.behaviors.good.agent is not a setting; did you mean agents?"),
        ("good.learner.n_steps x", "behavior good: n_steps must be an integer >= 1, got 'x'"),
    ],
)
def test_a_wrong_option_for_a_behavior_ends_in_one_line(option, line, folder, capfd):
    status, _, err = run(f"fit --config multi_agent/simple_adversary --model.behaviors.{option}", capfd)
    assert (status, err) == (2, f"error: {line}\n")


def test_a_wrong_value_is_found_where_a_later_config_wins(folder, capfd):
    (folder / "a.yaml").write_text("model: {class_path: PPO, init_args: {env: CartPole-v1, n_steps: x}}")
    status, _, err = run("fit --config a.yaml --model.n_steps 16 --print_config", capfd)
    assert (status, err) == (2, "error: model.n_steps must be an integer, got x\n")


@pytest.mark.thorough
def test_weights_and_biases_keeps_settings_and_metrics_over_environment_steps(fit, folder, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it keeps the settings that it read first in this process
    (folder / "elsewhere").mkdir()
    with contextlib.chdir(folder / "elsewhere"):  # where its service is started, for all runs of this process
        wandb.init(dir=folder / "elsewhere").finish()
    fit(CARTPOLE + "--config logger/wandb")
    wandb.finish()
    (file,) = (folder / "runs/wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30
    while sum(record.HasField("exit") for record in wandb_records(file.read_bytes())) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)  # its service writes in a process of its own, and may not be done on a busy machine
    records = wandb_records(file.read_bytes())
    history = [record.history.item for record in records if record.HasField("history")]
    rows = [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items} for items in history]
    assert {32, 64} == {row["env_steps"] for row in rows if "train/value_loss" in row}
    assert {64} == {row["env_steps"] for row in rows if "eval/mean_reward" in row}
    axes = {r.metric.glob_name or r.metric.name: r.metric.step_metric for r in records if r.HasField("metric")}
    assert axes["*"] == "env_steps"
    settings = {".".join(u.nested_key) or u.key: u.value_json for r in records for u in [*r.config.update, *r.run.config.update]}
    assert json.loads(settings["n_steps"]) == 16 and "CartPole-v1" in settings["env"]


def test_off_is_a_word_in_a_config(folder, capfd):
    (folder / "a.yaml").write_text("model: {class_path: PPO, init_args: {env: CartPole-v1, normalize_obs: off, normalize_reward: true}}")
    model = printed("fit --config a.yaml", capfd)["model"]["init_args"]
    assert model["normalize_obs"] == "off" and model["normalize_reward"] is True


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--model.reward_signals.rnd.help", "normalize_reward: "),
        ("--model.behavioral_cloning.help", "samples_per_update: "),
        ("--model SAC --model.replay.help", "demonstration_share: "),
        ("--evaluation.help", "max_share: "),
        ("--checkpoint.help", "monitor: "),
        ("--model IMPALA --model.actors.help", "rollouts_per_batch: "),
        ("--model.env.help", "frame_stack: "),
    ],
)
def test_settings_inside_settings_are_explained(option, said, folder, capfd):
    status, out, err = run(f"fit {option}", capfd)
    assert (status, err) == (0, "") and said in out


def test_notices_to_a_closed_file_are_dropped_and_those_to_a_closed_pipe_raise(monkeypatch):
    class Pipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(logging, "raiseExceptions", False)  # nor are they told on stderr
    before = io.StringIO()
    before.close()
    notice = logging.makeLogRecord({"msg": "restoring"})
    Notices(before).handle(notice)
    with pytest.raises(BrokenPipeError):
        Notices(Pipe()).handle(notice)
