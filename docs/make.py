"""Write the pages of `docs/algorithms/` from docstrings, configs and the README's table: `python docs/make.py`."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning_rl
from lightning_rl.settings.fields import default_of, settings_of
from lightning_rl.settings.yaml_files import read_config

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
FORMULAS = {
    "PPO": ("returns.gae", *(f"losses.policy_gradient.{name}" for name in ("clipped_surrogate", "clipped_value_loss", "approximate_kl"))),
    "A2C": ("returns.gae", "losses.policy_gradient.policy_gradient"),
    "IMPALA": ("returns.vtrace", "losses.policy_gradient.policy_gradient"),
    "POCA": ("data.groups.group_returns", "returns.gae", "losses.policy_gradient.clipped_surrogate"),
    "TRPO": ("returns.gae",),
    "SAC": tuple(f"losses.soft_actor_critic.{name}" for name in ("soft_value", "critic_loss", "actor_loss", "temperature_loss")),
    "TQC": ("losses.soft_actor_critic.soft_value", "losses.q_learning.quantile_huber"),
    "CrossQ": tuple(f"losses.soft_actor_critic.{name}" for name in ("soft_value", "critic_loss", "actor_loss", "temperature_loss")),
    "DQN": tuple(f"losses.q_learning.{name}" for name in ("huber", "cross_entropy", "project", "quantile_huber")),
    "TD3": ("losses.soft_actor_critic.critic_loss",),
    "PQN": ("returns.gae",),
    "IQL": ("losses.offline.expectile_loss", "losses.offline.advantage_weight"),
    "CQL": ("losses.offline.conservative_gap", "losses.soft_actor_critic.actor_loss", "losses.soft_actor_critic.temperature_loss"),
    "TD3BC": ("losses.soft_actor_critic.critic_loss",),
    "AWAC": ("losses.soft_actor_critic.critic_loss", "losses.offline.advantage_weight"),
    "EvolutionStrategies": tuple(f"algorithms.evolution.{name}" for name in ("centred_ranks", "z_scores", "antithetic_gradient")),
    "ARS": tuple(f"algorithms.evolution.{name}" for name in ("z_scores", "antithetic_gradient")),
    "BehavioralCloning": tuple(f"losses.offline.{name}" for name in ("cross_entropy", "squared_error", "accuracy", "rank")),
    "DAgger": tuple(f"losses.offline.{name}" for name in ("cross_entropy", "squared_error", "accuracy", "rank")),
}
"""The pure functions that compute the loss of each algorithm and its targets."""
EXAMPLES = {
    "PPO": ("ppo/cartpole", "Acrobot-v1", ""),
    "A2C": ("a2c/cartpole", "Acrobot-v1", ""),
    "IMPALA": ("impala/cartpole", "Acrobot-v1", ""),
    "POCA": ("poca/sacrifice", "lightning_rl.envs.games.sacrifice", " --model.max_env_steps 10000"),
    "TRPO": ("trpo/cartpole", "Acrobot-v1", ""),
    "SAC": ("sac/pendulum", "Pendulum-v1", " --model.max_env_steps 20000"),
    "TQC": ("tqc/pendulum", "Pendulum-v1", " --model.max_env_steps 20000"),
    "CrossQ": ("crossq/pendulum", "Pendulum-v1", " --model.max_env_steps 20000"),
    "DQN": ("dqn/cartpole", "CartPole-v1", " --model.max_env_steps 50000"),
    "TD3": ("td3/pendulum", "Pendulum-v1", " --model.max_env_steps 20000"),
    "PQN": ("pqn/cartpole", "CartPole-v1", ""),
    "EvolutionStrategies": ("es/cartpole", "CartPole-v1", ""),
    "ARS": ("ars/cartpole", "CartPole-v1", ""),
    "IQL": ("iql/pendulum", "Pendulum-v1", " --model.dataset pendulum/expert-v0 --model.max_updates 20000"),
    "CQL": ("cql/pendulum", "Pendulum-v1", " --model.dataset pendulum/expert-v0 --model.max_updates 20000"),
    "TD3BC": ("td3_bc/pendulum", "Pendulum-v1", " --model.dataset pendulum/expert-v0 --model.max_updates 20000"),
    "AWAC": ("awac/pendulum", "Pendulum-v1", " --model.dataset pendulum/expert-v0 --model.max_updates 20000"),
    "BehavioralCloning": ("bc/cartpole", "CartPole-v1", " --model.dataset cartpole/expert-v0"),
    "DAgger": ("dagger/cartpole", "CartPole-v1", " --model.teacher zoo:ppo/cartpole --model.max_env_steps 5000"),
}
"""A packaged config of each algorithm, an environment for a first run, and further options of that command."""


def pages() -> dict[str, str]:
    """Return all pages, by their paths below `docs/`."""
    algorithms = {f"algorithms/{module.rpartition('.')[2]}.md": page(name) for name, module in lightning_rl.ALGORITHMS.items()}
    return algorithms | {"algorithms/common.md": common()}


def page(name: str) -> str:
    """Write the page of an algorithm."""
    cls, module = getattr(lightning_rl, name), import_module(lightning_rl.ALGORITHMS[name])
    file = f"{module.__name__.rpartition('.')[2]}.py"
    text, metrics = sections(cls)
    without = ", ".join(f"`{field.name}`" for field in fields(cls) if not field.init)
    blocks = [
        f"# {name}",
        docstring(module),
        text,
        f"Code: [{file}](../../lightning_rl/algorithms/{file}). `lightning-rl fit --model.help {name}` also shows the types.",
        "## Equations",
        equations(cls),
        "## Can I use it",
        abilities(file),
        "## Example",
        example(name),
        "## Settings",
        f"In addition to those of [every algorithm](common.md){without and f', except {without}'}:",
        table(cls, own_settings(cls)),
        "## Metrics",
        f"In addition to those of [every algorithm](common.md): {metrics}",
        "## Details",
        f"[{file}](../../lightning_rl/algorithms/{file}) has the loop and the losses; these functions do the arithmetic:",
        details(name),
        "## Results",
        "Results of the packaged configs; [the zoo](../zoo.md) compares them with published results:",
        configs(name),
        "## Replicate",
        replicate(name),
    ]
    return "\n\n".join(blocks) + "\n"


def common() -> str:
    """Write the page of settings and metrics that all algorithms share."""
    metrics, settings = sections(lightning_rl.Algorithm)[1], own_settings(lightning_rl.Algorithm)
    head = "Settings and metrics that all algorithms share, except where their own pages differ."
    return "\n\n".join(["# Every algorithm", head, "## Settings", table(lightning_rl.Algorithm, settings), "## Metrics", metrics]) + "\n"


def docstring(thing: Any) -> str:
    """Return the docstring of a module, class or function as Markdown."""
    return escaped(thing.__doc__ or "")


def escaped(text: str) -> str:
    """Return a text as Markdown with URLs as links; escape bars, asterisks and angle brackets outside of code."""
    parts = inspect.cleandoc(text).split("`")
    parts[::2] = [re.sub(r"([*|<_{}])", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"(https://[^\s,)]+)", r"<\1>", "`".join(parts))


def sections(cls: type) -> tuple[str, str]:
    """Return what a class docstring says before its metrics, and the metrics."""
    text, _, metrics = docstring(cls).partition("\nMetrics: ")
    return text.strip(), metrics.strip()


def own_settings(cls: type) -> dict[str, str]:
    """Return the settings that an algorithm defines or changes with respect to `Algorithm`, with the text below each."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[: 1 if cls is lightning_rl.Algorithm else cls.__mro__.index(lightning_rl.Algorithm)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                texts[field.target.id] = escaped(text.value.value)
    return {name: texts[name] for name in settings_of(cls) if name in texts}


