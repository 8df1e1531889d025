from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import flatten
from raydist.dataset import Dataset
from raydist.pipelines.elements.key_order import KeyOrder
from raydist.pipelines.elements.rows import block_of_rows


def keys(dataset: Dataset) -> list[list[str]]:
    return [list(element) for element in dataset.as_numpy_iterator()]


def row(**entries: Any) -> dict[str, Any]:
    return entries


ROWS = Dataset.from_tensor_slices({"z": [1, 2, 3], "a": [4, 5, 6], "m": [7, 8, 9]})
ORDER = ["z", "a", "m"]


def swapped(element: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(element.items())) if element["z"] % 2 == 0 else element


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        ROWS.map(lambda element: {key: value + 1 for key, value in element.items()}),
        ROWS.map(swapped),
        ROWS.map(swapped, num_parallel_calls=2),
        ROWS.batch(2),
        ROWS.padded_batch(2, {"a": None, "m": None, "z": None}, {"a": -1, "m": -2, "z": -3}),
        ROWS.shuffle(3, seed=1),
        ROWS.window(2).flat_map(lambda w: Dataset.zip({"z": w["z"], "a": w["a"], "m": w["m"]})),
        ROWS.concatenate(ROWS.map(lambda element: dict(sorted(element.items())))),
        Dataset.choose_from_datasets(
            [ROWS, ROWS.map(lambda element: dict(sorted(element.items())))], Dataset.range(6).map(lambda x: x % 2)
        ),
        ROWS.interleave(lambda element: Dataset.from_tensors(swapped(element)), cycle_length=2),
        ROWS.prefetch(1).cache().repeat(2),
        ROWS.map(lambda element: element).filter(lambda element: element["a"] > 0).take(2),
        Dataset.zip({"z": Dataset.range(3), "a": Dataset.range(3), "m": Dataset.range(3)}),
        ROWS.scan(0, lambda state, element: (state, element)),
    ],
)
def test_dicts_keep_the_order_of_the_first_element(dataset: Dataset) -> None:
    found = keys(dataset)
    assert found
    assert all(order == ORDER for order in found)
    assert list(dataset.element_spec) == ORDER
    assert list(next(iter(dataset))) == ORDER


def test_functions_get_it_too() -> None:
    seen: list[list[str]] = []

    def note(element: dict[str, Any]) -> Any:
        seen.append(list(element))
        return element["a"]

    list(ROWS.map(note, num_parallel_calls=1))
    assert seen == [ORDER] * 3


def test_components_match_by_name() -> None:
    one, other = Dataset.from_tensors({"b": 1, "a": 2.5}), Dataset.from_tensors({"a": 3.5, "b": 4})
    found = list(one.concatenate(other).batch(2).as_numpy_iterator())
    assert [list(element.items()) for element in found] == [[("b", found[0]["b"]), ("a", found[0]["a"])]]
    assert found[0]["b"].tolist() == [1, 4]
    assert found[0]["a"].tolist() == [2.5, 3.5]


def test_nested_dicts_have_orders_of_their_own() -> None:
    element = (1, {"y": {"d": 2, "c": np.ones(2)}, "x": 3})
    (found,) = Dataset.from_tensors(element).repeat(1).batch(1).map(lambda n, e: (n, e)).as_numpy_iterator()
    assert list(found[1]) == ["y", "x"]
    assert list(found[1]["y"]) == ["d", "c"]
    assert found[1]["y"]["d"].tolist() == [2]


def test_arrow_batches_have_their_columns_in_that_order() -> None:
    (batch,) = ROWS.batch(3).arrow_batches()
    assert batch.schema.names == ORDER
    assert batch.column("z").to_pylist() == [1, 2, 3]


def test_a_state_in_the_second_part_knows_the_order_of_the_first() -> None:
    dataset = ROWS.concatenate(ROWS.map(lambda element: dict(sorted(element.items()))))
    iterator = dataset.as_numpy_iterator()
    for _ in range(4):
        next(iterator)
    state = json.loads(json.dumps(iterator.state_dict()))
    resumed = dataset.as_numpy_iterator()
    resumed.load_state_dict(state)
    assert [list(element) for element in resumed] == [ORDER] * 2


def test_an_order_that_was_tampered_with_is_refused() -> None:
    block = block_of_rows([{"b": 1, "a": 2}])
    for schema in ([[0, 0], [None, None]], [[1, 0], [None]], [["b"], [None, None]], 3):
        order = KeyOrder()
        order.restore(schema)
        with pytest.raises(InvalidArgumentError, match="order of keys"):
            order.of(block)


def test_wide_tables_have_small_states() -> None:
    order = KeyOrder()
    order.of(block_of_rows([dict.fromkeys(map(str, range(2000, 0, -1)), 0)]))
    assert order.schema() is None


def test_restored_orders_are_those_that_were_noted() -> None:
    first = KeyOrder()
    first.of(block_of_rows([({"b": 1, "a": {"d": 1, "c": 2}},)]))
    second = KeyOrder()
    second.restore(json.loads(json.dumps(first.schema())))
    assert second.schema() == first.schema()
    found = second.of(block_of_rows([({"a": {"c": 1, "d": 2}, "b": 3},)])).row(0)
    assert list(found[0]) == ["b", "a"]
    assert list(found[0]["a"]) == ["d", "c"]
    assert flatten(found)[0] == [1, 2, 3]


def test_sorted_keys_stay_sorted_after_a_restore() -> None:
    order, later = KeyOrder(), KeyOrder()
    order.of(block_of_rows([{"a": 1, "b": 2}]))
    later.restore(order.schema())
    assert list(later.of(block_of_rows([{"b": 1, "a": 2}])).row(0)) == ["a", "b"]
