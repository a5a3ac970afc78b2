"""The table of changes: what users of torch and Lightning do to an algorithm, and what is to come of it in each place.

`test_changes.py` and `test_changes_in_all_places.py` apply each change, and note in `TABLE` what came of it, which `pytest -n 0 -s` prints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple

import gymnasium as gym
import pytest
import pytorch_lightning as pl
import torch
from gymnasium.envs.classic_control import CartPoleEnv, PendulumEnv
from torch import nn
from torch.nn.utils import parametrizations, prune

import lightning_rl as lrl
from lightning_rl.networks.actor_critic import ActorCritic
from lightning_rl.networks.off_policy import Actor
from lightning_rl.networks.q_network import QNetwork
from lightning_rl.training.arguments import settings_of
from tests.fitting import REPLAY, TINY, tiny
from tests.training.test_arguments import ASSIGNED

PLACES = ("acting", "learning", "evaluation", "export", "load_policy", "resume", "another process", "another rank")
EQUAL, NAMED, REFUSED = "equal", "named", "refused"
"""The same as without fast paths, to rounding; a line names the change, which is lost there; or an error names it."""
TABLE: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
"""What came of each change of an algorithm, by place."""


def note(change: str, algorithm: str, place: str, outcome: str) -> None:
    """Note what came of a change, which is to be what the table of changes says."""
    TABLE[change, algorithm][place] = outcome
    assert outcome == expected(change, algorithm)[place], (change, algorithm, place)


def show_table() -> str:
    """Return the table in Markdown; a cell is empty where a change was not tried."""
    lines = ["| change | algorithm | " + " | ".join(PLACES) + " |", "|" + "---|" * (2 + len(PLACES))]
    for (change, algorithm), found in TABLE.items():
        cells = {**{place: text for place, text in expected(change, algorithm).items() if text not in (EQUAL, NAMED, REFUSED)}, **found}
        lines.append(f"| {change} | {algorithm} | " + " | ".join(cells.get(place, "") for place in PLACES) + " |")
    return "\n".join(lines)


# ---------------------------------------------------------------- changes of a network, after it is built

ALGORITHMS = {
    "actor-critic": partial(lrl.PPO, "CartPole-v1", net_arch=[8, 8], n_steps=8, batch_size=8, normalize_obs="running"),
    "separate critic": partial(lrl.PPO, "Pendulum-v1", net_arch=[8], n_steps=8, batch_size=8),
    "q network": partial(lrl.DQN, "CartPole-v1", net_arch=[8, 8], **REPLAY),
    "actor": partial(lrl.SAC, "Pendulum-v1", net_arch=[8, 8], **REPLAY),
}
IN_WEIGHTS = {"another layer", "weights in place", "weights by data", "weights by vector", "weights by assignment"}
"""Changes that are nothing but other weights, which every file holds."""
PARAMETRIZED = {"weight norm", "orthogonal weights"}
"""torch refuses to pickle these."""
OF_ALL, OF_A_CLASS = "a hook of all modules", "forward of a class of torch"
IN_TORCH = {OF_ALL, OF_A_CLASS}
"""Not in a network, but in torch: they act in this process, whatever is loaded."""
LINEAR, HOOKS = nn.Linear.forward, dict(nn.modules.module._global_forward_hooks)


def restore_torch() -> None:
    """End the changes of torch."""
    nn.Linear.forward = LINEAR  # type: ignore[method-assign]
    hooks = nn.modules.module._global_forward_hooks
    for number in hooks.keys() - HOOKS.keys():
        del hooks[number]


FAST = {"hook of the last layer", "another known activation", "settings of the constructor", "double precision"}
"""A share of the changes."""


UNLEARNED = "policy of the network"
"""Losses of off-policy algorithms do not read it."""


def in_turn(every: int, fast: Collection[tuple[str, str]] = ()) -> list[Any]:
    """Return each network with each change as parameters: one of `every` is thorough, in turn, and the others are slow."""

    def mark(number: int, change: str, network: int, name: str) -> Any:
        if (name, change) in fast:
            return ()
        return pytest.mark.slow if (network - number) % every else pytest.mark.thorough

    return [
        pytest.param(name, change, marks=mark(number, change, network, name), id=f"{change}-{name}")
        for network, name in enumerate(ALGORITHMS)
        for number, change in enumerate(NETWORK)
    ]


class Doubled(nn.Linear):
    """A layer of a user's own, of the same shape."""

    def forward(self, x):
        return 2 * super().forward(x)


