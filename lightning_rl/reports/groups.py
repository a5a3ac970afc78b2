"""Group runs that differ only in their seed, to compare groups of one environment."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_rl.reports.runs import AXES, TRAINING, Run

MAX_LABEL_LENGTH = 40
"""Characters; groups with longer labels get numbers."""
MAX_LISTED_GROUPS = 6
"""Maximum number of groups that are listed and compared in pairs."""


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds.

    Args:
        name: the label, or the algorithm and a number if labels are long.
        label: the algorithm and the `settings` that distinguish this group from others of the same algorithm.
    """

    name: str
    label: str
    runs: list[Run]
    settings: dict[str, str]

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm

    @property
    def key(self) -> str:
        """Return what the group's number stands for; empty if the group is named by its label."""
        return "" if self.name == self.label else self.label.removeprefix(self.algorithm).strip() or "none of the others' settings"

    @property
    def seeds(self) -> str:
        return "1 seed" if len(self.runs) == 1 else f"{len(self.runs)} seeds"

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the counts [G] at which any seed has a return, and the last known return of each seed there [R, G].

        The grid begins where the last seed has its first return and ends with the seed that ends first, so that nothing is extrapolated.
        """
        first, last = max(run.counts[0] for run in self.runs), min(run.counts[-1] for run in self.runs)
        counts = np.unique(np.concatenate([run.counts for run in self.runs]))
        counts = counts[(first <= counts) & (counts <= last)]
        return counts, np.stack([run.returns[np.searchsorted(run.counts, counts, side="right") - 1] for run in self.runs])

    def finals(self) -> np.ndarray:
        """Return the last return of each seed [R]."""
        return np.array([run.returns[-1] for run in self.runs])

    def notes(self) -> Iterator[str]:
        """Yield what a reader must know about this group."""
        yield from (run.cut for run in self.runs if run.cut)
        for seed, number in Counter(run.seed for run in self.runs).items():
            if seed is not None and number > 1:
                yield f"{self.name} has seed {seed} {number} times: such runs are alike, which makes intervals too narrow."
        counts, ends = self.curve()[0], [run.counts[-1] for run in self.runs]
        if not len(counts):
            yield f"{self.name} has no curve: there is no count at which all of its seeds have a return."
        elif min(ends) < max(ends):
            yield f"The curve of {self.name} ends at {min(ends):,.0f}, where its shortest run does; its longest ends at {max(ends):,.0f}."
        if min(ends) < max(ends):
            where = f"those at each run's own end, {min(ends):,.0f} to {max(ends):,.0f}"
            yield f"Final returns of {self.name} are {where}: a run that ended early counts with its last return."


@dataclass(frozen=True)
class Section:
    """Groups of one environment whose runs have the same counter, so that they can be compared.

    Args:
        unevaluated: runs without evaluations; if there are any, returns of training are compared.
        left_out: runs that do not have the returns that are compared.
    """

    environment: str
    counter: str
    groups: list[Group]
    unevaluated: list[Run]
    left_out: list[Run]

    @property
    def training(self) -> bool:
        """Return whether returns of training are compared."""
        return bool(self.unevaluated)

    @property
    def title(self) -> str:
        """Return the environment, and what is counted if not environment steps."""
        return self.environment if self.counter == "env_steps" else f"{self.environment}, over {self.counter}"

    def notes(self) -> Iterator[str]:
        """Yield what a reader must know about these groups."""
        if self.training:
            which = list_names([str(run.folder) for run in self.unevaluated])
            yield (
                f"{which} {'has' if len(self.unevaluated) == 1 else 'have'} no evaluations. "
                "All returns here are from training, with its exploration: each the mean of the last 100 episodes."
            )
        for run in self.left_out:
            yield f"{run.folder} is left out: it has no returns of training."
        if different := [*self._list_different_tasks()]:
            yield f"The groups have different tasks, whose returns are not comparable: {'; '.join(different)}."
        ends = [max(run.counts[-1] for run in group.runs) for group in self.groups]
        if min(ends) < max(ends):
            which = f"from {min(ends):,.0f} to {max(ends):,.0f}"
            if len(ends) <= MAX_LISTED_GROUPS:
                which = ", ".join(f"{group.name} at {end:,.0f}" for group, end in zip(self.groups, ends, strict=True))
            yield (
                f"The groups ended at different counts of {AXES[self.counter]}: {which}. "
                "Final returns and their comparison are those at each group's end."
            )
        for group in self.groups:
            yield from group.notes()
        if alone := [group.name for group in self.groups if len(group.runs) == 1]:
            yield f"{list_names(alone)} {'has' if len(alone) == 1 else 'have'} one seed: there is no interval."

    def _list_different_tasks(self) -> Iterator[str]:
        """Yield each setting of the task in which groups differ, with its values."""
        tasks = [group.runs[0].task() for group in self.groups]
        for name in sorted({name for task in tasks for name in task}):
            groups: dict[str, list[str]] = defaultdict(list)
            for group, task in zip(self.groups, tasks, strict=True):
                groups[task.get(name, "not set")].append(group.name)
            if len(groups) > 1:
                yield f"{name} is {', '.join(f'{value} in {list_names(group)}' for value, group in groups.items())}"


def list_names(names: Sequence[str]) -> str:
    """List the first three names, and how many others there are."""
    names = names if len(names) <= 3 else [*names[:3], f"{len(names) - 3} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def make_sections(runs: Iterable[Run]) -> list[Section]:
    """Return the sections of a report, with groups in the order of their first runs."""
    places: dict[tuple[str, str], list[Run]] = defaultdict(list)
    values: dict[tuple[str, str], set[str]] = defaultdict(set)
    for run in runs:
        places[run.environment, run.counter].append(run)
        for name, value in run.settings.items():
            values[run.algorithm, name].add(value)
    numbers: dict[str, dict[str, int]] = defaultdict(dict)
    forms = {place: shortened(known) for place, known in values.items()}
    sections = []
    for (environment, counter), placed in places.items():
        unevaluated = [run for run in placed if run.source == TRAINING]
        placed = [run.in_training() for run in placed] if unevaluated else placed
        groups = group_runs([run for run in placed if len(run.counts)], numbers, forms)
        sections.append(Section(environment, counter, groups, unevaluated, [run for run in placed if not len(run.counts)]))
    return sections


def shortened(values: set[str]) -> dict[str, str]:
    """Return the values of a setting with the fewest digits, at least four, that distinguish them."""

    def rounded(value: str, digits: int) -> str:
        return f"{float(value):.{digits}g}" if re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", value) else value

    forms = ({value: rounded(value, digits) for value in values} for digits in range(4, 18))
    return next((form for form in forms if len({*form.values()}) == len(values)), {value: value for value in values})


def group_runs(runs: list[Run], numbers: dict[str, dict[str, int]], forms: dict[tuple[str, str], dict[str, str]]) -> list[Group]:
    """Group runs of one environment by algorithm and by the settings in which the runs of an algorithm differ.

    `numbers`: for each algorithm, the numbers of its labels so far; labels of algorithms with long ones are added.
    `forms`: how to write the values of an algorithm's settings.
    """
    groups: dict[str, Group] = {}
    for run in runs:
        siblings = [other.settings for other in runs if other.algorithm == run.algorithm]
        differing = [name for name in sorted(run.settings) if len({settings.get(name) for settings in siblings}) > 1]
        settings = {name: forms[run.algorithm, name][run.settings[name]] for name in differing}
        label = " ".join([run.algorithm, *(f"{name}={value}" for name, value in settings.items())])
        groups.setdefault(label, Group(label, label, [], settings)).runs.append(run)
    long = {group.algorithm for group in groups.values() if len(group.label) > MAX_LABEL_LENGTH}
    for label, group in groups.items():
        if group.algorithm in long:
            known = numbers[group.algorithm]
            groups[label] = replace(group, name=f"{group.algorithm} {known.setdefault(label, len(known) + 1)}")
    return list(groups.values())
