"""Validate a checkpoint before it is used: it may come from others, and torch's kernels and Lightning's loops would trust its data.

`CONTENT` lists the places of every checkpoint, and `RUN` those of a run that can be resumed, with the kind of value allowed in each.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer, RMSprop

from lightning_rl.checkpoints.archive import Checkpoint
from lightning_rl.checkpoints.files import shown
from lightning_rl.checkpoints.kinds import (
    ANYTHING,
    COUNT,
    FLAG,
    FLAGS,
    FLOATS,
    GAMES,
    GENERATOR,
    INTEGERS,
    LIGHTNING,
    LIST,
    MAPPING,
    MATRICES,
    MEASURE,
    NUMBER,
    POSITIVE,
    PROGRESS,
    RATING,
    RATINGS,
    ROWS,
    SAMPLER,
    SCORES,
    SETTINGS,
    SNAPSHOTS,
    TEXT,
    WEIGHT,
    Kind,
    are_optimizer_states,
    are_spaces,
    is_number,
    is_numpy_generator,
    is_python_generator,
)
from lightning_rl.errors import SettingError
from lightning_rl.types import State

FORMAT_VERSION = 2
MOMENTS = ("exp_avg", "grad_avg", "momentum_buffer", "exp_avg_sq", "max_exp_avg_sq", "square_avg")
"""State of torch's optimizers that has the layout of its parameter; squares are >= 0. A step reads `REQUIRED_STATE` without checking."""
REQUIRED_STATE = ((Adam, ("step", "exp_avg", "exp_avg_sq")), (RMSprop, ("step", "square_avg")))


Rules = Mapping[str, Kind]
"""Paths, and the kind of value allowed at each. `[]` stands for all items of a list, a name with `*` for all matching names of a mapping,
`a|b` for both names; the part of a name from `{` on is ignored. A name is required unless it ends with `?`; below one that may be missing,
null is not checked further."""


def below(place: str, rules: Rules) -> Rules:
    """Return rules for the places below another place."""
    return {f"{place}/{path}": kind for path, kind in rules.items()}


