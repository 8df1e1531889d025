"""Operations that pick elements or put datasets together, and options."""

from __future__ import annotations

import itertools
import json
import logging
import threading
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.values import AUTOTUNE, INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, Options
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, iterate, same
from tests.pipelines.tables import outline, recorder

FIVE = Dataset.range(5).filter(lambda x: True)


def test_counts_that_are_asserted() -> None:
    items = collect(iterate(FIVE.take(3).assert_cardinality(5)))
    assert [int(item) for item in items[:3]] == [0, 1, 2]
    assert items[3][0] == "FailedPreconditionError"
    assert "must have 5 elements" in items[3][1]
    assert "contained only 3" in items[3][1]
    assert len(items) == 4
    for size in (6, 20):
        items = collect(iterate(Dataset.range(size).assert_cardinality(5)))
        assert [int(item) for item in items[:5]] == [0, 1, 2, 3, 4]
        assert "contained at least 6" in items[5][1]
        assert len(items) == 6
    endless = FIVE.repeat().assert_cardinality(INFINITE_CARDINALITY)
    assert endless.cardinality() == INFINITE_CARDINALITY
    assert len(collect(iterate(endless), 12)) == 12
    assert "infinitely many" in collect(iterate(FIVE.assert_cardinality(INFINITE_CARDINALITY)))[5][1]
    assert FIVE.assert_cardinality(5).assert_cardinality(UNKNOWN_CARDINALITY).cardinality() == UNKNOWN_CARDINALITY


A, B = Dataset.range(3), Dataset.range(10, 13)


def test_other_elements_are_errors_in_their_places() -> None:
    mixed = A.concatenate(Dataset.from_tensor_slices(["a", "b"])).concatenate(B)
    assert outline(mixed) == [0, 1, 2, "SpecError", "SpecError", 10, 11, 12]
    assert "int64, and now * of str" in collect(iterate(mixed))[3][1]
    first, resumed = iterate(mixed), iterate(mixed)
    collect(first, 4)
    resumed.load_state_dict(first.state_dict())
    assert same(collect(resumed), collect(first)), "the kind of the first element is part of the state"
    with pytest.raises(SpecError, match="one structure and dtype"):
        _ = mixed.element_spec
    rows = Dataset.from_tensor_slices([[1, 2], [3, 4]]).concatenate(Dataset.from_tensor_slices([[1, 2, 3]]))
    assert rows.element_spec == TensorSpec((None,), "int64"), "the spec covers both"
    assert [len(x) for x in rows] == [2, 2, 3]


def test_a_part_without_elements_need_not_tell_what_they_are() -> None:
    nothing = Dataset.range(3).filter(lambda x: False).map(lambda x: x * 2)
    for dataset in (Dataset.range(3).concatenate(nothing), nothing.concatenate(Dataset.range(3))):
        assert dataset.element_spec == TensorSpec((), "int64")
        assert dataset.batch(2).element_spec == TensorSpec((None,), "int64")
        assert collect(iterate(dataset)) == [0, 1, 2]
    with pytest.raises(FailedPreconditionError, match="element_spec"):
        _ = nothing.concatenate(nothing).element_spec


def test_keeps_what_the_predicate_accepts() -> None:
    dataset = Dataset.from_tensor_slices(([1, 2, 3], ["a", "b", "c"])).filter(lambda number, text: text != "b")
    assert [(int(n), t) for n, t in dataset] == [(1, "a"), (3, "c")]
    assert [int(x) for x in Dataset.range(5).filter(lambda x: torch.tensor(bool(x > 2)))] == [3, 4]


def test_a_predicate_must_return_one_bool() -> None:
    answers: list[Any] = [1, None, "yes", np.array([True]), np.float32(1)]
    for answer in answers:
        items = collect(iterate(Dataset.range(3).filter(lambda x, answer=answer: answer if x == 1 else True)))
        assert [items[0], items[1][0], items[2]] == [0, "SpecError", 2], answer
        assert "must return one bool, got" in items[1][1], answer
    dataset = Dataset.from_tensor_slices(np.ones((2, 2))).map(lambda row: row + 1)
    assert outline(dataset.filter(lambda row: bool(row.fill(0)) or True)) == [[2, 2], [2, 2]], "it cannot change it"


INVERSE = Dataset.from_tensor_slices([1, 2, 0, 4, 5]).map(lambda x: 1 / int(x))


