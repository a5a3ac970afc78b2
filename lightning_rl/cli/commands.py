"""The subcommands `evaluate`, `validate`, `test`, `collect`, `record`, `export`, `push`, `compare`, `import-mlagents` and `import-zoo`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from lightning_rl import policy
from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.curriculum import make_curriculum
from lightning_rl.callbacks.evaluation import EvaluationConfig
from lightning_rl.checkpoints.manifest import manifest_path, read_manifest
from lightning_rl.cli.fit import redirect_notices
from lightning_rl.data.episodes import EpisodePlayer
from lightning_rl.data.players import make_player
from lightning_rl.demonstrations.dataset import summarize as summarize_demonstrations
from lightning_rl.demonstrations.files import dataset_id, new_folder
from lightning_rl.demonstrations.recorder import RecordEpisodes, save_demonstrations
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import describe_wrappers
from lightning_rl.envs.video import check_renders, load_ffmpeg, name_episodes
from lightning_rl.errors import SettingError, check_range, check_seed, printable
from lightning_rl.exporting.export import export_policy
from lightning_rl.exporting.push import push as push_agent
from lightning_rl.importers.mlagents import import_mlagents
from lightning_rl.importers.zoo import import_zoo
from lightning_rl.matches import describe_matches, play_matches
from lightning_rl.reports.report import check_out
from lightning_rl.reports.report import compare as compare_runs
from lightning_rl.settings.fields import as_settings
from lightning_rl.settings.yaml_files import parse, read_config
from lightning_rl.sharing.hub import is_address
from lightning_rl.training.loading import best_of, checkpoint_of, read_checkpoint
from lightning_rl.training.replay import stored_episodes
from lightning_rl.training.run_folder import run_of
from lightning_rl.training.threads import torch_threads
from lightning_rl.training.trainer import Trainer

OTHER_VIDEOS = (".gif", ".apng", ".webp", ".webm", ".avi", ".mov", ".mkv", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv", ".ogg")
"""Suffixes of videos that are not mp4."""


def read_env(text: str | None) -> EnvConfig | None:
    """Read `--env`: the id of an environment, or a mapping of settings of `model.env`. Raises `SettingError`: it is neither."""
    return None if text is None else as_settings("--env", EnvConfig, parse(text, "--env") if text.startswith("{") else {"id": text})


def load_to_play(path: str | Path, options: Namespace) -> Any:
    """Load the algorithm of a checkpoint, and print how wrappers of its environment affect what is played."""
    algorithm = policy.load_with_env(path, read_env(options.env))
    for line in describe_wrappers(algorithm.env) if not getattr(options, "json", False) else ():
        print(printable(line))
    return algorithm


def evaluate(options: Namespace) -> int:
    """Play episodes with a checkpoint's policy and print their statistics."""
    numbers = options.episodes, options.seed, options.num_envs
    with redirect_stdout(sys.stderr) if options.json else nullcontext():  # stdout is one JSON object, without notices
        algorithm = load_to_play(options.ckpt_path, options)
        result = policy.evaluate(algorithm, *numbers, not options.stochastic, options.max_episode_steps, options.opponent)
    if options.json:
        print(json.dumps(result))
    else:
        print_result(algorithm, result)
    return 0


def validate(options: Namespace) -> int:
    """Play the episodes of the run's evaluations with a checkpoint's policy, and print their metrics."""
    return play_with_trainer("validate", options)


def test(options: Namespace) -> int:
    """Play 100 episodes that no evaluation of the run has seen, and print their metrics."""
    return play_with_trainer("test", options)


def play_with_trainer(method: str, options: Namespace) -> int:
    """Call a method of the Trainer with the algorithm of a checkpoint, and print the metrics that it returns."""
    redirect_notices()
    path = best_of(options.ckpt_path)
    algorithm = load_to_play(path, options)
    config = (run_of(path) or path.parent) / "config.yaml"  # a shared agent has it in the same folder
    settings = read_config(str(config)).get("evaluation") if config.is_file() else None
    try:
        evaluation = EvaluationConfig(**settings or {})
    except TypeError as error:
        raise SettingError(f"{config.name}, evaluation: {error}") from error
    trainer = Trainer(evaluation=evaluation, checkpoint=None, logger=False, enable_progress_bar=False)
    (metrics,) = getattr(trainer, method)(algorithm)
    print(json.dumps(metrics) if options.json else "\n".join(f"{name} {value:.2f}" for name, value in metrics.items()))
    return 0


