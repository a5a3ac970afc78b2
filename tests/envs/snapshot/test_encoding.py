"""Whatever the attributes of an environment are, it continues exactly, or says that it does not."""

from __future__ import annotations

import enum
import itertools
import logging
import time
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete

from lightning_rl.envs.config import EnvConfig
from lightning_rl.envs.make import make_vector_env
from lightning_rl.envs.snapshot.decoding import Decoder, write_all
from lightning_rl.envs.snapshot.encoding import MAX_PARTS, VERSION, Encoder, UnsupportedValueError, read_all
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


class WithPartial(Paid):
    """The argument of a function changes, which has a name; the trial ends before it does."""

    def begin(self):
        self.worth = partial(int, "10", base=2)

    def move(self):
        if self.t == 19:
            self.worth = partial(int, "10", base=3)

    def paid(self):
        return float(self.worth())


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


class WithComplex(Paid):
    def begin(self):
        self.small, self.large, self.left = 0j, np.complex128(0), range(40)

    def move(self):
        self.small, self.large, self.left = self.small + 1j, self.large + 1j, self.left[1:]

    def paid(self):
        return abs(self.small) + abs(self.large) + len(self.left)


class WithSpace(Paid):
    """Draws from a space that takes the place of a smaller one after the trial."""

    def begin(self):
        self.sizes = Discrete(2, seed=3)

    def move(self):
        if self.t == 19:
            self.sizes = Discrete(70, seed=3)

    def paid(self):
        return float(self.sizes.n)


class WithTwo(Paid):
    """One object is held by two attributes until one of them gets its own; one generator is shared likewise."""

    def begin(self):
        self.a = self.b = Item(0)
        self.noise = self.np_random

    def move(self):
        if self.t == 19:
            self.b, self.noise = Item(5), np.random.default_rng(7)

    def paid(self):
        return self.a.worth + 10 * self.b.worth + float(self.noise.random()) + float(self.np_random.random())


class WithTwoTensors(Paid):
    def begin(self):
        self.a = torch.zeros(4)
        self.b = self.a.view(2, 2)

    def move(self):
        self.b += 1

    def paid(self):
        return float(self.a.sum())


class WithDeleted(Paid):
    def begin(self):
        self.key = 1

    def move(self):
        if self.t == 12:
            del self.key

    def paid(self):
        return float(hasattr(self, "key"))


class WithWrapped(Paid):
    """Plays another environment within its own."""

    def begin(self):
        self.inner = gym.make("Pendulum-v1")
        self.inner.reset(seed=1)

    def move(self):
        self.last, *_ = self.inner.step(np.array([self.t % 2], np.float32))

    def paid(self):
        return float(self.last.sum())


class WithBoundMethod(Paid):
    def begin(self):
        self.log = []
        self.note = self.log.append

    def move(self):
        self.note(1)

    def paid(self):
        return float(len(self.log))


class WithSet(Paid):
    """The order of a set that shrank is not that of a new one."""

    def begin(self):
        self.left = set(range(200))

    def move(self):
        self.left -= set(range(3)) | set(range(4, 10)) | set(range(11, 200))

    def paid(self):
        return float(next(iter(self.left)))


class WithFrozen(Paid):
    @dataclass(frozen=True)
    class Rules:
        speed: float = 0.5

    def begin(self):
        self.rules = self.Rules()

    def move(self):
        self.rules = self.Rules(self.t / 2)

    def paid(self):
        return self.rules.speed


class WithChain(Paid):
    """A long chain of objects."""

    def begin(self):
        self.first = Item(None)

    def move(self):
        for _ in range(20):
            self.first = Item(self.first)

    def paid(self):
        length, item = 0, self.first
        while item.worth is not None:
            length, item = length + 1, item.worth
        return float(length)


EXACT = (
    *(WithEnum, WithTensor, WithSlots, WithView, WithViewFirst, WithSharedList, WithObject, WithContainers, WithIterator, WithFloat),
    *(WithComplex, WithTwoTensors, WithDeleted, WithWrapped, WithBoundMethod, WithSet, WithFrozen, WithChain),
)
TOLD = (WithPhase, WithPartial, WithSpace, WithTwo)
for cls in EXACT + TOLD:
    gym.register(f"{cls.__name__}-v0", cls)


@pytest.mark.parametrize("cls", EXACT)
def test_an_environment_continues_exactly_whatever_its_attributes_are(cls):
    config = EnvConfig(f"{cls.__name__}-v0", 2)
    assert is_continued(lambda: make_vector_env(config), config, before=20, after=50) is None


