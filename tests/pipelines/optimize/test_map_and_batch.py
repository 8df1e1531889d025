from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op import ElementwiseOp
from raydist.pipelines.engine.threads import ThreadExecutor
from tests.contracts.op import collect, iterate
from tests.pipelines.optimize.rewriting import assert_same, plan_of, rewrites_of


def test_blocks_of_threads_are_whole_batches() -> None:
    seen: list[int] = []

    def note(x: np.int64) -> np.int64:
        seen.append(int(x))
        return x

    dataset = Dataset.range(100).map(note).batch(10)
    op = plan_of(dataset, {}).optimised.inputs[0]
    assert isinstance(op, ElementwiseOp)
    assert op.rows_together == 10
    iterator = iterate(dataset, three_threads)
    next(iterator)
    assert sorted(seen) == list(range(len(seen)))
    assert len(seen) % 10 == 0
    iterator.close()


def three_threads(options: Options) -> Executor:
    return ThreadExecutor(3)


def test_only_a_map_directly_before_a_batch() -> None:
    numbers = Dataset.range(9)
    assert rewrites_of(numbers.map(abs).batch(2)) == ("map_and_batch_fusion",)
    assert rewrites_of(numbers.map(abs).skip(1).batch(2)) == ()
    assert rewrites_of(numbers.batch(2).map(abs)) == ()


def test_elements_errors_and_shapes_stay() -> None:
    def ragged(x: np.int64) -> np.ndarray:
        if x == 13:
            raise ValueError("bad")
        return np.arange(x // 6)

    items = assert_same(Dataset.range(30).map(ragged).batch(3), "map_and_batch_fusion")
    assert [type(item) for item in items].count(tuple) == 1
    on_threads = collect(iterate(Dataset.range(30).map(ragged).batch(3), three_threads))
    assert len(on_threads) == len(items) == 10
