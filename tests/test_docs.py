"""README and docs: every line and every block that a reader may copy runs, from the top of its page to the end, and links lead somewhere.

`lightning-rl fit` runs for an iteration. What takes longer than a second or two waits for `-m slow`, and so does what starts processes.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path

import gymnasium as gym
import pytest
import pytorch_lightning as pl
import yaml
from gymnasium.spaces import Box, Dict, Discrete

import lightning_rl
from lightning_rl import RecordEpisodes, SettingError
from lightning_rl.envs.unity.settings import UnitySettings
from lightning_rl.settings.yaml_files import Loader
from lightning_rl.spaces import Spaces
from lightning_rl.tuning.search_space import read_space
from tests.command_line import run, run_apart, run_python
from tests.experts import balance, played
from tests.sharing.hub import Repo, running_hub, talk_to
from tests.unity.scenes import build

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUICK = (
    "--evaluation.episodes 2 --evaluation.num_envs 2 --evaluation.max_episode_steps 10 --trainer.enable_progress_bar false "
    "--trainer.accelerator cpu"
)
EPISODES = {
    "evaluate": "--episodes 2 --max_episode_steps 50",
    "collect": "--episodes 6",
    "record": "--episodes 1 --max_episode_steps 10",
    "push": "--episodes 2 --no-video",
}
SLOW = (
    *("ppo/lunarlander", "bc/lunarlander", "runs/PPO/LunarLander-v3", "wandb.yaml", "es/swimmer", "run_onnx.py", "--seeds", "compare "),
    *("num_actors 4", "--format torch", "devices 2 --trainer.accelerator cpu", "lightning_rl.Video", "Pendulum-v1 --model.stochastic"),
    *("torchrun", "configs/trainer/ray.yaml   ", "/fast/disk", "ppo/simple_spread", "ppo/vmas_simple_spread", "ppo/tictactoe"),
    *("lightning-rl tune", "studies/PPO_CartPole-v1"),
)
"""Parts of lines that take longer, or stand on one that does."""
PARSED = {
    "actors.address auto": "a Ray cluster",
    "configs/trainer/ddp.yaml": "several GPUs",
    "MASTER_ADDR": "two machines",
    "--nnodes 2": "two machines",
}
"""Parts of lines that need what is not here: their settings are read, by the parser that always reads them, and printed."""
ELSEWHERE = {
    "hf auth login": "the stand-in for the hub takes a token from the environment",
    "lightning-rl completion": "tests/cli/test_names.py asks bash",
    "python -m venv": ".ci/run installs, trains and tests by these two lines",
    **dict.fromkeys(("export RAY_", "ray start", "export GLOO_"), "benchmarks/machines.py makes several machines for them"),
    **dict.fromkeys(("wandb sweep", "wandb agent"), "tests/tuning/test_sweep.py runs what an agent would"),
    "--engine ray": "tests/tuning/test_study.py and test_population.py",
    "python examples/auxiliary_head.py": "tests/test_examples.py kills and resumes it",
    "# the editor": "tests/envs/unity/test_player.py connects as the editor does",
    "_population/best.yaml": "tests/tuning/test_population.py",
}
FILES = {
    "ppo.yml": "CartPole-v1: {n_envs: 8, n_timesteps: 1e5, policy: MlpPolicy, n_steps: 32, batch_size: 256, learning_rate: lin_0.001}\n",
    "my_settings.yml": "atari: {env_wrapper: [stable_baselines3.common.atari_wrappers.AtariWrapper], n_timesteps: 1e7}\n",
}
"""What a reader brings."""


def blocks(page):
    """Language and text of each block of code."""
    return BLOCK.findall(page.read_text("utf-8"))


def commands(line):
    """What a line of bash runs: without its comment; nothing where something else runs it."""
    return [] if has(line, ELSEWHERE) else re.sub(r"\s+#.*", "", line).split(" && ")


def has(line, parts):
    return any(part in line for part in parts)


def name(page):
    return page.relative_to(ROOT).with_suffix("").as_posix()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with what pages speak of: a run of PPO, demonstrations, files of other libraries."""
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
        for env_id, dataset, rule in (
            ("CartPole-v1", "cartpole/expert-v0", balance),
            ("Pendulum-v1", "pendulum/expert-v0", None),
            ("Pendulum-v1", "pendulum/medium-v0", None),
        ):
            recorder = RecordEpisodes(gym.make(env_id, max_episode_steps=40))
            played(recorder, 6, rule)
            recorder.save(dataset)
        trainer = lightning_rl.Trainer(enable_progress_bar=False, accelerator="cpu", evaluation={"episodes": 1, "max_episode_steps": 10})
        trainer.fit(lightning_rl.PPO("CartPole-v1", n_steps=32, max_env_steps=256))
    (folder / "builds").mkdir()
    build(folder / "builds", "--scene", "reach", name="Soccer")
    for file, text in FILES.items():
        (folder / file).write_text(text)
    shutil.copy(ROOT / "tests" / "importers" / "files" / "sac_trainer_config.yaml", folder)
    shutil.copy(ROOT / "tests" / "sharing" / "sb3" / "ppo-CartPole-v1.zip", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))  # SDL, which draws CartPole, says on stderr that it misses it
        patch.setenv("OMP_NUM_THREADS", "1")  # torchrun says there that it takes one
        yield folder


