"""Results of steps: how a replica stores them and how the driver's nest of PerReplica reads them."""

from __future__ import annotations

import dis
import functools
import inspect
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any, Protocol, final

import cloudpickle
import numpy as np
import torch

from raydist.errors import SpecError
from raydist.nest import Structure, flatten, leaves_in, unflatten
from raydist.pickling.by_fields import by_fields
from raydist.pickling.travelling_tensors import Travelling, pack_tensor
from raydist.summaries.record import Record
from raydist.values import Part, PerReplica

__all__ = [
    "ResultLeaf",
    "StepOutcome",
    "StepResult",
    "StepValues",
    "StructureMemory",
    "pack_result",
    "require_nest",
    "returns_nothing",
]


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


_ONE_LEAF = flatten(0)[1]


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
        return StepResult(_ONE_LEAF, (pack_tensor(value),), absent, rows, summaries)
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


def _require_one_structure(results: Sequence[StepResult]) -> None:
    """Of two replicas that differ both are shown: of sixty, all would fill the screen."""
    structures = {rank: result.structure for rank, result in enumerate(results) if not result.absent}
    first = next(iter(structures), 0)
    for rank, structure in structures.items():
        if structure != structures[first]:
            raise SpecError(
                f"A step must return one structure on all replicas, got {structures[first]} from replica {first} and "
                f"{structure} from replica {rank}. Return the same keys everywhere."
            )


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
            _require_one_structure(self._results)
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


@final
class StructureMemory:
    """Remembers what nest each step function returned, so that a later call need not wait to know it.

    Only functions that can end in one place are remembered: with several `return`s each call may differ.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Structure] = {}

    def expected(self, fn: Callable[..., Any], given: Iterable[Any] = ()) -> Structure | None:
        """The structure that `fn` will return as far as is known; None where only the result itself can tell.

        Args:
            fn: The function.
            given: Its arguments.
        """
        code = _code_of(fn)
        return None if code is None else self._known.get((code, *_called_by(fn, given)))

    def learn(self, fn: Callable[..., Any], structure: Structure, nest: Any, given: Iterable[Any] = ()) -> None:
        """Remember that `fn` returned `nest`; a None in it may be a value next time."""
        code = _code_of(fn)
        if code is not None and _ends_in_one_place(code) and not any(leaf is None for leaf in leaves_in(nest)):
            self._known[(code, *_called_by(fn, given))] = structure


def returns_nothing(fn: Callable[..., Any]) -> bool:
    """Whether `fn` can return only None, going by its code: then a call's result is known before it ends.

    >>> def train_step(batch):
    ...     print(batch)
    >>> returns_nothing(train_step), returns_nothing(lambda batch: batch)
    (True, False)
    """
    code = _code_of(fn)
    return code is not None and _code_returns_nothing(code)


@functools.lru_cache(maxsize=1024)
def _code_returns_nothing(code: CodeType) -> bool:
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return False
    steps = list(dis.get_instructions(code))
    for before, step in zip(steps, steps[1:], strict=False):
        is_none = before.opname == "LOAD_CONST" and before.argval is None and not step.is_jump_target
        if step.opname == "RETURN_VALUE" and not is_none:
            return False
    return all(step.argval is None for step in steps if step.opname == "RETURN_CONST")


def _code_of(fn: Callable[..., Any]) -> CodeType | None:
    code = getattr(_plain_function(fn), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _called_by(fn: Callable[..., Any], given: Iterable[Any]) -> Iterator[Any]:
    """What `fn` may call that is not in its code: calling another function or module it may return another nest.

    Of its closure (a decorator's wrapper is one code for many functions), of partials, and of its arguments.
    """
    while isinstance(fn, functools.partial):
        yield from _called(fn.args)
        yield from _called(fn.keywords.values())
        fn = fn.func
    yield from _called(_enclosed(_plain_function(fn)))
    yield from _called(given)


def _called(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        # Only functions are looked into: reading an attribute of a mirrored object waits for all dispatched steps.
        if type(value) is FunctionType:
            yield value.__code__
        elif issubclass(type(value), torch.nn.Module):
            yield weakref.ref(value)


def _plain_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside of partials and of a bound method."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    function: Callable[..., Any] = getattr(fn, "__func__", fn)
    return function


def _enclosed(function: Callable[..., Any]) -> list[Any]:
    """What the closure of a function holds."""
    return [getattr(cell, "cell_contents", None) for cell in getattr(function, "__closure__", None) or ()]


def _ends_in_one_place(code: CodeType) -> bool:
    """One return that nothing jumps to: `return a if b else c` jumps to it and may give two kinds of nest."""
    returns = [step for step in dis.get_instructions(code) if step.opname in ("RETURN_VALUE", "RETURN_CONST")]
    return len(returns) == 1 and not returns[0].is_jump_target
