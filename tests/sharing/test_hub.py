"""Agents on the hub: what is pushed acts as the checkpoint does for whoever loads it, and whatever is wrong is said in one line."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import huggingface_hub.constants as constants
import numpy as np
import pytest
import yaml

import lightning_rl as lrl
from lightning_rl import DQN, GRU, LSTM, PPO, SAC, SettingError
from lightning_rl.exporting.export import legal_masks
from lightning_rl.sharing.hub import download
from lightning_rl.spaces import samples
from lightning_rl.types import tree_leaves
from tests.command_line import MODULE, TINY, run, run_apart
from tests.exporting.exported import save
from tests.fitting import fit, tiny
from tests.sharing.hub import TOKEN, Repo, running_hub, talk_to

HOME = "tests.environments:"
CASES = {
    "masks, memory and a nested action": (
        PPO,
        "Choosy-v0",
        {"env": {"kwargs": {"way": "key", "action": "nested"}}, "memory": LSTM(8, 4), "normalize_obs": "running"},
    ),
    "squashed, with memory": (SAC, "ScriptedBox-v0", {"memory": GRU(8, 4), "normalize_obs": "running"}),
    "noisy, dueling, histograms": (DQN, "Scripted-v0", {"noisy": True, "dueling": True, "distribution": "c51"}),
}
REPO = "my-name/an-agent"
ADDRESS = f"hf://{REPO}"


@pytest.fixture
def hub(folder, monkeypatch):
    """A hub that the client in this process talks to, with a cache and a token in the test's folder."""
    with running_hub() as hub:
        talk_to(hub, folder, monkeypatch)
        yield hub


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The checkpoint of a case, made once."""

    @cache
    def checkpoint(case):
        algorithm, env_id, settings = CASES[case]
        env_id = env_id if ":" in env_id else HOME + env_id
        return save(tiny(algorithm, env_id, max_env_steps=32, **settings), tmp_path_factory.mktemp("saved") / "a.ckpt")

    return checkpoint


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    """A run's folder, as `fit` leaves it."""
    root = tmp_path_factory.mktemp("runs")
    trainer = lrl.Trainer(default_root_dir=root, enable_progress_bar=False, accelerator="cpu")
    trainer.fit(PPO({"id": "CartPole-v1", "num_envs": 2}, n_steps=16, batch_size=32, n_epochs=1, net_arch=[8], max_env_steps=64))
    return trainer.run_folder


def push(source, **settings):
    return lrl.push(source, REPO, **{"episodes": 2, "video": False, "say": lambda line: None, **settings})