def print_result(algorithm: Algorithm, result: dict[str, float]) -> None:
    """Print statistics of episodes in readable form."""
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
    if "success_rate" in result:
        print(f"success {result['success_rate']:.1%}")
    if "win_rate" in result:
        lost = 1 - result["win_rate"] - result["draw_rate"]
        print(f"won {result['win_rate']:.1%}, drawn {result['draw_rate']:.1%}, lost {lost:.1%}")
    if "exploitability" in result:
        print(f"the best opponent wins {result['exploitability']:.3f} per game against it")
    for name in [key.removesuffix("/return_mean") for key in result if key.endswith("/return_mean")]:
        mean, std, low, high = (result[f"{name}/return_{statistic}"] for statistic in ("mean", "std", "min", "max"))
        print(f"{name}: return {mean:.2f}" + ("" if result["episodes"] == 1 else f" ± {std:.2f} (min {low:.2f}, max {high:.2f})"))
    for curriculum in make_curriculum(algorithm.env):
        print(printable(f"played in the final lessons: {curriculum.finals()}"))


def collect(options: Namespace) -> int:
    """Save episodes as a Minari dataset: played by a checkpoint's policy, or taken from its replay buffer."""
    check_range("--episodes", options.episodes, 1, whole=True)
    check_seed("--seed", options.seed)
    if options.replay and (options.episodes, options.seed, options.deterministic) != (100, 0, "true"):
        raise SettingError("collect --replay saves all steps of the replay buffer: leave out --episodes, --seed and --deterministic")
    new_folder(dataset_id(options.dataset), options.force)
    ckpt_path = checkpoint_of(options.ckpt_path, "ckpt_path", "last.ckpt") if options.replay else options.ckpt_path
    algorithm = load_to_play(ckpt_path, options)
    if algorithm.spaces.agents:
        raise SettingError(f"collect records environments of one agent, and this one has {len(algorithm.spaces.agents)}")
    # one environment, so that the policy acts bit for bit as from load_policy
    player = make_player(algorithm.run.current_env, 1, None, algorithm.spaces, [RecordEpisodes])
    assert isinstance(player, EpisodePlayer)
    recorder = player.envs[0]
    assert isinstance(recorder, RecordEpisodes)
    with closing(player), torch_threads(1):
        if options.replay:
            episodes = stored_episodes(algorithm, read_checkpoint(ckpt_path), ckpt_path.parent / "last.ckpt.d")
        else:
            player.play(algorithm.network, options.episodes, options.seed, options.deterministic == "true")
            recorder.cut()
            episodes = recorder.demonstrations
        name = type(algorithm).__name__
        folder = save_demonstrations(options.dataset, episodes, recorder.env, algorithm=name, force=options.force)
    print(printable(f"dataset {dataset_id(options.dataset)}: {folder}"))
    print(printable(summarize_demonstrations(episodes)))
    return 0


def record(options: Namespace) -> int:
    """Play episodes with a checkpoint's policy, write a video of each, and print their statistics."""
    limit = options.max_episode_steps
    check_range("--episodes", options.episodes, 1, whole=True)
    check_seed("--seed", options.seed)
    check_range("--max_episode_steps", 1 if limit is None else limit, 1, whole=True)
    if options.out is None and is_address(options.ckpt_path):
        raise SettingError(f"{options.ckpt_path} is not a run on this machine: name a folder or a file with --out")
    ckpt_path = best_of(options.ckpt_path)
    files = video_files(videos_of(ckpt_path) if options.out is None else options.out, options.episodes)
    load_ffmpeg("lightning-rl record")
    algorithm = load_to_play(ckpt_path, options)
    check_renders(algorithm.env, "lightning-rl record")
    episodes = policy.record_episodes(algorithm, files, options.seed, limit, may_cut=limit is not None)
    for file, episode in zip(files, episodes, strict=True):
        print(printable(f"{file}: return {episode.return_:.2f}, length {episode.length}, seed {episode.seed}"))
    print_result(algorithm, policy.statistics(algorithm, episodes, options.seed, deterministic=True))
    return 0


