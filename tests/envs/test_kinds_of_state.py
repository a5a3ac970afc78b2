"""Whatever the attributes of an environment are, it continues exactly, or says that it does not."""

from __future__ import annotations

import enum
import itertools
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.snapshot.decoding import Decoder
from lightning_rl.envs.snapshot.encoding import MAX_PARTS, Encoder, UnsupportedValueError
from lightning_rl.envs.stepping import make_stepper
from tests.envs.continuing import is_continued


class Paid(gym.Env):
    """Episodes of 30 steps, paid at their end by what was kept until then."""

    observation_space, action_space = Box(-np.inf, np.inf, (1,), np.float32), Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.begin()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        self.move()
        return np.array([self.t], np.float32), self.paid() if self.t == 30 else 0.0, self.t == 30, False, {}


class Door(enum.Enum):
    SHUT = 0
    OPEN = 1


class Sides(enum.Flag):
    NONE = 0
    LEFT = 1
    RIGHT = 2


class Purse:
    __slots__ = ("__coins", "spent")

    def __init__(self):
        self.__coins = 0

    def put(self):
        self.__coins += 1

    @property
    def coins(self):
        return self.__coins


class Item:
    def __init__(self, worth):
        self.worth = worth


class Names(dict):
    pass


Place = namedtuple("Place", ["x", "y"])


class WithEnum(Paid):
    def begin(self):
        self.door, self.sides = Door.SHUT, Sides.NONE

    def move(self):
        if self.t == 20:
            self.door, self.sides = Door.OPEN, Sides.LEFT | Sides.RIGHT

    def paid(self):
        return float(self.door is Door.OPEN) + self.sides.value


class WithTensor(Paid):
    def begin(self):
        self.total, self.noise = torch.zeros(2), torch.Generator().manual_seed(int(self.np_random.integers(99)))

    def move(self):
        self.total += torch.rand(2, generator=self.noise)

    def paid(self):
        return float(self.total.sum())


class WithSlots(Paid):
    def begin(self):
        self.purse = Purse()

    def move(self):
        self.purse.put()

    def paid(self):
        return float(self.purse.coins)


class WithView(Paid):
    def begin(self):
        self.totals = np.zeros((3, 2))
        self.own, self.alike = self.totals[1:2, 1], self.totals

    def move(self):
        self.own += 1
        self.alike[0] += 2

    def paid(self):
        return float(self.totals.sum())


class WithViewFirst(WithView):
    """What is a part stands before what it is a part of."""

    def begin(self):
        whole = np.zeros((3, 2))
        self.own = whole[1:2, 1]
        self.totals = self.alike = whole


class WithSharedList(Paid):
    def begin(self):
        self.log, self.seen = [], {"sets": {1}}
        self.listeners = {"log": self.log, "all": self.seen["sets"], "again": (self.seen,)}
        self.log.append(self.listeners)  # a circle

    def move(self):
        self.listeners["log"].append(self.t)
        self.listeners["again"][0]["sets"].add(self.t)

    def paid(self):
        return float(len(self.log) + len(self.listeners["all"])) + (self.log[0] is self.listeners)


class WithObject(Paid):
    """One of several objects is held in two places, another one at the beginning of an episode."""

    def begin(self):
        self.items = [Item(k) for k in range(31)]
        self.held = self.items[0]

    def move(self):
        self.held = self.items[self.t]
        self.held.worth += 100

    def paid(self):
        self.items[30].worth += 1000
        return float(self.held.worth)


class WithContainers(Paid):
    def begin(self):
        self.counts, self.lists, self.names = Counter(), defaultdict(list), Names()
        self.order, self.recent, self.place = OrderedDict(), deque(maxlen=3), Place(0, [0])
        self.names.greeting = "none"
        self.boxes = np.array([None, "a"], dtype=object)

    def move(self):
        self.counts[self.t % 3] += 1
        self.lists[self.t % 2].append(self.t)
        self.names[self.t], self.names.greeting = 1, "x" * self.t
        self.order[-self.t] = self.t
        self.recent.append(self.t)
        self.place = Place(self.place.x + 1, [self.t])
        self.boxes[0] = self.t

    def paid(self):
        assert type(self.counts) is Counter and type(self.names) is Names and type(self.order) is OrderedDict
        sizes = sum(self.counts.values()) + len(self.lists[0]) + len(self.names) + len(self.names.greeting) + next(iter(self.order))
        return float(sizes + sum(self.recent) + self.place.x + self.place.y[0] + self.boxes[0])


class WithPhase(Paid):
    """What a step does is a function; the trial ends before another takes its place, and functions are not saved."""

    def begin(self):
        self.phase, self.total = self.walk, 0.0

    def walk(self):
        self.total += 1

    def run(self):
        self.total += 5

    def move(self):
        self.phase()
        if self.t == 19:
            self.phase = self.run

    def paid(self):
        return self.total


