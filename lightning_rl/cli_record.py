"""The subcommand `record`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from lightning_rl.algorithms.loading import best_of
from lightning_rl.callbacks.evaluation import make_player
from lightning_rl.cli import Parser, tell
from lightning_rl.cpu_threads import torch_threads
from lightning_rl.data.episodes import longest_episode
from lightning_rl.envs.video import RecordVideo, check_renders, episode_names, load_ffmpeg, rendering
from lightning_rl.errors import SettingError, check_range, printable
from lightning_rl.judging import load_with_env, statistics
from lightning_rl.saving.atomic import SaveFailed

FILMS = (".gif", ".apng", ".webp", ".webm", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ogg")
"""Suffixes of moving pictures of other kinds than ours."""


def record(arguments: list[str], imports: list[str]) -> int:
    """Play episodes with a checkpoint's policy, write a video of each, and print their statistics."""
    parser = Parser("lightning-rl record", description="Videos of a checkpoint's policy.", allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True, type=Path, help="a checkpoint, or a run's folder: its checkpoints/best.ckpt")
    parser.add_argument("--episodes", type=int, default=1, help="how many to play (1)")
    parser.add_argument("--out", type=Path, help="a folder for episode_0.mp4, …, or one file .mp4 for one episode (RUN/videos)")
    parser.add_argument("--seed", type=int, default=20_000, help="of the first episode, the others count up (20000)")
    parser.add_argument("--max_episode_steps", type=int, help="cut episodes here (one without end is refused at 10000)")
    options = parser.parse_args(arguments)
    for name in ("episodes", "max_episode_steps"):
        if getattr(options, name) is not None:
            check_range(f"--{name}", getattr(options, name), 1, whole=True)
    check_range("--seed", options.seed, 0, whole=True)
    ckpt_path = best_of(options.ckpt_path)
    files = files_of(beside(ckpt_path) if options.out is None else options.out, options.episodes)
    load_ffmpeg("lightning-rl record")
    algorithm = load_with_env(ckpt_path)
    check_renders(algorithm.env, "lightning-rl record")
    names, cut = iter(files), options.max_episode_steps
    try:
        files[0].parent.mkdir(exist_ok=True)
        player = make_player(
            rendering(algorithm.env),
            1,
            cut,
            algorithm.spaces.masked,
            [lambda env: RecordVideo(env, names, cut or longest_episode(env), may_cut=cut is not None)],
        )
        with closing(player), torch_threads(1):
            episodes = player.play(algorithm.network, options.episodes, options.seed, True)
    except SaveFailed as error:
        raise SettingError(str(error)) from error
    except OSError as error:
        raise SettingError(f"{files[0].parent} could not be written to ({error.strerror or error})") from error
    for file, episode in zip(files, episodes, strict=True):
        print(printable(f"{file}: return {episode.return_:.2f}, length {episode.length}, seed {episode.seed}"))
    tell(algorithm, statistics(algorithm, episodes, options.seed))
    return 0


def beside(ckpt_path: Path) -> Path:
    """The folder `videos` of the run that a checkpoint is of; of a checkpoint that lies elsewhere, beside it."""
    folder = ckpt_path.absolute().parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "videos"


def files_of(out: Path, episodes: int) -> list[Path]:
    """A file for each episode.

    Raises:
        SettingError: one file for several, or a place where there is none to write to.
    """
    if not out.parent.is_dir() and out.parent.exists():
        raise SettingError(f"--out {out}: {out.parent} is not a folder")
    if not out.parent.is_dir():
        raise SettingError(f"--out {out}: there is no folder {out.parent}; make it first")
    if out.suffix.lower() in FILMS and not out.is_dir():
        raise SettingError(f"--out {out}: videos are mp4; name a file that ends in .mp4, or a folder")
    if out.suffix.lower() != ".mp4" or out.is_dir():
        if out.exists() and not out.is_dir():
            raise SettingError(f"--out {out} is a file; name a folder, or a file that ends in .mp4")
        return [out / name for name in episode_names(episodes)]
    if episodes > 1:
        raise SettingError(f"--out {out} is one file for {episodes} episodes; name a folder")
    return [out]


SUBCOMMANDS = {"record": record}
