from __future__ import annotations

from raydist.options import Options
from raydist.pipelines.engine.build import build, name_operations, plan_as_written
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.ops.take import TakeOp
from raydist.pipelines.sources.range import RangeOp

OP = TakeOp(RangeOp(0, 3), 2)


def test_an_operation_is_named_after_itself() -> None:
    assert (OP.name, OP.label, OP.inputs[0].name) == ("take", "take(2)", "range")
    other = TakeOp(OP.input, 2)
    assert other != OP, "an operation is itself, not its value"


def test_keys_name_the_operation_or_the_seed_alone() -> None:
    ctx = IterContext(5, (0,), Options(), InlineExecutor(), name_operations(OP), build, plan_as_written)
    assert ctx.key(OP).operation == "take-1"
    assert ctx.key(OP).seed == 5
    assert (ctx.key(OP, 7).seed, ctx.key(OP, 7).operation) == (7, "take")
    assert ctx.inner_epoch(3).key(OP).epoch == (0, 3)
    assert ctx.inner_epoch(3).key(OP, every_epoch=False).epoch == ()
