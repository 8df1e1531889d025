"""Rewrites of a graph that change no element, no order and no error's place. Each has a setting.

A rewrite is a pure function of the graph. Operations are immutable: changed ones are copied under their old name, so
random choices stay the same. `REWRITES` lists all rewrites in the order of application.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.options import Options
from raydist.pipelines.elements.functions import wants_rng
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.combine import ZipOp
from raydist.pipelines.ops.gather import GatherOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.ops.prefetch import PrefetchOp
from raydist.pipelines.ops.repeat import RepeatOp
from raydist.pipelines.ops.selection import ShardOp
from raydist.pipelines.ops.shuffle import ShuffledPassesOp, ShuffleOp
from raydist.pipelines.sources.range import RangeOp

Names = dict[int, str]
"""Name of each operation, by `id`: see `engine.build.name_operations`."""

Change = Callable[[DatasetOp], DatasetOp]


def rewrite_each(op: DatasetOp, names: Names, change: Change) -> DatasetOp:
    """Apply `change` to every operation, inputs first. An operation at several places stays one object."""
    done: dict[DatasetOp, DatasetOp] = {}

    def visit(node: DatasetOp) -> DatasetOp:
        if node not in done:
            done[node] = change(with_inputs(node, names, visit))
        return done[node]

    return visit(op)


def with_inputs(op: DatasetOp, names: Names, change: Change) -> DatasetOp:
    """Return `op` with changed inputs, under its old name; `op` itself if nothing changed."""
    changed = {source: change(source) for source in op.inputs}
    if all(old is new for old, new in changed.items()):
        return op

    def swap(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(swap(part) for part in value)
        return changed.get(value, value) if isinstance(value, DatasetOp) else value

    fields = {name: swap(value) for name, value in _fields(op).items()}
    return named_like(op, dataclasses.replace(op, **fields), names)


def named_like(old: DatasetOp, new: DatasetOp, names: Names) -> DatasetOp:
    """Name `new` like `old` and return `new`."""
    names[id(new)] = names[id(old)]
    return new


def settings_of(op: DatasetOp) -> tuple[Any, ...]:
    """Return the settings of an operation, without its inputs. Equal settings mean equal work."""
    inputs = op.inputs
    read = {id(inputs), *map(id, inputs)}
    return tuple(value for name, value in _fields(op).items() if name != "given_name" and id(value) not in read)


def _fields(op: DatasetOp) -> dict[str, Any]:
    return {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}


_Change = Callable[[DatasetOp, Names], DatasetOp]


def optimize(
    op: DatasetOp, names: Names, options: Options, *, nested: bool = False
) -> tuple[DatasetOp, tuple[str, ...]]:
    """Return the rewritten graph, and the settings whose rewrites changed it.

    Adds the names of new operations to `names`.
    """
    changed: list[str] = []
    kinds = _kinds(op)
    for rewrite in REWRITES:
        # Called for each of thousands of short nested datasets: a rewrite without effect must cost nothing.
        if rewrite.changes not in kinds or (nested and not rewrite.nested):
            continue
        if getattr(options.optimization, rewrite.flag) is rewrite.when:
            new = rewrite.apply(op, names)
            changed += [rewrite.flag] if new is not op else []
            op = new
    return op, tuple(changed)


def _kinds(op: DatasetOp) -> set[type]:
    return set[type]({object, type(op)}).union(*map(_kinds, op.inputs))


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite of a graph."""

    flag: str  # the setting of `OptimizationOptions` for this rewrite
    apply: _Change  # returns the rewritten graph; the same object if there is nothing to change
    changes: type = object  # type of operation that it looks for: graphs without such an operation are skipped
    when: bool = True  # value of the setting that enables the rewrite
    nested: bool = True  # True if it also applies to datasets that functions return


def _each(change: _Change) -> _Change:
    """Return a rewrite that applies `change` to every operation, inputs first."""
    return lambda op, names: rewrite_each(op, names, lambda node: change(node, names))


def _without_noop(node: DatasetOp, names: Names) -> DatasetOp:
    """Leave out an operation that changes nothing: `take(-1)`, `skip(0)`, `repeat(1)`, `shuffle(1)`, ..."""
    return node.inputs[0] if node.is_noop else node


def _in_order(node: DatasetOp, names: Names) -> DatasetOp:
    """Run maps without given parallelism in order, in one thread, as tf.data does; AUTOTUNE stays."""
    if not isinstance(node, MapOp) or node.num_parallel_calls is not None:
        return node
    return named_like(node, replace(node, num_parallel_calls=1), names)


def _computed_once(op: DatasetOp, names: Names) -> DatasetOp:
    """Merge equal operations with equal inputs, and let a `zip` read each of its inputs once and hand out copies.

    Only operations whose elements follow from their inputs alone: no random choice, no function that may keep state
    between calls. A `concatenate` of a dataset with itself is not changed: it would have to hold all elements.
    """
    known: dict[Hashable, DatasetOp] = {}

    def change(node: DatasetOp) -> DatasetOp:
        if isinstance(node, ZipOp):
            node = _reading_once(node, names)
        if not node.is_pure:
            return node
        try:
            return known.setdefault((type(node), settings_of(node), node.inputs), node)
        except TypeError:  # a setting that cannot be compared
            return node

    return rewrite_each(op, names, change)


