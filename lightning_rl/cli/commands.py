"""The subcommands `evaluate`, `validate`, `test`, `collect`, `record`, `export`, `push`, `compare`, `import-mlagents` and `import-zoo`."""

from __future__ import annotations

import argparse
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

from lightning_rl import policy
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.curriculum import make_curriculum
from lightning_rl.callbacks.evaluation import EvaluationConfig, make_player
from lightning_rl.checkpoints.atomic import SaveError
from lightning_rl.checkpoints.manifest import manifest_path, read_manifest
from lightning_rl.cli.fit import redirect_notices
from lightning_rl.config_files import parse, read_config
from lightning_rl.demonstrations.dataset import summarize as summarize_demonstrations
from lightning_rl.demonstrations.files import dataset_id, new_folder
from lightning_rl.demonstrations.recorder import RecordEpisodes, save_demonstrations
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.video import check_renders, load_ffmpeg, name_episodes
from lightning_rl.errors import SettingError, as_settings, check_range, nearest, printable
from lightning_rl.exporting.export import export_policy
from lightning_rl.exporting.formats import FORMATS
from lightning_rl.exporting.push import EPISODES, SEED
from lightning_rl.exporting.push import push as push_agent
from lightning_rl.importers.mlagents import import_mlagents
from lightning_rl.importers.zoo import import_zoo
from lightning_rl.importers.zoo_settings import ALGORITHMS
from lightning_rl.matches import describe_matches, play_matches
from lightning_rl.reports.groups import make_sections
from lightning_rl.reports.page import check_out, write
from lightning_rl.reports.runs import find_runs
from lightning_rl.reports.tables import make_tables, rliable
from lightning_rl.sharing.agent import is_agent
from lightning_rl.sharing.hub import is_address
from lightning_rl.threads import torch_threads
from lightning_rl.training.loading import best_of
from lightning_rl.training.trainer import Trainer

