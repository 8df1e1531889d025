"""Build running iterators from a planned graph: names, stages, executors, and a meter around each iterator."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from raydist.options import Options
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.engine.arrival_order import ArrivalOrders
from raydist.pipelines.engine.budget import Budgets
from raydist.pipelines.engine.executor import Executor, InlineExecutor
from raydist.pipelines.engine.kernel import Kernel, StageSpec
from raydist.pipelines.engine.op import DatasetOp, IterContext, Planner
from raydist.pipelines.engine.op_iterator import MACHINERY_ERRORS, ClosesInput, OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.engine.stage import StageIterator, StageWorkers, UnorderedStageIterator
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.metering.iteration_meters import IterationMeters
from raydist.pipelines.metering.meter import Meter


class _SameElements(ClosesInput, OpIterator):
    """An iterator with the elements, and so the states, of its input."""

    def has_ready(self) -> bool:
        return self._source.has_ready()

    def state_dict(self) -> IteratorState:
        return self._source.state_dict()

    def load_state_dict(self, state: IteratorState) -> None:
        self._source.load_state_dict(state)


@final
class MeteredIterator(_SameElements):
    """An iterator that reports each block of `source` to a meter.

    Own time is the time of a call minus the time of the metered calls inside it in the same thread. So it is
    independent of the number of inputs, of their other readers, and of other threads that read them.
    """

    def __init__(self, source: OpIterator, meter: Meter, meters: IterationMeters) -> None:
        self._source = source
        self._meter = meter
        self._clock = meters.clock

    def next_block(self, limit: int) -> Block:
        meter, clock = self._meter, self._clock
        outer_s = clock.inner_s
        clock.inner_s = 0.0
        before = meter.elements
        begin = time.perf_counter()
        try:
            block = self._source.next_block(limit)
            meter.handed_out(block)
            return block
        except (StopIteration, *MACHINERY_ERRORS):
            raise
        except Exception:
            meter.errors += 1
            raise
        finally:
            spent_s = time.perf_counter() - begin
            meter.own_s += spent_s - clock.inner_s
            meter.input_s += clock.inner_s
            clock.inner_s = outer_s + spent_s
            meter.log_here(begin, spent_s, meter.elements - before)


@final
class ValuesIterator(_SameElements):
    """An iterator that replaces row ids by their values: the border to operations that look at elements."""

    def __init__(self, source: OpIterator) -> None:
        self._source = source

    def next_block(self, limit: int) -> Block:
        return self._source.next_block(limit).in_memory()


def walk(op: DatasetOp) -> Iterator[DatasetOp]:
    """Yield every operation of a graph once, inputs before their consumers."""
    seen: set[int] = set()

    def visit(node: DatasetOp) -> Iterator[DatasetOp]:
        if id(node) in seen:
            return
        seen.add(id(node))
        for source in node.inputs:
            yield from visit(source)
        yield node

    return visit(op)


def name_operations(op: DatasetOp) -> dict[int, str]:
    """Return a stable name for every operation of the graph as written, by `id`.

    Sources get the first numbers, so later operations and optimisations do not change the name of an operation, on
    which its random choices depend.
    """
    return {id(node): f"{node.name}-{number}" for number, node in enumerate(walk(op))}


@final
@dataclass(frozen=True, slots=True)
class Plan:
    """A graph that is ready to run.

    Attributes:
        written: The graph as the user wrote it.
        optimised: The graph that runs.
        names: Name of each operation of both graphs, by `id`.
        options: Options of the whole pipeline.
        rewrites: The settings of `OptimizationOptions` that changed the graph.
    """

    written: DatasetOp
    optimised: DatasetOp
    names: dict[int, str]
    options: Options
    rewrites: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A hash of the stages of the plan. A state fits only the pipeline that saved it."""
        flags = self.options.optimization
        fused = f"map_fusion={flags.map_fusion},filter_fusion={flags.filter_fusion}"
        labels = ",".join([fused, *(_fingerprint(node, self.names) for node in walk(self.optimised))])
        return hashlib.blake2b(labels.encode(), digest_size=8).hexdigest()

    @property
    def order_settings(self) -> dict[str, str]:
        """By name, the operations whose settings decide the order of elements."""
        return {self.names[id(node)]: settings for node in walk(self.written) if (settings := node.order_settings)}

    @property
    def own_seeds(self) -> dict[str, int]:
        """By name, the seeds of operations that keep one random order for all iterations."""
        seeds = ((self.names[id(node)], node.own_seed) for node in walk(self.written))
        return {name: seed for name, seed in seeds if seed is not None}