class Reversed(nn.Sequential):
    """Layers of a user's own."""

    def forward(self, x):
        return super().forward(x).flip(-1)


class Scaled(nn.Linear):
    """A layer with an attribute and with a buffer that checkpoints leave out."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.factor = 1.0
        self.register_buffer("shift", torch.zeros(()), persistent=False)

    def forward(self, x):
        return self.factor * super().forward(x) + self.shift


class Halved(nn.Module):
    """An encoder of a user's own, put in the place of the network's."""

    is_vector = True

    def forward(self, obs):
        return obs / 2


def layers_of(network):
    return {ActorCritic: "actor", QNetwork: "head", Actor: "layers"}[type(network)]


def encoder_of(network):
    return "actor_encoder" if isinstance(network, ActorCritic) else "encoder"


def layers(network):
    return getattr(network, layers_of(network))


def last(network):
    return [layer for layer in layers(network) if isinstance(layer, nn.Linear)][-1]


def replace_last(network, kind):
    where = [i for i, layer in enumerate(layers(network)) if isinstance(layer, nn.Linear)][-1]
    new = kind(last(network).in_features, last(network).out_features)
    new.load_state_dict(last(network).state_dict())
    layers(network)[where] = new


def patch(part, name, change):
    before = getattr(part, name)
    setattr(part, name, MethodType(lambda self, *arguments, **named: change(before(*arguments, **named)), part))


def set_weights(network, change):
    with torch.no_grad():
        for parameter in network.parameters():
            change(parameter)


def assign_state(network):
    network.load_state_dict({**network.state_dict(), **{name: -value for name, value in network.named_parameters()}}, assign=True)


def flip(output):
    return output.flip(-1)


NETWORK: dict[str, Callable[[Any], object]] = {
    "hook of the last layer": lambda n: last(n).register_forward_hook(lambda m, i, out: flip(out)),
    "pre-hook of the first layer": lambda n: layers(n)[0].register_forward_pre_hook(lambda m, given: (-given[0],)),
    "hook of an activation": lambda n: layers(n)[1].register_forward_hook(lambda m, i, out: -out),
    "hook of the layers": lambda n: layers(n).register_forward_hook(lambda m, i, out: flip(out)),
    "hook of the encoder": lambda n: getattr(n, encoder_of(n)).register_forward_hook(lambda m, i, out: -out),
    "pre-hook of the encoder": lambda n: getattr(n, encoder_of(n)).register_forward_pre_hook(lambda m, given: (-given[0],)),
    "hook of the normalizer": lambda n: n.normalizer.register_forward_hook(lambda m, i, out: out / 3),
    "forward of the last layer": lambda n: patch(last(n), "forward", flip),
    "forward of the layers": lambda n: patch(layers(n), "forward", flip),
    "forward of the encoder": lambda n: patch(getattr(n, encoder_of(n)), "forward", torch.neg),
    "forward of the normalizer": lambda n: patch(n.normalizer, "forward", torch.neg),
    "policy of the network": lambda n: patch(n, "policy", lambda out: (flip(out[0]), out[1])),
    "forward of the network": lambda n: patch(n, "forward", torch.neg) if hasattr(n, "encoder") else patch(n.actor, "forward", torch.neg),
    "another encoder": lambda n: setattr(n, encoder_of(n), Halved()),
    "another activation": lambda n: layers(n).__setitem__(1, nn.SiLU()),
    "another known activation": lambda n: layers(n).__setitem__(1, nn.Tanh() if isinstance(layers(n)[1], nn.ReLU) else nn.ReLU()),
    "dropout": lambda n: layers(n).__setitem__(1, nn.Sequential(layers(n)[1], nn.Dropout(0.5)).eval()),
    "batch normalization": lambda n: layers(n).__setitem__(1, nn.Sequential(layers(n)[1], nn.BatchNorm1d(8)).eval()),
    "a layer of one's own": lambda n: replace_last(n, Doubled),
    "layers of one's own": lambda n: setattr(n, layers_of(n), Reversed(*layers(n))),
    "another layer": lambda n: replace_last(n, nn.Linear),
    "old weight norm": lambda n: (nn.utils.weight_norm(last(n)), set_weights(n, torch.neg_)),
    "weight norm": lambda n: (parametrizations.weight_norm(last(n)), set_weights(n, torch.neg_)),
    "old spectral norm": lambda n: nn.utils.spectral_norm(last(n)).eval(),
    "orthogonal weights": lambda n: parametrizations.orthogonal(last(n)),
    "pruning": lambda n: (prune.l1_unstructured(last(n), "weight", amount=0.5), set_weights(n, torch.neg_)),
    "weights in place": lambda n: set_weights(n, torch.neg_),
    "weights by data": lambda n: [setattr(parameter, "data", -parameter.data) for parameter in n.parameters()],
    "weights by vector": lambda n: nn.utils.vector_to_parameters(-nn.utils.parameters_to_vector(n.parameters()), n.parameters()),
    "weights by assignment": assign_state,
    "no bias": lambda n: setattr(last(n), "bias", None),
    "an attribute of a layer": lambda n: (replace_last(n, Scaled), setattr(last(n), "factor", 2.0)),
    "a buffer of a layer": lambda n: (replace_last(n, Scaled), last(n).shift.fill_(3.0)),
    "mode of the distribution": lambda n: patch(n.distribution, "mode", lambda action: 0 * action),
    OF_ALL: lambda n: nn.modules.module.register_module_forward_hook(lambda m, i, out: flip(out) if m is last(n) else None),
    OF_A_CLASS: lambda n: setattr(nn.Linear, "forward", lambda layer, x: 2 * nn.functional.linear(x, layer.weight, layer.bias)),
}


# ---------------------------------------------------------------- changes of a run: of settings, gradients, environments …

Made = tuple[Any, list[pl.Callback]]
"""An algorithm, and callbacks of its run."""


def as_it_is(algorithm: type) -> Made:
    return tiny(algorithm), []


class Change(NamedTuple):
    """A change of a run.

    make: makes the algorithm with the change, and callbacks.
    to: the algorithms.
    counts: whether the run differs from the one without the change.
    reference: makes what it is to be equal to; None: itself without fast paths.
    base: makes the run without the change.
    around: a context of everything that is done with it.
    outcomes: those that are not EQUAL, or why there is none, by place.
    """

    make: Callable[[type], Made]
    to: tuple[type, ...] = (lrl.PPO, lrl.SAC)
    counts: bool = True
    reference: Callable[[type], Made] | None = None
    base: Callable[[type], Made] = as_it_is
    around: Callable[[], Any] = lambda: pytest.MonkeyPatch.context()
    outcomes: Mapping[str, str] = {}


class At(pl.Callback):
    """Change the algorithm at the end of an iteration, and again in a run that is resumed after it."""

    def __init__(self, iteration: int, change: Callable[[Any], object]) -> None:
        self.iteration, self.change = iteration, change

    def on_train_start(self, trainer: pl.Trainer, algorithm: Any) -> None:
        if trainer.global_step >= self.iteration:
            self.change(algorithm)

    def on_train_batch_end(self, trainer: pl.Trainer, algorithm: Any, *arguments: object) -> None:
        if trainer.global_step == self.iteration:
            self.change(algorithm)


class Every(At):
    """Change the algorithm at the end of each iteration."""

    def on_train_start(self, trainer: pl.Trainer, algorithm: Any) -> None:
        pass

    def on_train_batch_end(self, trainer: pl.Trainer, algorithm: Any, *arguments: object) -> None:
        self.change(algorithm)


SETTINGS = [case for case in ASSIGNED if case[0] in (lrl.PPO, lrl.A2C, lrl.IMPALA, lrl.PQN)]
"""Those of the others are in `test_arguments.py`."""


def assign(name: str, value: object) -> Callable[[type], Made]:
    def make(algorithm: type) -> Made:
        model = tiny(algorithm)
        setattr(model, name, value)
        return model, []

    return make


def read_in_the_constructor(algorithm: type) -> Made:
    """Assign each other setting, which says so."""
    model, before = tiny(algorithm), tiny(algorithm).hparams
    assignable = {name for base in algorithm.__mro__ for name in vars(base).get("assignable", ())} | model.schedules.keys()
    for name in settings_of(algorithm).keys() - assignable - {"clip_range_vf", "spaces"}:
        line = rf"^{algorithm.__name__}.{name} is read in the constructor: {algorithm.__name__}\(…, {name}=3\)$"
        with pytest.raises(lrl.SettingError, match=line):
            setattr(model, name, 3)
    assert model.hparams == before
    raise lrl.SettingError("read in the constructor")


def with_callback(callback: Callable[[], pl.Callback]) -> Callable[[type], Made]:
    return lambda algorithm: (tiny(algorithm), [callback()])


def in_mid_run(change: Callable[[Any], object]) -> Callable[[type], Made]:
    return with_callback(partial(At, 2, change))


def in_hook(hook: str, change: Callable[[list[Any]], object]) -> Callable[[type], Made]:
    """Change gradients of the policy in a hook of Lightning's."""

    def make(algorithm: type) -> Made:
        def method(self: Any, trainer: Any, model: Any, *optimizer: Any) -> None:
            if found := [parameter for parameter in model.network.parameters() if parameter.grad is not None]:
                change(found)

        return tiny(algorithm), [type("Hook", (pl.Callback,), {hook: method})()]

    return make


