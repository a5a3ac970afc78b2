"""The subcommands `record`, `export`, `compare`, `import-mlagents` and `import-zoo`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from lightning_rl.callbacks.evaluation import make_player
from lightning_rl.checkpoints.atomic import SaveFailed
from lightning_rl.checkpoints.manifest import manifest_path, read_manifest
from lightning_rl.cli.fit import Parser, tell
from lightning_rl.data.episodes import longest_episode
from lightning_rl.envs.video import RecordVideo, check_renders, episode_names, load_ffmpeg, rendering
from lightning_rl.errors import SettingError, check_range, printable
from lightning_rl.exporting.export import export_policy
from lightning_rl.exporting.formats import FORMATS
from lightning_rl.importers.mlagents import import_mlagents
from lightning_rl.importers.zoo import import_zoo
from lightning_rl.importers.zoo_settings import ALGORITHMS
from lightning_rl.policy import load_with_env, statistics
from lightning_rl.reports.groups import make_sections
from lightning_rl.reports.page import check_out, write
from lightning_rl.reports.runs import find_runs
from lightning_rl.reports.tables import make_tables, rliable
from lightning_rl.threads import torch_threads
from lightning_rl.training.loading import best_of

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


def export(arguments: list[str], imports: list[str]) -> int:
    """Write a checkpoint's policy as a file that needs no part of this package."""
    parser = Parser("lightning-rl export", description="A checkpoint's policy as a file of its own.", allow_abbrev=False)
    parser.add_argument("--ckpt_path", required=True, type=Path, help="a checkpoint, or a run's folder: its checkpoints/best.ckpt")
    parser.add_argument("--format", help=f"{', '.join(FORMATS)} (what the suffix of --out says, or onnx)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to (beside the checkpoint)")
    options = parser.parse_args(arguments)
    path = export_policy(options.ckpt_path, options.out, options.format)
    description = read_manifest(path) or {}
    found, ties = description["check"], f" but for {description['check']['ties']} ties" if description["check"]["ties"] else ""
    numbers = {output["dtype"].startswith("float") for output in description["outputs"] if output["role"] == "action"}
    said = [f"numbers differ by at most {found['max_abs_difference']:.2g}"] * (True in numbers)
    said += [f"choices are the same{ties}"] * (False in numbers)
    print(printable(f"{path}, described in {manifest_path(path).name}"))
    print(f"compared with the policy at {found['observations']:,} observations: {', '.join(said)}")
    return 0


def compare(arguments: list[str], imports: list[str]) -> int:
    """Print what runs came to, by algorithm, environment and settings; write a page with their learning curves."""
    parser = Parser("lightning-rl compare", description="Learning curves and tables of runs, seeds taken together.", allow_abbrev=False)
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=folder_of_runs, help="a run's folder, or one of runs such as runs/PPO/CartPole-v1"
    )
    parser.add_argument("--out", metavar="FILE.html", type=page, help="write a page with the curves, and the picture beside it as .png")
    parser.add_argument("--threshold", metavar="R", type=float, help="say what it took to a mean return of R")
    options = parser.parse_args(arguments)
    if options.threshold is not None:
        check_range("--threshold", options.threshold)
    rliable("compare")
    if options.out is not None:
        check_out(options.out)
    runs, empty = find_runs(options.runs)
    sections = make_sections(runs)
    remarks = [f"{folder} is left out: it has no returns yet." for folder in empty]
    if options.out is not None:
        write(options.out, sections, options.threshold, remarks)
    for section in sections:
        print(*map(printable, (section.title, *section.notes())), sep="\n")
        for table in make_tables(section, options.threshold):
            print(printable(f"\n{table.text()}"))
        print()
    print(*map(printable, remarks), sep="\n", end="\n" if remarks else "")
    if options.out is not None:
        print(printable(f"report: {options.out}, picture: {options.out.with_suffix('.png')}"))
    return 0


def folder_of_runs(text: str) -> Path:
    """What was named as one; not the current folder where nothing was."""
    if not text:
        raise SettingError("'' is no folder; name the folder of a run, or one of runs such as runs/PPO/CartPole-v1")
    return Path(text)


def page(text: str) -> Path:
    """What was named as a file to write."""
    if not text:
        raise SettingError("--out '' is no file; name one that ends in .html")
    return Path(text)


def print_mlagents_config(arguments: list[str], imports: list[str]) -> int:
    """Print a behavior of an ML-Agents trainer file as a config."""
    parser = Parser("lightning-rl import-mlagents", description="An ML-Agents trainer file as a config, on stdout.", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="trainer settings in YAML, with sections for brains or with behaviors")
    parser.add_argument("--behavior", metavar="NAME", help="which behavior, where there are several")
    parser.add_argument("--env", metavar="ID", help="the environment, which such files do not name; or give fit --model.env.id ID")
    options = parser.parse_args(arguments)
    print(printable(import_mlagents(options.file, options.behavior, options.env)), end="")
    return 0


def print_zoo_config(arguments: list[str], imports: list[str]) -> int:
    """Print a section of a file of rl-baselines3-zoo as a config."""
    parser = Parser("lightning-rl import-zoo", description="Settings of rl-baselines3-zoo as a config, on stdout.", allow_abbrev=False)
    parser.add_argument("file", metavar="FILE", help="hyper-parameters in YAML, named for their algorithm such as ppo.yml")
    parser.add_argument("env", metavar="ENV", help="which environment, such as CartPole-v1")
    parser.add_argument("--algo", help=f"which algorithm, if the file's name does not tell: {', '.join(ALGORITHMS)}")
    options = parser.parse_args(arguments)
    print(printable(import_zoo(options.file, options.env, options.algo)), end="")
    return 0