class WithIterator(Paid):
    """What an iterator will give cannot be looked at, but it comes to the same when actions are repeated."""

    def begin(self):
        self.numbers = itertools.count(int(self.np_random.integers(5)))

    def move(self):
        self.last = next(self.numbers)

    def paid(self):
        return float(self.last)


class WithFloat(WithIterator):
    """A number of a class of its own, whose value no attribute shows."""

    class Angle(float):
        pass

    def begin(self):
        self.angle = self.Angle(0)

    def move(self):
        self.angle = self.Angle(self.angle + 1)

    def paid(self):
        return float(self.angle)


EXACT = (WithEnum, WithTensor, WithSlots, WithView, WithViewFirst, WithSharedList, WithObject, WithContainers, WithIterator, WithFloat)
for cls in (*EXACT, WithPhase):
    gym.register(f"{cls.__name__}-v0", cls)


@pytest.mark.parametrize("cls", EXACT)
def test_an_environment_continues_exactly_whatever_its_attributes_are(cls):
    config = EnvConfig(f"{cls.__name__}-v0", 2)
    assert is_continued(lambda: make_vector_env(config), config, before=20, after=50) is None


def test_a_function_that_took_the_place_of_another_is_told():
    config = EnvConfig("WithPhase-v0", 2)
    line = is_continued(lambda: make_vector_env(config), config, before=20, after=50)
    assert line == "WithPhase-v0 did not come back as it was saved"
    assert is_continued(lambda: make_vector_env(config), config, before=35, after=50) is None


class Diary(Paid):
    """Writes down much more than an environment's state is expected to hold; it begins so late that the trial does not see it."""

    def begin(self):
        if not hasattr(self, "diary"):
            self.diary, self.place = [], 0

    def move(self):
        self.place += 1
        self.diary += [0.0] * (10_000 if self.place > 20 else 1)

    def paid(self):
        return float(self.place)


class OwnDiary(Diary):
    """Saves it itself."""

    def get_state(self):
        return {"diary": list(self.diary), "place": self.place, "t": self.t}

    def set_state(self, state):
        self.diary, self.place, self.t = list(state["diary"]), state["place"], state["t"]


for cls in (Diary, OwnDiary):
    gym.register(f"{cls.__name__}-v0", cls)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_what_grew_too_large_to_be_saved_costs_no_run_and_is_told(vectorization):
    config = EnvConfig("Diary-v0", 1, vectorization)
    line = is_continued(lambda: make_vector_env(config), config, before=40, after=5)
    assert line == "Diary-v0 did not come back as it was saved"
    assert is_continued(lambda: make_vector_env(config), config, before=20, after=2) is None


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_what_an_environment_saves_itself_may_be_of_any_size(vectorization):
    config = EnvConfig("OwnDiary-v0", 1, vectorization)
    assert is_continued(lambda: make_vector_env(config), config, before=40, after=5) is None


def test_each_attribute_may_have_as_many_values_as_are_allowed():
    class Two:
        def __init__(self):
            self.first, self.second, self.last = [0] * (MAX_PARTS - 1), [0] * (MAX_PARTS - 1), 7

    thing = Two()
    assert list(Encoder(strict=True).attributes(thing, MAX_PARTS)) == ["first", "second", "last"]
    thing.first.append(0)
    with pytest.raises(UnsupportedValueError, match="too large"):
        Encoder(strict=True).attributes(thing, MAX_PARTS)


def test_a_view_of_memory_that_is_not_numpys_is_written_there():
    memory = bytearray(16)
    existing = np.frombuffer(memory, np.float64)
    plain = Encoder().encode(np.array([1.0, 2.0]))
    assert Decoder().decode(plain, existing) is existing and np.frombuffer(memory).tolist() == [1.0, 2.0]
    other = np.zeros(2)
    assert Decoder().decode(plain, other) is not other and other.tolist() == [0.0, 0.0]


def test_a_view_cannot_reach_beyond_the_memory_of_what_it_is_a_view_of():
    decoder = Decoder()
    decoder.decode(("~numpy", 0, np.zeros(2)))
    with pytest.raises((ValueError, TypeError)):
        decoder.decode(("~view", 1, 0, "<f8", 8, [2], [8]))
    with pytest.raises(UnsupportedValueError):
        decoder.decode(("~view", 1, 5, "<f8", 0, [2], [8]))


def test_the_ways_of_packaged_environments_need_no_replay():
    games = ("MinAtar/Breakout-v1", "MiniGrid-Empty-5x5-v0", "lightning_rl/Memory1D-v0")
    for env_id in ("CartPole-v1", "FrozenLake-v1", "HalfCheetah-v5", *games):
        config = EnvConfig(env_id, 1)
        stepper = make_stepper(make_vector_env(config), config)
        assert stepper.keeper.ways == ["attributes"], env_id
        stepper.close()