def set_gradients(parameters: list[Any], change: Callable[[Any], Any]) -> None:
    for parameter in parameters:
        parameter.grad = change(parameter.grad)


GRADIENTS: dict[str, tuple[Callable[[list[Any]], object], bool]] = {
    "cloned": (lambda found: set_gradients(found, torch.clone), False),
    "replaced": (lambda found: set_gradients(found, torch.ones_like), True),
    "removed in part": (lambda found: set_gradients(found[:2], lambda grad: None), True),
    "zeroed in part": (lambda found: [parameter.grad.zero_() for parameter in found[-2:]], True),
}


def subclass(change: Callable[[type], type]) -> Callable[[type], Made]:
    @cache
    def make_class(algorithm: type) -> type:
        made = change(algorithm)
        made.__qualname__ = made.__name__ = f"{change.__name__}_{algorithm.__name__}"  # checkpoints name it
        return made

    return lambda algorithm: (tiny(make_class(algorithm)), [])


def squares(network: nn.Module) -> Any:
    return sum(each.square().sum() for each in network.parameters())


def in_a_plain_loop(algorithm: type) -> type:
    class Plain(algorithm):  # type: ignore[misc]
        def step(self, loss, optimizer, name="loss"):
            optimizer.zero_grad()
            loss.backward(inputs=[each for group in optimizer.param_groups for each in group["params"]])
            norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.max_grad_norm or float("inf"))
            optimizer.step()
            return norm

    return Plain


