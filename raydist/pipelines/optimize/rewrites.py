"""Small rewrites of a graph, one function each: see `REWRITES` for their settings and order.

Operations that do the same with the same inputs become one, if their elements follow from these inputs alone: no random
choice, no function that may keep state between calls. Then a `zip` reads each of its inputs once, and hands out copies.
A `concatenate` of a dataset with itself is not changed: it would have to hold all elements.
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
    """Return the graph with equal operations merged, and with zips that read each input once."""
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


def without_noops(op: DatasetOp, names: Names) -> DatasetOp:
    """Return the graph without operations that their only input can replace.

    These change nothing: `take(-1)`, `skip(0)`, `repeat(1)`, `shuffle(1)`, `prefetch(0)` ...
    """
    return rewrite_each(op, names, lambda node: node.inputs[0] if node.is_noop else node)


def maps_in_order(op: DatasetOp, names: Names) -> DatasetOp:
    """Return the graph with `num_parallel_calls=1` where it is None; AUTOTUNE stays.

    With `map_parallelization` off, a map without given parallelism runs in order, in one thread, as in tf.data.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, MapOp) or node.num_parallel_calls is not None:
            return node
        return named_like(node, replace(node, num_parallel_calls=1), names)

    return rewrite_each(op, names, change)


def shard_early(op: DatasetOp, names: Names) -> DatasetOp:
    """Return the graph with shards moved before the maps that preceded them.

    A shard of a map becomes a map of a shard: the function is called only for the elements of one shard.

    Element k of a map's output, or the error in its place, follows from element k of its input, so the shard keeps the
    same elements. A function with `rng` draws by the index of its element, and a function that is called in order may
    count its calls: such maps stay in place.

    `skip` is not moved: it counts elements but not errors, and only the map decides which elements are errors. `take`
    need not move: it requests no more elements than it hands out.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, ShardOp) or not isinstance(node.input, MapOp) or not node.input.is_pure:
            return node
        mapped = node.input
        shard = named_like(node, replace(node, input=mapped.input), names)
        return named_like(mapped, replace(mapped, input=change(shard)), names)

    return rewrite_each(op, names, change)


def gather_late(op: DatasetOp, names: Names) -> DatasetOp:
    """Return the graph with every run of operations that only pick and order applied to indices.

    Shuffles, takes and repeats over a source with random access move indices; a gather after them reads the elements.

    A shuffle of images then moves 8 bytes per image, restoring it reads no image, and the gather joins the stage of the
    next map.
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
    """Return the graph with `shuffle` and `repeat` fused where the buffer holds the whole source.

    A repeated shuffle of a whole source draws one permutation per pass, instead of filling and draining a buffer.

    The order is the order of the shuffle: a buffer with room for everything is handed out in the same permutation.
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
    """Return the graph with maps that try vmap first, except functions that draw random numbers or run in order.

    Map functions run over whole blocks with `torch.func.vmap`.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, MapOp) or wants_rng(node.fn) or node.parallelism == 1:
            return node
        return named_like(node, replace(node, is_vectorised=True), names)

    return rewrite_each(op, names, change)


def batch_in_stage(op: DatasetOp, names: Names) -> DatasetOp:
    """Return the graph with maps that know the size of the batches after them.

    A map before a batch works on whole batches, so that a batch is a view of the map's result, without a copy.
    """

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, BatchOp) or not isinstance(node.input, MapOp):
            return node
        mapped = named_like(node.input, replace(node.input, rows_together=node.batch_size), names)
        return named_like(node, replace(node, input=mapped), names)

    return rewrite_each(op, names, change)


def prefetched(op: DatasetOp, names: Names) -> DatasetOp:
    """Return the graph with a prefetch at its end.

    A pipeline that does work on elements is prefetched while that is faster, unless it already ends in a `prefetch`.
    """
    if isinstance(op, PrefetchOp) or not _works_on_elements(op):
        return op
    prefetch = PrefetchWhereItPaysOp(op)
    names[id(prefetch)] = f"{names[id(op)]}-prefetch"
    return prefetch


def _works_on_elements(op: DatasetOp) -> bool:
    return isinstance(op, ElementwiseOp) or any(map(_works_on_elements, op.inputs))
