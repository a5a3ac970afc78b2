"""The saved state of an environment is data, and cannot choose what is called."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from lightning_rl.envs.snapshot.decoding import Decoder, write_all
from lightning_rl.envs.snapshot.encoding import CONSTRUCTOR_ARGUMENTS, HOW_BUILT, VERSION, Encoder, UnsupportedValueError, read_all
from lightning_rl.envs.snapshot.vector import PENDING_RESETS
from tests.environments import Scripted

BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_every_numpy_generator_continues_where_it_was_saved(name):
    generator = np.random.Generator(getattr(np.random, name)(7))
    generator.random(5)
    other = Decoder(VERSION).decode(Encoder().encode(generator))
    assert type(other.bit_generator).__name__ == name and np.array_equal(generator.random(9), other.random(9))


def test_a_checkpoint_cannot_choose_which_numpy_function_is_called(monkeypatch):
    called = []
    monkeypatch.setattr(np.random, "test", lambda: called.append(True), raising=False)
    for name in ("test", "Generator", "__class__", ["PCG64"], None):
        with pytest.raises(UnsupportedValueError):
            Decoder(VERSION).decode(("~generator", 0, ("~dict", 1, [("bit_generator", name)])))
    assert called == []


@pytest.mark.parametrize("kind", ["~nothing", "same", "~", "", 3, None, "~_x", "~container"])
def test_an_unknown_kind_of_plain_data_is_rejected(kind):
    with pytest.raises(UnsupportedValueError):
        Decoder(VERSION).decode((kind, "a", "b", "c"))
    with pytest.raises(UnsupportedValueError):
        Decoder(VERSION).decode(())


@pytest.mark.parametrize("name", ["__class__", "__dict__", "spec", "metadata", "_saved_kwargs", "env"])
def test_attributes_that_say_how_an_environment_was_built_are_not_written(name):
    env = gym.make("CartPole-v1")
    before = dict(vars(env))
    assert name not in read_all([env])[0]
    with pytest.raises(UnsupportedValueError):
        write_all([env], [{name: 1}], VERSION)
    write_all([env], [{name: 1}], VERSION, lenient=True)
    assert vars(env) == before and type(env).__name__ == "TimeLimit"


@pytest.mark.parametrize(("name", "place"), [("MT19937", 625), ("MT19937", -1), ("Philox", -1), ("Philox", 5), ("RandomState", 10**6)])
def test_a_generator_that_would_read_beyond_its_words_is_rejected(name, place):
    generator = np.random.RandomState(7) if name == "RandomState" else np.random.Generator(getattr(np.random, name)(7))
    kind, number, (_, _, items) = Encoder().encode(generator)
    state = dict(items)
    if name == "Philox":
        state["buffer_pos"] = place
    else:
        state["state"] = ("~dict", 90, [(key, place if key == "pos" else value) for key, value in state["state"][2]])
    with pytest.raises(UnsupportedValueError, match="beyond its words"):
        Decoder(VERSION).decode((kind, number, ("~dict", 91, list(state.items()))))


def test_gymnasium_still_has_the_private_attributes_that_are_read():
    wrapper = gym.wrappers.NormalizeReward(gym.make("HalfCheetah-v5"), gamma=0.9)
    assert vars(wrapper)[CONSTRUCTOR_ARGUMENTS]["gamma"] == 0.9
    assert {name for name in HOW_BUILT if name.startswith("_")} <= vars(wrapper).keys() | vars(wrapper.unwrapped).keys()
    assert getattr(SyncVectorEnv([Scripted]), PENDING_RESETS).tolist() == [False]
