"""Read agents of Stable-Baselines3 (`.zip`) as checkpoints of ours: PPO, A2C, DQN, SAC, TD3 and DDPG with MlpPolicy or CnnPolicy.

No code in a file is run. Weights are read as plain tensors, settings from the readable parts of the JSON next to them. The pickles inside
that JSON are never opened; only they contain the environment, which must therefore be named. Layer widths come from the weights. Of the
pickle that `VecNormalize` saves next to an agent, only arrays and numbers are built.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from lightning_rl.checkpoints.archive import Checkpoint, NotPlainError, check_archive, read_archive
from lightning_rl.checkpoints.files import shown
from lightning_rl.distributions.state_dependent import MAX_MEAN
from lightning_rl.errors import SettingError
from lightning_rl.networks.mlp import NetArch
from lightning_rl.networks.normalization import ObservationNormalizer
from lightning_rl.settings.yaml_files import Plain
from lightning_rl.sharing.hub import STATISTICS
from lightning_rl.spaces import Spaces, observation_leaves, to_plain

WANTED = "PPO, A2C, DQN, SAC, TD3 and DDPG"
POLICIES = {"common": ("PPO", "A2C"), "dqn": ("DQN",), "sac": ("SAC",), "td3": ("TD3",)}
"""Algorithms by the module `stable_baselines3.<name>.policies` of their policy."""
SIGNS = {"PPO": "clip_range", "A2C": "normalize_advantage", "DQN": "exploration_rate", "SAC": "target_entropy", "TD3": "policy_delay"}
"""Settings that distinguish algorithms with the same policy."""
ACTIVATIONS = {"Tanh": "tanh", "ReLU": "relu", "ELU": "elu", "SiLU": "silu", "LeakyReLU": "leaky_relu", "GELU": "gelu"}
EXTRACTORS = ("FlattenExtractor", "NatureCNN")
CONVOLUTIONS = {"cnn.0": "body.0", "cnn.2": "body.2", "cnn.4": "body.4", "linear.0": "linear"}
"""Layers of the image encoder: their names → ours."""
BROKEN = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)
"""Errors that unexpected content raises."""
Statistics = dict[str, np.ndarray | float]
"""`mean`, `var` and `count` of observations, with `epsilon` and `clip_obs`."""
ARRAYS: dict[str, Any] = {
    "_reconstruct": np.zeros(0).__reduce__()[0],
    "_frombuffer": np.zeros(0).__reduce_ex__(5)[0],  # from Python 3.14 on
    "scalar": np.float64(0).__reduce__()[0],
    "ndarray": np.ndarray,
    "dtype": np.dtype,
}
"""Functions and classes that build arrays and their numbers, by name."""
ARRAY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric")
IGNORED = ("stable_baselines3", "gymnasium", "gym", "numpy.random", "collections")
"""Packages whose objects are replaced by `Inert` ones, which keep their state: nothing of the packages is imported or called."""


def read_zip(path: Path, spaces: Spaces) -> Checkpoint:
    """Read an agent as a checkpoint for an environment with these spaces.

    Statistics that `VecNormalize.save` wrote are read from `vec_normalize.pkl` or `vecnormalize.pkl`, next to the file or in the folder of
    its name, if there is one.

    Raises:
        SettingError: no such file, not an agent of Stable-Baselines3, or one without a counterpart here.
    """
    if not path.is_file():
        raise SettingError(f"ckpt_path {shown(path)} is not a file")
    try:
        data, weights, others = _open(path)
    except Exception as error:  # a file from elsewhere: BadZipFile, UnpicklingError, RuntimeError, …
        reason = str(error) if isinstance(error, NotPlainError) else type(error).__name__
        raise SettingError(f"ckpt_path {shown(path)} cannot be read as an agent of Stable-Baselines3 ({reason})") from error
    try:
        algorithm = _algorithm(data)
        _check_observations(spaces, weights)
        settings, state, used = _READERS[algorithm](_Weights(weights, data, others))
        if rest := sorted(name for name in weights.keys() - used):
            raise UnlikeError(f"its weights {rest[0]} have no counterpart")
        statistics = _statistics_of(path)
        if statistics is not None:
            settings["normalize_obs"] = "running"
            targets = {"DQN": ("target",), "TD3": ("target_network",)}.get(algorithm, ())
            state |= _normalizer(statistics, spaces, ("network", *targets))
    except UnlikeError as error:
        raise SettingError(f"ckpt_path {shown(path)} is an agent of Stable-Baselines3 that cannot be read here: {error}") from error
    except BROKEN as error:
        reason = f"{type(error).__name__}: {error}"[:60]
        raise SettingError(f"ckpt_path {shown(path)} does not hold what an agent of Stable-Baselines3 does ({reason})") from error
    counts = {name: max(0, int(data.get(key) or 0)) for name, key in COUNTS.items()}
    plain = [to_plain(space) for space in (spaces.observation, spaces.action)]
    entries = {"format_version": 1, "algorithm": algorithm, "spaces": plain, "masked": spaces.masked, **counts, "ranks": []}
    return {"state_dict": state, "hyper_parameters": {"max_env_steps": max(1, counts["env_steps"]), **settings}, "lightning_rl": entries}


COUNTS = {"env_steps": "num_timesteps", "updates": "_n_updates", "episodes": "_episode_num"}


class UnlikeError(Exception):
    """Raised for an agent without a counterpart here; the message is the reason."""


class _Weights:
    """The weights of an agent by their names there, the names that have been read, and the agent's readable settings.

    others: tensors in addition to those of the policy, such as the temperature of SAC.
    """

    def __init__(self, weights: Mapping[str, Tensor], data: Plain, others: Checkpoint) -> None:
        self.weights, self.data, self.others = weights, data, others
        self.used: set[str] = set()
        kwargs = data.get("policy_kwargs") or {}
        self.kwargs = kwargs if isinstance(kwargs, dict) else {}
        if (extractor := _class(self.kwargs.get("features_extractor_class"))) and extractor not in EXTRACTORS:
            raise UnlikeError(f"its features_extractor_class {extractor} is not {' or '.join(EXTRACTORS)}")
        if self.kwargs.get("normalize_images") is False:
            raise UnlikeError("its normalize_images is false, and images are scaled to 1 here")

    def activation(self, default: str) -> str:
        """Return the name of the hidden layers' activation."""
        name = _class(self.kwargs.get("activation_fn"))
        if name and name not in ACTIVATIONS:
            raise UnlikeError(f"its activation_fn {name} is not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name] if name else default

    def take(self, name: str) -> Tensor:
        self.used.add(name)
        return self.weights[name]

    def linear(self, source: str, target: str) -> dict[str, Tensor]:
        """Return a layer under our name."""
        return {f"{target}.{part}": self.take(f"{source}.{part}") for part in ("weight", "bias")}

    def layers(self, prefix: str) -> list[str]:
        """Return the names of the linear layers in a sequence, in order."""
        matches = [re.fullmatch(rf"{re.escape(prefix)}\.(\d+)\.weight", name) for name in self.weights]
        return [f"{prefix}.{number}" for number in sorted(int(match[1]) for match in matches if match)]

    def sequence(self, source: Iterable[str], target: str) -> dict[str, Tensor]:
        """Return layers under our numbers, which count an activation between any two layers."""
        return {key: value for k, name in enumerate(source) for key, value in self.linear(name, f"{target}.{2 * k}").items()}

    def widths(self, layers: Iterable[str]) -> list[int]:
        return [len(self.weights[f"{name}.weight"]) for name in layers]

    def ensemble(self, source: str, target: str) -> dict[str, Tensor]:
        """Return the critics `<source>.qf0`, … as one ensemble."""
        members = [self.layers(f"{source}.qf{k}") for k in range(self.critics(source))]
        state = {}
        for k, names in enumerate(zip(*members, strict=True)):
            state[f"{target}.layers.{2 * k}.weight"] = torch.stack([self.take(f"{name}.weight").T for name in names]).contiguous()
            state[f"{target}.layers.{2 * k}.bias"] = torch.stack([self.take(f"{name}.bias")[None] for name in names])
        return state

    def critics(self, source: str) -> int:
        return next(k for k in range(len(self.weights)) if f"{source}.qf{k}.0.weight" not in self.weights)

    def encoder(self, source: str, target: str) -> dict[str, Tensor]:
        """Return an image encoder under our names; {} if there is none."""
        prefix = f"{source}features_extractor"
        if f"{prefix}.cnn.0.weight" not in self.weights:
            return {}
        return {
            key: value
            for layer, place in CONVOLUTIONS.items()
            for key, value in self.linear(f"{prefix}.{layer}", f"{target}.leaves.0.{place}").items()
        }

    def settings(self, state: Mapping[str, Tensor], activation: str, net_arch: NetArch) -> Plain:
        """Return the settings of the networks."""
        features = next((len(bias) for name, bias in state.items() if name.endswith("leaves.0.linear.bias")), None)
        images = {} if features is None else {"encoder": "nature_cnn", "encoder_features": features}
        return {"net_arch": net_arch, "activation": activation, **images}


Read = tuple[Plain, dict[str, Tensor], set[str]]
"""Settings, weights under our names, and the names there that were used."""


def _read_actor_critic(weights: _Weights) -> Read:
    policy, value = (weights.layers(f"mlp_extractor.{name}_net") for name in ("policy", "value"))
    widths = _net_arch(weights.widths(policy), vf=weights.widths(value))
    state = weights.sequence([*policy, "action_net"], "network.actor") | weights.sequence([*value, "value_net"], "network.critic")
    if "log_std" in weights.weights:
        state["network.distribution.log_std"] = weights.take("log_std")
    shares = weights.kwargs.get("share_features_extractor", True)
    prefixes = ("", "") if shares else ("pi_", "vf_")
    for prefix, name in zip(prefixes, ("actor", "critic"), strict=True):
        state |= weights.encoder(prefix, f"network.{name}_encoder")
    copies = ("features_extractor.", "pi_features_extractor.", "vf_features_extractor.")
    used = weights.used | {name for name in weights.weights if name.startswith(copies)}  # the same weights under other names
    settings = weights.settings(state, weights.activation("tanh"), widths) | {"share_encoder": bool(shares)} | _exploration(weights, state)
    if weights.kwargs.get("squash_output"):
        settings["action_dist"] = "tanh_normal"
    return settings, state, used


def _net_arch(pi: list[int], **critic: list[int]) -> NetArch:
    """Return the setting `net_arch` of a policy and a critic."""
    return pi if [pi] == [*critic.values()] else {"pi": pi, **critic}


def _exploration(weights: _Weights, state: Mapping[str, Tensor]) -> Plain:
    """Return the settings of state-dependent exploration, if an agent used it."""
    if not weights.data.get("use_sde"):
        return {}
    freq, actions = int(weights.data.get("sde_sample_freq") or -1), len(state["network.distribution.log_std"][0])
    full_std = actions > 1 or bool(weights.kwargs.get("full_std", True))
    return {"use_sde": True, "sde_sample_freq": freq, "use_expln": bool(weights.kwargs.get("use_expln")), "full_std": full_std}


def _read_dqn(weights: _Weights) -> Read:
    layers = weights.layers("q_net.q_net")
    state: dict[str, Tensor] = {}
    for source, target in (("q_net", "network"), ("q_net_target", "target")):
        state |= weights.sequence(weights.layers(f"{source}.q_net"), f"{target}.head") | weights.encoder(f"{source}.", f"{target}.encoder")
    return weights.settings(state, weights.activation("relu"), weights.widths(layers[:-1])), state, weights.used


def _read_sac(weights: _Weights) -> Read:
    hidden = weights.layers("actor.latent_pi")
    state = weights.sequence(hidden, "network.layers")
    explores = bool(weights.data.get("use_sde"))
    if explores and (clip := weights.kwargs.get("clip_mean", MAX_MEAN)) != MAX_MEAN:
        raise UnlikeError(f"its clip_mean is {clip}, and means are clipped at {MAX_MEAN:g} here")
    for part in ("weight", "bias"):
        heads = [weights.take(f"actor.{name}.{part}") for name in (["mu.0"] if explores else ["mu", "log_std"])]
        state[f"network.layers.{2 * len(hidden)}.{part}"] = torch.cat(heads)
    if explores:
        state["network.distribution.log_std"] = weights.take("actor.log_std")
    settings = _read_critics(weights, weights.widths(hidden), state) | _exploration(weights, state)
    if (learned := weights.others.get("log_ent_coef")) is not None:
        settings["ent_coef"] = "auto"
        state["temperature.log_alpha"] = learned.detach().float().reshape(1)
    else:
        settings["ent_coef"] = alpha = float(weights.data["ent_coef"])
        state["temperature.log_alpha"] = torch.tensor([math.log(alpha) if alpha > 0 else -math.inf])
    return settings, state, weights.used


def _read_td3(weights: _Weights) -> Read:
    layers = weights.layers("actor.mu")
    state: dict[str, Tensor] = {}
    for source, target in (("actor", "network"), ("actor_target", "target_network")):
        state |= weights.sequence(weights.layers(f"{source}.mu"), f"{target}.layers") | weights.encoder(f"{source}.", f"{target}.encoder")
    return _read_critics(weights, weights.widths(layers[:-1]), state, "target_critic"), state, weights.used


def _read_critics(weights: _Weights, widths: list[int], state: dict[str, Tensor], target: str = "target") -> Plain:
    """Add critics, their targets and the actor's encoder to a state, and return the settings of all networks."""
    state |= weights.encoder("actor.", "network.encoder")
    for source, prefix in (("critic", "critic"), ("critic_target", target)):
        state |= weights.ensemble(source, prefix) | weights.encoder(f"{source}.", f"{prefix}.encoder")
    net_arch = _net_arch(widths, qf=weights.widths(weights.layers("critic.qf0")[:-1]))
    return weights.settings(state, weights.activation("relu"), net_arch) | {"n_critics": weights.critics("critic")}


_READERS = {"PPO": _read_actor_critic, "A2C": _read_actor_critic, "DQN": _read_dqn, "SAC": _read_sac, "TD3": _read_td3}


def _open(path: Path) -> tuple[Plain, dict[str, Tensor], Checkpoint]:
    """Read the JSON, the weights of the policy, and the other tensors of an agent."""
    check_archive(path)
    with zipfile.ZipFile(path) as archive, TemporaryDirectory() as folder:
        members = set(archive.namelist())
        if not {"data", "policy.pth"} <= members:
            raise NotPlainError("it has no members data and policy.pth")
        data = json.loads(archive.read("data"))
        tensors = []
        for name in ("policy.pth", "pytorch_variables.pth"):
            inside = Path(folder) / name
            content: Checkpoint | None = None
            if name in members:
                inside.write_bytes(archive.read(name))
                content = read_archive(inside, "cpu")
            tensors.append(content or {})
    policy, others = tensors
    if not isinstance(data, dict) or not all(isinstance(weight, Tensor) for weight in policy.values()):
        raise NotPlainError("its policy is not a mapping of tensors")
    return data, dict(policy), others


def _algorithm(data: Plain) -> str:
    """Return our algorithm that corresponds to an agent."""
    policy = data.get("policy_class")
    module = str(policy.get("__module__") if isinstance(policy, dict) else policy)
    match = re.fullmatch(r"stable_baselines3\.(\w+)\.policies", module)
    known = POLICIES.get(match[1], ()) if match else ()
    algorithm = next((name for name in known if SIGNS[name] in data), None)
    if algorithm is None or "cg_max_steps" in data:  # TRPO has PPO's policy
        raise UnlikeError(f"its policy is of {module[:60]}; agents that have a counterpart are {WANTED}")
    return algorithm


def _check_observations(spaces: Spaces, weights: Mapping[str, Tensor]) -> None:
    """Raise `UnlikeError` unless observations enter the layers here in the same form as there."""
    leaves = list(observation_leaves(spaces.observation))
    if len(leaves) != 1 or any("extractors." in name for name in weights):
        raise UnlikeError("observations of several parts (MultiInputPolicy) have no counterpart")
    has_cnn = any("features_extractor.cnn." in name for name in weights)
    if has_cnn != (leaves[0].kind == "image"):
        raise UnlikeError(f"it {'reads images' if has_cnn else 'reads no images'}, unlike the environment's observations")
    if not has_cnn and leaves[0].kind == "vector" and leaves[0].scale != 1:
        raise UnlikeError("bytes that are not an image are scaled to 1 here, but not in Stable-Baselines3")


def _statistics_of(path: Path) -> Statistics | None:
    """Read the statistics of observations that belong to an agent, if there are any."""
    places = [folder / name for folder in (path.parent, path.with_suffix("")) for name in STATISTICS]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        return None
    try:
        statistics = read_statistics(io.BytesIO(file.read_bytes()))
        if statistics is not None:
            expected = {"epsilon": ObservationNormalizer.epsilon, "clip_obs": ObservationNormalizer.clip}
            if other := next((name for name, value in expected.items() if float(statistics[name]) != value), None):
                raise UnlikeError(f"{file.name} has {other} {statistics[other]}, and here it is {expected[other]:g}")
    except UnlikeError:
        raise
    except Exception as error:  # a pickle from elsewhere
        raise UnlikeError(
            f"{file.name} does not hold statistics of one kind of observations ({type(error).__name__}: {error})"[:120]
        ) from error
    return statistics


def _normalizer(statistics: Statistics, spaces: Spaces, networks: Iterable[str]) -> dict[str, Tensor]:
    """Return the statistics under our names."""
    shape = next(iter(observation_leaves(spaces.observation))).shape
    moments = {name: torch.as_tensor(statistics[name], dtype=torch.float64) for name in ("count", "mean", "var")}
    if moments["mean"].shape != shape or moments["var"].shape != shape:
        raise UnlikeError(f"its statistics are of observations {list(moments['mean'].shape)}, those of the environment {list(shape)}")
    return {f"{network}.normalizer.statistics.0.{name}": value.clone() for network in networks for name, value in moments.items()}


def _class(value: object) -> str:
    """Return the name of a class from its text in JSON, such as `<class 'torch.nn.modules.activation.ReLU'>`."""
    match = re.search(r"(\w+)'?>?$", str(value)) if value is not None else None
    return match[1] if match else ""


# ---------------------------------------------------------------- statistics that `VecNormalize` saved


class Inert:
    """A stand-in for an object of another package: keeps its state, does nothing."""

    state: Any = None

    def __new__(cls, *args: object, **settings: object) -> Inert:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __setitem__(self, key: object, value: object) -> None:
        """Drop an item, such as one of an ordered dictionary."""


class StatisticsReader(pickle.Unpickler):
    """An unpickler that builds arrays, and puts `Inert` in place of everything that it may ignore."""

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        """Return what builds arrays, or `Inert`; raise `UnpicklingError` for any other name."""
        if module in ARRAY_MODULES and name in ARRAYS:
            return ARRAYS[name]
        if any(module == ignored or module.startswith(f"{ignored}.") for ignored in IGNORED):
            return Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def read_statistics(file: BinaryIO) -> Statistics | None:
    """Return `mean`, `var` and `count` of observations, with `epsilon` and `clip_obs`; None if observations are not normalized.

    Raises `Exception`: whatever a file raises that `VecNormalize.save` did not write.
    """
    saved = StatisticsReader(file).load().state
    if not saved["norm_obs"]:
        return None
    moments = saved["obs_rms"].state
    return {name: moments[name] for name in ("mean", "var", "count")} | {name: saved[name] for name in ("epsilon", "clip_obs")}
