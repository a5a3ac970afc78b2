"""An environment that breaks its contract or raises is reported in one line, however it is stepped."""

from __future__ import annotations

import inspect
import re
from contextlib import closing

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from lightning_rl import PPO, EnvConfig, SettingError
from lightning_rl.cli.main import main
from lightning_rl.data.players import make_player
from lightning_rl.envs.make import make_vector_env
from lightning_rl.types import tree_leaves
from tests.command_line import TINY, run
from tests.environments import Scripted
from tests.fitting import fit, tiny

BODY = Dict(arm=Box(-1, 1, (4,), np.float32), mode=Discrete(3))
BYTES = Box(0, 255, (2,), np.uint8)
ODD = {
    "a scalar observation": ({"obs": np.float32(1)}, "the observation has shape (), and its space (2,)"),
    "a longer observation": ({"obs": np.zeros(3)}, "the observation has shape (3,), and its space (2,)"),
    "an observation of one number": ({"obs": np.zeros(1)}, "the observation has shape (1,), and its space (2,)"),
    "a batch of one observation": ({"obs": np.zeros((1, 2))}, "the observation has shape (1, 2), and its space (2,)"),
    "texts": ({"obs": ["1", "2"]}, "the observation is ['1', '2'], and its space (2,)"),
    "nothing": ({"obs": None}, "the observation is None, and its space (2,)"),
    "lists of two lengths": ({"obs": [[1], [1, 2]]}, "the observation is [[1], [1, 2]], and its space (2,)"),
    "a reward in a list": ({"reward": np.ones(1)}, "the reward has shape (1,), and must be a number"),
    "a reward for each objective": (
        {"reward": [1.0, 0.5]},
        "the reward has shape (2,), one for each objective; pay their weighted sum in a RewardWrapper",
    ),
    "a reward as a text": ({"reward": "1"}, "the reward is '1', and must be a number"),
    "no reward": ({"reward": None}, "the reward is None, and must be a number"),
    "a part of another shape": (
        {"space": BODY, "obs": {"arm": np.zeros(3), "mode": 1}},
        "the observation 'arm' has shape (3,), and its space (4,)",
    ),
    "a part that is a scalar": ({"space": BODY, "obs": {"arm": 0.0, "mode": 1}}, "the observation 'arm' has shape (), and its space (4,)"),
    "a part that is missing": ({"space": BODY, "obs": {"arm": np.zeros(4)}}, "the observation 'mode' is missing"),
    "a number as a text": ({"space": Discrete(3), "obs": "1"}, "the observation is '1', and its space ()"),
    "a number in a list": ({"space": Discrete(3), "obs": np.array([1])}, "the observation has shape (1,), and its space ()"),
    "a number outside": ({"space": Discrete(3, start=1), "obs": 4}, "the observation is 4, and its space Discrete(3, start=1)"),
    "a number outside in an array": (
        {"space": Discrete(3, start=1), "obs": np.array(4)},
        "the observation is 4, and its space Discrete(3, start=1)",
    ),
    "a choice outside": (
        {"space": MultiDiscrete([3, 3]), "obs": np.array([3, 0])},
        "the observation is [3 0], and its space MultiDiscrete([3 3])",
    ),
    "a choice before the first": (
        {"space": MultiDiscrete([3, 3], start=[1, 1]), "obs": np.array([1, 0])},
        "the observation is [1 0], and its space MultiDiscrete([3 3], start=[1 1])",
    ),
    "a part that is a number outside": (
        {"space": BODY, "obs": {"arm": np.zeros(4), "mode": 3}},
        "the observation 'mode' is 3, and its space Discrete(3)",
    ),
    "a part that is a choice outside": (
        {"space": Tuple([MultiDiscrete([2, 2])]), "obs": (np.array([0, 2]),)},
        "the observation '0' is [0 2], and its space MultiDiscrete([2 2])",
    ),
    "a fraction as a number": ({"space": Discrete(3), "obs": 1.5}, "the observation is float64, and its space int64"),
    "numbers beyond bytes": (
        {"space": BYTES, "obs": np.array([300, -1])},
        "the observation is [300 -1], and its space Box(0, 255, (2,), uint8)",
    ),
    "floats beyond bytes": (
        {"space": BYTES, "obs": np.array([256.0, 0])},
        "the observation is [256. 0.], and its space Box(0, 255, (2,), uint8)",
    ),
    "a scalar beyond bytes": (
        {"space": Box(0, 255, (), np.uint8), "obs": np.int64(300)},
        "the observation is 300, and its space Box(0, 255, (), uint8)",
    ),
    "a part beyond 16 bits": (
        {"space": Dict(count=Box(-32768, 32767, (1,), np.int16)), "obs": {"count": np.array([40_000])}},
        "the observation 'count' is [40000], and its space Box(-32768, 32767, (1,), int16)",
    ),
    "fractions as bytes": ({"space": BYTES, "obs": np.full(2, 0.5)}, "the observation is float64, and its space uint8"),
    "a part with fractions": (
        {"space": Dict(image=BYTES), "obs": {"image": np.full(2, 0.5)}},
        "the observation 'image' is float64, and its space uint8",
    ),
    "an error": ({"obs": ValueError("no sensor")}, "raised ValueError: no sensor"),
}
FINE = {
    "a list": {"obs": [0.5, 1]},
    "integers": {"obs": np.ones(2, int)},
    "a reward without dimensions": {"reward": np.array(1.0)},
    "a truth as reward": {"reward": np.True_},
    "a number of Python": {"space": Discrete(3), "obs": 1},
    "whole numbers of eight bytes": {"space": BYTES, "obs": np.array([3, 255])},
    "a part of whole numbers of eight bytes": {"space": Dict(image=BYTES), "obs": {"image": np.array([3, 255])}},
    "whole numbers as floats": {"space": BYTES, "obs": np.array([3.0, 255.0])},
    "a part of whole numbers as floats": {"space": Dict(image=BYTES), "obs": {"image": np.array([3.0, 255.0])}},
}


