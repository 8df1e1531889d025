from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.build import name_operations
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.run.plan import make_plan, open_iterator


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


def test_open_iterator_gives_blocks_of_at_most_the_wanted_size() -> None:
    dataset = Dataset.range(9).map(lambda x: x * 2)
    iterator = open_iterator(dataset._op, seed=1, epoch=0, options=Options(), executor=InlineExecutor())
    assert iterator.next_block(4).rows() == [0, 2, 4, 6]
    assert iterator.next_block(100).rows() == [8, 10, 12, 14, 16]
    iterator.close()


def test_the_cpu_budget_limits_threads() -> None:
    options = Options()
    options.autotune.cpu_budget = 1
    dataset = Dataset.range(9).map(lambda x: x, num_parallel_calls=8).with_options(options)
    assert [int(x) for x in dataset] == list(range(9))
