"""Share a trained agent on the hub: weights, settings, freshly played episodes, a learning curve, a video, and a page about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path, PurePath, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pytorch_lightning.utilities.seed import isolate_rng

from lightning_rl.callbacks.recording import draw_curve
from lightning_rl.checkpoints.atomic import write_text
from lightning_rl.config_files import Plain, read_config
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.video import check_renders
from lightning_rl.errors import SettingError, check_flag, check_range
from lightning_rl.exporting.card import CARD, CURVE, RESULTS, VIDEO, write_card
from lightning_rl.policy import load_with_env, play_episodes, record_episodes, statistics
from lightning_rl.sharing.agent import is_agent, write_agent
from lightning_rl.sharing.hub import CONFIG, prepare_repo, upload
from lightning_rl.sharing.sb3 import is_zip
from lightning_rl.threads import torch_threads
from lightning_rl.training.loading import best_of, read_checkpoint

EPISODES, SEED = 100, 20_000
LONGEST_VIDEO = 1_000
"""Steps after which a video is cut."""
OF_THE_MACHINE = ("default_root_dir", "run_name", "logger", "callbacks", "plugins", "profiler", "ckpt_path", "init_from")
"""Settings of a run that say where things are on one machine, which nobody else needs."""


def push(
    run: str | Path,
    repo: str,
    *,
    private: bool = False,
    video: bool | None = None,
    episodes: int = EPISODES,
    seed: int = SEED,
    say: Callable[[str], None] = print,
) -> str:
    """Upload the agent of a run to a repository of the hub in one commit, and return its address, `hf://USER/NAME@COMMIT`.

    Nobody's code runs when it is loaded: what is uploaded are weights (safetensors) and plain data (JSON, YAML), see `sharing/agent.py`.
    The episodes whose returns its page shows are played for it, by the agent as it is read back from the files. A repository that exists
    gets a new version, if it holds an agent of this package.

    Args:
        run: a run's folder (its `checkpoints/best.ckpt`), or a checkpoint.
        repo: `USER/NAME`.
        private: create a repository that others do not see.
        video: whether to record an episode; default: if the environment renders and the extra `video` is installed.
        episodes: how many to play.
        seed: of the first episode; the others count up.
        say: is called with a line about each part that is left out.

    Raises:
        SettingError: the run cannot be loaded, or its environment not built by others; no token or no network; a repository of something
            else, or a public one where a private one is wanted.
    """
    check_range("episodes", episodes, 1, whole=True)
    check_range("seed", seed, 0, whole=True)
    check_flag("private", private)
    path = best_of(run)
    if is_zip(path):
        raise SettingError(f"{run} is an agent of Stable-Baselines3: it can act here, and not be shared from here")
    stored = load_with_env(path)
    check_environment(stored.env)
    if video:
        check_renders(stored.env, "push --video")
    prepare_repo(repo, private)
    with TemporaryDirectory() as name:
        folder = Path(name)
        agent = write_agent(folder, without_places(read_checkpoint(path)))
        algorithm = load_with_env(agent)
        results = evaluate(algorithm, episodes, seed)
        (folder / RESULTS).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")
        if not is_agent(path):
            add_run(folder, path.parent.parent, stored.counter, say)
        if video is not False:
            add_video(folder, algorithm, seed, bool(video), say)
        write_card(folder, repo, algorithm, results)
        return upload(repo, folder, private, [CARD, CONFIG, CURVE, RESULTS, VIDEO])


def check_environment(env: Any) -> None:
    """Raise `SettingError` where others cannot build an environment: from files of this machine."""
    assert isinstance(env, EnvConfig)
    for name, value in {**env.kwargs, **{f"wrappers.{k}": each for k, each in enumerate(env.wrappers)}}.items():
        if place := next(places(value), None):
            raise SettingError(f"env {env.id} is built from {place} ({name}), which others do not have: it cannot be shared")


def places(tree: object) -> Any:
    """Yield the texts in plain data that are absolute paths."""
    if isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from places(child)
    elif is_place(tree):
        yield tree


def is_place(leaf: object) -> bool:
    """Return whether a value is an absolute path, here or on another system."""
    return isinstance(leaf, str) and (leaf.startswith(("/", "~/")) or PureWindowsPath(leaf).is_absolute())


def without_places(tree: Any) -> Any:
    """Copy plain data with the last part alone of each absolute path: acting needs none, and they name the users of a machine."""
    if isinstance(tree, dict):
        return {key: without_places(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(without_places, tree))
    return PurePath(tree.replace("\\", "/")).name if is_place(tree) else tree


def evaluate(algorithm: Any, episodes: int, seed: int) -> Plain:
    """Play episodes, and return their statistics, as `lightning-rl evaluate` prints them, with the seed, return and length of each."""
    played = play_episodes(algorithm, episodes, seed)
    with isolate_rng(), torch_threads(1):
        numbers = statistics(algorithm, played, seed, deterministic=True)
    each = [{"seed": one.seed, "return": one.return_, "length": one.length, **dict(one.parts)} for one in played]
    return {"command": f"lightning-rl evaluate --episodes {episodes} --seed {seed}", "statistics": numbers, "played": each}


def add_run(folder: Path, run: Path, counter: str, say: Callable[[str], None]) -> None:
    """Add the settings of a run and its learning curve, where it wrote them."""
    if (run / CONFIG).is_file():
        config = read_config(str(run / CONFIG))
        trainer = config.get("trainer") or {}
        config["trainer"] = {name: value for name, value in trainer.items() if name not in OF_THE_MACHINE}
        kept = {name: value for name, value in config.items() if name not in OF_THE_MACHINE}
        write_text(folder / CONFIG, yaml.safe_dump(without_places(kept), sort_keys=False, allow_unicode=True))
    else:
        say(f"no {CONFIG}: {run} is not the folder of a run")
    if (run / "evaluations.csv").is_file() or (run / "metrics.csv").is_file():
        try:
            (folder / CURVE).write_bytes(draw_curve(run, counter))
        except SettingError as error:
            say(f"no learning curve: {error}")
    else:
        say("no learning curve: the run wrote no returns")


def add_video(folder: Path, algorithm: Any, seed: int, wanted: bool, say: Callable[[str], None]) -> None:
    """Add the video of the first episode, as far as the hub's players go; unless it is `wanted`, an environment may not render."""
    try:
        check_renders(algorithm.env, "a video")
    except SettingError as error:
        if wanted:
            raise
        say(f"no video: {error}")
        return
    record_episodes(algorithm, [folder / VIDEO], seed, LONGEST_VIDEO, may_cut=True)
