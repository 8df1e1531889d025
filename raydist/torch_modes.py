"""Torch modes of a thread, sent with each step so that replicas compute as the driver would (invariant I1).

A program that calls `strategy.run` within `torch.no_grad()` or `torch.autocast(...)`, or has changed the default dtype,
expects that the step computes so. The modes are sent with the step if they are not torch's defaults.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ParamSpec, TypeVar, final

import torch

from raydist.torch_settings import SharedSettings, TorchSettings

__all__ = ["TorchModes", "outside_inference_mode"]

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DEVICES = ("cpu", "cuda", "xla")  # device types that are checked for autocast


@final
@dataclass(frozen=True, slots=True)
class TorchModes:
    """Torch modes of one thread; the defaults are torch's.

    Attributes:
        grad: False within `torch.no_grad`.
        inference: True within `torch.inference_mode`.
        autocast: Device types with autocast, each with its dtype.
        caches_casts: True if autocast caches the casts of weights until the block ends.
        settings: Settings of the process.
    """

    grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    caches_casts: bool = True
    settings: TorchSettings = TorchSettings()

    @staticmethod
    def here() -> TorchModes | None:
        """Return the modes of this thread; None if all are torch's defaults.

        >>> with torch.no_grad():
        ...     TorchModes.here().grad
        False
        >>> TorchModes.here()
        """
        found = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple(
                [(device, torch.get_autocast_dtype(device)) for device in _DEVICES if torch.is_autocast_enabled(device)]
            ),
            torch.is_autocast_cache_enabled(),
            TorchSettings.here(),
        )
        return None if found == _AS_TORCH_HAS_IT else TorchModes(*found)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set these modes within the context, in this thread and its process. Defaults are not set.

        >>> with TorchModes(grad=False, settings=TorchSettings(torch.float64)).applied():
        ...     torch.ones(1).dtype, torch.is_grad_enabled()
        (torch.float64, False)
        """
        with self.settings.applied(), self._in_thread():
            yield

    @contextlib.contextmanager
    def applied_among(self, shared: SharedSettings, limit_s: float) -> Iterator[None]:
        """Set these modes in one of several threads that run steps; see `SharedSettings.applied`."""
        with shared.applied(self.settings, limit_s), self._in_thread():
            yield

    @contextlib.contextmanager
    def _in_thread(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.caches_casts))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            elif not self.grad:
                stack.enter_context(torch.no_grad())
            yield


_AS_TORCH_HAS_IT = tuple(getattr(TorchModes(), each.name) for each in fields(TorchModes))


def outside_inference_mode(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `fn` so that it returns ordinary tensors within `torch.inference_mode`, too.

    Later steps use the fetched tensors, and torch counts no writes to inference tensors.

    >>> with torch.inference_mode():
    ...     outside_inference_mode(torch.ones)(1).is_inference()
    False
    """

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not torch.is_inference_mode_enabled():
            return fn(*args, **kwargs)
        with torch.inference_mode(False):
            return fn(*args, **kwargs)

    return call
