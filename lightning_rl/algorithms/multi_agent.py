"""Several behaviors in one environment, each learned by an algorithm of its own."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Dict
from torch import nn
from torch.optim import Optimizer

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.data.agent_episodes import BehaviorPolicies
from lightning_rl.data.dataset import ReplayDataset
from lightning_rl.data.rollout import RolloutDataset
from lightning_rl.data.shared import JointDataset
from lightning_rl.envs.agents.world import SharedEnv, World
from lightning_rl.envs.config import EnvConfig, as_config
from lightning_rl.envs.make import make_env
from lightning_rl.envs.snapshot.state import choose_way
from lightning_rl.errors import SettingError, check_range
from lightning_rl.nan_policy import Guard
from lightning_rl.spaces import Spaces, to_plain
from lightning_rl.training.behaviors import as_behavior, check_learner, describe_learner, find_sides
from lightning_rl.training.experience import frozen_experience
from lightning_rl.training.loading import load, stored_name
from lightning_rl.training.run import Run
from lightning_rl.training.settings import as_integer, plain
from lightning_rl.training.state import RunLog
from lightning_rl.types import State


class MultiAgent(Run):
    """A run in which several behaviors learn at the same time, each by an algorithm of its own, from the same steps of one world.

    A batch holds the iterations of those behaviors whose experience is full, by name: iterations have the length that each algorithm asks
    for. Environment steps are those of the copies; the agents of a behavior are rows of its algorithm, which counts their steps.

    Args:
        env: an environment of several agents that move at the same time, see docs/several_agents.md.
        behaviors: by name; each agent has one of them.
        max_env_steps: steps of all copies together, all ranks together.
        log_interval: environment steps between rows; None: 1 % of the run.
        spaces: of each behavior, with the names of its agents; None: found in one environment.

    Metrics: those of each algorithm under the name of its behavior, such as `good/train/loss` and `good/rollout/ep_rew_mean`; means over
    behaviors as `rollout/ep_rew_mean`; `eval/<behavior>/mean_reward`.
    """

    COUNTS = ("env_steps", "updates", "episodes")
    format_version = 2

    def __init__(
        self,
        env: EnvConfig,
        behaviors: dict[str, Any],
        max_env_steps: int = 1_000_000,
        log_interval: int | None = None,
        spaces: Mapping[str, Spaces] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(behaviors, Mapping) or not behaviors:
            raise SettingError(f"behaviors must name at least one, each with agents and a learner, got {behaviors!r}")
        in_order = sorted(behaviors.items(), key=str)  # which decides whose optimizer is whose in a checkpoint
        chosen = {name: as_behavior(name, each, spaces is not None) for name, each in in_order}
        max_env_steps = as_integer(max_env_steps)
        check_range("max_env_steps", max_env_steps, 1, whole=True)
        if log_interval is not None:
            check_range("log_interval", log_interval, 0, open_low=True)
        self.env, self.max_env_steps, self.log_interval = as_config(env), max_env_steps, log_interval
        self.sides = find_sides(self.env, chosen) if spaces is None else dict(spaces)
        learners: dict[str, Algorithm] = {}
        for name, behavior in chosen.items():
            with torch.random.fork_rng(devices=[]):  # no behavior changes what another one draws
                torch.manual_seed(seed_of(name))
                own = self.sides[name]
                try:
                    learner = behavior.learner(SharedEnv(self.num_envs), spaces=own, max_env_steps=max_env_steps * own.rows)
                except SettingError as error:
                    raise SettingError(f"behavior {name}: {error}") from error
            check_learner(name, learner)
            learner.behavior = name
            learners[name] = learner
        self.learners = nn.ModuleDict(learners)
        self.frozen = [name for name, behavior in chosen.items() if behavior.frozen]
        """Behaviors that act and do not learn."""
        if len(self.frozen) == len(learners):
            raise SettingError("behaviors: none of them learns; give one a class_path")
        self.counted_steps = 0
        """Steps of the world that are in `env_steps`."""
        self.newest: dict[str, dict[str, float]] = {}
        """What the newest iteration of each behavior recorded."""
        agents = {name: list(own.agents) for name, own in self.sides.items()}
        plans = {name: {"agents": agents[name], "learner": describe_learner(chosen[name], each)} for name, each in learners.items()}
        self.save_hyperparameters(
            {"env": plain(self.env), "behaviors": plans, "max_env_steps": max_env_steps, "log_interval": log_interval}
        )

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = "cpu", hparams_file: None = None, strict: bool = True, **overrides: Any
    ) -> Any:
        """Load the run of a checkpoint, from the file alone; `overrides` are settings that win over the stored ones."""
        return load(checkpoint_path, cls, MultiAgent, map_location, **overrides)

    @property
    def each(self) -> Mapping[str, Algorithm]:
        """Return the algorithm of each behavior."""
        return dict(self.learners.items())  # type: ignore[arg-type]

    @property
    def on_nan(self) -> str:
        """Return what an evaluation does about NaN and infinity: it raises if a behavior that learns would."""
        asked = [each.on_nan for each in self.learning.values()]
        return "raise" if "raise" in asked else asked[0]

    @property
    def learning(self) -> Mapping[str, Algorithm]:
        """Return the algorithms that learn, and are not frozen."""
        return {name: each for name, each in self.each.items() if name not in self.frozen}

    @property
    def spaces(self) -> Spaces:  # type: ignore[override]
        """Return the spaces of all behaviors, by name."""
        sides = self.sides
        observation, action = Dict({name: each.observation for name, each in sides.items()}), Dict({n: s.action for n, s in sides.items()})
        return Spaces(observation, action, any(each.masked for each in sides.values()))

    @property
    def network(self) -> BehaviorPolicies:
        """Return the policies of all behaviors."""
        return BehaviorPolicies(self.sides, {name: learner.network for name, learner in self.each.items()})

    # ---------------------------------------------------------------- experience

    def experience(self) -> JointDataset:
        make: Any = partial(make_env, self.env)  # type: ignore[arg-type]
        settings = repr(self.env) if isinstance(self.env, EnvConfig) else None
        limit = getattr(self.env, "max_episode_steps", None)
        way = choose_way(partial(make, 0), settings)
        first = self.global_rank * self.num_envs if self.has_trainer else 0
        world = World(make, self.num_envs, self.sides, first, way, limit, settings or "")
        datasets: dict[str, Any] = {}
        for name, learner in self.each.items():
            if self.has_trainer:
                learner.trainer = self.trainer
            learner.env.side = world.sides[name]  # type: ignore[attr-defined]
            datasets[name] = learner.dataset = frozen_experience(learner) if name in self.frozen else learner.experience()
            if not isinstance(learner.dataset, RolloutDataset | ReplayDataset):
                raise SettingError(f"behavior {name}: {type(learner).__name__} does not learn from steps of a world that others share")
        lengths = [datasets[name].collector.n_steps * self.num_envs * self.world_size for name in self.learning]
        seed = int(np.random.SeedSequence([torch.initial_seed(), self.global_rank, self.count]).generate_state(1)[0]) // 2
        return JointDataset(world, datasets, seed, sum(-(-self.max_env_steps // length) for length in lengths))

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        for name, own in batch.items():
            self.each[name].training_step(own, batch_idx)

    def configure_optimizers(self) -> list[Optimizer]:
        optimizers: list[Optimizer] = []
        for name, learner in self.learning.items():
            own = learner.configure_optimizers()
            if not isinstance(own, list | tuple) or not all(isinstance(each, Optimizer) for each in own):
                raise SettingError(f"behavior {name}: configure_optimizers must return a list of optimizers where several behaviors learn")
            learner.optimizer_numbers = slice(len(optimizers), len(optimizers) + len(own))
            optimizers += own
        return optimizers

    # ---------------------------------------------------------------- what its run asks

    @property
    def length(self) -> int:
        return self.max_env_steps

    @property
    def num_envs(self) -> int:
        return int(getattr(self.env, "num_envs", 8))

    @property
    def log_every(self) -> int:
        return int(self.log_interval or super().log_every)

    def count_steps(self) -> None:
        assert isinstance(self.dataset, JointDataset)
        for learner in self.each.values():
            learner.count_steps()
        steps = self.dataset.joint.steps
        self.env_steps += (steps - self.counted_steps) * self.num_envs * self.world_size
        self.counted_steps = steps
        self.updates, self.episodes = (sum(getattr(each, name) for each in self.each.values()) for name in ("updates", "episodes"))

    def begin_learning(self) -> None:
        trainer: Any = self.trainer
        self.counted_steps = 0
        for name in self.frozen:
            frozen: Any = self.each[name]
            frozen.counted_rows = 0
            frozen.guard = frozen.collector.guard = Guard(frozen.on_nan, None, self.world_size)
        for learner in self.learning.values():
            learner.log_rows = RunLog(1, 0)
            learner.begin_learning()
            if learner.target_update is not None:
                learner.target_update.on_train_start(trainer, learner)  # type: ignore[arg-type]
                learner.followers = [learner.target_update, *learner.followers]

    def schedule(self, progress: float) -> None:
        for learner in self.learning.values():
            if not learner.collector.is_open:  # type: ignore[union-attr]
                self._begin(learner, learner.env_steps, progress)

    def _begin(self, learner: Algorithm, began_at: int, progress: float) -> None:
        """Give everything of a behavior that is scheduled its value for an iteration."""
        assert learner.dataset is not None
        learner.began_at, learner.progress = began_at, progress
        learner.schedule(progress)
        learner.dataset.begin_iteration(began_at, progress)

    def finish_learning(self) -> None:
        assert isinstance(self.dataset, JointDataset)
        for name in self.dataset.full:
            learner = self.each[name]
            learner.finish_learning()
            self.newest[name] = {**learner.learning_metrics(), "train/n_updates": float(learner.updates)}

    def learning_metrics(self) -> dict[str, float]:
        return {f"{name}/{key}": value for name, metrics in self.newest.items() for key, value in metrics.items()}

    def take_notices(self) -> list[str]:
        return [f"{name}: {notice}" for name, learner in self.each.items() for notice in learner.take_notices()]

    def validate(self) -> dict[str, float]:
        return {f"{name}/{key}": value for name, learner in self.each.items() for key, value in learner.validate().items()}

    def describe(self) -> dict[str, Any]:
        spaces = [to_plain(space) for space in self.spaces[:2]]
        own = {
            name: {**learner.describe(), **{count: getattr(learner, count) for count in self.COUNTS}} for name, learner in self.each.items()
        }
        return {"algorithm": stored_name(type(self)), "spaces": spaces, "masked": self.spaces.masked, "behaviors": own}

    def load_run(self, checkpoint: dict[str, Any]) -> None:
        super().load_run(checkpoint)
        for name, learner in self.each.items():
            learner.load_run({"lightning_rl": checkpoint["lightning_rl"]["behaviors"][name]})
            learner.ranks = [{**rank, "num_envs": learner.num_envs, "data": rank["data"]["behaviors"][name]} for rank in self.ranks]

    def get_learning_state(self) -> State:
        own = {
            name: {**learner.get_learning_state(), "began_at": learner.began_at, "progress": learner.progress}
            for name, learner in self.learning.items()
        }
        return {"behaviors": own, "newest": self.newest}

    def set_learning_state(self, state: State) -> None:
        assert isinstance(self.dataset, JointDataset)
        self.counted_steps, self.newest = self.dataset.joint.steps, state["newest"]
        for learner in self.each.values():
            learner.counted_rows = learner.collector.rows  # type: ignore[union-attr]
        for name, learner in self.learning.items():
            own = state["behaviors"][name]
            learner.set_learning_state(own)
            if learner.collector.is_open:  # type: ignore[union-attr]
                self._begin(learner, own["began_at"], own["progress"])

    def load_buffer(self, continues: bool = True) -> None:
        for learner in self.each.values():
            if not continues and self.global_rank == 0:  # one rank continues the counts of all
                collector: Any = learner.collector
                collector.env_steps, collector.statistics.episodes = learner.env_steps, learner.episodes
        for learner in self.learning.values():
            learner.load_buffer(continues)

    def end_learning(self) -> None:
        for learner in self.each.values():
            learner.end_learning()
            learner.dataset = None


def seed_of(name: str) -> int:
    """Return the seed of a behavior, by its name and not its place: others may come and go."""
    return int(np.random.SeedSequence([torch.initial_seed(), *name.encode()]).generate_state(1)[0])