CONTENT: Rules = {
    "lightning_rl/format_version?": POSITIVE,
    "lightning_rl/algorithm": TEXT,
    "lightning_rl/env_steps|updates|episodes": COUNT,
    "lightning_rl/spaces": Kind("two spaces of usual shapes", are_spaces),
    "lightning_rl/masked?|in_turn?": FLAG,
    "lightning_rl/agents?/[]": TEXT,
    "lightning_rl/joint?": TEXT,
    "lightning_rl/parameters?/*": SAMPLER,
    "lightning_rl/attributes?/*": MAPPING,
    "lightning_rl/changes?/[]": TEXT,
    "lightning_rl/behaviors?": MAPPING,
    "lightning_rl/behaviors?/*/env_steps|updates|episodes": COUNT,
    "lightning_rl/behaviors?/*/spaces": Kind("two spaces of usual shapes", are_spaces),
    "lightning_rl/behaviors?/*/masked": FLAG,
    "lightning_rl/behaviors?/*/agents/[]": TEXT,
    "state_dict/*": WEIGHT,
    "hyper_parameters": SETTINGS,
}
"""What every checkpoint contains."""
OPTIMIZER: Rules = {
    "param_groups": Kind("a list of groups", lambda value: len(value) > 0),
    "param_groups/[]/params/[]": COUNT,
    "state": Kind("a mapping of finite states", are_optimizer_states),
}
OPPONENT: Rules = {
    "generator": GENERATOR,
    "playing?": INTEGERS,
    "draws?": MAPPING,
    "fixed?": LIST,
    "finished?": GAMES,
    "retired?": SNAPSHOTS,
}
"""State of the players in the seats that do not learn: only the newest policy, or also others."""
DATA: Rules = {
    "learning_starts?": NUMBER.or_null(),
    "random_until?|phases?": NUMBER,
    "rows?": ROWS.or_null(),
    "replay?": MAPPING.or_null(),
    "sampling?": MAPPING,
    "collector/env_steps|rows": COUNT,
    "collector/generator?": GENERATOR,
    "collector/actors?/[]/generator": GENERATOR,
    "collector/statistics/episodes": COUNT,
    "collector/statistics/running_return": FLOATS,
    "collector/statistics/running_length": INTEGERS,
    "collector/statistics/returns|lengths|successes/[]": NUMBER,
    "collector/statistics/reports_success?": FLAG.or_null(),
    "collector/statistics/parameters?": MAPPING,
    "collector/statistics/parameters?/*/[]": NUMBER,
    "collector/episodes?/obs|memory": ANYTHING,
    "collector/episodes?/envs": MAPPING,
    "collector/episodes?/start": FLAGS,
    "collector/episodes?/begin_anew?": FLAG,
    "collector/episodes?/exploration?/steps": COUNT,
    "collector/episodes?/exploration?/draws/[]": MATRICES,
    "collector/episodes?/envs/opponent?": MAPPING,
    **below("collector/episodes?/envs/opponent?", OPPONENT),
}
"""State of an algorithm's experience."""
GUARD: Rules = {
    "bad_updates/*": COUNT,
    "replaced|skipped|restored|bad_steps|bad_iterations": COUNT,
    "is_bad_iteration": FLAG,
}
LEARNER: Rules = {
    **below("guard", GUARD),
    "beside/[]": MAPPING,
    "learning|noise": GENERATOR,
}
RANK: Rules = {
    "num_envs": POSITIVE,
    "log/logged_env_steps": COUNT,
    "log/elapsed": NUMBER,
    "random/torch": GENERATOR,
    "random/cuda/[]": GENERATOR,
    "random/python": Kind("a state of random", is_python_generator),
    "random/numpy": Kind("a state of numpy.random", is_numpy_generator),
}