class Odd(gym.Env):
    """Its second step is odd."""

    action_space = Discrete(2)

    def __init__(self, case):
        odd = FINE[case] if case in FINE else ODD[case][0]
        self.observation_space = odd.get("space", Box(-np.inf, np.inf, (2,), np.float32))
        self.odd = {"obs": None, "reward": 1.0} | odd
        self.good = {"obs": self.observation_space.sample(), "reward": 1.0}
        if case in FINE:
            self.good["obs"] = odd.get("obs", self.good["obs"])
        if "obs" not in odd:
            self.odd["obs"] = self.good["obs"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.good["obs"], {}

    def step(self, action):
        self.t += 1
        said = self.odd if self.t == 2 else self.good
        if isinstance(said["obs"], BaseException):
            raise said["obs"]
        return said["obs"], said["reward"], False, self.t == 5, {}


gym.register("Odd-v0", f"{__name__}:Odd")


def without_place(error):
    return re.sub(r" \(test_contract\.py:\d+\)$", "", str(error), flags=re.M)


def config(case, vectorization="sync", autoreset=None):
    return EnvConfig("Odd-v0", 2, vectorization, autoreset, {"case": case})


def two_steps(case, *how):
    with closing(make_vector_env(config(case, *how))) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            obs, reward, *_ = envs.step(np.zeros(2, int))
        return obs, reward


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "NEXT_STEP"])
def test_a_wrong_return_value_of_a_sync_environment_is_reported_with_its_name(case, autoreset):
    with pytest.raises(SettingError) as error:
        two_steps(case, "sync", autoreset)
    said = ODD[case][1]
    assert without_place(error.value) == f"environment 0 of Odd-v0{' ' if said.startswith('raised') else ': '}{said}"


@pytest.mark.variants
@pytest.mark.parametrize(
    "case",
    [
        "a scalar observation",
        "a part of another shape",
        "a reward as a text",
        "numbers beyond bytes",
        "a part beyond 16 bits",
        "a choice outside",
        "a part that is a choice outside",
    ],
)
def test_a_wrong_return_value_in_a_worker_is_reported_at_once(case):
    with pytest.raises(SettingError, match=r"^environment 0 of Odd-v0: ") as error:
        two_steps(case, "async")
    assert str(error.value).endswith(ODD[case][1])


