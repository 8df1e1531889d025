"""Rewrites of a graph that change no element, no order and no error's place. Each has a setting.

A rewrite is a pure function of the graph. New operations get the names of the operations that they replace, so random
choices stay the same. `REWRITES` lists all rewrites in the order of application.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from raydist.options import Options
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.batch import BatchOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.ops.repeat import RepeatOp
from raydist.pipelines.ops.shard import ShardOp
from raydist.pipelines.ops.zip import ZipOp
from raydist.pipelines.optimize.graph import Names
from raydist.pipelines.optimize.rewrites import (
    batch_in_stage,
    computed_once,
    gather_late,
    maps_in_order,
    prefetched,
    shard_early,
    shuffle_whole_passes,
    vectorised,
    without_noops,
)

__all__ = ["REWRITES", "Rewrite", "optimize"]


@final
@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite of a graph.

    Attributes:
        flag: The setting of `OptimizationOptions` for this rewrite.
        apply: Returns the rewritten graph; the same object if there is nothing to change.
        changes: Type of operation that it looks for: graphs without such an operation are skipped.
        when: Value of the setting that enables the rewrite.
        nested: True if it also applies to datasets that functions return.
    """

    flag: str
    apply: Callable[[DatasetOp, Names], DatasetOp]
    changes: type = object
    when: bool = True
    nested: bool = True


REWRITES: tuple[Rewrite, ...] = (
    Rewrite("noop_elimination", without_noops),
    Rewrite("map_parallelization", maps_in_order, MapOp, when=False),
    Rewrite("common_subgraph_elimination", computed_once, ZipOp),
    Rewrite("shard_pushdown", shard_early, ShardOp),
    Rewrite("late_gather", gather_late),
    Rewrite("shuffle_and_repeat_fusion", shuffle_whole_passes, RepeatOp),
    Rewrite("map_vectorization", vectorised, MapOp),
    Rewrite("map_and_batch_fusion", batch_in_stage, BatchOp),
    Rewrite("inject_prefetch", prefetched, nested=False),
)


def optimize(
    op: DatasetOp, names: Names, options: Options, *, nested: bool = False
) -> tuple[DatasetOp, tuple[str, ...]]:
    """Return the rewritten graph, and the settings whose rewrites changed it.

    Adds the names of new operations to `names`.
    """
    changed: list[str] = []
    kinds = _kinds(op)
    for rewrite in REWRITES:
        if not _is_wanted(rewrite, kinds, options, nested):
            continue
        new = rewrite.apply(op, names)
        if new is not op:
            changed.append(rewrite.flag)
        op = new
    return op, tuple(changed)


def _kinds(op: DatasetOp) -> set[type]:
    return set[type]({object, type(op)}).union(*map(_kinds, op.inputs))


def _is_wanted(rewrite: Rewrite, kinds: set[type], options: Options, nested: bool) -> bool:
    # Called for each of thousands of short nested datasets: a rewrite without effect must cost nothing.
    if rewrite.changes not in kinds or (nested and not rewrite.nested):
        return False
    return getattr(options.optimization, rewrite.flag) is rewrite.when