def table(cls: type, settings: dict[str, str]) -> str:
    """Write a table of settings, their defaults and meanings."""
    defaults = {name: default_of(cls, each) for name, each in settings_of(cls).items()}
    rows = [
        f"| `{name}` | {default_text(defaults[name])} | {' '.join(text.split())} |" for name, text in settings.items() if name != "spaces"
    ]
    return "\n".join(["| setting | default | |", "|---|---|---|", *rows]).replace("|  |", "| |")


def default_text(value: Any) -> str:
    """Return a default as written in a config; an empty text for required settings and for objects."""
    if value is None or isinstance(value, bool):
        return f"`{ ({None: 'null', True: 'true', False: 'false'}[value]) }`"
    if isinstance(value, int):
        return f"`{value:_}`"
    return f"`{value}`" if isinstance(value, str | float) else ""


def equations(cls: type) -> str:
    """Quote the docstrings of the algorithm's losses."""
    bases = reversed(cls.__mro__[: cls.__mro__.index(lightning_rl.Algorithm)])
    methods = {key: each for base in bases for key, each in vars(base).items() if inspect.isfunction(each)}
    own = {key: each for key, each in methods.items() if re.search(r"[=θπαμ½]", docstring(each))}
    return "\n".join(f"- `{key}`: {in_a_line(each)}" for key, each in own.items())


