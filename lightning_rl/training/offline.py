"""Settings and experience of offline algorithms, which learn from a dataset and can continue online."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from lightning_rl.data.dataset import OfflineDataset, SampledDataset
from lightning_rl.data.demonstrations import NoCollector
from lightning_rl.data.self_play import SelfPlayConfig
from lightning_rl.demonstrations.dataset import summarize
from lightning_rl.errors import OrPlain, SettingError
from lightning_rl.training.arguments import Range
from lightning_rl.training.experience import read_demonstrations, seed_draws
from lightning_rl.training.replay import make_full_buffer, rows_of
from lightning_rl.training.settings import ReplayFields


@dataclass(kw_only=True, eq=False, repr=False)
class OfflineFields(ReplayFields):
    """Learn from a dataset only, for `max_updates` updates, or with `online` also from the environment's steps."""

    dataset: OrPlain[str | None] = None  # type: ignore[assignment]  # during a run, the experience itself
    """Name of the dataset, such as `pendulum/medium-v0`; in Python also a list of demonstrations."""
    max_updates: Annotated[int, Range(1, 2**53)] = 1_000_000
    """Length of a run without `online`; schedules, rows of metrics, evaluations and checkpoints follow the count of updates."""
    updates_per_iteration: Annotated[int, Range(1)] = 100
    """Without `online`: updates per iteration, after which the run may log, evaluate, save or stop."""
    online: bool = False
    """Step the environment for `max_env_steps`, as SAC does, with the dataset in the replay buffer from the start. Use it to fine-tune a
    policy that was trained offline (`--init_from`)."""
    warmup: Literal["random", "policy"] = "policy"
    """With `online`: actions before learning starts, `random` or from the `policy`."""
    self_play: OrPlain[SelfPlayConfig | None] = field(init=False, default=None)

    counter = "updates"

    def __post_init__(self) -> None:
        self.source = self.dataset
        if self.online:
            self.counter = "env_steps"
        super().__post_init__()
        check_offline(self)
        if self.online and self.source is not None:
            self.replay = replace(self.replay, demonstrations=self.source)

    def experience(self) -> SampledDataset:
        """Return batches of the dataset, or with `online` iterations that alternate acting and learning."""
        return super().experience() if self.online else make_offline(self)

    def warm_up(self) -> None:
        """Collect the statistics of the dataset's observations, unless they were loaded with another run's weights."""
        if self.source is None:
            super().warm_up()
        elif self.normalize_obs != "off" and self.network.normalizer.is_new:
            data: Any = self.dataset
            for obs in data.observations():
                self.network.normalizer.update(obs)


def check_offline(algorithm: OfflineFields) -> None:
    """Raise `SettingError` for settings that need steps of the environment without `online`, and for two datasets."""
    if algorithm.online:
        if algorithm.source is not None and algorithm.replay.demonstrations is not None:
            raise SettingError("dataset and replay.demonstrations have the same meaning here: use only dataset")
        return
    if algorithm.replay.demonstrations is not None or algorithm.replay.demonstration_share is not None:
        name = "demonstrations" if algorithm.replay.demonstrations is not None else "demonstration_share"
        raise SettingError(f"replay.{name} needs online, which also steps the environment; name the data in dataset")
    if algorithm.normalize_reward:
        raise SettingError("normalize_reward needs online: a dataset gives no running returns; use reward_scale")
    for name in algorithm.reward_signals:
        if name != "extrinsic":
            raise SettingError(f"reward_signals.{name} needs online, which steps the environment; leave it out")


def make_offline(algorithm: OfflineFields) -> OfflineDataset:
    """Return batches of the transitions of a dataset.

    Raises:
        SettingError: there is no dataset, or it does not fit the environment.
    """
    episodes = read_demonstrations(algorithm, "dataset", algorithm.source)
    if not episodes:
        raise SettingError("dataset: name one to learn from, such as pendulum/medium-v0, or set online to learn from the environment")
    seed_draws(algorithm)
    settings, lengths = algorithm.replay_settings, (algorithm.updates_per_iteration, algorithm.max_updates)
    buffer = make_full_buffer(algorithm, episodes, rows_of(algorithm, settings, algorithm.replay), algorithm.replay)
    if not buffer.ready:
        raise SettingError(f"dataset: {summarize(episodes)}, of which nothing can be sampled; its episodes are too short")
    algorithm.say(f"dataset: {summarize(episodes)}")
    nowhere = NoCollector(algorithm.spaces.observation)
    signals = dict(algorithm.reward_signals.items())
    return OfflineDataset(nowhere, buffer, signals, settings, algorithm.device, *lengths)