ALONE = {**RANK, **below("data", DATA), **LEARNER}
"""State of a single algorithm on a rank."""
OPEN_ITERATION: Rules = {
    "generator": GENERATOR,
    "actions/[]/action|memory": ANYTHING,
    "steps/[]/obs|final_obs|mask|final_mask": ANYTHING,
    "steps/[]/reward": FLOATS,
    "steps/[]/terminated|truncated|valid|episode_start": FLAGS,
    "steps/[]/ended": ROWS,
    "steps/[]/info": MAPPING,
}
"""The steps of an iteration that was incomplete when it was saved."""
WORLD: Rules = {
    "num_copies": POSITIVE,
    "settings": TEXT,
    "lengths": INTEGERS,
    "states": LIST.or_null(),
    "sides/*/obs|mask": ANYTHING,
    "sides/*/present": FLAGS,
}
"""Copies of a multi-agent environment."""
SHARED = {
    **RANK,
    **below("data/behaviors/*", DATA),
    "data/behaviors/*/collector/open_iteration": MAPPING.or_null(),
    **below("data/behaviors/*/collector/open_iteration?", OPEN_ITERATION),
    **below("data/collector/world", WORLD),
    "data/turns?/learner": TEXT,
    "data/turns?/began_at": COUNT,
    "data/turns?/begins": FLAG,
    "data/turns?/returns/*": FLOATS,
    "data/turns?/start/*": FLAGS,
    **below("data/turns?/opponents/*", OPPONENT),
    "data/collector/steps": COUNT,
    "data/collector/begin_anew?": FLAG,
    **below("behaviors/*", LEARNER),
    **below("frozen/*/guard", GUARD),
    "behaviors/*/began_at": COUNT,
    "behaviors/*/progress": NUMBER,
    "newest/*/*": Kind("a number", lambda value: isinstance(value, float | int)),
}
"""State of several behaviors on a rank."""
PAST_SELVES: Rules = {
    "elo": RATING,
    "elos": RATINGS,
    "scores": SCORES,
    "games": GAMES,
    "opponents?/[]": TEXT,
    "taken_at|taken": COUNT,
    "snapshots": SNAPSHOTS,
    "snapshot_files?/[]/name|sha256": TEXT,
    "snapshot_files?/[]/size": COUNT,
    "snapshot_files?/[]/numbers/[]": COUNT,
}
"""State of the callback `SelfPlay`, whose key ends with the name of a behavior if there are several."""
RUN: Rules = {
    "pytorch-lightning_version": LIGHTNING,
    "epoch?|global_step?": COUNT,
    "lr_schedulers": LIST,
    **{f"optimizer_states/[]/{path}": kind for path, kind in OPTIMIZER.items()},
    "loops?/fit_loop/*/_batches_that_stepped?": COUNT,
    "loops?/fit_loop/*epoch_progress|*batch_progress|*scheduler_progress|*step_progress/total|current": PROGRESS,
    "loops?/fit_loop/*optim_progress/optimizer/step|zero_grad/total|current": PROGRESS,
    "loops?/fit_loop/*batch_progress/is_last_batch": FLAG,
    "callbacks?": MAPPING,
    "callbacks?/*/reports_success?": FLAG,
    "callbacks?/BestModel?|RecordDemonstrations?|StopOnEvaluation?/best": MEASURE,
    "callbacks?/MultiEvaluator?|RolloutEvaluator?/evaluated_at": MEASURE,
    "callbacks?/*/played?|last_played?": COUNT,
    "callbacks?/StopOnEvaluation?/since_best": MEASURE,
    "callbacks?/Curriculum?/lessons/*": COUNT,
    "callbacks?/Curriculum?/smoothed/*": NUMBER,
    "callbacks?/Curriculum?/windows/*/[]": NUMBER,
    "callbacks?/Curriculum?/unreported?": COUNT.or_null(),
    **below("callbacks?/SelfPlay?|SelfPlay[!0-9A-Z_a-z]*", PAST_SELVES),
    "lightning_rl/ranks?": LIST,
}
"""What a run that can be resumed contains in addition."""


def first_error(tree: object, rules: Rules) -> str | None:
    """Return one line about the first place in plain data that breaks a rule; None if none does."""
    return next((error for path, kind in rules.items() for error in _errors(tree, path.split("/"), kind, "")), None)


def _errors(value: object, path: Sequence[str], kind: Kind, place: str) -> Iterator[str]:
    here = place if len(place) <= 48 else f"…{place[-47:]}"
    children: list[tuple[object, object]] = []
    if not path:
        is_allowed = False
        with suppress(Exception):
            is_allowed = kind.allows(value)
        if not is_allowed:
            yield f"{here} must be {kind.name}, got {reprlib.repr(value).splitlines()[0][:20]}"
    elif path[0] == "[]" and isinstance(value, list):
        children += enumerate(value)
    elif path[0] == "[]" or not isinstance(value, dict) or ("*" in path[0] and not all(isinstance(key, str) for key in value)):
        yield f"{here or 'its content'} must be a {'list' if path[0] == '[]' else 'mapping of names'}"
    else:
        for pattern in path[0].split("|"):
            name = pattern.removesuffix("?")
            found = [(key, value[key]) for key in value if isinstance(key, str) and fnmatchcase(key.partition("{")[0], name)]
            if not found and pattern == name and "*" not in name:
                yield f"{here}/{name} is missing".removeprefix("/")
            children += [(key, child) for key, child in found if child is not None or pattern == name or len(path) == 1]
    for key, child in children:
        yield from _errors(child, path[1:], kind, f"{place}/{key}".removeprefix("/"))