def test_errors_are_logged_on_request(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="raydist"):
        assert len(list(INVERSE.ignore_errors())) == 4
        assert not caplog.records
        assert len(list(INVERSE.ignore_errors(log_warning=True))) == 4
    (record,) = caplog.records
    assert "left out an element: ZeroDivisionError" in record.getMessage()
    assert "element 2 of its input" in record.getMessage()


def test_an_empty_dataset_ends() -> None:
    for count in (None, 5):
        assert list(Dataset.range(0).repeat(count)) == []
        assert list(Dataset.range(4).filter(lambda x: False).repeat(count)) == []
        assert Dataset.range(0).repeat(count).cardinality() == 0
    num_asked = itertools.count()
    some = Dataset.range(1).filter(lambda _: next(num_asked) % 3 == 2)
    assert [int(x) for x in some.repeat(9)] == [0, 0, 0], "of so many passes each may give something"
    assert list(some.repeat()) == []  # the first pass of one for ever gives nothing


def test_more_than_a_block_is_passed_over_and_nothing_is_read_beyond_the_last_element() -> None:
    assert [int(x) for x in Dataset.range(5000).skip(4998)] == [4998, 4999]
    assert [int(x) for x in Dataset.range(20_000).shard(7, 3)] == list(range(3, 20_000, 7))
    calls: list[int] = []
    assert len(list(Dataset.range(100).map(recorder(calls)).take(7))) == 7
    assert calls == list(range(7))
    endless = Dataset.range(5).repeat().enumerate().take_while(lambda number, x: number < 7)
    assert [int(x) for _, x in endless] == [0, 1, 2, 3, 4, 0, 1]


def test_every_value_at_its_first_place() -> None:
    kinds: list[list[Any]] = [[3, 1, 3, 2, 1], ["b", "a", "b", "c", "a"], [b"b", b"a", b"b", b"c", b"a"]]
    for values in kinds:
        for batch in (1, 5):
            groups = Dataset.from_tensor_slices(values).unique().batch(batch).as_numpy_iterator()
            assert [x for group in groups for x in group] == [values[k] for k in (0, 1, 3)]
    others: list[Any] = [[0.5, 1.5], np.zeros((2, 3), np.int64), ([1, 2], [1, 2])]
    for values in others:
        dataset = Dataset.from_tensor_slices(values).unique()
        assert [item[0] for item in collect(iterate(dataset))] == ["SpecError", "SpecError"]
        with pytest.raises(SpecError, match="unique needs elements that are single integers"):
            _ = dataset.element_spec


