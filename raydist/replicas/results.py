"""Results of steps: how a replica stores them and how the driver's nest of PerReplica reads them."""

from __future__ import annotations

import functools
import pickle
from dataclasses import dataclass, replace
from typing import Any, Protocol, final

import numpy as np
import torch

from raydist.actors.class_tracking import cloudpickle
from raydist.context.cross_replica import require_one_structure
from raydist.errors import SpecError
from raydist.nest import LEAF, Structure, flatten, unflatten
from raydist.pickling.by_fields import by_fields
from raydist.pickling.travelling_tensors import Travelling, pack_tensor
from raydist.summaries.record import Record
from raydist.values import Part, PerReplica

__all__ = ["ResultLeaf", "StepOutcome", "StepResult", "StepValues", "pack_result", "require_nest"]


@final
@dataclass(slots=True)  # not frozen, though nobody changes one: that takes twice as long to be read, in every step
class StepResult:
    """What one replica's step function returned, without graph and device.

    Attributes:
        structure: Its nest.
        leaves: The leaves of that.
        absent: The replica had no rows and worked on others': nobody is to see this.
        rows: Of how many rows it is; None where the step had no distributed batch.
        summaries: What the step recorded by `rd.summary`.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    absent: bool = False
    rows: int | None = None
    summaries: tuple[Record, ...] = ()

    __reduce__ = by_fields

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors and arrays, about."""
        return sum(_num_bytes(leaf) for leaf in self.leaves) + sum(each.shown.num_bytes for each in self.summaries)

    def without_summaries(self) -> StepResult:
        """What the program may keep for long: summaries have been written."""
        return replace(self, summaries=()) if self.summaries else self

    def plain_leaves(self) -> list[Any]:
        """Its leaves as they travel, tensors as arrays and numbers."""
        return [leaf.plain if isinstance(leaf, Travelling) else leaf for leaf in self.leaves]

    def leaf(self, index: int) -> Any:
        """Leaf `index`, as the step's user sees it."""
        value = self.leaves[index]
        return value.unpack() if isinstance(value, Travelling) else value


def _num_bytes(leaf: Any) -> int:
    size: int = getattr(leaf, "nbytes", 64)
    return size


def pack_result(value: Any, *, absent: bool, rows: int | None = None, summaries: tuple[Record, ...] = ()) -> StepResult:
    """Make a step's result fit to travel. Tensors are detached and moved to the CPU (which waits for a GPU).

    Args:
        value: What the step function returned.
        absent: See `StepResult`.
        rows: See `StepResult`.
        summaries: See `StepResult`.

    Raises:
        SpecError: A leaf is neither a tensor nor a number and can't be pickled; says where it stands.
    """
    if type(value) is torch.Tensor:  # the nest of most steps, the loss: a dozen calls less
        return StepResult(LEAF, (pack_tensor(value),), absent, rows, summaries)
    leaves, structure = flatten(value)
    packed = tuple(_pack_leaf(leaf, path) for leaf, path in zip(leaves, structure.paths(), strict=True))
    return StepResult(structure, packed, absent, rows, summaries)


def _pack_leaf(leaf: Any, path: str) -> Any:
    if isinstance(leaf, torch.Tensor):
        return pack_tensor(leaf)
    if leaf is None or isinstance(leaf, int | float | bool | str | bytes | np.generic):
        return leaf
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return leaf.copy()  # the next step, which may run before this travels, may write to it
    try:
        return pickle.loads(cloudpickle.dumps(leaf))
    except Exception as error:
        where = f" at {path!r}" if path else ""
        raise SpecError(
            f"A step must return tensors, numbers or what can be pickled, got {type(leaf).__name__}{where}: {error}. "
            "Return the numbers that you need of it."
        ) from error


class StepOutcome(Protocol):
    """One dispatched step, as its results are read: by the driver, or by another step."""

    @property
    def num_replicas(self) -> int:
        """On how many it runs."""

    def results(self) -> list[StepResult]:
        """Every replica's result; waits for the step and raises its error."""

    def part(self, rank: int, leaf_index: int, nest: str) -> Part:
        """Where one leaf of one replica's result will be, which must be this nest.

        Raises:
            SpecError: It is known already, and is another one.
        """


@functools.lru_cache(maxsize=64)
def _shown(structure: Structure) -> str:
    """As it is shown: what travels, since its classes may be the program's own, known to one process only."""
    return str(structure)


def require_nest(found: Structure, nest: str) -> None:
    """Raise where the result of a step has another structure than the one that is shown as `nest`.

    Raises:
        SpecError: Shows both.

    >>> require_nest(flatten({"a": 1})[1], "{'a': '*'}")
    """
    if _shown(found) != nest:
        raise SpecError(
            f"A step must return the same structure in every call, got {nest} before and {_shown(found)} now. Return "
            "the same keys always, with None where there is nothing."
        )


@final
class StepValues:
    """The results of one step on all replicas, fetched together once and shared by the leaves of its nest."""

    def __init__(self, outcome: StepOutcome) -> None:
        self.outcome = outcome
        self._results: list[StepResult] | None = None

    def results(self) -> list[StepResult]:
        """Every replica's result; waits for the step and raises its error."""
        if self._results is None:
            self._results = self.outcome.results()
            present = {rank: result.structure for rank, result in enumerate(self._results) if not result.absent}
            require_one_structure(present, "A step")
        return self._results

    def rows(self) -> tuple[int, ...] | None:
        """Rows of each replica whose result counts; None where the step had no distributed batch."""
        rows = [result.rows for result in self.results() if not result.absent]
        return None if None in rows else tuple(count for count in rows if count is not None)

    def structure(self) -> Structure:
        """The nest that the replicas with rows returned."""
        results = self.results()
        return next((result.structure for result in results if not result.absent), results[0].structure)

    def nest(self) -> Any:
        """The result as it turned out: None where every replica returned None."""
        structure = self.structure()
        leaves = [ResultLeaf(self, index, structure) for index in range(structure.num_leaves)]
        return unflatten(structure, [None if all(v is None for v in leaf.values) else leaf for leaf in leaves])

    def plain_nest(self) -> Any:
        """The result of the only replica as the function returned it."""
        result = self.results()[0]
        return unflatten(result.structure, [result.leaf(index) for index in range(result.structure.num_leaves)])

    def expected_nest(self, structure: Structure) -> Any:
        """The result as it will be if the function returns `structure` again: nothing is waited for."""
        return unflatten(structure, [ResultLeaf(self, index, structure) for index in range(structure.num_leaves)])


@final
class ResultLeaf(PerReplica):
    """One leaf of a step's result; the values are on their way until they are read."""

    def __init__(self, step: StepValues, index: int, structure: Structure) -> None:
        super().__init__(())
        self._values = None
        self.step = step
        self.index = index
        self._structure = structure

    @property
    def num_parts(self) -> int:
        return self.step.outcome.num_replicas

    @property
    def weights(self) -> tuple[int, ...] | None:
        return self.step.rows()

    def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
        return self.step.outcome.part(rank, self.index, _shown(self._structure))

    def _fetch(self) -> tuple[Any, ...]:
        require_nest(self.step.structure(), _shown(self._structure))
        return tuple(result.leaf(self.index) for result in self.step.results() if not result.absent)

    def _ranks(self) -> list[int]:
        return [rank for rank, result in enumerate(self.step.results()) if not result.absent]
