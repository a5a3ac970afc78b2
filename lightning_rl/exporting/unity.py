"""Policies as ONNX files that Unity runs: version 3 of the models of ML-Agents, and what Unity's loader checks of a file.

Inputs are float32: `obs_0`, `obs_1`, … in the order of the observation space, images as `[N, C, H, W]` from 0 to 1; `action_masks`
`[N, M]`, 1 for legal choices, if there are choices; and `recurrent_in` `[N, 1, size]`, zeros at the start of an episode, if there is a
memory. Outputs are sampled and deterministic actions, continuous ones in [-1, 1] and choices as int64 from 0 for each branch; the next
memory; and constants that describe them.
"""

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from lightning_rl.distributions import (
    Bernoulli,
    DiagonalGaussian,
    Distribution,
    EpsilonGreedy,
    NoisyAction,
    SquashedGaussian,
    TanhGaussian,
)
from lightning_rl.errors import SettingError
from lightning_rl.exporting.formats import METADATA, Port, Run, open_session, quiet
from lightning_rl.networks.acting import PolicyNetwork, VisiblePolicy
from lightning_rl.spaces import Leaf, Spaces, allocate, limits, observation_leaves, samples
from lightning_rl.types import Tree, tree_leaves, tree_map, tree_to_numpy, tree_to_torch

VERSION = 3
OPSET, OPSETS = 9, range(7, 16)
"""The opset that is written, which even Barracuda reads, and those that Sentis reads."""
OPERATORS = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh AveragePool BatchNormalization Cast Ceil Clip Compress Concat Constant
ConstantOfShape Conv ConvTranspose Cos Cosh DepthToSpace Div Dropout Elu Equal Erf Exp Expand Flatten Floor Gather Gemm GlobalAveragePool
GlobalMaxPool Greater HardSigmoid Hardmax Identity InstanceNormalization IsNaN LRN LSTM LeakyRelu Less Log LogSoftmax MatMul Max MaxPool
Mean Min Mul Multinomial Neg NonZero Not OneHot Or PRelu Pad Pow RandomNormal RandomNormalLike RandomUniform RandomUniformLike Reciprocal
ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Scatter
Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK
Transpose Unsqueeze Upsample Where Xor
"""
"""The operators of opset 9 that the manuals of Sentis 2.1 and of Inference Engine 2 list as supported."""
MASKED = 1e8
"""Subtracted from the logits of illegal choices, as ML-Agents does."""
DTYPES = {1: "float32", 7: "int64"}
"""Numbers of ONNX for the types of tensors."""
SHAPES = {"continuous_actions": "continuous_action_output_shape", "discrete_actions": "discrete_action_output_shape"}
"""The constants that describe the actions."""


class PolicyAlone(PolicyNetwork):
    """A policy without the memory of its critic, which matters only in training."""

    def __init__(self, network: PolicyNetwork | VisiblePolicy) -> None:
        super().__init__()
        self.network, self.memory, self.distribution = network, network.memory, network.distribution

    def policy(self, obs: Tree, memory: Tree, episode_start: Tensor | None, generator: Generator | None = None) -> tuple[Tensor, Tree]:
        x, memories = self.network.policy(obs, (memory, ()), episode_start, generator)
        return x, memories[0]


def without_critic(network: PolicyNetwork | VisiblePolicy) -> PolicyNetwork | VisiblePolicy:
    """Return a network whose memory is the policy's own; a user's network keeps all of its memory."""
    whole = network.network if isinstance(network, VisiblePolicy) else network
    perceptron = whole.perceptron()
    return network if perceptron is None or len(perceptron.memories) == 1 else PolicyAlone(network)


class Sensor:
    """One observation as a sensor of Unity gives it.

    Args:
        leaf: the observation.
        stored: an array of its shape, in the dtype that networks get.

    Raises:
        SettingError: Unity has no such sensor.
    """

    def __init__(self, leaf: Leaf, stored: np.ndarray) -> None:
        if leaf.kind == "one_hot":
            what = f"Discrete({leaf.sizes[0]})" if leaf.shape == () else f"MultiDiscrete({', '.join(map(str, leaf.sizes))})"
            raise SettingError(f"format unity: observation {leaf.name} is {what}; Unity's sensors give floats")
        if len(leaf.shape) > 3:
            raise SettingError(f"format unity: observation {leaf.name} has shape {leaf.shape}; Unity's sensors give at most 3 dimensions")
        self.leaf, self.is_float, self.is_image = leaf, stored.dtype.kind == "f", leaf.kind == "image"
        self.turns = self.is_image and leaf.channels_last
        self.scale = 1 / leaf.scale if self.is_image else 1.0
        shape = leaf.shape or (1,)
        self.shape = (shape[2], *shape[:2]) if self.turns else shape

    def read(self, x: Tensor) -> Tensor:
        """Turn what Unity gives, `[N, *shape]`, into the policy's observation; integers become int32, because Unity has no bytes."""
        x = x if self.scale == 1 else x * self.scale
        x = x if self.is_float else (x + 0.5).floor().int()
        return x.permute(0, 2, 3, 1) if self.turns else x if self.leaf.shape else x.squeeze(-1)

    def write(self, obs: np.ndarray) -> np.ndarray:
        """Turn a batch of the policy's observations into what Unity would give."""
        x = obs.reshape(len(obs), *(self.leaf.shape or (1,))).astype(np.float32) / np.float32(self.scale)
        return np.ascontiguousarray(np.moveaxis(x, -1, 1)) if self.turns else x


