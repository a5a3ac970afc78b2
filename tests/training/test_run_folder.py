"""How a run starts: in a new folder, in a named one, or with the weights of another run."""

from __future__ import annotations

import gc
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading

import pytest
import torch

from lightning_rl import PPO, Trainer, evaluate, load_policy
from lightning_rl.checkpoints.files import last_generation
from lightning_rl.cli.main import main
from lightning_rl.errors import SettingError
from lightning_rl.loggers import read_rows
from lightning_rl.processes.startup import importing
from lightning_rl.training.run_folder import replacing, take_run
from tests.checkpoints.test_atomic import another_process
from tests.command_line import TINY, run
from tests.fitting import tiny


def fit(folder, model=None, **arguments):
    at_start = {name: arguments.pop(name) for name in ("init_from", "force", "ckpt_path") if name in arguments}
    model = model or tiny(PPO, "CartPole-v1")
    trainer = Trainer(default_root_dir=folder, accelerator="cpu", enable_progress_bar=False, evaluation=None, **arguments)
    trainer.fit(model, **at_start)
    return model, trainer.run_folder


def weights_of(path):
    return torch.load(path, weights_only=True)["state_dict"]


class Still(PPO):
    """Learns nothing: what it begins with is what it ends with."""

    def step(self, loss, optimizer):
        return torch.zeros(())


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["", "checkpoints/last.ckpt"])
def test_init_from_takes_the_weights_of_another_run_and_counts_from_zero(tmp_path, place):
    _, run_folder = fit(tmp_path)
    model, other = fit(tmp_path, tiny(Still, "CartPole-v1", seed=1), init_from=run_folder / place)
    assert other != run_folder and model.env_steps == 96 and model.updates == 24
    theirs = weights_of(run_folder / "checkpoints" / "last.ckpt")
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, theirs[name])] == []


@pytest.mark.thorough
def test_a_runs_folder_stands_for_its_best_checkpoint(folder, capfd, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
    assert run(f"fit --model.env.id CartPole-v1 {TINY} --evaluation.every_n_env_steps 32", capfd)[0] == 0
    place = "runs/PPO/CartPole-v1/version_0"
    best = f"{place}/checkpoints/best.ckpt"
    short = "--episodes 2 --num_envs 1 --max_episode_steps 9"
    judged = [run(f"evaluate --ckpt_path {path} {short} --json", capfd)[1] for path in (best, place, f"{place}/checkpoints")]
    assert judged[0].startswith("{") and judged == judged[:1] * 3
    assert json.loads(judged[0]) == evaluate(place, 2, num_envs=1, max_episode_steps=9)
    assert (
        run(f"record --ckpt_path {place} --max_episode_steps 3", capfd)[0] == 0 and (folder / place / "videos" / "episode_0.mp4").is_file()
    )
    assert run(f"export --ckpt_path {place} --format safetensors", capfd)[0] == 0
    assert (folder / best).with_suffix(".safetensors").is_file()
    assert run(f"collect --ckpt_path {place} --dataset mine/b-v0 --episodes 1", capfd)[0] == 0
    policies = [load_policy(path).network.state_dict() for path in (best, place)]
    assert all(torch.equal(value, policies[1][name]) for name, value in policies[0].items())


@pytest.mark.thorough
def test_init_from_takes_frozen_statistics(tmp_path):
    _, run_folder = fit(tmp_path, tiny(PPO, "CartPole-v1", normalize_obs="running"))
    settings = {"normalize_obs": "frozen", "normalize_obs_steps": 20, "seed": 1}
    model, _ = fit(tmp_path, tiny(Still, "CartPole-v1", **settings), init_from=run_folder)
    theirs = weights_of(run_folder / "checkpoints" / "last.ckpt")
    assert theirs["network.normalizer.statistics.0.count"] > 90 and model.env_steps == 96  # no random steps
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, theirs[name])] == []


