from __future__ import annotations

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from tests.pipelines.optimize.rewriting import assert_same, optimised_names, rewrites_of
from tests.pipelines.random_functions import jitter


def test_maps_are_vectorised_where_it_is_asked_for() -> None:
    numbers = Dataset.range(40)
    dataset = numbers.map(lambda x: x * 2 + 1).map(jitter).map(abs, num_parallel_calls=1)
    assert rewrites_of(dataset) == ()
    assert rewrites_of(dataset, map_vectorization=True) == ("map_vectorization",)
    options = Options(optimization=OptimizationOptions(map_vectorization=True))
    assert "<lambda>, vectorised)" in dataset.with_options(options).explain()
    assert optimised_names(dataset, map_vectorization=True) == ["range", "map", "map", "map"]
    assert_same(dataset, "map_vectorization")
