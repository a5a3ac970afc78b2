"""What a checkpoint says of an environment is data, and chooses nothing that is called."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from lightning_rl.envs.snapshot.attributes import AttributeReader, AttributeWriter, NotAttributesError, read, write

BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_every_generator_of_numpy_goes_on_where_it_was(name):
    generator = np.random.Generator(getattr(np.random, name)(7))
    generator.random(5)
    other = AttributeWriter().value(AttributeReader().plain(generator))
    assert type(other.bit_generator).__name__ == name and np.array_equal(generator.random(9), other.random(9))


def test_a_checkpoint_cannot_choose_what_of_numpy_is_called(monkeypatch):
    called = []
    monkeypatch.setattr(np.random, "test", lambda: called.append(True), raising=False)
    for name in ("test", "Generator", "__class__", ["PCG64"], None):
        with pytest.raises(NotAttributesError):
            AttributeWriter().value(("~generator", 0, ("~dict", [("bit_generator", name)])))
    assert called == []


@pytest.mark.parametrize("kind", ["~nothing", "same", "~", "", 3, None, "~_x", "~container"])
def test_a_kind_that_nothing_says_is_refused(kind):
    with pytest.raises(NotAttributesError):
        AttributeWriter().value((kind, "a", "b", "c"))
    with pytest.raises(NotAttributesError):
        AttributeWriter().value(())


@pytest.mark.parametrize("name", ["__class__", "__dict__", "spec", "metadata", "_saved_kwargs", "env"])
def test_how_an_environment_was_made_is_not_written(name):
    env = gym.make("CartPole-v1")
    before = dict(vars(env))
    assert name not in read(env)
    with pytest.raises(NotAttributesError):
        write(env, {name: 1})
    write(env, {name: 1}, lenient=True)
    assert vars(env) == before and type(env).__name__ == "TimeLimit"


@pytest.mark.parametrize(("name", "place"), [("MT19937", 625), ("MT19937", -1), ("Philox", -1), ("Philox", 5), ("RandomState", 10**6)])
def test_a_generator_that_would_read_beyond_its_words_is_refused(name, place):
    generator = np.random.RandomState(7) if name == "RandomState" else np.random.Generator(getattr(np.random, name)(7))
    kind, number, (_, items) = AttributeReader().plain(generator)
    state = dict(items)
    if name == "Philox":
        state["buffer_pos"] = place
    else:
        state["state"] = ("~dict", [(key, place if key == "pos" else value) for key, value in state["state"][1]])
    with pytest.raises(NotAttributesError, match="without its words"):
        AttributeWriter().value((kind, number, ("~dict", list(state.items()))))
