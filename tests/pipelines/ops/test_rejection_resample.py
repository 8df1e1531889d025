from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from raydist.core.errors import InvalidArgumentError
from raydist.dataset import Dataset
from raydist.options import Options
from raydist.pipelines.ops.rejection_resample import ClassBalance
from tests.contracts.op import collect, iterate
from tests.pipelines.refusals import check_refused


def rare(x: Any) -> int:
    return int(x % 10 == 0)


def counts(dataset: Dataset) -> list[int]:
    found = [int(kind) for kind, _ in dataset]
    return [found.count(kind) for kind in (0, 1)]


def test_a_known_or_estimated_distribution_becomes_the_target() -> None:
    for initial, most in (([0.9, 0.1], 360), (None, 400)):
        common, rarely = counts(Dataset.range(3000).rejection_resample(rare, [0.5, 0.5], initial, seed=1))
        assert rarely == 300  # all of them: no choice could keep more
        assert 240 < common < most


def test_every_element_once_at_most_in_order_with_its_class() -> None:
    source = Dataset.range(500).map(lambda x: {"x": x})
    pairs = list(
        source.rejection_resample(lambda row: np.int32(rare(row["x"])), [0.7, 0.3], seed=2).as_numpy_iterator()
    )
    numbers = [int(row["x"]) for _, row in pairs]
    assert numbers == sorted(set(numbers))
    assert all(kind == rare(x) and kind.dtype == np.int32 for (kind, _), x in zip(pairs, numbers, strict=True))


def test_epochs_differ_and_seeds_repeat() -> None:
    def epochs(seed: int | None) -> list[list[int]]:
        dataset = Dataset.range(300).rejection_resample(rare, [0.5, 0.5], [0.9, 0.1], seed=seed)
        return [[int(x) for _, x in dataset.with_options(Options(seed=5)).repeat(2)] for _ in range(2)]

    first, second = epochs(3)
    assert first == second == epochs(3)[0]
    assert first != epochs(4)[0]
    middle = first.index(min(first[1:]))
    assert first[:middle] != first[middle:]


def test_the_size_of_blocks_changes_nothing() -> None:
    def kept(rows: int) -> list[int]:
        source = Dataset.range(200).batch(rows).unbatch().with_options(Options(seed=1))
        return [int(x) for _, x in source.rejection_resample(rare, [0.5, 0.5])]

    assert kept(1) == kept(7) == kept(200)


def test_errors_take_the_place_of_elements() -> None:
    answers: list[Any] = [0, 2, -1, 1.5, 0, "a", [0]]
    items = collect(iterate(Dataset.range(8).rejection_resample(lambda x: answers[x], [0.5, 0.5], [1.0, 1.0])))
    names = [item[0] if isinstance(item[0], str) else int(item[0]) for item in items]
    assert names == [0, *["InvalidArgumentError"] * 2, "SpecError", 0, "SpecError", "SpecError", "IndexError"]
    assert "A class must be in 0 .. 1, got 2." in items[1][1]


def test_however_many_elements_are_of_no_class_each_is_an_error_of_its_own() -> None:
    resampled = Dataset.range(6000).rejection_resample(lambda x: int(x % 3), [0.5, 0.5], [0.5, 0.5], seed=1)
    kept = [int(x) for _, x in resampled.ignore_errors(log_warning=False)]
    assert kept == [x for x in range(6000) if x % 3 < 2]


def test_shares_that_are_kept() -> None:
    kept, seen = ClassBalance.of([1, 1, 0], [0.9, 0.1, 0.0]).kept(np.array([0, 1, 2, 0]), np.zeros(3, np.int64))
    np.testing.assert_allclose(kept, [1 / 9, 1.0, 0.0, 1 / 9])
    assert seen.tolist() == [0, 0, 0]
    kept, seen = ClassBalance.of([0.5, 0.5], None).kept(np.array([0, 0, 1]), np.array([4, 0]))
    np.testing.assert_allclose(kept, [10 / 15, 10 / 16, 1.0])
    assert seen.tolist() == [6, 1], "each element is counted before it is judged"


def test_bad_distributions() -> None:
    table: list[tuple[Any, Any, str]] = [
        (0.5, None, "target_dist must be a list of weights"),
        ([], None, "target_dist must be a list of weights"),
        (["a"], None, "target_dist must be a list of weights"),
        ([[1.0]], None, "target_dist must be a list of weights"),
        ([0.5, -0.5], None, "weights >= 0, not all of them 0"),
        ([0.0, 0.0], None, "weights >= 0, not all of them 0"),
        ([1.0, float("nan")], None, "weights >= 0, not all of them 0"),
        ([0.5, 0.5], [1.0], "got 2 and 1 entries"),
        ([0.5, 0.5], [1.0, 0.0], "got 0 for class 1, which is wanted"),
    ]
    check_refused(
        InvalidArgumentError,
        [(partial(ClassBalance.of, target, initial), message) for target, initial, message in table],
    )
