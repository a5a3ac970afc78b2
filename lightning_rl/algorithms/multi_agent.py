"""Several behaviors in one environment, each trained by its own algorithm."""

from collections.abc import Mapping
from functools import cached_property, partialmethod
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from gymnasium.spaces import Dict
from torch import nn
from torch.optim import Optimizer

from lightning_rl.algorithms.algorithm import Algorithm
from lightning_rl.callbacks.curriculum import Curriculum, make_curriculum
from lightning_rl.callbacks.evaluation import begin_hook
from lightning_rl.data.agent_episodes import BehaviorPolicies
from lightning_rl.data.shared import JointDataset
from lightning_rl.envs.agents.stepper import Opponent
from lightning_rl.envs.agents.world import SharedEnv
from lightning_rl.envs.config import EnvSetting, EnvSource, as_config, count_envs
from lightning_rl.envs.stepping import make_world
from lightning_rl.errors import SettingError, check_range
from lightning_rl.settings.fields import as_integer
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.spaces import Spaces, to_plain
from lightning_rl.training.arguments import plain
from lightning_rl.training.behaviors import as_behavior, build_algorithm, describe_learner, find_sides, with_roles
from lightning_rl.training.hooks import RunModule, call_hook
from lightning_rl.training.loading import stored_name
from lightning_rl.training.run import Run


