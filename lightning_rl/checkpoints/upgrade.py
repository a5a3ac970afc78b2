"""Convert state that earlier versions wrote to today's form."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.types import State


def split_vectors(stored: State, own: Optimizer) -> State:
    """Return an optimizer's state with one state for each parameter.

    Version 0.1.0 kept one vector `[P]` for all parameters of an optimizer's first group. Any other state is returned as it is.
    """
    try:
        (first, *others), states = stored["param_groups"], stored["state"]
        group, parameters = own.param_groups[0], own.param_groups[0]["params"]
        vectors = {name: value for name, value in states.get(0, {}).items() if name != "step"}
        total = sum(parameter.numel() for parameter in parameters)
        if first["params"] != [0] or not all(isinstance(value, Tensor) and value.shape == (total,) for value in vectors.values()):
            return stored
    except (TypeError, ValueError, KeyError, AttributeError):  # it is reported where it is checked
        return stored
    shift = len(parameters) - 1
    sizes = [parameter.numel() for parameter in parameters]
    split: dict[int, Any] = {number + shift: state for number, state in states.items() if number != 0}
    for number, parameter in enumerate(parameters) if 0 in states else ():
        split[number] = {name: value.split(sizes)[number].view_as(parameter).clone() for name, value in vectors.items()}
        if "step" in states[0]:
            split[number]["step"] = states[0]["step"].clone()
    implementation = {name: group[name] for name in ("foreach", "fused") if name in group}
    groups = [{**first, **implementation, "params": list(range(len(parameters)))}]
    groups += [{**other, "params": [number + shift for number in other["params"]]} for other in others]
    return {**stored, "state": split, "param_groups": groups}
