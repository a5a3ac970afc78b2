"""Share a trained agent on the hub: weights, settings, results of new episodes, a learning curve, a video, and a page about it.

The page shows what the agent is, its results, and how to use it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

from pytorch_lightning.utilities.seed import isolate_rng

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.recording import draw_curve
from lightning_rl.checkpoints.atomic import write_text
from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.video import check_renders
from lightning_rl.errors import SettingError, check_flag, check_range, check_seed
from lightning_rl.policy import load_with_env, play_episodes, record_episodes, statistics
from lightning_rl.settings.yaml_files import Plain, dump, read_config
from lightning_rl.sharing.agent import DESCRIPTION, WEIGHTS, decode, write_agent
from lightning_rl.sharing.hub import CONFIG, is_agent, is_zip, load_hub, prepare_repo, upload
from lightning_rl.training.loading import best_of, foreign_modules, read_checkpoint, stored_name
from lightning_rl.training.threads import torch_threads

CARD, RESULTS, CURVE, VIDEO = "README.md", "results.json", "learning_curve.png", "replay.mp4"
ABOUT = {
    WEIGHTS: "weights",
    DESCRIPTION: "settings, spaces, and the size and hash of the weights",
    CONFIG: "the settings of the run, for `lightning-rl fit --config`",
    RESULTS: "seed, return and length of each episode, and their statistics",
    CURVE: "returns during training",
    VIDEO: "the first of the episodes",
}
"""Files of a repository; all but the first two and the results may be missing."""
TAGS = ("reinforcement-learning", "deep-reinforcement-learning", "lightning_rl")
EPISODES, SEED = 100, 20_000
LONGEST_VIDEO = 1_000
"""Steps after which a video is cut."""
OF_THE_MACHINE = ("default_root_dir", "run_name", "logger", "callbacks", "plugins", "profiler", "ckpt_path", "init_from")
"""Settings of a run that are specific to one machine, which others do not need."""


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

    Loading the agent runs no code: the upload consists of weights (safetensors) and plain data (JSON, YAML), see `sharing/agent.py`.
    The returns on its page come from new episodes, which are played by the agent as it is read back from the files. An existing repository
    gets a new version if it holds an agent of this package.

    Args:
        run: a run's folder (its `checkpoints/best.ckpt`), or a checkpoint.
        repo: `USER/NAME`.
        private: create a private repository.
        video: whether to record an episode; default: if the environment renders and the extra `video` is installed.
        episodes: number of episodes to play.
        seed: seed of the first episode; the others count up.
        say: called with a line about each part that is left out.

    Raises:
        SettingError: the run cannot be loaded; others cannot build its environment; there is no token or no network; the repository holds
            something else, or it is public although `private` is set.
    """
    check_range("episodes", episodes, 1, whole=True)
    check_seed("seed", seed)
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


def check_environment(env: object) -> None:
    """Raise `SettingError` if others cannot build an environment, because it needs files of this machine."""
    assert isinstance(env, EnvConfig)
    for name, value in {**env.kwargs, **{f"wrappers.{k}": wrapper for k, wrapper in enumerate(env.wrappers)}}.items():
        if place := next(places(value), None):
            raise SettingError(f"env {env.name} is built from {place} ({name}), which others do not have: it cannot be shared")


def places(tree: object) -> Iterator[str]:
    """Yield the absolute paths in plain data."""
    if isinstance(tree, dict | list | tuple):
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from places(child)
    elif is_place(tree):
        yield tree


def is_place(leaf: object) -> TypeGuard[str]:
    """Return whether a value is an absolute path, here or on another system."""
    return isinstance(leaf, str) and (leaf.startswith(("/", "~/")) or PureWindowsPath(leaf).is_absolute())


