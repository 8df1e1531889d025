from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.build import walk
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.run.plan import make_nested_plan, make_plan, open_iterator


def test_a_dataset_inside_a_function_is_not_read_ahead() -> None:
    graph = Dataset.range(3).take(-1).map(abs)._op
    assert [op.name for op in walk(make_plan(graph, Options()).optimised)] == ["range", "map", "prefetch"]
    assert [op.name for op in walk(make_nested_plan(graph, Options()).optimised)] == ["range", "map"]


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
