"""A worker's copies of variables on servers: targets of pulls, and detection of values that a program wrote.

On the CPU a variable is a private mapping of the memory into which values are pulled: the program sees them without a
further copy. Pages that it writes become private, which the kernel reports (`raydist.storage.shard`). On a GPU,
values are pulled into pinned memory and copied from there by a separate stream.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, final

import torch

from raydist.compat.torch_internals import plain_tensors
from raydist.errors import InvalidArgumentError
from raydist.storage.marks import mark_of_bits
from raydist.storage.placed import PlacedTensor, TensorPlace
from raydist.storage.shard import VariableShard

__all__ = ["CudaSideStream", "HostGradients", "SideStream", "WorkerCopies", "side_stream_for"]


class SideStream(Protocol):
    """The interface of a device's copy stream."""

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start to copy to the first of each pair from the second, which is pinned. Does not block.

        The copies run after all work that the device has now, and before all work that it gets later.
        """

    def wait(self) -> None:
        """Block until the copies have read their sources."""

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to the first of each pair, which is pinned, from the second; blocks."""

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory on the host for the values of a tensor."""


@final
class CudaSideStream:
    """The copy stream of a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start to copy to the device."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                target.record_stream(self._side)
        current.wait_stream(self._side)

    def wait(self) -> None:
        """Block until the copies have read their sources."""
        self._side.synchronize()

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy to the host; blocks."""
        current = torch.cuda.current_stream(self._device)
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        current.synchronize()

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory like a tensor."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def side_stream_for(device: torch.device) -> SideStream:
    """Return a copy stream for a device of this process."""
    return CudaSideStream(device)


@final
class HostGradients:
    """Copies gradients to the host, into reused pinned memory.

    Args:
        side: The device's copy stream; None: made for the first gradient on a device.
    """

    def __init__(self, side: SideStream | None = None) -> None:
        self._side = side
        self._pinned: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def bring(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients on the host; gradients there already are not copied. Valid until the next call."""
        away = [(place, each) for place, each in enumerate(gradients) if not each.is_cpu]
        if not away:
            return list(gradients)
        if self._side is None:
            self._side = side_stream_for(away[0][1].device)
        found = list(gradients)
        pairs = []
        for place, each in away:
            found[place] = self._memory(place, each)
            pairs.append((found[place], each))
        self._side.fetch(pairs)
        return found

    def _memory(self, place: int, like: torch.Tensor) -> torch.Tensor:
        key = place, like.dtype, tuple(like.shape)
        if key not in self._pinned and self._side is not None:
            for known in [other for other in self._pinned if other[0] == place]:
                del self._pinned[known]
            self._pinned[key] = self._side.pinned(like)
        return self._pinned[key]