def with_torchs_adam(algorithm: type) -> type:
    class Plain(algorithm):  # type: ignore[misc]
        def configure_optimizers(self):
            modules = [getattr(self, name) for name in ("critic", "network", "temperature") if hasattr(self, name)]
            eps = 1e-5 if isinstance(self, lrl.PPO) else 1e-8
            return self.with_side_learners(*(torch.optim.Adam(each.parameters(), self.learning_rate, eps=eps) for each in modules))

    return Plain


def in_two_optimizers(algorithm: type) -> type:
    class Shared(algorithm):  # type: ignore[misc]
        def configure_optimizers(self):
            first, second, *others = super().configure_optimizers()
            second.add_param_group({"params": [*self.critic.parameters()]})
            return [first, second, *others]

        def actor_loss(self, batch, obs, noise):
            loss, *others = super().actor_loss(batch, obs, noise)
            return loss + sum(each.square().mean() for each in self.critic.parameters()), *others

    return Shared


def with_state(algorithm: type) -> type:
    class Counts(algorithm):  # type: ignore[misc]
        def on_train_batch_start(self, *arguments):
            self.seen = getattr(self, "seen", 0) + 1

        def step(self, loss, *others):
            return super().step(loss + self.seen * squares(self.network), *others)

    return Counts


def with_an_overridden_loss(algorithm: type) -> type:
    class Other(algorithm):  # type: ignore[misc]
        def actor_loss(self, *arguments):
            loss, *others = super().actor_loss(*arguments)
            return loss + squares(self.network), *others

        def loss(self, *arguments):
            loss, *others = super().loss(*arguments)
            return loss + squares(self.network), *others

    return Other


