"""A shard of a map becomes a map of a shard: the function is called for the elements of one shard only.

Element k of a map's output, or the error in its place, is made of element k of its input, so that the shard keeps the
same ones. A function with `rng` draws by the number of its element, one that is called in order may count its calls:
these stay where they are.

`skip` is not moved: it counts elements and lets errors pass, and which elements are errors only the map tells. `take`
needs no move: it asks for no more elements than it hands out.
"""

from __future__ import annotations

from dataclasses import replace

from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.ops.shard import ShardOp
from raydist.pipelines.optimize.graph import Names, named_like, rewrite_each

__all__ = ["shard_early"]


def shard_early(op: DatasetOp, names: Names) -> DatasetOp:
    """The graph with shards in front of the maps that they stood behind."""

    def change(node: DatasetOp) -> DatasetOp:
        if not isinstance(node, ShardOp) or not isinstance(node.input, MapOp) or not node.input.is_pure:
            return node
        mapped = node.input
        shard = named_like(node, replace(node, input=mapped.input), names)
        return named_like(mapped, replace(mapped, input=change(shard)), names)

    return rewrite_each(op, names, change)