def _fingerprint(op: DatasetOp, names: dict[int, str]) -> str:
    ordered = ":in order" if isinstance(op, ElementwiseOp) and op.parallelism == 1 else ""
    return f"{op.name}:{names[id(op)]}{ordered}"


Stage = list[tuple[ElementwiseOp, Kernel]]
"""Operations that run together: their kernels work on a block one after the other, without a queue in between."""


def chain_of(op: DatasetOp) -> tuple[list[ElementwiseOp], DatasetOp]:
    """Return the chain of elementwise operations that ends in `op`, source side first, and its input."""
    chain: list[ElementwiseOp] = []
    while isinstance(op, ElementwiseOp):
        chain.append(op)
        (op,) = op.inputs
    return chain[::-1], op


def fuse(chain: Sequence[ElementwiseOp], ctx: IterContext) -> list[Stage]:
    """Cut a chain into stages.

    The cuts depend on the operations and options alone, never on the executor: a state saved with one executor loads
    with another.
    """
    stages: list[Stage] = []
    for op in chain:
        kernel = op.kernel(ctx)
        if not stages or not _joins(stages[-1], op, kernel, ctx.options):
            stages.append([])
        stages[-1].append((op, kernel))
    return stages


def _joins(stage: Stage, op: ElementwiseOp, kernel: Kernel, options: Options) -> bool:
    if stage[-1][0].parallelism != op.parallelism or stage[-1][1].multiplies:
        return False
    if not all(_may_fuse(part, options) for part in (stage[-1][1], kernel)):
        return False
    # The index of an element after a filter is known only once the filter has run.
    return not kernel.uses_index or all(part.preserves_count for _, part in stage)


def _may_fuse(kernel: Kernel, options: Options) -> bool:
    flags = options.optimization
    return flags.map_fusion if kernel.preserves_count else flags.filter_fusion


def plan_as_written(op: DatasetOp, options: Options) -> Plan:
    """Return a plan without rewrites: enough to read a few elements."""
    return Plan(op, op, name_operations(op), options)


def start(
    plan: Plan,
    planner: Planner,
    *,
    seed: int,
    epoch: int,
    executor: Executor,
    meters: IterationMeters | None = None,
    orders: ArrivalOrders | None = None,
    own_seeds: Mapping[str, int] | None = None,
    row_ids: bool = False,
) -> OpIterator:
    """Start one pass over a plan.

    Args:
        plan: Plan to run.
        planner: Plans the datasets that functions return.
        seed: Root of every random choice that has no own seed.
        epoch: Number of the epoch of the dataset, from 0.
        executor: Runs stages whose parallelism is left to raydist. The caller closes it.
        meters: Count elements and time of every stage.
        orders: Notes of stages that hand out blocks in any order, part of the state; None: all stages keep the order.
        own_seeds: Seeds of operations that keep one order, from a state; None: the seeds of the plan.
        row_ids: True if the caller takes blocks of row ids; False for values.
    """
    meters = meters or IterationMeters()
    meters.tops.clear()  # of an earlier epoch, whose operations may not exist any more
    budgets = Budgets(plan.options.autotune)
    any_order, orders = orders is not None, orders or ArrivalOrders()
    ctx = IterContext(
        seed, (epoch,), plan.options, executor, plan.names, build, planner, plan, meters, budgets, orders, any_order
    )
    readers = executor if executor.stores_results else None
    ctx = replace(ctx, own_seeds=plan.own_seeds if own_seeds is None else own_seeds, row_ids=row_ids, readers=readers)
    return ctx.build(plan.optimised)


