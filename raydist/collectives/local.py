"""Groups whose ranks are threads of one process: for tests, and as a reference implementation of collectives.

The threads share a :class:`LocalHub`. Reductions run in rank order, so results are the same bits every time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch

from raydist.collectives.base import ALL_REDUCE, Communicator, Membership, Work
from raydist.collectives.reducing import reduce_parts
from raydist.collectives.tensors import check_parts, check_reducible, check_rows, check_swapped, rows_name
from raydist.collectives.translation import describe_operation
from raydist.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    RaydistError,
    UnavailableError,
)
from raydist.values import ReduceOp

__all__ = ["LocalGroup", "LocalHub"]

_Tensors = list[torch.Tensor]


@dataclass
class _Meeting:
    """One collective: inputs by rank, and results by rank once all inputs are there."""

    calls: dict[int, str] = field(default_factory=dict)
    brought: dict[int, _Tensors] = field(default_factory=dict)
    results: list[_Tensors] | None = None
    error: RaydistError | None = None
    num_served: int = 0


class _Room:
    """Shared state of the ranks of one generation. `changed` guards all fields."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.arrived: set[int] = set()
        self.meetings: dict[object, _Meeting] = {}
        self.failure: RaydistError | None = None

    def fail(self, error: RaydistError) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def bring(self, key: object, rank: int, call: str, tensors: _Tensors, *, expected: int, combine: _Combine) -> None:
        """Add one rank's inputs; the last rank computes the results for all ranks."""
        with self.changed:
            meeting = self.meetings.setdefault(key, _Meeting())
            meeting.calls[rank] = call
            meeting.brought[rank] = tensors
            if len(meeting.brought) == expected:
                self._conclude(meeting, combine)

    def _conclude(self, meeting: _Meeting, combine: _Combine) -> None:
        if len(set(meeting.calls.values())) > 1:
            calls = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(meeting.calls.items()))
            meeting.error = CollectiveMismatchError(f"All ranks must call the same collective, got {calls}.")
        else:
            meeting.results = combine([meeting.brought[rank] for rank in sorted(meeting.brought)])
        self.changed.notify_all()


_Combine = Callable[[Sequence[_Tensors]], list[_Tensors]]


