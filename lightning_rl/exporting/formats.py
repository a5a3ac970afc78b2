"""Exported policies: one traceable function, and the files it can be written to."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rl.distributions.distribution import cast
from lightning_rl.errors import missing_extra
from lightning_rl.spaces import MASK, Spaces, allocate, observation_leaves, samples
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch


class Port(NamedTuple):
    """An input or output `[N, *shape]`.  role: observation, action_mask, memory or action.  dtype: numpy's name of it."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str


class PolicyGraph(nn.Module):
    """`Policy.act`, deterministic, from tensors `[N, ...]` to tensors `[N, ...]`.

    Inputs are the leaves of a raw observation in the environment's own dtypes, a mask `[N, M]` where the environment rules out actions, and
    the leaves of the memory, zeros in a row that begins an episode. Outputs are the leaves of the environment's action, and those of the
    memory for the next step.

    Args:
        network: of an algorithm, with its normalizer inside.
        spaces: of the environment it was trained on.

    Attributes: inputs and outputs, the ports in order.
    """

    def __init__(self, network: Any, spaces: Spaces) -> None:
        super().__init__()
        self.network, self.masked = network.eval(), spaces.masked
        self.stored, self.memory = allocate(spaces.observation, 1), tree_to_numpy(network.initial_memory(1))
        leaves = [leaf.name for leaf in observation_leaves(spaces.observation)]
        states = [f"memory.{i}" for i in range(len(tree_leaves(self.memory)))]
        actions = [f"action.{name}" for name in network.distribution.names] or ["action"]
        roles = ["observation"] * len(leaves) + [MASK] * spaces.masked + ["memory"] * len(states)
        names = unique([*leaves, *[MASK] * spaces.masked, *states, *actions, *(f"next_{state}" for state in states)])
        given = self.example(spaces, 1)
        taken = tree_to_numpy(self(*tree_to_torch(given)))
        self.inputs = _ports(names, roles, given)
        self.outputs = _ports(names[len(given) :], ["action"] * len(actions) + ["memory"] * len(states), taken)

    def example(self, spaces: Spaces, num: int) -> tuple[np.ndarray, ...]:
        """Inputs at `num` random observations which begin episodes, all actions legal."""
        mask, memory = spaces.masks(num), self.network.initial_memory(num)
        return tuple(tree_leaves((samples(spaces.observation, num), mask, tree_to_numpy(memory))))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        rest = iter(inputs)
        obs = tree_map(lambda leaf: cast(next(rest), leaf.dtype), self.stored)
        mask: Tree = next(rest) if self.masked else ()
        memory = tree_map(lambda _: next(rest), self.memory)
        action, memory = self.network.sample(obs, memory, None, mask, deterministic=True)
        distribution = self.network.distribution
        return tuple(leaf.detach() for leaf in (*distribution.flat(distribution.to_env(action)), *tree_leaves(memory)))


def unique(names: Iterable[str]) -> list[str]:
    """Names of which none comes twice: a later one gets a number."""
    taken: list[str] = []
    for name in names:
        found = name
        number = 2
        while found in taken:
            found, number = f"{name}_{number}", number + 1
        taken.append(found)
    return taken


def _ports(names: list[str], roles: list[str], arrays: Iterable[np.ndarray]) -> list[Port]:
    leaves: Iterator[Any] = zip(names, roles, arrays, strict=False)
    return [Port(name, role, array.shape[1:], array.dtype.name) for name, role, array in leaves]


