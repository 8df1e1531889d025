"""Batches on their way to a GPU: from pinned memory and on a stream of their own, while the step before computes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from raydist.pipelines.elements.object_leaves import map_parts
from raydist.replicas.step import StepHeader, resolve_parts
from raydist.values import Leaves

__all__ = ["Copying", "CudaStreams", "DeviceCopies", "PartsAhead", "Streams"]


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