def record(model: Any) -> None:
    model.record(**{"mine/steps": float(model.env_steps)})


def take_policies(model: Any) -> None:
    lrl.Policy(model.network, model.spaces)
    lrl.evaluate(model, episodes=1)


def freeze(model: Any) -> None:
    next(iter(model.network.parameters())).requires_grad_(False)


def re_point(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def by_vector(model: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.network.parameters()), model.network.parameters())


def linears(model: Any) -> list[nn.Linear]:
    return [each for each in model.network.modules() if isinstance(each, nn.Linear)]


def replace_method(core: Any, name: str, change: Callable[..., Any]) -> None:
    before = getattr(core, name)
    setattr(core, name, lambda *arguments, **named: change(core, before(*arguments, **named)))


def changed(env_id: str, change: Callable[[gym.Env], object]) -> gym.Env:
    env = gym.make(env_id)
    change(env)
    return env


def pay_by_position(core: Any, result: Any) -> Any:
    return result[0], float(result[0][0]), *result[2:]


def draw_constant(core: Any, result: Any) -> Any:
    name = "gravity" if hasattr(core, "gravity") else "g"
    setattr(core, name, core.np_random.uniform(5, 15))
    return result


def double_gravity(env: gym.Env) -> None:
    name = "gravity" if hasattr(env.unwrapped, "gravity") else "g"
    setattr(env.unwrapped, name, 2 * getattr(env.unwrapped, name))


HOME = {lrl.PPO: "CartPole-v1", lrl.SAC: "Pendulum-v1"}


def in_classic_control(change: Callable[[gym.Env], object], ready: bool = False) -> Callable[[type], Made]:
    """Change environments in a function that builds them, or one that is ready."""

    def make(algorithm: type) -> Made:
        torch.manual_seed(0)
        env = partial(changed, HOME[algorithm], change)
        return algorithm(env() if ready else env, net_arch=[8], **TINY[algorithm], max_env_steps=192 if algorithm is lrl.PPO else 96), []

    return make


@contextmanager
def patched_class() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        for kind in (CartPoleEnv, PendulumEnv):
            before = kind.step
            patches.setattr(kind, "step", lambda self, action, before=before: pay_by_position(self, before(self, action)))
        yield


def classic_control(algorithm: type) -> Made:
    return in_classic_control(lambda env: None, ready=True)(algorithm)


