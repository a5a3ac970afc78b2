"""The wheel and the source distribution hold all that a run reads, and run where the repository is not."""

from __future__ import annotations

import ast
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_rl import EXPORTS

ROOT = Path(__file__).parent.parent
PLACES = {
    "lightning_rl/": "lightning_rl/",
    "configs/": "lightning_rl/configs/",
    "examples/": "lightning_rl/examples/",
    "zoo/": "lightning_rl/zoo/",
}
"""Folders of the repository, and where an installed package has them."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Builds the source distribution from a copy of the repository's files, and the wheel from that; returns wheel and source."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for file in files_of_the_repository():
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes((ROOT / file).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source]
    subprocess.run(command, check=True, capture_output=True)
    return next(target.glob("*.whl")), next(target.glob("*.tar.gz"))


def files_of_the_repository():
    """Returns the files a distribution is made from; not git's list, as the tests also run where there is no git."""
    found = [path for folder in PLACES for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found += [ROOT / name for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE")]
    return [path.relative_to(ROOT).as_posix() for path in found]


@pytest.mark.thorough
def test_a_wheel_holds_every_module_config_search_space_and_example(built):
    expected = {
        there + file.removeprefix(here)
        for file in files_of_the_repository()
        for here, there in PLACES.items()
        if file.startswith(here) and (file.endswith((".py", ".typed")) or (file.endswith(".yaml") and here != "examples/"))
    }
    expected |= {f"lightning_rl/{file}" for file in files_of_the_repository() if file.startswith("zoo/")}
    assert len(expected) > 200
    assert expected - set(zipfile.ZipFile(built[0]).namelist()) == set()


@pytest.mark.thorough
def test_a_source_distribution_holds_what_the_wheel_is_built_from(built):
    with tarfile.open(built[1]) as archive:
        held = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"setup.cfg", "pyproject.toml", "README.md", "configs/ppo/cartpole.yaml", "lightning_rl/algorithms/ppo.py"} <= held


@pytest.mark.slow
@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "sdist"])
def test_a_distribution_installed_elsewhere_runs_a_packaged_config(built, kind, tmp_path):
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    (beside,) = (place / "lib").glob("python*/site-packages")
    (beside / "dependencies.pth").write_text(str(Path(pytest.__file__).parent.parent))
    install = [place / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", built[kind]]
    subprocess.run(install, check=True)
    assert (beside / "lightning_rl/configs/ppo/cartpole.yaml").exists()
    options = ["--config", "ppo/cartpole", "--model.max_env_steps", "2000", "--trainer.default_root_dir", "."]
    subprocess.run([place / "bin/lightning-rl", "fit", *options], cwd=tmp_path, check=True, timeout=300)
    assert any(tmp_path.rglob("last.ckpt"))


def test_type_checkers_and_editors_see_each_public_name_where_it_is_imported_from():
    tree = ast.parse((ROOT / "lightning_rl" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assert {each.asname: node.module for node in block.body for each in node.names} == EXPORTS


@pytest.mark.slow
def test_a_users_file_is_checked_against_the_types_of_the_library(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import lightning_rl as lrl\n"
        "reveal_type(lrl.PPO('CartPole-v1').network)\n"
        "reveal_type(lrl.SAC({'id': 'Pendulum-v1'}).critic)\n"
        "lrl.SAC('Pendulum-v1', replay={'prioritized': True, 'relabel': {}}, behavioral_cloning={'demo_path': 'x'})\n"
        "lrl.SAC('Pendulum-v1', replay=lrl.ReplayConfig(relabel={'strategy': 'final'}))\n"
        "lrl.PPO('lightning_rl.envs.games.tic_tac_toe', self_play={'window': 3})\n"
        "lrl.IMPALA('CartPole-v1', actors={'num_actors': 2})\n"
        "lrl.BehavioralCloning('CartPole-v1', dataset=[]), lrl.IQL('Pendulum-v1', dataset=[])\n"
        "lrl.PP0\n"
        "lrl.PPO('CartPole-v1', gamma='high')\n"
    )
    command = [sys.executable, "-m", "mypy", "--no-error-summary", str(file)]  # reads what `mypy lightning_rl` has cached
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert lines == [
        'note: Revealed type is "lightning_rl.networks.actor_critic.ActorCritic"',
        'note: Revealed type is "lightning_rl.networks.off_policy.Critic"',
        'error: Module has no attribute "PP0"  [attr-defined]',
        'error: Argument "gamma" to "PPO" has incompatible type "str"; expected "float"  [arg-type]',
    ], done.stdout + done.stderr
