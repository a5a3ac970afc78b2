"""Play episodes with an exported policy. This needs numpy, onnxruntime and gymnasium, but neither torch nor lightning_rl.

    lightning-rl export --ckpt_path RUN/checkpoints/best.ckpt --out policy.onnx
    python examples/run_onnx.py policy.onnx                          # in the environment that policy.onnx.json names, without wrappers
    python examples/run_onnx.py policy.onnx --env CartPole-v1 --episodes 10

A policy takes the observations of `env.reset` and `env.step`, with a batch dimension in front, and returns actions for `env.step`.
`policy.onnx.json` lists its inputs and outputs in order: the leaves of the observation (dicts by sorted keys), `action_mask` if the
environment masks actions, and the memory of a recurrent policy (zeros at the start of an episode, then the output of the previous step).
"""

import argparse
import importlib
import json
import os
import sys

import gymnasium as gym
import numpy as np
import onnxruntime


class WrongInputError(Exception):
    """A user error, described in one line."""


class Policy:
    """An exported policy for one environment."""

    def __init__(self, path):
        self.path = path
        if not os.path.isfile(path):
            raise WrongInputError(f"there is no file {path}")
        if not os.path.isfile(f"{path}.json"):
            raise WrongInputError(f"there is no {path}.json, which lightning-rl export writes next to a policy")
        try:
            with open(f"{path}.json", encoding="utf-8") as file:
                self.description = json.load(file)
            self.inputs, self.outputs = [[dict(port) for port in self.description[side]] for side in ("inputs", "outputs")]
        except (ValueError, KeyError, TypeError) as error:
            raise WrongInputError(f"{path}.json does not describe a policy ({type(error).__name__}: {error})") from error
        try:
            self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime's exceptions have no common base
            raise WrongInputError(f"{path} is not an ONNX model ({error})") from error

    def reset(self):
        """Reset the memory at the start of an episode."""
        self.memory = [np.zeros((1, *port["shape"][1:]), port["dtype"]) for port in self.inputs if port["role"] == "memory"]

    def act(self, obs, mask=None):
        """Return the environment's action."""
        masks = flat(self.description["action_space"], mask)
        arrays = {"observation": leaves(obs), "action_mask": [np.concatenate(masks)] if masks else [], "memory": self.memory}
        given = {port["name"]: as_row(arrays[port["role"]].pop(0), port) for port in self.inputs}
        results = self.session.run([port["name"] for port in self.outputs], given)
        actions = [result[0] for port, result in zip(self.outputs, results, strict=True) if port["role"] == "action"]
        self.memory = results[len(actions) :]
        return tree(self.description["action_space"], actions)


def leaves(obs):
    """Return the arrays of an observation; those of a dict in the order of its sorted keys."""
    if isinstance(obs, dict):
        return [leaf for key in sorted(obs, key=str) for leaf in leaves(obs[key])]
    return [leaf for child in obs for leaf in leaves(child)] if isinstance(obs, tuple) else [obs]


def flat(space, mask):
    """Return the parts of a mask in the order of the action space: one array, a tuple of arrays, or a tree like the action space."""
    if isinstance(mask, dict):
        return [part for key, child in space["spaces"].items() for part in flat(child, mask.get(key))]
    if isinstance(mask, tuple) and space["type"] == "Tuple":
        return [part for child, each in zip(space["spaces"], mask, strict=True) for part in flat(child, each)]
    if isinstance(mask, tuple):
        return [np.ravel(part) for part in mask]
    return [] if mask is None else [np.ravel(mask)]


def as_row(array, port):
    """Turn an array of one environment into a batch of one; memory already is one."""
    return np.asarray(array, port["dtype"]).reshape(1, *port["shape"][1:])


def tree(space, actions):
    """Arrange a list of actions in the structure of the action space."""
    if space["type"] == "Dict":
        return {key: tree(child, actions) for key, child in space["spaces"].items()}
    return tuple(tree(child, actions) for child in space["spaces"]) if space["type"] == "Tuple" else actions.pop(0)


def split_mask(env, obs, info):
    """Return the observation without its mask, and the mask: from the info, a key of the observation, or a method."""
    found = dict(info)
    if isinstance(obs, dict) and "action_mask" in obs:
        found = {"action_mask": obs["action_mask"], **info}
        obs = {key: child for key, child in obs.items() if key != "action_mask"}
    if "action_mask" in found:
        return obs, found["action_mask"]
    return obs, env.get_wrapper_attr("action_masks")() if env.has_wrapper_attr("action_masks") else None


def play(policy, env, seed):
    """Play an episode. Return its return."""
    obs, info = env.reset(seed=seed)
    policy.reset()
    total, ended = 0.0, False
    while not ended:
        action = policy.act(*split_mask(env, obs, info))
        obs, reward, terminated, truncated, info = env.step(action)
        total, ended = total + float(reward), terminated or truncated
    return total


def make(policy, env_id):
    """Make the environment with this id, or the one that the policy was trained in, without wrappers."""
    kwargs = {} if env_id else policy.description.get("environment_kwargs", {})
    env_id = env_id or policy.description.get("environment")
    if env_id is None:
        raise WrongInputError(f"{policy.path} names no environment; add --env ID")
    try:
        return gym.make(env_id, **kwargs)
    except gym.error.NamespaceNotFound as error:
        raise WrongInputError(f"{env_id} is not a registered environment; add --import PACKAGE, the one that registers it") from error
    except gym.error.UnregisteredEnv as error:
        raise WrongInputError(f"{env_id} is not a registered environment ({error}); your own: add --import MODULE") from error
    except Exception as error:  # the constructor of an environment may raise anything
        raise WrongInputError(f"{env_id} cannot be built ({type(error).__name__}: {error})") from error


def check_fits(policy, env):
    """Refuse an environment whose observations or actions differ in shape from those of the policy."""
    obs = env.observation_space.sample()
    obs = {key: child for key, child in obs.items() if key != "action_mask"} if isinstance(obs, dict) else obs
    for what, sample, ports in [("observation", obs, policy.inputs), ("action", env.action_space.sample(), policy.outputs)]:
        given, taken = [np.shape(leaf) for leaf in leaves(sample)], [tuple(port["shape"][1:]) for port in ports if port["role"] == what]
        if sorted(given) != sorted(taken):
            raise WrongInputError(f"{env.spec.id} has other {what}s than this policy: shapes {given} instead of {taken}")


def run(options):
    """Play the requested episodes."""
    if options.episodes < 1:
        raise WrongInputError(f"--episodes must be at least 1, got {options.episodes}")
    sys.path.append(os.getcwd())  # to find your own modules, also that of my_module:MyEnv-v0
    if options.module:
        try:
            importlib.import_module(options.module)
        except Exception as error:  # a user's module may raise anything
            raise WrongInputError(f"--import {options.module}: {error}") from error
    policy = Policy(options.policy)
    env = make(policy, options.env)
    check_fits(policy, env)
    for episode in range(options.episodes):
        print(f"episode {episode}: return {play(policy, env, options.seed + episode):g}")
    env.close()


def main():
    parser = argparse.ArgumentParser(description="Play episodes with an exported policy.")
    parser.add_argument("policy", help="a file written by `lightning-rl export --format onnx`, with its .json next to it")
    parser.add_argument("--env", help="the environment's id (default: the one that the policy was trained in)")
    parser.add_argument("--import", dest="module", help="a module to import first, which registers the environment")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    try:
        run(parser.parse_args())
    except WrongInputError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