@pytest.fixture
def reader(folder, prepared, monkeypatch, capfd):
    """Does what a page says, in a folder of its own."""
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    for place in ("configs", "examples"):
        (folder / place).symlink_to(ROOT / place)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "datasets"))
    with running_hub() as hub:
        talk_to(hub, folder, monkeypatch)
        hub.repos["sb3/ppo-CartPole-v1"] = Repo()
        hub.repos["sb3/ppo-CartPole-v1"].commit({"ppo-CartPole-v1.zip": (folder / "ppo-CartPole-v1.zip").read_bytes()})
        yield Reader(folder, monkeypatch, capfd)


OFFLINE = ("iql/", "cql/", "td3_bc/", "awac/", "--model IQL", "--model CQL", "--model TD3BC", "--model AWAC")
"""What commands say that learn from a dataset: an iteration of theirs has many updates."""


class Reader:
    """Reads a page from top to bottom."""

    def __init__(self, folder, monkeypatch, capfd):
        self.folder, self.monkeypatch, self.capfd = folder, monkeypatch, capfd
        self.names, self.iterations = {}, 1

    def read(self, page, slow):
        """Run its blocks; without the lines that are slow, or with them."""
        for language, text in blocks(page):
            if language == "bash":
                for line in text.splitlines():
                    if slow or not has(line, SLOW):
                        self.line(line)
            elif language == "python":
                self.python(text)
            elif language == "yaml":
                self.settings(text)

    def line(self, line):
        """Run a line of bash; of that language this knows as much as the pages use."""
        for command in commands(line):
            command, _, file = command.partition(" > ")
            command = command.replace("RUN/", "runs/PPO/CartPole-v1/version_0/").replace("/fast/disk", "disk")
            words = shlex.split(command)
            while "=" in words[0]:
                self.monkeypatch.setenv(*words.pop(0).split("=", 1))
            out = self.parse(words) if has(line, PARSED) else self.program(words)
            if file:
                (self.folder / file).write_text(out)

    def parse(self, words):
        """Read a line's settings, and print them."""
        arguments = words[words.index("fit") :]
        return self.check(words, run(shlex.join([*arguments, "--print_config"]), self.capfd))

    def program(self, words):
        """Run a program, in a process of its own where it starts others, and return what it said."""
        name, *arguments = words
        if name == "python":
            return self.check(words, run_python(tuple(arguments), "", self.folder))
        if name == "torchrun":
            launcher, arguments = ("-m", "torch.distributed.run", *arguments[:3]), arguments[3:]
            return self.check(words, run_python(launcher, self.quick(arguments), self.folder))
        if arguments[0] == "collect":
            shutil.rmtree(self.folder / "datasets" / arguments[arguments.index("--dataset") + 1], ignore_errors=True)
        apart = {"--trainer.devices", "configs/trainer/ray.yaml", "--seeds"} & {*arguments}
        text = self.quick(arguments)
        return self.check(words, run_apart(text, self.folder) if apart else run(text, self.capfd))

    def quick(self, arguments):
        """A command that is short: of one iteration, or of another one where a run continues, and with little to learn from."""
        text = shlex.join(arguments)
        if arguments[0] == "tune":
            return f"{text} --trials 1 --trainer.max_steps 1 {QUICK}"
        if arguments[0] != "fit" or "--help" in arguments:
            return text if "--replay" in arguments else f"{text} {EPISODES.get(arguments[0], '')}"
        self.iterations += "last" in arguments
        small = "--model.buffer_size 2000 " if "--model.replay.directory" in arguments else ""
        small += "--model.batch_size 16" if "sac/" in text or "--model SAC" in text else ""
        if any(name in text for name in OFFLINE):
            small += " --model.updates_per_iteration 4 --model.batch_size 16"
        return f"{text} --trainer.max_steps {self.iterations} {QUICK} {small}"

    @staticmethod
    def check(words, result):
        status, out, err = result
        assert (status, err) == (0, ""), f"{shlex.join(words)}: exit status {status}, {err}"
        return out

    def python(self, text):
        """Run a block, a short one of a long run; write it into the file that its first line names."""
        text = re.sub(r"max_env_steps=[\d_]+", "max_env_steps=512", text)
        name = re.match(r"# (\w+\.py)\n", text)
        if name:
            (self.folder / name[1]).write_text(text)
        else:
            self.monkeypatch.syspath_prepend(self.folder)
            exec(compile(text, "a block", "exec"), self.names)

    def settings(self, text):
        """Train by a whole config, or by settings of PPO; read a search space."""
        settings = yaml.load(text, Loader)
        if all(name.startswith("model.") for name in settings):
            (self.folder / "space.yaml").write_text(text)
            assert read_space(self.folder / "space.yaml").dimensions
            return
        if "model" not in settings:
            own = {"env": "CartPole-v1", "max_env_steps": 10_000} | settings
            settings = {"model": {"class_path": "PPO", "init_args": own}}
        (self.folder / "block.yaml").write_text(yaml.safe_dump(settings))
        self.program(shlex.split("lightning-rl fit --config block.yaml"))


