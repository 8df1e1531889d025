"""Small rewrites of a graph, one function each: see `REWRITES` for their settings and order.

Operations that do the same with the same inputs become one, as long as their elements follow from these alone: no
random choice, no function that may remember something from call to call. Then a `zip` reads each of its inputs once,
and hands out copies. A `concatenate` of a dataset with itself is left alone: it would have to hold all of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from raydist.pipelines.elements.functions import wants_rng
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.gather import GatherOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.ops.prefetch import PrefetchOp, PrefetchWhereItPaysOp
from raydist.pipelines.ops.repeat import RepeatOp
from raydist.pipelines.ops.shard import ShardOp
from raydist.pipelines.ops.shuffle import ShuffledPassesOp, ShuffleOp
from raydist.pipelines.ops.zip import ZipOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each, settings_of, with_inputs
from raydist.pipelines.sources.range import RangeOp
from raydist.values import UNKNOWN_CARDINALITY

__all__ = [
    "batch_in_stage",
    "computed_once",
    "gather_late",
    "maps_in_order",
    "prefetched",
    "shard_early",
    "shuffle_whole_passes",
    "vectorised",
    "without_noops",
]


def computed_once(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with equal operations as one, and zips that read nothing twice."""
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
    """Whether two iterators of one epoch give the same elements."""
    return (op.is_pure or op.content_blind) and all(map(_repeats_itself, op.inputs))


def without_noops(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph without operations for which their only input can stand.

    Operations that change nothing are left out: `take(-1)`, `skip(0)`, `repeat(1)`, `shuffle(1)`, `prefetch(0)` ...
    """
    return rewrite_each(op, names, lambda node: node.inputs[0] if node.is_noop else node)


def maps_in_order(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with `num_parallel_calls=1` where it is None; AUTOTUNE stays.

    With `map_parallelization` off, a map whose parallelism was not given runs in order, in one thread, as in tf.data.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, MapOp) or node.num_parallel_calls is not None:
            return node
        return named_like(node, replace(node, num_parallel_calls=1), names)

    return rewrite_each(op, names, change)


def shard_early(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with shards in front of the maps that they stood behind.

    A shard of a map becomes a map of a shard: the function is called for the elements of one shard only.

    Element k of a map's output, or the error in its place, is made of element k of its input, so that the shard keeps
    the same ones. A function with `rng` draws by the number of its element, one that is called in order may count its
    calls: these stay where they are.

    `skip` is not moved: it counts elements and lets errors pass, and which elements are errors only the map tells.
    `take` needs no move: it asks for no more elements than it hands out.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, ShardOp) or not isinstance(node.input, MapOp) or not node.input.is_pure:
            return node
        mapped = node.input
        shard = named_like(node, replace(node, input=mapped.input), names)
        return named_like(mapped, replace(mapped, input=change(shard)), names)

    return rewrite_each(op, names, change)


def gather_late(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with every run of operations that only pick and order working on indices.

    Shuffles, takes and repeats over a source with random access move indices; the elements are read behind them.

    A shuffle of images then moves 8 bytes an image, restoring it reads no image, and the reading joins the stage of the
    next map.
    """
    if not op.content_blind:
        return with_inputs(op, names, lambda source: gather_late(source, names))
    source = op
    while source.content_blind:
        (source,) = source.inputs
    access = source.random_access()
    if access is None or access.cheap:
        return with_inputs(op, names, lambda inner: gather_late(inner, names))
    indices = named_like(source, RangeOp(0, len(access)), names)
    return named_like(source, GatherOp(_swap_source(op, source, indices, names), source), names)


def _swap_source(op: DatasetOp, old: DatasetOp, new: DatasetOp, names: Names) -> DatasetOp:
    if op is old:
        return new
    return with_inputs(op, names, lambda source: _swap_source(source, old, new, names))


def shuffle_whole_passes(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with `shuffle` and `repeat` as one where the buffer holds the whole source.

    A repeated shuffle of all of a source draws one permutation a pass, instead of filling a buffer and emptying it.

    The order is that of the shuffle: with room for everything, it hands out its buffer in the order of one permutation.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, RepeatOp) or not isinstance(node.input, ShuffleOp):
            return node
        shuffle = node.input
        access = shuffle.input.random_access()
        if access is None or not access.cheap:
            return node
        if shuffle.buffer_size != UNKNOWN_CARDINALITY and shuffle.buffer_size < len(access):
            return node
        return named_like(node, ShuffledPassesOp(shuffle.input, shuffle, node), names)

    return rewrite_each(op, names, change)


def vectorised(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with maps that try vmap first; functions that draw random numbers or are called in order stay.

    Map functions run over whole blocks by `torch.func.vmap`.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, MapOp) or wants_rng(node.fn) or node.parallelism == 1:
            return node
        return named_like(node, replace(node, is_vectorised=True), names)

    return rewrite_each(op, names, change)


def batch_in_stage(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with maps that know the size of the batches behind them.

    A map in front of a batch works on whole batches, so that a batch is a view of what the map made, and no copy.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, BatchOp) or not isinstance(node.input, MapOp):
            return node
        mapped = named_like(node.input, replace(node.input, rows_together=node.batch_size), names)
        return named_like(node, replace(node, input=mapped), names)

    return rewrite_each(op, names, change)


def prefetched(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with a prefetch at its end.

    A pipeline that does work on elements is read ahead while that pays, unless it ends in a `prefetch` already.
    """
    if isinstance(op, PrefetchOp) or not _works_on_elements(op):
        return op
    prefetch = PrefetchWhereItPaysOp(op)
    names[id(prefetch)] = f"{names[id(op)]}-prefetch"
    return prefetch


def _works_on_elements(op: DatasetOp) -> bool:
    return isinstance(op, ElementwiseOp) or any(map(_works_on_elements, op.inputs))
