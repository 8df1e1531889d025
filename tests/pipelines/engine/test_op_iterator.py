from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op_iterator import ClosesInput, OpIterator
from raydist.pipelines.run.plan import open_iterator


class Closing(ClosesInput):
    def __init__(self, source: OpIterator) -> None:
        self._source = source


def test_closing_closes_the_input_and_may_be_repeated() -> None:
    closed: list[str] = []
    source = open_iterator(Dataset.range(3)._op, seed=0, epoch=0, options=Options(), executor=InlineExecutor())
    source.close = lambda: closed.append("source")  # type: ignore[method-assign]  # watched
    reader = Closing(source)
    reader.close()
    reader.close()
    assert closed == ["source", "source"]