def with_code(page):
    return {language for language, _ in blocks(page)} & {"bash", "python", "yaml"}


@pytest.mark.variants("README", "docs/environments")
@pytest.mark.parametrize("page", [page for page in PAGES if with_code(page)], ids=name)
def test_what_a_page_says_runs(page, reader):
    reader.read(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if any(has(text, SLOW) for _, text in blocks(page))], ids=name)
def test_what_a_page_says_runs_with_all_that_takes_longer(page, reader):
    reader.read(page, slow=True)


def test_no_line_has_an_exception_that_no_page_needs():
    lines = "\n".join(text for page in PAGES for language, text in blocks(page) if language == "bash")
    assert [part for part in (*SLOW, *PARSED, *ELSEWHERE) if part not in lines] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page):
    text = BLOCK.sub("", page.read_text("utf-8"))
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_every_page_is_linked_to_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[^)#]+)", PAGES[0].read_text("utf-8")))
    assert {page.relative_to(ROOT).as_posix() for page in PAGES[1:]} - linked == {"docs/algorithms/common.md"}


MARKS = {
    "discrete": Spaces(Box(-1, 1, (3,)), Discrete(3)),
    "continuous": Spaces(Box(-1, 1, (3,)), Box(-1, 1, (2,))),
    "Dict and Tuple": Spaces(Box(-1, 1, (3,)), Dict({"arm": Box(-1, 1, (2,)), "hand": Discrete(2)})),
    "masks": Spaces(Box(-1, 1, (3,)), Discrete(3), masked=True),
}
"""What an algorithm takes where the README's table has a mark, and refuses where it has none; what learns on
several GPUs is told by `test_distributed.py`."""


@pytest.mark.variants
@pytest.mark.parametrize("name", lightning_rl.ALGORITHMS)
def test_marks_of_the_readme_are_what_algorithms_take(name):
    module = lightning_rl.ALGORITHMS[name].rpartition(".")[2]
    row = next(line for line in PAGES[0].read_text("utf-8").splitlines() if f"(lightning_rl/algorithms/{module}.py)" in line)
    marks = [bool(cell.strip()) for cell in row.split("|")[4:-1]]
    given = {"BehavioralCloning": {"dataset": "cartpole/expert-v0"}, "DAgger": {"teacher": "runs/PPO/CartPole-v1"}}.get(name, {})
    assert [made(name, spaces, **given) for spaces in MARKS.values()] == marks[:4]
    taken = next(spaces for spaces, mark in zip(MARKS.values(), marks, strict=False) if mark)
    assert [made(name, taken, memory=lightning_rl.GRU(8, sequence_length=16), **given), True] == marks[4:]


def made(name, spaces, **settings):
    """Whether an algorithm can be."""
    spaces = spaces._replace(agents=("a", "b")) if name == "POCA" else spaces
    try:
        return bool(getattr(lightning_rl, name)(None, spaces=spaces, net_arch=[8], **settings))
    except SettingError:
        return False


def settings_of_all():
    """The names of all settings, as one writes them."""
    sections = {"env": "EnvConfig", "evaluation": "EvaluationConfig", "checkpoint": "CheckpointConfig", "actors": "ActorsConfig"}
    for section, name in {**sections, "replay": "ReplayConfig"}.items():
        yield from (f"{section}.{name}" for name in signature(getattr(lightning_rl, name)).parameters)
    for name in ["Algorithm", *lightning_rl.ALGORITHMS]:
        yield from signature(getattr(lightning_rl, name)).parameters
    for trainer in (lightning_rl.Trainer, pl.Trainer):
        yield from (f"trainer.{name}" for name in signature(trainer).parameters)
    yield from (*dir(pl.Callback), "pl.Callback", "on_update_end")
    yield from (f"env.kwargs.{field.name}" for field in fields(UnitySettings))
    yield from ("seed_everything", "action_mask", "reward_signals.rnd.strength", "best.ckpt", "configure_optimizers")


def test_what_newcomers_are_told_to_write_exists():
    rows = [line.split("|") for line in (ROOT / "docs" / "coming_from.md").read_text("utf-8").splitlines() if line.startswith("| `")]
    words = {word.removeprefix("lrl.") for row in rows for word in re.findall(r"`([\w.]+)(?:: [^`]*)?`", row[2])}
    assert len(words) > 80
    assert words - {*settings_of_all(), *lightning_rl.__all__} == set()


def test_pages_of_algorithms_are_what_the_script_makes():
    spec = spec_from_file_location("make", ROOT / "docs" / "make.py")
    make = module_from_spec(spec)
    spec.loader.exec_module(make)
    pages = {page.relative_to(ROOT / "docs").as_posix(): page.read_text("utf-8") for page in (ROOT / "docs" / "algorithms").iterdir()}
    assert pages == make.pages(), "python docs/make.py"
