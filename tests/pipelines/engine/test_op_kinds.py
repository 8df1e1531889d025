from __future__ import annotations

from dataclasses import dataclass

from raydist.options import Options
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.build import build, name_operations, plan_as_written
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.kernel import Kernel
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import ElementwiseOp, UnaryOp
from raydist.pipelines.ops.map import MapOp
from raydist.pipelines.ops.take import TakeOp
from raydist.pipelines.sources.range import RangeOp

SOURCE = RangeOp(0, 3)


@dataclass(frozen=True, eq=False)
class _Passing(UnaryOp):
    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return ctx.build(self.input)


def test_a_source_reads_nothing_and_an_operation_its_input() -> None:
    assert SOURCE.inputs == ()
    assert TakeOp(SOURCE, 2).inputs == (SOURCE,)


def test_an_operation_that_says_nothing_else_has_what_its_input_has() -> None:
    passing = _Passing(SOURCE)
    assert (passing.cardinality(), passing.element_spec()) == (3, SOURCE.element_spec())
    assert isinstance(passing.element_spec(), TensorSpec)


def test_an_elementwise_operation_runs_wherever_its_context_puts_it() -> None:
    op = MapOp(SOURCE, abs)
    built: list[object] = []

    def note(op: object, ctx: IterContext) -> OpIterator:
        built.append(op)
        return build(SOURCE, ctx)

    ctx = IterContext(0, (0,), Options(), InlineExecutor(), name_operations(op), note, plan_as_written)
    op.make_iterator(ctx).close()
    assert built == [op]
    assert (ElementwiseOp.placement, op.placement, SOURCE.placement) == ("pool", "pool", "inline")
    assert isinstance(op.kernel(ctx), Kernel)
