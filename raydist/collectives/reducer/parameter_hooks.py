"""The parameters of a gradient reducer, the hooks that a program has registered on parameters, and backward passes.

torch keeps hooks in two dictionaries of the parameter: for hooks that run before the gradient is added to `.grad`, and
for hooks that run afterwards. raydist copies the hooks to replicas, and defers them while gradients are exchanged.

The end-of-backward callback of the autograd engine fires once per segment under reentrant checkpointing, and not at all
for a frozen model. So `torch.autograd.backward`, which `Tensor.backward` calls, is wrapped by the first interception of
the process and stays wrapped. Without a handler the wrapper only forwards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

import torch
from torch.utils.hooks import RemovableHandle

from raydist.compat.torch_internals import disable_compiler, hook_tables, new_hook_tables

_Listener = Callable[[int, torch.nn.Parameter], None]
_Receiver = Callable[[int, torch.Tensor], None]


@final
class TrainedParameters:
    """The parameters of a reducer, each under a number that is the same on every rank.

    Args:
        stray: A bound method, called with number and parameter for a gradient outside of a synchronised pass. The
            reference to the method is weak, since the hooks live as long as the parameters.
    """

    def __init__(self, stray: _Listener) -> None:
        self.sink = GradientSink(stray)
        self.all: dict[int, torch.nn.Parameter] = {}  # every parameter, by number
        self.indices: tuple[int, ...] = ()  # numbers of the parameters that were trained in the last call of `look`
        self.trained: tuple[torch.nn.Parameter, ...] = ()  # the parameters of `indices`
        # number, dtype and shape of each parameter of `trained`
        self.kinds: tuple[tuple[int, torch.dtype, torch.Size], ...] = ()
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._attached: Iterable[torch.nn.Parameter] | None = None
        self._seen: list[tuple[bool, torch.dtype, torch.Size]] = []

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if parameters is self._attached:
            return
        given = {id(parameter): parameter for parameter in parameters}
        for key in self._numbers.keys() - given.keys():
            index = self._numbers.pop(key)
            del self.all[index]
            if index in self._handles:
                self._handles.pop(index).remove()
        for key, parameter in given.items():
            if key not in self._numbers:
                self._numbers[key] = self._next
                self.all[self._next] = parameter
                self._next += 1
        self._attached = parameters if isinstance(parameters, tuple) else None
        self._seen = []
        self.look()

    def number_of(self, parameter: torch.Tensor) -> int | None:
        """Return the number of a parameter; None for a parameter that is not in the reducer."""
        return self._numbers.get(id(parameter))

    def look(self) -> None:
        """Update `indices`, `trained` and `kinds`; register a hook on each parameter trained for the first time."""
        shown = [(parameter.requires_grad, parameter.dtype, parameter.shape) for parameter in self.all.values()]
        if shown == self._seen and shown:
            return
        self._seen = shown
        self.indices = tuple(index for index, parameter in self.all.items() if parameter.requires_grad)
        self.trained = tuple(self.all[index] for index in self.indices)
        self.kinds = tuple((index, self.all[index].dtype, self.all[index].shape) for index in self.indices)
        for index in self.indices:
            if index not in self._handles:
                hook = OwnHook(self.sink.gradient, index)
                self._handles[index] = self.all[index].register_post_accumulate_grad_hook(hook)

    def close(self) -> None:
        """Remove all parameters and their hooks. May be called twice."""
        self.attach(())


@final
class GradientSink:
    """The target of the hooks on parameters.

    Hooks on parameters refer to the sink, so the sink must not refer to parameters: the cycle would keep them alive.
    """

    def __init__(self, stray: _Listener) -> None:
        # called with number and gradient, which is removed from `.grad`; None outside of a pass
        self.receiver: _Receiver | None = None
        self._stray = weakref.WeakMethod(stray)

    def gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        receiver = self.receiver
        if receiver is None:
            stray = self._stray()
            if stray is not None:
                stray(index, parameter)
            return
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            receiver(index, gradient)


Hooks = Mapping[Hashable, Callable[..., Any]]
_P = TypeVar("_P", bound=torch.Tensor)


@final
class OwnHook(functools.partial[Any]):
    """A hook of raydist, as opposed to a hook of the program. It is valid in one process only."""


@final
@dataclass(frozen=True, slots=True)
class ParameterHooks:
    """The program's hooks on one parameter, by key.

    An integer key is valid in one process only, so `attach` replaces it by a new one.
    """

    before: Hooks = field(default_factory=dict)  # of `register_hook`
    after: Hooks = field(default_factory=dict)  # of `register_post_accumulate_grad_hook`

    @staticmethod
    def of(parameter: torch.Tensor) -> ParameterHooks:
        return ParameterHooks(*map(_programs, hook_tables(parameter)))

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def keys(self) -> frozenset[Hashable]:
        return frozenset((*self.before, *self.after))

    def under(self, origin: str) -> ParameterHooks:
        """Return the hooks under keys that are unique among processes. `origin` names this process."""
        before: Hooks = {(origin, key): hook for key, hook in self.before.items()}
        return ParameterHooks(before, {(origin, key): hook for key, hook in self.after.items()})

    def without(self, keys: Iterable[Hashable]) -> ParameterHooks:
        gone = frozenset(keys)
        return ParameterHooks(*({key: hook for key, hook in held.items() if key not in gone} for held in self._both()))

    def attach(self, parameter: torch.Tensor) -> None:
        if self:
            for held, hooks in zip(new_hook_tables(parameter), self._both(), strict=True):
                for key, hook in hooks.items():
                    held[RemovableHandle(held).id if isinstance(key, int) else key] = hook

    def _both(self) -> tuple[Hooks, Hooks]:
        return self.before, self.after


def detach_hooks(parameter: torch.Tensor, keys: Iterable[Hashable]) -> None:
    """Remove the hooks under these keys from a parameter."""
    for key in keys:
        for held in hook_tables(parameter):
            if held is not None:
                held.pop(key, None)


def hooked_of(parameters: Iterable[tuple[int, _P]]) -> dict[int, _P]:
    """Return the parameters with hooks of the program, by number. Each parameter must have one hook of raydist.

    Takes 0.1 us per parameter without hooks.
    """
    found: dict[int, _P] = {}
    for index, parameter in parameters:
        before, after = hook_tables(parameter)
        if (before or len(after or ()) > 1) and ParameterHooks.of(parameter):
            found[index] = parameter
    return found


@final
class DeferredHooks:
    """The deferred hooks of some parameters, by number: until `give_back`, torch calls no-ops in their places."""

    def __init__(self, parameters: Mapping[int, torch.Tensor]) -> None:
        self.indices = parameters.keys()
        self._held: list[tuple[dict[Hashable, Any], Hashable, Any]] = []
        for parameter in parameters.values():
            for held in new_hook_tables(parameter):
                for key, hook in _programs(held).items():
                    self._held.append((held, key, hook))
                    held[key] = _do_nothing

    def give_back(self) -> None:
        """Restore the hooks, except hooks that were removed meanwhile. May be called twice."""
        for held, key, hook in self._held:
            if key in held:
                held[key] = hook
        self._held.clear()


def _do_nothing(_: torch.Tensor) -> None:
    return None


def _programs(held: Hooks | None) -> Hooks:
    return {key: hook for key, hook in (held or {}).items() if type(hook) is not OwnHook}


Backward = Callable[..., None]
Handler = Callable[[Backward, tuple[Any, ...], dict[str, Any]], None]
"""Called in place of `torch.autograd.backward`, with the original function, its arguments and its keyword arguments."""

_HANDLER: ContextVar[Handler | None] = ContextVar("raydist_backward_handler", default=None)


def begin_interception(handler: Handler) -> Token[Handler | None]:
    """Pass every `backward()` of this thread to `handler`, until `end_interception` with the returned token."""
    present = torch.autograd.backward
    if not getattr(present, "hands_to_raydist", False):  # also after other code has restored torch's function
        torch.autograd.backward = _wrapped(present)
    return _HANDLER.set(handler)


def end_interception(token: Token[Handler | None]) -> None:
    """Restore the handler that was set before."""
    _HANDLER.reset(token)


@functools.lru_cache(maxsize=8)  # torch would disable its compiler for each new function again
def _wrapped(original: Backward) -> Backward:
    @disable_compiler  # collectives must not be traced in a compiled step
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        handler = _HANDLER.get()
        if handler is None:
            original(*args, **kwargs)
        else:
            handler(original, args, kwargs)

    wrapper: Any = backward
    wrapper.hands_to_raydist = True
    return backward
