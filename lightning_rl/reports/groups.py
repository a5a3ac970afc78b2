"""Runs that differ in their seed alone are one group; groups of one environment are compared with each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from lightning_rl.reports.runs import AXES, TRAINING, Run

LONGEST = 40
"""Characters of a label; groups with longer ones have numbers."""


@dataclass(frozen=True)
class Group:
    """Runs with the same settings.

    Args:
        name: what a report calls it: its label, or the algorithm and a number where labels are long.
        label: the algorithm and what distinguishes this group from others of it.
        runs: its seeds.
        settings: those that distinguish it.
    """

    name: str
    label: str
    runs: list[Run]
    settings: dict[str, str]

    @property
    def algorithm(self) -> str:
        """Of its runs."""
        return self.runs[0].algorithm

    @property
    def key(self) -> str:
        """What its number stands for; nothing where it is called by its label."""
        return "" if self.name == self.label else self.label.removeprefix(self.algorithm).strip() or "as it comes"

    @property
    def seeds(self) -> str:
        """How many there are."""
        return "1 seed" if len(self.runs) == 1 else f"{len(self.runs)} seeds"

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts [G] at which any seed has a return, and the return of each seed there [R, G], the last one known.

        The grid begins where the last seed has its first return and ends with the seed that ends first, so that nothing is guessed.
        """
        first, last = max(run.counts[0] for run in self.runs), min(run.counts[-1] for run in self.runs)
        counts = np.unique(np.concatenate([run.counts for run in self.runs]))
        counts = counts[(first <= counts) & (counts <= last)]
        return counts, np.stack([run.returns[np.searchsorted(run.counts, counts, side="right") - 1] for run in self.runs])

    def finals(self) -> np.ndarray:
        """The last return of each seed [R]."""
        return np.array([run.returns[-1] for run in self.runs])

    def notes(self) -> Iterator[str]:
        """What a reader must know of this group."""
        yield from (run.cut for run in self.runs if run.cut)
        if len(self.runs) == 1:
            yield f"{self.name} has one seed: there is no interval."
        for seed, number in Counter(run.seed for run in self.runs).items():
            if seed is not None and number > 1:
                yield f"{self.name} has seed {seed} {number} times: such runs are alike, and intervals narrower than they should be."
        counts, ends = self.curve()[0], [run.counts[-1] for run in self.runs]
        if not len(counts):
            yield f"{self.name} has no curve: there is no count at which all of its seeds have a return."
        elif min(ends) < max(ends):
            yield f"The curve of {self.name} ends at {min(ends):,.0f}, where its shortest run does; its longest ends at {max(ends):,.0f}."
        if min(ends) < max(ends):
            where = f"those at each run's own end, {min(ends):,.0f} to {max(ends):,.0f}"
            yield f"Final returns of {self.name} are {where}: one that ended early counts with what it had reached."


@dataclass(frozen=True)
class Section:
    """What can be compared: groups of one environment whose runs count the same."""

    environment: str
    counter: str
    groups: list[Group]
    unevaluated: list[Run]
    """Where there are any, returns of training are compared."""
    left_out: list[Run]
    """Those that have none."""

    @property
    def training(self) -> bool:
        """Whether returns are those of training."""
        return bool(self.unevaluated)

    @property
    def title(self) -> str:
        """The environment, and what is counted where that is not environment steps."""
        return self.environment if self.counter == "env_steps" else f"{self.environment}, over {self.counter}"

    def notes(self) -> Iterator[str]:
        """What a reader must know of these groups."""
        if self.training:
            which = f"{some(self.unevaluated)} {'has' if len(self.unevaluated) == 1 else 'have'} no evaluations."
            yield f"{which} All returns here are of training, with its exploration: each the mean of the last 100 episodes."
        for run in self.left_out:
            yield f"{run.folder} is left out: it has no returns of training."
        ends = [max(run.counts[-1] for run in group.runs) for group in self.groups]
        if min(ends) < max(ends):
            which = ", ".join(f"{group.name} at {end:,.0f}" for group, end in zip(self.groups, ends, strict=True))
            yield (
                f"The groups ended at different counts of {AXES[self.counter]}: {which}. "
                "Final returns and their comparison are those at each one's end."
            )
        for group in self.groups:
            yield from group.notes()


def some(runs: list[Run]) -> str:
    """The folders of the first runs, and how many there are beside them."""
    names = [str(run.folder) for run in runs[:3]] + ([f"{len(runs) - 3} more"] if len(runs) > 3 else [])
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def compared(runs: Iterable[Run]) -> list[Section]:
    """The sections of a report, with groups in the order in which their first runs came."""
    places: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        places[run.environment, run.counter].append(run)
    numbers: dict[str, dict[str, int]] = defaultdict(dict)
    sections = []
    for (environment, counter), found in places.items():
        unevaluated = [run for run in found if run.source == TRAINING]
        shown = [run.in_training() for run in found] if unevaluated else found
        groups = named(grouped([run for run in shown if len(run.counts)]), numbers)
        sections.append(Section(environment, counter, groups, unevaluated, [run for run in shown if not len(run.counts)]))
    return sections


def grouped(runs: list[Run]) -> list[Group]:
    """Runs of one environment by algorithm and settings, called by labels, which tell no setting that all runs of an algorithm share."""
    groups: dict[str, Group] = {}
    for run in runs:
        siblings = [other.settings for other in runs if other.algorithm == run.algorithm]
        differing = [name for name in sorted(run.settings) if len({settings.get(name) for settings in siblings}) > 1]
        settings = {name: run.settings[name] for name in differing}
        label = " ".join([run.algorithm, *(f"{name}={value}" for name, value in settings.items())])
        groups.setdefault(label, Group(label, label, [], settings)).runs.append(run)
    return list(groups.values())


def named(groups: list[Group], numbers: dict[str, dict[str, int]]) -> list[Group]:
    """The same groups, with numbers for those of algorithms with long labels. `numbers`: those of labels of each algorithm so far."""
    long = {group.algorithm for group in groups if len(group.label) > LONGEST}
    result = []
    for group in groups:
        if group.algorithm in long:
            known = numbers[group.algorithm]
            group = replace(group, name=f"{group.algorithm} {known.setdefault(group.label, len(known) + 1)}")
        result.append(group)
    return result
