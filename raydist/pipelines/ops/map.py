"""Dataset.map, enumerate and scan: apply a function to every element."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.exception_utils import LEAVING, annotate, as_exception
from raydist.core.nest import LEAF, Structure, unflatten
from raydist.core.values import AUTOTUNE
from raydist.pipelines.elements.blocks import Block, Column, object_column, private_column
from raydist.pipelines.elements.declared_output import DeclaredOutput
from raydist.pipelines.elements.element_nests import flatten_element, map_element
from raydist.pipelines.elements.fold import FoldState
from raydist.pipelines.elements.function_results import ReusedResults, large_blocks
from raydist.pipelines.elements.functions import RowCalls, element_rows, function_label, wants_rng
from raydist.pipelines.elements.items import ElementError, Item, size_of
from raydist.pipelines.elements.leaf_values import as_leaf
from raydist.pipelines.elements.rows import items_of_rows
from raydist.pipelines.elements.small_floats import array_of_tensor, dtype_kind, tensor_of_array
from raydist.pipelines.elements.spec import DatasetSpec, TensorSpec
from raydist.pipelines.elements.tensor_functions import note_numpy_in_torch, receiving_tensors
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp
from raydist.pipelines.engine.probe import probe_spec
from raydist.pipelines.engine.producers import Producer, ReplayIterator, SpecGuard, read_item

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from raydist.pipelines.elements.seeds import RandomKey
    from raydist.pipelines.engine.op import DatasetOp, IterContext

_NUMBER = TensorSpec((), np.int64)


@final
@dataclass(eq=False)
class VectorisedKernel(Kernel):
    """A kernel that runs `fn` under vmap while the first and last row of each block equal the results of `plain`.

    Once vmap fails or gives other results, the kernel calls the function for every element.
    """

    preserves_count: ClassVar[bool] = True
    fn: Callable[..., Any]
    plain: Kernel
    output: DeclaredOutput | None
    _refused: bool = field(default=False, init=False)

    @property
    def label(self) -> str:  # type: ignore[override]  # a plain attribute in the base class, never set here
        return self.plain.label

    @property
    def uses_index(self) -> bool:
        return False

    def run(self, block: Block, start: int) -> Sequence[Item]:
        if not self._refused and block.num_rows > 1 and not block.holds_objects:
            try:
                return self._run_whole(block, start)
            except Exception as error:  # any error of vmap: calling the function for each element shows the cause
                self._refused = True
                reason = f"{type(error).__name__}: {error}".split("\n")[0]
        else:
            return self.plain.run(block, start)
        warnings.warn(
            f"map_vectorization must be able to run {self.label} over whole blocks, and cannot ({reason:.120}). "
            "It is called for every element. Use torch functions without Python conditions, or switch the option off.",
            RuntimeWarning,
            stacklevel=2,
        )
        return self.plain.run(block, start)

    def _run_whole(self, block: Block, start: int) -> Sequence[Item]:
        made: Sequence[Item] = [_mapped(self.fn, block)]
        if self.output is not None:
            made = self.output.conform(made, start)
        for row in (0, block.num_rows - 1):
            _require_same(made, row, self.plain.run(block.slice(row, row + 1), start + row))
        return made


def _mapped(fn: Callable[..., Any], block: Block) -> Block:
    # Torch is imported with the first block: pipelines without vectorisation need no torch.
    import torch

    # Copies: `fn` may write to its arguments, and `plain` runs on `block` again for comparison.
    tensors = [tensor_of_array(column.copy(), torch.from_numpy) for column in block.columns]
    nest = unflatten(block.structure, tensors)
    result = torch.func.vmap(fn)(*nest) if block.structure.kind is tuple else torch.func.vmap(fn)(nest)
    leaves, structure = flatten_element(result)
    columns = tuple(array_of_tensor(leaf.detach()) for leaf in leaves)  # modules return tensors with gradients
    specs = tuple(TensorSpec(column.shape[1:], column.dtype) for column in columns)
    return Block(structure, specs, columns, block.num_rows)


def _require_same(made: Sequence[Item], row: int, expected: Sequence[Item]) -> None:
    """Raise SpecError unless row `row` of the one block in `made` equals the one element in `expected`."""
    (whole,), (one,) = made, expected
    if not isinstance(whole, Block) or not isinstance(one, Block):
        raise SpecError(f"elements fail: row {row} gave {one!r:.80}")
    if (whole.structure, whole.specs) != (one.structure, one.specs):
        raise SpecError(f"it gives {whole.signature} {whole.specs} instead of {one.signature} {one.specs}")
    for mine, theirs in zip(whole.columns, one.columns, strict=True):
        if not np.array_equal(mine[row], theirs[0], equal_nan=dtype_kind(mine.dtype) in "fcmM"):
            raise SpecError(f"it gives other values, {mine[row]!r:.50} instead of {theirs[0]!r:.50}")


def with_seeds(items: Sequence[Item], start: int, key: RandomKey) -> list[Item]:
    """Give the datasets in `items` a seed each, drawn from `key` for the index of the element, from `start` on."""
    seeded: list[Item] = []
    for item in items:
        seeded.append(_seeded(item, start, key) if isinstance(item, Block) and item.holds_datasets else item)
        start += size_of(item)
    return seeded


def _seeded(block: Block, start: int, key: RandomKey) -> Block:
    seeds = [int(word >> 1) for word in key.words(start, block.num_rows).tolist()]
    columns = [
        _with_column_seeds(column, seeds) if isinstance(spec, DatasetSpec) else column
        for column, spec in zip(block.columns, block.specs, strict=True)
    ]
    return Block(block.structure, block.specs, tuple(columns), block.num_rows)


def _with_column_seeds(column: Column, seeds: Sequence[int]) -> Column:
    return object_column([dataset._with_element_seed(seed) for dataset, seed in zip(column, seeds, strict=True)])


def parse_parallelism(num_parallel_calls: int | None) -> int | None:
    """Return None for AUTOTUNE; raise InvalidArgumentError unless >= 1."""
    if num_parallel_calls is None or num_parallel_calls == AUTOTUNE:
        return None
    if num_parallel_calls < 1:
        raise InvalidArgumentError(f"num_parallel_calls must be >= 1, AUTOTUNE or None, got {num_parallel_calls}.")
    return num_parallel_calls


@final
@dataclass(frozen=True, eq=False)
class MapOp(UnaryOp, ElementwiseOp):
    """The results of `fn` for every element of `input`."""

    fn: Callable[..., Any]
    num_parallel_calls: int | None = None
    seed: int | None = None
    output: DeclaredOutput | None = None
    deterministic: bool | None = None
    rows_together: int = 1
    is_vectorised: bool = False

    def __post_init__(self) -> None:
        parse_parallelism(self.num_parallel_calls)
        if not callable(self.fn):
            raise InvalidArgumentError(f"map needs a function, got {self.fn!r}.")

    @property
    def parallelism(self) -> int | None:
        return parse_parallelism(self.num_parallel_calls)

    @property
    def label(self) -> str:
        return f"map({function_label(self.fn)}{', vectorised' if self.is_vectorised else ''})"

    @property
    def is_pure(self) -> bool:
        return self.parallelism != 1 and not wants_rng(self.fn)  # a function called in order may count its calls

    @property
    def has_declared_shapes(self) -> bool:
        return self.output is not None

    def element_spec(self) -> Any:
        return self._spec

    @cached_property
    def _spec(self) -> Any:
        return probe_spec(self) if self.output is None else self.output.nest()

    def kernel(self, ctx: IterContext) -> Kernel:
        key = ctx.key(self, self.seed) if wants_rng(self.fn) else None
        label = f"{ctx.operation_names[id(self)]} ({function_label(self.fn)})"
        plain = _MapKernel(self.fn, label, key, self.output, key or ctx.key(self, self.seed))
        return VectorisedKernel(self.fn, plain, self.output) if self.is_vectorised else plain


@final
@dataclass(frozen=True, eq=False)
class _MapKernel(Kernel):
    fn: Callable[..., Any]
    label: str
    key: RandomKey | None
    output: DeclaredOutput | None
    datasets_key: RandomKey
    reused: ReusedResults = field(default_factory=ReusedResults)

    @property
    def uses_index(self) -> bool:
        return self.key is not None

    def run(self, block: Block, start: int) -> Sequence[Item]:
        items = self._made(block, start)
        if any(isinstance(item, Block) and item.holds_datasets for item in items):
            items = with_seeds(items, start, self.datasets_key)
        return items if self.output is None else self.output.conform(items, start)

    def _made(self, block: Block, start: int) -> list[Item]:
        calls = RowCalls(self.fn, block, start, self.key)
        results, failed = self.reused.begin(calls, block.num_rows)
        _add_results(results, failed, calls, block.num_rows - len(results))
        return items_of_results(results, failed, start)


def _add_results(results: list[Any], failed: list[int], calls: RowCalls, num_rows: int) -> None:
    """Add `num_rows` further results of `calls`. Only `results` may refer to them: see `large_blocks`."""
    held = len(results)
    more, more_failed = calls.take(num_rows)
    results += more
    failed += [held + row for row in more_failed]


def items_of_results(results: list[Any], failed: Sequence[int], start: int) -> list[Item]:
    """Return blocks of a function's results; the errors at the rows `failed` keep their places."""
    items: list[Item] = []
    first = 0
    for row in failed:
        items += [*_blocks(results[first:row], start + first), results[row]]
        first = row + 1
    return items + _blocks(results[first:] if failed else results, start + first)