def test_zip_ends_with_the_shortest() -> None:
    expected = [(0, 10), (1, 11), (2, 12)]
    assert [(int(a), int(b)) for a, b in Dataset.zip(Dataset.range(5), B)] == expected
    assert [(int(a), int(b)) for a, b in Dataset.zip((Dataset.range(5), B))] == expected
    dataset = Dataset.zip({"a": Dataset.range(5), "rest": (B, Dataset.zip(Dataset.range(5), B))})
    assert int(next(iter(dataset))["rest"][1][1]) == 10
    assert dataset.element_spec["rest"][1] == (TensorSpec((), "int64"), TensorSpec((), "int64"))
    items = collect(iterate(Dataset.zip(Dataset.range(5).map(lambda x: 4 // int(x - 1)), B)))
    assert [item[0] for item in items] == [-4, "ZeroDivisionError", 4]
    assert [int(item[1]) for item in items[::2]] == [10, 12], "an error takes one place of all"


def test_options_of_all_inputs_are_merged() -> None:
    options = Options(seed=1, deterministic=False)
    dataset = Dataset.range(3).with_options(options).map(lambda x: x)
    options.seed = 3
    later = dataset.with_options(Options(seed=2))
    assert (dataset.options().seed, later.options().seed, later.options().deterministic) == (1, 2, False)
    first = Dataset.range(3).with_options(Options(autotune=AutotuneOptions(cpu_budget=2)))
    second = Dataset.range(3).with_options(Options(autotune=AutotuneOptions(ram_budget=9), seed=4))
    merged = Dataset.zip(first, second).options()
    assert (merged.autotune.cpu_budget, merged.autotune.ram_budget, merged.seed) == (2, 9, 4)
    with pytest.raises(InvalidArgumentError, match="cannot be changed"):
        merged.seed = 3


def choose(*choices: int, stop: bool = True) -> list[int]:
    numbers = Dataset.from_tensor_slices(list(choices))
    return [int(x) for x in Dataset.choose_from_datasets([A, B], numbers, stop_on_empty_dataset=stop)]


def test_choices_name_the_datasets() -> None:
    assert choose(1, 1, 0, 1, 0) == [10, 11, 0, 12, 1]
    assert choose(0, 0, 0, 0, 1) == [0, 1, 2]
    assert choose(0, 0, 0, 0, 1, stop=False) == [0, 1, 2, 10]


def test_a_choice_out_of_range_is_an_error_in_its_place() -> None:
    for wrong in (2, -1):
        dataset = Dataset.choose_from_datasets([A, B], Dataset.from_tensor_slices([0, wrong, 1]))
        assert outline(dataset) == [0, "InvalidArgumentError", 10]
        assert f"0 .. 1, got {wrong}" in collect(iterate(dataset))[1][1]
    for numbers in (Dataset.from_tensors(0.5), Dataset.from_tensors([0]), Dataset.from_tensors("a"), Dataset.zip(A, A)):
        first = collect(iterate(Dataset.choose_from_datasets([A, B], numbers)))[0]
        assert "must be one whole number" in first[1]


def test_all_elements_are_sampled_once() -> None:
    elements = [int(x) for x in Dataset.sample_from_datasets([A, B], seed=5)]
    assert sorted(elements) == [0, 1, 2, 10, 11, 12]
    assert [x for x in elements if x < 10] == [0, 1, 2]
    endless = Dataset.from_tensors(7).repeat()
    dataset = Dataset.sample_from_datasets([A, endless], seed=1, stop_on_empty_dataset=True)
    assert [x for x in map(int, dataset) if x != 7] == [0, 1, 2], "an empty dataset may end it"


def test_weights_are_shares() -> None:
    parts = [Dataset.from_tensors(number).repeat() for number in range(4)]
    (batch,) = Dataset.sample_from_datasets(parts, [1, 0, 2, 1], seed=2).batch(2000).take(1)
    counts = [int((batch == number).sum()) for number in range(4)]
    assert counts[1] == 0
    assert [abs(count - 500 * share) < 85 for count, share in zip(counts, [1, 0, 2, 1], strict=True)] == [True] * 4
    assert [int(x) for x in Dataset.sample_from_datasets([A, B], [0, 1])] == [10, 11, 12]
    assert [int(x) for x in Dataset.sample_from_datasets([A, B], [0.5, -1])] == [0, 1, 2]


def test_choices_change_with_the_epoch_only_if_asked() -> None:
    for again in (False, True):
        parts = [Dataset.range(20), Dataset.range(20, 40)]
        dataset = Dataset.sample_from_datasets(parts, seed=1, rerandomize_each_iteration=again)
        assert ([int(x) for x in dataset] == [int(x) for x in dataset]) is not again


# --- cycles of datasets -----------------------------------------------------------------------------------------------


def copies(x: Any) -> Dataset:
    return Dataset.from_tensors(x).repeat(int(x))


# tf.data: lengths of the datasets, cycle_length, block_length, elements.
ORDERS = [
    ([4, 5, 6], 2, 1, [4, 5, 4, 5, 4, 5, 4, 5, 5, 6, 6, 6, 6, 6, 6]),
    ([1, 3, 2, 4], 3, 2, [1, 3, 3, 2, 2, 4, 4, 3, 4, 4]),
    ([4, 0, 6], 2, 1, [4, 4, 6, 4, 6, 4, 6, 6, 6, 6]),
    ([4, 5, 6], 7, 2, [4, 4, 5, 5, 6, 6, 4, 4, 5, 5, 6, 6, 5, 6, 6]),
    ([4, 5, 6] * 2, 2, 3, [4, 4, 4, 5, 5, 5, 4, 5, 5, 6, 6, 6, 4, 4, 4, 6, 6, 6, 4, 5, 5, 5, 6, 6, 6, 5, 5, 6, 6, 6]),
]  # fmt: skip


def test_order() -> None:
    for lengths, cycle_length, block_length, expected in ORDERS:
        for calls in (None, 1, AUTOTUNE):
            dataset = Dataset.from_tensor_slices(lengths).interleave(copies, cycle_length, block_length, calls)
            case = f"{lengths}, {cycle_length}, {block_length}, {calls}"
            assert [int(x) for x in dataset] == expected, case
            assert [int(x) for batch in dataset.batch(7) for x in batch] == expected, case


def test_nothing_is_read_beyond_what_is_handed_out() -> None:
    calls: list[int] = []
    note = recorder(calls)
    dataset = Dataset.range(4).interleave(lambda n: Dataset.range(n * 100, n * 100 + 50).map(note), 2)
    assert [int(x) for x in dataset.take(5)] == [0, 100, 1, 101, 2]
    assert sorted(calls) == [0, 1, 2, 100, 101]


def test_random_choices_differ_from_dataset_to_dataset() -> None:
    dataset = Dataset.range(4).flat_map(lambda _: Dataset.range(50).shuffle(50).batch(50))
    orders = [batch.tolist() for batch in dataset]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_errors_stand_in_their_places() -> None:
    iterator = iterate(Dataset.range(3).flat_map(lambda n: Dataset.range(2 // int(n - 1))))
    with pytest.raises(ZeroDivisionError) as caught:
        next(iterator)
    assert "element 1 of its input" in caught.value.__notes__[0]
    assert [int(x) for x in iterator] == [0, 1]


def test_the_function_must_return_one_kind_of_dataset() -> None:
    (item,) = collect(iterate(Dataset.range(1).flat_map(lambda x: x)))
    assert item[0] == "SpecError"
    assert "must return a Dataset, got" in item[1]
    mixed = Dataset.range(2).flat_map(lambda n: Dataset.from_tensors("text" if n else 1.0))
    assert [item[0] for item in collect(iterate(mixed))[1:]] == ["SpecError"]


def test_counts_inside_may_be_numpy_numbers() -> None:
    dataset = Dataset.range(1, 3).flat_map(lambda n: Dataset.range(9).skip(n).take(2 * n).shard(n, n - 1).repeat(n))
    iterator = iterate(dataset)
    next(iterator)
    resumed = iterate(dataset)
    resumed.load_state_dict(json.loads(json.dumps(iterator.state_dict())))
    assert [int(x) for x in resumed] == [2, 3, 5, 3, 5]


def test_elements_without_numbers_are_woven_too() -> None:
    def empty(n: Any) -> Dataset:
        return Dataset.from_tensor_slices((np.full(40, n), np.empty((40, 0, 2))))

    found = list(Dataset.range(4).interleave(empty, cycle_length=4, block_length=2))
    assert [int(n) for n, _ in found[:16]] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert len(found) == 160
    assert {tuple(row.shape) for _, row in found} == {(0, 2)}


def test_a_slow_dataset_does_not_hold_back_others() -> None:
    release = threading.Event()

    def waits(x: np.int64) -> np.int64:
        if x == 0:
            release.wait(50)
        return x

    dataset = Dataset.range(3).interleave(
        lambda n: Dataset.range(10 * n, 10 * n + 5).map(waits), 3, num_parallel_calls=3, deterministic=False
    )
    iterator = iterate(dataset)
    early = [int(next(iterator)) for _ in range(10)]
    release.set()
    assert sorted(early) == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    assert collect(iterator) == [0, 1, 2, 3, 4]


def test_a_function_is_called_once_for_each_input_and_in_order() -> None:
    calls: list[int] = []

    def some(x: np.int64) -> Dataset:
        calls.append(int(x))
        return Dataset.from_tensors(x) if x % 3 else Dataset.range(int(x)).filter(lambda y: y % 2 == 0)

    assert [int(x) for x in Dataset.range(1, 8).flat_map(some)] == [1, 2, 0, 2, 4, 5, 0, 2, 4, 7]
    assert calls == list(range(1, 8))


def test_datasets_of_a_flat_map_may_differ_in_their_settings() -> None:
    def windows(x: np.int64) -> Dataset:
        rows = Dataset.from_tensor_slices(np.arange(6) + x)
        return rows.batch(2 + int(x) % 2) if x < 9 else rows.batch(4).unbatch().batch(6)

    found = [row.tolist() for row in Dataset.range(12).flat_map(windows).as_numpy_iterator()]
    sizes = [2 + number % 2 if number < 9 else 6 for number in range(12)]
    assert found == [
        [number + row for row in range(start, min(start + size, 6))]
        for number, size in enumerate(sizes)
        for start in range(0, 6, size)
    ]