@pytest.mark.thorough
def test_init_from_names_layers_that_keep_their_initial_weights(tmp_path, capsys):
    _, run_folder = fit(tmp_path)
    first = tiny(Still, "Acrobot-v1", seed=1).state_dict()
    capsys.readouterr()
    model, _ = fit(tmp_path, tiny(Still, "Acrobot-v1", seed=1), init_from=run_folder)
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("init_from: ")]
    theirs, ours = weights_of(run_folder / "checkpoints" / "last.ckpt"), model.state_dict()
    same = {name.rpartition(".")[0] for name in ours if theirs[name].shape == ours[name].shape and torch.equal(theirs[name], ours[name])}
    anew = {line.split()[1] for line in said}
    assert "[8, 4] in the checkpoint, [8, 6] here" in "".join(said) and anew
    assert all(torch.equal(ours[name], first[name]) for name in ours if name.rpartition(".")[0] in anew)
    assert anew | same == {name.rpartition(".")[0] for name in ours} and not anew & same


@pytest.mark.variants
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--init_from nowhere", "init_from 'nowhere' is neither a run's folder nor a checkpoint"),
        ("--init_from .", "init_from '.' has no checkpoints/last.ckpt; name a run's folder or a checkpoint"),
        ("--init_from garbage.ckpt", "init_from 'garbage.ckpt' cannot be read as a checkpoint"),
        ("--init_from agent", "init_from 'agent/agent.json' cannot be read as the description of an agent"),
        ("--init_from . --ckpt_path last", "ckpt_path continues a run and init_from begins one: give one of them"),
        ("--trainer.run_name a/b", "trainer.run_name must be the name of a folder, got 'a/b'"),
        ("--trainer.run_name ..", "trainer.run_name must be the name of a folder, got '..'"),
    ],
)
def test_impossible_starts_are_refused_in_one_line(folder, capfd, options, message):
    (folder / "garbage.ckpt").write_bytes(b"not a checkpoint")
    (folder / "agent").mkdir()
    (folder / "agent/agent.json").write_text("no JSON")
    status, _, err = run(f"fit {TINY} --model.env.id CartPole-v1 {options}", capfd)
    assert (status, err.count("\n")) == (2, 1) and message in err, err


