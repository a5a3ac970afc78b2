"""The subcommand `tune`: search for settings, each trial an ordinary run of `fit`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks import callbacks_of
from lightning_rl.callbacks.checkpoints import BestModel, interval_of
from lightning_rl.callbacks.evaluation import RolloutEvaluator
from lightning_rl.callbacks.stopping import end_program
from lightning_rl.checkpoints.atomic import SaveError
from lightning_rl.cli.fit import CheckingCLI, check, command_line, redirect_notices, say, train
from lightning_rl.cli.names import check_option
from lightning_rl.cli.parsers import ENGINES, TuneOptions
from lightning_rl.errors import SettingError, check_choice, check_range, missing_extra
from lightning_rl.settings.fields import settings_of
from lightning_rl.training.run_folder import environment_name
from lightning_rl.training.run_processes import RunPlan
from lightning_rl.tuning.comparison import Objective
from lightning_rl.tuning.local_engine import LocalEngine, MakePlan
from lightning_rl.tuning.population import Evaluation, Population, member_name, mutable_space
from lightning_rl.tuning.report import describe_best, draw_study, write_best, write_trials
from lightning_rl.tuning.search_space import SearchSpace, Value, find_space, read_space, shorten_path
from lightning_rl.tuning.study import Study, StudySettings, take_folder

if TYPE_CHECKING:
    from lightning_rl.tuning.ray_engine import RayEngine


def tune(given: TuneOptions, imports: list[str]) -> int:
    """Search for settings, and print a line for each trial."""
    options, others, arguments = given
    redirect_notices()
    check_engine(options.engine, options.address)
    if options.population is not None:
        return train_population(options, others, imports)
    settings = StudySettings(**{name: getattr(options, name) for name in vars(StudySettings())})
    base = check(others, imports)
    objective = find_objective(base)
    space = read_space(find_space(options.space, type(base.model)))
    check_space(space, others, imports, type(base.model))
    folder = options.out or default_folder(base.model)
    config = {name: base.config_dump[name] for name in ("model", "evaluation", "checkpoint", "trainer", "init_from")}
    root = folder.absolute() if options.engine == "ray" else folder
    make_plan = partial(plan_run, root, runs_in(root, base.model), space, others, imports)
    values = {name: getattr(base.model, name) if value is None else value for name, value in config["model"]["init_args"].items()}
    with take_folder(folder):
        study = Study(folder, space, settings, objective, config, space.find_values(values, base.model.schedules), say)
        describe_study(study, base.model)
        results, engine = Results(study, others, imports), make_engine(options, study, make_plan)
        with study.recording(results.update):
            results.write()  # a previous process may have been killed before it could
            engine.run()
            results.write()  # the last time, if there was no room
        if engine.received is None:
            print_results(study, base.model)
            return 0
    say(f"stopped by {engine.received.name}; continue: {command_line('tune', arguments, imports)}")
    end_program(engine.received)


def describe_study(study: Study, model: Algorithm) -> None:
    """Print which settings vary, where their values come from, how runs are compared, and where the study is."""
    settings, objective, dimensions = study.settings, study.objective, study.space.dimensions
    runs = f"{settings.seeds} runs" if settings.seeds > 1 else "a run"
    drawn = f"drawn by {settings.sampler}"
    if settings.sampler == "tpe":
        missing = [shorten_path(dimension.path) for dimension in dimensions if dimension.path not in study.first_values]
        drawn += f", at first the config's own values{' except for ' * bool(missing)}{', '.join(missing)}"
    say(f"study of {type(model).__name__} on {environment_name(model.env)}")
    say(f"  trials        {settings.trials}, each {runs} of {model.length:,} {model.counted}")
    if settings.confirm:
        new = f"{settings.confirm_seeds} new seed{'s' * (settings.confirm_seeds > 1)}"
        say(f"  at the end    the best {settings.confirm} again, with {new} each")
    say(f"  settings      {', '.join(shorten_path(dimension.path) for dimension in dimensions)} ({study.space.source})")
    say(f"  values        {drawn}")
    best = f"the {objective.mode} of {objective.monitor} in at most {objective.evaluations} evaluations"
    say(f"  compared by   {best}; pruner {settings.pruner}")
    say(f"  folder        {study.folder}")


def train_population(options: Namespace, others: list[str], imports: list[str]) -> int:
    """Train a population, and print a line for each member that continues from another one or ends."""
    check_range("--jobs", options.jobs, 1, whole=True)
    check_range("--seed", options.seed, 0, whole=True)
    base = check(others, imports)
    model, objective = base.model, find_objective(base)
    space = mutable_space(read_space(find_space(options.space, type(model))), is_packaged=options.space is None)
    check_space(space, others, imports, type(model))
    folder = options.out or default_folder(model, "_population")
    runs = runs_in(folder.absolute(), model)
    population = Population(folder, runs, space, options.population, options.seed, objective, say)
    others = [*others, f"--evaluation.every_n_{model.counter}={objective.interval}"]

    def write_best(best: Evaluation) -> None:
        values = population.replay(model.schedules)
        config = check([*others, *space.options(values)], imports).config_dump
        population.write_best({name: config[name] for name in ("seed_everything", "model", "trainer", "evaluation", "checkpoint")})

    population.on_best = write_best
    from lightning_rl.tuning.ray_population import RayPopulation

    engine = RayPopulation(
        population, train, partial(plan_member, folder.absolute(), runs, space, others, imports), options.jobs, options.address
    )
    with take_folder(folder):
        if runs.exists():
            raise SettingError(f"there is a population in {folder}, and it cannot be continued: name another --out, or delete it")
        engine.run()
    if engine.received is not None:
        say(f"stopped by {engine.received.name}; what was found so far is in {folder}, and a population cannot be continued")
        raise KeyboardInterrupt
    print_population(population)
    return 0


def plan_member(
    root: Path, runs: Path, space: SearchSpace, options: list[str], imports: list[str], member: int, values: Mapping[str, Value]
) -> RunPlan:
    """Plan the run of a member, whose seed is its number plus one."""
    return plan_named(root, runs / member_name(member), member + 1, [*options, *space.options(values)], imports)


def print_population(population: Population) -> None:
    """Print the results and their files. Raises `SettingError`: no member was evaluated."""
    best, folder = population.best, population.folder
    if best is None:
        raise SettingError(f"no member has an evaluation; the last failed: {population.errors[-1] if population.errors else 'none'}")
    picture = population.draw_picture()
    say(f"best: member {best.member} at {best.count:,}, {population.objective.monitor} {best.value:.2f}: {folder / 'best.ckpt'}")
    say(f"its settings: {folder / 'schedule.csv'}, all evaluations: {folder / 'population.csv'}, picture: {picture}")
    say(f"train with the same schedule: {join(['lightning-rl', 'fit', '--config', str(folder / 'best.yaml')])}")


def default_folder(model: Algorithm, suffix: str = "") -> Path:
    """Return the default folder of a study."""
    return Path("studies") / f"{type(model).__name__}_{environment_name(model.env)}{suffix}"


def make_engine(options: Namespace, study: Study, make_plan: MakePlan) -> LocalEngine | RayEngine:
    """Return the engine that runs the trials: this machine, or Ray, which is imported only now."""
    if options.engine == "local":
        return LocalEngine(study, train, make_plan)
    from lightning_rl.tuning.ray_engine import RayEngine

    return RayEngine(study, train, make_plan, options.address)


def check_engine(engine: str, address: str | None) -> None:
    """Raise `SettingError` for an engine that does not exist or is not installed."""
    check_choice("--engine", engine, ENGINES)
    if engine == "local" and address is not None:
        raise SettingError("--address is the address of a Ray cluster: add --engine ray")
    for package in ("ray", "pyarrow", "tensorboardX") if engine == "ray" else ():  # what `ray.tune` imports
        if find_spec(package) is None:
            raise missing_extra(package, "ray", "--engine ray")


def find_objective(base: CheckingCLI) -> Objective:
    """Return the objective that compares runs. Raises `SettingError`: they are not evaluated or saved, or need several processes."""
    trainer = base.trainer
    evaluators, savers = callbacks_of(trainer, RolloutEvaluator), callbacks_of(trainer, BestModel)
    if not evaluators:
        raise SettingError("tune compares runs by their evaluations: leave out evaluation null")
    if not savers:
        raise SettingError("tune continues trials from their checkpoints: leave out checkpoint null, enable_checkpointing and fast_dev_run")
    if trainer.world_size > 1:
        raise SettingError(
            "tune trains each run in one process: leave out trainer.devices and strategy; --jobs runs several trials at a time"
        )
    interval = interval_of("evaluation", evaluators[0], base.model, 20)
    return Objective(savers[0].monitor, savers[0].mode, interval, base.model.length)


def check_space(space: SearchSpace, options: list[str], imports: list[str], algorithm: type) -> None:
    """Raise `SettingError` for a setting that does not exist, and for values that it does not permit.

    The first values of all settings are tried together, then the second ones, and so on. A value is wrong only if it is also rejected
    alone; a combination that is wrong fails in its trial.
    """
    try:
        for dimension in space.dimensions:
            check_option(f"--{dimension.path}", algorithm.__name__, [name for name in settings_of(algorithm) if name != "spaces"])
        samples = [(dimension, dimension.samples()) for dimension in space.dimensions]
        for number in range(max(len(values) for _, values in samples)):
            chosen = [sample.option(values[number % len(values)]) for sample, values in samples]
            try:
                check([*options, *chosen], imports)
            except SettingError:
                for option in chosen:
                    check([*options, option], imports)
    except SettingError as error:
        raise SettingError(f"{space.source}: {error}") from error


def plan_run(
    root: Path, runs: Path, space: SearchSpace, options: list[str], imports: list[str], number: int, values: Mapping[str, Value], seed: int
) -> RunPlan:
    """Plan a run of a trial."""
    return plan_named(root, runs / f"trial_{number}_seed_{seed + 1}", seed + 1, [*options, *space.options(values)], imports)


def plan_named(root: Path, folder: Path, seed: int, options: list[str], imports: list[str]) -> RunPlan:
    """Plan the run in a folder."""
    quiet = "--trainer.enable_progress_bar=false"
    return RunPlan((*options, quiet), root, folder, seed, tuple(imports), root / "logs" / f"{folder.name}.txt")


def runs_in(root: Path, model: Algorithm) -> Path:
    """Return the folder of the runs of an algorithm and environment."""
    return root / type(model).__name__ / environment_name(model.env)


class Results:
    """Write the results of a study so far: the table of its trials, and the config of the best one if it has changed."""

    def __init__(self, study: Study, options: list[str], imports: list[str]) -> None:
        self.study, self.options, self.imports = study, options, imports
        self.written = ""

    def update(self) -> None:
        """Write the files after a trial; if that is not possible, print a line, because the study's own file has all results."""
        try:
            self.write()
        except SaveError as error:
            say(f"{error}; the study continues")

    def write(self) -> None:
        """Write the files; raise `SaveError` if that is not possible."""
        write_trials(self.study)
        best = self.study.best
        if best is not None and self.written != (line := describe_best(self.study, best)):
            config = check([*self.options, *self.study.space.options(best.params)], self.imports).config_dump
            sections = {name: config[name] for name in ("seed_everything", "model", "trainer", "evaluation", "checkpoint")}
            write_best(self.study.folder, line, sections)
            self.written = line


def print_results(study: Study, model: Algorithm) -> None:
    """Print the results and their files. Raises `SettingError`: no trial could be completed."""
    best = study.best
    if best is None:
        errors = [trial.user_attrs["error"] for trial in study.trials if "error" in trial.user_attrs]
        raise SettingError(f"none of {len(study.trials)} trials is complete" + (f"; the last failed: {errors[-1]}" if errors else ""))
    picture, remark = draw_study(study)
    say(f"best: {describe_best(study, best)}")
    if remark:
        say(remark)
    say(f"trials: {study.folder / 'trials.csv'}, picture: {picture}")
    say(f"train with the best settings: {join(['lightning-rl', 'fit', '--config', str(study.folder / 'best.yaml')])}")
    length = f"{model.length:,} {model.counted}, as each trial did, in whole iterations"
    say(f"that run learns for {length}; --model.max_{model.counter} N changes that")
