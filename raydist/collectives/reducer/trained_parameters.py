"""The parameters of one replica: which of them are trained now, and word of each gradient that appears."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import final

import torch

from raydist.collectives.reducer.parameter_hooks import OwnHook, hooked_of

__all__ = ["TrainedParameters"]

_Listener = Callable[[int, torch.nn.Parameter], None]
_Receiver = Callable[[int, torch.Tensor], None]


@final
class TrainedParameters:
    """The parameters that a reducer is in charge of, each under a number that is the same on every rank.

    Args:
        stray: A bound method, called with number and parameter when a gradient has appeared that nobody receives. It
            is held weakly: the hooks live as long as the parameters do.

    Attributes:
        door: Where gradients come in.
        all: Every parameter, by number.
        indices: Numbers of those that were trained when `look` was last called.
        trained: Those themselves.
    """

    def __init__(self, stray: _Listener) -> None:
        self.door = Door(stray)
        self.all: dict[int, torch.nn.Parameter] = {}
        self.indices: tuple[int, ...] = ()
        self.trained: tuple[torch.nn.Parameter, ...] = ()
        self._numbers: dict[int, int] = {}
        self._next = 0
        self._handles: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._attached: Iterable[torch.nn.Parameter] | None = None
        self._seen: list[tuple[bool, torch.dtype, torch.Size]] = []
        self._kinds: dict[int, tuple[torch.dtype, torch.Size]] = {}

    def attach(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Be in charge of these, and of no others any more; a tuple that was given before costs nothing."""
        if parameters is self._attached:
            return
        given = {id(parameter): parameter for parameter in parameters}
        for key in self._numbers.keys() - given.keys():
            self._drop(self._numbers.pop(key))
        for key, parameter in given.items():
            if key not in self._numbers:
                self._numbers[key] = self._next
                self.all[self._next] = parameter
                self._next += 1
        self._attached = parameters if isinstance(parameters, tuple) else None
        self._seen = []
        self.look()

    def number_of(self, parameter: torch.Tensor) -> int | None:
        """Return the number of a parameter; None for one that the reducer is not in charge of."""
        return self._numbers.get(id(parameter))

    def _drop(self, index: int) -> None:
        del self.all[index]
        self._kinds.pop(index, None)
        if index in self._handles:
            self._handles.pop(index).remove()

    def look(self) -> tuple[int, ...]:
        """See which are trained now; each has a hook from its first time on.

        One that was cast, or has another shape, counts as another one: what is laid out for its gradient does not fit.
        """
        if self._shown() != self._seen or not self._seen:
            self._renumber()
            self._seen = self._shown()
            self.indices = tuple(index for index, parameter in self.all.items() if parameter.requires_grad)
            self.trained = tuple(self.all[index] for index in self.indices)
            for index in self.indices:
                if index not in self._handles:
                    hook = OwnHook(self.door.gradient, index)
                    self._handles[index] = self.all[index].register_post_accumulate_grad_hook(hook)
        return self.indices

    def _shown(self) -> list[tuple[bool, torch.dtype, torch.Size]]:
        return [(parameter.requires_grad, parameter.dtype, parameter.shape) for parameter in self.all.values()]

    def _renumber(self) -> None:
        for index, parameter in list(self.all.items()):
            kind = (parameter.dtype, parameter.shape)
            if self._kinds.setdefault(index, kind) != kind:
                self._drop(index)
                self._numbers[id(parameter)] = self._next
                self.all[self._next], self._kinds[self._next] = parameter, kind
                self._next += 1

    def hooked(self) -> dict[int, torch.nn.Parameter]:
        """Those of the trained that the program has registered hooks on."""
        return hooked_of(zip(self.indices, self.trained, strict=True))

    def take(self) -> list[tuple[int, torch.Tensor]]:
        """Numbers and gradients of the trained that have one, out of `.grad`."""
        taken = []
        for index, parameter in zip(self.indices, self.trained, strict=True):
            gradient = parameter.grad
            if gradient is not None:
                taken.append((index, gradient))
                parameter.grad = None
        return taken

    def close(self) -> None:
        """Let go of them. May be called twice."""
        self.attach(())


@final
class Door:
    """Where gradients come in. The parameters hold it: it may not hold them, or model and reducer would never end.

    Attributes:
        receiver: Takes numbers and gradients out of `.grad` as they appear, so that one that follows comes alone.
        gathering: Whether they stay in `.grad` instead, for who takes them all at once.
    """

    def __init__(self, stray: _Listener) -> None:
        self.receiver: _Receiver | None = None
        self.gathering = False
        self._stray = weakref.WeakMethod(stray)

    def shut(self) -> None:
        """Nobody waits for any more."""
        self.receiver, self.gathering = None, False

    def gradient(self, index: int, parameter: torch.nn.Parameter) -> None:
        if self.gathering:
            return
        receiver = self.receiver
        if receiver is None:
            stray = self._stray()
            if stray is not None:
                stray(index, parameter)
            return
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            receiver(index, gradient)