def videos_of(ckpt_path: Path) -> Path:
    """Return the folder `videos` of a checkpoint's run, or the one next to a checkpoint that is not in a run."""
    return (run_of(ckpt_path) or ckpt_path.absolute().parent) / "videos"


def video_files(out: Path, episodes: int) -> list[Path]:
    """Name a file for each episode.

    Raises:
        SettingError: one file for several episodes, or a path that cannot be written to.
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


def export(options: Namespace) -> int:
    """Export a checkpoint's policy to a file that can be used without this package."""
    path = export_policy(options.ckpt_path, options.out, options.format, options.behavior, read_env(options.env))
    description = read_manifest(path) or {}
    check, results = description["check"], []
    numeric = {output["dtype"].startswith("float") for output in description["outputs"] if output["role"] == "action"}
    if True in numeric:
        results.append(f"numbers differ by at most {check['max_abs_difference']:.2g}")
    if False in numeric:
        results.append("choices are the same" + (f" except for {check['ties']} ties" if check["ties"] else ""))
    print(printable(f"{path}, described in {manifest_path(path).name}"))
    print(f"compared with the policy at {check['observations']:,} observations: {', '.join(results)}")
    if description["format"] == "unity":
        sensors = [port for port in description["inputs"] if port["role"] == "observation"]
        print("for agents that observe", ", ".join(f"{port['name']} {' x '.join(map(str, port['shape'][1:]))}" for port in sensors))
    return 0


def push(options: Namespace) -> int:
    """Share the agent of a run on the hub."""
    redirect_notices()
    numbers = {"episodes": options.episodes, "seed": options.seed}
    address = push_agent(
        options.run, options.repo, private=options.private, video=options.video, **numbers, say=lambda line: print(printable(line))
    )
    print(printable(f"shared as {address}"))
    return 0


def compare(options: Namespace) -> int:
    """Print the results of runs by algorithm, environment and settings, and write a page with their learning curves."""
    if options.versus and (options.out is not None or options.threshold is not None or options.diagnostics):
        raise SettingError("compare --versus plays games and draws no curves: leave out --out, --threshold and --diagnostics")
    if options.versus:
        print(printable(describe_matches(play_matches(options.runs, options.games))))
        return 0
    if options.out == "":
        raise SettingError("--out '' is not a file; name one that ends in .html")
    out = None if options.out is None else Path(options.out)
    if out is not None:
        check_out(out)
    if options.threshold is not None:
        check_range("--threshold", options.threshold)
    report = compare_runs(*options.runs, threshold=options.threshold, diagnostics=options.diagnostics)
    if out is not None:
        report.write(out)
    print(report)
    if out is not None:
        print(printable(f"report: {out}, picture: {out.with_suffix('.png')}"))
    return 0


def print_mlagents_config(options: Namespace) -> int:
    """Print a behavior of an ML-Agents trainer file as a config."""
    print(printable(import_mlagents(options.file, options.behavior, options.env)), end="")
    return 0


def print_zoo_config(options: Namespace) -> int:
    """Print a section of a file of rl-baselines3-zoo as a config."""
    print(printable(import_zoo(options.file, options.env, options.algo)), end="")
    return 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "evaluate": evaluate,
    "validate": validate,
    "test": test,
    "collect": collect,
    "record": record,
    "compare": compare,
    "export": export,
    "push": push,
    "import-mlagents": print_mlagents_config,
    "import-zoo": print_zoo_config,
}
"""The function of each subcommand: takes its options, returns the exit status."""
