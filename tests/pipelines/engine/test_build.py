from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.build import name_operations, plan_as_written, start, walk
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.run.plan import make_plan


def test_names_do_not_change_with_what_follows() -> None:
    start = Dataset.range(3).shuffle(2)
    names = name_operations(start._op)
    longer = name_operations(Dataset.zip(start.map(abs), start)._op)
    assert names == {key: longer[key] for key in names}
    assert sorted(longer.values()) == ["map-2", "range-0", "shuffle-1", "zip-3"]


def test_the_fingerprint_is_that_of_the_graph() -> None:
    def fingerprint(dataset: Dataset) -> str:
        return make_plan(dataset._op, Options()).fingerprint

    assert fingerprint(Dataset.range(3).batch(2)) == fingerprint(Dataset.range(9).batch(4))
    assert fingerprint(Dataset.range(3).batch(2)) != fingerprint(Dataset.range(3).repeat().batch(2))


def test_a_graph_can_be_run_as_it_is_written() -> None:
    dataset = Dataset.range(5).take(-1).map(lambda x: x + 1)
    plan = plan_as_written(dataset._op, Options())
    assert [op.name for op in walk(plan.optimised)] == ["range", "take", "map"]
    iterator = start(plan, plan_as_written, seed=0, epoch=0, executor=InlineExecutor())
    assert iterator.next_block(9).rows() == [1, 2, 3, 4, 5]
    iterator.close()