Run = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""From the inputs of a graph to its outputs."""

METADATA = "lightning_rl"
"""Under this name a file holds what is said of it beside it, too."""


class Format(Protocol):
    """A kind of file: its suffix, and the packages it needs."""

    suffix: str
    packages: tuple[str, ...]

    def write(self, graph: PolicyGraph, spaces: Spaces, metadata: str) -> bytes:
        """The file of a graph."""

    def read(self, data: bytes, graph: PolicyGraph) -> Run:
        """What a file of that graph does."""


class Onnx:
    """A model of ONNX with a free number of rows, for onnxruntime and others."""

    suffix = ".onnx"
    packages: tuple[str, ...] = ("onnx", "onnxscript", "onnxruntime")

    def write(self, graph: PolicyGraph, spaces: Spaces, metadata: str) -> bytes:
        names = port_names(graph)
        program = trace(graph, spaces)
        with quiet():
            exported: Any = torch.onnx.export(
                program, (), dynamo=True, verbose=False, input_names=names[0], output_names=names[1], dynamic_shapes=any_rows(graph)
            )
        inside = [value for node in exported.model.graph.all_nodes() for value in node.outputs if not value.is_graph_output()]
        for value in (*inside, *exported.model.graph.initializers.values()):
            if value.name in names[0] + names[1]:  # an observation may have any name
                value.name += "/"
        for node in exported.model.graph.all_nodes():
            node.metadata_props.clear()  # where in which file each came from
        exported.model.metadata_props[METADATA] = metadata
        return exported.model_proto.SerializeToString()

    def read(self, data: bytes, graph: PolicyGraph) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        names = port_names(graph)
        return lambda arrays: session.run(names[1], dict(zip(names[0], arrays, strict=True)))


class Torch:
    """A program of `torch.export` with a free number of rows: `torch.export.load(file).module()(*inputs)`."""

    suffix = ".pt2"
    packages: tuple[str, ...] = ()

    def write(self, graph: PolicyGraph, spaces: Spaces, metadata: str) -> bytes:
        file = io.BytesIO()
        with quiet():
            torch.export.save(trace(graph, spaces), file, extra_files={METADATA: metadata})
        return file.getvalue()

    def read(self, data: bytes, graph: PolicyGraph) -> Run:
        with quiet():
            return _call(torch.export.load(io.BytesIO(data)).module())


class Safetensors:
    """The weights alone, by their names in the network's `state_dict`."""

    suffix = ".safetensors"
    packages: tuple[str, ...] = ("safetensors",)

    def write(self, graph: PolicyGraph, spaces: Spaces, metadata: str) -> bytes:
        from safetensors.torch import save

        weights = {name: weight.detach().clone().contiguous() for name, weight in graph.network.state_dict().items()}  # shared ones too
        return save(weights, {METADATA: metadata})

    def read(self, data: bytes, graph: PolicyGraph) -> Run:
        from safetensors.torch import load

        other = copy.deepcopy(graph)
        for weight in other.state_dict().values():
            weight.zero_()  # whatever the file lacks
        other.network.load_state_dict(load(data))
        return _call(other)


FORMATS: dict[str, Format] = {"onnx": Onnx(), "torch": Torch(), "safetensors": Safetensors()}


def check_packages(name: str) -> None:
    """Raise `SettingError` unless the packages of a format are installed."""
    for package in FORMATS[name].packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise missing_extra(package, "export", f"export to {name}") from error


def trace(graph: PolicyGraph, spaces: Spaces) -> ExportedProgram:
    """The operations of a graph, which say nothing of the machine they were traced on."""
    with quiet():
        program = torch.export.export(graph, tree_to_torch(graph.example(spaces, 2)), dynamic_shapes=any_rows(graph))
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:
            node.meta.pop("stack_trace", None)
    return program


def port_names(graph: PolicyGraph) -> tuple[list[str], list[str]]:
    """Those of the inputs, and those of the outputs."""
    return [port.name for port in graph.inputs], [port.name for port in graph.outputs]


def any_rows(graph: PolicyGraph) -> dict[str, Any]:
    """The shapes of a graph's inputs, the first dimension free."""
    batch = Dim("batch")
    return {"inputs": tuple({0: batch} for _ in graph.inputs)}


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters say beside what they raise."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _call(module: Callable[..., Any]) -> Run:
    @torch.no_grad()
    def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return tree_to_numpy(module(*tree_to_torch(tuple(arrays))))

    return run
