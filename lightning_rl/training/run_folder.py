"""Choose, lock and replace the folder of a run: `<root>/<algorithm>/<environment>/version_<n>/`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path

import yaml
from pytorch_lightning.utilities.rank_zero import rank_zero_only
from pytorch_lightning.utilities.seed import isolate_rng

import lightning_rl
from lightning_rl.checkpoints.atomic import locked, write_bytes, write_text
from lightning_rl.checkpoints.files import find_saved, last_generation
from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_env
from lightning_rl.envs.sync import closing_env, name_of
from lightning_rl.envs.unity.scene import behavior_of
from lightning_rl.errors import SettingError
from lightning_rl.loggers import CsvTable, read_rows
from lightning_rl.settings.yaml_files import Plain, dump
from lightning_rl.training.hooks import RunModule

REPLACED = ".replaced"
"""The suffix of a run's folder while `--force` replaces it."""
UNITY = "unity"
"""The folder of what a scene of Unity needs of a run, or leaves in it."""
NO_SEPARATORS = str.maketrans("/\\", "__")
"""Makes the name of a behavior that of a file."""


def is_first_rank() -> bool:
    """Return whether this process is the first of its run, or the only one."""
    return getattr(rank_zero_only, "rank", 0) == 0


@contextmanager
def take_run(
    folder: Path,
    ckpt_path: str | Path | None,
    name: str | None = None,
    force: bool = False,
    saves: bool = True,
    say: Callable[[str], None] = print,
) -> Iterator[tuple[Path, str | Path | None]]:
    """Choose a run's folder and the checkpoint to resume from, and lock the folder inside the context.

    A run `name` that ended before it saved anything starts again in its folder, if the new one `saves`. A new folder in which nothing was
    logged or saved is removed at the end.

    Raises:
        SettingError: another process trains in the folder; or a new run's folder contains a run and `force` is false. That includes
            `ckpt_path` last if that run saved only `best.ckpt`: continuing from it is another run.
    """
    if not is_first_rank():  # the first rank has the lock
        yield choose_run(folder, ckpt_path, name)
        return
    continues = ckpt_path == "last"
    with _made(folder):
        run, checkpoint = choose_run(folder, ckpt_path, name)
        while is_new := not run.exists():
            with suppress(FileExistsError):  # another process has just made it
                run.mkdir()
                break
            run, checkpoint = choose_run(folder, ckpt_path, name)
        with locked(run, say):
            try:
                if end_replacing(run):  # left behind by a kill
                    say(f"the run in {run} is restored: the run that was replacing it was killed before it saved anything")
                if continues and checkpoint is None:
                    checkpoint = last_generation(run / "checkpoints")
                saved = find_saved(run / "checkpoints")
                goes_on = continues and saves and (checkpoint is not None or saved is None)
                if name is not None and not (force or goes_on or is_blank(run)):
                    raise SettingError(describe_run(run, saved))
                yield run, checkpoint
            finally:
                if is_new and is_blank(run):
                    shutil.rmtree(run, ignore_errors=True)


def choose_run(folder: Path, ckpt_path: str | Path | None, name: str | None = None) -> tuple[Path, str | Path | None]:
    """Return the folder of a run and the checkpoint to resume from.

    `last` is the newest run in `folder` that saved a checkpoint, or the run `name`. Without such a run, return a new folder and None.
    """
    numbers = sorted(int(path.name[8:]) for path in folder.glob("version_*") if path.name[8:].isdecimal())
    runs = [folder / f"version_{number}" for number in numbers] if name is None else [folder / name]
    if ckpt_path == "last":
        for run in reversed(runs):
            checkpoint = last_generation(run / "checkpoints")
            if checkpoint is not None:
                return run, checkpoint
        ckpt_path = None
    return folder / (name or f"version_{numbers[-1] + 1 if numbers else 0}"), ckpt_path


def describe_run(run: Path, saved: Path | None) -> str:
    """Return the message how to resume an existing run, whose save `find_saved` found, or replace it with `--force`."""
    if saved is None:
        return f"there is a run in {run} that saved nothing: --force starts again and deletes it"
    if saved.name.startswith("last."):
        return f"there is a run in {run}: --ckpt_path last continues it, --force starts again and deletes it"
    return f"there is a run without last.ckpt: --ckpt_path {saved} continues it with another run_name, --force deletes it"


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create a folder with its parents, and remove those that were created and are empty at the end."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            for parent in missing:
                parent.rmdir()


def is_blank(run: Path) -> bool:
    """Return whether a folder contains no more than the files of a run that failed before it started."""
    try:
        return all(_is_empty(file) for file in run.rglob("*") if not file.is_dir())
    except FileNotFoundError:  # the first rank has just removed it
        return True


def _is_empty(file: Path) -> bool:
    if file.name in ("metrics.csv", "evaluations.csv"):
        return not read_rows(file)
    return file.name in ("config.yaml", "hparams.yaml") or file.name.startswith("events.out.tfevents")


