from __future__ import annotations

import numpy as np
import pytest

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.engine.build import walk
from raydist.pipelines.engine.executor import Executor
from raydist.pipelines.engine.op_kinds import ElementwiseOp
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.run.plan import make_plan
from raydist.values import AUTOTUNE, UNKNOWN_CARDINALITY
from tests.contracts.op import check_op, collect, iterate
from tests.pipelines.optimize.rewriting import assert_same, optimised_names, plan_of, rewrites_of
from tests.pipelines.random_functions import jitter


def test_what_changes_nothing_is_left_out() -> None:
    dataset = Dataset.range(5).take(-1).skip(0).repeat(1).shuffle(1).prefetch(0).with_options(Options()).batch(2)
    assert optimised_names(dataset) == ["range", "batch"]
    assert rewrites_of(dataset) == ("noop_elimination",)
    assert len(optimised_names(dataset, noop_elimination=False)) == 8


def parallelism(dataset: Dataset, on: bool) -> object:
    return plan_of(dataset, {"map_parallelization": on}).optimised.parallelism  # type: ignore[attr-defined]  # a map


def test_maps_without_a_number_run_in_order_when_it_is_off() -> None:
    numbers = Dataset.range(5)
    assert parallelism(numbers.map(abs), on=False) == 1
    assert parallelism(numbers.map(abs), on=True) is None
    assert parallelism(numbers.map(abs, num_parallel_calls=AUTOTUNE), on=False) is None
    assert parallelism(numbers.map(abs, num_parallel_calls=3), on=False) == 3
    assert_same(numbers.map(lambda x: 6 / (x - 2)), "map_parallelization")


def noisy(x: np.int64, *, rng: np.random.Generator) -> float:
    return float(x) + float(rng.random())


def bad(x: np.int64) -> int:
    return 12 // int(x % 4 - 2)


def test_the_function_is_called_for_one_shard() -> None:
    calls: list[int] = []

    def note(x: np.int64) -> np.int64:
        calls.append(int(x))
        return x

    dataset = Dataset.range(9).map(lambda x: x).map(note).shard(3, 1)
    assert optimised_names(dataset) == ["range", "shard", "map", "map"]
    assert [int(x) for x in dataset] == calls == [1, 4, 7]


def test_errors_stay_in_their_shards() -> None:
    dataset = Dataset.range(12).map(bad).shard(2, 0)
    items = assert_same(dataset, "shard_pushdown")
    assert [type(item).__name__ for item in items] == ["int64", "tuple"] * 3


def test_what_depends_on_numbers_of_elements_stays() -> None:
    in_order = Dataset.range(9).map(abs, num_parallel_calls=1)
    for dataset in (Dataset.range(9).map(noisy), in_order, Dataset.range(9).filter(lambda x: x > 3)):
        assert optimised_names(dataset.shard(2, 1))[-1] == "shard"
        assert_same(dataset.shard(2, 1), "shard_pushdown")


def test_shards_of_shards() -> None:
    dataset = Dataset.range(20).map(lambda x: x + 1).shard(2, 1).map(lambda x: x * 2).shard(3, 0)
    assert optimised_names(dataset) == ["range", "shard", "shard", "map", "map"]
    assert [int(x) for x in collect(iterate(dataset))] == [4, 16, 28, 40]


ROWS = Dataset.from_tensor_slices(np.arange(24).reshape(12, 2))


def test_operations_that_only_pick_move_indices() -> None:
    dataset = ROWS.shuffle(3).take(5).map(lambda x: x)
    assert optimised_names(dataset) == ["range", "shuffle", "take", "gather", "map"]
    assert optimised_names(dataset, late_gather=False) == ["from_tensor_slices", "shuffle", "take", "map"]
    assert optimised_names(ROWS.prefetch(2).shuffle(3)) == ["from_tensor_slices", "prefetch", "shuffle"]
    assert_same(dataset, "late_gather")


def test_rewritten_operations_keep_their_names() -> None:
    plan = make_plan(ROWS.skip(0).shuffle(3)._op, Options())
    assert [plan.names[id(node)] for node in walk(plan.optimised)][1] == "shuffle-2"


@pytest.mark.parametrize("size", [7, 8, 100, UNKNOWN_CARDINALITY])
@pytest.mark.parametrize("arguments", [(None, True), (3, True), (3, False)])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_order_is_that_of_the_shuffle(size: int, arguments: tuple[int | None, bool], count: int) -> None:
    dataset = Dataset.range(7).shuffle(size, *arguments).repeat(count).take(20)
    assert len(assert_same(dataset, "shuffle_and_repeat_fusion")) == min(20, 7 * count)


def test_only_where_the_buffer_holds_all() -> None:
    rows = Dataset.from_tensor_slices(np.arange(14).reshape(7, 2))
    assert optimised_names(rows.shuffle(7).repeat()) == ["range", "shuffle_and_repeat", "gather"]
    assert optimised_names(rows.shuffle(6).repeat()) == ["range", "shuffle", "repeat", "gather"]
    assert "shuffle" in optimised_names(Dataset.range(9).filter(lambda x: x > 3).shuffle(9).repeat())


def test_nothing_ends() -> None:
    assert list(Dataset.range(0).shuffle(4).repeat()) == []


def test_epochs_differ() -> None:
    dataset = Dataset.range(30).shuffle(30).repeat(2)
    passes = [[int(x) for x in dataset] for _ in range(2)]
    orders = {tuple(order[at : at + 30]) for order in passes for at in (0, 30)}
    assert len(orders) > 2


def test_contract() -> None:
    check_op(lambda: Dataset.range(6).shuffle(10).repeat(3))
    check_op(lambda: Dataset.range(6).shuffle(6, seed=1).repeat().map(lambda x: x + 1))


def test_maps_are_vectorised_where_it_is_asked_for() -> None:
    numbers = Dataset.range(40)
    dataset = numbers.map(lambda x: x * 2 + 1).map(jitter).map(abs, num_parallel_calls=1)
    assert rewrites_of(dataset) == ()
    assert rewrites_of(dataset, map_vectorization=True) == ("map_vectorization",)
    options = Options(optimization=OptimizationOptions(map_vectorization=True))
    assert "<lambda>, vectorised)" in dataset.with_options(options).explain()
    assert optimised_names(dataset, map_vectorization=True) == ["range", "map", "map", "map"]
    assert_same(dataset, "map_vectorization")


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


def test_a_pipeline_with_functions_is_read_ahead() -> None:
    dataset = Dataset.range(9).map(lambda x: 6 / (x - 2)).batch(2)
    assert optimised_names(dataset, inject_prefetch=True) == ["range", "map", "batch", "prefetch"]
    assert_same(dataset, "inject_prefetch")


def test_only_if_it_is_asked_for_and_has_none() -> None:
    mapped = Dataset.range(9).map(abs)
    assert rewrites_of(mapped) == ()
    assert rewrites_of(mapped.prefetch(3), inject_prefetch=True) == ()
    assert rewrites_of(Dataset.range(9).batch(2), inject_prefetch=True) == ()


def test_datasets_inside_functions_are_not() -> None:
    dataset = Dataset.range(3).flat_map(lambda n: Dataset.range(n).map(lambda x: x + 1))
    assert [int(x) for x in assert_same(dataset, "inject_prefetch")] == [1, 1, 2]