@pytest.mark.parametrize("case", ["a longer observation", "a reward in a list", "numbers beyond bytes", "an error"])
def test_a_wrong_return_value_in_evaluation_is_reported(case):
    model = tiny(PPO, "Odd-v0", env={"kwargs": {"case": case}})
    with closing(make_player(model.env, 1, None)) as player, pytest.raises(SettingError) as error:
        player.play(model.network, 1, 0, True)
    assert str(error.value).startswith("environment 0 of Odd-v0") and without_place(error.value).endswith(ODD[case][1])


@pytest.mark.parametrize("case", FINE)
def test_equivalent_return_values_are_accepted(case):
    for how in (("sync",), ("sync", "NEXT_STEP")):
        obs, reward = two_steps(case, *how)
        pairs = zip(tree_leaves(obs), tree_leaves(FINE[case].get("obs", obs)), strict=True)
        assert all(np.allclose(ours, theirs) for ours, theirs in pairs) and np.allclose(reward, float(FINE[case].get("reward", 1.0)))


class Ends(gym.Env):
    """Ends after three steps, in an odd way; the info of each copy is of another type."""

    observation_space, action_space = Dict(arm=Box(-1, 1, (2,), np.float32)), Discrete(2)
    share = 0.0

    def __init__(self, case):
        self.case = case

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.share = self.share if seed is None else [0, 0.75, True, np.float32(0.5)][seed]
        self.t = 0
        extra = {"leg": np.zeros(2)} if self.case == "a part too many" else {}
        return {"arm": np.zeros(2, np.float32)} | extra, {}

    def step(self, action):
        self.t += 1
        over, mixed = self.t == 3, self.np_random.choice(4)
        info = {"is_success": "yes" if self.case == "a success as a text" else True, "mixed": [None, 1, "a", np.zeros(self.t)][mixed]}
        success = {"a success in a list": [True, False], "a success in an array": np.array([True]), "a share": self.share}.get(self.case)
        info = {"no info": None}.get(self.case, info if success is None else {"is_success": success if over else None})
        flag = {"an end in an array": np.array([over]), "an end that is none": None, "an end as a text": "no"}.get(self.case, over)
        obs = {"arm": np.zeros(2, np.float32)}
        return (obs, 1.0, flag, info) if self.case == "four values" else (obs, 1.0, flag, False, info)


gym.register("Ends-v0", f"{__name__}:Ends")
ENDS = {
    "a part too many": ": the observation 'leg' is not in its space",
    "a success as a text": ": is_success of the info is 'yes', and must be true, false or a number",
    "a success in a list": ": is_success of the info has shape (2,), and must be true, false or a number",
    "no info": ": the info is None, and must be a dict",
    "an end in an array": ": terminated has shape (1,), and must be true or false",
    "an end that is none": ": terminated is None, and must be true or false",
    "an end as a text": ": terminated is 'no', and must be true or false",
    "four values": (
        ": step must return observation, reward, terminated, truncated and info, and reset observation and info "
        "(not enough values to unpack (expected 5, got 4))"
    ),
}


def three_steps(case, *how):
    with closing(make_vector_env(EnvConfig("Ends-v0", 4, *how, kwargs={"case": case}))) as envs:
        envs.reset(seed=0)
        for _ in range(6):
            *_, infos = envs.step(np.zeros(4, int))
        return infos


@pytest.mark.parametrize("how", [("sync",), ("sync", "NEXT_STEP"), ("async",)], ids=" ".join)
@pytest.mark.parametrize("case", ENDS)
def test_an_odd_end_of_an_episode_is_reported_with_the_environments_name_and_nothing_is_restarted(case, how, capfd):
    with pytest.raises(SettingError) as error:
        three_steps(case, *how)
    assert str(error.value) == f"environment 0 of Ends-v0{ENDS[case]}" and capfd.readouterr().err == ""


@pytest.mark.parametrize("how", [("sync",), ("sync", "NEXT_STEP"), ("async",)], ids=" ".join)
def test_infos_that_fit_into_no_array_do_not_matter(how):
    infos = three_steps("fine", *how)
    assert infos["final_info"]["is_success"].all() if how != ("sync", "NEXT_STEP") else "mixed" not in infos


@pytest.mark.parametrize("how", [("sync",), ("async",)], ids=" ".join)
def test_a_success_may_be_missing_until_the_end_and_an_array_of_one(how):
    infos = three_steps("a success in an array", *how)
    assert infos["final_info"]["is_success"].tolist() == [1.0] * 4


