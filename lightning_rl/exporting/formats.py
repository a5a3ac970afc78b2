"""A policy as one traceable graph, and the file formats to which it can be exported."""

import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rl.distributions.distribution import cast
from lightning_rl.networks.acting import PolicyNetwork, VisiblePolicy
from lightning_rl.spaces import MASK, Spaces, allocate, observation_leaves, samples
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch

METADATA = "lightning_rl"
"""The key under which a file contains its description."""


class Port(NamedTuple):
    """An input or output `[N, *shape]`.  role: observation, action_mask, memory or action.  dtype: numpy's name of it."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str


class PolicyGraph(nn.Module):
    """`Policy.act`, deterministic, from tensors `[N, ...]` to tensors `[N, ...]`.

    Inputs are the leaves of a raw observation in the environment's own dtypes, a mask `[N, M]` if the environment has masks, and the leaves
    of the memory, which are zeros in a row that begins an episode. Outputs are the leaves of the environment's action, and those of the
    memory for the next step. `inputs` and `outputs` are the ports in order.
    """

    def __init__(self, network: PolicyNetwork | VisiblePolicy, spaces: Spaces) -> None:
        super().__init__()
        self.network, self.spaces, self.masked = network, spaces, spaces.masked
        self.stored, self.memory = allocate(spaces.observation, 1), tree_to_numpy(network.initial_memory(1))
        leaves = [leaf.name for leaf in observation_leaves(spaces.observation)]
        states = [f"memory.{i}" for i in range(len(tree_leaves(self.memory)))]
        actions = [f"action.{name}" for name in network.distribution.names] or ["action"]
        names = unique([*leaves, *[MASK] * spaces.masked, *states, *actions, *(f"next_{state}" for state in states)])
        roles = [*["observation"] * len(leaves), *[MASK] * spaces.masked, *["memory"] * len(states)]
        roles += ["action"] * len(actions) + ["memory"] * len(states)
        inputs = self.example(1)
        arrays = [*inputs, *tree_to_numpy(self(*tree_to_torch(inputs)))]
        ports = [Port(name, role, array.shape[1:], array.dtype.name) for name, role, array in zip(names, roles, arrays, strict=True)]
        self.inputs, self.outputs = ports[: len(inputs)], ports[len(inputs) :]

    def example(self, num: int) -> tuple[np.ndarray, ...]:
        """Draw inputs: `num` random observations that begin episodes, with all actions legal."""
        mask, memory = self.spaces.masks(num), self.network.initial_memory(num)
        return tuple(tree_leaves((samples(self.spaces.observation, num), mask, tree_to_numpy(memory))))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from the inputs, in the order of the ports."""
        rest = iter(inputs)
        obs = tree_map(lambda leaf: cast(next(rest), leaf.dtype), self.stored)
        mask: Tree = next(rest) if self.masked else ()
        memory = tree_map(lambda _: next(rest), self.memory)
        action, memory = self.network.sample(obs, memory, None, mask, deterministic=True)
        distribution = self.network.distribution
        return tuple(leaf.detach() for leaf in (*distribution.flat(distribution.to_env(action)), *tree_leaves(memory)))

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names of the inputs and of the outputs."""
        return [port.name for port in self.inputs], [port.name for port in self.outputs]

    def any_batch_size(self) -> dict[str, tuple[dict[int, Dim], ...]]:
        """Return the dynamic shapes of the inputs: the first dimension is free."""
        batch = Dim("batch")
        return {"inputs": tuple({0: batch} for _ in self.inputs)}

    def trace(self) -> ExportedProgram:
        """Trace the operations, without their locations in source files."""
        with quiet():
            program = torch.export.export(self, tree_to_torch(self.example(2)), dynamic_shapes=self.any_batch_size())
        for module in program.graph_module.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                node.meta.pop("stack_trace", None)
        return program


def unique(names: Iterable[str]) -> list[str]:
    """Add numbers to repeated names: a, a_2, a_3."""
    found: list[str] = []
    for name in names:
        numbered, number = name, 2
        while numbered in found:
            numbered, number = f"{name}_{number}", number + 1
        found.append(numbered)
    return found


Run = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
"""A function from the inputs of a graph to its outputs."""


class Onnx:
    """An ONNX model with a dynamic batch size, for onnxruntime and others."""

    suffix = ".onnx"
    packages: tuple[str, ...] = ("onnx", "onnxscript", "onnxruntime")
    graph = PolicyGraph

    def write(self, graph: PolicyGraph, metadata: str) -> bytes:
        """Return the content of a file."""
        inputs, outputs = graph.names()
        program = graph.trace()
        with quiet():
            shapes = graph.any_batch_size()
            exported: Any = torch.onnx.export(
                program, (), dynamo=True, verbose=False, input_names=inputs, output_names=outputs, dynamic_shapes=shapes
            )
        model = exported.model
        inside = [value for node in model.graph.all_nodes() for value in node.outputs if not value.is_graph_output()]
        for value in (*inside, *model.graph.initializers.values()):
            if value.name in inputs + outputs:  # an observation may have any name
                value.name += "/"
        for node in model.graph.all_nodes():
            node.metadata_props.clear()  # locations in source files
        model.metadata_props[METADATA] = metadata
        return exported.model_proto.SerializeToString()

    def read(self, data: bytes, graph: PolicyGraph) -> Run:
        """Load the content of a file that was written from the graph."""
        inputs, outputs = graph.names()
        session = open_session(data)
        return lambda arrays: session.run(outputs, dict(zip(inputs, arrays, strict=True)))


class Torch:
    """A program of `torch.export` with a dynamic batch size: `torch.export.load(file).module()(*inputs)`."""

    suffix = ".pt2"
    packages: tuple[str, ...] = ()
    graph = PolicyGraph

    def write(self, graph: PolicyGraph, metadata: str) -> bytes:
        file = io.BytesIO()
        with quiet():
            torch.export.save(graph.trace(), file, extra_files={METADATA: metadata})
        return file.getvalue()

    def read(self, data: bytes, graph: PolicyGraph) -> Run:
        with quiet():
            return on_arrays(torch.export.load(io.BytesIO(data)).module())


class Safetensors:
    """Only the weights, by their names in the network's `state_dict`."""

    suffix = ".safetensors"
    packages: tuple[str, ...] = ("safetensors",)
    graph = PolicyGraph

    def write(self, graph: PolicyGraph, metadata: str) -> bytes:
        # cloned, because safetensors rejects shared tensors
        weights = {name: weight.detach().clone().contiguous() for name, weight in graph.network.state_dict().items()}
        return save(weights, {METADATA: metadata})

    def read(self, data: bytes, graph: PolicyGraph) -> Run:
        other = copy.deepcopy(graph)
        for weight in other.state_dict().values():
            weight.zero_()  # so that the check finds weights that the file lacks
        other.network.load_state_dict(load(data))
        return on_arrays(other)


def open_session(data: bytes) -> Any:
    """Open an ONNX model in onnxruntime, on one thread of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence logs, warnings and stderr of exporters."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def on_arrays(module: Callable[..., Tree]) -> Run:
    """Make a module take and return arrays."""

    @torch.no_grad()
    def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        return tree_to_numpy(module(*tree_to_torch(tuple(arrays))))

    return run
