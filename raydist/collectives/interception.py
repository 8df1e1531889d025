"""Know when a backward pass begins and when it has truly ended.

The autograd engine does not tell: its end-of-backward callback fires once per segment under reentrant checkpointing,
and not at all for a frozen model. So `torch.autograd.backward`, which `Tensor.backward` calls, is wrapped while
somebody wants to know.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, final

import torch
from torch._compile import _disable_dynamo  # torch.compiler.disable would import the whole compiler

__all__ = ["intercept_backward"]

Backward = Callable[..., None]
Handler = Callable[[Backward, tuple[Any, ...], dict[str, Any]], None]
"""Called in place of `torch.autograd.backward`, with the original function, its arguments and its keyword arguments."""

_HANDLER: ContextVar[Handler | None] = ContextVar("raydist_backward_handler", default=None)


def intercept_backward(handler: Handler) -> AbstractContextManager[None]:
    """Send every `backward()` that this thread calls inside the block to `handler`; other threads are not touched."""
    return _Interception(handler)


@final
class _Interception:
    """By hand, as one is around every step: a generator takes five more calls of Python."""

    __slots__ = ("_handler", "_token")

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._token: Token[Handler | None] | None = None

    def __enter__(self) -> None:
        self._token = _HANDLER.set(self._handler)
        _WRAPPER.acquire()

    def __exit__(self, *_: object) -> None:
        _WRAPPER.release()
        if self._token is not None:
            _HANDLER.reset(self._token)


@final
class _Wrapper:
    """Puts the wrapper in place for the first user in the process, and takes it away after the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._original: Backward = torch.autograd.backward
        self._wrapped: Backward = self._original
        self._installed: Backward | None = None

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._installed is None:
                self._install()

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            # Where somebody else has wrapped ours meanwhile, ours stays: without a handler it only passes on.
            if self._num_users == 0 and torch.autograd.backward is self._installed:
                torch.autograd.backward = self._original
                self._installed = None

    def _install(self) -> None:
        # Wrapping anew for each step would let torch disable its compiler for another function each time.
        if torch.autograd.backward is not self._original or self._wrapped is self._original:
            self._original = torch.autograd.backward
            self._wrapped = self._wrap(self._original)
        self._installed = self._wrapped
        torch.autograd.backward = self._installed

    @staticmethod
    def _wrap(original: Backward) -> Backward:
        @_disable_dynamo  # a compiled step calls it as it is: collectives are not for tracing
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            handler = _HANDLER.get()
            if handler is None:
                original(*args, **kwargs)
            else:
                handler(original, args, kwargs)

        return backward


# One per process, as the function that it wraps is.
_WRAPPER = _Wrapper()
