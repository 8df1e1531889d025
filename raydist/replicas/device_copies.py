"""The device of a replica, and copies of batches to the device.

On a GPU a batch is copied from pinned memory on a side stream, while the previous step computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.collectives.xla.chip import Chip
from raydist.core.errors import FailedPreconditionError
from raydist.core.values import Leaves
from raydist.pipelines.elements.object_leaves import map_parts
from raydist.replicas.step import StepHeader, resolve_parts
from raydist.utils.torch_modes import SharedSettings, TorchModes


@final
class Accelerator:
    """A replica's device, as used by the threads that run its steps. A TPU chip queues operations."""

    def __init__(self, name: str) -> None:
        named = torch.device(name)
        self._chip = Chip(named.index or 0) if named.type == "xla" else None
        # the `torch.device` of the replica's tensors
        self.device = named if self._chip is None else self._chip.open().device
        # True if the device queues operations lazily, so that it must know where a step begins and ends
        self.defers = self._chip is not None

    def seed(self, seed: int) -> None:
        """Seed the random numbers of steps."""
        torch.manual_seed(seed % 2**63)
        if self._chip is not None:
            self._chip.seed(seed % 2**63)

    def enter(self) -> None:
        """Begin a step in this thread."""
        if self._chip is not None:
            self._chip.open()

    def leave(self) -> None:
        """End the step: run the operations that the device has queued."""
        if self._chip is not None:
            self._chip.launch()

    def working(self, modes: TorchModes | None, limit_s: float) -> AbstractContextManager[None]:
        """Return a context in which torch has these modes in this thread; None means torch's defaults.

        Blocks for at most `limit_s` while other threads of this process run steps with other modes.
        """
        if self._chip is not None:
            return (modes or _AS_TORCH_HAS_IT).applied_among(_OF_ALL_CHIPS, limit_s)
        return contextlib.nullcontext() if modes is None else modes.applied()


_AS_TORCH_HAS_IT = TorchModes()
_OF_ALL_CHIPS = SharedSettings()  # the threads of one process drive all chips of a host


def take_gpu(device: torch.device, rank: int) -> None:
    """Make `device` the default GPU of this process."""
    if not torch.cuda.is_available():
        raise FailedPreconditionError(
            f"Replica {rank} was given a GPU by Ray and must be able to use it, but its torch {torch.__version__} sees "
            "none. Install a build of torch for CUDA and a driver on that node, or name CPUs as devices."
        )
    torch.cuda.set_device(device)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Copying:
    """A tensor whose copy is in progress."""

    tensor: torch.Tensor  # the copy on the device; not to be used before the event
    event: Any  # recorded when the copy is complete


@final
class CudaStreams:
    """Copies to one CUDA device on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, value: torch.Tensor) -> Copying:
        """Start a copy from pinned memory. A copy from pageable memory would block the host."""
        pinned = value.pin_memory()
        with torch.cuda.stream(self._side):
            tensor = pinned.to(self._device, non_blocking=True)
            return Copying(tensor, self._side.record_event())

    def join(self, copying: Copying) -> torch.Tensor:
        """Make the current stream wait for the copy. `record_stream` prevents an early reuse of the memory."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(copying.event)
        copying.tensor.record_stream(current)
        return copying.tensor


@final
class DeviceCopies:
    """Two-step copies of tensors to a replica's device: `begin` as early as possible, `finish` before the use.

    Args:
        streams: Copy streams of the device; None for a device whose copies do not overlap with computation.
    """

    def __init__(self, device: torch.device, streams: CudaStreams | None = None) -> None:
        self._device = device
        self._streams = streams

    @classmethod
    def to(cls, device: torch.device) -> DeviceCopies:
        """Return the copies to a device of this process."""
        return cls(device, CudaStreams(device) if device.type == "cuda" else None)

    @property
    def overlap(self) -> bool:
        """True if an early `begin` overlaps the copy with computation."""
        return self._streams is not None

    def begin(self, value: Any) -> Any:
        """Start to copy `value`; return the argument for `finish`. Any thread may call this."""
        if isinstance(value, list | tuple | dict):  # a list of tensors, or the result of a collate function
            return map_parts(self.begin, value)
        if not isinstance(value, torch.Tensor) or value.device == self._device:
            return value
        if self._streams is None:
            return value.to(self._device, non_blocking=True)
        return self._streams.copy(value)

    def finish(self, begun: Any) -> Any:
        """Return the value on the device, for the computing thread. May be called twice with the same argument."""
        if isinstance(begun, list | tuple | dict):
            return map_parts(self.finish, begun)
        if isinstance(begun, Copying) and self._streams is not None:
            return self._streams.join(begun)
        return begun


@final
class PartsAhead:
    """The prefetched parts of one step."""

    def __init__(self, copies: DeviceCopies) -> None:
        self._copies = copies
        self._step = -1
        self._parts: list[Any] = []

    def begin(self, header: StepHeader, objects: Sequence[Leaves]) -> None:
        """Start to copy the arguments of a step. Errors are suppressed here: the step itself raises them again."""
        with contextlib.suppress(Exception):
            self._parts = resolve_parts(header.sources, objects, self._copies.begin)
            self._step = header.step

    def begun(self, header: StepHeader, objects: Sequence[Leaves]) -> list[Any]:
        """Return the parts of a step, with their copies started; prefetched parts of another step are dropped."""
        step, parts = self._step, self._parts
        self._step, self._parts = -1, []
        return parts if step == header.step else resolve_parts(header.sources, objects, self._copies.begin)
