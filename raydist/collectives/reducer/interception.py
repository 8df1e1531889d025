"""Interception of `torch.autograd.backward`, to detect the beginning and the end of a backward pass.

The end-of-backward callback of the autograd engine fires once per segment under reentrant checkpointing, and not at all
for a frozen model. So `torch.autograd.backward`, which `Tensor.backward` calls, is wrapped while there are users.
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
    """Context manager that passes every `backward()` of this thread inside the block to `handler`.

    Other threads are not affected. Every step enters the block again, so torch's function stays wrapped between blocks,
    until `close` or the deletion of the object.

    Args:
        handler: Called in place of `torch.autograd.backward`.
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
        elif torch.autograd.backward is not _WRAPPER.installed:  # other code has restored the original
            _WRAPPER.install()
        self._token = _HANDLER.set(self._handler)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _HANDLER.reset(self._token)

    def close(self) -> None:
        """Restore torch's function, unless other interceptions need the wrapper. May be called twice."""
        release, self._release = self._release, None
        if release is not None:
            release()


@final
class _Wrapper:
    """Installs the wrapper for the first user in the process, and removes it after the last user.

    Attributes:
        installed: The wrapper while it is installed, else None.
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
        """Install the wrapper again, around the present `torch.autograd.backward`."""
        with self._lock:
            self._install()

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            # If other code has wrapped the wrapper meanwhile, it stays installed; without a handler it only forwards.
            if self._num_users == 0 and torch.autograd.backward is self.installed:
                torch.autograd.backward = self._original
                self.installed = None

    def _install(self) -> None:
        # One wrapper for all steps, since torch would disable its compiler for each new function again.
        if torch.autograd.backward is not self._original or self._wrapped is self._original:
            self._original = torch.autograd.backward
            self._wrapped = self._wrap(self._original)
        self.installed = self._wrapped
        torch.autograd.backward = self.installed

    @staticmethod
    def _wrap(original: Backward) -> Backward:
        @disable_compiler  # collectives must not be traced in a compiled step
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> None:
            handler = _HANDLER.get()
            if handler is None:
                original(*args, **kwargs)
            else:
                handler(original, args, kwargs)

        return backward


# One per process, like the function that it wraps.
_WRAPPER = _Wrapper()
