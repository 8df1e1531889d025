"""Collectives that cannot go wrong silently: ranks first tell each other what they are about to call.

Without this a differing shape ends the process (gloo), hangs (NCCL) or passes unnoticed where the numbers of elements
are equal. On a CPU the price is one all-reduce of three numbers per call: a digest of it, whose least and greatest
value must be the same. Only where they are not do ranks tell each other what they call.

On a GPU the host must not wait for that. There ranks compare a call on the host when it first follows the call before
it, and not again; a digest of all calls travels in the trailer of the next backward pass (`CallLog`). Gradients, whose
layout is agreed on otherwise, do without.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from typing import final

import torch

from raydist.collectives.base import Communicator, Membership, Work
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.collectives.tensors import check_rows, check_swapped
from raydist.collectives.translation import mismatch_error
from raydist.errors import CollectiveMismatchError, InvalidArgumentError
from raydist.values import ReduceOp

__all__ = ["Call", "CallLog", "CheckedCommunicator", "all_hold", "describe_call", "exchange"]

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

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def as_message(self) -> torch.Tensor:
        """Return the call as a tensor of a fixed size, to be sent before a message."""
        data = self.encode()
        if len(data) > _CALL_BYTES:
            raise InvalidArgumentError(f"A collective needs a tensor of fewer dimensions, got shape {self.shape}.")
        return torch.frombuffer(bytearray(data.ljust(_CALL_BYTES)), dtype=torch.uint8)

    @staticmethod
    def decode(data: bytes) -> Call:
        fields = json.loads(data)
        return Call(**{**fields, "shape": tuple(fields["shape"])})


def exchange(
    communicator: Communicator,
    call: Call,
    *,
    device: torch.device,
    ragged_axis: int | None = None,
    log: CallLog | None = None,
) -> list[Call]:
    """Every rank's call, after checking that they fit together.

    Args:
        communicator: Carries the descriptions.
        call: This rank's.
        device: Where the communicator's tensors are.
        ragged_axis: A dimension whose length may differ between ranks.
        log: The calls before this one: where the host runs ahead of the device, a call that is known to follow the one
            before it is not compared again.

    Blocking: until all ranks have called, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: On every rank alike, with every rank's call.
    """
    if communicator.host_runs_ahead:
        if ragged_axis is not None or log is None:
            return _told(communicator, call, ragged_axis)
        differentiable: bool | None = log.agree(communicator, call)
    else:
        differentiable = _agreed(communicator, call, device)
    if differentiable is not None:
        return [replace(call, differentiable=differentiable)] * communicator.world_size
    return _told(communicator, call, ragged_axis)


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
    _told(communicator, call, None)
    return False


def _told(communicator: Communicator, call: Call, ragged_axis: int | None) -> list[Call]:
    """Return every rank's call, told in full; raises where they do not fit together."""
    calls = [Call.decode(each) for each in communicator.exchange_on_host(call.encode(), _about(call))]
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
    digest = hashlib.blake2b(repr((_essence(call, None), held)).encode(), digest_size=8).digest()
    if communicator.host_runs_ahead:
        said = communicator.exchange_on_host(digest + bytes((call.differentiable,)), _about(call))
        return any(each[-1] for each in said) if len({each[:-1] for each in said}) == 1 else None
    communicator.announce(_about(call))
    number = int.from_bytes(digest, "little") >> 2
    greatest = torch.tensor([number, -number, int(call.differentiable)], device=device)
    communicator.all_reduce(greatest, ReduceOp.MAX).wait()
    most, least, differentiable = greatest.tolist()
    return bool(differentiable) if most == -least else None


@final
class CallLog:
    """The collectives that a rank has called by itself, beside the exchange of gradients.

    Attributes:
        digest: 32 bits of all calls, in their order: equal on all ranks.
    """

    def __init__(self) -> None:
        self.digest = 0
        self._known: dict[tuple[object, ...], bool] = {}
        self._last: tuple[object, ...] | None = None

    def begin_step(self) -> None:
        """Note that a sequence of calls begins."""
        self._last = None

    def agree(self, communicator: Communicator, call: Call) -> bool:
        """Return True if any rank differentiates its call.

        Blocking: where the call follows the one before it for the first time, until all ranks have called it.

        Raises:
            CollectiveMismatchError: Then, on every rank alike, where they call different things.
        """
        essence = (*_essence(replace(call, number=0), None), call.differentiable)
        self.digest = zlib.crc32(repr(essence[:-1]).encode(), self.digest)
        place, self._last = (self._last, essence), essence
        if place not in self._known:
            self._known[place] = any(other.differentiable for other in _told(communicator, call, None))
        return self._known[place]


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
        self._log = CallLog()

    @property
    def checks_itself(self) -> bool:
        return True

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        self._check(what, tensor)
        return start()

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)
        return super().all_gather_rows(outputs, tensor)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        check_swapped(outputs, inputs, self.world_size)
        return super().all_to_all(outputs, inputs)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        if not self._inner.checks_itself:
            self._inner.send(describe_call("message", tensor).as_message().to(self.device), destination)
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
        self._log = CallLog()
        self._inner.reconfigure(membership)

    def _check(self, name: str, tensor: torch.Tensor | None) -> None:
        if self._inner.checks_itself:
            return
        call = describe_call(name, tensor, number=self._num_calls)
        self._num_calls += 1
        exchange(self._inner, call, device=self.device, log=self._log)

    def _receive_call(self, source: int) -> Call:
        row = torch.empty(_CALL_BYTES, dtype=torch.uint8, device=self.device)
        self._inner.recv(row, source).wait()
        return Call.decode(bytes(row.tolist()))


def describe_call(name: str, tensor: torch.Tensor | None, *, number: int = 0, differentiable: bool = False) -> Call:
    """The call of collective `name` on `tensor`."""
    if tensor is None:
        return Call(name, "nothing", (), number)
    return Call(name, str(tensor.dtype), tuple(tensor.shape), number, differentiable)
