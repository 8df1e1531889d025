"""Groups whose ranks are threads of one process: for tests, and as a reference implementation of collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import final

import torch

from raydist.collectives.base import ALL_REDUCE, Communicator, FinishingWork, Membership, Work
from raydist.collectives.tensors import check_parts, check_reducible, check_root, describe_tensor, reduce_parts
from raydist.collectives.translation import describe_operation, describe_ranks
from raydist.core.errors import (
    CancelledError,
    CollectiveMismatchError,
    DeadlineExceededError,
    RaydistError,
    UnavailableError,
)
from raydist.core.values import ReduceOp

__all__ = ["LocalGroup", "LocalHub"]

_Combine = Callable[[list[torch.Tensor]], list[torch.Tensor]]
"""From the tensors of all ranks, by rank, to the results."""


@dataclass
class _Meeting:
    """One collective: by rank, what it calls and what it brings."""

    calls: dict[int, str] = field(default_factory=dict)
    brought: dict[int, torch.Tensor] = field(default_factory=dict)

    def check(self) -> None:
        if len(set(self.calls.values())) > 1:
            calls = "; ".join(f"rank {rank}: {call}" for rank, call in sorted(self.calls.items()))
            raise CollectiveMismatchError(f"All ranks must call the same collective, got {calls}.")


class _Room:
    """Shared state of the ranks of one generation. `changed` guards all fields."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.arrived: set[int] = set()
        self.meetings: dict[int, _Meeting] = {}
        self.failure: RaydistError | None = None

    def fail(self, error: RaydistError) -> None:
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()


@final
class LocalHub:
    """Rendezvous of a process's threads, for any number of groups and generations."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, int], _Room] = {}
        self._lock = threading.Lock()

    def room(self, membership: Membership) -> _Room:
        """Return the shared state of one generation; the first call creates it."""
        with self._lock:
            return self._rooms.setdefault((membership.group, membership.generation), _Room())


@final
class LocalGroup(Communicator):
    """A communicator of one thread."""

    def __init__(self, hub: LocalHub, membership: Membership, timeout_s: float) -> None:
        self.membership = membership
        self.timeout_s = timeout_s
        self.hub = hub
        self._room = hub.room(membership)
        self.num_calls = 0  # number of collectives that this rank has started

    def start(self) -> LocalGroup:
        """Join the group. Blocks until all members have joined, at most `timeout_s`."""
        room = self._room
        with room.changed:
            room.arrived.add(self.rank)
            room.changed.notify_all()
            self._await(room.arrived, "rendezvous", self.timeout_s, fatal=True)
        return self

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        check_reducible(tensor.dtype, op)
        return self._meet(ALL_REDUCE[op], tensor, [tensor], lambda parts: [_reduced(parts, op)])

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> Work:
        check_parts("all_gather", outputs, tensor, self.world_size)
        return self._meet("all_gather", tensor, outputs, lambda parts: parts)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        check_root(root, self.membership.group, self.world_size)
        return self._meet(f"broadcast(root={root})", tensor, [tensor], lambda parts: [parts[root]])

    def abort(self) -> None:
        generation = self.membership.generation
        self._room.fail(
            CancelledError(f"rank {self.rank} aborted group {self.membership.group!r}, generation {generation}")
        )

    def close(self) -> None:
        self._room.fail(UnavailableError(f"rank {self.rank} has left."))

    def _meet(self, name: str, tensor: torch.Tensor, outputs: list[torch.Tensor], combine: _Combine) -> Work:
        """Bring this rank's tensor to a collective; each rank computes its own results."""
        self._check(name)
        self.num_calls += 1
        room = self._room
        with room.changed:
            meeting = room.meetings.setdefault(self.num_calls, _Meeting())
            meeting.calls[self.rank] = f"{name} of {describe_tensor(tensor)}"
            meeting.brought[self.rank] = tensor.detach().clone()
            room.changed.notify_all()

        def wait(timeout_s: float | None) -> None:
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            with room.changed:
                self._await(meeting.brought, name, limit_s, fatal=timeout_s is None)
            meeting.check()

        def deliver() -> None:
            parts = [meeting.brought[rank] for rank in range(self.world_size)]
            for target, result in zip(outputs, combine(parts), strict=True):
                target.detach().copy_(result)

        return FinishingWork(wait, deliver)

    def _check(self, operation: str) -> None:
        failure = self._room.failure
        if failure is not None:
            raise type(failure)(f"{describe_operation(self.membership, operation)} was given up: {failure.message}")

    def _await(self, here: Collection[int], operation: str, limit_s: float, *, fatal: bool) -> None:
        """Block until all ranks are `here`. The caller must hold the lock `changed`."""
        deadline = time.monotonic() + limit_s
        while len(here) < self.world_size:
            self._check(operation)
            left = deadline - time.monotonic()
            if left > 0:
                self._room.changed.wait(left)
                continue
            missing = describe_ranks([rank for rank in range(self.world_size) if rank not in here])
            error = DeadlineExceededError(
                f"{describe_operation(self.membership, operation)} timed out after {limit_s} s. No sign of {missing}."
            )
            if fatal:
                self._room.fail(error)
            raise error


def _reduced(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    flat = [part.reshape(-1) for part in parts]
    result = torch.empty_like(flat[0])
    reduce_parts(flat, result, op)
    return result.view(parts[0].shape)