def details(name: str) -> str:
    """Quote the docstrings of the pure functions that the algorithm's losses call, with links to their files."""
    lines = []
    for path in FORMULAS[name]:
        module, _, function = path.rpartition(".")
        file, found = f"{module.replace('.', '/')}.py", getattr(import_module(f"lightning_rl.{module}"), function)
        lines.append(f"- [{file}](../../lightning_rl/{file}) `{function}`: {in_a_line(found)}")
    return "\n".join(lines)


def example(name: str) -> str:
    """Return a command that trains with default settings."""
    env, more = EXAMPLES[name][1:]
    return f"```bash\nlightning-rl fit --model {name} --model.env.id {env}{more}\n```"


def replicate(name: str) -> str:
    """Return the commands that produced a result, for seed 1; seeds 2 and 3 were run too."""
    config = EXAMPLES[name][0]
    settings = read_config(config)["model"]["init_args"]["env"]
    env_id = settings if isinstance(settings, str) else settings["id"]
    run = f"runs/{name}/{env_id.rpartition(':')[2].replace('/', '_')}/replicated"
    fit = f"lightning-rl fit --config {config} --seed_everything 1 --trainer.run_name replicated"
    return f"```bash\n{fit}\nlightning-rl evaluate --ckpt_path {run} --episodes 100 --seed 50000\n```"


def in_a_line(function: Any) -> str:
    """Return a function's docstring in one line, without arguments and errors."""
    return " ".join(re.split(r"\n(?:Args|Raises):\n", docstring(function))[0].split()).removeprefix("Return ")


def marks() -> dict[str, dict[str, str]]:
    """Read the README's table: for each algorithm's file, its name and its columns."""
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    head = next(row for row in rows if row[:2] == ["algorithm", "code"])
    cells = [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head) and "(lightning_rl/algorithms/" in row[1]]
    return {re.sub(r".*/(\w+\.py).*", r"\1", row["code"]): row for row in cells}


def abilities(file: str) -> str:
    """Return the algorithm's row of the README's table."""
    row = list(marks()[file].items())[3:]
    names = [f"{name}{' actions' * (k < 3)}" for k, (name, _) in enumerate(row)]
    lines = [names, ["---"] * len(row), [mark.replace("✓", "yes") or "no" for _, mark in row]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("](docs/", "](../")


def configs(name: str) -> str:
    """List packaged configs, each with its first line."""
    files = {path: path.read_text("utf-8") for path in sorted((ROOT / "configs").rglob("*.yaml"))}
    places = {path.relative_to(ROOT).as_posix(): text for path, text in files.items() if re.search(rf"class_path: {name}\n", text)}
    lines = [f"- [{place[8:-5]}](../../{place}): {text.splitlines()[0].lstrip('# ')}" for place, text in places.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    (DOCS / "algorithms").mkdir(exist_ok=True)
    for path, text in pages().items():
        (DOCS / path).write_text(text, "utf-8")
