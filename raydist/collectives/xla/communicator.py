"""A communicator whose collectives are programs of XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch

from raydist.collectives.backend import JoiningCommunicator
from raydist.collectives.base import ALL_REDUCE, Membership, Work
from raydist.collectives.flights import Flight
from raydist.collectives.generation import Generation
from raydist.collectives.parts import check_rows, check_swapped, gather_padded
from raydist.collectives.process_group_backend import ProcessGroupBackend
from raydist.collectives.wire import Staged, stage_reduction
from raydist.collectives.xla.chip import Chip
from raydist.collectives.xla.flight import XlaFlight
from raydist.collectives.xla.group import XlaGroup
from raydist.collectives.xla.nan_marks import mark_nan, put_nan_back
from raydist.errors import DeadlineExceededError, RaydistError
from raydist.values import ReduceOp

__all__ = ["XlaCommunicator"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@final
class XlaWork(Work):
    """An operation under way in a generation of the group."""

    def __init__(
        self, generation: Generation, flight: Flight, operation: str, deliver: Callable[[], None] | None = None
    ) -> None:
        self._generation = generation
        self._flight = flight
        self._operation = operation
        self._deliver = deliver

    def wait(self, timeout_s: float | None = None) -> None:
        if isinstance(self._flight, XlaFlight):
            self._flight.settle()
        try:
            self._generation.wait(self._flight, self._operation, timeout_s)
        except RaydistError as error:
            goes_on = timeout_s is not None and isinstance(error, DeadlineExceededError)
            if isinstance(self._flight, XlaFlight) and not goes_on:
                self._flight.give_up()
            raise
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver()


@final
class XlaCommunicator(JoiningCommunicator):
    """One rank's end of a group of chips. Collectives are launched by the thread that waits for them.

    Args:
        membership: This rank's place.
        chip: This rank's.
        timeout_s: The limit of every wait.
        backend: Makes an `XlaGroup` of a generation's members.
        leave: Closes the last of them.
    """

    def __init__(
        self,
        membership: Membership,
        chip: Chip,
        timeout_s: float,
        backend: ProcessGroupBackend,
        leave: Callable[[], None],
    ) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._chip = chip
        self._backend = backend
        self._leave = leave
        self._generation = Generation(membership, backend, timeout_s)

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # known once torch_xla is there
        return self._chip.open().device

    @property
    def checks_itself(self) -> bool:
        return True

    def start(self) -> None:
        self._generation.start()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        return self._reduce(ALL_REDUCE[op], tensor, op)

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        return self._reduce(f"reduce({op.value}, root={root})", tensor, op)

    def _reduce(self, operation: str, tensor: torch.Tensor, op: ReduceOp) -> Work:
        staged = stage_reduction(tensor, op, self.world_size)
        return self._launch_reduction(operation, tensor, staged, op, staged.deliver)

    def _launch_reduction(
        self, operation: str, tensor: torch.Tensor, staged: Staged, op: ReduceOp, deliver: Callable[[], None]
    ) -> Work:
        """Reduce what is staged; `deliver` is called when it holds the result."""
        has_marks = op in (ReduceOp.MIN, ReduceOp.MAX) and staged.values.is_floating_point()
        sent = mark_nan(staged.values, op) if has_marks else staged.values

        def take(result: torch.Tensor) -> None:
            staged.values.copy_(put_nan_back(result) if has_marks else result)
            deliver()

        return self._launch(operation, tensor, lambda group, call: group.all_reduce(call, sent, op), take)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        target = tensor.detach()
        # As whole numbers, of which all others add zero: a sum of floating-point numbers would lose the sign of a zero.
        bits = target.reshape(-1).view(_BITS[target.dtype.itemsize]) if target.numel() else target
        part = bits if root == self.rank else torch.zeros_like(bits)
        return self._launch(
            f"broadcast(root={root})",
            tensor,
            lambda group, call: group.all_reduce(call, part, ReduceOp.SUM),
            lambda result: _assign(target, result.view(target.dtype).reshape(target.shape)),
        )

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        target = tensor.detach().contiguous()
        return self._spread("all_gather", outputs, tensor, lambda group, call: group.all_gather(call, target))

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)
        return gather_padded(outputs, tensor, self.all_gather)

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        check_swapped(outputs, inputs, self.world_size)
        parts = [value.detach().contiguous() for value in inputs]
        return self._spread("all_to_all", outputs, inputs[0], lambda group, call: group.all_to_all(call, parts))

    def _spread(
        self,
        operation: str,
        outputs: Sequence[torch.Tensor],
        tensor: torch.Tensor,
        start: Callable[[XlaGroup, str], XlaFlight],
    ) -> Work:
        """A collective whose result has a part of each rank."""
        groups: list[XlaGroup] = []

        def begin(group: XlaGroup, call: str) -> XlaFlight:
            groups.append(group)
            return start(group, call)

        def deliver(result: torch.Tensor) -> None:
            for output, part in zip(outputs, groups[0].by_rank(result), strict=True):
                _assign(output.detach(), part)

        return self._launch(operation, tensor, begin, deliver)

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        staged = stage_reduction(torch.stack(inputs), op, self.world_size)

        def deliver() -> None:
            staged.deliver()
            _assign(output.detach(), staged.target[self.rank])

        return self._launch_reduction(f"reduce_scatter({op.value})", output, staged, op, deliver)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        operation = f"send(to={destination})"
        return XlaWork(
            self._generation,
            self._generation.submit(operation, lambda group: group.send(tensor, destination), point_to_point=True),
            operation,
        )

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        operation = f"recv(from={source})"
        return XlaWork(
            self._generation,
            self._generation.submit(operation, lambda group: group.receive(tensor, source), point_to_point=True),
            operation,
        )

    def barrier(self) -> None:
        XlaWork(
            self._generation, self._generation.submit("barrier", lambda group: group.meet("barrier")), "barrier"
        ).wait()

    def _launch(
        self,
        operation: str,
        tensor: torch.Tensor,
        start: Callable[[XlaGroup, str], XlaFlight],
        deliver: Callable[[torch.Tensor], None],
    ) -> Work:
        call = f"{operation} of {tensor.dtype} {tuple(tensor.shape)}"
        if not tensor.numel():
            flight: Flight = self._generation.submit(operation, lambda group: group.meet(call))
            return XlaWork(self._generation, flight, operation)
        flights: list[XlaFlight] = []

        def begin(group: XlaGroup) -> XlaFlight:
            flights.append(start(group, call))
            return flights[0]

        flight = self._generation.submit(operation, begin)
        return XlaWork(self._generation, flight, operation, lambda: deliver(flights[0].result))

    def reconfigure(self, membership: Membership) -> None:
        self.membership.check_successor(membership)
        self.abort()
        self._generation.leave()
        self.membership = membership
        self._generation = Generation(membership, self._backend, self.timeout_s)
        self._generation.start()

    def abort(self) -> None:
        self._generation.abort()

    def close(self) -> None:
        self._leave()
        self._generation.leave()


def _assign(target: torch.Tensor, values: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(values)
