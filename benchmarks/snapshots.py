"""Which ways of saving restore an environment exactly in the middle of an episode, and how long replaying its longest episode takes.

    python benchmarks/snapshots.py [ID …] [--import MODULE]

Without ids, the environments of all packaged configs. Prints a row for each: the ways of `envs/snapshot/state.py` that are exact, the
seconds of a step with random legal actions, the steps of the longest episode (its limit, or else the longest of 20 random ones), and the
seconds to replay such an episode in all of the config's copies one after another. Runs whose copies step in workers replay in parallel.
"""

from __future__ import annotations

import argparse
import importlib
import time
import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path

import lightning_rl as lrl
from lightning_rl.envs.agents.copies import AgentsEnv
from lightning_rl.envs.make import make_env
from lightning_rl.envs.masks import legal_action
from lightning_rl.envs.snapshot.state import WAYS, is_exact, run_apart
from lightning_rl.settings.yaml_files import read_config

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
MEASURED_STEPS = 2_000
MAX_STEPS = 50_000
"""Steps after which the search for long episodes ends."""


def find_envs() -> dict[str, lrl.EnvConfig]:
    """Return the environments of all packaged configs by name; the one with most copies if several configs have the same."""
    envs: dict[str, lrl.EnvConfig] = {}
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        model = read_config(str(path)).get("model", {})
        settings = model.get("init_args", model).get("env") if isinstance(model, dict) else None
        if settings is None:
            continue
        config = lrl.EnvConfig(**(settings if isinstance(settings, dict) else {"id": settings}))
        key = f"{config.name}{' atari' if config.atari else ''}{f' {config.kwargs}' if config.kwargs else ''}"
        if key not in envs or envs[key].num_envs < config.num_envs:
            envs[key] = config
    return envs


def time_episodes(config: lrl.EnvConfig, deadline: float) -> tuple[float, int]:
    """Return the seconds of a step, and the steps of the longest episode."""
    env = make_env(config)
    space = deepcopy(env.action_space)
    space.seed(0)
    seen = env.reset(seed=0)
    limit = config.max_episode_steps or getattr(env.spec, "max_episode_steps", None)
    length = longest = steps = episodes = 0
    spent = 0.0
    while (steps < MEASURED_STEPS or (limit is None and episodes < 20 and steps < MAX_STEPS)) and time.monotonic() < deadline:
        action = (
            env.unwrapped.random_actions(steps) if isinstance(env.unwrapped, AgentsEnv) else legal_action(env, space, space.sample, *seen)
        )
        began = time.perf_counter()
        obs, _, terminated, truncated, info = env.step(action)
        spent += time.perf_counter() - began
        seen, steps, length = (obs, info), steps + 1, length + 1
        if terminated or truncated:
            longest, episodes, length = max(longest, length), episodes + 1, 0
            seen = env.reset()
    env.close()
    return spent / steps, limit or max(longest, length)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--import", dest="modules", action="append", default=[])
    arguments = parser.parse_args()
    for module in arguments.modules:
        importlib.import_module(module)
    warnings.simplefilter("ignore")
    envs = {name: lrl.EnvConfig(name) for name in arguments.ids} or find_envs()
    print("| environment | exact ways | step [µs] | longest episode | copies | seconds to replay |\n|---|---|---|---|---|---|")
    for name, config in envs.items():
        build = partial(make_env, config)
        exact = [way for way in WAYS if run_apart(lambda deadline, way=way, build=build: is_exact(build, way, deadline))]
        measured = run_apart(lambda deadline, config=config: time_episodes(config, deadline))
        if measured is None:
            print(f"| {name} | {', '.join(exact) or 'none'} | too slow | | {config.num_envs} | |", flush=True)
            continue
        seconds, longest = measured
        replay = seconds * longest * config.num_envs
        row = f"{1e6 * seconds:.0f} | {longest:,} | {config.num_envs} | {replay:.2f}"
        print(f"| {name} | {', '.join(exact) or 'none'} | {row} |", flush=True)


if __name__ == "__main__":
    main()