def play(policy, rows=5, steps=4):
    """What a policy does at random observations, and its memory after each."""
    random, memory, done = np.random.default_rng(3), None, []
    policy.spaces.observation.seed(3)
    for _ in range(steps):
        obs, mask = samples(policy.spaces.observation, rows), legal_masks(policy.spaces, rows, random)
        action, memory = policy.act(obs, memory, action_mask=None if isinstance(mask, tuple) else mask)
        done += [*tree_leaves(action), *tree_leaves(memory)]
    return [np.asarray(each) for each in done]


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_what_is_pushed_acts_as_the_checkpoint_action_for_action(case, hub, checkpoint):
    path = checkpoint(case)
    address = push(path)
    assert hub.repos[REPO].newest in address
    ours, theirs = play(lrl.load_policy(path)), play(lrl.load_policy(ADDRESS))
    assert len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The checkpoint of two behaviors, one of them recurrent."""
    learners = {
        "a": partial(PPO, n_steps=6, batch_size=12, n_epochs=1, net_arch=[4], memory=LSTM(4, 3)),
        "b": partial(DQN, buffer_size=100, batch_size=8, learning_starts=8, steps_per_iteration=12, net_arch=[4]),
    }
    behaviors = {name: lrl.Behavior(name, learner) for name, learner in learners.items()}
    return save_plainly(lrl.MultiAgent({"id": "tests.agents.Together", "num_envs": 2}, behaviors, 24), tmp_path_factory.mktemp("several"))


def save_plainly(model, folder):
    trainer = fit(model)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


@pytest.mark.thorough
def test_several_agents_with_policies_of_their_own_are_shared(hub, several):
    push(several)
    for behavior in ("a", "b"):
        ours, theirs = (play(lrl.load_policy(each, behavior=behavior)) for each in (several, ADDRESS))
        assert all(map(np.array_equal, ours, theirs))
    assert lrl.evaluate(several, 3) == lrl.evaluate(ADDRESS, 3)
    page = hub.repos[REPO].files["README.md"].decode()
    assert "mean return of a" in page
    loading = next(line for line in page.splitlines() if line.startswith("policy = "))
    names = {}
    exec(f"import lightning_rl as lrl\n{loading}", names)
    assert all(map(np.array_equal, play(names["policy"]), play(lrl.load_policy(several, behavior="a"))))


@pytest.mark.thorough
def test_an_agent_is_played_in_the_final_lessons_of_its_curriculum(hub, tmp_path):
    lessons = {"curriculum": [{"name": "short", "value": 0.5, "completion_criteria": {"threshold": 1e6}}, {"name": "long", "value": 5.0}]}
    model = tiny(PPO, "CartPole-v1", max_env_steps=32, env={"parameters": {"length": lessons, "gravity": 11}, "observe_parameters": True})
    path = save_plainly(model, tmp_path)
    push(path, episodes=4)
    assert lrl.evaluate(path, 4) == lrl.evaluate(ADDRESS, 4)
    assert json.loads(hub.repos[REPO].files["results.json"])["statistics"] == lrl.evaluate(path, 4)


@pytest.mark.slow
def test_an_algorithm_of_ones_own_needs_the_readers_import(hub, folder, capfd):
    (folder / "mine.py").write_text(MODULE)
    settings = f"fit --import mine {TINY} --model mine.MyPPO --model.factor 2 --model.env.id Mine-v0 --trainer.enable_progress_bar false"
    assert run(settings, capfd)[0] == 0
    source = next(folder.glob("runs/*/*/version_0"))
    assert run(f"push {source} --repo {REPO} --episodes 2 --import mine", capfd)[0] == 0
    assert f"--ckpt_path {ADDRESS} --import mine" in hub.repos[REPO].files["README.md"].decode()
    for line, words in {"": "or --import its_module", "--import mine": ""}.items():
        status, _, error = run_apart(f"evaluate --ckpt_path {download(ADDRESS).parent} --episodes 2 {line}", folder)
        assert (status, words in error) == (2 if words else 0, True)


def test_a_run_is_shared_with_its_settings_results_curve_and_page(hub, cartpole, capfd):
    status, out, error = run(f"push {cartpole} --repo {REPO} --episodes 3 --seed 7 --no-video", capfd)
    assert (status, error) == (0, "") and out.startswith(f"shared as {ADDRESS}@")
    files = hub.repos[REPO].files
    assert sorted(files) == [
        ".gitattributes", "README.md", "agent.json", "agent.safetensors", "config.yaml", "learning_curve.png", "results.json"
    ]  # fmt: skip
    results = json.loads(files["results.json"])
    assert [each["seed"] for each in results["played"]] == [7, 8, 9]
    assert results["statistics"] == lrl.evaluate(cartpole, 3, 7)
    assert results["statistics"]["return_mean"] == np.mean([each["return"] for each in results["played"]])
    assert yaml.safe_load(files["config.yaml"])["model"]["init_args"]["net_arch"] == [8]
    assert files["learning_curve.png"].startswith(b"\x89PNG")
    head = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert head["library_name"] == "lightning_rl" and {"reinforcement-learning", "CartPole-v1"} <= set(head["tags"])
    (metric,) = head["model-index"][0]["results"][0]["metrics"]
    assert (metric["type"], metric["value"].split()[0]) == ("mean_reward", f"{results['statistics']['return_mean']:.2f}")
    everything = b"".join(files.values())
    assert str(cartpole.parent).encode() not in everything and b".ckpt" not in everything


@pytest.mark.thorough
def test_a_video_is_recorded_where_the_environment_renders(hub, checkpoint, cartpole):
    push(cartpole, video=None, episodes=1)
    assert b"ftyp" in hub.repos[REPO].files["replay.mp4"][:16]
    said = []
    push(checkpoint("noisy, dueling, histograms"), video=None, episodes=1, say=said.append)
    assert "replay.mp4" not in hub.repos[REPO].files and "learning_curve.png" not in hub.repos[REPO].files
    assert any("no video" in line for line in said) and any("no learning curve" in line for line in said)
    with pytest.raises(SettingError, match=r"push --video: .* cannot render"):
        push(checkpoint("noisy, dueling, histograms"), video=True)


@pytest.mark.thorough
def test_what_takes_a_checkpoint_takes_an_agent_of_the_hub(hub, cartpole, folder, capfd, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
    push(cartpole)
    for subcommand in ("evaluate --episodes 3 --json", "validate --json", "test --json"):
        status, out, error = run(f"{subcommand} --ckpt_path {ADDRESS}", capfd)
        assert (status, error) == (0, ""), subcommand
        assert json.loads(out) == json.loads(run(f"{subcommand} --ckpt_path {cartpole}", capfd)[1])
    assert run(f"collect --ckpt_path {ADDRESS} --dataset shared/agent-v0 --episodes 2", capfd)[0] == 0
    assert run(f"record --ckpt_path {ADDRESS} --out a.mp4", capfd)[0] == 0 and (folder / "a.mp4").is_file()
    assert run(f"export --ckpt_path {ADDRESS} --out a.onnx", capfd)[0] == 0 and (folder / "a.onnx").is_file()
    for subcommand in ("record", "export"):
        status, _, error = run(f"{subcommand} --ckpt_path {ADDRESS}", capfd)
        assert status == 2 and "is not a run on this machine: name a f" in error
    assert not [path for path in (folder / "cache").rglob("*") if path.suffix in (".mp4", ".onnx")]


@pytest.mark.thorough
def test_a_new_run_begins_with_shared_weights_and_none_continues_from_them(hub, cartpole, folder, capfd):
    push(cartpole)
    settings = f"fit {TINY} --model.env.id CartPole-v1 --trainer.enable_progress_bar false"
    status, out, error = run(f"{settings} --init_from {ADDRESS}", capfd)
    assert (status, error) == (0, "") and "keeps its initial weights" not in out
    status, _, error = run(f"{settings} --ckpt_path {ADDRESS}", capfd)
    assert status == 2 and "is an agent without its run: start a new run with its weights, --init_from hf://" in error


@pytest.mark.thorough
def test_a_shared_agent_is_an_opponent(hub, folder, capfd):
    game = "pettingzoo.classic.tictactoe_v3 --model.encoder mlp"
    settings = f"{TINY} --model.env.id {game} --model.self_play {{}} --trainer.enable_progress_bar false --evaluation null"
    assert run(f"fit {settings}", capfd)[0] == 0, capfd.readouterr()
    source = next(folder.glob("runs/*/*/version_0/checkpoints/last.ckpt"))
    push(source)
    shared = lrl.evaluate(source, 10, opponent=ADDRESS, deterministic=False)
    assert shared == lrl.evaluate(source, 10, opponent=source, deterministic=False)
    assert 0 <= shared["win_rate"] <= 1
    status, out, _ = run(f"compare --versus {source} {ADDRESS} --games 4", capfd)
    assert status == 0 and ADDRESS in out


@pytest.mark.thorough
def test_an_older_version_is_loaded_by_its_commit(hub, checkpoint):
    first = push(checkpoint("noisy, dueling, histograms"))
    second = push(checkpoint("squashed, with memory"))
    assert first != second
    assert type(lrl.policy.load_run(first)) is DQN and type(lrl.policy.load_run(ADDRESS)) is SAC
    with pytest.raises(SettingError, match="the repository has no revision v7"):
        lrl.load_policy(f"{ADDRESS}@v7")


@pytest.mark.thorough
def test_the_cache_serves_when_the_hub_is_gone(hub, checkpoint, monkeypatch):
    push(checkpoint("noisy, dueling, histograms"))
    here = play(lrl.load_policy(ADDRESS))
    nobody = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nobody)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nobody + "/{repo_id}/resolve/{revision}/{filename}")
    assert all(map(np.array_equal, here, play(lrl.load_policy(ADDRESS))))
    with pytest.raises(SettingError, match="is not in the cache, and the hub cannot be reached"):
        lrl.load_policy("hf://my-name/another")
    with pytest.raises(SettingError, match="the hub cannot be used"):
        push(checkpoint("noisy, dueling, histograms"))


@pytest.mark.slow
def test_a_program_needs_no_more_than_the_hubs_own_environment_variables(hub, cartpole, folder):
    env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    status, out, error = run_apart(f"push {cartpole} --repo {REPO} --episodes 2 --no-video --private", folder, env)
    assert (status, error) == (0, ""), out
    assert hub.repos[REPO].private
    status, out, error = run_apart(f"evaluate --ckpt_path {ADDRESS} --episodes 2", folder, env)
    assert (status, error) == (0, "") and out.startswith("return ")
    status, _, error = run_apart(
        f"evaluate --ckpt_path {ADDRESS} --episodes 2", folder, env | {"HF_TOKEN": "", "HF_HOME": str(folder / "b")}
    )
    assert status == 2 and len(error.splitlines()) == 1 and "it is private and your token" in error


@pytest.mark.variants
@pytest.mark.parametrize(
    ("repo", "words"),
    [
        ("agent", "repo 'agent' must be USER/NAME"),
        ("my-name/a b", "must be USER/NAME"),
        ("bob/agent", r"the hub answers 403 .*log in by `hf auth login` with a token that may write"),
    ],
)
def test_a_repository_that_cannot_be_written_to_is_refused(repo, words, hub, checkpoint):
    with pytest.raises(SettingError, match=words):
        lrl.push(checkpoint("noisy, dueling, histograms"), repo, episodes=1, video=False)
    assert not hub.repos


@pytest.mark.thorough
def test_without_a_token_nothing_is_pushed(hub, checkpoint, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(SettingError, match="needs a token of the hub, and there is none: run `hf auth login`, or set HF_TOKEN"):
        push(checkpoint("noisy, dueling, histograms"))
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(SettingError, match="the hub answers 401"):
        push(checkpoint("noisy, dueling, histograms"))


@pytest.mark.thorough
def test_nothing_else_is_overwritten_and_nothing_private_becomes_public(hub, checkpoint):
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit({"README.md": b"poems", "model.bin": b"1"})
    with pytest.raises(SettingError, match=r"holds something else \(README.md, model.bin\): name another --repo"):
        push(checkpoint("noisy, dueling, histograms"))
    with pytest.raises(SettingError, match="exists and is public"):
        push(checkpoint("noisy, dueling, histograms"), private=True)
    assert hub.repos[REPO].files == {"README.md": b"poems", "model.bin": b"1"}


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("hf://my-name", "'hf://my-name' is not an address of the hub: write hf://USER/NAME"),
        ("hf://my-name/a@", "is not an address of the hub"),
        ("hf://my-name/a/b", "is not an address of the hub"),
        ("hf://my-name/nothing", "there is no hf://my-name/nothing on the hub"),
    ],
)
def test_an_address_of_nothing_is_one_line_and_status_two(address, words, hub, capfd):
    status, out, error = run(f"evaluate --ckpt_path {address}", capfd)
    assert (status, out) == (2, "") and len(error.splitlines()) == 1 and words in error


def test_a_repository_without_an_agent_is_refused(hub):
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit({"README.md": b"poems"})
    with pytest.raises(SettingError, match=r"holds no agent: neither agent.json of lightning_rl nor a .zip of Stable-Baselines3"):
        lrl.load_policy(ADDRESS)
    hub.repos[REPO].commit({"a.zip": b"", "b.zip": b"", "train_eval_metrics.zip": b""})
    with pytest.raises(SettingError, match=r"holds several: a.zip, b.zip; download one"):
        lrl.load_policy(ADDRESS)


def test_a_hub_that_is_out_of_order_is_one_line(hub, capfd):
    hub.broken = 400
    status, _, error = run(f"evaluate --ckpt_path {ADDRESS}", capfd)
    assert status == 2 and len(error.splitlines()) == 1 and "the hub" in error


def send_without_end(handler, path, seconds=0.0):
    """Send a file in pieces, for as long as somebody reads."""
    if "/resolve/" not in path or handler.command == "HEAD":
        return False
    handler.send_response(200)
    handler.send_header("ETag", '"abc"')
    handler.end_headers()
    handler.close_connection = True
    with suppress(OSError):
        while True:
            handler.wfile.write(b" " * (1 if seconds else 1 << 16))
            time.sleep(seconds)
    return True


def send_instead(content, among):
    """Answer with other JSON where the path has this part."""
    return lambda handler, path: among in path and not handler.send_json(content)


def send_etag(handler, path):
    """Name a file so that it would be written outside of the cache."""
    if "/resolve/" in path:
        handler.send(b"{}", headers={"ETag": '"../../../../escaped"', "X-Repo-Commit": "a" * 40})
    return "/resolve/" in path


LIES = {
    "a body without end": (send_without_end, "the hub sends more than 16,777,216 bytes as one file"),
    "one byte at a time": (partial(send_without_end, seconds=0.05), "the hub took longer than 1 s"),
    "an ETag that leads out of the cache": (send_etag, "the hub sends an id that is none"),
    "a commit that leads out of the cache": (send_instead({"id": REPO, "sha": "../../../escaped", "siblings": []}, "/api/"), "is none"),
    "a file that leads out of the cache": (
        send_instead([{"type": "file", "path": "agent.json", "size": 2, "oid": "../../../../escaped"}], "/tree/"),
        "the hub sends an id that is none",
    ),
    "a list": (send_instead([], "/api/"), "the hub cannot be used"),
    "an empty mapping": (send_instead({}, "/api/"), "the hub cannot be used"),
    "no commit": (send_instead({"id": REPO, "sha": None, "siblings": []}, "/api/"), "the hub cannot be used"),
}


@pytest.mark.parametrize(("lie", "words"), LIES.values(), ids=LIES)
def test_a_hub_that_is_not_honest_is_one_line_and_writes_nothing_elsewhere(lie, words, hub, capfd, monkeypatch):
    monkeypatch.setattr("lightning_rl.sharing.hub.MAX_SECONDS", 1.0 if "took" in words else 60.0)
    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit({"agent.json": b"{}", "agent.safetensors": b""})
    hub.lie = lie
    status, _, error = run(f"evaluate --ckpt_path {ADDRESS}", capfd)
    assert status == 2 and len(error.splitlines()) == 1 and words in error, error
    here = Path.cwd()
    assert not [*here.rglob("escaped"), *here.parent.glob("escaped")]
    assert sum(path.stat().st_size for path in here.rglob("*") if path.is_file()) < 1 << 25


@pytest.mark.parametrize(("broken", "words"), [(500, "the hub answers 500 (out of order)"), (401, "the hub answers 401 (out of order)")])
def test_an_error_of_the_hub_is_not_called_one_of_the_network(broken, words, hub, capfd):
    hub.broken = broken
    status, _, error = run(f"evaluate --ckpt_path {ADDRESS}", capfd)
    assert status == 2 and words in error and "network" not in error and "may write" not in error, error
    assert ("a token that may read" in error) == (broken == 401)


@pytest.mark.thorough
def test_an_environment_that_others_cannot_build_is_refused(hub, folder):
    import gymnasium as gym

    ready = fit(PPO(gym.make_vec("CartPole-v1", 2), n_steps=8, batch_size=8, n_epochs=1, max_env_steps=16, net_arch=[8]))
    ready.save_checkpoint(folder / "ready.ckpt")
    with pytest.raises(SettingError, match="was trained on a ready environment, which a file cannot store"):
        push(folder / "ready.ckpt")
    settings = {"env": {"kwargs": {"endings": ["termination", str(folder / "track.xml")]}}}
    fit(tiny(PPO, max_env_steps=16, **settings)).save_checkpoint(folder / "local.ckpt")
    with pytest.raises(SettingError, match=r"is built from .*track.xml \(endings\), which others do not have"):
        push(folder / "local.ckpt")
    assert not hub.repos


@pytest.mark.thorough
def test_places_of_this_machine_are_not_shared(hub, cartpole, folder):
    copy = shutil.copytree(cartpole, folder / "copy")
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["trainer"] = {"default_root_dir": "/home/my-name/secret", "max_time": None}
    config["model"]["init_args"]["replay"] = {"directory": "/home/my-name/secret/buffer"}
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    push(copy)
    shared = yaml.safe_load(hub.repos[REPO].files["config.yaml"])
    assert shared["trainer"] == {"max_time": None} and shared["model"]["init_args"]["replay"] == {"directory": "buffer"}
