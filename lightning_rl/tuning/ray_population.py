"""Train a population on a Ray cluster, with Ray Tune's `PopulationBasedTraining`. Needs the extra `ray`; imported only if it is used."""

from __future__ import annotations

import logging
import math
import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from optuna.distributions import CategoricalDistribution, IntDistribution
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.stopper import Stopper

from lightning_rl.actors.ray_workers import join_cluster
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.training.run_processes import Message, RunPlan, RunProcess, Train
from lightning_rl.tuning.population import Population, member_name, restore_run, save_run
from lightning_rl.tuning.ray_engine import MAX_LOST_MACHINES, QUIET
from lightning_rl.tuning.search_space import Distribution, Value

if TYPE_CHECKING:
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.experiment import Trial
    from ray.tune.search.sample import Domain

PlanMember = Callable[[int, Mapping[str, Value]], RunPlan]
"""Plans the run of a member from its number and values."""
KEPT = 4
"""Copies of a member's run that Ray Tune keeps: it makes at most two in each round, and the others need those of the last round."""
SHARE = 0.25
"""Share of members that are replaced after an evaluation, and of those from which they continue (Jaderberg et al. use 0.2)."""


class MemberTrainable(tune.Trainable):
    """Train a member in separate processes: a step lasts until the next evaluation, after which the run is saved and stopped."""

    def setup(  # type: ignore[override]  # Ray Tune passes what `with_parameters` adds
        self, config: Plain, train: Train, plan_member: PlanMember, runs: Path, where: str
    ) -> None:
        """Take a member; `runs` is the folder of all runs, and `where` the working directory, to which paths are relative."""
        os.chdir(where)
        self.train_run, self.plan_member, self.runs = train, plan_member, runs
        self.reset_config(config)

    def reset_config(self, new_config: Plain) -> bool:
        """Take another member in the same actor: starting an actor takes longer than a short run."""
        self.member, self.values = new_config["member"], new_config["values"]
        return True

    def step(self) -> Plain:
        """Train until the next evaluation; return the evaluation, and how the process ended."""
        process = RunProcess(self.train_run, self.plan_member(self.member, self.values))
        evaluation, message = Message("stopped"), Message("begins")
        try:
            while message.kind in ("begins", "evaluation"):
                message = process.pipe.recv()
                if message.kind == "evaluation":
                    evaluation = message
                if message.kind in ("begins", "evaluation"):
                    process.pipe.send("stop" if message.kind == "evaluation" and not message.final else "go")
        except (EOFError, OSError):
            message = Message("failed", text=process.exit_reason())
        finally:
            process.kill()
        done = message.kind != "stopped" or evaluation.kind != "evaluation"
        return {**vars(evaluation), "end": message.kind, "text": message.text, "member": self.member, "done": done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Copy the files of the run as its process left them."""
        save_run(self.runs / member_name(self.member), Path(checkpoint_dir))

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Continue from a copy, which may belong to another member."""
        restore_run(Path(checkpoint), self.runs / member_name(self.member))


class Scheduler(PopulationBasedTraining):
    """Ray Tune's scheduler for a `Population`, which it notifies of members that continue from others.

    All members wait for each other after each evaluation, so that they are compared at the same count, however many run at a time.
    """

    def __init__(self, population: Population) -> None:
        super().__init__(
            time_attr="training_iteration",
            perturbation_interval=1,
            metric="value",
            mode=population.objective.mode,
            hyperparam_mutations={
                "values": {dimension.path: mutation(dimension.distribution) for dimension in population.space.dimensions}
            },
            quantile_fraction=SHARE,
            log_config=False,
            synch=True,
        )
        self.population = population

    def _get_new_config(self, trial: Trial, trial_to_clone: Trial) -> tuple[Plain, Plain]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        member = trial.config["member"]
        return {"member": member, "values": self.population.replace(member, trial_to_clone.config["member"], config["values"])}, operations

    def on_trial_result(self, tune_controller: TuneController, trial: Trial, result: Plain) -> str:
        """Compare a member with the others; one whose evaluation is NaN counts as the worst, because Ray Tune would never replace it."""
        if not math.isfinite(result["value"]):
            result = result | {"value": -math.inf if self.population.objective.mode == "max" else math.inf}
        return super().on_trial_result(tune_controller, trial, result)

    def on_trial_complete(self, tune_controller: TuneController, trial: Trial, result: Plain) -> None:
        """Let the others continue if they were waiting for a member that has ended."""
        super().on_trial_complete(tune_controller, trial, result)
        self._go_on(tune_controller, trial)

    def on_trial_error(self, tune_controller: TuneController, trial: Trial) -> None:
        """Let the others continue if they were waiting for a member that Ray could not train."""
        super().on_trial_error(tune_controller, trial)
        self._go_on(tune_controller, trial)

    def _go_on(self, tune_controller: TuneController, ended: Trial) -> None:
        others = [trial for trial in tune_controller.get_live_trials() if trial is not ended]
        times = [self._trial_state[other].last_train_time for other in others]
        if times and min(times) >= self._next_perturbation_sync:
            self._next_perturbation_sync += self._perturbation_interval


class RecordMembers(Stopper):
    """Record the results of members in the population."""

    def __init__(self, population: Population) -> None:
        self.population = population

    def __call__(self, trial_id: str, result: Plain) -> bool:
        """Record a result; return False: a member ends with its run."""
        if result["kind"] == "evaluation":
            self.population.record(result["member"], Message("evaluation", result["count"], result["value"]))
        if result["done"]:
            error = "" if result["end"] == "ended" else result["text"] or "its run was stopped"
            self.population.end(result["member"], error)
        return False

    def stop_all(self) -> bool:
        """Return False: members end with their runs."""
        return False


class RayPopulation:
    """Train a population on a Ray cluster. All machines must see its folder and the configs under the same paths.

    Args:
        population: records what happens, only on this machine.
        train: trains a run.
        plan_member: plans the run of a member.
        jobs: how many members are trained at a time on this machine; a cluster trains as many as it has cores for.
        address: address of the cluster; None starts one on this machine.
    """

    def __init__(self, population: Population, train: Train, plan_member: PlanMember, jobs: int, address: str | None) -> None:
        self.population, self.train, self.plan_member, self.jobs, self.address = population, train, plan_member, jobs, address
        self.received: signal.Signals | None = None
        """The signal that ended the population early."""

    def run(self) -> None:
        """Train until the runs of all members have ended, or Ctrl-C."""
        os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
        join_cluster(ray, self.jobs, self.address, "--address")
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        population, storage = self.population, self.population.folder / "ray"
        random.seed(population.seed)  # Ray Tune draws from these generators
        np.random.seed(population.seed)
        try:
            parameters = {"train": self.train, "plan_member": self.plan_member, "runs": population.runs, "where": os.getcwd()}
            trainable: Any = tune.with_resources(tune.with_parameters(MemberTrainable, **parameters), {"cpu": 1})
            first = [periods[0].values for periods in population.periods]
            tuner = tune.Tuner(
                trainable,
                param_space={
                    "member": tune.grid_search(list(range(population.size))),
                    "values": tune.sample_from(lambda config: dict(first[config["member"]])),
                },
                tune_config=tune.TuneConfig(scheduler=Scheduler(population), reuse_actors=True),
                run_config=tune.RunConfig(
                    name=storage.name,
                    storage_path=str(storage.parent.absolute()),
                    stop=RecordMembers(population),
                    verbose=0,
                    checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT, checkpoint_at_end=False),
                    failure_config=tune.FailureConfig(max_failures=MAX_LOST_MACHINES),
                ),
            )
            tuner.fit()
        finally:
            ray.shutdown()
        if population.ended < population.size:
            self.received = signal.SIGINT
        shutil.rmtree(storage, ignore_errors=True)  # copies of runs


MAX_CHOICES = 20
"""Ranges of at most this many integers change to a neighboring integer."""


def mutation(distribution: Distribution) -> list[Value] | Domain:
    """Return what Ray Tune draws a setting from: a list, in which it moves to neighbors, for choices and short ranges; else a range."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if isinstance(distribution, IntDistribution):
        low, high = distribution.low, distribution.high
        if high - low <= MAX_CHOICES:  # in a range it takes 0.8 or 1.2 times the number, rounded down: 2 stays 2
            return list(range(low, high + 1, distribution.step))
        return tune.lograndint(low, high + 1) if distribution.log else tune.randint(low, high + 1)
    return tune.loguniform(distribution.low, distribution.high) if distribution.log else tune.uniform(distribution.low, distribution.high)
