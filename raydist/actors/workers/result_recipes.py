"""Stored results that are lost with their node are made again.

The process that runs the pipeline owns the results and keeps a :class:`Recipe` of each: the stage and its input. In the
input of a recipe, an :class:`UnstoredColumn` stands for each stored column, so that a recipe does not keep the results
alive from which its own was made: what was freed since is made again, too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast, final

import ray
from ray.exceptions import GetTimeoutError, RayError

from raydist.actors.workers.mapped_columns import ColumnPlace, LostResultError, StoredColumns, mapped_result
from raydist.core.errors import CancelledError, DataLossError, DeadlineExceededError, RaydistError, UnavailableError
from raydist.options import Timeouts
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import Column, RemoteColumn, StoredColumn
from raydist.pipelines.elements.items import StageResult
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.kernel import StageSpec

_TRIALS = 5
# A get of a block was seen to wait for ever in a replica while groups of row ids were stored (Ray 2.60): such groups
# kept the blocks alive only through the nested references of another object.
_STALL_S = 10.0
_MOST_INPUT_BYTES = 256 << 10


@final
class Recipe:
    """The work that makes a stored result.

    Args:
        pool: Runs the work.
        spec: Stage.
        block: Input of the stage.
        starts: See `run_stage`.
    """

    def __init__(self, pool: Executor, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> None:
        self._pool = pool
        self._spec = spec
        self._block = _with_columns(block, _without_result)
        self._starts = starts

    @classmethod
    def of(cls, pool: Executor, spec: StageSpec, block: Block, starts: tuple[int, ...]) -> Recipe | None:
        """Return the recipe; None if it would keep large input values in this process, such as those of a generator."""
        return cls(pool, spec, block, starts) if block.bytes_here <= _MOST_INPUT_BYTES else None

    def run(self, places: Sequence[ColumnPlace]) -> StoredResult:
        """Make the result. Blocks while workers make it, and whatever it was made from and is gone.

        Args:
            places: The columns that the result must have.

        Raises:
            DataLossError: The result has other columns than the first time.
        """
        for _ in range(_TRIALS):  # a worker that dies meanwhile leaves results of single rows
            made = self._pool.submit(self._spec, _with_columns(self._block, _with_result), self._starts).result()
            results = list(dict.fromkeys(_results_in(made)))
            if len(results) == 1 and results[0].origin is not None and results[0].origin.places == tuple(places):
                return results[0]
        raise DataLossError(
            f"A block of stage {self._spec.name} was lost with its node and had to be made again, and differs from the "
            "first time: a source has changed, or a function does not return the same for the same element. Start the "
            "epoch again."
        )


def _results_in(made: StageResult) -> Iterator[StoredResult]:
    for item in made.items:
        for column in item.columns if isinstance(item, Block) else ():
            if isinstance(column, RemoteColumn):
                yield from (each.result for each in column.stored.values() if isinstance(each, ResultColumn))


@final
class _Origin:
    """A recipe, and its result while something refers to that."""

    def __init__(self, recipe: Recipe, places: Sequence[ColumnPlace]) -> None:
        self.recipe = recipe
        self.places = tuple(places)
        self._lock = threading.Lock()
        self._result: weakref.ref[StoredResult] | None = None

    def result(self) -> StoredResult:
        """Return the result; make it again if it was freed."""
        with self._lock:
            living = None if self._result is None else self._result()
            if living is None:
                living = self.recipe.run(self.places)
                self._result = weakref.ref(living)
            return living

    def has(self, result: StoredResult) -> None:
        self._result = weakref.ref(result)

    def make_again(self, result: StoredResult, lost: str) -> None:
        """Replace the reference `lost` of a result, unless another thread has."""
        with self._lock:
            if result.ref.hex() == lost:
                result.move_to(self.recipe.run(self.places).ref)


@final
class StoredResult:
    """One result in the object store. It is freed with the last object that refers to it, in any process.

    Args:
        ref: Reference to the `StoredColumns`. Changes when the result is made again.
        origin: How to make the result; None in processes that only read it.
        owner: Name of the actor that has the origin; "" if it cannot be asked.
        node: Ray node of the worker that made the result; "" if unknown.
        has_recipe: True if the owner can make the result again.
    """

    def __init__(
        self, ref: Any, origin: _Origin | None = None, owner: str = "", node: str = "", *, has_recipe: bool = False
    ) -> None:
        self.ref = ref
        self.has_recipe = has_recipe or origin is not None
        self.node = node
        self.origin = origin
        self.owner = owner
        self._columns: StoredColumns | None = None
        with _lock:
            _known[_name_of(ref)] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.ref, self.owner, self.has_recipe)

    def columns(self) -> StoredColumns:
        """Map the columns. Blocks for at most `Timeouts.input_s`, and while a lost result is made again.

        Raises:
            DeadlineExceededError: The result did not come in time.
            UnavailableError: The result is lost and cannot be made again.
        """
        while self._columns is None:
            try:
                self._columns = mapped_result(self.ref, _STALL_S if self.has_recipe else Timeouts().input_s)
            except LostResultError as error:
                self._make_again(error)
            except DeadlineExceededError as error:
                if not self.has_recipe:
                    raise
                self._make_again(LostResultError(str(error), _name_of(self.ref)))
        return self._columns

    def _make_again(self, error: LostResultError) -> None:
        if self.origin is not None:
            make_again(error.result)
        elif self.owner and _may_ask:
            self.move_to(_ask(self.owner, error))
        elif _may_ask:
            raise UnavailableError(str(error)) from error
        else:
            raise error

    def move_to(self, ref: Any) -> None:
        """Note that the result was made again."""
        self.ref = ref
        with _lock:
            _known[_name_of(ref)] = self


_lock = threading.Lock()
_known: weakref.WeakValueDictionary[str, StoredResult] = weakref.WeakValueDictionary()
"""The results that this process refers to, by all references that they have had."""
_owner = ""
_may_ask = True


def made_by(recipe: Recipe | None, ref: Any, places: Sequence[ColumnPlace], node: str = "") -> StoredResult:
    """Return the result that `recipe` (None: it cannot be made again) has made on a node; `places` are its columns."""
    if recipe is None:
        return StoredResult(ref, node=node)
    origin = _Origin(recipe, places)
    result = StoredResult(ref, origin, _owner, node)
    origin.has(result)
    return result


def serve_losses_as(actor: str) -> None:
    """Let readers of this process's results ask the actor `actor`, which calls `make_again`, for lost ones."""
    global _owner
    _owner = actor