@pytest.mark.parametrize("cls", TOLD)
def test_an_environment_that_comes_back_in_another_state_is_reported(cls):
    config = EnvConfig(f"{cls.__name__}-v0", 2)
    line = is_continued(lambda: make_vector_env(config), config, before=20, after=50)
    assert line == f"{cls.__name__}-v0 could not be restored exactly"
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
def test_state_that_grew_too_large_to_be_saved_is_reported_and_does_not_end_the_run(vectorization):
    config = EnvConfig("Diary-v0", 1, vectorization)
    line = is_continued(lambda: make_vector_env(config), config, before=40, after=5)
    assert line == "Diary-v0 could not be restored exactly"
    assert is_continued(lambda: make_vector_env(config), config, before=20, after=2) is None


@pytest.mark.thorough
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
    assert Decoder(VERSION).decode(plain, existing) is existing and np.frombuffer(memory).tolist() == [1.0, 2.0]
    other = np.zeros(2)
    assert Decoder(VERSION).decode(plain, other) is not other and other.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "view",
    [
        ("~view", 1, 0, "<f8", 8, [2], [8]),  # beyond its end
        ("~view", 1, 0, "<f8", -8, [1], [8]),
        ("~view", 1, 0, "<f8", 0, [2**40], [0]),
        ("~view", 1, 0, "O", 0, [1], [8]),  # a number read as the place of an object
        ("~view", 1, 0, [("a", "O")], 0, [1], [8]),
        ("~view", 1, 5, "<f8", 0, [2], [8]),
    ],
)
def test_a_view_shows_only_numbers_of_what_it_is_a_view_of(view):
    decoder = Decoder(VERSION)
    decoder.decode(("~numpy", 0, np.zeros(2)))
    with pytest.raises((UnsupportedValueError, ValueError, TypeError)):
        decoder.decode(view)


class Cleaner:
    def __init__(self):
        self.done = []

    def clear(self):
        self.done.append("cleared")

    append = clear


class Plant(gym.Env):
    observation_space, action_space = Box(-1, 1, (1,)), Discrete(2)

    def __init__(self):
        self.cleaner, self.logger, self.numpy = Cleaner(), logging.getLogger("plant"), np
        self.inner = [self.logger, np, self.cleaner]


@pytest.mark.parametrize(
    "state",
    [
        {"cleaner": ("~object", 5, "Cleaner", {}), "step": ("~same", 5)},  # a method becomes something else
        {"cleaner": ("~list", 5, [1], None), "reset": 3},
        {"cleaner": ("~Counter", 5, [("a", 1)]), "cleaner_": ("~like", "Cleaner", [1])},
        {"logger": ("~object", 5, "Logger", {"level": 10})},
        {"numpy": ("~object", 5, "module", {"pi": 3.0})},
        {"inner": ("~list", 4, [("~object", 5, "Logger", {"level": 10}), None, None], None)},
        {"inner": ("~list", 4, [None, ("~object", 5, "module", {"pi": 3.0}), None], None)},
    ],
)
def test_a_file_cannot_replace_methods_or_write_into_what_no_state_is_read_from(state):
    plant = Plant()
    with pytest.raises(UnsupportedValueError):
        write_all([plant], [state], VERSION)
    assert plant.logger.level == 0 and np.pi > 3.1 and plant.cleaner.__class__ is not int
    assert callable(plant.step) and "step" not in vars(plant) and "reset" not in vars(plant)


@pytest.mark.thorough
def test_many_rows_of_one_array_are_read_in_a_moment_and_stay_rows_of_one():
    class Thing:
        pass

    thing, other = Thing(), Thing()
    for each in (thing, other):
        each.table = np.zeros((20_000, 4))
        each.rows = list(each.table)
    thing.table += 1
    began = time.process_time()
    write_all([other], read_all([thing], strict=True), VERSION, whole=True)
    assert time.process_time() - began < 5
    other.rows[7][2] = 9
    assert other.table.sum() == 80_000 + 8


def test_what_is_left_out_of_a_replay_costs_no_time_at_each_reset():
    class Words:
        pass

    words = Words()
    words.list = ["word"] * (MAX_PARTS + 1)
    began = time.process_time()
    for _ in range(1_000):
        assert read_all([words]) == [{}]
    assert time.process_time() - began < 2


@pytest.mark.thorough
def test_the_ways_of_packaged_environments_need_no_replay():
    games = ("MinAtar/Breakout-v1", "MiniGrid-Empty-5x5-v0", "lightning_rl/Memory1D-v0")
    for env_id in ("CartPole-v1", "FrozenLake-v1", "HalfCheetah-v5", *games):
        config = EnvConfig(env_id, 1)
        stepper = make_stepper(make_vector_env(config), config)
        assert stepper.keeper.ways == ["attributes"], env_id
        stepper.close()