def _reading_once(op: ZipOp, names: Names) -> DatasetOp:
    kept: list[DatasetOp] = []
    places: list[int] = []
    for dataset in op.datasets:
        if dataset not in kept or not _repeats_itself(dataset):
            kept.append(dataset)
        places.append(len(kept) - 1 if kept[-1] is dataset else kept.index(dataset))
    if len(kept) == len(op.datasets):
        return op
    spread = tuple(places[place] for place in op.places)
    return named_like(op, replace(op, datasets=tuple(kept), places=spread), names)


def _repeats_itself(op: DatasetOp) -> bool:
    """Return True if two iterators of one epoch give the same elements."""
    return (op.is_pure or op.content_blind) and all(map(_repeats_itself, op.inputs))


def _shard_early(node: DatasetOp, names: Names) -> DatasetOp:
    """Move a shard before the maps that preceded it: the function is called only for the elements of one shard.

    Element k of a map's output, or the error in its place, follows from element k of its input, so the shard keeps the
    same elements. A function with `rng` draws by the index of its element, and a function that is called in order may
    count its calls: such maps stay in place. `skip` is not moved: it counts elements but not errors, and only the map
    decides which elements are errors. `take` need not move: it requests no more elements than it hands out.
    """
    if not isinstance(node, ShardOp) or not isinstance(node.input, MapOp) or not node.input.is_pure:
        return node
    mapped = node.input
    shard = named_like(node, replace(node, input=mapped.input), names)
    return named_like(mapped, replace(mapped, input=_shard_early(shard, names)), names)


def _gather_late(op: DatasetOp, names: Names) -> DatasetOp:
    """Apply every run of operations that only pick and order to indices, and read the elements after them.

    Shuffles, takes and repeats over a source with random access then move 8 bytes per image, restoring a shuffle reads
    no image, and the gather joins the stage of the next map.
    """
    if not op.content_blind:
        return with_inputs(op, names, lambda source: _gather_late(source, names))
    source = op
    while source.content_blind:
        (source,) = source.inputs
    access = source.random_access()
    if access is None or access.cheap:
        return with_inputs(op, names, lambda inner: _gather_late(inner, names))
    indices = named_like(source, RangeOp(0, len(access)), names)
    return named_like(source, GatherOp(_swap_source(op, source, indices, names), source), names)


def _swap_source(op: DatasetOp, old: DatasetOp, new: DatasetOp, names: Names) -> DatasetOp:
    if op is old:
        return new
    return with_inputs(op, names, lambda source: _swap_source(source, old, new, names))


def _shuffle_whole_passes(node: DatasetOp, names: Names) -> DatasetOp:
    """Draw one permutation per pass of a repeated shuffle whose buffer holds the whole source.

    The order is that of the shuffle: a buffer with room for everything is handed out in the same permutation.
    """
    if not isinstance(node, RepeatOp) or not isinstance(node.input, ShuffleOp):
        return node
    shuffle = node.input
    access = shuffle.input.random_access()
    if access is None or not access.cheap:
        return node
    if shuffle.buffer_size != UNKNOWN_CARDINALITY and shuffle.buffer_size < len(access):
        return node
    return named_like(node, ShuffledPassesOp(shuffle.input, shuffle, node), names)


def _vectorised(node: DatasetOp, names: Names) -> DatasetOp:
    """Run map functions over whole blocks with `torch.func.vmap`, unless they draw random numbers or run in order."""
    if not isinstance(node, MapOp) or wants_rng(node.fn) or node.parallelism == 1:
        return node
    return named_like(node, replace(node, is_vectorised=True), names)


def _batch_in_stage(node: DatasetOp, names: Names) -> DatasetOp:
    """Let a map before a batch work on whole batches, so that a batch is a view of the map's result, without a copy."""
    if not isinstance(node, BatchOp) or not isinstance(node.input, MapOp):
        return node
    mapped = named_like(node.input, replace(node.input, rows_together=node.batch_size), names)
    return named_like(node, replace(node, input=mapped), names)


def _prefetched(op: DatasetOp, names: Names) -> DatasetOp:
    """Prefetch a pipeline that does work on elements while that is faster, unless it already ends in a `prefetch`."""
    if isinstance(op, PrefetchOp) or not _works_on_elements(op):
        return op
    prefetch = PrefetchOp(op, injected=True)
    names[id(prefetch)] = f"{names[id(op)]}-prefetch"
    return prefetch


def _works_on_elements(op: DatasetOp) -> bool:
    return isinstance(op, ElementwiseOp) or any(map(_works_on_elements, op.inputs))


REWRITES: tuple[Rewrite, ...] = (
    Rewrite("noop_elimination", _each(_without_noop)),
    Rewrite("map_parallelization", _each(_in_order), MapOp, when=False),
    Rewrite("common_subgraph_elimination", _computed_once, ZipOp),
    Rewrite("shard_pushdown", _each(_shard_early), ShardOp),
    Rewrite("late_gather", _gather_late),
    Rewrite("shuffle_and_repeat_fusion", _each(_shuffle_whole_passes), RepeatOp),
    Rewrite("map_vectorization", _each(_vectorised), MapOp),
    Rewrite("map_and_batch_fusion", _each(_batch_in_stage), BatchOp),
    Rewrite("inject_prefetch", _prefetched, nested=False),
)
