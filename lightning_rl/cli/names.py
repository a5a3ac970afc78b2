"""Read and check the options of `fit`, without loading torch."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from lightning_rl import errors
from lightning_rl.errors import SettingError
from lightning_rl.processes.startup import config_folder
from lightning_rl.settings.names import (
    MODELS,
    PARTS,
    SECTIONS,
    owners_of,
    settings_of_model,
    settings_of_section,
    way_out,
    way_out_of_algorithm,
)
from lightning_rl.settings.yaml_files import Plain, as_mapping, parse, read_config, spell_out

TOP_LEVEL = ("seed_everything", "trainer", "model", *SECTIONS, "ckpt_path", "weights_only", "init_from", "force")
OPTIONS = (*TOP_LEVEL, "config", "seeds", "jobs", "print_config", "plot", "help", "help_all")
CLASSES = ("callbacks", "logger", "strategy", "plugins", "profiler", "accelerator")
"""Trainer flags that may be objects, given by their class."""
WHICH_MEMORY = "name it first, --model.memory LSTM or GRU, or memory: {class_path: LSTM, init_args: {…}} in a config"
SEE_HELP = "; see lightning-rl fit --help"


class Option(NamedTuple):
    """An option of the command line.  config: the part of a config that it stands for, if any."""

    name: str
    value: str
    config: Plain | None


def read_options(arguments: list[str]) -> list[Option]:
    """Read the options of `fit` and its configs, and check all names except the settings of a user's own algorithm."""
    options = [Option(name, value, config_of(name, value)) for name, value in split_options(arguments)]
    named = [model["class_path"] for model in models_in(options) if "class_path" in model]
    model = str(named[-1]).removeprefix("lightning_rl.") if named else ""
    if model in MODELS and not any(option.name == "--model.help" for option in options):
        check_settings(options, model, settings_of_model(model))
    return options


def models_in(options: Iterable[Option]) -> list[Plain]:
    """Return the sections `model` of all configs."""
    return [option.config["model"] for option in options if option.config and option.config.get("model")]