def check_content(checkpoint: object, path: str | Path) -> None:
    """Raise `SettingError` unless a file contains a checkpoint of this package, in a format that this version reads."""
    match checkpoint:
        case {"lightning_rl": {"format_version": int(version)}} if version > FORMAT_VERSION:
            raise SettingError(f"ckpt_path {shown(path)} has format {version}, not {FORMAT_VERSION}: install a newer lightning_rl")
    if error := first_error(checkpoint, CONTENT):
        raise SettingError(f"ckpt_path {shown(path)} is not a checkpoint of lightning_rl: {error}")


def check_run(
    checkpoint: Checkpoint, path: str | Path, optimizers: Sequence[Optimizer] | None = None, behaviors: Sequence[str] = ()
) -> None:
    """Raise `SettingError` unless a run can resume from a checkpoint that `check_content` accepts.

    `optimizers`: those of the run, if they are known.  `behaviors`: the names of those that learn in the run, if it has several.
    """
    names = set(checkpoint["lightning_rl"].get("behaviors", ()))
    if names != set(behaviors):
        theirs, ours = (", ".join(map(str, each)) or "none" for each in (names, behaviors))
        found = f"its behaviors are {theirs}, and those of the run {ours}"
        raise SettingError(f"ckpt_path {shown(path)} cannot be continued: {found}")
    rules = {**RUN, **below("lightning_rl/ranks?/[]", SHARED if behaviors else ALONE)}
    if error := first_error(checkpoint, rules) or next(_contradictions(checkpoint, optimizers), None):
        raise SettingError(f"ckpt_path {shown(path)} cannot be continued: {error}")


def _contradictions(checkpoint: Checkpoint, optimizers: Sequence[Optimizer] | None) -> Iterator[str]:
    """Yield what is inconsistent in a checkpoint whose values are all allowed."""
    states = checkpoint["optimizer_states"]
    if optimizers is not None and len(states) != len(optimizers):
        yield f"it has {len(states)} optimizers, the model has {len(optimizers)}"
    for number, optimizer in enumerate(optimizers or ()):
        yield from (f"optimizer {number}: {error}" for error in _optimizer_differences(states[number], optimizer))
    run = checkpoint["lightning_rl"]
    ranks, behaviors = run.get("ranks", []), run.get("behaviors", {})
    if not behaviors:
        yield from _count_differences(run, [(rank["num_envs"], rank["data"]["collector"]) for rank in ranks])
    for number, rank in enumerate(ranks if behaviors else ()):
        yield from (f"rank {number}: {error}" for error in _world_differences(rank, behaviors))
    for name, own in behaviors.items():
        rows = [(rank["num_envs"] * len(own["agents"]), rank["data"]["behaviors"][name]["collector"]) for rank in ranks]
        yield from (f"behavior {name}: {error}" for error in _count_differences(own, rows))
    for name, state in checkpoint.get("callbacks", {}).items():
        if name.partition("{")[0] == "Curriculum" and not state["lessons"].keys() == state["smoothed"].keys() == state["windows"].keys():
            yield "its Curriculum names different parameters"


def _count_differences(counts: State, collectors: Sequence[tuple[int, State]]) -> Iterator[str]:
    """Yield what is inconsistent between the counts of an algorithm and the number of rows and the collector of each rank."""
    for number, (rows, collector) in enumerate(collectors):
        vectors = [collector["statistics"]["running_return"], collector["statistics"]["running_length"]]
        vectors += [collector["episodes"]["start"]] if collector.get("episodes") else []
        done = collector.get("open_iteration") or {"actions": [], "steps": []}
        for step in done["steps"]:
            vectors += [step[name] for name in ("reward", "terminated", "truncated", "valid", "episode_start")]
        if any(len(vector) != rows for vector in vectors):
            yield f"rank {number} does not have one number for each of {rows} environments"
        elif any(not torch.equal(step["ended"], (step["terminated"] | step["truncated"]).nonzero().flatten()) for step in done["steps"]):
            yield f"rank {number} has contradictory ends of episodes"
        if len(done["actions"]) != len(done["steps"]):
            yield f"rank {number} has {len(done['actions'])} actions for {len(done['steps'])} steps"
    steps = [step for _, collector in collectors for step in (collector.get("open_iteration") or {"steps": []})["steps"]]
    found = {
        "env_steps": sum(collector["env_steps"] for _, collector in collectors) + sum(int(step["valid"].sum()) for step in steps),
        "episodes": sum(collector["statistics"]["episodes"] for _, collector in collectors) + sum(len(step["ended"]) for step in steps),
    }
    for name, number in found.items():
        if collectors and number < counts[name]:
            yield f"all ranks together have fewer {name} than the run"


