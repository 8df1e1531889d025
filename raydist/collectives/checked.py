"""Collectives that cannot go wrong silently: ranks first tell each other what they are about to call.

Without this a differing shape ends the process (gloo), hangs (NCCL) or passes unnoticed where the numbers of elements
are equal. The price is one all-reduce of three numbers per call: a digest of it, whose least and greatest value must
be the same. Only where they are not do ranks tell each other what they call. Gradients, whose layout is agreed on
otherwise, do without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import final

import torch

from raydist.collectives.base import ALL_REDUCE, Communicator, Membership, Work
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.collectives.parts import check_rows, check_swapped, rows_name
from raydist.collectives.translation import mismatch_error
from raydist.errors import CollectiveMismatchError, InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["Call", "CheckedCommunicator", "all_hold", "describe_call", "exchange"]

# Room for a tensor of more than 20 dimensions.
_CALL_BYTES = 512


@final
@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is about to do.

    Attributes:
        name: The collective and its arguments: "all_reduce(SUM)".
        dtype: Of the tensor: "torch.float32".
        shape: Of the tensor.
        number: How many calls this rank has made before.
        differentiable: Whether its result takes part in a backward pass; may differ between ranks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    number: int = 0
    differentiable: bool = False

    def __str__(self) -> str:
        return f"{self.name} of {self.dtype} {self.shape} as call {self.number}"

    def encode(self) -> torch.Tensor:
        data = json.dumps(asdict(self)).encode()
        if len(data) > _CALL_BYTES:
            raise InvalidArgumentError(f"A collective needs a tensor of fewer dimensions, got shape {self.shape}.")
        return torch.frombuffer(bytearray(data.ljust(_CALL_BYTES)), dtype=torch.uint8)

    @staticmethod
    def decode(row: torch.Tensor) -> Call:
        fields = json.loads(bytes(row.tolist()))
        return Call(**{**fields, "shape": tuple(fields["shape"])})


def exchange(
    communicator: Communicator, call: Call, *, device: torch.device, ragged_axis: int | None = None
) -> list[Call]:
    """Every rank's call, after checking that they fit together.

    Args:
        communicator: Carries the descriptions.
        call: This rank's.
        device: Where the communicator's tensors are.
        ragged_axis: A dimension whose length may differ between ranks.

    Blocking: until all ranks have called, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: On every rank alike, with every rank's call.
    """
    differentiable = _agreed(communicator, call, device)
    if differentiable is not None:
        return [replace(call, differentiable=differentiable)] * communicator.world_size
    return _told(communicator, call, device, ragged_axis)


def all_hold(communicator: Communicator, call: Call, held: Hashable, *, device: torch.device) -> bool:
    """Whether all ranks hold the same, of which `repr` shows all that counts; they are checked to call this alike.

    Costs one all-reduce of three numbers where they do.

    Args:
        communicator: See `exchange`.
        call: See `exchange`.
        held: What this rank holds.
        device: See `exchange`.

    Blocking: until all ranks have called, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: On every rank alike, with every rank's call, where these do not fit together.
    """
    if _agreed(communicator, call, device, held) is not None:
        return True
    _told(communicator, call, device, None)
    return False


def _told(communicator: Communicator, call: Call, device: torch.device, ragged_axis: int | None) -> list[Call]:
    """Every rank's call, told in full; raises where they do not fit together."""
    mine = call.encode().to(device)
    rows = [torch.empty_like(mine) for _ in range(communicator.world_size)]
    communicator.announce(_about(call))
    communicator.all_gather(rows, mine).wait()
    calls = [Call.decode(row.cpu()) for row in rows]
    if len({_essence(other, ragged_axis) for other in calls}) > 1:
        raise mismatch_error([str(other) for other in calls])
    return calls


def _about(call: Call) -> str:
    return f"{call.name} of {call.dtype} {call.shape}"