def split_options(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value."""
    remaining = list(arguments)
    while remaining:
        option, equals, value = remaining.pop(0).partition("=")
        option = "--config" if option == "-c" else option
        if not option.removeprefix("--") or not option.startswith("--"):
            raise SettingError(f"{option!r} is not an option; {instead_of(option, remaining)}")
        check_names("--", [option.removeprefix("--").partition(".")[0]], OPTIONS)
        if not equals and remaining and not remaining[0].startswith("--"):
            value = remaining.pop(0)
        if option in ("--force", "--plot"):
            option, value = "--force" if option == "--force" else "--trainer.plot", value or "true"
        if not value and option not in ("--print_config", "--help_all") and not option.endswith(".help"):
            raise SettingError(f"{option} needs a value")
        yield option.replace(".init_args.", "."), "null" if value == "None" else value  # as sweeps write it


class SeedOptions(NamedTuple):
    """seeds: the seeds of the runs, or the number of runs.  jobs: how many are trained at a time; None: one per processor core."""

    seeds: int | list[int]
    jobs: int | None


def take_seeds(options: list[Option]) -> SeedOptions | None:
    """Remove `--seeds` and `--jobs` from the options and return them; None for a single run, or if only settings or help are printed."""
    given: Plain = {option.name: parse(option.value, option.name) for option in options if option.name in ("--seeds", "--jobs")}
    options[:] = [option for option in options if option.name not in given]
    names = [option.name for option in options]
    if "--jobs" in given and "--seeds" not in given:
        raise SettingError("--jobs sets how many runs are trained at a time: add --seeds")
    if "--seeds" not in given:
        return None
    seeds, jobs = given["--seeds"], given.get("--jobs")
    if isinstance(seeds, list) and seeds:
        for seed in seeds:
            errors.check_seed("--seeds", seed)
        if len(set(seeds)) < len(seeds):
            raise SettingError(f"--seeds has {next(seed for seed in seeds if seeds.count(seed) > 1)} twice")
        if "--seed_everything" in names:
            raise SettingError(f"--seeds {seeds} names all seeds: leave out --seed_everything")
    elif isinstance(seeds, int) and not isinstance(seeds, bool):
        errors.check_range("--seeds", seeds, 1, whole=True)
    else:
        raise SettingError(f"--seeds must be a number of runs, such as 4, or a list of seeds, such as [3,7,11], got {seeds!r}")
    if "--jobs" in given:
        errors.check_range("--jobs", jobs, 1, whole=True)
    shows = any(name in ("--print_config", "--help_all") or name.endswith(".help") for name in names)
    return None if shows else SeedOptions(seeds, jobs)


def instead_of(word: str, following: list[str]) -> str:
    """Suggest what to write instead of a word that is not an option, such as the name of an algorithm or a config."""
    named = next((model for model in MODELS if model.lower() == word.lower()), None)
    if named is not None:
        env_id = next((argument for argument in following[:1] if not argument.startswith("-")), "CartPole-v1")
        return f"write --model {named} --model.env.id {env_id}"
    if (config_folder() / f"{word}.yaml").is_file() or word.endswith((".yaml", ".yml")):
        return f"write --config {word}"
    return "write a list in brackets, such as [3,7,11]" if word.isdecimal() else "options start with -- and a name"


def config_of(option: str, value: str) -> Plain | None:
    """Return the config that an option stands for: a file, or a part of one such as `--model PPO`, `--model.env CartPole-v1`."""
    name, part, where = option.removeprefix("--"), option.removeprefix("--model."), ""
    if option == "--config":
        config, where = read_config(value), f" in {value}"
    elif part in (*PARTS, "memory", "reward_signals"):
        config = spell_out({"model": {"init_args": {part: parse(value, option)}}})
    elif option == "--model.class_path":
        config = spell_out({"model": value})
    elif name in ("model", "trainer", *SECTIONS):
        config = spell_out({name: parse(value, option)})
    else:
        return None
    check_keys(config, where)
    return config


# ---------------------------------------------------------------- checks


def check_settings(options: Iterable[Option], algorithm: str, names: list[str]) -> None:
    """Raise `SettingError` for a setting that an algorithm does not have, given as an option or in a config."""
    for option in options:
        if option.config is not None:
            settings = (option.config.get("model") or {}).get("init_args") or {}
            check_model(algorithm, "model.", settings, names, f" in {option.value}" if option.name == "--config" else "")
        else:
            check_option(option.name.removesuffix(".help"), algorithm, names)


def check_option(option: str, algorithm: str, names: list[str]) -> None:
    """Raise `SettingError` for an option of a section that does not exist; `names` are the settings of the algorithm."""
    section, key, inner = (*option.removeprefix("--").replace("+", "").split(".", 2), "", "")[:3]
    if section == "model" and key:
        check_model(algorithm, "--model.", [key], names)
        if key == "env" and inner.startswith("wrappers."):
            form = "--model.env.wrappers '[{class_path: RepeatAction, init_args: {num_repeats: 2}}]'"
            raise SettingError(f"{option}: arguments of a wrapper go into the list, such as {form}")
        if key in PARTS and inner:
            check_names(f"--model.{key}.", [inner.partition(".")[0]], settings_of_section(key))
    elif section in ("trainer", *SECTIONS):
        check_names(f"--{section}.", [key], settings_of_section(section))


def check_model(algorithm: str, prefix: str, given: Iterable[object], names: list[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is not a setting of an algorithm; the message names algorithms that have it."""
    for key in given:
        if key not in names:
            raise SettingError(f"{prefix}{key}{where} is not a setting of {algorithm}{way_out_of_algorithm(str(key), names) or SEE_HELP}")


def check_keys(config: Plain, where: str) -> None:
    """Raise `SettingError` for a key that does not exist, except settings of an algorithm, which is not known yet."""
    for key, value in config.items():
        if key not in TOP_LEVEL and isinstance(value, Mapping) and ("n_timesteps" in value or "policy" in value):
            file = where.removeprefix(" in ") or "FILE"
            raise SettingError(f"{key}{where} is of rl-baselines3-zoo; convert it: lightning-rl import-zoo {file} {key} > mine.yaml")
    if "behaviors" in config or "default_settings" in config:
        file = where.removeprefix(" in ") or "FILE"
        raise SettingError(
            f"behaviors{where} are of ML-Agents; convert them: lightning-rl import-mlagents {file} --env unity:BUILD > mine.yaml"
        )
    check_names("", config, TOP_LEVEL, where)
    if "trainer" in config and config["trainer"] is None:
        raise SettingError(f"trainer{where} must be a mapping of settings, got nothing")
    for section in ("trainer", *SECTIONS):
        check_names(f"{section}.", as_mapping(section, config.get(section), where), settings_of_section(section), where)
    for name in CLASSES:
        value = (config.get("trainer") or {}).get(name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mapping):
                errors.check_names(f"trainer.{name}.", part, ("class_path", "init_args", "dict_kwargs"), where=where)
    model = as_mapping("model", config.get("model"), where)
    for key in model:
        if key not in ("class_path", "init_args") and owners_of(str(key)):
            raise SettingError(f"model.{key}{where} is not a setting; here it is model.init_args.{key}")
    errors.check_names("model.", model, ("class_path", "init_args"), where=where)
    settings = as_mapping("model.init_args", model.get("init_args"), where)
    if "env" in settings and settings["env"] is None:
        raise SettingError(f"model.env{where} must be an id such as CartPole-v1 or a mapping, got nothing")
    memory = settings.get("memory")
    if isinstance(memory, Mapping) and "class_path" in memory:
        errors.check_names("model.memory.", memory, ("class_path", "init_args"), where=where)
        as_mapping("model.memory.init_args", memory.get("init_args"), where)
    elif memory is not None and not isinstance(memory, str):
        raise SettingError(f"model.memory{where} does not name its kind: {WHICH_MEMORY}")
    for part in PARTS:
        if part in settings and settings[part] is None and part != "behavioral_cloning":
            raise SettingError(f"model.{part}{where} must be a mapping of settings, got nothing")
        check_names(f"model.{part}.", as_mapping(f"model.{part}", settings.get(part), where), settings_of_section(part), where)


def check_names(prefix: str, given: Iterable[object], names: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is not among the names."""
    names = list(names)
    for key in given:
        if key not in names:
            raise SettingError(f"{prefix}{key}{where} is not a setting{way_out(str(key), names) or SEE_HELP}")