class MultiAgent(RunModule):
    """A run that trains several behaviors, each with its own algorithm, on the same steps of a shared environment.

    Each algorithm sets the length of its iterations. A batch contains the iterations that are complete, keyed by behavior. Environment
    steps count steps of the environment's copies. The agents of a behavior are rows of its algorithm, which counts their steps.
    Behaviors with `self_play` take turns: one of them learns, against past selves and the newest weights of the others.
    Lightning's hooks of an algorithm are called with its own item of the batch; overrides of hooks that cannot be called are an error. A
    subclass that overrides one of these hooks must call `super()`.

    Args:
        env: an environment whose agents move at the same time; see docs/several_agents.md.
        behaviors: behaviors by name; each agent has exactly one.
        max_env_steps: environment steps, summed over all copies and ranks.
        log_interval: environment steps between rows of metrics; None: 1 % of the run.
        spaces: spaces of each behavior, with the names of its agents; None: read from one environment.

    Metrics: those of each algorithm under the name of its behavior, such as `good/train/loss` and `good/rollout/ep_rew_mean`; means over
    behaviors as `rollout/ep_rew_mean`; `eval/<behavior>/mean_reward`.
    """

    format_version = 2

    def __init__(
        self,
        env: EnvSetting,
        behaviors: dict[str, Any],
        max_env_steps: int = 1_000_000,
        log_interval: int | None = None,
        spaces: Mapping[str, Spaces] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(behaviors, Mapping) or not behaviors:
            raise SettingError(f"behaviors must name at least one, each with agents and a learner, got {behaviors!r}")
        in_order = sorted(behaviors.items(), key=str)  # this order assigns optimizers to behaviors in checkpoints
        chosen = {name: as_behavior(name, given, spaces is not None) for name, given in in_order}
        max_env_steps = as_integer(max_env_steps)
        check_range("max_env_steps", max_env_steps, 1, whole=True)
        if log_interval is not None:
            check_range("log_interval", log_interval, 0, open_low=True)
        self.env: EnvSource = None if env is None and spaces is not None else as_config(env)  # type: ignore[assignment]  # None: only to act
        self.max_env_steps, self.log_interval = max_env_steps, log_interval
        if spaces is not None:
            self.sides = dict(spaces)
        else:
            self.sides = find_sides(self.env, chosen)
            chosen = {name: with_roles(behavior, self.env, self.sides[name]) for name, behavior in chosen.items()}
        algorithms = {
            name: build_algorithm(name, behavior, self.sides[name], self._share_env(), max_env_steps) for name, behavior in chosen.items()
        }
        self.algorithms: Mapping[str, Algorithm] = nn.ModuleDict(algorithms)  # type: ignore[assignment]
        """The algorithm of each behavior, frozen or not."""
        self.frozen = [name for name, behavior in chosen.items() if behavior.frozen]
        """Behaviors that act and do not learn."""
        if len(self.frozen) == len(algorithms):
            raise SettingError("behaviors: none of them learns; give one a class_path")
        parts = {name: algorithm.learner for name, algorithm in algorithms.items()}
        self.run = Run(self, {name: parts[name] for name in self.learners}, {name: parts[name] for name in self.frozen})
        for name, part in parts.items():
            part.join(self.run, name)
        self.rivals = [name for name in behaviors if algorithms[name].self_play is not None]
        """Behaviors that take turns learning, in the order of the setting."""
        if len(self.rivals) == 1:
            alone = f"behavior {self.rivals[0]}: self_play needs another behavior with self_play, which learns in turn with it"
            raise SettingError(f"{alone}; add it there or leave it out")
        for name in self.rivals:
            for callback in algorithms[name].past_selves:
                callback.rivals = [past for other in self.rivals if other != name for past in algorithms[other].past_selves]
        plans = {
            name: {"agents": list(self.sides[name].agents), "learner": describe_learner(chosen[name], algorithms[name])}
            for name in behaviors
        }
        self.save_hyperparameters(
            {"env": plain(self.env), "behaviors": plans, "max_env_steps": max_env_steps, "log_interval": log_interval}
        )

    def _share_env(self) -> SharedEnv | None:
        """Return the environment of one algorithm, None if they are loaded only to act."""
        if self.env is None:
            return None
        return SharedEnv(self.num_envs, getattr(self.env, "name", "the environment"), getattr(self.env, "is_unity", False))

    @property
    def learners(self) -> Mapping[str, Algorithm]:
        """Return the algorithms that learn (are not frozen)."""
        return {name: algorithm for name, algorithm in self.algorithms.items() if name not in self.frozen}

    @property
    def trainer(self) -> pl.Trainer:
        """Return the Trainer; setting it sets that of all algorithms too."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        for module in (self, *self.algorithms.values()):
            pl.LightningModule.trainer.fset(module, trainer)  # type: ignore[attr-defined]

    @property
    def on_nan(self) -> str:
        """Return how evaluations handle NaN and infinity: raise if any learning behavior would."""
        asked = [learner.on_nan for learner in self.learners.values()]
        return "raise" if "raise" in asked else asked[0]

    @property
    def spaces(self) -> Spaces:  # type: ignore[override]
        """Return the spaces of all behaviors, by name."""
        sides = self.sides
        observation, action = Dict({name: side.observation for name, side in sides.items()}), Dict({n: s.action for n, s in sides.items()})
        return Spaces(observation, action, any(side.masked for side in sides.values()))

    @property
    def network(self) -> BehaviorPolicies:
        """Return the policies of all behaviors."""
        return BehaviorPolicies(self.sides, {name: algorithm.network for name, algorithm in self.algorithms.items()}, self.frozen)

    # ---------------------------------------------------------------- experience

    def experience(self) -> JointDataset:
        if self.env is None:
            raise SettingError("this algorithm was loaded without an environment; pass env= to train it")
        world = make_world(self.env, self.sides, self.global_rank * self.num_envs if self.has_trainer else 0)
        datasets = {name: learner.build_side(world.sides[name], name in self.frozen) for name, learner in self.run.all.items()}
        lengths: list[Any] = [datasets[name].collector.n_steps * self.num_envs * self.world_size for name in self.learners]
        seed = int(np.random.SeedSequence([torch.initial_seed(), self.global_rank, self.count]).generate_state(1)[0]) // 2
        iterations = sum(-(-self.max_env_steps // length) for length in lengths)
        return JointDataset(world, datasets, seed, iterations, {name: self.run.all[name] for name in self.rivals})

    def training_step(self, batch: Mapping[str, object], batch_idx: int) -> None:
        self.outputs = {name: self._call(name, "training_step", item, batch_idx) for name, item in batch.items()}

    def _call(self, name: str, hook: str, *arguments: object, **named: object) -> object:
        """Call a hook of a learner as Lightning would if it trained alone."""
        learner = self.algorithms[name]
        begin_hook(learner, hook)
        return call_hook(learner, hook, *arguments, **named)

    def _call_all(self, hook: str, *arguments: object, **named: object) -> None:
        for name in self.learners:
            self._call(name, hook, *arguments, **named)

    def on_train_batch_start(self, batch: Mapping[str, object], batch_idx: int) -> int | None:
        answers = [self._call(name, "on_train_batch_start", item, batch_idx) for name, item in batch.items()]
        return -1 if -1 in answers else None  # -1: Lightning skips all batches

    def on_train_batch_end(self, outputs: object, batch: Mapping[str, object], batch_idx: int) -> None:
        for name, item in batch.items():
            self._call(name, "on_train_batch_end", self.outputs[name], item, batch_idx)

    setup = partialmethod(_call_all, "setup")
    teardown = partialmethod(_call_all, "teardown")
    on_fit_start = partialmethod(_call_all, "on_fit_start")
    on_fit_end = partialmethod(_call_all, "on_fit_end")
    on_train_start = partialmethod(_call_all, "on_train_start")
    on_train_end = partialmethod(_call_all, "on_train_end")
    on_train_epoch_start = partialmethod(_call_all, "on_train_epoch_start")
    on_train_epoch_end = partialmethod(_call_all, "on_train_epoch_end")
    on_validation_start = partialmethod(_call_all, "on_validation_start")
    on_validation_end = partialmethod(_call_all, "on_validation_end")
    on_validation_epoch_start = partialmethod(_call_all, "on_validation_epoch_start")
    on_validation_epoch_end = partialmethod(_call_all, "on_validation_epoch_end")

    def configure_model(self) -> None:
        for algorithm in self.algorithms.values():
            algorithm.configure_model()

    def configure_optimizers(self) -> list[Optimizer]:
        optimizers: list[Optimizer] = []
        for name, learner in self.learners.items():
            configured: object = learner.configure_optimizers()
            if not isinstance(configured, list | tuple) or not all(isinstance(optimizer, Optimizer) for optimizer in configured):
                raise SettingError(f"behavior {name}: configure_optimizers must return a list of optimizers if several behaviors learn")
            self.run.optimizers_of[name] = slice(len(optimizers), len(optimizers) + len(configured))
            optimizers += configured
        return optimizers

    # ---------------------------------------------------------------- called by the run

    @cached_property
    def curriculum(self) -> list[Curriculum]:
        """The curriculum of the environments, which the next `fit` continues."""
        return make_curriculum(self.env)

    def learning_callbacks(self) -> list[pl.Callback]:
        past_selves = [callback for name in self.rivals for callback in self.algorithms[name].past_selves]
        return [*self.curriculum, *past_selves]

    @property
    def length(self) -> int:
        return self.max_env_steps

    @property
    def num_envs(self) -> int:
        return count_envs(self.env)

    def count_steps(self) -> None:
        assert isinstance(self.dataset, JointDataset)
        for algorithm in self.algorithms.values():
            algorithm.count_steps()
        self.env_steps += self.dataset.count_steps() * self.world_size
        self.updates, self.episodes = (
            sum(getattr(algorithm, name) for algorithm in self.algorithms.values()) for name in ("updates", "episodes")
        )

    def make_opponent(self, name: str, num_rows: int) -> Opponent:
        """Raise `SettingError`: in an evaluation, all seats are taken by behaviors."""
        raise SettingError(f"{type(self).__name__} has no seats for an opponent; leave it out")

    def describe(self) -> Plain:
        spaces = [to_plain(space) for space in self.spaces[:2]]
        behaviors = {
            name: {**algorithm.describe(), **{count: getattr(algorithm, count) for count in self.COUNTS}}
            for name, algorithm in self.algorithms.items()
        }
        return {"algorithm": stored_name(type(self)), "spaces": spaces, "masked": self.spaces.masked, "behaviors": behaviors}

    def set_counts(self, counts: Mapping[str, Any]) -> None:
        super().set_counts(counts)
        for name, algorithm in self.algorithms.items() if "behaviors" in counts else ():
            algorithm.set_counts(counts["behaviors"][name])