PRUNED = "pruning in mid-run"
"""Evaluators elsewhere cannot perturb weights that came after they started."""
IN_MID_RUN = {"load_policy": NAMED, "another process": NAMED}
RUNS: dict[str, Change] = {
    **{
        f"{name} = {'a schedule' if callable(value) or isinstance(value, dict) else value} ({kind.__name__} {number})": Change(
            assign(name, value),
            (kind,),
            reference=lambda algorithm, name=name, value=value: (tiny(algorithm, **{name: value}), []),
        )
        for number, (kind, name, value) in enumerate(SETTINGS)
    },
    "settings of the constructor": Change(
        read_in_the_constructor, (lrl.PPO, lrl.SAC, lrl.DQN, lrl.TD3), outcomes=dict.fromkeys(PLACES, REFUSED)
    ),
    **{
        f"gradients {name} in {hook}": Change(in_hook(hook, change), counts=counts)
        for hook in ("on_after_backward", "on_before_optimizer_step")
        for name, (change, counts) in GRADIENTS.items()
    },
    "a plain torch loop": Change(
        subclass(in_a_plain_loop), counts=False, outcomes={"another rank": "such a loop has its own gradients to average"}
    ),
    "torch's Adam": Change(subclass(with_torchs_adam), counts=False),
    "a module in two optimizers": Change(subclass(in_two_optimizers), (lrl.SAC,)),
    "a loss overridden": Change(subclass(with_an_overridden_loss)),
    "a plain attribute of a subclass": Change(subclass(with_state)),
    "a recorded value": Change(with_callback(partial(Every, 1, record)), counts=False),
    "policies taken in a callback": Change(with_callback(partial(Every, 1, take_policies)), counts=False),
    "parameters re-pointed in mid-run": Change(in_mid_run(re_point), counts=False),
    "parameters by vector in mid-run": Change(in_mid_run(by_vector), counts=False),
    "double and float in mid-run": Change(in_mid_run(lambda model: model.double().float()), counts=False),
    "a layer frozen in mid-run": Change(in_mid_run(freeze)),
    PRUNED: Change(
        in_mid_run(lambda model: prune.l1_unstructured(linears(model)[0], "weight", amount=0.5)),
        outcomes={"load_policy": NAMED, "resume": REFUSED, "another process": NAMED},
    ),
    "a hook in mid-run": Change(
        in_mid_run(lambda model: linears(model)[0].register_forward_hook(lambda m, i, out: 2 * out)), outcomes=IN_MID_RUN
    ),
    "forward of a layer in mid-run": Change(in_mid_run(lambda model: patch(linears(model)[0], "forward", flip)), outcomes=IN_MID_RUN),
    "double precision": Change(in_mid_run(lambda model: model.network.double()), outcomes=dict.fromkeys(PLACES, REFUSED)),
    "a step that a function patches": Change(
        in_classic_control(lambda env: replace_method(env.unwrapped, "step", pay_by_position)), base=classic_control
    ),
    "constants drawn in reset": Change(
        in_classic_control(lambda env: replace_method(env.unwrapped, "reset", draw_constant)), base=classic_control
    ),
    "an attribute of a ready copy": Change(in_classic_control(double_gravity, ready=True), base=classic_control),
    "a method of a ready copy": Change(
        in_classic_control(lambda env: replace_method(env.unwrapped, "step", pay_by_position), ready=True),
        outcomes=dict.fromkeys(PLACES, REFUSED),
    ),
    "step of a class of gymnasium": Change(classic_control, around=patched_class, base=classic_control),
}


ELSEWHERE = [
    (name, kind)
    for kind in (lrl.IMPALA, lrl.EvolutionStrategies)
    for name, change in RUNS.items()
    if kind in change.to
    or (lrl.PPO in change.to and change.reference is None and change.base is as_it_is and "acting" not in change.outcomes)
    if (name, kind) != ("a loss overridden", lrl.EvolutionStrategies)
]
"""Changes of runs whose actors may be in other processes. Environments have theirs with all algorithms."""


def in_a_thread(outcome: str) -> str:
    """Return the outcome for an algorithm whose actor may be in a thread, but in no other process."""
    return f"{outcome} in a thread"


def mark_of_run(change: str, algorithm: type) -> Any:
    """Return the mark of a change of a run: thorough for one algorithm of each, and slow for others and for settings, which have tests."""
    turn = RUNS[change].to[[*RUNS].index(change) % len(RUNS[change].to)]
    is_thorough = RUNS[change].reference is None and algorithm in (turn, lrl.IMPALA)
    return pytest.mark.thorough if is_thorough else pytest.mark.slow


def expected(change: str, algorithm: str) -> dict[str, str]:
    """Return what is to come of a change in each place, or why nothing does."""
    found = dict.fromkeys(PLACES, EQUAL)
    if change in RUNS:
        found |= RUNS[change].outcomes
        if (change, algorithm) == (PRUNED, "EvolutionStrategies"):
            found["another process"] = REFUSED
        if RUNS[change].base is as_it_is and found["acting"] != REFUSED and algorithm not in ("IMPALA", "EvolutionStrategies"):
            found["another process"] = in_a_thread(found["another process"]) if algorithm in ("PPO", "SAC") else "acts where it learns"
        return found
    if change not in IN_WEIGHTS:
        found |= {"load_policy": NAMED, "resume": NAMED}
    if change in PARAMETRIZED:
        found["another process"] = REFUSED
    if change in IN_TORCH:
        found |= {"another process": NAMED, **({"export": REFUSED} if change == OF_ALL and algorithm == "actor-critic" else {})}
    if change == UNLEARNED and algorithm in ("q network", "actor"):
        found |= {"learning": REFUSED, "resume": REFUSED, "another rank": REFUSED}
    return found