def build(op: DatasetOp, ctx: IterContext) -> OpIterator:
    """Return an iterator over `op`: its own one, or stages for a chain of elementwise operations."""
    if not isinstance(op, ElementwiseOp):
        any_order = ctx.any_order and op.state_is_recent
        readers = ctx.readers if ctx.row_ids else None  # this process needs the values: it had better read the files
        iterator = op.make_iterator(replace(ctx, any_order=any_order, row_ids=op.takes_row_ids, readers=readers))
        if op.takes_row_ids and not ctx.row_ids:
            iterator = _with_values(iterator, ctx)
        return _metered(iterator, ctx.meter(op), op, ctx)
    chain, base = chain_of(op)
    readers = ctx.executor if ctx.executor.stores_results and chain[0].parallelism != 1 else None
    iterator = replace(ctx, row_ids=True, readers=readers).build(base)
    for stage in fuse(chain, ctx):
        iterator = _stage_iterator(stage, iterator, base, ctx)
        base = stage[-1][0]
    return iterator if ctx.row_ids else _with_values(iterator, ctx)


def _with_values(iterator: OpIterator, ctx: IterContext) -> OpIterator:
    """Return an iterator over the values, for a reader that cannot take row ids."""
    may_be_ids = ctx.executor.stores_results or ctx.readers is not None
    return ValuesIterator(iterator) if may_be_ids else iterator


def _metered(iterator: OpIterator, meter: Meter, op: DatasetOp, ctx: IterContext) -> OpIterator:
    if not ctx.meters.enabled:
        return iterator
    ctx.meters.tops[id(op)] = meter.name
    return MeteredIterator(iterator, meter, ctx.meters)


def _stage_iterator(stage: Stage, source: OpIterator, base: DatasetOp, ctx: IterContext) -> OpIterator:
    names = "+".join(ctx.operation_names[id(op)] for op, _ in stage)
    spec = StageSpec(f"{names}@{'.'.join(map(str, ctx.epoch))}", tuple(kernel for _, kernel in stage))
    parallelism = stage[0][0].parallelism
    label = " + ".join(op.full_label for op, _ in stage)
    owner = tuple(type(op).__name__ for op, _ in stage)
    meter = ctx.meters.meter(names, label=label, inputs=[id(base)], owner=owner)
    # A worker would copy the values where row ids need only be rearranged.
    moves_ids = ctx.executor.stores_results and all(kernel.takes_row_ids for kernel in spec.kernels)
    executor = InlineExecutor() if moves_ids else _executor(parallelism, meter, ctx)
    if not executor.stores_results and not moves_ids:
        source = _with_values(source, ctx)
    meter.place, meter.parallelism = executor.place, executor.num_workers
    owned = parallelism is not None and executor is not ctx.executor
    together = stage[-1][0].rows_together
    workers = StageWorkers(executor, most=parallelism, owned=owned, together=together)
    iterator: OpIterator
    if ctx.any_order and any(_is_unordered(op, ctx.options) for op, _ in stage):
        iterator = UnorderedStageIterator(source, spec, workers, meter, ctx.orders.of(spec.name))
    else:
        iterator = StageIterator(source, spec, workers, meter)
    return _metered(iterator, meter, stage[-1][0], ctx)


def _is_unordered(op: ElementwiseOp, options: Options) -> bool:
    return not (options.deterministic if op.deterministic is None else op.deterministic)


def _executor(parallelism: int | None, meter: Meter, ctx: IterContext) -> Executor:
    if parallelism == 1:
        return InlineExecutor()
    if parallelism is None:
        return ctx.executor.for_stage(meter, ctx.meters, ctx.budgets)
    if ctx.executor.window > 1:
        return ctx.executor
    return ThreadExecutor(parallelism, budget=ctx.budgets.threads)