def _agreed(communicator: Communicator, call: Call, device: torch.device, held: Hashable = None) -> bool | None:
    """Whether any rank differentiates its call, where all call, and hold, the same; None where they do not, on every
    rank alike.

    Another rank that calls something else begins by this same all-reduce.
    """
    communicator.announce(_about(call))
    digest = hashlib.blake2b(repr((_essence(call, None), held)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 2
    greatest = torch.tensor([number, -number, int(call.differentiable)], device=device)
    communicator.all_reduce(greatest, ReduceOp.MAX).wait()
    most, least, differentiable = greatest.tolist()
    return bool(differentiable) if most == -least else None


def _essence(call: Call, ragged_axis: int | None) -> tuple[object, ...]:
    shape = list(call.shape)
    if ragged_axis is not None and -len(shape) <= ragged_axis < len(shape):
        shape[ragged_axis] = -1
    return call.name, call.dtype, tuple(shape), call.number


@final
class CheckedCommunicator(DelegatingCommunicator):
    """Another communicator whose collectives are checked on all ranks, and messages by their receiver.

    Where the other one checks itself, nothing is added.

    Args:
        inner: Does the work; it belongs to this object from now on.
        device: Where its tensors are.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        super().__init__(inner, device)
        self._num_calls = 0

    @property
    def checks_itself(self) -> bool:
        return True

    def allocate(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return self._inner.allocate(sizes)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        self._check(ALL_REDUCE[op], tensor)
        return self._inner.all_reduce(tensor, op)

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        self._check("all_gather", tensor)
        return self._inner.all_gather(outputs, tensor)

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)
        self._check(rows_name(outputs), tensor[:0])
        return self._inner.all_gather_rows(outputs, tensor)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        check_swapped(outputs, inputs, self.world_size)
        self._check("all_to_all", outputs[0])
        return self._inner.all_to_all(outputs, inputs)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        self._check(f"broadcast(root={root})", tensor)
        return self._inner.broadcast(tensor, root)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        self._check(f"reduce({op.value}, root={root})", tensor)
        return self._inner.reduce(tensor, root, op)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        self._check(f"reduce_scatter({op.value})", output)
        return self._inner.reduce_scatter(output, inputs, op)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        if not self._inner.checks_itself:
            self._inner.send(describe_call("message", tensor).encode().to(self.device), destination)
        return self._inner.send(tensor, destination)

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        """See `Communicator.recv`; waits for the sender's description, and raises here where the two do not fit."""
        if self._inner.checks_itself:
            return self._inner.recv(tensor, source)
        mine = describe_call("message", tensor)
        theirs = self._receive_call(source)
        if theirs == mine:
            return self._inner.recv(tensor, source)
        # What was sent is taken off the wire, so that the next message is not mistaken for it.
        dtype: torch.dtype = getattr(torch, theirs.dtype.removeprefix("torch."))
        self._inner.recv(torch.empty(theirs.shape, dtype=dtype, device=self.device), source).wait()
        raise CollectiveMismatchError(
            f"A message must have one shape and dtype on both ends, got {mine.dtype} {mine.shape} on rank {self.rank} "
            f"for {theirs.dtype} {theirs.shape} from rank {source}."
        )

    def barrier(self) -> None:
        self._check("barrier", None)
        self._inner.barrier()

    def reconfigure(self, membership: Membership) -> None:
        self._num_calls = 0
        self._inner.reconfigure(membership)

    def _check(self, name: str, tensor: torch.Tensor | None) -> None:
        if self._inner.checks_itself:
            return
        call = describe_call(name, tensor, number=self._num_calls)
        self._num_calls += 1
        exchange(self._inner, call, device=self.device)

    def _receive_call(self, source: int) -> Call:
        row = torch.empty(_CALL_BYTES, dtype=torch.uint8, device=self.device)
        self._inner.recv(row, source).wait()
        return Call.decode(row.cpu())


def describe_call(name: str, tensor: torch.Tensor | None, *, number: int = 0, differentiable: bool = False) -> Call:
    """The call of collective `name` on `tensor`."""
    if tensor is None:
        return Call(name, "nothing", (), number)
    return Call(name, str(tensor.dtype), tuple(tensor.shape), number, differentiable)
