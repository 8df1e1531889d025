"""Torch modes and settings, which the driver sends with each step so that replicas compute as it would (invariant I1).

If a program calls `strategy.run` within `torch.no_grad()` or `torch.autocast(...)`, or has changed the default dtype,
the step must use this mode or dtype, too. The driver sends nothing if all modes are torch's defaults.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from typing import ParamSpec, TypeVar, final

import torch

from raydist.core.errors import DeadlineExceededError

_P = ParamSpec("_P")
_T = TypeVar("_T")

_DEVICES = ("cpu", "cuda", "xla")  # device types whose autocast mode is sent


@final
@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Settings of torch for all threads of a process. The default values are torch's defaults.

    Attributes:
        dtype: The default dtype.
        deterministic: `torch.use_deterministic_algorithms`: "error", "warn", or empty for off.
        matmul_precision: `torch.set_float32_matmul_precision`.
        finds_anomalies: `torch.autograd.set_detect_anomaly`.
    """

    dtype: torch.dtype = torch.float32
    deterministic: str = ""
    matmul_precision: str = "highest"
    finds_anomalies: bool = False

    @staticmethod
    def here() -> TorchSettings:
        """Return the settings of this process: always the same object if all settings are torch's defaults.

        >>> TorchSettings.here().dtype
        torch.float32
        """
        found = (
            torch.get_default_dtype(),
            _deterministic(),
            torch.get_float32_matmul_precision(),
            torch.is_anomaly_enabled(),
        )
        return _DEFAULT_SETTINGS if found == _DEFAULT_VALUES else TorchSettings(*found)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply these settings to the process within the context. Default values are left alone.

        >>> with TorchSettings(torch.float64).applied():
        ...     torch.ones(1).dtype
        torch.float64
        >>> torch.ones(1).dtype
        torch.float32
        """
        with contextlib.ExitStack() as stack:
            if self.dtype is not _DEFAULT_SETTINGS.dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
            if self.matmul_precision != _DEFAULT_SETTINGS.matmul_precision:
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision(self.matmul_precision)
            if self.deterministic:
                before = _deterministic()
                stack.callback(torch.use_deterministic_algorithms, bool(before), warn_only=before == "warn")
                torch.use_deterministic_algorithms(True, warn_only=self.deterministic == "warn")
            if self.finds_anomalies:
                stack.enter_context(torch.autograd.set_detect_anomaly(True))
            yield


@final
class SharedSettings:
    """A lock for the settings of a process. Threads with equal settings run together, and all other threads wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._settings = _DEFAULT_SETTINGS
        self._applied = contextlib.ExitStack()

    @contextlib.contextmanager
    def applied(self, settings: TorchSettings, limit_s: float) -> Iterator[None]:
        """Apply these settings within the context. Blocks at most `limit_s` while other threads use other settings.

        Raises:
            DeadlineExceededError: Threads used other settings for longer than `limit_s`.
        """
        with self._changed:
            free = self._changed.wait_for(lambda: not self._num_inside or settings == self._settings, limit_s)
            if not free:
                raise DeadlineExceededError(
                    f"Threads of one process share torch's settings: {self._num_inside} ran with {self._settings} for "
                    f"{limit_s} s, while another waited to run with {settings}. Raise the limit "
                    "(Timeouts.collective_s), or use the same settings in all steps that take this long."
                )
            if not self._num_inside:
                self._settings = settings
                self._applied.enter_context(settings.applied())
            self._num_inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_inside -= 1
                if not self._num_inside:
                    self._applied.close()
                    self._changed.notify_all()


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return ""
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "error"


_DEFAULT_SETTINGS = TorchSettings()
# A tuple, because `here` runs before every step, and making and comparing objects takes three times as long.
_DEFAULT_VALUES = astuple(_DEFAULT_SETTINGS)


@final
@dataclass(frozen=True, slots=True)
class TorchModes:
    """Torch modes of one thread, and settings of its process. The default values are torch's defaults.

    Attributes:
        grad: False within `torch.no_grad`.
        inference: True within `torch.inference_mode`.
        autocast: Device types with autocast, each with its dtype.
        caches_casts: True if autocast caches cast weights until its block ends.
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
        return None if found == _DEFAULT_MODES else TorchModes(*found)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply these modes to this thread and its process within the context. Default values are left alone.

        >>> with TorchModes(grad=False, settings=TorchSettings(torch.float64)).applied():
        ...     torch.ones(1).dtype, torch.is_grad_enabled()
        (torch.float64, False)
        """
        with self.settings.applied(), self._in_thread():
            yield

    @contextlib.contextmanager
    def applied_among(self, shared: SharedSettings, limit_s: float) -> Iterator[None]:
        """Apply these modes while other threads of the process run steps, too; see `SharedSettings.applied`."""
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


_DEFAULT_MODES = tuple(getattr(TorchModes(), each.name) for each in fields(TorchModes))


def outside_inference_mode(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wrap `fn` so that it returns ordinary tensors even within `torch.inference_mode`.

    Later steps use these tensors, and torch does not count writes to inference tensors (`_version`).

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