@pytest.mark.thorough
def test_a_named_run_is_not_overwritten_unless_forced_and_can_be_continued(folder, capfd):
    named = f"fit {TINY} --model.env.id CartPole-v1 --trainer.run_name mine"
    assert run(named, capfd)[::2] == (0, "")
    metrics = folder / "runs/PPO/CartPole-v1/mine/metrics.csv"
    before = metrics.read_text()
    status, _, err = run(named, capfd)
    assert status == 2 and "there is a run in runs/PPO/CartPole-v1/mine: --ckpt_path last continues it, --force starts again" in err
    assert metrics.read_text() == before
    assert run(f"{named} --ckpt_path last --model.max_env_steps 128", capfd)[::2] == (0, "")
    assert metrics.read_text().startswith(before.rstrip()[: len(before) // 2])
    assert run(f"{named} --force --model.max_env_steps 32", capfd)[::2] == (0, "")
    assert len(metrics.read_text().splitlines()) < len(before.splitlines())


@pytest.mark.thorough
def test_ckpt_path_last_restarts_a_named_run_that_was_killed_before_it_saved(folder, capfd):
    named = f"fit {TINY} --model.env.id CartPole-v1 --trainer.run_name mine"
    assert run(named, capfd)[::2] == (0, "")
    home = folder / "runs/PPO/CartPole-v1/mine"
    rows = (home / "metrics.csv").read_text()
    shutil.rmtree(home / "checkpoints")
    status, _, err = run(named, capfd)
    assert (status, err.count("\n")) == (2, 1) and "mine that saved nothing: --force starts again and deletes it" in err
    assert run(f"{named} --ckpt_path last --trainer.enable_checkpointing false", capfd)[0] == 2  # which could not be continued either
    assert (home / "metrics.csv").read_text() == rows
    assert run(f"{named} --ckpt_path last", capfd)[::2] == (0, "")
    assert len((home / "metrics.csv").read_text().splitlines()) == len(rows.splitlines()) and last_generation(home / "checkpoints")


@pytest.mark.thorough
@pytest.mark.parametrize("kept", ["best.ckpt", "best.previous.ckpt", "env_steps=32.ckpt"])
def test_a_named_run_that_saved_no_last_checkpoint_is_not_replaced_and_the_line_names_the_one_that_is_there(folder, capfd, kept):
    named = f"fit {TINY} --model.env.id CartPole-v1 --trainer.run_name mine"
    assert run(named, capfd)[::2] == (0, "")
    home = folder / "runs/PPO/CartPole-v1/mine"
    (home / "checkpoints/best.ckpt").rename(home / "checkpoints" / kept)
    for file in [*home.glob("checkpoints/*.json"), *home.glob("checkpoints/last*"), *home.glob("checkpoints/best.prev*.json")]:
        file.unlink(missing_ok=True)
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    known = f"runs/PPO/CartPole-v1/mine/checkpoints/{kept}"
    way_out = f"--ckpt_path {known} continues it with another run_name, --force deletes it"
    for options in ("", "--ckpt_path last"):
        status, _, err = run(f"{named} {options}", capfd)
        assert (status, err) == (2, f"error: there is a run without last.ckpt: {way_out}\n")
    status, _, err = run(f"fit {TINY} --model.env.id CartPole-v1 --ckpt_path runs/PPO/CartPole-v1/mine", capfd)
    assert (status, err) == (2, f"error: ckpt_path 'runs/PPO/CartPole-v1/mine' has no checkpoints/last.ckpt; name '{known}'\n")
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
    other = f"fit {TINY} --model.env.id CartPole-v1 --trainer.run_name other --ckpt_path {known} --model.max_env_steps 128"
    assert run(other, capfd)[::2] == (0, "")
    assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before


@pytest.mark.thorough
def test_a_name_is_free_for_the_corrected_command_after_a_refused_one(folder, capfd):
    named = f"fit {TINY} --model.env.id CartPole-v1 --trainer.run_name mine"
    refused = f"{named} --evaluation null --trainer.callbacks+=lightning_rl.PlotCurve"
    assert run(refused, capfd)[0] == 2
    assert run(named, capfd)[::2] == (0, "")


@pytest.mark.thorough
def test_a_name_is_free_after_a_run_whose_demonstrations_were_not_found(folder, capfd):
    cloning = "fit --config bc/cartpole --model.dataset nobody/nothing-v0 --trainer.accelerator cpu --trainer.run_name mine"
    errors = [run(cloning, capfd)[2] for _ in range(2)]
    assert errors[0] == errors[1] and "nobody/nothing-v0" in errors[0], errors


@pytest.mark.thorough
def test_a_run_in_a_folder_where_another_process_trains_ends_in_one_line_and_changes_nothing(folder, capfd):
    named = f"fit {TINY} --model.env.id CartPole-v1 --trainer.run_name mine"
    assert run(named, capfd)[0] == 0
    home = folder / "runs/PPO/CartPole-v1/mine"
    before = {path: path.read_bytes() for path in home.rglob("*.*") if path.is_file()}
    with another_process(home) as process:
        for options in ("", "--force", "--ckpt_path last --model.max_env_steps 128"):
            status, _, err = run(f"{named} {options}", capfd)
            assert (status, err.count("\n")) == (2, 1), err
            assert err.startswith(f"error: process {process} on ") and "is training in runs/PPO/CartPole-v1/mine: wait" in err
    assert {path: path.read_bytes() for path in home.rglob("*.*") if path.is_file()} == before
    assert run(f"{named} --ckpt_path last --model.max_env_steps 128", capfd)[::2] == (0, "")


def test_new_runs_that_start_at_the_same_time_have_a_folder_each(tmp_path):
    with take_run(tmp_path / "PPO", None) as (first, _), take_run(tmp_path / "PPO", None) as (second, _):
        assert (first.name, second.name) == ("version_0", "version_1") and first.is_dir() and second.is_dir()
        (second / "metrics.csv").write_text("env_steps\n16\n")
    assert [path.name for path in (tmp_path / "PPO").iterdir()] == ["version_1"]  # nothing was written in the other


def test_a_replaced_run_does_not_come_back_over_a_new_one_that_saved_its_best_weights(tmp_path):
    _, home = fit(tmp_path, run_name="mine")
    old = home.rename(home.with_name("mine.replaced"))
    (home / "checkpoints").mkdir(parents=True)
    (home / "config.yaml").write_text("seed_everything: 1")
    shutil.copy(old / "checkpoints/last.ckpt", home / "checkpoints/best.ckpt")
    with pytest.raises(SettingError, match="there is a run without"), take_run(home.parent, "last", "mine"):
        pass
    assert (home / "checkpoints/best.ckpt").is_file() and not old.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("options", [{"force": True}, {"ckpt_path": "last"}])
def test_a_run_continues_in_a_folder_where_a_replacing_run_was_killed(tmp_path, saved, options):
    _, home = fit(tmp_path, run_name="mine")
    old = home.rename(home.with_name("mine.replaced"))
    home.mkdir()
    (home / "config.yaml").write_text("seed_everything: 1")
    if saved:
        shutil.copytree(old / "checkpoints", home / "checkpoints")
    with take_run(home.parent, options.get("ckpt_path"), "mine", options.get("force", False)) as (run_folder, found):
        assert run_folder == home and (home / "checkpoints/last.ckpt").is_file() and not old.exists()
        assert (home / "metrics.csv").is_file() != saved  # the old run came back where the new one had saved nothing
        assert found == (home / "checkpoints/last.ckpt" if "ckpt_path" in options else None)
    _, again = fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=128), run_name="mine", **options)
    assert again == home and int(read_rows(home / "metrics.csv")[-1]["env_steps"]) == 128
    assert [path.name for path in home.parent.iterdir()] == ["mine"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [
        "--evaluation null --trainer.callbacks+=lightning_rl.PlotCurve",
        "--trainer.precision 64-true",
        "--model.env.kwargs.nonsense 1",
        "--trainer.run_name mine --ckpt_path nowhere.ckpt",
        "--trainer.run_name mine.replaced",
        "--init_from .",
    ],
)
def test_a_refused_start_leaves_no_folder(folder, capfd, options):
    status, out, err = run(f"fit {TINY} --model.env.id CartPole-v1 {options}", capfd)
    assert (status, err.count("\n")) == (2, 1) and "run:" not in out, err
    assert list(folder.iterdir()) == []