@final
class WorkerCopies:
    """All copies, by handle. Pulls may write `target` while the program has written nothing.

    Args:
        side: The device's copy stream; None: made for the first variable on a GPU.
    """

    def __init__(self, side: SideStream | None = None) -> None:
        self._side = side
        self._groups: list[_Group] = []
        self._group_of: dict[int, _Group] = {}

    def add(self, variables: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Move variables, with their values, into memory of this object."""
        # Nearly every step writes buffers, and hardly any step writes parameters: they share no page.
        for parameters in (True, False):
            some = [each for each in variables if isinstance(each[1], torch.nn.Parameter) is parameters]
            if some:
                group = _Group(some, self._stream(some))
                self._groups.append(group)
                self._group_of.update((handle, group) for handle, _ in some)

    def _stream(self, variables: Sequence[tuple[int, torch.Tensor]]) -> SideStream | None:
        device = next((tensor.device for _, tensor in variables if tensor.is_cuda), None)
        if device is not None and self._side is None:
            self._side = side_stream_for(device)
        return self._side

    def __contains__(self, handle: int) -> bool:
        return handle in self._group_of

    def tensor(self, handle: int) -> torch.Tensor:
        """Return the variable."""
        return self._group_of[handle].placed[handle].tensor

    def target(self, handle: int) -> torch.Tensor:
        """Return the tensor into which values are pulled. The program sees them after `show`."""
        return self._group_of[handle].placed[handle].shared

    def own(self, handle: int) -> torch.Tensor:
        """Return the values that the program sees, on the CPU."""
        return self._group_of[handle].placed[handle].own.detach().cpu()

    def ready(self) -> None:
        """Block until targets may be written again."""
        for group in self._groups:
            group.ready()

    def show(self, handles: Collection[int]) -> None:
        """Make pulled values visible to the program."""
        for group in self._groups:
            group.show([handle for handle in handles if handle in group.placed])

    def written(self, *, parameters_only: bool = False) -> list[int]:
        """Return the variables to which the program gave other values than were pulled.

        Raises:
            InvalidArgumentError: A variable was given data that it cannot keep; other variables keep what they were
                given, and the next call returns them.
        """
        asked = self._asked(parameters_only)
        refused = [error for group in asked for error in group.bring_back()]
        if refused:
            raise refused[0]
        return [handle for group in asked for handle in group.written()]

    def keep_written(self, *, parameters_only: bool = False) -> None:
        """Take the values that the program wrote for pulled ones."""
        for group in self._asked(parameters_only):
            group.keep_written()

    def drop_written(self) -> None:
        """Replace the values that the program wrote by the pulled ones."""
        for group in self._groups:
            group.drop_written()

    def _asked(self, parameters_only: bool) -> Sequence[_Group]:
        return [group for group in self._groups if group.of_parameters or not parameters_only]

    def forget(self, handle: int) -> None:
        """Remove a variable that the program has dropped."""
        group = self._group_of.pop(handle, None)
        if group is not None:
            group.forget(handle)
            if not group.placed:
                self._groups.remove(group)
                group.close()

    def close(self) -> None:
        """Release memory that no variable uses. May be called twice."""
        for group in self._groups:
            group.close()


@final
class _Group:
    """Variables that were added together."""

    def __init__(self, variables: Sequence[tuple[int, torch.Tensor]], side: SideStream | None) -> None:
        self.of_parameters = isinstance(variables[0][1], torch.nn.Parameter)
        self._side = side
        self._shard = VariableShard.create_nameless([_bytes_of(tensor) for _, tensor in variables])
        if any(tensor.is_cuda for _, tensor in variables):
            self._shard.pin()
        self.placed: dict[int, PlacedTensor] = {}
        for number, (handle, tensor) in enumerate(variables):
            self.placed[handle] = self._place(tensor, number)
        self._marks = self._mark()

    def _place(self, tensor: torch.Tensor, number: int) -> PlacedTensor:
        with torch.no_grad(), plain_tensors():
            dense = torch.empty_like(tensor, device="cpu", requires_grad=False)  # keeps a layout without gaps
            place = TensorPlace(number, tensor.dtype, tuple(tensor.shape), tuple(dense.stride()), 0)
            shared = place.within(self._shard.shared(number))
            shared.copy_(tensor)
            if self._side is None:
                return PlacedTensor.bind(tensor, place, self._shard)
            return PlacedTensor(tensor, place, shared, tensor.data)

    def ready(self) -> None:
        if self._side is not None:
            self._side.wait()

    def show(self, handles: Sequence[int]) -> None:
        if not handles:
            return
        shown = [self.placed[handle] for handle in handles]
        if self._side is not None:
            self._side.copy([(each.own, each.shared) for each in shown])
            self._marks = self._mark()
        torch.autograd.graph.increment_version([each.tensor for each in shown])  # as if the program had written it

    def written(self) -> list[int]:
        if self._side is not None:
            marks = self._mark()
            same = torch.eq(marks, self._marks).tolist()
            return [handle for handle, unchanged in zip(self.placed, same, strict=True) if not unchanged]
        ranges = self._shard.own_ranges()
        if not ranges:
            return []
        found = [handle for handle, placed in self.placed.items() if self._differs(placed.place.number, ranges)]
        if not found:
            self._shard.drop_own()
        return found

    def _differs(self, number: int, ranges: Sequence[tuple[int, int]]) -> bool:
        begin, size = self._shard.layout.offsets[number], self._shard.layout.sizes[number]
        touched = any(first < begin + size and begin < last for first, last in ranges)
        return touched and not torch.equal(self._shard.own(number), self._shard.shared(number))

    def keep_written(self) -> None:
        if self._side is None:
            self._shard.publish_own()
            return
        self._side.wait()
        for placed in self.placed.values():
            placed.shared.copy_(placed.own)
        self._marks = self._mark()

    def bring_back(self) -> list[InvalidArgumentError]:
        """Undo `parameter.data = ...` of all; return the errors of variables that cannot keep the values."""
        return [error for placed in self.placed.values() if (error := _bring_back(placed)) is not None]

    def drop_written(self) -> None:
        for placed in self.placed.values():
            if not placed.in_place:
                placed.show_own()
        if self._side is None:
            self._shard.drop_own()
        else:
            self.show(list(self.placed))

    def _mark(self) -> torch.Tensor:
        """Return hashes of the variables' bits, where they lie; `_version` misses writes through `.data`."""
        if self._side is None or not self.placed:
            return torch.empty(0)
        return torch.stack([mark_of_bits(placed.own) for placed in self.placed.values()])

    def forget(self, handle: int) -> None:
        del self.placed[handle]
        self._marks = self._mark()

    def close(self) -> None:
        self._shard.close()


def _bring_back(placed: PlacedTensor) -> InvalidArgumentError | None:
    """Undo `parameter.data = ...` but keep the values; return an error if the variable cannot hold them."""
    if placed.in_place:
        return None
    given, own = placed.tensor.detach(), placed.own
    placed.show_own()
    if given.shape != own.shape or given.dtype != own.dtype:
        return InvalidArgumentError(
            f"Variables on parameter servers must keep their shape and dtype, but one of shape {tuple(own.shape)} and "
            f"{own.dtype} was given data of shape {tuple(given.shape)} and {given.dtype}. Create a new one under the "
            "scope."
        )
    with torch.no_grad():
        own.copy_(given.clone())  # both may be the same memory, transposed
    return None


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