@final
class LocalHub:
    """Rendezvous of a process's threads, for any number of groups and generations.

    >>> hub = LocalHub()
    >>> alone = LocalGroup(hub, Membership("g", generation=0, rank=0, world_size=1), timeout_s=1.0).start()
    >>> tensor = torch.tensor([1.0, 2.0])
    >>> alone.all_reduce(tensor, ReduceOp.SUM).wait()
    >>> tensor.tolist()
    [1.0, 2.0]
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int], _Room] = {}
        self._lock = threading.Lock()

    def room(self, membership: Membership) -> _Room:
        """Return the shared state of one generation; the first call creates it."""
        with self._lock:
            key = (membership.group, membership.generation)
            return self._rooms.setdefault(key, _Room(membership.world_size))


@final
class _LocalWork(Work):
    def __init__(self, group: LocalGroup, key: object, operation: str, outputs: _Tensors) -> None:
        self._group = group
        self._key = key
        self._operation = operation
        self._outputs: _Tensors | None = outputs

    def wait(self, timeout_s: float | None = None) -> None:
        if self._outputs is None:
            return
        results = self._group.await_results(self._key, self._operation, timeout_s)
        for output, result in zip(self._outputs, results, strict=False):
            output.copy_(result)
        self._outputs = None


@final
class LocalGroup(Communicator):
    """A communicator of one thread. See :class:`LocalHub`.

    Attributes:
        num_calls: Number of collectives that this rank has started in this generation.
    """

    def __init__(self, hub: LocalHub, membership: Membership, timeout_s: float) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self._hub = hub
        self._room = hub.room(membership)
        self.num_calls = 0
        self._num_messages: dict[tuple[int, int], int] = {}

    def start(self) -> LocalGroup:
        """Join the group. Blocks until all members have joined, at most `timeout_s`."""
        room = self._room
        with room.changed:
            room.arrived.add(self.rank)
            room.changed.notify_all()
            self._await(lambda: len(room.arrived) == room.world_size, "rendezvous", self.timeout_s, fatal=True)
        return self

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        check_reducible(tensor.dtype, op)
        return self._meet(ALL_REDUCE[op], [tensor], [tensor], lambda parts: _same(parts, [_fold(parts, op)]))

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        return self._meet("all_gather", [tensor], outputs, lambda parts: _same(parts, [part[0] for part in parts]))

    def all_gather_rows(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_rows(outputs, tensor, self.rank, self.world_size)

        def combine(parts: Sequence[_Tensors]) -> list[_Tensors]:
            return _same(parts, [part[0] for part in parts])

        return self._meet(rows_name(outputs), [tensor], outputs, combine, shown=[tensor[:0]])

    def all_to_all(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        check_swapped(outputs, inputs, self.world_size)

        def combine(parts: Sequence[_Tensors]) -> list[_Tensors]:
            return [[part[rank] for part in parts] for rank in range(len(parts))]

        return self._meet("all_to_all", inputs, outputs, combine)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return self._meet(f"broadcast(root={root})", [tensor], [tensor], lambda parts: _same(parts, parts[root]))

    def reduce(self, tensor: torch.Tensor, root: int, op: ReduceOp) -> Work:
        check_reducible(tensor.dtype, op)
        outputs = [tensor] if self.rank == root else []
        name = f"reduce({op.value}, root={root})"
        return self._meet(name, [tensor], outputs, lambda parts: _same(parts, [_fold(parts, op)]))

    def reduce_scatter(self, output: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp) -> Work:
        check_reducible(output.dtype, op)
        check_parts("reduce_scatter", inputs, output, self.world_size)

        def combine(parts: Sequence[_Tensors]) -> list[_Tensors]:
            return [[_fold([[part[rank]] for part in parts], op)] for rank in range(len(parts))]

        return self._meet(f"reduce_scatter({op.value})", inputs, [output], combine)

    def send(self, tensor: torch.Tensor, destination: int) -> Work:
        return self._exchange(self.rank, destination, [tensor], [])

    def recv(self, tensor: torch.Tensor, source: int) -> Work:
        return self._exchange(source, self.rank, [tensor], [tensor])

    def barrier(self) -> None:
        self._meet("barrier", [], [], lambda parts: _same(parts, [])).wait()

    def reconfigure(self, membership: Membership) -> None:
        self.membership.check_successor(membership)
        self.abort()
        self.membership = membership
        self._room = self._hub.room(membership)
        self.num_calls = 0
        self._num_messages = {}
        self.start()

    def abort(self) -> None:
        generation = self.membership.generation
        self._room.fail(
            CancelledError(f"rank {self.rank} aborted group {self.membership.group!r}, generation {generation}")
        )

    def close(self) -> None:
        self._room.fail(UnavailableError(f"rank {self.rank} has left."))

    def await_results(self, key: object, operation: str, timeout_s: float | None) -> _Tensors:
        """Block until a collective has run, and return this rank's results."""
        meeting = self._room.meetings[key]
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._room.changed:
            self._await(lambda: bool(meeting.results or meeting.error), operation, limit_s, fatal=timeout_s is None)
            meeting.num_served += 1
            if meeting.num_served == len(meeting.brought):
                del self._room.meetings[key]
        if meeting.error is not None:
            raise type(meeting.error)(f"{meeting.error.message}")
        results = meeting.results or []
        return results[min(self.rank, len(results) - 1)]

    def _meet(
        self, name: str, tensors: _Tensors, outputs: _Tensors, combine: _Combine, *, shown: _Tensors | None = None
    ) -> Work:
        self.num_calls += 1
        return self._bring(
            self.num_calls, name, tensors, outputs, expected=self.world_size, combine=combine, shown=shown
        )

    def _exchange(self, source: int, destination: int, tensors: _Tensors, outputs: _Tensors) -> Work:
        pair = (source, destination)
        self._num_messages[pair] = self._num_messages.get(pair, 0) + 1
        name = f"send/recv({source} to {destination})"
        sender_first = 0 if source < destination else 1

        def combine(parts: Sequence[_Tensors]) -> list[_Tensors]:
            return [parts[sender_first]]

        key = (*pair, self._num_messages[pair])
        return self._bring(key, name, tensors, outputs, expected=2, combine=combine)

    def _bring(
        self,
        key: object,
        name: str,
        tensors: _Tensors,
        outputs: _Tensors,
        *,
        expected: int,
        combine: _Combine,
        shown: _Tensors | None = None,
    ) -> Work:
        self._check(name)
        compared = tensors if shown is None else shown
        call = f"{name} of {', '.join(f'{t.dtype} {tuple(t.shape)}' for t in compared) or 'nothing'}"
        copies = [tensor.detach().clone() for tensor in tensors]
        self._room.bring(key, self.rank, call, copies, expected=expected, combine=combine)
        return _LocalWork(self, key, name, [output.detach() for output in outputs])

    def _check(self, operation: str) -> None:
        failure = self._room.failure
        if failure is not None:
            raise type(failure)(f"{describe_operation(self.membership, operation)} was given up: {failure.message}")

    def _await(self, done: Callable[[], bool], operation: str, limit_s: float, *, fatal: bool) -> None:
        """Block until `done`. The caller must hold the lock `changed`."""
        deadline = time.monotonic() + limit_s
        while not done():
            self._check(operation)
            left = deadline - time.monotonic()
            if left > 0:
                self._room.changed.wait(left)
                continue
            error = DeadlineExceededError(
                f"{describe_operation(self.membership, operation)} timed out after {limit_s} s."
            )
            if fatal:
                self._room.fail(error)
            raise error


def _same(parts: Sequence[_Tensors], result: _Tensors) -> list[_Tensors]:
    return [result] * len(parts)


def _fold(parts: Sequence[_Tensors], op: ReduceOp) -> torch.Tensor:
    flat = [part[0].reshape(-1) for part in parts]
    result = torch.empty_like(flat[0])
    reduce_parts(flat, result, op)
    return result.view(parts[0][0].shape)
