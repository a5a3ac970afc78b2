"""Leave Lightning's hooks to the user: a run does its own work before or after them, whether they call `super()` or not."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps

import pytorch_lightning as pl

RUN_HOOKS = {
    "on_train_start": "start_run",
    "on_save_checkpoint": "save_run",
    "on_load_checkpoint": "load_run",
}
"""Hooks in which a run does work, and the methods that do it."""

LAST_HOOK = "on_train_batch_end"
"""The hook that the run calls before checkpoints are saved; Lightning calls it after them."""

ConfigureCallbacks = Callable[..., Sequence[pl.Callback] | pl.Callback]


class HookedModule(pl.LightningModule):
    """A module that does work in Lightning's hooks without defining them, so that subclasses can override them freely."""

    hooks_in_progress: set[str]
    called_early: bool
    """Whether the last hook of this iteration has been called, before Lightning calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.hooks_in_progress, self.called_early = set(), False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        for hook in (*RUN_HOOKS, "configure_callbacks"):
            method = getattr(cls, hook)  # may come from a mixin
            if not hasattr(method, "does_work"):
                setattr(cls, hook, work_before(hook, method) if hook in RUN_HOOKS else add_own_callbacks(method))
        if not hasattr(getattr(cls, LAST_HOOK), "is_called_early"):
            setattr(cls, LAST_HOOK, skip_second_call(getattr(cls, LAST_HOOK)))

    def call_hook(self, name: str, *arguments: object, **named: object) -> object:
        """Call a hook without the run's own work, for a module that is part of another module's run."""
        self.hooks_in_progress.add(name)
        try:
            return getattr(self, name)(*arguments, **named)
        finally:
            self.hooks_in_progress.remove(name)

    def call_last_hook(self, *arguments: object) -> None:
        """Call the module's last hook of an iteration; Lightning's own call does nothing then."""
        self.call_hook(LAST_HOOK, *arguments)
        self.called_early = True

    def own_callbacks(self) -> list[pl.Callback]:
        """Return the callbacks that a run needs with any Trainer."""
        raise NotImplementedError


def work_before(name: str, hook: Callable[..., object]) -> Callable[..., object]:
    """Wrap a hook so that the run's work is done once before it, whether the hook calls `super()` or not."""

    @wraps(hook)
    def both(self: HookedModule, *arguments: object) -> object:
        if name in self.hooks_in_progress:  # called by `super()`
            return hook(self, *arguments)
        self.hooks_in_progress.add(name)
        try:
            getattr(self, RUN_HOOKS[name])(*arguments)
            return hook(self, *arguments)
        finally:
            self.hooks_in_progress.remove(name)

    both.does_work = True  # type: ignore[attr-defined]
    return both


def skip_second_call(hook: Callable[..., object]) -> Callable[..., object]:
    """Wrap the last hook of an iteration so that Lightning's call does nothing if the run has called it."""

    @wraps(hook)
    def once(self: HookedModule, *arguments: object, **named: object) -> object:
        if self.called_early:
            self.called_early = False
            return None
        return hook(self, *arguments, **named)

    once.is_called_early = True  # type: ignore[attr-defined]
    return once


def add_own_callbacks(configure_callbacks: ConfigureCallbacks) -> ConfigureCallbacks:
    """Wrap a `configure_callbacks` so that it adds to the run's own callbacks, whether it calls `super()` or not."""

    @wraps(configure_callbacks)
    def add(self: HookedModule) -> Sequence[pl.Callback] | pl.Callback:
        if "configure_callbacks" in self.hooks_in_progress:
            return configure_callbacks(self)
        self.hooks_in_progress.add("configure_callbacks")
        try:
            more = configure_callbacks(self) or []
        finally:
            self.hooks_in_progress.remove("configure_callbacks")
        given = [more] if isinstance(more, pl.Callback) else list(more)
        return [*(each for each in self.own_callbacks() if not has_kind(given, each)), *given]

    add.does_work = True  # type: ignore[attr-defined]
    return add


for name in RUN_HOOKS:
    setattr(HookedModule, name, work_before(name, getattr(pl.LightningModule, name)))
setattr(HookedModule, LAST_HOOK, skip_second_call(getattr(pl.LightningModule, LAST_HOOK)))
HookedModule.configure_callbacks = add_own_callbacks(pl.LightningModule.configure_callbacks)  # type: ignore[method-assign]


def has_kind(callbacks: Iterable[pl.Callback], callback: pl.Callback) -> bool:
    """Return whether there is a callback of this kind."""
    return any(isinstance(each, type(callback)) for each in callbacks)
