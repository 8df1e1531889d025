"""A worker's copies of variables on servers: targets of pulls, and detection of values that a program wrote.

Values are pulled into one copy (pinned memory for a GPU) and copied from there to the program's tensors. A difference
between the two shows that the program has written a variable.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

import torch

from raydist.collectives.tensors import flat_bytes
from raydist.compat.torch_internals import plain_tensors
from raydist.core.errors import InvalidArgumentError


@final
class CopyStream:
    """The copy stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start to copy to the first of each pair from the second, which is pinned. Does not block.

        The copies run after all work that the device has now, and before all work that it gets later.
        """
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
        """Copy to the first of each pair, which is pinned, from the second; blocks."""
        current = torch.cuda.current_stream(self._device)
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        current.synchronize()

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory on the host for the values of a tensor."""
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


@final
class HostGradients:
    """Copies gradients to the host, into reused pinned memory."""

    def __init__(self, side: CopyStream | None = None) -> None:
        self._side = side
        self._pinned: dict[tuple[int, torch.dtype, tuple[int, ...]], torch.Tensor] = {}

    def bring(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients on the host; gradients there already are not copied. Valid until the next call."""
        away = [(place, each) for place, each in enumerate(gradients) if not each.is_cpu]
        if not away:
            return list(gradients)
        if self._side is None:
            self._side = CopyStream(away[0][1].device)
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

    def __init__(self, side: CopyStream | None = None) -> None:
        self._side = side
        self._groups: list[_Group] = []
        self._group_of: dict[int, _Group] = {}

    def add(self, variables: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Move variables, with their values, into memory of this object."""
        # Nearly every step writes buffers, and hardly any step writes parameters.
        for parameters in (True, False):
            some = [each for each in variables if isinstance(each[1], torch.nn.Parameter) is parameters]
            if some:
                group = _Group(some, self._stream(some))
                self._groups.append(group)
                self._group_of.update((handle, group) for handle, _ in some)

    def _stream(self, variables: Sequence[tuple[int, torch.Tensor]]) -> CopyStream | None:
        device = next((tensor.device for _, tensor in variables if tensor.is_cuda), None)
        if device is not None and self._side is None:
            self._side = CopyStream(device)
        return self._side

    def __contains__(self, handle: int) -> bool:
        return handle in self._group_of

    def is_parameter(self, handle: int) -> bool:
        """Return True if the variable is a parameter, False if it is a buffer."""
        return self._group_of[handle].of_parameters

    def target(self, handle: int) -> torch.Tensor:
        """Return the tensor into which values are pulled. The program sees them after `show`."""
        return self._group_of[handle].copies[handle].pulled

    def own(self, handle: int) -> torch.Tensor:
        """Return the values that the program sees, on the CPU."""
        return self._group_of[handle].copies[handle].own.detach().cpu()

    def ready(self) -> None:
        """Block until targets may be written again."""
        for group in self._groups:
            group.ready()

    def show(self, handles: Collection[int]) -> None:
        """Make pulled values visible to the program."""
        for group in self._groups:
            group.show([handle for handle in handles if handle in group.copies])

    def written(self, *, parameters_only: bool = False) -> list[int]:
        """Return the variables to which the program gave other values than were pulled."""
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
            if not group.copies:
                self._groups.remove(group)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A variable, the memory that the program sees, and the pulled values."""

    tensor: torch.Tensor
    own: torch.Tensor
    pulled: torch.Tensor


@final
class _Group:
    """Variables that were added together. On the CPU both copies of all of them are one piece of memory each."""

    def __init__(self, variables: Sequence[tuple[int, torch.Tensor]], side: CopyStream | None) -> None:
        self.of_parameters = isinstance(variables[0][1], torch.nn.Parameter)
        self._side = side
        ends = [0]
        for _, tensor in variables:
            ends.append(ends[-1] + -(-tensor.numel() * tensor.dtype.itemsize // _ALIGN) * _ALIGN)
        self._pulled = torch.zeros(ends[-1], dtype=torch.uint8)
        if any(tensor.is_cuda for _, tensor in variables):
            self._pulled = self._pulled.pin_memory()
        self._own = self._pulled.clone() if side is None else torch.empty(0, dtype=torch.uint8)
        self.copies = {
            handle: self._copy(tensor, begin) for (handle, tensor), begin in zip(variables, ends[:-1], strict=True)
        }
        self._hashes = self._hash()

    def _copy(self, tensor: torch.Tensor, begin: int) -> _Copy:
        with torch.no_grad(), plain_tensors():
            dense = torch.empty_like(tensor, device="cpu", requires_grad=False)  # keeps a layout without gaps
            pulled = _view(self._pulled, begin, dense)
            pulled.copy_(tensor)
            if self._side is not None:
                return _Copy(tensor, tensor.data, pulled)
            own = _view(self._own, begin, dense)
            own.copy_(tensor)
            tensor.data = own
            return _Copy(tensor, own, pulled)

    def ready(self) -> None:
        if self._side is not None:
            self._side.wait()

    def show(self, handles: Sequence[int]) -> None:
        if not handles:
            return
        shown = [self.copies[handle] for handle in handles]
        if self._side is not None:
            self._side.copy([(each.own, each.pulled) for each in shown])
            self._hashes = self._hash()
        elif len(shown) == len(self.copies):
            self._own.copy_(self._pulled)
        else:
            for each in shown:
                each.own.copy_(each.pulled)
        torch.autograd.graph.increment_version([each.tensor for each in shown])  # as if the program had written it

    def written(self) -> list[int]:
        if self._side is not None:
            same = torch.eq(self._hash(), self._hashes).tolist()
            return [handle for handle, unchanged in zip(self.copies, same, strict=True) if not unchanged]
        if torch.equal(self._own.view(torch.int64), self._pulled.view(torch.int64)):  # 5 times as fast as of bytes
            return []
        return [
            handle
            for handle, each in self.copies.items()
            if not torch.equal(flat_bytes(each.own), flat_bytes(each.pulled))
        ]

    def keep_written(self) -> None:
        if self._side is None:
            self._pulled.copy_(self._own)
            return
        self._side.wait()
        for each in self.copies.values():
            each.pulled.copy_(each.own)
        self._hashes = self._hash()

    def bring_back(self) -> list[InvalidArgumentError]:
        """Undo `parameter.data = ...` of all; return the errors of variables that cannot keep the values."""
        return [error for each in self.copies.values() if (error := _bring_back(each)) is not None]

    def drop_written(self) -> None:
        for each in self.copies.values():
            each.tensor.data = each.own
        if self._side is None:
            self._own.copy_(self._pulled)
        else:
            self.show(list(self.copies))

    def _hash(self) -> torch.Tensor:
        """Return hashes of the variables' bits, on the GPU; `_version` misses writes through `.data`."""
        if self._side is None or not self.copies:
            return torch.empty(0)
        return torch.stack([hash_of_bits(each.own) for each in self.copies.values()])

    def forget(self, handle: int) -> None:
        del self.copies[handle]
        self._hashes = self._hash()


_ALIGN = 64  # bytes of a cache line; a multiple of every dtype's size


def _view(memory: torch.Tensor, begin: int, like: torch.Tensor) -> torch.Tensor:
    """Return a view of the memory from `begin` with the dtype, shape and strides of a dense tensor."""
    piece = memory[begin : begin + like.numel() * like.dtype.itemsize]
    return piece.view(like.dtype).as_strided(like.shape, like.stride())


def _bring_back(copy: _Copy) -> InvalidArgumentError | None:
    """Undo `parameter.data = ...` but keep the values; return an error if the variable cannot hold them."""
    if copy.tensor.is_set_to(copy.own):
        return None
    given, own = copy.tensor.detach(), copy.own
    copy.tensor.data = own
    if given.shape != own.shape or given.dtype != own.dtype:
        return InvalidArgumentError(
            f"Variables on parameter servers must keep their shape and dtype, but one of shape {tuple(own.shape)} and "
            f"{own.dtype} was given data of shape {tuple(given.shape)} and {given.dtype}. Create a new one under the "
            "scope."
        )
    with torch.no_grad():
        own.copy_(given.clone())  # both may be the same memory, transposed
    return None


_ROW = 1024
# Weights of columns, and of elements after the last whole row, relative to rows: odd, and larger than the number of
# rows, so that swapping two numbers changes the hash.
_OF_COLUMNS, _OF_REST = (1 << 40) + 15, (1 << 52) + 21


def hash_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a hash of a tensor's bits and their order: an int64 scalar on the tensor's device.

    >>> one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    >>> hash_of_bits(one) == hash_of_bits(one.clone()), hash_of_bits(one) == hash_of_bits(other)
    (tensor(True), tensor(False))
    """
    held = flat_bytes(tensor.detach())
    words = held.view(torch.int32) if len(held) % 4 == 0 else held
    whole = words.numel() // _ROW * _ROW
    rows, rest = words[:whole].view(-1, _ROW), words[whole:].to(torch.int64)
    by_row, by_column = (_weighed(rows.sum(dim, dtype=torch.int64)) for dim in (1, 0))
    return by_row + _OF_COLUMNS * by_column + _OF_REST * _weighed(rest)


def _weighed(numbers: torch.Tensor) -> torch.Tensor:
    """Return the sum of the numbers, each multiplied by its position; modulo 2**64."""
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