def _blocks(values: list[Any], start: int) -> list[Item]:
    large = large_blocks(values)
    if large is not None:
        return [*large]
    return [item if isinstance(item, Block) else _moved(item, start) for item in items_of_rows(values)]


def _moved(item: ElementError, start: int) -> ElementError:
    return ElementError(item.error, start + (item.index or 0))


@final
@dataclass(frozen=True, eq=False)
class EnumerateOp(UnaryOp, ElementwiseOp):
    """(number, element) pairs, counted from `start`; an error takes a number too."""

    passes_elements: ClassVar[bool] = True
    pure: ClassVar[bool] = True

    start: int = 0

    @property
    def label(self) -> str:
        return f"enumerate({self.start or ''})"

    def element_spec(self) -> Any:
        return (_NUMBER, self.input.element_spec())

    def kernel(self, ctx: IterContext) -> Kernel:
        return _EnumerateKernel(self.start, ctx.operation_names[id(self)])


@final
@dataclass(frozen=True, eq=False)
class _EnumerateKernel(Kernel):
    takes_row_ids: ClassVar[bool] = True
    first: int
    label: str

    @property
    def uses_index(self) -> bool:
        return True

    def run(self, block: Block, start: int) -> Sequence[Item]:
        begin = self.first + start
        numbers = np.arange(begin, begin + block.num_rows, dtype=np.int64)
        structure = Structure(tuple, (0, 1), (LEAF, block.structure))
        return [Block(structure, (_NUMBER, *block.specs), (numbers, *block.columns), block.num_rows)]