@pytest.mark.parametrize("how", [("sync",), ("async",)], ids=" ".join)
def test_successes_of_environments_that_end_together_are_those_that_each_reports_whatever_their_types(how):
    assert three_steps("a share", *how)["final_info"]["is_success"].tolist() == [0.0, 0.75, 1.0, 0.5]


class Resets(Scripted):
    """Ends after three steps, and does not begin again."""

    def reset(self, **arguments):
        if getattr(self, "t", 0):
            raise RuntimeError("the level is locked")
        return super().reset(**arguments)


@pytest.mark.thorough
def test_an_error_in_reset_is_reported_with_the_environment():
    with pytest.raises(SettingError, match=r"^environment 0 of Resets raised RuntimeError: the level is locked \(test_contract\.py:\d+\)$"):
        fit(PPO(Resets, n_steps=8, batch_size=8, max_env_steps=64))


@pytest.mark.thorough
def test_the_command_line_prints_one_line_and_with_debug_the_traceback(folder, capfd):
    arguments = f"fit --model.env.id {__name__}:Odd-v0 --model.env.vectorization sync {TINY}"
    status, _, err = run(f"{arguments} --model.env.kwargs.case 'an error'", capfd)
    assert (status, without_place(err)) == (2, "error: environment 0 of Odd-v0 raised ValueError: no sensor\n")
    with pytest.raises(SettingError) as error:
        main([*arguments.split(), "--model.env.kwargs.case", "an error", "--debug"])
    cause = error.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    assert repr(cause) == "ValueError('no sensor')" and cause.__traceback__ is not None


def test_an_error_inside_an_installed_environment_is_not_taken_for_what_step_returns(tmp_path):
    file = tmp_path / "site-packages" / "theirs.py"
    steps = {}
    exec(compile("def step(self, action):\n    one, two = (1, 2, 3)\n", str(file), "exec"), steps)  # as if it were installed there
    broken = type("Theirs", (Scripted,), {"step": steps["step"]})
    with pytest.raises(SettingError, match=r"raised ValueError: too many values to unpack \(expected 2"):
        fit(PPO(broken, n_steps=8, batch_size=8, max_env_steps=64))


def test_a_method_that_is_left_out_is_named():
    spaces = {"observation_space": Box(-1, 1, (2,)), "action_space": Discrete(2)}
    unfinished = type("Unfinished", (gym.Env,), {**spaces, "reset": lambda self, **_: (np.zeros(2, np.float32), {})})
    with pytest.raises(SettingError, match=r"^environment 0 of Unfinished does not implement step$"):
        fit(PPO(unfinished, n_steps=8, batch_size=8, max_env_steps=64))


def test_an_error_of_an_environment_names_the_line_that_raised_it():
    lines, first = inspect.getsourcelines(Odd.step)
    line = first + next(i for i, text in enumerate(lines) if "raise" in text)
    with pytest.raises(SettingError, match=rf"\(test_contract\.py:{line}\)$"):
        two_steps("an error", "sync")


class Bare(gym.Env):
    """Has neither spaces nor the return values of gymnasium."""

    def reset(self, **arguments):
        return np.zeros(2, np.float32)

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, {}


class OldReset(Bare):
    """Returns an observation alone, whose two numbers might pass for an observation and an info."""

    observation_space, action_space = Box(-1, 1, (2,), np.float32), Discrete(2)


class OldStep(OldReset):
    """Returns four values from a step."""

    def reset(self, **arguments):
        return super().reset(), {}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Bare, "the environment Bare has no observation_space; see docs/environments.md"),
        (
            OldReset,
            "reset of the environment OldReset must return an observation and an info, a mapping; got array([0., 0.], dtype=float32)",
        ),
        (OldStep, "environment 0 of OldStep: step must return observation, reward, terminated, truncated and info, and reset"),
    ],
)
def test_an_environment_with_an_old_interface_gets_an_error_that_names_what_to_return(env, words):
    with pytest.raises(SettingError) as error:
        fit(PPO(env, n_steps=8, batch_size=8, max_env_steps=64))
    assert str(error.value).startswith(words)
