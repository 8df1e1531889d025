from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.executor import InlineExecutor
from raydist.pipelines.op import ElementwiseOp, IterContext
from raydist.pipelines.plan import build, fuse, make_plan, name_operations, open_iterator, walk


def noisy(x: float, *, rng: np.random.Generator) -> float:
    return float(rng.random())


def stages(dataset: Dataset, **flags: bool) -> list[list[str]]:
    options = Options(optimization=OptimizationOptions(**flags))
    names = name_operations(dataset._op)
    chain = [op for op in walk(dataset._op) if isinstance(op, ElementwiseOp)]
    ctx = IterContext(0, (0,), options, InlineExecutor(), names, build)
    return [[names[id(op)] for op, _ in stage] for stage in fuse(chain, ctx)]


def test_names_do_not_change_with_what_follows() -> None:
    start = Dataset.range(3).shuffle(2)
    names = name_operations(start._op)
    longer = name_operations(Dataset.zip(start.map(abs), start)._op)
    assert names == {key: longer[key] for key in names}
    assert sorted(longer.values()) == ["map-2", "range-0", "shuffle-1", "zip-3"]


def test_neighbours_are_fused() -> None:
    dataset = Dataset.range(9).map(abs).filter(lambda x: True).map(abs)
    assert stages(dataset) == [["map-1", "filter-2", "map-3"]]
    assert stages(dataset, map_fusion=False) == [["map-1"], ["filter-2"], ["map-3"]]
    assert stages(dataset.map(abs), filter_fusion=False) == [["map-1"], ["filter-2"], ["map-3", "map-4"]]


def test_random_functions_behind_a_filter_start_a_stage() -> None:
    assert stages(Dataset.range(9).map(noisy).map(noisy)) == [["map-1", "map-2"]]
    assert stages(Dataset.range(9).filter(lambda x: True).map(noisy)) == [["filter-1"], ["map-2"]]


def test_another_parallelism_starts_a_stage() -> None:
    dataset = Dataset.range(9).map(abs).map(abs, num_parallel_calls=2).map(abs, num_parallel_calls=1)
    assert stages(dataset) == [["map-1"], ["map-2"], ["map-3"]]


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
