"""Several environments in one comparison (Agarwal et al. 2021, https://arxiv.org/abs/2108.13264)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_rl.reports.groups import Section
from lightning_rl.reports.tables import Table, between, bootstrap, iqm


@dataclass(frozen=True, eq=False)
class Aggregate:
    """The groups that ran in several environments, by their final returns.

    Args:
        environments: M of them.
        scores: of each group `[R, M]`: R seeds of each environment, whose final returns are scaled so that 0 is the lowest of all
            compared runs in that environment, and 1 the highest.
    """

    environments: list[str]
    scores: dict[str, np.ndarray]
    thresholds = np.linspace(0, 1, 101)

    def profiles(self) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Return for each group the share of its runs with more than each of the thresholds, and its 95 % interval."""
        return {
            name: (share_above(scores, self.thresholds), self.interval(scores, lambda drawn: share_above(drawn, self.thresholds)))
            for name, scores in self.scores.items()
        }

    def table(self) -> Table:
        """Return the interquartile mean over all runs of all environments, with its interval, and the mean."""
        rows = []
        for name, scores in self.scores.items():
            mean = between(self.interval(scores, lambda drawn: np.array([iqm(drawn.ravel())])), "{:.3f}".format)
            rows.append([name, f"{len(scores)} × {scores.shape[1]}", f"{iqm(scores.ravel()):.3f}", mean, f"{scores.mean():.3f}"])
        title = f"Final returns over {', '.join(self.environments)}, scaled from 0, the lowest of all runs, to 1, the highest"
        return Table(title, ["", "seeds × environments", "IQM", "95 % interval", "mean"], rows)

    def interval(self, scores: np.ndarray, estimate: object) -> np.ndarray | None:
        """Return the 95 % interval of an estimate, seeds drawn anew in each environment by itself; None for one seed."""
        return None if len(scores) == 1 else bootstrap(scores, estimate)  # type: ignore[arg-type]


def share_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the share of all scores that are greater than each threshold (Agarwal et al. 2021, eq. 2)."""
    return (scores.reshape(-1, 1) > thresholds).mean(0)


def aggregate_sections(sections: Sequence[Section]) -> Aggregate | None:
    """Return the comparison over all environments of the groups that ran in each of them; None without two of each."""
    names = [name for name in dict.fromkeys(g.name for s in sections for g in s.groups) if all(name in each_name(s) for s in sections)]
    if min(len(sections), len(names)) < 2 or len({section.environment for section in sections}) < len(sections):
        return None
    scaled: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for section in sections:
        finals = {group.name: group.finals() for group in section.groups}
        everything = np.concatenate(list(finals.values()))
        low, high = everything.min(), everything.max()
        for name in names:
            scaled[name].append((finals[name] - low) / (high - low) if high > low else np.ones(len(finals[name])))
    rectangular = {name: np.stack([each[: min(map(len, found))] for each in found], axis=1) for name, found in scaled.items()}
    return Aggregate([section.environment for section in sections], rectangular)


def each_name(section: Section) -> list[str]:
    """Return the names of a section's groups."""
    return [group.name for group in section.groups]