LIMITS = ["--trainer.max_steps 1", "--trainer.max_time.milliseconds 1", "--trainer.max_epochs 1 --trainer.limit_train_batches 1"]


@pytest.mark.thorough
@pytest.mark.parametrize("limit", LIMITS)
def test_a_run_without_loggers_is_continued_by_the_command_that_it_prints_whatever_ended_it(folder, capfd, limit):
    status, out, _ = run(f"fit {TINY} --model.env.id CartPole-v1 --trainer.logger false {limit}", capfd)
    (line,) = (line for line in out.splitlines() if line.startswith("continue it: lightning-rl "))
    assert status == 0
    status, out, err = run(line.removeprefix("continue it: lightning-rl "), capfd)
    assert (status, err) == (0, "") and "64/64 steps" in out, out + err
    assert not (folder / "runs/PPO/CartPole-v1/version_0/metrics.csv").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("flag", ["--evaluation null", "--trainer.limit_val_batches 0"])
def test_evaluations_are_switched_off_by_our_setting_and_by_lightnings(flag, folder, capfd):
    assert run(f"fit {TINY} --model.env.id CartPole-v1", capfd)[0] == 0
    assert run(f"fit {TINY} --model.env.id CartPole-v1 {flag}", capfd)[::2] == (0, "")
    runs = folder / "runs/PPO/CartPole-v1"
    assert [(runs / name / "evaluations.csv").exists() for name in ("version_0", "version_1")] == [True, False]


