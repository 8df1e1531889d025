"""Interception of `torch.autograd.backward`, to detect the beginning and the end of a backward pass.

The end-of-backward callback of the autograd engine fires once per segment under reentrant checkpointing, and not at all
for a frozen model. So `torch.autograd.backward`, which `Tensor.backward` calls, is wrapped by the first interception of
the process and stays wrapped. Without a handler the wrapper only forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import Any

import torch

from raydist.compat.torch_internals import disable_compiler

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