def _world_differences(rank: State, behaviors: State) -> Iterator[str]:
    """Yield what is inconsistent between a rank's world and its behaviors."""
    world, copies = rank["data"]["collector"]["world"], rank["num_envs"]
    for names in (rank["data"]["behaviors"], world["sides"], {**rank["behaviors"], **rank["frozen"]}):
        if names.keys() != behaviors.keys():
            yield f"its behaviors are {', '.join(map(str, names)) or 'none'}"
    per_copy = [world["lengths"], *([] if world["states"] is None else [world["states"]])]
    if world["num_copies"] != copies or any(len(each) != copies for each in per_copy):
        yield f"its world does not have {copies} copies"
    if any(len(side["present"]) != copies * len(behaviors[name]["agents"]) for name, side in world["sides"].items()):
        yield "its world has different agents"


def check_optimizer(stored: State, own: Optimizer) -> None:
    """Raise `SettingError` unless an optimizer can load a state: torch's kernels trust its shapes, and may write out of bounds."""
    if error := first_error(stored, OPTIMIZER) or next(_optimizer_differences(stored, own), None):
        raise SettingError(error)


def _optimizer_differences(stored: State, own: Optimizer) -> Iterator[str]:
    """Yield why an optimizer cannot load a state that `OPTIMIZER` allows."""
    groups = own.state_dict()["param_groups"]
    if [group["params"] for group in stored["param_groups"]] != [group["params"] for group in groups]:
        yield "its parameters are different"
        return
    parameters = {
        number: p
        for group, its in zip(groups, own.param_groups, strict=True)
        for number, p in zip(group["params"], its["params"], strict=True)
    }
    for there, group in zip(stored["param_groups"], groups, strict=True):
        for name, value in group.items():
            # flags of another version of torch, and what a scheduler adds, may be missing
            default = value if value is None or type(value) is bool or name == "initial_lr" else ...
            if name != "params" and not _is_like(there.get(name, default), value):
                yield f"its {name[:30]} is wrong"
        if "momentum" in group and (there["momentum"] > 0) != (group["momentum"] > 0):
            yield "its momentum is different"
    required = next((names for kind, names in REQUIRED_STATE if isinstance(own, kind)), ())
    for number, state in stored["state"].items():
        if number not in parameters or any(name not in state for name in required):
            yield "its state lacks what a step needs"
        elif wrong := [name for name in ("step", *MOMENTS) if name in state and not _fits(name, state[name], parameters[number])]:
            yield f"its {wrong[0]} is wrong"


def _is_like(value: object, own: object) -> bool:
    """Return whether a setting of an optimizer is of the same kind."""
    if own is None or type(own) is bool:
        return value is own or (own is None and type(value) is bool)
    if isinstance(own, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(own) and all(map(_is_like, value, own))
    if isinstance(own, int | float) and is_number(own):
        return isinstance(value, int | float) and is_number(value) and (own < 0 or value >= 0)
    return type(value) is type(own)


def _fits(name: str, value: object, parameter: Tensor) -> bool:
    """Return whether optimizer state has the memory layout of its parameter; a tensor that repeats an element has only its shape."""
    if name == "step":
        number = value.item() if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point() else value
        return isinstance(number, int | float) and is_number(number) and number >= 0
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        return False
    return (value.is_contiguous() or value.stride() == parameter.stride()) and ("sq" not in name or bool((value >= 0).all()))