def test_force_never_removes_a_folder_that_is_not_a_run(tmp_path):
    mine = tmp_path / "PPO" / "CartPole-v1" / "mine"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(SettingError, match="there is a run in"):
        fit(tmp_path, run_name="mine")
    fit(tmp_path, run_name="mine", force=True)
    assert (mine / "thesis.txt").read_text() == "years of work"


@pytest.mark.thorough
def test_the_command_that_continues_a_run_names_it_among_others(folder, capfd):
    fit = "fit --model A2C --model.env.id CartPole-v1 --model.max_env_steps 80 --evaluation.episodes 1 --trainer.max_steps 1"
    status, out, _ = run(fit, capfd)
    assert status == 0
    (command,) = (line.partition("continue it: lightning-rl ")[2] for line in out.splitlines() if line.startswith("continue it: "))
    assert run(fit, capfd)[0] == 0  # a newer one
    assert run(command, capfd)[0] == 0
    steps = [read_rows(folder / f"runs/A2C/CartPole-v1/version_{k}/metrics.csv")[-1]["env_steps"] for k in (0, 1)]
    assert steps == ["80", "40"]


@pytest.mark.thorough
@pytest.mark.parametrize("arguments", [{}, {"run_name": "mine"}, {"run_name": "my run", "default_root_dir": "other place"}])
def test_the_command_that_a_program_prints_continues_the_run_of_that_program(folder, capfd, arguments):
    for steps in (1, 1, 1) if not arguments else (1,):
        trainer = Trainer(enable_progress_bar=False, evaluation=None, max_steps=steps, **arguments)
        trainer.fit(tiny(PPO, "CartPole-v1"))
    lines = capfd.readouterr().out.splitlines()
    commands = [line.partition("continue it: lightning-rl ")[2] for line in lines if line.startswith("continue it: ")]
    first = trainer.run_folder.with_name("version_0") if not arguments else trainer.run_folder  # not the newest one
    assert main(shlex.split(commands[0])) == 0
    assert read_rows(first / "metrics.csv")[-1]["env_steps"] == "96"
    assert len(list(folder.rglob("config.yaml"))) == len(commands)  # no run began


UNUSED = {"wandb", "jsonargparse", "mujoco", "ale_py", "cv2", "envpool", "pygame", "minari", "h5py", "ray", "pandas", "IPython"}
"""Installed packages that a run without them must not import."""
PLAIN_RUN = f"""
import sys
import lightning_rl as lrl
env = {{"id": "CartPole-v1", "num_envs": 2}}
lrl.Trainer(default_root_dir="runs").fit(lrl.PPO(env, max_env_steps=32, n_steps=16, batch_size=32, net_arch=[8]))
print("imported:", *sorted({UNUSED} & set(sys.modules)))
"""


@pytest.mark.thorough
def test_a_plain_run_imports_nothing_that_it_does_not_use(tmp_path):
    variables = {**os.environ, "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([sys.executable, "-c", PLAIN_RUN], capture_output=True, text=True, cwd=tmp_path, env=variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "imported:"
    assert list((tmp_path / "runs").rglob("events.out.tfevents.*")) and list((tmp_path / "runs").rglob("best.ckpt"))


@pytest.mark.thorough
def test_what_is_imported_is_not_searched_for_garbage_meanwhile_and_what_a_user_set_for_it_stays():
    program = """
import gc
gc.set_threshold(700, 11, 13)
import lightning_rl as lrl
before = gc.get_stats()[2]["collections"]
lrl.PPO
print(gc.get_stats()[2]["collections"] - before, gc.get_threshold(), gc.isenabled(), gc.get_freeze_count())
gc.disable()
lrl.compare
print(gc.isenabled())
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert result.stdout.splitlines() == ["0 (700, 11, 13) True 0", "False"], result.stderr


@pytest.mark.thorough
def test_a_program_freezes_what_it_imported():
    program = """
import gc
from lightning_rl.cli.main import main
print(main(["evaluate", "--ckpt_path", "nothing.ckpt"]), gc.get_freeze_count() > 100_000)
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1:] == ["2 True"], result.stderr


