"""The device of a replica, and copies of batches to it.

On a GPU a batch is copied from pinned memory on a stream of its own, while the step before computes.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

import torch

from raydist.collectives.xla.chip import Chip
from raydist.errors import FailedPreconditionError
from raydist.pipelines.elements.object_leaves import map_parts
from raydist.replicas.step import StepHeader, resolve_parts
from raydist.torch_modes import TorchModes
from raydist.torch_settings import SharedSettings
from raydist.values import Leaves

__all__ = [
    "Accelerator",
    "Copying",
    "CudaStreams",
    "DeviceCopies",
    "PartsAhead",
    "Streams",
    "accelerator_for",
    "take_gpu",
]


class Accelerator(ABC):
    """A replica's device, for the threads that run its steps.

    Attributes:
        device: Where its tensors are.
        defers: Whether operations are noted and run together, so that it must be told where a step begins and ends.
    """

    device: torch.device
    defers: ClassVar[bool]

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Let the random numbers of steps follow from `seed`."""

    @abstractmethod
    def enter(self) -> None:
        """A step begins in this thread."""

    @abstractmethod
    def leave(self) -> None:
        """The step has ended: what it noted for later runs now."""

    @abstractmethod
    def working(self, modes: TorchModes | None, limit_s: float) -> AbstractContextManager[None]:
        """Within it torch works so in this thread; None: as it does by itself.

        Blocking: where threads of one process run steps, while others want other settings, at most `limit_s`.
        """


@final
class _TorchDevice(Accelerator):
    """A CPU or a GPU, which torch looks after by itself."""

    defers = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed % 2**63)

    def enter(self) -> None:
        """Nothing."""

    def leave(self) -> None:
        """Nothing."""

    def working(self, modes: TorchModes | None, limit_s: float) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if modes is None else modes.applied()


@final
class _XlaDevice(Accelerator):
    """A TPU chip, where operations are noted and run together."""

    defers = True

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self.device = chip.open().device

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed % 2**63)
        self._chip.seed(seed % 2**63)

    def enter(self) -> None:
        self._chip.open()

    def leave(self) -> None:
        self._chip.launch()

    def working(self, modes: TorchModes | None, limit_s: float) -> AbstractContextManager[None]:
        return (modes or _AS_TORCH_HAS_IT).applied_among(_OF_ALL_CHIPS, limit_s)


_AS_TORCH_HAS_IT = TorchModes()
_OF_ALL_CHIPS = SharedSettings()  # those of a host are driven by threads of one process


def take_gpu(device: torch.device, rank: int) -> None:
    """Let this process use its GPU by default.

    Raises:
        FailedPreconditionError: Its torch sees none.
    """
    if not torch.cuda.is_available():
        raise FailedPreconditionError(
            f"Replica {rank} was given a GPU by Ray and must be able to use it, but its torch {torch.__version__} sees "
            "none. Install a build of torch for CUDA and a driver on that node, or name CPUs as devices."
        )
    torch.cuda.set_device(device)


def accelerator_for(device: str) -> Accelerator:
    """The device of this name, chosen for this thread.

    Raises:
        FailedPreconditionError: It is a TPU's, and there is no torch_xla.
        UnavailableError: There is no such TPU chip.
    """
    named = torch.device(device)
    return _XlaDevice(Chip(named.index or 0)) if named.type == "xla" else _TorchDevice(named)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """A tensor that is being copied.

    Attributes:
        tensor: On the device; not to be used before the event.
        event: When it is there.
    """

    tensor: torch.Tensor
    event: Any


class Streams(Protocol):
    """What copies need of a device: `CudaStreams`."""

    def copy(self, value: torch.Tensor) -> Copying:
        """Start a copy that does not wait for what the device computes. Does not wait."""

    def join(self, copying: Copying) -> torch.Tensor:
        """The copy, for use by what is computed from here on. Does not wait: the device does."""


@final
class CudaStreams:
    """Copies to one CUDA device on a side stream.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, value: torch.Tensor) -> Copying:
        """See `Streams`. Pageable memory would make the copy wait for the device, and the host for the copy."""
        pinned = value.pin_memory()
        with torch.cuda.stream(self._side):
            tensor = pinned.to(self._device, non_blocking=True)
            return Copying(tensor, self._side.record_event())

    def join(self, copying: Copying) -> torch.Tensor:
        """See `Streams`. The allocator is told who uses the memory, so that it is not reused too early."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copying.event)
        copying.tensor.record_stream(current)
        return copying.tensor


@final
class DeviceCopies:
    """Brings tensors to a replica's device, in two steps: `begin` as early as possible, `finish` where they are used.

    Args:
        device: The replica's.
        streams: Of a device that copies while it computes; None where it does not.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None) -> None:
        self._device = device
        self._streams = streams

    @classmethod
    def to(cls, device: torch.device) -> DeviceCopies:
        """For a device of this process."""
        return cls(device, CudaStreams(device) if device.type == "cuda" else None)

    @property
    def overlap(self) -> bool:
        """Whether it is worth while to begin early."""
        return self._streams is not None

    def begin(self, value: Any) -> Any:
        """What `finish` makes the value on the device of. May be called by any thread."""
        if isinstance(value, list | tuple | dict):  # a list of tensors, or what a collate function made
            return map_parts(self.begin, value)
        if not isinstance(value, torch.Tensor) or value.device == self._device:
            return value
        if self._streams is None:
            return value.to(self._device, non_blocking=True)
        return self._streams.copy(value)

    def finish(self, begun: Any) -> Any:
        """The value on the device, for the thread that computes. The same thing may be finished twice."""
        if isinstance(begun, list | tuple | dict):
            return map_parts(self.finish, begun)
        if isinstance(begun, Copying) and self._streams is not None:
            return self._streams.join(begun)
        return begun


@final
class PartsAhead:
    """Parts of one step, on their way.

    Args:
        copies: Brings tensors to the device.
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._step = -1
        self._parts: list[Any] = []

    def begin(self, header: StepHeader, objects: Sequence[Leaves]) -> None:
        """Start to copy what a step will need. What goes wrong here goes wrong again in the step, where it belongs."""
        with contextlib.suppress(Exception):
            self._parts = resolve_parts(header.sources, objects, self._copies.begin)
            self._step = header.step

    def begun(self, header: StepHeader, objects: Sequence[Leaves]) -> list[Any]:
        """The parts of a step, all of them begun; those of another one are dropped."""
        step, parts = self._step, self._parts
        self._step, self._parts = -1, []
        return parts if step == header.step else resolve_parts(header.sources, objects, self._copies.begin)
