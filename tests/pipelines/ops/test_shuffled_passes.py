from __future__ import annotations

from raydist.core.values import INFINITE_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.run.plan import open_iterator


def test_state_is_a_pass_and_a_position() -> None:
    op = Dataset.range(5).shuffle(5).repeat()._op
    iterator = open_iterator(op, seed=1, epoch=0, options=Options(), executor=InlineExecutor())
    first = iterator.next_block(5).columns[0].tolist()
    assert iterator.state_dict() == {"pass": 0, "next": 5}
    assert iterator.next_block(3).num_rows == 3
    assert iterator.state_dict() == {"pass": 1, "next": 3}
    iterator.load_state_dict({"pass": 0, "next": 2})
    assert iterator.next_block(9).columns[0].tolist() == first[2:]
    assert op.cardinality() == INFINITE_CARDINALITY