def leave_losses_to_caller() -> None:
    """Raise the error of a lost result in this process: an input worker must not wait for other input workers."""
    global _may_ask
    _may_ask = False


def make_again(lost: str) -> Any:
    """Make the result again whose reference was `lost`, and return the new reference. Blocks while workers make it.

    Raises:
        UnavailableError: Nothing refers to the result any more, or its pool is closed.
        DataLossError: The result differs from the first time.
    """
    with _lock:
        result = _known.get(lost)
    if result is None or result.origin is None:
        raise UnavailableError(
            f"Block {lost} of elements, lost with its node, is no longer needed, or belongs to a closed epoch. "
            "Take a new iterator."
        )
    try:
        result.origin.make_again(result, lost)
    except CancelledError as error:
        raise UnavailableError(
            f"Block {lost} of elements was lost with its node and cannot be made again: {error} Iterate again, or load "
            "the last saved state."
        ) from error
    return result.ref


def _ask(owner: str, error: LostResultError) -> Any:
    limit_s = Timeouts().input_s
    try:
        found: Any = ray.get(ray.get_actor(owner).make_again.remote(error.result), timeout=limit_s)
    except GetTimeoutError:
        raise DeadlineExceededError(
            f"Input pipeline {owner} must make a lost block again within {limit_s:g} s, and has not. {error}"
        ) from error
    except (ValueError, RayError) as failed:
        cause = getattr(failed, "cause", None)
        raise (cause if isinstance(cause, RaydistError) else UnavailableError(str(error))) from failed
    return found[0]


def _arrived(ref: Any, owner: str, has_recipe: bool) -> StoredResult:
    with _lock:
        known = _known.get(_name_of(ref))
    return known or StoredResult(ref, owner=owner, has_recipe=has_recipe)


def _name_of(ref: Any) -> str:
    return str(ref.hex())


@final
class ResultColumn(StoredColumn):
    """One stored column of a result.

    Args:
        result: The result.
        place: The column in it.
    """

    def __init__(self, result: StoredResult, place: ColumnPlace) -> None:
        self.dtype, self.shape, self.row_bytes, self.shapes = place.dtype, place.shape, place.row_bytes, place.shapes
        self.result = result
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return ResultColumn, (self.result, self.place)

    def load(self) -> Column:
        return self.result.columns().load(self.place.index)

    def pick(self, rows: Any) -> Column:
        return self.result.columns().pick(self.place.index, rows)


@final
class UnstoredColumn(StoredColumn):
    """A stored column in a recipe."""

    def __init__(self, column: ResultColumn, origin: _Origin) -> None:
        self.dtype, self.shape, self.row_bytes, self.shapes = (
            column.dtype,
            column.shape,
            column.row_bytes,
            column.shapes,
        )
        self._place = column.place
        self._origin = origin

    def load(self) -> Column:
        return self.stored().load()

    def stored(self) -> ResultColumn:
        """Return the column; make its result again if it was freed."""
        return ResultColumn(self._origin.result(), self._place)


def node_of(column: StoredColumn) -> str:
    """Return the Ray node on which a stored column was made; "" if unknown."""
    return column.result.node if isinstance(column, ResultColumn) else ""


def _without_result(column: StoredColumn) -> StoredColumn:
    if isinstance(column, ResultColumn) and column.result.origin is not None:
        return UnstoredColumn(column, column.result.origin)
    return column


def _with_result(column: StoredColumn) -> StoredColumn:
    return column.stored() if isinstance(column, UnstoredColumn) else column


def _with_columns(block: Block, change: Any) -> Block:
    if not block.is_remote:
        return block
    columns = [
        cast(Column, column.with_stored(change)) if isinstance(column, RemoteColumn) else column
        for column in block.columns
    ]
    return Block(block.structure, block.specs, tuple(columns), block.num_rows)
