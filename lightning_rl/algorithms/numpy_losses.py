"""Losses of small networks in numpy together with their gradients, for `compile: auto`.

A loss is written down as for `compile: true` (`traced.py`), and its graph computed in numpy (`networks/numpy_graph.py`), which takes no
compiler and a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.algorithms.compiled import CompiledLoss, shapes_of
from lightning_rl.algorithms.reads import Reads
from lightning_rl.algorithms.run_log import Metric
from lightning_rl.algorithms.traced import COUNTS, Traced, tensors_of
from lightning_rl.networks.flat import FlatParameters
from lightning_rl.networks.numpy_graph import NumpyGraph
from lightning_rl.networks.numpy_mlp import MAX_WIDTH, has_hooks, is_watched

UPDATES_BEFORE = 100
"""How many updates of a run are made as they are written: short runs are not worth the trace."""
MOST_BYTES = 2**24
"""Of all arrays of a loss: larger ones leave the processor's cache, where torch is as fast."""
MOST_PROGRAMS = 16
"""Of one loss: one that needs more is computed by torch."""
OURS = ("lightning_rl.", "torch.nn.")


def numpy_losses(algorithm: Any, names: Sequence[str]) -> dict[str, NumpyLoss]:
    """Those of the losses that numpy computes faster, by their names; only of this package's algorithms and networks, whose code is known
    to do nothing else."""
    modules = [module for module in algorithm.modules() if module is not algorithm]
    known = all(type(module).__module__.startswith(OURS) for module in modules)
    if not known or algorithm.memory is not None or algorithm.trainer.precision != "32-true" or has_hooks(algorithm):
        return {}
    pairs = zip(names, algorithm.raw_optimizers(), strict=False)
    chosen = [(name, optimizer) for name, optimizer in pairs if _is_ours(getattr(algorithm, name, None)) and _is_small(optimizer)]
    return {name: NumpyLoss(algorithm, getattr(algorithm, name), optimizer) for name, optimizer in chosen}


def _is_ours(loss: Any) -> bool:
    return loss is not None and loss.__module__.startswith(OURS)


def _is_small(optimizer: Optimizer) -> bool:
    vector = optimizer.param_groups[0]["params"][0]
    if not isinstance(vector, FlatParameters) or vector.device.type != "cpu" or vector.dtype != torch.float32:
        return False
    return all(part.dim() <= 3 and max((0, *part.shape[-2:])) < MAX_WIDTH for part in vector.parts)


class NumpyLoss(CompiledLoss):
    """A loss that is computed in numpy once a run is under way, if numpy can, and as it is written otherwise.

    What it reads from attributes may change: then it is written down anew. The arguments are those of `CompiledLoss`.
    """

    made = 0
    """How many programs were."""

    def __call__(self, *batch: Any) -> Any:
        if self.algorithm.updates < UPDATES_BEFORE:
            return self.loss(*batch)
        tensors, shapes = tensors_of(batch), shapes_of(batch)
        program = self.programs.get(shapes)
        if shapes not in self.programs or (program is not None and not program.holds()):
            program = self.programs[shapes] = self._program(batch)
        return self.loss(*batch) if program is None else self.play(program.seen, batch, *program(tensors))

    def _program(self, batch: Any) -> NumpyProgram | None:
        self.made += 1
        if self.made > MOST_PROGRAMS or has_hooks(self.algorithm):
            return None
        try:
            program = NumpyProgram(Traced(self.algorithm, self.loss, self.vector, batch))
        except Exception:  # torch and numpy have many ways to say that something cannot be done like this; autograd can
            return None
        return program if program.graph.nbytes <= MOST_BYTES else None


class NumpyProgram:
    """A loss and its gradient as a graph in numpy, for batches of one shape."""

    def __init__(self, traced: Traced) -> None:
        self.reads = Reads({*COUNTS, "log_rows", "finite", "learned"})
        with self.reads.noted():
            module, used = traced.written_down()
        held = traced.held
        lie = {n: traced.examples[k].numpy() for n, k in enumerate(used) if k == 0 or k in held}
        self.held = [(*held[k], traced.examples[k].data_ptr()) for k in used if k in held]
        self.vector, self.place = traced.vector, traced.vector.data_ptr()
        self.seen = traced.seen
        self.graph = NumpyGraph(module, lie, first=2)
        self.copied = [(self.graph.inputs[n], traced.sources[k]) for n, k in enumerate(used) if n not in lie]
        self.loss = self.graph.outputs[1]
        self.gradient, _, *self.outputs = map(torch.from_numpy, self.graph.outputs)
        self.others = [value if known else None for value, known in zip(self.outputs, self.graph.at_once[2:], strict=True)]
        self.runs = self.others_of = 0

    def holds(self) -> bool:
        """Whether all that it was made from is as it was."""
        lie = all(kept.get(name) is not None and kept[name].data_ptr() == place for kept, name, place in self.held)
        return lie and self.vector.data_ptr() == self.place and self.reads.hold() and not any(map(is_watched, self.vector.parts))

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Sequence[Metric]]:
        """The gradient, the loss, and what else there is, for the tensors of a batch; all but the loss until the next call."""
        for array, source in self.copied:
            np.copyto(array, source(tensors).detach().numpy())
        self.graph()
        self.runs += 1
        others = [value if value is not None else partial(self._other, k, self.runs) for k, value in enumerate(self.others)]
        return self.gradient, torch.from_numpy(self.loss.copy()), others

    def _other(self, k: int, run: int) -> Tensor:
        if run != self.runs:
            raise RuntimeError("what a loss returns beside its value is to be asked before the next one is computed")
        if self.others_of != run:
            self.graph.compute_others()
            self.others_of = run
        return self.outputs[k].clone()
