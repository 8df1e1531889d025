from __future__ import annotations

from raydist.dataset import Dataset
from tests.pipelines.optimize.rewriting import assert_same, optimised_names, rewrites_of


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
