"""What steers torch for a block of a program, so that replicas compute as the driver does: I1.

A program that writes `with torch.no_grad():` or `torch.autocast(...)` around `strategy.run`, or has chosen a default
dtype, means what the step computes. So that travels with the step, where it is not as torch has it.
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

_DEVICES = ("cpu", "cuda", "xla")  # those that autocast may be for


@final
@dataclass(frozen=True, slots=True)
class TorchModes:
    """How torch works in one thread; the defaults are torch's.

    Attributes:
        grad: `torch.no_grad` is not in force.
        inference: `torch.inference_mode` is.
        autocast: Types of devices with autocast, and the dtype that it casts to.
        caches_casts: Whether casts of weights are kept until the block ends.
        settings: Those of its process.
    """

    grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    caches_casts: bool = True
    settings: TorchSettings = TorchSettings()

    @staticmethod
    def here() -> TorchModes | None:
        """Those of this thread; None where all is as torch has it.

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
        """Within it this thread and its process work so. What is as torch has it is left as it is.

        >>> with TorchModes(grad=False, settings=TorchSettings(torch.float64)).applied():
        ...     torch.ones(1).dtype, torch.is_grad_enabled()
        (torch.float64, False)
        """
        with self.settings.applied(), self._in_thread():
            yield

    @contextlib.contextmanager
    def applied_among(self, shared: SharedSettings, limit_s: float) -> Iterator[None]:
        """The same in one of several threads that run steps; see `SharedSettings.applied`."""
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
    """`fn`, whose tensors are usual ones also where it is called within `torch.inference_mode`.

    What is fetched there is used by later steps, and torch counts no writes to tensors of that mode.

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
