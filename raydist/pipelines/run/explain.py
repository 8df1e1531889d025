"""The text of `dataset.explain()`."""

from __future__ import annotations

from collections.abc import Iterator

from raydist.options import Options
from raydist.pipelines.engine.build import Plan, build
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.fusion import chain_of, fuse
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.metering.stats import PipelineStats, percent
from raydist.pipelines.run.plan import make_nested_plan

__all__ = ["explain"]


def explain(plan: Plan, stats: PipelineStats | None = None) -> str:
    """Return the graph as written and as optimised, the place of each operation, and the load of its stages."""
    lines = ["as written:", *_tree(plan.written, plan, 1)]
    by = f" ({', '.join(plan.rewrites)})" if plan.rewrites else ""
    lines += [f"as optimised{by}:", *_tree(plan.optimised, plan, 1)]
    lines += ["stages:", *(f"  {line}" for line in _stages(plan.optimised, plan))]
    if stats is not None and stats.stages:
        lines += ["running:", *(f"  {line}" for line in _running(stats))]
    return "\n".join(lines)


def _tree(op: DatasetOp, plan: Plan, depth: int) -> Iterator[str]:
    """Yield the lines of a graph: consumers above their inputs, inputs indented."""
    yield f"{'  ' * depth}{plan.names[id(op)]}: {op.full_label}"
    for source in op.inputs:
        yield from _tree(source, plan, depth + 1)


def _stages(op: DatasetOp, plan: Plan) -> Iterator[str]:
    if not isinstance(op, ElementwiseOp):
        for source in op.inputs:
            yield from _stages(source, plan)
        on_ids = (
            ", on row ids of what input workers store" if op.takes_row_ids and plan.options.num_input_workers else ""
        )
        yield f"{plan.names[id(op)]}: in the consumer's process{on_ids}"
        return
    chain, base = chain_of(op)
    yield from _stages(base, plan)
    for stage in fuse(chain, IterContext(0, (0,), plan.options, InlineExecutor(), plan.names, build, make_nested_plan)):
        yield f"{'+'.join(plan.names[id(part)] for part, _ in stage)}: {_place(stage[0][0], plan.options)}"


def _running(stats: PipelineStats) -> Iterator[str]:
    for stage in stats.stages:
        where = "in its consumer's thread" if stage.where == "inline" else f"on {stage.where}"
        yield f"{stage.name}: {where}, busy {percent(stage.busy)}"
    yield from stats.findings


def _place(op: ElementwiseOp, options: Options) -> str:
    calls, workers = op.parallelism, options.num_input_workers
    if calls == 1:
        return "in the consumer's thread"
    if not workers:
        return "on the iterator's executor" if calls is None else f"on up to {calls} threads or workers"
    place = f"on {workers} input worker{'s' if workers > 1 else ''}"
    return place if calls is None else f"{place}, up to {calls} blocks at a time"
