"""Valid configs with one thing changed, the same for the same seed."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_rl.processes.startup import config_folder
from lightning_rl.settings.yaml_files import Loader

RICH = """
seed_everything: 3
model:
  class_path: PPO
  init_args:
    env: {id: CartPole-v1, num_envs: 4, vectorization: sync, wrappers: [{class_path: ClipReward, init_args: {min_reward: 0}}]}
    max_env_steps: 1024
    n_steps: 64
    batch_size: 64
    net_arch: [32, 32]
    learning_rate: {schedule: piecewise, points: [[0, 1e-3], [1, 0]]}
    normalize_obs: running
    on_nan: skip_update
trainer:
  accelerator: cpu
  devices: 1
  max_time: 00:01:00:00
  logger: {class_path: pytorch_lightning.loggers.CSVLogger, init_args: {save_dir: runs, name: other}}
  callbacks: [{class_path: LearningRateMonitor, init_args: {logging_interval: step}}]
evaluation: {episodes: 2, every_n_env_steps: 512, stop_at: 400}
checkpoint: {keep: 2}
"""
REPLAYING = """
model:
  class_path: SAC
  init_args:
    env: Pendulum-v1
    ent_coef: auto_0.1
    target_entropy: {continuous: -1}
    replay: {prioritized: true, alpha: 0.5, beta: 0.4, optimize_memory_usage: true}
    buffer_size: 1e4
    net_arch: [16]
    warmup: policy
"""
JUNK: list[Any] = [
    "junk",
    "",
    [1],
    [],
    {},
    {"a": 1},
    True,
    1.5,
    -1,
    0,
    None,
    [[1, [2]]],
    {"a": {"b": [None, {"c": "d"}]}},
    "3e",
    "é\n☃",
    "!x",
    10**30,
]
NUMBERS: list[Any] = [-1, 0, -0.5, 1.5, 2**70, 1e300, -1e300, float("nan"), float("inf"), float("-inf"), 1e-300]
KINDS = ("misspell", "junk", "number", "delete", "swap", "list", "class", "null", "move", "text", "bytes", "double")


class Mutant(NamedTuple):
    """A config file, what was done to it, the key it was done to, and the configs that come before it."""

    text: bytes
    kind: str
    key: str
    before: tuple[str, ...]


def bases() -> list[tuple[Any, tuple[str, ...]]]:
    """All packaged configs, those without a model behind one that has one, and two that use every section."""
    folder = config_folder()
    read = {
        path.relative_to(folder).with_suffix("").as_posix(): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.yaml"))
    }
    configs = {name: yaml.load(text, Loader) for name, text in read.items()}
    found = [(config, () if "model" in config else ("ppo/cartpole",)) for config in configs.values()]
    return found + 4 * [(yaml.load(RICH, Loader), ())] + 2 * [(yaml.load(REPLAYING, Loader), ())]


def mutant(seed: int) -> Mutant:
    """The mutation of a seed."""
    rng = random.Random(seed)
    config, before = rng.choice(bases())
    config = copy.deepcopy(config)
    kind = KINDS[seed % len(KINDS)]
    parent, key = rng.choice(list(places(config)))
    text, name = None, str(key)
    if kind == "misspell":
        parent, key = rng.choice([(parent, key) for parent, key in places(config) if isinstance(key, str)])
        name = str(key)
        renamed = [(misspelt(rng, name) if each == key else each, value) for each, value in parent.items()]
        parent.clear()
        parent.update(renamed)
    elif kind == "junk":
        parent[key] = rng.choice(JUNK)
    elif kind == "number":
        numbers = [
            (where, each) for where, each in places(config) if isinstance(where[each], int | float) and not isinstance(where[each], bool)
        ]
        parent, key = rng.choice(numbers or [(parent, key)])
        parent[key] = rng.choice(NUMBERS)
    elif kind == "delete":
        del parent[key]
    elif kind == "swap":
        other, other_key = rng.choice(list(places(config)))
        parent[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(parent[key])
    elif kind == "list":
        parent[key] = [parent[key]] * rng.choice([1, 2])
    elif kind == "class":
        parent[key] = {"class_path": rng.choice(["no.such.Class", "Nothing", "os.system", "lightning_rl.SAC", "torch.nn.Linear", 3, ""])}
    elif kind == "null":
        parent[key] = None
    elif kind == "move":
        config.setdefault(rng.choice(["trainer", "evaluation", "checkpoint", "model", "modl"]), {})
        target = config[rng.choice(list(config))]
        (target if isinstance(target, dict) else config)[key] = parent[key]
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).encode()
    if kind == "text":
        at = rng.randrange(len(text))
        text = rng.choice(
            [
                text[:at],
                text[:at] + rng.choice([b"\t", b": ", b"[", b"}", b"'", b"- ", b"&a ", b"*a", b"\n", b"%", b"@", b"!!"]) + text[at:],
            ]
        )
    elif kind == "bytes":
        at = rng.randrange(len(text))
        text = (
            text[:at] + rng.choice([b"\xff", b"\x00", b"\xc3\x28", b"\xef\xbb\xbf", b"\x1b[31m", b"\x80"]) + text[at + rng.choice([0, 1]) :]
        )
    elif kind == "double":
        lines = text.splitlines(keepends=True)
        line = rng.choice(lines)
        lines.insert(rng.randrange(len(lines) + 1), line)
        text = b"".join(lines)
    return Mutant(text, kind, name, before)


def places(config: Any) -> Any:
    """All `(parent, key)` of a tree of mappings and lists."""
    for key, value in list(config.items() if isinstance(config, dict) else enumerate(config)):
        yield config, key
        if isinstance(value, dict | list):
            yield from places(value)


def misspelt(rng: random.Random, word: str) -> str:
    """A letter left out, doubled, or changed places with the next."""
    at = rng.randrange(1, max(2, len(word) - 1))
    ways = [word[:at] + word[at + 1 :], word[:at] + word[at] + word[at:], word[: at - 1] + word[at] + word[at - 1] + word[at + 1 :]]
    return rng.choice([way for way in ways if way != word])


def write(mutation: Mutant, folder: Path) -> str:
    """Write it down; the arguments that build everything, in this process alone, and learn nothing."""
    (folder / "c.yaml").write_bytes(mutation.text)
    before = " ".join(f"--config {name}" for name in mutation.before)
    return f"fit {before} --config c.yaml --trainer.max_steps 0 --trainer.devices 1 --trainer.enable_progress_bar false"
