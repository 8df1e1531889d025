"""Consecutive steps in one message to each replica, and the message with their results. Does no I/O."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.pickling.torch_objects import by_fields
from raydist.replicas.results import StepResult, require_nest
from raydist.replicas.step import PartSource, StepHeader, address_parts


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step on the driver, until it is sent."""

    header: StepHeader  # the step header for every replica
    parts: tuple[PerReplica, ...] = ()  # the PerReplica arguments of the step
    # `run` returned None before the step was done, because the function did so in its last call
    returns_none: bool = False

    @property
    def carries_values(self) -> bool:
        """True if some parts live in the driver, where the program may change them once `run` has returned.

        Reads all parts now: unsent steps among their sources are sent, or waited for, before this step is being sent.
        """
        return None in [value.part_on(0).ref for value in self.parts]


@final
@dataclass(frozen=True, slots=True)
class StepMessage:
    """The message to one replica for some steps. Objects of Ray's store that the replica lacks are sent beside it."""

    headers: bytes  # a pickle of the list of headers, made once for all replicas
    sources: tuple[tuple[PartSource, ...], ...]  # locations of this replica's parts, for each step
    objects: tuple[int, ...] = ()  # numbers of the objects that `sources` index, see `KeptObjects`
    after: int | None = None  # the last step of the message before; None for the first one of a generation

    __reduce__ = by_fields

    def steps(self) -> list[StepHeader]:
        """Return the headers of this replica's steps, in order."""
        headers = zip(pickle.loads(self.headers), self.sources, strict=True)
        return [replace(header, sources=sources) if sources else header for header, sources in headers]


@final
@dataclass(frozen=True, slots=True, eq=False)
class GroupResult:
    """The results of one replica's steps in a group (implements `values.Leaves`)."""

    results: tuple[StepResult, ...]  # results in step order; after a failure, the results of the steps before it
    seconds: float = 0.0  # duration of all steps together
    error: BaseException | None = None  # the failure because of which the other steps have no result
    remarks: tuple[str, ...] = ()  # warnings for the program
    # the first step that the replica may have to run again, see `recovery_plan`; None if it runs none again
    boundary: int | None = None

    __reduce__ = by_fields

    @property
    def absent(self) -> bool:
        """False: the result of each step has its own `absent`."""
        return False

    def leaf(self, index: int, place: int = 0) -> Any:
        return self.results[place].leaf(index)

    def require(self, nest: str, place: int) -> None:
        """Raise if the result at `place` has another structure than `nest`."""
        require_nest(self.results[place].structure, nest)


def address_steps(
    steps: Sequence[PlannedStep], sent: Sequence[SentObjects], ranks: Iterable[int] | None = None, same_rows: int = 1
) -> dict[int, tuple[StepMessage, list[Any]]]:
    """Return the message for each of these replicas (None: all), and the object references to send along."""
    headers = pickle.dumps([step.header for step in steps], pickle.HIGHEST_PROTOCOL)
    messages = {}
    for rank in range(len(sent)) if ranks is None else ranks:
        known, part = sent[rank], rank // same_rows
        refs: dict[Any, int] = {}
        sources = tuple(
            address_parts(step.parts, part, padding=step.header.is_padded(part), refs=refs) for step in steps
        )
        numbers, travelling = known.send(refs)
        messages[rank] = StepMessage(headers, sources, numbers, known.last_step), travelling
        known.last_step = steps[-1].header.step
    return messages


_KEPT = 2  # the current one, and the previous one for a replica that lags one batch behind


@final
class SentObjects:
    """The steps, and the objects of Ray's store by reference, that the driver has sent to one replica.

    An object holds the rows of several steps, and mapping it again for each step took a replica 1.5 ms. Both sides
    number the objects in the order of sending and keep the last ones, so they need no messages about this.

    Attributes:
        last_step: The last step that was sent; None if a message may not have arrived.
    """

    def __init__(self) -> None:
        self.last_step: int | None = None
        self._numbers: dict[Any, int] = {}
        self._next = 0

    def send(self, refs: Iterable[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """Return the numbers of the objects of `refs`, and the references to send, in the order of their numbers."""
        numbers, travelling = [], []
        for ref in refs:
            if ref not in self._numbers:
                self._numbers[ref] = self._next
                self._next += 1
                travelling.append(ref)
            numbers.append(self._numbers[ref])
        self._numbers = {ref: number for ref, number in self._numbers.items() if number >= self._next - _KEPT}
        return tuple(numbers), travelling

    def forget(self) -> None:
        """Forget everything, because a message may not have arrived: every object is sent again."""
        self._numbers.clear()
        self.last_step = None


@final
class KeptObjects:
    """The objects that a replica was sent, by number."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}

    def receive(self, numbers: Sequence[int], arrived: Sequence[Any]) -> list[Any]:
        """Return the objects of these numbers."""
        if not numbers and not arrived:
            return []
        new = sorted(number for number in numbers if number not in self._objects)
        if len(new) != len(arrived):
            raise FailedPreconditionError(
                f"A step must come with the objects that it uses; of {list(numbers)}, {new} are not here and "
                f"{len(arrived)} came along. A message before it was lost."
            )
        self._objects.update(zip(new, arrived, strict=True))
        found = [self._objects[number] for number in numbers]
        newest = max(self._objects, default=0)
        self._objects = {number: value for number, value in self._objects.items() if number > newest - _KEPT}
        return found
