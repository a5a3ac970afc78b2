"""Train the runs of a study on the machines of a Ray cluster, with Ray Tune. Needs the extra `ray`; imported only if it is used."""

from __future__ import annotations

import logging
import os
import signal
from contextlib import suppress
from typing import Any

import ray
from ray import tune
from ray.tune.search import Searcher
from ray.tune.stopper import Stopper

from lightning_rl.actors.ray_workers import join_cluster
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.training.run_processes import Message, RunProcess, Train
from lightning_rl.tuning.comparison import StudyRun
from lightning_rl.tuning.local_engine import MakePlan
from lightning_rl.tuning.study import Study

END_TIMEOUT = 60.0
"""Seconds that a run has to save itself when it is stopped."""
MAX_LOST_MACHINES = 3
"""How often a trial is restarted on another machine."""
QUIET = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_RESULT_BUFFER_LENGTH": "1",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_WARN_THRESHOLD_S": "60",
}
"""Environment variables of Ray Tune: the study has its own files, and makes decisions after each evaluation."""


class RunTrainable(tune.Trainable):
    """Train a run in its own process; a step lasts until the next evaluation or the end of the run."""

    def setup(  # type: ignore[override]  # Ray Tune passes what `with_parameters` adds
        self, config: Plain, train: Train, make_plan: MakePlan, where: str
    ) -> None:
        """Take a run and the values of its trial; `where` is the working directory, to which paths are relative."""
        os.chdir(where)
        self.train_run, self.make_plan = train, make_plan
        self.process: RunProcess | None = None
        self.reset_config(config)

    def reset_config(self, new_config: Plain) -> bool:
        """Take another run in the same actor: starting an actor takes longer than a short run."""
        self.cleanup()
        self.number, self.values, self.seed = new_config["number"], new_config["values"], new_config["seed"]
        self.waits = False
        return True

    def step(self) -> Plain:
        """Let the run continue; return its next message as a result of Ray Tune."""
        while True:
            message = self._receive()
            if message.kind == "begins":
                continue
            return {**vars(message), "number": self.number, "seed": self.seed, "done": not message.waits}

    def _receive(self) -> Message:
        if self.process is None:
            self.process = RunProcess(self.train_run, self.make_plan(self.number, self.values, self.seed))
        try:
            if self.waits:
                self.process.pipe.send("go")
            message = self.process.pipe.recv()
        except (EOFError, OSError):
            message = Message("failed", text=self.process.exit_reason())
        self.waits = message.kind in ("begins", "evaluation")
        if not self.waits:
            self.process.kill()
            self.process = None
        return message

    def cleanup(self) -> None:
        """Save and stop the current run."""
        if self.process is not None:
            with suppress(EOFError, OSError):
                self.process.pipe.send("stop")
                self.process.pipe.poll(END_TIMEOUT)
            self.process.kill()
            self.process = None


class StudySearcher(Searcher):
    """Pass the runs of a study to Ray Tune, in which each run is a trial."""

    def __init__(self, study: Study) -> None:
        super().__init__(metric="value", mode=study.objective.mode)
        self.study = study
        self.runs: dict[str, StudyRun] = {}

    def suggest(self, trial_id: str) -> Any:
        """Return the next run; None while it depends on runs that are being trained; `FINISHED` if there is none."""
        run = self.study.next_run()
        if run is None:
            return Searcher.FINISHED if self.study.has_ended else None
        self.runs[trial_id] = run
        return {"number": run.number, "values": self.study.trials[run.number].params, "seed": run.seed}

    def on_trial_complete(self, trial_id: str, result: Plain | None = None, error: bool = False) -> None:
        """Record a run that Ray could not train; others were recorded with their last result."""
        run = self.runs.get(trial_id)
        if error and run is not None and not self.study.is_over(run):
            self.study.fail(run, f"Ray lost it more than {MAX_LOST_MACHINES} times")

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: everything is in the study's own file."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing."""


class RecordResults(Stopper):
    """Record the results of runs in the study, and stop the runs that it prunes."""

    def __init__(self, study: Study) -> None:
        self.study = study

    def __call__(self, trial_id: str, result: Plain) -> bool:
        """Record a result; return whether the run's trial is pruned."""
        run = StudyRun(result["number"], result["seed"])
        if self.study.is_over(run):
            return True
        self.study.add_seconds(run, result["time_this_iter_s"])
        if result["kind"] == "evaluation":
            message = Message("evaluation", result["count"], result["value"], result["final"])
            return self.study.record(run, message)
        if result["kind"] == "ended":
            self.study.end_run(run)
        else:
            self.study.fail(run, result["text"] or "its run was stopped")
        return False

    def stop_all(self) -> bool:
        """Return False: the searcher ends the study."""
        return False


class RayEngine:
    """Train runs on a Ray cluster, several at a time. All machines must see the study's folder and the configs under the same paths.

    Args:
        study: records the runs, only on this machine.
        train: trains a run.
        make_plan: plans a run of a trial.
        address: address of the cluster; None starts one on this machine.
    """

    def __init__(self, study: Study, train: Train, make_plan: MakePlan, address: str | None) -> None:
        self.study, self.train, self.make_plan, self.address = study, train, make_plan, address
        self.received: signal.Signals | None = None
        """The signal that ended the study early."""

    def run(self) -> None:
        """Train runs until the study has ended, or Ctrl-C."""
        os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
        if self.study.has_ended:
            return
        jobs = self.study.settings.jobs
        join_cluster(ray, jobs, self.address, "--address")
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # it misses its own files; failures are recorded in the study
        try:
            parameters = {"train": self.train, "make_plan": self.make_plan, "where": os.getcwd()}
            trainable: Any = tune.with_resources(tune.with_parameters(RunTrainable, **parameters), {"cpu": 1})
            searcher = StudySearcher(self.study)
            tuner = tune.Tuner(
                trainable,
                tune_config=tune.TuneConfig(search_alg=searcher, num_samples=-1, max_concurrent_trials=jobs, reuse_actors=True),
                run_config=tune.RunConfig(
                    name="ray",
                    storage_path=str(self.study.folder.absolute()),
                    stop=RecordResults(self.study),
                    verbose=0,
                    checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # runs have their own
                    failure_config=tune.FailureConfig(max_failures=MAX_LOST_MACHINES),
                ),
            )
            tuner.fit()
        finally:
            ray.shutdown()
        if not self.study.has_ended:
            self.received = signal.SIGINT