def split_label(op: DatasetOp, label: str) -> MapOp:
    """Return pairs (all other entries, entry `label`) of the dict elements of `op`.

    Raises:
        InvalidArgumentError: There is no such entry, or no other entry.
    """
    spec = op.element_spec()
    if label not in spec or len(spec) < 2:
        raise InvalidArgumentError(
            f"label_name must be one of several columns, got {label!r} and the columns {', '.join(spec):.500}."
        )
    split = _SplitLabel(label)
    return MapOp(op, split, output=DeclaredOutput.parse(split(spec)))


@final
@dataclass(frozen=True)
class _SplitLabel:
    label: str

    def __call__(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        return {name: value for name, value in fields.items() if name != self.label}, fields[self.label]


@final
@dataclass(frozen=True, eq=False)
class ScanOp(UnaryOp):
    """The second results of `fn(state, element)`; the first result is the state for the next element."""

    initial_state: Any
    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidArgumentError(f"scan needs a function, got {self.fn!r:.100}.")
        map_element(as_leaf, self.initial_state)

    @property
    def label(self) -> str:
        return f"scan({function_label(self.fn)})"

    @property
    def has_declared_shapes(self) -> bool:
        return False

    def element_spec(self) -> Any:
        return self._spec

    @cached_property
    def _spec(self) -> Any:
        return probe_spec(self)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        label = f"{ctx.operation_names[id(self)]} ({function_label(self.fn)})"
        return ReplayIterator(_Scanning(self, ctx.build(self.input), label))


@final
class _Scanning(ClosesInput, Producer):
    """A producer that turns a failing call into an error in the element's place and keeps the state before it."""

    def __init__(self, op: ScanOp, source: OpIterator, label: str) -> None:
        self._fn = receiving_tensors(op.fn)
        self._carried = FoldState(op.initial_state)
        self._source = source
        self._label = label
        self._kind = SpecGuard(label)
        self._index = 0

    def make(self, limit: int) -> Sequence[Item]:
        item = read_item(self._source, limit)
        if isinstance(item, ElementError):
            self._index += 1
            return [item]
        return self._kind.checked(self._scan(item))

    def _scan(self, block: Block) -> list[Item]:
        columns = [private_column(column) for column in block.columns]
        elements = element_rows(block.structure, columns)
        results = [self._step(element, index) for index, element in enumerate(elements, self._index)]
        failed = [row for row, result in enumerate(results) if isinstance(result, ElementError)]
        items = items_of_results(results, failed, self._index)
        for item in items:
            if isinstance(item, ElementError):
                annotate(item.error, f"In {self._label}, element {item.index} of its input.")
        self._index += block.num_rows
        return items

    def _step(self, element: Any, index: int) -> Any:
        try:
            result = self._fn(copy.deepcopy(self._carried.value), element)
            if not isinstance(result, tuple) or len(result) != 2:
                raise SpecError(f"The function of scan must return (state, output), got {result!r:.100}.")
            self._carried.replace(result[0], self._label)
        except LEAVING:
            raise
        except BaseException as error:  # of the user's function on this element
            note_numpy_in_torch(error)
            return ElementError(as_exception(error), index)
        return result[1]