class Choices:
    """The branches of one part of the action."""

    def __init__(self, leaf: Distribution) -> None:
        self.leaf, self.sizes, self.size = leaf, list(leaf.sizes), len(leaf.sizes)

    def act(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled and most likely choices `[N, branches]` for the distribution's input and a mask of floats `[N, sum(sizes)]`."""
        logits = torch.stack([0 * x, x], -1).flatten(1) if isinstance(self.leaf, Bernoulli) else x
        parts = split(logits + (mask - 1) * MASKED, self.sizes)
        best = torch.cat([part.argmax(1, keepdim=True) for part in parts], 1)
        if isinstance(self.leaf, EpsilonGreedy):
            return best, best
        return torch.cat([torch.multinomial(part.softmax(1), 1) for part in parts], 1), best

    def to_env(self, chosen: np.ndarray) -> np.ndarray:
        """Turn choices `[N, branches]` into the environment's action."""
        return self.leaf.to_env(chosen[:, 0] if self.size == 1 else chosen)


class Numbers:
    """The continuous dimensions of one part of the action, which Unity gets in [-1, 1].

    Args:
        leaf: their distribution.
        bounds: the environment's lowest and highest actions, `[2, *shape]`.

    Raises:
        SettingError: a dimension has no bounds.
    """

    def __init__(self, leaf: Any, bounds: np.ndarray) -> None:
        self.leaf, self.size, self.bounds = leaf, leaf.num_parts, bounds
        low, high = bounds.reshape(2, -1).astype(np.float64)
        width = high - low
        if not (np.isfinite(bounds).all() and (width > 0).all() and (width < np.finfo(np.float32).max).all()):
            raise SettingError("format unity: the actions have no bounds; Unity's are from -1 to 1")
        self.is_unit = not isinstance(leaf, DiagonalGaussian) or bool((low == -1).all() and (high == 1).all())
        self.center, self.half = (torch.from_numpy(values.astype(np.float32)) for values in ((low + high) / 2, width / 2))

    def act(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled and most likely actions `[N, D]` in [-1, 1] for the distribution's input."""
        if isinstance(self.leaf, NoisyAction):
            return x, x
        mean, log_std = self.leaf.moments(x)
        return self.squash(mean + torch.randn_like(mean) * log_std.exp()), self.squash(mean)

    def squash(self, action: Tensor) -> Tensor:
        """Turn the distribution's actions into numbers in [-1, 1]."""
        if isinstance(self.leaf, TanhGaussian | SquashedGaussian):
            return action.tanh()
        return (action if self.is_unit else (action - self.center) / self.half).clamp(-1, 1)

    def to_env(self, unit: np.ndarray) -> np.ndarray:
        """Turn actions in [-1, 1] into the environment's."""
        low, high = self.bounds
        return (low + (unit.reshape(-1, *low.shape) + 1) / 2 * (high - low)).clip(low, high).astype(low.dtype)


class UnityGraph(nn.Module):
    """A policy from tensors of Unity to tensors for Unity; `inputs` and `outputs` are the ports, without the constants.

    Raises:
        SettingError: Unity has no such observations or actions.
    """

    def __init__(self, network: PolicyNetwork | VisiblePolicy, spaces: Spaces) -> None:
        super().__init__()
        self.training = False  # exporters restore the mode of the whole
        self.network, self.spaces = without_critic(network), spaces
        self.stored = allocate(spaces.observation)
        leaves, stored = list(observation_leaves(spaces.observation)), tree_leaves(self.stored)
        self.order = [next(i for i, other in enumerate(stored) if other is leaf) for leaf in in_order(self.stored)]
        self.sensors = [Sensor(leaves[i], stored[i]) for i in self.order]
        self.state = self.network.initial_memory(1)
        self.state_sizes = [leaf.shape[1] for leaf in tree_leaves(self.state)]
        self.memory_size = sum(self.state_sizes)
        distribution = self.network.distribution
        leaves_and_bounds = zip(distribution.leaves(), distribution.flat(limits(spaces.action)), strict=True)
        self.parts: list[Choices | Numbers] = [Choices(leaf) if leaf.sizes else Numbers(leaf, bounds) for leaf, bounds in leaves_and_bounds]
        self.numbers = [part for part in self.parts if isinstance(part, Numbers)]
        self.choices = [part for part in self.parts if isinstance(part, Choices)]
        self.num_numbers = sum(part.size for part in self.numbers)
        self.branches = [size for part in self.choices for size in part.sizes]
        self.inputs, self.outputs = list(self._inputs()), list(self._outputs())

    def _inputs(self) -> Iterator[Port]:
        for i, sensor in enumerate(self.sensors):
            yield Port(f"obs_{i}", "observation", sensor.shape, "float32")
        if self.branches:
            yield Port("action_masks", "action_mask", (sum(self.branches),), "float32")
        if self.memory_size:
            yield Port("recurrent_in", "memory", (1, self.memory_size), "float32")

    def _outputs(self) -> Iterator[Port]:
        for kind, number, dtype in (("continuous", self.num_numbers, "float32"), ("discrete", len(self.branches), "int64")):
            for name in (f"{kind}_actions", f"deterministic_{kind}_actions") if number else ():
                yield Port(name, "action", (number,), dtype)
        if self.memory_size:
            yield Port("recurrent_out", "memory", (1, self.memory_size), "float32")

    def constants(self) -> dict[str, np.ndarray]:
        """Return the constant outputs, as floats."""
        constants: dict[str, object] = {"version_number": [VERSION], "memory_size": [self.memory_size]}
        constants |= {SHAPES["continuous_actions"]: [self.num_numbers]} if self.num_numbers else {}
        constants |= {SHAPES["discrete_actions"]: [self.branches]} if self.branches else {}
        return {name: np.array(value, np.float32) for name, value in constants.items()}

    def example(self, num: int) -> tuple[Tensor, ...]:
        """Draw inputs: `num` random observations that begin episodes, with all choices legal."""
        memory = tree_to_numpy(self.network.initial_memory(num))
        arrays = tree_leaves((samples(self.spaces.observation, num), self.spaces.masks(num), memory))
        return tree_to_torch(tuple(self.from_env(arrays)))

    def from_env(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Turn observations and a mask in the environment's form, and leaves of the memory, into the inputs."""
        rest = iter(arrays[len(self.order) :])
        given = [sensor.write(arrays[i]) for i, sensor in zip(self.order, self.sensors, strict=True)]
        if self.branches:
            mask = next(rest) if self.spaces.masked else np.ones((len(arrays[0]), sum(self.branches)))
            given.append(mask.astype(np.float32))
        return [*given, np.concatenate(list(rest), 1)[:, None]] if self.memory_size else given

    def to_env(self, outputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Turn the deterministic outputs into leaves of the environment's action, and the memory into its leaves."""
        actions: dict[Choices | Numbers, np.ndarray] = {}
        kinds: tuple[Sequence[Choices | Numbers], ...] = (self.numbers, self.choices)
        for name, parts in zip(SHAPES, kinds, strict=True):
            pieces = columns(outputs[f"deterministic_{name}"], [part.size for part in parts]) if parts else []
            actions |= {part: part.to_env(piece) for part, piece in zip(parts, pieces, strict=True)}
        states = columns(outputs["recurrent_out"][:, 0], self.state_sizes) if self.memory_size else []
        return [*(actions[part] for part in self.parts), *states]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs from the inputs, in the order of the ports."""
        rest = iter(inputs)
        read = {i: sensor.read(next(rest)) for i, sensor in zip(self.order, self.sensors, strict=True)}
        leaves = iter([read[i] for i in sorted(read)])
        obs = tree_map(lambda _: next(leaves), self.stored)
        masks = split(next(rest), [sum(part.sizes) for part in self.choices]) if self.choices else []
        states = iter(split(next(rest).squeeze(1), self.state_sizes) if self.memory_size else ())
        x, memory = self.network.policy(obs, tree_map(lambda _: next(states), self.state), None)
        given = dict(zip(self.parts, split(x, [part.leaf.num_inputs for part in self.parts]), strict=True))
        numbers = [part.act(given[part]) for part in self.numbers]
        choices = [part.act(given[part], mask) for part, mask in zip(self.choices, masks, strict=True)]
        actions = [torch.cat(ways, 1) for kind in (numbers, choices) for ways in zip(*kind, strict=True)]
        return (*actions, *([torch.cat(tree_leaves(memory), 1).unsqueeze(1)] if self.memory_size else ()))


def columns(array: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Split the columns of an array `[N, sum(sizes)]`."""
    return np.split(array, np.cumsum(sizes)[:-1], 1)


def split(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """Split the columns of `x [N, sum(sizes)]`, without an operator if there is one part."""
    return [x] if len(sizes) == 1 else x.split(sizes, 1)


def place_of_sensor(name: str) -> int:
    """Return the number of a sensor `obs_<number>` of a Unity scene, which gymnasium sorts as text; others, with 0, keep their order."""
    prefix, _, number = name.rpartition("_")
    return int(number) if prefix == "obs" and number.isdecimal() else 0


def in_order(tree: Tree) -> Iterator[np.ndarray]:
    """Yield the leaves of a tree in the order of its space, where `tree_leaves` sorts by name; `obs_2` comes before `obs_10`."""
    if isinstance(tree, dict | tuple):
        names = sorted(tree, key=place_of_sensor) if isinstance(tree, dict) else range(len(tree))
        for name in names:
            yield from in_order(tree[name])
    else:
        yield tree


class Unity:
    """An ONNX model for Unity's inference, in which actions are sampled."""

    suffix = ".onnx"
    packages: tuple[str, ...] = ("onnx", "onnxruntime")
    graph = UnityGraph

    def write(self, graph: UnityGraph, metadata: str) -> bytes:
        """Return the content of a file."""
        import onnx

        inputs, outputs = ([port.name for port in ports] for ports in (graph.inputs, graph.outputs))
        file: Any = io.BytesIO()
        with quiet(), without_stdout(), with_unflatten():
            torch.onnx.export(
                graph,
                graph.example(2),
                file,
                dynamo=False,  # the other exporter cannot write opset 9
                opset_version=OPSET,
                operator_export_type=torch.onnx.OperatorExportTypes.ONNX_FALLTHROUGH,  # `problems` names the unknown ones
                input_names=inputs,
                output_names=outputs,
                dynamic_axes={name: {0: "batch"} for name in inputs + outputs},
            )
        model = onnx.load_from_string(file.getvalue())
        for value, port in zip(model.graph.output, graph.outputs, strict=True):  # shapes that the exporter could not infer
            for size, dim in zip(port.shape, value.type.tensor_type.shape.dim[1:], strict=True):
                dim.dim_value = size
        for name, array in graph.constants().items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}.value"))
            model.graph.node.append(onnx.helper.make_node("Identity", [f"{name}.value"], [name]))
            model.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, array.shape))
        onnx.helper.set_model_props(model, {METADATA: metadata})
        return model.SerializeToString()

    def read(self, data: bytes, graph: UnityGraph) -> Run:
        """Load the content of a file that was written from the graph, as a function of observations in the environment's form.

        Raises `SettingError`: Unity would refuse the file, or a sampled choice is illegal.
        """
        import onnx

        model = onnx.load_from_string(data)
        for problem in problems(model):
            raise SettingError(f"format unity: {problem}")
        onnx.checker.check_model(model, full_check=True)
        session = open_session(data)
        inputs, outputs = ([port.name for port in ports] for ports in (graph.inputs, graph.outputs))

        def run(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            given = dict(zip(inputs, graph.from_env(arrays), strict=True))
            found = dict(zip(outputs, session.run(outputs, given), strict=True))
            check_samples(found, given.get("action_masks"), graph.branches)
            return graph.to_env(found)

        return run


@contextmanager
def without_stdout() -> Iterator[None]:
    """Discard what is written to standard output: torch prints a graph that it cannot write, past Python's streams."""
    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


@contextmanager
def with_unflatten() -> Iterator[None]:
    """Let torch write `unflatten`, which it writes only in later opsets: as Reshape, in which 0 copies a dimension."""

    @torch.onnx.symbolic_helper.parse_args("v", "i", "is")
    def unflatten(graph: Any, x: Any, dim: int, sizes: Sequence[int]) -> Any:
        dim %= x.type().dim()
        after = x.type().sizes()[dim + 1 :] if dim + 1 < x.type().dim() else []
        rows = [0 if -1 in sizes else -1][:dim]
        target = torch.tensor([*rows, *[0] * (dim - 1), *sizes, *after])
        return graph.op("Reshape", x, graph.op("Constant", value_t=target))

    torch.onnx.register_custom_op_symbolic("aten::unflatten", unflatten, OPSET)
    try:
        yield
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::unflatten", OPSET)


def check_samples(found: Mapping[str, np.ndarray], mask: np.ndarray | None, branches: Sequence[int]) -> None:
    """Raise `SettingError` unless the sampled actions of a graph's outputs are legal: choices by the mask, numbers in [-1, 1]."""
    if mask is not None:
        columns = found["discrete_actions"] + np.cumsum([0, *branches[:-1]])
        illegal = np.take_along_axis(mask, columns, 1) == 0
        if illegal.any():
            raise SettingError(f"format unity: {int(illegal.sum())} of {illegal.size} sampled choices are illegal")
    if not (np.abs(found.get("continuous_actions", np.zeros(1))) <= 1).all():
        raise SettingError("format unity: a sampled action is not in [-1, 1]")


def problems(model: Any) -> Iterator[str]:
    """Yield what Unity would refuse in an ONNX model: operators, and what the loader of ML-Agents checks."""
    graph, constants = model.graph, read_constants(model)
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [tensor.name for tensor in graph.input if tensor.name not in weights]
    ports = {tensor.name: tensor.type.tensor_type for tensor in (*graph.input, *graph.output)}
    for operator in sorted({node.op_type for node in graph.node}.difference(OPERATORS.split())):
        yield f"this policy needs the operator {operator}, which Unity does not read"
    for opset in model.opset_import:
        if opset.domain not in ("", "ai.onnx") or opset.version not in OPSETS:
            yield f"opset {opset.domain or 'ai.onnx'} {opset.version}; Unity reads ai.onnx {OPSETS[0]} to {OPSETS[-1]}"
    for name in ("version_number", "memory_size", *(SHAPES[name] for name in SHAPES if name in ports)):
        if name not in constants:
            yield f"there is no constant {name}"
    yield from (f"constant {name} is {array.dtype}, not float32" for name, array in constants.items() if array.dtype != np.float32)
    version, memory, numbers, branches = (
        constants.get(name, np.zeros(0)).astype(int).ravel() for name in ("version_number", "memory_size", *SHAPES.values())
    )
    if version.tolist() not in ([], [VERSION]):
        yield f"version {version[0]} of the format, not {VERSION}"
    if not ports.keys() & SHAPES.keys():
        yield "there are no actions"
    sensors = [name for name in inputs if name.startswith("obs_")]
    yield from (f"there is no input obs_{i}" for i in range(len(sensors)) if f"obs_{i}" not in sensors)
    yield from (f"input {name} is unknown" for name in inputs if name not in (*sensors, "action_masks", "recurrent_in"))
    wanted = {name: ("float32", ports[name].shape.dim[-1].dim_value) for name in sensors}
    wanted |= {name: ("float32", number) for number in numbers for name in ("continuous_actions", "deterministic_continuous_actions")}
    wanted |= {name: ("int64", len(branches)) for name in ("discrete_actions", "deterministic_discrete_actions") if len(branches)}
    wanted |= {"action_masks": ("float32", sum(branches))} if len(branches) else {}
    wanted |= {name: ("float32", size) for size in memory if size for name in ("recurrent_in", "recurrent_out")}
    for name, (dtype, number) in wanted.items():
        port = ports.get(name)
        if port is None and not name.startswith("deterministic"):  # older files have no such outputs
            yield f"there is no {name}"
        elif port is not None and (found := (DTYPES.get(port.elem_type, "other"), port.shape.dim[-1].dim_value)) != (dtype, number):
            yield f"{name} is {found[0]} with {found[1]} columns, not {dtype} with {number}"


def read_constants(model: Any) -> dict[str, np.ndarray]:
    """Return the outputs of an ONNX model that do not depend on its inputs, by name."""
    from onnx import numpy_helper

    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            arrays[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
        elif node.op_type == "Identity" and node.input[0] in arrays:
            arrays[node.output[0]] = arrays[node.input[0]]
    return {tensor.name: arrays[tensor.name] for tensor in model.graph.output if tensor.name in arrays}
