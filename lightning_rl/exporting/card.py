"""The page of a shared agent on the hub: what it is, what it reaches, and how to use it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from lightning_rl.config_files import Plain
from lightning_rl.sharing.agent import DESCRIPTION, WEIGHTS, decode
from lightning_rl.sharing.hub import CONFIG, load_hub
from lightning_rl.training.loading import foreign_modules, stored_name

CARD, RESULTS, CURVE, VIDEO = "README.md", "results.json", "learning_curve.png", "replay.mp4"
ABOUT = {
    WEIGHTS: "weights",
    DESCRIPTION: "settings, spaces, and the size and hash of the weights",
    CONFIG: "the settings of the run, for `lightning-rl fit --config`",
    RESULTS: "seed, return and length of each episode, and their statistics",
    CURVE: "returns while it learned",
    VIDEO: "the first of the episodes",
}
"""Files of a repository; all but the first two and the results may be missing."""
TAGS = ("reinforcement-learning", "deep-reinforcement-learning", "lightning_rl")


def write_card(folder: Path, repo: str, algorithm: Any, results: Plain) -> None:
    """Write the page of the agent whose other files are in a folder."""
    hub = load_hub("push")
    name, env_id = type(algorithm).__name__, algorithm.env.id
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


def _sections(folder: Path, repo: str, algorithm: Any, results: Plain) -> list[str]:
    """Return the parts of the page."""
    address, name, env_id, numbers = f"hf://{repo}", type(algorithm).__name__, algorithm.env.id, results["statistics"]
    modules = list(dict.fromkeys(_modules(algorithm)))
    options = "".join(f" --import {module}" for module in modules)
    imported = "".join(f"import {module}\n" for module in modules)
    described = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    parts = [
        f"# {name} on {env_id}",
        f"An agent of `lightning_rl` that was trained for {algorithm.count:,} {algorithm.counted}.",
        "## Use",
        _block("bash", f"lightning-rl evaluate --ckpt_path {address}{options}\nlightning-rl record --ckpt_path {address} --out .{options}"),
        _block(
            "python",
            f'{imported}import lightning_rl as lrl\n\npolicy = lrl.load_policy("{address}")\naction, memory = policy.act(observation)',
        ),
    ]
    if modules:
        parts.append(f"It needs code that is not here, which you must have and trust: {', '.join(f'`{each}`' for each in modules)}.")
    parts += ["## Results", _table(numbers)]
    parts.append(
        f"The same numbers: `{results['command']} --ckpt_path {address}{options}`, "
        f"{numbers['episodes']} episodes, each with a seed of its own from {numbers['seed']} on, and the most likely actions."
    )
    if (folder / CURVE).is_file():
        parts.append(f"![Returns while it learned]({CURVE})")
    settings = yaml.safe_dump(decode(described["hyper_parameters"]), sort_keys=False, allow_unicode=True).rstrip()
    parts += ["## Settings", _block("yaml", settings)]
    versions = ", ".join(f"{package} {version}" for package, version in described["versions"].items())
    files = "\n".join(f"| `{file}` | {about} |" for file, about in ABOUT.items() if (folder / file).is_file())
    parts += [
        "## Files",
        f"| file | content |\n|---|---|\n{files}",
        f"Nothing in them is run when the agent is loaded. Written with {versions}.",
    ]
    return parts


def _modules(algorithm: Any) -> list[str]:
    """Return the modules of others that a reader must import first."""
    module, dot, _ = stored_name(type(algorithm)).rpartition(".")
    return [*([module] if dot else []), *foreign_modules(algorithm.hparams, "the agent")]


def _table(numbers: dict[str, float]) -> str:
    rows = [
        ("mean return", f"{numbers['return_mean']:.2f} ± {numbers['return_std']:.2f}"),
        ("interquartile mean", f"{numbers['iqm']:.2f}"),
        ("lowest, median, highest", ", ".join(f"{numbers[f'return_{each}']:.2f}" for each in ("min", "median", "max"))),
        ("mean length", f"{numbers['length_mean']:.1f}"),
    ]
    if numbers["ci_low"] is not None:  # as of one episode
        rows.insert(1, ("95 % interval of the mean", f"{numbers['ci_low']:.2f} to {numbers['ci_high']:.2f}"))
    if "win_rate" in numbers:
        rows.append(("won, drawn, against random moves", f"{numbers['win_rate']:.1%}, {numbers['draw_rate']:.1%}"))
    behaviors = [key.removesuffix("/return_mean") for key in numbers if key.endswith("/return_mean")]
    rows += [
        (f"mean return of {each}", f"{numbers[f'{each}/return_mean']:.2f} ± {numbers[f'{each}/return_std']:.2f}") for each in behaviors
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name.replace('|', '')} | {value} |" for name, value in rows)])


def _block(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