def without_places(tree: Any) -> Any:
    """Copy plain data with only the last part of each absolute path: acting needs no paths, and they reveal user names."""
    if isinstance(tree, dict):
        return {key: without_places(child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(without_places, tree))
    return PurePath(tree.replace("\\", "/")).name if is_place(tree) else tree


def evaluate(algorithm: Algorithm, episodes: int, seed: int) -> Plain:
    """Play episodes; return their statistics, as `lightning-rl evaluate` prints them, with the seed, return and length of each."""
    played = play_episodes(algorithm, episodes, seed)
    with isolate_rng(), torch_threads(1):
        numbers = statistics(algorithm, played, seed, deterministic=True)
    rows = [{"seed": one.seed, "return": one.return_, "length": one.length, **dict(one.parts)} for one in played]
    return {"command": f"lightning-rl evaluate --episodes {episodes} --seed {seed}", "statistics": numbers, "played": rows}


def add_run(folder: Path, run: Path, counter: str, say: Callable[[str], None]) -> None:
    """Add the settings of a run and its learning curve, if it wrote them."""
    if (run / CONFIG).is_file():
        config = read_config(str(run / CONFIG))
        trainer = config.get("trainer") or {}
        config["trainer"] = {name: value for name, value in trainer.items() if name not in OF_THE_MACHINE}
        kept = {name: value for name, value in config.items() if name not in OF_THE_MACHINE}
        write_text(folder / CONFIG, dump(without_places(kept), allow_unicode=True))
    else:
        say(f"no {CONFIG}: {run} is not the folder of a run")
    if (run / "evaluations.csv").is_file() or (run / "metrics.csv").is_file():
        try:
            (folder / CURVE).write_bytes(draw_curve(run, counter))
        except SettingError as error:
            say(f"no learning curve: {error}")
    else:
        say("no learning curve: the run wrote no returns")


def add_video(folder: Path, algorithm: Algorithm, seed: int, wanted: bool, say: Callable[[str], None]) -> None:
    """Add a video of the first episode, of at most `LONGEST_VIDEO` steps; unless it is `wanted`, skip it if rendering is not possible."""
    try:
        check_renders(algorithm.env, "a video")
    except SettingError as error:
        if wanted:
            raise
        say(f"no video: {error}")
        return
    record_episodes(algorithm, [folder / VIDEO], seed, LONGEST_VIDEO, may_cut=True)


def write_card(folder: Path, repo: str, algorithm: Algorithm, results: Plain) -> None:
    """Write the page of the agent whose other files are in a folder."""
    hub = load_hub("push")
    name, env_id = type(algorithm).__name__, algorithm.env.name
    numbers = results["statistics"]
    value = f"{numbers['return_mean']:.2f} +/- {numbers['return_std']:.2f}"
    result = hub.EvalResult(
        task_type="reinforcement-learning",
        task_name="reinforcement-learning",
        dataset_name=env_id,
        dataset_type=env_id,
        metric_type="mean_reward",
        metric_name="mean_reward",
        metric_value=value,
        verified=False,
    )
    data = hub.ModelCardData(
        library_name="lightning_rl",
        pipeline_tag="reinforcement-learning",
        tags=[*TAGS, env_id, name],
        model_name=f"{name} on {env_id}",
        eval_results=[result],
    )
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(_sections(folder, repo, algorithm, results)) + "\n"
    (folder / CARD).write_text(text, encoding="utf-8")


def _sections(folder: Path, repo: str, algorithm: Algorithm, results: Plain) -> list[str]:
    """Return the parts of the page."""
    address, name, env_id, numbers = f"hf://{repo}", type(algorithm).__name__, algorithm.env.name, results["statistics"]
    modules = list(dict.fromkeys(_modules(algorithm)))
    options = "".join(f" --import {module}" for module in modules)
    imported = "".join(f"import {module}\n" for module in modules)
    loaded = ", behavior=".join(map(json.dumps, [address, *[name for name in algorithm.run.learners if name][:1]]))
    described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    parts = [
        f"# {name} on {env_id}",
        f"An agent of `lightning_rl` that was trained for {algorithm.count:,} {algorithm.counted}.",
        "## Use",
        _block("bash", f"lightning-rl evaluate --ckpt_path {address}{options}\nlightning-rl record --ckpt_path {address} --out .{options}"),
        _block(
            "python",
            f"{imported}import lightning_rl as lrl\n\npolicy = lrl.load_policy({loaded})\naction, memory = policy.act(observation)",
        ),
    ]
    if modules:
        parts.append(
            f"It needs code that is not included, which you must have and trust: {', '.join(f'`{module}`' for module in modules)}."
        )
    parts += ["## Results", _table(numbers)]
    parts.append(
        f"To reproduce: `{results['command']} --ckpt_path {address}{options}`, "
        f"{numbers['episodes']} episodes with seeds from {numbers['seed']} on and the most likely actions."
    )
    if (folder / CURVE).is_file():
        parts.append(f"![Returns during training]({CURVE})")
    settings = dump(decode(described["hyper_parameters"]), allow_unicode=True).rstrip()
    parts += ["## Settings", _block("yaml", settings)]
    versions = ", ".join(f"{package} {version}" for package, version in described["versions"].items())
    files = "\n".join(f"| `{file}` | {about} |" for file, about in ABOUT.items() if (folder / file).is_file())
    parts += [
        "## Files",
        f"| file | content |\n|---|---|\n{files}",
        f"Loading the agent runs no code from these files. Written with {versions}.",
    ]
    return parts


def _modules(algorithm: Algorithm) -> list[str]:
    """Return the modules outside this package that must be imported before the agent is loaded."""
    module, dot, _ = stored_name(type(algorithm)).rpartition(".")
    return [*([module] if dot else []), *foreign_modules(algorithm.hparams, "the agent")]


def _table(numbers: dict[str, float]) -> str:
    rows = [
        ("mean return", f"{numbers['return_mean']:.2f} ± {numbers['return_std']:.2f}"),
        ("interquartile mean", f"{numbers['iqm']:.2f}"),
        ("lowest, median, highest", ", ".join(f"{numbers[f'return_{statistic}']:.2f}" for statistic in ("min", "median", "max"))),
        ("mean length", f"{numbers['length_mean']:.1f}"),
    ]
    if numbers["ci_low"] is not None:  # None for one episode
        rows.insert(1, ("95 % interval of the mean", f"{numbers['ci_low']:.2f} to {numbers['ci_high']:.2f}"))
    if "win_rate" in numbers:
        rows.append(("won, drawn, against random moves", f"{numbers['win_rate']:.1%}, {numbers['draw_rate']:.1%}"))
    behaviors = [key.removesuffix("/return_mean") for key in numbers if key.endswith("/return_mean")]
    rows += [
        (f"mean return of {behavior}", f"{numbers[f'{behavior}/return_mean']:.2f} ± {numbers[f'{behavior}/return_std']:.2f}")
        for behavior in behaviors
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name.replace('|', '')} | {value} |" for name, value in rows)])


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
