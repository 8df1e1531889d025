"""Every operation of a group in shared memory, with small and large tensors, for tests of faults."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final
from unittest import mock

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.shared_memory.communicator import SharedMemoryCommunicator
from raydist.core.values import ReduceOp

SMALL = 3
LARGE = 1_000_000
"""Elements of a tensor that passes window by window."""


@final
@dataclass(frozen=True)
class Begun:
    """An operation under way, and what each element of its outputs is then."""

    finish: Callable[[], object]
    outputs: Sequence[torch.Tensor] = ()
    expected: Sequence[float] = ()

    def wait(self) -> bool:
        """Return True if the outputs are right."""
        self.finish()
        return all(bool(output.eq(value).all()) for output, value in zip(self.outputs, self.expected, strict=True))


Starting = Callable[[Communicator, int, int], Begun]
"""By the communicator, the rank that it is about, and a number of elements."""


@final
@dataclass(frozen=True)
class Operation:
    """See the module."""

    starting: Starting
    numel: int = SMALL
    entering: Callable[[Communicator, int, int], object] | None = None

    def start(self, communicator: Communicator, about: int) -> Begun:
        return self.starting(communicator, about, self.numel)

    def come(self, communicator: Communicator, about: int, *, entered: bool) -> None:
        """Do what others need for it to begin, and enter it or not."""
        if entered and self.entering is not None:
            self.entering(communicator, about, self.numel)
        elif self.starting is summed_in_place:
            communicator.allocate([(self.numel, torch.float32)])


def own(communicator: Communicator, numel: int) -> torch.Tensor:
    return torch.full((numel,), communicator.rank + 1.0)


def total(communicator: Communicator) -> float:
    return sum(range(1, communicator.world_size + 1))


def summed(communicator: Communicator, about: int, numel: int) -> Begun:
    tensor = own(communicator, numel)
    return Begun(communicator.all_reduce(tensor, ReduceOp.SUM).wait, [tensor], [total(communicator)])


def summed_in_place(communicator: Communicator, about: int, numel: int) -> Begun:
    (tensor,) = communicator.allocate([(numel, torch.float32)])
    tensor.fill_(communicator.rank + 1.0)
    return Begun(communicator.all_reduce(tensor, ReduceOp.SUM).wait, [tensor], [total(communicator)])


def gathered(communicator: Communicator, about: int, numel: int) -> Begun:
    outputs = [torch.zeros(numel) for _ in range(communicator.world_size)]
    work = communicator.all_gather(outputs, own(communicator, numel))
    return Begun(work.wait, outputs, [rank + 1.0 for rank in range(communicator.world_size)])


def gathered_rows(communicator: Communicator, about: int, numel: int) -> Begun:
    """Rank r has r rows."""
    rank, size = communicator.rank, communicator.world_size
    outputs = [torch.zeros(place, numel) for place in range(size)]
    work = communicator.all_gather_rows(outputs, torch.full((rank, numel), rank + 1.0))
    return Begun(work.wait, outputs, [place + 1.0 for place in range(size)])


def told(communicator: Communicator, about: int, numel: int) -> Begun:
    tensor = own(communicator, numel)
    return Begun(communicator.broadcast(tensor, about).wait, [tensor], [about + 1.0])


def met(communicator: Communicator, about: int, numel: int) -> Begun:
    return Begun(communicator.barrier)


def allocated(communicator: Communicator, about: int, numel: int) -> Begun:
    return Begun(lambda: communicator.allocate([(numel, torch.float32)]))


class _HalfwayError(Exception):
    pass


def allocated_halfway(communicator: Communicator, about: int, numel: int) -> None:
    """Memory is offered by rank 0; whether all have it is not known."""
    halfway = mock.patch.object(SharedMemoryCommunicator, "all_reduce", side_effect=_HalfwayError)
    with halfway, contextlib.suppress(_HalfwayError):
        communicator.allocate([(numel, torch.float32)])


COLLECTIVES: dict[str, Operation] = {
    "all_reduce small": Operation(summed),
    "all_reduce": Operation(summed, LARGE, summed),
    "all_reduce in place": Operation(summed_in_place, LARGE),
    "all_gather small": Operation(gathered),
    "all_gather": Operation(gathered, LARGE, gathered),
    "all_gather_rows": Operation(gathered_rows, LARGE, gathered_rows),
    "broadcast small": Operation(told),
    "broadcast": Operation(told, LARGE, told),
    "barrier": Operation(met),
    "allocate": Operation(allocated, LARGE, allocated_halfway),
}
WITH_A_MIDDLE = [name for name, operation in COLLECTIVES.items() if operation.entering is not None]


def starting(name: str, about: int) -> Callable[[Communicator], Begun]:
    """What every rank does in a collective."""
    return functools.partial(COLLECTIVES[name].start, about=about)
