from __future__ import annotations

from raydist.dataset import Dataset
from raydist.values import AUTOTUNE
from tests.pipelines.optimize.rewriting import assert_same, plan_of


def parallelism(dataset: Dataset, on: bool) -> object:
    return plan_of(dataset, {"map_parallelization": on}).optimised.parallelism  # type: ignore[attr-defined]  # a map


def test_maps_without_a_number_run_in_order_when_it_is_off() -> None:
    numbers = Dataset.range(5)
    assert parallelism(numbers.map(abs), on=False) == 1
    assert parallelism(numbers.map(abs), on=True) is None
    assert parallelism(numbers.map(abs, num_parallel_calls=AUTOTUNE), on=False) is None
    assert parallelism(numbers.map(abs, num_parallel_calls=3), on=False) == 3
    assert_same(numbers.map(lambda x: 6 / (x - 2)), "map_parallelization")
