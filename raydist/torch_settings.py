"""Process-wide settings of torch, and their use by threads that need different ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import final

import torch

from raydist.errors import DeadlineExceededError

__all__ = ["SharedSettings", "TorchSettings"]


@final
@dataclass(frozen=True, slots=True)
class TorchSettings:
    """Settings of torch that hold for all threads; the defaults are torch's.

    Attributes:
        dtype: The default dtype.
        deterministic: `torch.use_deterministic_algorithms`: "error", "warn", or empty.
        matmul_precision: `torch.set_float32_matmul_precision`.
        finds_anomalies: `torch.autograd.set_detect_anomaly`.
    """

    dtype: torch.dtype = torch.float32
    deterministic: str = ""
    matmul_precision: str = "highest"
    finds_anomalies: bool = False

    @staticmethod
    def here() -> TorchSettings:
        """Return the settings of this process. The same object as long as all are torch's defaults.

        >>> TorchSettings.here().dtype
        torch.float32
        """
        found = (
            torch.get_default_dtype(),
            _deterministic(),
            torch.get_float32_matmul_precision(),
            torch.is_anomaly_enabled(),
        )
        return _DEFAULTS if found == _AS_TORCH_HAS_IT else TorchSettings(*found)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set these settings of the process within the context. Defaults are not set.

        >>> with TorchSettings(torch.float64).applied():
        ...     torch.ones(1).dtype
        torch.float64
        >>> torch.ones(1).dtype
        torch.float32
        """
        with contextlib.ExitStack() as stack:
            if self.dtype is not _DEFAULTS.dtype:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
            if self.matmul_precision != _DEFAULTS.matmul_precision:
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
    """Settings of one process for several threads: threads with equal settings run together, others wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_inside = 0
        self._settings = _DEFAULTS
        self._applied = contextlib.ExitStack()

    @contextlib.contextmanager
    def applied(self, settings: TorchSettings, limit_s: float) -> Iterator[None]:
        """Set these settings within the context. Blocks for at most `limit_s` while threads use other settings.

        Raises:
            DeadlineExceededError: The other threads took longer.
        """
        with self._changed:
            free = self._changed.wait_for(lambda: not self._num_inside or settings == self._settings, limit_s)
            if not free:
                raise DeadlineExceededError(
                    f"Threads of one process share torch's settings: {self._num_inside} ran with {self._settings} for "
                    f"{limit_s} s, while another waited to run with {settings}. Raise the limit "
                    "(Timeouts.collective_s), or let steps that take so long have the same."
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


_DEFAULTS = TorchSettings()
_AS_TORCH_HAS_IT = astuple(_DEFAULTS)  # making and comparing objects takes three times as long, before every step
