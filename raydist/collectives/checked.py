"""Checked collectives: ranks compare their calls before a collective runs.

Without the check a shape mismatch ends the process (gloo), hangs (NCCL) or passes unnoticed where the numbers of
elements are equal. On a CPU the check costs one all-reduce of three numbers per call: minimum and maximum of a digest
of the call must be equal. Ranks exchange full descriptions only after a mismatch.

On a GPU the host must not wait for the check. There ranks compare a call on the host when it follows the previous call
for the first time, and not again; the trailer of the next backward pass contains a digest of all calls (`CallLog`).
Gradients are not checked here, since ranks compare the layout of buckets.

Steps call `exchange` by way of `differentiable.py`; only groups of `ray.util.collective` use `CheckedCommunicator`.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, replace
from typing import final

import torch

from raydist.collectives.base import Communicator, Work
from raydist.collectives.delegating import DelegatingCommunicator
from raydist.collectives.tensors import check_rows, rows_name
from raydist.collectives.translation import mismatch_error
from raydist.core.values import ReduceOp


@final
@dataclass(frozen=True, slots=True)
class Call:
    """Description of a collective that a rank calls."""

    name: str  # the collective and its arguments: "all_reduce(SUM)"
    dtype: str  # dtype of the tensor: "torch.float32"
    shape: tuple[int, ...]  # shape of the tensor
    number: int = 0  # number of earlier calls of this rank
    differentiable: bool = False  # True if autograd differentiates the result; may differ between ranks

    @property
    def about(self) -> str:
        """The call without its number, for messages."""
        return f"{self.name} of {self.dtype} {self.shape}"

    def __str__(self) -> str:
        return f"{self.about} as call {self.number}"

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Call:
        fields = json.loads(data)
        return Call(**{**fields, "shape": tuple(fields["shape"])})


def describe_call(name: str, tensor: torch.Tensor | None, *, number: int = 0, differentiable: bool = False) -> Call:
    """Return the description of collective `name` on `tensor`."""
    if tensor is None:
        return Call(name, "nothing", (), number)
    return Call(name, str(tensor.dtype), tuple(tensor.shape), number, differentiable)


def exchange(
    communicator: Communicator, call: Call, *, ragged_axis: int | None = None, log: CallLog | None = None
) -> list[Call]:
    """Check that the calls of all ranks match, and return them, by rank.

    Args:
        ragged_axis: A dimension whose length may differ between ranks.
        log: Log of the earlier calls. Where the host runs ahead of the device, a known sequence of two calls is not
            compared again.

    Blocking: until all ranks have called it, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: The calls differ. All ranks raise it, with the calls of every rank.
    """
    differentiable: bool | None
    if not communicator.host_runs_ahead:
        differentiable = _compare_digests(communicator, call)
    elif ragged_axis is None and log is not None:
        differentiable = log.agree(communicator, call)
    else:
        differentiable = None
    if differentiable is None:
        return _exchange_calls(communicator, call, ragged_axis)
    return [replace(call, differentiable=differentiable)] * communicator.world_size


def all_equal(communicator: Communicator, call: Call, held: Hashable) -> bool:
    """Return True if all ranks pass equal values, which are compared by `repr`; see `exchange`.

    Costs one all-reduce of three numbers if they do.
    """
    if _compare_digests(communicator, call, held) is not None:
        return True
    _exchange_calls(communicator, call)
    return False


def _exchange_calls(communicator: Communicator, call: Call, ragged_axis: int | None = None) -> list[Call]:
    """Exchange full descriptions of the calls and return them, by rank. Raises an error if they differ."""
    calls = [Call.decode(each) for each in communicator.exchange_on_host(call.encode(), call.about)]
    if len({_essence(other, ragged_axis) for other in calls}) > 1:
        raise mismatch_error([str(other) for other in calls])
    return calls


def _compare_digests(communicator: Communicator, call: Call, held: Hashable = None) -> bool | None:
    """Return True if any rank differentiates its call, and None, on all ranks, if calls or values differ.

    All checked calls begin with this all-reduce, so ranks with different calls detect the mismatch here.
    """
    digest = hashlib.blake2b(repr((_essence(call), held)).encode(), digest_size=8).digest()
    if communicator.host_runs_ahead:
        said = communicator.exchange_on_host(digest + bytes((call.differentiable,)), call.about)
        return any(each[-1] for each in said) if len({each[:-1] for each in said}) == 1 else None
    communicator.announce(call.about)
    number = int.from_bytes(digest, "little") >> 2
    greatest = torch.tensor([number, -number, int(call.differentiable)], device=communicator.device)
    communicator.all_reduce(greatest, ReduceOp.MAX).wait()
    most, least, differentiable = greatest.tolist()
    return bool(differentiable) if most == -least else None


def _essence(call: Call, ragged_axis: int | None = None) -> tuple[object, ...]:
    """Return the part of a call that must be equal on all ranks."""
    shape = list(call.shape)
    if ragged_axis is not None and -len(shape) <= ragged_axis < len(shape):
        shape[ragged_axis] = -1
    return call.name, call.dtype, tuple(shape), call.number


@final
class CallLog:
    """Log of the collectives of a rank, apart from the exchange of gradients."""

    def __init__(self) -> None:
        self.digest = 0  # 32-bit digest of all calls in order, which must be equal on all ranks
        self._known: dict[tuple[object, ...], bool] = {}
        self._last: tuple[object, ...] | None = None

    def begin_step(self) -> None:
        """Note that a sequence of calls begins."""
        self._last = None

    def agree(self, communicator: Communicator, call: Call) -> bool:
        """Log a call, and return True if any rank differentiates it; see `exchange`.

        Blocks only where the call follows the previous one for the first time.
        """
        essence = (*_essence(replace(call, number=0)), call.differentiable)
        self.digest = zlib.crc32(repr(essence[:-1]).encode(), self.digest)
        place, self._last = (self._last, essence), essence
        if place not in self._known:
            self._known[place] = any(other.differentiable for other in _exchange_calls(communicator, call))
        return self._known[place]


@final
class CheckedCommunicator(DelegatingCommunicator):
    """A communicator that compares each collective between all ranks, before it calls another communicator.

    It compares nothing where the other communicator `checks_itself`.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.checks_itself = True
        self._num_calls = 0
        self._log = CallLog()

    def around(self, what: str, tensor: torch.Tensor | None, start: Callable[[], Work]) -> Work:
        self._compare(what, tensor)
        return start()

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)
        self._compare(rows_name(outputs), tensor[:0], always=True)  # no communicator compares lengths itself
        return self._inner.all_gather_rows(outputs, tensor)

    def barrier(self) -> None:
        self._compare("barrier", None)
        super().barrier()

    def _compare(self, name: str, tensor: torch.Tensor | None, *, always: bool = False) -> None:
        if always or not self._inner.checks_itself:
            call = describe_call(name, tensor, number=self._num_calls)
            self._num_calls += 1
            exchange(self._inner, call, log=self._log)
