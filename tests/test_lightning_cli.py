"""Lightning's words on the command line: `validate`, `test`, `-c`, and what its sweeps and its command line write."""

import json

import pytest
import yaml

from tests.command_line import TINY, run

FIT = f"fit {TINY} --model.env.id CartPole-v1"


@pytest.fixture
def trained(folder, capfd):
    assert run(FIT, capfd)[0] == 0
    return folder / "runs" / "PPO" / "CartPole-v1" / "version_0"


@pytest.mark.thorough
def test_validate_plays_the_evaluation_of_the_run_and_test_unseen_episodes(trained, capfd):
    found = [json.loads(run(f"{subcommand} --ckpt_path {trained} --json", capfd)[1]) for subcommand in ("validate", "test", "evaluate")]
    rows = [row.split(",") for row in (trained / "evaluations.csv").read_text().splitlines()[1:]]
    best = max({row[0] for row in rows}, key=lambda at: (sum(float(row[2]) for row in rows if row[0] == at), int(at)))
    returns = [float(row[2]) for row in rows if row[0] == best]
    assert found[0]["eval/mean_reward"] == sum(returns) / 2 and len(returns) == 2
    assert found[1]["test/mean_reward"] == found[2]["return_mean"]
    assert run(f"validate --ckpt_path {trained}", capfd)[1].startswith(f"eval/mean_reward {sum(returns) / 2:.2f}\n")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spoiled", "words"),
    [
        ("evaluation: {often: 3}", "'often'"),
        ("evaluation: 3", "evaluation"),
        ("[]", "must be a mapping"),
        (None, "--ckpt_path"),
        ("", "'x.ckpt'"),
    ],
)
def test_wrong_input_of_validate_is_one_line(spoiled, words, trained, capfd):
    if spoiled:
        (trained / "config.yaml").write_text(spoiled)
    options = {None: "", "": "--ckpt_path x.ckpt"}.get(spoiled, f"--ckpt_path {trained}")
    status, _, err = run(f"validate {options}", capfd)
    assert status == 2 and words in err and err.count("\n") == 1


@pytest.mark.thorough
def test_a_config_may_be_named_as_lightnings_command_line_does(folder, capfd):
    assert (
        run("fit -c ppo/cartpole --model.max_env_steps 7 --print_config", capfd)[:2]
        == run("fit --config ppo/cartpole --model.max_env_steps 7 --print_config", capfd)[:2]
    )


def test_values_may_be_written_as_sweeps_write_them(folder, capfd):
    (folder / "mine.yaml").write_text("model: {class_path: PPO, init_args: {env: CartPole-v1, n_epochs: 3.0, gamma: 1.0}}")
    status, out, _ = run("fit -c mine.yaml --model.max_env_steps=1000000.0 --model.target_kl=None --evaluation None --print_config", capfd)
    found = yaml.safe_load(out)
    settings = found["model"]["init_args"]
    assert status == 0 and found["evaluation"] is None and settings["target_kl"] is None
    assert [(settings[name], type(settings[name])) for name in ("max_env_steps", "n_epochs", "gamma")] == [
        (1_000_000, int),
        (3, int),
        (1.0, float),
    ]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--model.lr 0.1", "here it is model.learning_rate"),
        ("--optimizer Adam", "here it is configure_optimizers of a subclass, see docs/your_own.md"),
        ("--lr_scheduler StepLR", "here it is a schedule as model.learning_rate"),
        ("--data Mine", "algorithms collect their own experience"),
        ("--model.max_env_steps 10.5", "model.max_env_steps must be an integer, got 10.5"),
    ],
)
def test_lightnings_options_that_we_lack_name_ours(option, words, folder, capfd):
    status, _, err = run(f"{FIT} {option}", capfd)
    assert status == 2 and words in err and err.count("\n") == 1


def test_lightnings_timer_is_a_callback_of_a_config(folder, capfd):
    (folder / "timer.yaml").write_text("trainer: {callbacks: [{class_path: Timer, init_args: {duration: '00:00:10:00'}}]}")
    status, _, err = run(f"{FIT} --config timer.yaml", capfd)
    assert (status, err) == (0, "")
