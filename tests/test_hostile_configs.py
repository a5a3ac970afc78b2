"""Configs that somebody wrote to break the program, or that broke on their way, end in one line that names what is wrong with them."""

from __future__ import annotations

import time

import pytest

from lightning_rl.settings.yaml_files import parse
from tests.command_line import run

GOOD = """
model:
  class_path: PPO
  init_args:
    env: {id: CartPole-v1, num_envs: 2, vectorization: sync}
    n_steps: 16
    batch_size: 16
    net_arch: [8]
"""
NINES = "9" * 5000


def with_setting(setting: str) -> str:
    return f"{GOOD}    {setting}\n"


def multiplied(levels: int, line: str) -> str:
    """Lines that each name the one before ten times."""
    lines = [line.format(name=i, before=", ".join([f"*a{i - 1}"] * 10)) for i in range(1, levels)]
    return "\n".join(["a0: &a0 {x: 1}", *lines, GOOD])


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


SYNTAX = {
    "brackets": (f"model: {deep(3000)}", "line 1: more than 100 nested brackets"),
    "braces": (f"model: {deep(3000, '{a: ', '}')}", "line 1: more than 100 nested brackets"),
    "dashes": (f"model:\n  {'- ' * 3000}1", "line 2: more than 100 nested brackets"),
    "brackets in a setting": (with_setting(f"learning_rate: {{schedule: linear, start: {deep(500)}}}"), "more than 100 nested brackets"),
    "merged keys": (multiplied(9, "a{name}: &a{name} {{<<: [{before}]}}"), "<< merges more than 10,", " keys"),
    "merged by itself": (f"a: &a {{<<: *a}}\n{GOOD}", "a in c.yaml is not a setting"),
    "shared lists": (multiplied(9, "a{name}: &a{name} [{before}]"), " values through its aliases"),
    "digits": (with_setting(f"gamma: {NINES}"), "line 9: '999999999999999999999999999999' is not a valid int"),
    "digits of a key": (f"{GOOD}? {NINES}\n: 3", "line 9: '999999999999999999999999999999' is not a valid int"),
    "digits by sixteen": (with_setting(f"gamma: 0x{'f' * 5000}"), "'0xffffffffffffffffffffffffffff' is too large for a number"),
    "digits by sixty": (with_setting(f"gamma: 1{':59' * 3000}"), "'1:59:59:59:59:59:59:59:59:59:5' is too large for a number"),
    "digits of a length": (
        with_setting(f"max_env_steps: {'9' * 400}"),
        "line 9: '999999999999999999999999999999' is too large for a number",
    ),
    "a date": (with_setting("gamma: 2001-99-99"), "line 9: '2001-99-99' is not a valid timestamp: month must be in 1..12"),
    "no int": (with_setting("gamma: !!int abc"), "line 9: 'abc' is not a valid int"),
    "no float": (with_setting("gamma: !!float abc"), "line 9: 'abc' is not a valid float"),
    "no bool": (with_setting("gamma: !!bool abc"), "line 9: 'abc' is not a valid bool"),
    "no number": (with_setting("gamma: !number [1]"), "line 9"),
    "a list as a key": (f"{GOOD}<<: {{[a]: 3}}", "this is not a valid map: unhashable type: 'list'"),
    "a tag of objects": (with_setting("gamma: !!python/object/apply:os.system [ls]"), "line 9: could not determine a constructor"),
    "a zero byte": (f"{GOOD}\0", "special characters are not allowed"),
    "two bytes a letter": (GOOD.encode("utf-16"), "not a text file in UTF-8"),
}
PLACES = {
    "a run's name": (f"{GOOD}trainer: {{run_name: {'a' * 300}}}", "trainer.run_name 'aaaaaaaaaa", "is too long for a path"),
    "a run's name with a zero": (
        f'{GOOD}trainer: {{run_name: "a\\0b"}}',
        r"trainer.run_name 'a\x00b' is not a valid path: it contains a NUL",
    ),
    "a run's name with half a letter": (
        f'{GOOD}trainer: {{run_name: "a\\uD800b"}}',
        r"line 9: 'a\ud800b' is not a valid str: 'utf-8' codec",
    ),
    "a folder": (f"{GOOD}trainer: {{default_root_dir: {'a/' * 3000}}}", "trainer.default_root_dir 'a/a/a/", "is too long for a path"),
    "a folder with a zero": (f'{GOOD}trainer: {{default_root_dir: "a\\0b"}}', r"trainer.default_root_dir 'a\x00b' is not a valid path"),
    "another run": (f"{GOOD}init_from: {'a' * 5000}", "init_from 'aaaaaaaa", "is too long for a path"),
    "a checkpoint": (f"{GOOD}ckpt_path: {'a' * 5000}", "ckpt_path 'aaaaaaaa", "is too long for a path"),
    "a checkpoint with a zero": (f'{GOOD}ckpt_path: "a\\0b"', r"ckpt_path 'a\x00b' is not a valid path"),
    "a module of dots": (GOOD.replace("PPO", "...PPO"), "model '...PPO': TypeError"),
    "a module of modules": (GOOD.replace("PPO", "a." * 5000 + "PPO"), "model 'a.a.a."),
    "an environment of dots": (GOOD.replace("CartPole-v1", "..a:Cart-v0"), "environment"),
}
SIZES = {
    "environments": (GOOD.replace("num_envs: 2", "num_envs: 1e9"), "env.num_envs 1000000000 is more than one process can step"),
    "steps": (GOOD.replace("n_steps: 16", "n_steps: 1e15"), "n_steps * num_envs = 1000000000000000 * 2 rows", "lower n_steps"),
    "minibatches": (GOOD.replace("n_steps: 16", "n_steps: 15485863"), "batch_size 16 does not divide", "use 1 or 2"),
}


@pytest.mark.thorough
def test_a_config_may_have_any_number_of_values_that_are_written_out():
    settings = ", ".join(f"x{i}: 1" for i in range(6_000))
    text = f"a: &a {{{settings}}}\nb: *a\nc: {{<<: *a}}\nd: [{'8,' * 12_000}]"
    config = parse(text, "c.yaml")
    assert config["a"] == config["b"] == config["c"] and len(config["c"]) == 6_000 and config["d"] == [8] * 12_000


@pytest.mark.parametrize("text, words", [pytest.param(row[0], row[1:], id=name) for name, row in {**SYNTAX, **PLACES, **SIZES}.items()])
def test_a_hostile_config_ends_in_one_line_at_once(text, words, folder, capfd):
    (folder / "c.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.monotonic()
    status, _, err = run("fit --config c.yaml --trainer.max_steps 0 --trainer.accelerator cpu --trainer.devices 1", capfd)
    line = err.removesuffix("\n")
    assert status == 2 and line.startswith("error: ") and line.isprintable() and len(line) <= 200, err[-2000:]
    assert all(word in line for word in words), line
    assert time.monotonic() - began < 20 and [path.name for path in folder.iterdir()] == ["c.yaml"]
