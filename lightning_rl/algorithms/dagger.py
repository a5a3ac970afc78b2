"""DAgger (Ross, Gordon and Bagnell 2011, https://arxiv.org/abs/1011.0686): a teacher labels the states that the student visits."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from lightning_rl.algorithms.bc import Imitation
from lightning_rl.data.dataset import SampledDataset
from lightning_rl.data.demonstrations import DemonstrationBatch
from lightning_rl.distributions import Distribution
from lightning_rl.errors import SettingError
from lightning_rl.sharing.hub import is_zip
from lightning_rl.spaces import Spaces, without_hidden
from lightning_rl.training.hooks import RunModule
from lightning_rl.training.learning import choose_behavior
from lightning_rl.training.loading import checkpoint_of
from lightning_rl.training.settings import ReplayFields
from lightning_rl.types import Transition, Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch


@dataclass(kw_only=True, eq=False, repr=False)
class DAgger(ReplayFields, Imitation):
    """Act, store all observations, and imitate the teacher's actions on them: cloning that also learns to recover from its own errors.

    The student acts from the first step (β = 0 in the paper); `replay.demonstrations` adds the teacher's own episodes first.

    Metrics: `train/loss`, `train/entropy`; for choices `train/accuracy` and `train/action_rank` (0 is best); for Box actions
    `train/mean_abs_deviation` (of the mean, in the environment's units), as in `BehavioralCloning`. For the replay buffer `replay/size`,
    `replay/mean_picks` and `replay/age_mean`, as in `SAC`.
    """

    teacher: str
    """A run's folder, a checkpoint or a shared agent, whose most likely action is imitated; its policy must not have a memory."""
    warmup: Literal["random", "policy"] = "policy"
    """Actions before learning starts: `random` or from the `policy`."""
    n_steps: int = field(init=False, default=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replay.prioritized:
            raise SettingError("replay.prioritized needs TD errors, and DAgger learns no values; leave it out")

    def experience(self) -> SampledDataset:
        self.labels = Teacher(self.teacher, self.env, self.spaces, self.device)
        return super().experience()

    def training_step(self, batches: Iterator[Transition], batch_idx: int) -> None:
        for batch in batches:
            action = self.labels(batch.obs, batch.action_mask, self.network.distribution)
            start = batch.episode_start
            if len(start):
                start[0] = True  # each sequence starts with an empty memory, as in demonstrations
            self.learn(DemonstrationBatch(batch.obs, action, batch.weight, start, batch.action_mask))


class Teacher:
    """The policy of another run, which labels observations and does not learn.

    Raises `SettingError`: it does not exist, has a memory, or was trained with other spaces.
    """

    def __init__(self, source: str, env: object, spaces: Spaces, device: torch.device) -> None:
        if not isinstance(source, str | Path):
            kind = "the folder of a run (trainer.run_folder), a checkpoint or a shared agent"
            raise SettingError(f"teacher must be {kind}, got {source!r}")
        path = checkpoint_of(source, "teacher", "best.ckpt")
        # Stable-Baselines3 does not save the environment
        run = RunModule.load_from_checkpoint(path, device, env=env) if is_zip(path) else RunModule.load_from_checkpoint(path, device)
        stored = choose_behavior(run, None)
        teacher, student = (without_hidden(given, getattr(stored, "critic_obs", None) or []) for given in (stored.spaces, spaces))
        if (teacher.observation, teacher.action) != (student.observation, student.action):
            raise SettingError(f"teacher {source} was trained with other observations or actions than this environment has")
        if stored.spaces.observation != spaces.observation:
            raise SettingError(f"teacher {source} was trained with critic_obs that this environment does not show")
        if tree_leaves(stored.network.initial_memory(1)):
            raise SettingError(f"teacher {source} has a memory, but DAgger replays single steps; use a teacher without memory")
        self.network = stored.network.to(device).eval().requires_grad_(False)

    @torch.no_grad()
    def __call__(self, obs: Tree, mask: Tree, student: Distribution) -> Tree:
        """Return the teacher's actions for observations `[B, ...]`, in the form that the student's distribution samples."""
        action, _ = self.network.sample(obs, (), None, mask, deterministic=True)
        sampled = student.from_env(self.network.distribution.to_env(tree_to_numpy(action)))
        device = next(self.network.parameters()).device
        return tree_map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, tree_to_torch(sampled, device))