def test_threads_that_import_at_the_same_time_leave_the_limits_of_garbage_collection_as_they_were():
    before, begun, may_end = gc.get_threshold(), threading.Event(), threading.Event()

    def import_long():
        with importing():
            begun.set()
            may_end.wait(10)

    thread = threading.Thread(target=import_long)
    with importing():
        thread.start()
        begun.wait(10)
    assert gc.get_threshold() != before
    may_end.set()
    thread.join()
    assert gc.get_threshold() == before


@pytest.mark.thorough
def test_force_replaces_the_run_of_that_name_also_where_another_run_is_continued_in_its_folder(tmp_path):
    _, old = fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=96), run_name="old", checkpoint={"keep": -1})
    _, other = fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=32), run_name="other")
    fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=64), run_name="old", ckpt_path=other / "checkpoints" / "last.ckpt", force=True)
    assert torch.load(old / "checkpoints" / "last.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == 64
    assert not [path.name for path in (old / "checkpoints").glob("env_steps=*") if int(path.stem.partition("=")[2]) > 64]


def test_a_forced_run_without_checkpoints_that_ended_stays(tmp_path):
    _, run_folder = fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=32), run_name="mine")
    fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=64), run_name="mine", checkpoint=None, force=True)
    assert read_rows(run_folder / "metrics.csv")[-1]["env_steps"] == "64"
    assert not (run_folder / "checkpoints" / "last.ckpt").exists() and len(list(run_folder.parent.iterdir())) == 1


def test_a_forced_run_that_could_not_save_gives_way_to_the_old_one(tmp_path):
    run = tmp_path / "mine"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("seed_everything: 1")
    with replacing(run, saves=True):
        run.mkdir()
        (run / "metrics.csv").write_text("env_steps\n64\n")  # and the disk was full
    assert (run / "config.yaml").read_text() == "seed_everything: 1"


@pytest.mark.thorough
def test_a_run_is_continued_in_its_own_folder_by_force_whatever_way_its_checkpoint_is_named(tmp_path):
    _, run_folder = fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=32), run_name="mine")
    winding = run_folder / "checkpoints" / ".." / "checkpoints" / "last.ckpt"
    fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=64), run_name="mine", ckpt_path=winding, force=True)
    assert torch.load(run_folder / "checkpoints" / "last.ckpt", weights_only=True)["lightning_rl"]["env_steps"] == 64


@pytest.mark.thorough
def test_a_name_that_looks_like_a_number_stays_a_name(folder, capfd):
    assert run(f"fit {TINY} --model.env.id CartPole-v1 --trainer.run_name 12e3", capfd)[::2] == (0, "")
    assert (folder / "runs" / "PPO" / "CartPole-v1" / "12e3").is_dir()


def test_a_run_that_is_continued_with_a_limit_it_has_reached_keeps_its_config(tmp_path):
    _, run_folder = fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=32), run_name="mine")
    before = (run_folder / "config.yaml").read_text()
    fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=16), run_name="mine", ckpt_path="last")
    assert (run_folder / "config.yaml").read_text() == before
    fit(tmp_path, tiny(PPO, "CartPole-v1", max_env_steps=48), run_name="mine", ckpt_path="last")
    assert "max_env_steps: 48" in (run_folder / "config.yaml").read_text()
