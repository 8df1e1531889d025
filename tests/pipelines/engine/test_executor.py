from __future__ import annotations

from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.engine.executor import InlineExecutor
from tests.pipelines.engine.toy_stages import SOURCE, block_of, divide, spec_of


def test_inline_work_is_done_at_once() -> None:
    executor = InlineExecutor()
    pending = executor.submit(spec_of(SOURCE.map(divide)), block_of(SOURCE).slice(3, 4), (3,))
    (block,) = pending.result().items
    assert isinstance(block, Block)
    assert block.rows() == [2]
    assert executor.window == 1