OTHER_VIDEOS = (".gif", ".apng", ".webp", ".webm", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ogg")
"""Suffixes of videos that are not mp4."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `SettingError` instead of printing its usage."""

    def __init__(self, subcommand: str, description: str) -> None:
        super().__init__(f"lightning-rl {subcommand}", description=description, allow_abbrev=False)

    def add_checkpoint(self) -> None:
        """Add the option for a checkpoint."""
        where = "a checkpoint, a run's folder (its checkpoints/best.ckpt), hf://USER/NAME[@REVISION], or a .zip of Stable-Baselines3"
        self.add_argument("--ckpt_path", required=True, help=where)
        self.add_argument(
            "--env", type=read_env, help="its environment, where the file names none; an id, or settings of model.env in YAML"
        )

    def add_episodes(self, number: int, seed: int) -> None:
        """Add the options for how many episodes to play, and their seeds."""
        self.add_argument("--episodes", type=int, default=number, help=f"how many to play ({number})")
        self.add_argument("--seed", type=int, default=seed, help=f"of the first episode, the others count up ({seed})")

    def error(self, message: str) -> NoReturn:
        """Raise `SettingError`, with the nearest option where one is unknown."""
        other, _, unknown = message.partition("unrecognized arguments: ")
        options = re.findall(r"--\w+", self.format_usage())
        raise SettingError(other or message + nearest(unknown.split()[0], options))


def read_env(text: str) -> EnvConfig:
    """Read the id of an environment, or a mapping of settings of `model.env`. Raises `SettingError`: it is neither."""
    return as_settings("--env", EnvConfig, parse(text, "--env") if text.startswith("{") else {"id": text})


def evaluate(arguments: list[str], imports: list[str]) -> int:
    """Play episodes with a checkpoint's policy and print their statistics."""
    parser = Parser("evaluate", "Play episodes with a checkpoint's policy.")
    parser.add_checkpoint()
    parser.add_episodes(100, 20_000)
    parser.add_argument("--num_envs", type=int, default=10, help="how many environments act together (10)")
    parser.add_argument("--stochastic", action="store_true", help="draw actions instead of taking the most likely one")
    parser.add_argument("--max_episode_steps", type=int, help="longest episode (the environment's own limit, or 10000)")
    parser.add_argument("--opponent", default="random", help="who plays the other seats of a game: random, a run, module.player (random)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    algorithm = policy.load_with_env(options.ckpt_path, options.env)
    numbers = options.episodes, options.seed, options.num_envs
    result = policy.evaluate(algorithm, *numbers, not options.stochastic, options.max_episode_steps, options.opponent)
    if options.json:
        print(json.dumps(result))
    else:
        print_result(algorithm, result)
    return 0


def validate(arguments: list[str], imports: list[str]) -> int:
    """Play the episodes of the run's evaluations with a checkpoint's policy, and print their metrics."""
    return play_with_trainer("validate", "Play the episodes of a run's evaluations.", arguments)


def test(arguments: list[str], imports: list[str]) -> int:
    """Play 100 episodes that no evaluation of the run has seen, and print their metrics."""
    return play_with_trainer("test", "Play 100 episodes that no evaluation of a run has seen.", arguments)


def play_with_trainer(subcommand: str, description: str, arguments: list[str]) -> int:
    """Call a method of the Trainer with the algorithm of a checkpoint, and print the metrics that it returns."""
    parser = Parser(subcommand, description)
    parser.add_checkpoint()
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    redirect_notices()
    path = best_of(options.ckpt_path)
    algorithm = policy.load_with_env(path, options.env)
    config = (path.parent if is_agent(path) else path.parent.parent) / "config.yaml"
    settings = read_config(str(config)).get("evaluation") if config.is_file() else None
    try:
        evaluation = EvaluationConfig(**settings or {})
    except TypeError as error:
        raise SettingError(f"{config.name}, evaluation: {error}") from error
    trainer = Trainer(evaluation=evaluation, checkpoint=None, logger=False, enable_progress_bar=False)
    (metrics,) = getattr(trainer, subcommand)(algorithm)
    print(json.dumps(metrics) if options.json else "\n".join(f"{name} {value:.2f}" for name, value in metrics.items()))
    return 0


def print_result(algorithm: Algorithm, result: dict[str, Any]) -> None:
    """Print statistics of episodes for a reader."""
    trained = f"{result['updates']:,} updates" if "updates" in result else f"{result['env_steps']:,} environment steps"
    if result["episodes"] == 1:
        print(f"return {result['return_mean']:.2f} in 1 episode, length {result['length_mean']:.0f}, trained for {trained}")
    else:
        print(
            f"return {result['return_mean']:.2f} ± {result['return_std']:.2f} over {result['episodes']} episodes "
            f"(min {result['return_min']:.2f}, median {result['return_median']:.2f}, max {result['return_max']:.2f}; "
            f"IQM {result['iqm']:.2f}, 95 % interval of the mean {result['ci_low']:.2f} to {result['ci_high']:.2f}), "
            f"mean length {result['length_mean']:.1f}, trained for {trained}"
        )
    if "win_rate" in result:
        lost = 1 - result["win_rate"] - result["draw_rate"]
        print(f"won {result['win_rate']:.1%}, drawn {result['draw_rate']:.1%}, lost {lost:.1%}")
    if "exploitability" in result:
        print(f"the best opponent wins {result['exploitability']:.3f} a game against it")
    for name in [key.removesuffix("/return_mean") for key in result if key.endswith("/return_mean")]:
        mean, std, low, high = (result[f"{name}/return_{each}"] for each in ("mean", "std", "min", "max"))
        print(f"{name}: return {mean:.2f}" + ("" if result["episodes"] == 1 else f" ± {std:.2f} (min {low:.2f}, max {high:.2f})"))
    for curriculum in make_curriculum(algorithm.env):
        print(printable(f"played in the final lessons: {curriculum.finals()}"))


def collect(arguments: list[str], imports: list[str]) -> int:
    """Play episodes with a checkpoint's policy and save them as a Minari dataset."""
    parser = Parser("collect", "Record a checkpoint's policy as a Minari dataset.")
    parser.add_checkpoint()
    parser.add_argument("--dataset", required=True, help="its name, such as cartpole/expert-v0; it is saved in MINARI_DATASETS_PATH")
    parser.add_episodes(100, 0)
    parser.add_argument("--deterministic", choices=("true", "false"), default="true", help="the most likely action, or a random one (true)")
    parser.add_argument("--force", action="store_true", help="replace a dataset of this name")
    options = parser.parse_args(arguments)
    check_range("--episodes", options.episodes, 1, whole=True)
    check_range("--seed", options.seed, 0, whole=True)
    new_folder(dataset_id(options.dataset), options.force)
    algorithm = policy.load_with_env(options.ckpt_path, options.env)
    if algorithm.spaces.agents:
        raise SettingError(f"collect records environments of one agent, and this one has {len(algorithm.spaces.agents)}")
    # one environment, so that the policy does bit for bit what load_policy does
    player = make_player(algorithm.env, 1, None, algorithm.spaces, [RecordEpisodes])
    recorder: Any = player.envs[0]
    with closing(player), torch_threads(1):
        player.play(algorithm.network, options.episodes, options.seed, options.deterministic == "true")
        recorder.cut()
        name = type(algorithm).__name__
        try:
            folder = save_demonstrations(options.dataset, recorder.demonstrations, recorder.env, algorithm=name, force=options.force)
        except SaveError as error:
            raise SettingError(str(error)) from error
    print(printable(f"dataset {dataset_id(options.dataset)}: {folder}"))
    print(printable(summarize_demonstrations(recorder.demonstrations)))
    return 0


def record(arguments: list[str], imports: list[str]) -> int:
    """Play episodes with a checkpoint's policy, write a video of each, and print their statistics."""
    parser = Parser("record", "Videos of a checkpoint's policy.")
    parser.add_checkpoint()
    parser.add_episodes(1, 20_000)
    parser.add_argument("--out", type=Path, help="a folder for episode_0.mp4, …, or one file .mp4 for one episode (RUN/videos)")
    parser.add_argument("--max_episode_steps", type=int, help="truncate episodes here (default: an error after 10000 steps)")
    options = parser.parse_args(arguments)
    limit = options.max_episode_steps
    check_range("--episodes", options.episodes, 1, whole=True)
    check_range("--seed", options.seed, 0, whole=True)
    check_range("--max_episode_steps", 1 if limit is None else limit, 1, whole=True)
    if options.out is None and is_address(options.ckpt_path):
        raise SettingError(f"{options.ckpt_path} is not of a run on this machine: name a folder or a file by --out")
    ckpt_path = best_of(options.ckpt_path)
    files = video_files(videos_of(ckpt_path) if options.out is None else options.out, options.episodes)
    load_ffmpeg("lightning-rl record")
    algorithm = policy.load_with_env(ckpt_path, options.env)
    check_renders(algorithm.env, "lightning-rl record")
    episodes = policy.record_episodes(algorithm, files, options.seed, limit, may_cut=limit is not None)
    for file, episode in zip(files, episodes, strict=True):
        print(printable(f"{file}: return {episode.return_:.2f}, length {episode.length}, seed {episode.seed}"))
    print_result(algorithm, policy.statistics(algorithm, episodes, options.seed, deterministic=True))
    return 0


def videos_of(ckpt_path: Path) -> Path:
    """Return the folder `videos` of a checkpoint's run; next to a checkpoint that is in no run."""
    folder = ckpt_path.absolute().parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "videos"


def video_files(out: Path, episodes: int) -> list[Path]:
    """Name a file for each episode.

    Raises:
        SettingError: one file for several episodes, or a place that cannot be written to.
    """
    if not out.parent.is_dir():
        way_out = f"{out.parent} is not a folder" if out.parent.exists() else f"there is no folder {out.parent}; make it first"
        raise SettingError(f"--out {out}: {way_out}")
    if out.suffix.lower() in OTHER_VIDEOS and not out.is_dir():
        raise SettingError(f"--out {out}: videos are mp4; name a file that ends in .mp4, or a folder")
    if out.suffix.lower() != ".mp4" or out.is_dir():
        if out.exists() and not out.is_dir():
            raise SettingError(f"--out {out} is a file; name a folder, or a file that ends in .mp4")
        return [out / name for name in name_episodes(episodes)]
    if episodes > 1:
        raise SettingError(f"--out {out} is one file for {episodes} episodes; name a folder")
    return [out]


def export(arguments: list[str], imports: list[str]) -> int:
    """Write a checkpoint's policy as a file that needs no part of this package."""
    parser = Parser("export", "A checkpoint's policy as a file for other programs.")
    parser.add_checkpoint()
    parser.add_argument("--format", help=f"{', '.join(FORMATS)} (by the suffix of --out, or onnx)")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file to write (next to the checkpoint)")
    parser.add_argument("--behavior", help="which policy, where the run has several")
    options = parser.parse_args(arguments)
    path = export_policy(options.ckpt_path, options.out, options.format, options.behavior, options.env)
    description = read_manifest(path) or {}
    check, found = description["check"], []
    numeric = {output["dtype"].startswith("float") for output in description["outputs"] if output["role"] == "action"}
    if True in numeric:
        found.append(f"numbers differ by at most {check['max_abs_difference']:.2g}")
    if False in numeric:
        found.append("choices are the same" + (f" but for {check['ties']} ties" if check["ties"] else ""))
    print(printable(f"{path}, described in {manifest_path(path).name}"))
    print(f"compared with the policy at {check['observations']:,} observations: {', '.join(found)}")
    return 0


def push(arguments: list[str], imports: list[str]) -> int:
    """Share the agent of a run on the hub."""
    parser = Parser("push", "Share the agent of a run on the hub, with settings, results, a learning curve and a video.")
    parser.add_argument("run", metavar="RUN", help="a run's folder: its checkpoints/best.ckpt; or a checkpoint")
    parser.add_argument("--repo", metavar="USER/NAME", required=True, help="where: a new repository, or one with an agent of this package")
    parser.add_argument("--private", action="store_true", help="create a repository that others do not see")
    where = "record an episode (if the environment renders, and the extra video is installed)"
    parser.add_argument("--video", action=argparse.BooleanOptionalAction, help=where)
    parser.add_episodes(EPISODES, SEED)
    options = parser.parse_args(arguments)
    redirect_notices()
    numbers = {"episodes": options.episodes, "seed": options.seed}
    address = push_agent(
        options.run, options.repo, private=options.private, video=options.video, **numbers, say=lambda line: print(printable(line))
    )
    print(printable(f"shared as {address}"))
    return 0


def compare(arguments: list[str], imports: list[str]) -> int:
    """Print the results of runs, by algorithm, environment and settings; write a page with their learning curves."""
    parser = Parser("compare", "Learning curves and tables of runs, seeds taken together.")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a run's folder, or one of runs such as runs/PPO/CartPole-v1")
    parser.add_argument("--out", metavar="FILE.html", help="write a page with the curves, and the picture next to it as .png")
    parser.add_argument("--threshold", metavar="R", type=float, help="report how long it took to a mean return of R")
    parser.add_argument("--versus", action="store_true", help="let runs, or checkpoints, of a game play each other, drawing their moves")
    parser.add_argument("--games", type=int, default=100, help="with --versus: games of each pair, half of them in each seat (100)")
    options = parser.parse_args(arguments)
    if options.versus and (options.out is not None or options.threshold is not None):
        raise SettingError("compare --versus plays games and draws no curves: leave out --out and --threshold")
    if options.versus:
        print(printable(describe_matches(play_matches(options.runs, options.games))))
        return 0
    if "" in options.runs:
        raise SettingError("'' is no folder; name the folder of a run, or one of runs such as runs/PPO/CartPole-v1")
    if options.out == "":
        raise SettingError("--out '' is no file; name one that ends in .html")
    if options.threshold is not None:
        check_range("--threshold", options.threshold)
    rliable("compare")
    out = None if options.out is None else Path(options.out)
    if out is not None:
        check_out(out)
    runs, empty = find_runs([Path(run) for run in options.runs])
    sections = make_sections(runs)
    remarks = [f"{folder} is left out: it has no returns yet." for folder in empty]
    if out is not None:
        write(out, sections, options.threshold, remarks)
    for section in sections:
        print(*map(printable, (section.title, *section.notes())), sep="\n")
        for table in make_tables(section, options.threshold):
            print(printable(f"\n{table.text()}"))
        print()
    for remark in remarks:
        print(printable(remark))
    if out is not None:
        print(printable(f"report: {out}, picture: {out.with_suffix('.png')}"))
    return 0


def print_mlagents_config(arguments: list[str], imports: list[str]) -> int:
    """Print a behavior of an ML-Agents trainer file as a config."""
    parser = Parser("import-mlagents", "An ML-Agents trainer file as a config, on stdout.")
    parser.add_argument("file", metavar="FILE", help="trainer settings in YAML, with sections for brains or with behaviors")
    parser.add_argument("--behavior", metavar="NAME", help="which behavior, where there are several")
    parser.add_argument("--env", metavar="ID", help="the environment, which such files do not name; or give fit --model.env.id ID")
    options = parser.parse_args(arguments)
    print(printable(import_mlagents(options.file, options.behavior, options.env)), end="")
    return 0


def print_zoo_config(arguments: list[str], imports: list[str]) -> int:
    """Print a section of a file of rl-baselines3-zoo as a config."""
    parser = Parser("import-zoo", "Settings of rl-baselines3-zoo as a config, on stdout.")
    parser.add_argument("file", metavar="FILE", help="hyper-parameters in YAML, named for their algorithm such as ppo.yml")
    parser.add_argument("env", metavar="ENV", help="which environment, such as CartPole-v1")
    parser.add_argument("--algo", help=f"which algorithm, if the file is not named for it: {', '.join(ALGORITHMS)}")
    options = parser.parse_args(arguments)
    print(printable(import_zoo(options.file, options.env, options.algo)), end="")
    return 0