@contextmanager
def keeping_config(run: Path, has_begun: Callable[[], bool], is_complete: bool) -> Iterator[None]:
    """Restore `config.yaml` if a resumed run rejects changed settings before it starts, or `is_complete` already."""
    file = run / "config.yaml"
    before = file.read_bytes() if file.is_file() else None
    try:
        yield
    except SettingError:
        is_complete |= not has_begun()
        raise
    finally:
        if before is not None and is_first_rank() and is_complete:
            write_bytes(file, before)


@contextmanager
def replacing(run: Path, saves: bool) -> Iterator[None]:
    """Let a new run replace another in its folder; the old run is restored if the new one saves nothing. Other folders are not touched.

    If the new run does not save checkpoints (`saves` is false) and ends without an error, any output of it is enough.
    """
    if not (run / "config.yaml").is_file() or not is_first_rank():
        yield
        return
    run.rename(run.with_name(f"{run.name}{REPLACED}"))
    try:
        yield
    except BaseException:
        end_replacing(run)
        raise
    end_replacing(run, saves)


def end_replacing(run: Path, saves: bool = True) -> bool:
    """Delete a replaced run, or restore it if the new one saved nothing. Return whether it was restored."""
    old = run.with_name(f"{run.name}{REPLACED}")
    comes_back = old.exists() and (find_saved(run / "checkpoints") is None if saves else is_blank(run))
    if comes_back:
        shutil.rmtree(run, ignore_errors=True)
        old.rename(run)
    elif old.exists():
        shutil.rmtree(old)
    return comes_back


def environment_name(env: object) -> str:
    """Return the environment's id without its module, or the name of its class or function; of a build of Unity the name of its file.

    For a lambda, it is that of the environment built.
    """
    if isinstance(env, EnvConfig) and env.is_unity:
        return Path(env.name.rpartition(":")[2]).stem
    if isinstance(env, EnvConfig) and env.path is not None:
        return env.path.rpartition(":")[2].removeprefix("__main__.")
    env = env.id if isinstance(env, EnvConfig) else env
    if isinstance(env, partial):  # copies of a ready environment, or a function with arguments
        return type(env.args[0].unwrapped).__name__ if env.func is deepcopy else getattr(env.func, "__name__", "partial")
    spec = None if isinstance(env, type) else getattr(env, "spec", None)
    name = getattr(env, "__name__", type(env).__name__)
    if spec is None and callable(env) and name == "<lambda>":
        with closing_env(make_env(env)) as built:
            return built.unwrapped.name if isinstance(built.unwrapped, AgentsEnv) else name_of(built)
    return spec.id if spec is not None else name


def run_of(ckpt_path: str | Path) -> Path | None:
    """Return the folder of the run that saved a checkpoint; None if the checkpoint is in another folder."""
    folder = Path(ckpt_path).absolute().parent
    return folder.parent if folder.name == "checkpoints" else None


def read_seed(ckpt_path: str | Path, otherwise: int | None) -> int | None:
    """Return the seed of a checkpoint's run from its `config.yaml`, for the run that resumes it."""
    run, seed = run_of(ckpt_path), otherwise
    with suppress(OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError):
        settings = None if run is None else yaml.safe_load((run / "config.yaml").read_text("utf-8"))
        seed = settings.get("seed_everything", otherwise) if isinstance(settings, dict) else otherwise
    return seed if seed is None or type(seed) is int else otherwise


@rank_zero_only
def write_config(run: Path, config: Plain) -> None:
    """Create the run's folder and write `config.yaml` atomically; `fit --config` repeats the run."""
    run.mkdir(parents=True, exist_ok=True)
    write_text(run / "config.yaml", dump(config))


@rank_zero_only
def cut_back_evaluations(run: Path, counter: str, count: int, say: Callable[[str], None] = print) -> None:
    """Remove evaluations past the checkpoint from which the run resumes: they will be repeated."""
    CsvTable(run / "evaluations.csv", counter, say).cut_back(count)


def export_for_unity(run: Path, module: RunModule, say: Callable[[str], None] = print) -> None:
    """Write the newest policy of each behavior that learns in a scene as `unity/<Behavior>.onnx`, and say where it is, or why not."""
    if (last := last_generation(run / "checkpoints")) is None:
        return
    agents = {behavior: learner.algorithm.spaces.agents for behavior, learner in module.run.learners.items()}
    named = {name: behavior for behavior, seats in agents.items() for name in map(behavior_of, seats)}
    for name, behavior in named.items():
        file = run / UNITY / f"{name.translate(NO_SEPARATORS)}.onnx"
        try:
            file.parent.mkdir(exist_ok=True)
            with isolate_rng():
                lightning_rl.export_policy(last, file, "unity", behavior or None)
            say(f"for Unity: {file}")
        except (SettingError, OSError) as error:
            say(f"{file} was not written: {error}")
