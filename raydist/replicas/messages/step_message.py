"""Consecutive steps that travel together: one message a replica, and one message back. Pure."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch

from raydist.pickling.by_fields import by_fields
from raydist.pickling.travelling_tensors import TravellingNumber, TravellingTensor
from raydist.replicas.kept_objects import SentObjects
from raydist.replicas.messages.header_runs import pack_headers, unpack_headers
from raydist.replicas.messages.number_results import NumberResults
from raydist.replicas.results import StepResult, require_nest
from raydist.replicas.step import PartSource, StepHeader, address_parts
from raydist.values import PerReplica

__all__ = ["GroupResult", "PlannedStep", "ReadSteps", "StepMessage", "address_steps"]

_BARE, _WITH_VALUES = b"\0", b"\1"  # how the bytes of a message begin
_PLAIN = frozenset({bool, int, float, str, bytes, np.ndarray, torch.Tensor})


@final
@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A step as the driver holds it until it is sent.

    Attributes:
        header: What every replica is told.
        parts: Its PerReplica arguments.
    """

    header: StepHeader
    parts: tuple[PerReplica, ...] = ()

    @property
    def carries_values(self) -> bool:
        """Whether parts of it lie in the driver, where the program may change them once `run` has returned.

        Asks for all of them: results of steps that were not sent are sent, or waited for, here and not while this is.
        """
        return None in [value.part_on(0).ref for value in self.parts]


@final
@dataclass(frozen=True, slots=True)
class StepMessage:
    """What one replica is sent for some steps. Objects of the store travel beside it, those that it does not keep.

    Attributes:
        headers: The headers, the same for every replica, as `pack_headers` makes them.
        sources: Where this replica finds its parts, for each step.
        objects: Numbers of the objects that `sources` count, see `KeptObjects`.
    """

    headers: bytes
    sources: tuple[tuple[PartSource, ...], ...]
    objects: tuple[int, ...] = ()

    __reduce__ = by_fields

    def packed(self) -> bytes | None:
        """Its bytes; None where it holds objects of the program's own, which only Ray takes to another process."""
        values = [source.value for sources in self.sources for source in sources if source.object_index is None]
        data = packed_plainly(self, values)
        return None if data is None else (_WITH_VALUES if values else _BARE) + data

    @classmethod
    def unpacked(cls, data: bytes) -> StepMessage:
        """The message of which these are the bytes."""
        message: StepMessage = pickle.loads(memoryview(data)[1:])
        return message

    @classmethod
    def read_ahead(cls, data: bytes) -> ReadSteps | None:
        """What a message of these bytes says; None where values travel in it.

        A step may be in a mode of torch that holds for every tensor that is made meanwhile: `torch.inference_mode`.
        """
        return cls.unpacked(data).read() if data.startswith(_BARE) else None

    def steps(self) -> list[StepHeader]:
        """The headers of this replica's steps, in order."""
        headers = zip(unpack_headers(self.headers), self.sources, strict=True)
        return [header.addressed(sources) if sources else header for header, sources in headers]

    def read(self) -> ReadSteps:
        """What it says to its replica."""
        return ReadSteps(self.steps(), self.objects)


@final
@dataclass(slots=True, eq=False)  # not frozen, as `StepHeader`
class ReadSteps:
    """A message that its replica has read.

    Attributes:
        headers: Of its steps, in order; there is one at least.
        objects: See `StepMessage`.
    """

    headers: list[StepHeader]
    objects: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class GroupResult:
    """What one replica's steps of a group returned (implements `values.Leaves`).

    Attributes:
        results: In the order of the steps; those before the one that failed, where one did.
        seconds: What the steps took together.
        error: Why the others have no result.
        remarks: What the program should be warned of.
    """

    results: tuple[StepResult, ...]
    seconds: float = 0.0
    error: BaseException | None = None
    remarks: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        numbers = NumberResults.of(self.results)
        if numbers is None:
            return by_fields(self)
        return _group_of_numbers, (numbers, self.seconds, self.error, self.remarks)

    def without_summaries(self) -> GroupResult:
        """See `StepResult.without_summaries`."""
        if not any(result.summaries for result in self.results):
            return self
        return replace(self, results=tuple(result.without_summaries() for result in self.results))

    def packed(self) -> bytes | None:
        """Its bytes; None where it is an error, or holds objects of the program's own."""
        return None if self.error is not None else packed_plainly(self, self._leaves())

    def _leaves(self) -> list[Any]:
        """Those that may need more than numpy to be unpacked, with some others."""
        leaves = [leaf for result in self.results for leaf in result.leaves if type(leaf) is not TravellingNumber]
        return [leaf.plain if type(leaf) is TravellingTensor else leaf for leaf in leaves]

    @property
    def absent(self) -> bool:
        """Each step's result says it for itself."""
        return False

    def leaf(self, index: int, place: int = 0) -> Any:
        """See `values.Leaves.leaf`."""
        return self.results[place].leaf(index)

    def require(self, nest: str, place: int) -> None:
        """See `results.require_nest`."""
        require_nest(self.results[place].structure, nest)


def packed_plainly(message: Any, values: Iterable[Any]) -> bytes | None:
    """The bytes of a message, if nothing in it needs more than the standard library and numpy to be unpacked.

    Classes of the program may be known to one process only: those travel by value, which Ray sees to.
    """
    if not all(map(_is_plain, values)):
        return None
    try:
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):  # a structure of the program's own classes
        return None


def address_steps(steps: Sequence[PlannedStep], sent: Sequence[SentObjects]) -> list[tuple[StepMessage, list[Any]]]:
    """For each replica the message, and the object refs to send along.

    Args:
        steps: To be sent together.
        sent: What each replica was sent before.
    """
    headers = pack_headers([step.header for step in steps])
    messages = []
    for rank, known in enumerate(sent):
        refs: dict[Any, int] = {}
        sources = tuple(
            address_parts(step.parts, rank, stand_in=step.header.stands_in(rank), refs=refs) for step in steps
        )
        numbers, travelling = known.send(refs)
        messages.append((StepMessage(headers, sources, numbers), travelling))
    return messages


def _group_of_numbers(
    numbers: NumberResults, seconds: float, error: BaseException | None, remarks: tuple[str, ...]
) -> GroupResult:
    return GroupResult(numbers.results(), seconds, error, remarks)


def _is_plain(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return value is None or type(value) in _PLAIN or isinstance(value, np.generic)
