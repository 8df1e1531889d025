"""Know when a backward pass begins and when it has truly ended.

The autograd engine does not tell: its end-of-backward callback fires once per segment under reentrant checkpointing,
and not at all for a frozen model. So `torch.autograd.backward`, which `Tensor.backward` calls, is wrapped while
somebody wants to know.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any, final

import torch

from raydist.compat.torch_internals import disable_compiler

__all__ = ["Interception"]

Backward = Callable[..., None]
Handler = Callable[[Backward, tuple[Any, ...], dict[str, Any]], None]
"""Called in place of `torch.autograd.backward`, with the original function, its arguments and its keyword arguments."""

_HANDLER: ContextVar[Handler | None] = ContextVar("raydist_backward_handler", default=None)


@final
class Interception:
    """Sends every `backward()` that this thread calls inside its block to `handler`; other threads are not touched.

    One is around every step of a program, so it may be entered again and again, and torch's function stays wrapped
    between blocks, until `close` or the object's end: to wrap it anew took seven calls of Python.

    Args:
        handler: What is called.
    """

    __slots__ = ("__weakref__", "_handler", "_release", "_token")

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._token: Token[Handler | None] | None = None
        self._release: Callable[[], object] | None = None

    def __enter__(self) -> None:
        if self._release is None:
            _WRAPPER.acquire()
            self._release = weakref.finalize(self, _WRAPPER.release)
        elif torch.autograd.backward is not _WRAPPER.installed:  # somebody has put back what was there before
            _WRAPPER.install()
        self._token = _HANDLER.set(self._handler)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _HANDLER.reset(self._token)

    def close(self) -> None:
        """Let torch have its function back, if nobody else needs it. May be called twice."""
        release, self._release = self._release, None
        if release is not None:
            release()


@final
class _Wrapper:
    """Puts the wrapper in place for the first user in the process, and takes it away after the last.

    Attributes:
        installed: It, while it is in place.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._original: Backward = torch.autograd.backward
        self._wrapped: Backward = self._original
        self.installed: Backward | None = None

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self.installed is None:
                self._install()

    def install(self) -> None:
        """Put it in place again, around what is there now."""
        with self._lock:
            self._install()

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            # Where somebody else has wrapped ours meanwhile, ours stays: without a handler it only passes on.
            if self._num_users == 0 and torch.autograd.backward is self.installed:
                torch.autograd.backward = self._original
                self.installed = None

    def _install(self) -> None:
        # Wrapping anew for each step would let torch disable its compiler for another function each time.
        if torch.autograd.backward is not self._original or self._wrapped is self._original:
            self._original = torch.autograd.backward
            self._wrapped = self._wrap(self._original)
        self.installed = self._wrapped
        torch.autograd.backward = self.installed

    @staticmethod
    def _wrap(original: Backward) -> Backward:
        @disable_compiler  # a compiled step calls it as it is: collectives are not for tracing
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
