"""The record of the objects that are created under `strategy.scope()`.

PyTorch calls hooks when a module registers a parameter, a buffer or a submodule; inside the scope the hooks record the
registered object. The patched constructor of `Parameter` records parameters without a module, and the patched
`Module.__setstate__` records modules that are copied or unpickled, which register nothing.
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch.nn.modules import module as torch_module

__all__ = ["Scope"]

_active: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("raydist_scope", default=None)


@final
class Scope:
    """The objects created under one strategy, by weak reference."""

    def __init__(self) -> None:
        self._marks: dict[int, weakref.ref[Any]] = {}
        self._adopt: Callable[[Any], None] | None = None

    def mark(self, obj: Any) -> None:
        """Record that `obj` was created under this scope."""
        if self._adopt is not None:
            self._adopt(obj)
        key = id(obj)
        self._marks[key] = weakref.ref(obj, lambda _: self._marks.pop(key, None))

    def __contains__(self, obj: Any) -> bool:
        ref = self._marks.get(id(obj))
        return ref is not None and ref() is obj

    def objects(self) -> list[Any]:
        """Return the recorded objects that still live."""
        return [obj for ref in list(self._marks.values()) if (obj := ref()) is not None]

    @property
    def is_active(self) -> bool:
        """Return True if this scope is the innermost one around the caller."""
        return _active.get() is self

    @contextmanager
    def enter(self, adopt: Callable[[Any], None] | None = None) -> Iterator[None]:
        """Record the objects that this thread creates inside the block; `adopt` is called with each object."""
        token = _active.set(self)
        self._adopt = adopt or self._adopt
        with ExitStack() as stack:
            stack.callback(_active.reset, token)
            for register in (
                torch_module.register_module_parameter_registration_hook,
                torch_module.register_module_buffer_registration_hook,
                torch_module.register_module_module_registration_hook,
            ):
                stack.callback(register(self._registered).remove)
            stack.enter_context(self._constructed_parameters())
            stack.enter_context(self._restored_modules())
            yield

    def _registered(self, module: torch.nn.Module, name: str, value: Any) -> None:
        if self.is_active:
            self.mark(module)
            if value is not None:
                self.mark(value)

    @contextmanager
    def _constructed_parameters(self) -> Iterator[None]:
        """Record parameters that are created without a module; torch has no hook for these."""
        original: Callable[..., Any] = torch.nn.Parameter.__new__

        def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
            parameter = original(cls, *args, **kwargs)
            if self.is_active:
                self.mark(parameter)
            return parameter

        torch.nn.Parameter.__new__ = construct  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.nn.Parameter.__new__ = original  # type: ignore[method-assign]

    @contextmanager
    def _restored_modules(self) -> Iterator[None]:
        """Record modules that `copy.deepcopy` and pickle create; torch has no hook for these."""
        original: Callable[[torch.nn.Module, Any], None] = torch.nn.Module.__setstate__

        def restore(module: torch.nn.Module, state: Any) -> None:
            original(module, state)
            if self.is_active:
                self.mark(module)

        torch.nn.Module.__setstate__ = restore  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.nn.Module.__setstate__ = original  # type: ignore[method-assign]
