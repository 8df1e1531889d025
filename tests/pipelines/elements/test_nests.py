"""Structures of elements: None, the order of keys, nests of arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.distributed_dataset import distribute
from raydist.options import InputOptions
from raydist.pipelines.elements.element_nests import map_element
from raydist.pipelines.elements.key_order import KeyOrder
from raydist.pipelines.elements.rows import block_of_rows
from raydist.pipelines.elements.small_floats import (
    array_of_tensor,
    as_bits,
    dtype_kind,
    dtype_named,
    is_number,
    is_small_float,
    tensor_of_array,
)
from raydist.pipelines.elements.spec import TensorSpec, as_dtype
from raydist.pipelines.stored.fingerprint import fingerprint
from tests.actors.readers.fakes import fake_side

INT = TensorSpec((), "int64")


def pairs() -> Dataset:
    return Dataset.range(4).map(lambda x: (x, None))


BATCHED = TensorSpec((None,), "int64")
WITH_NONE: dict[str, tuple[Callable[[], Dataset], Any, list[Any]]] = {
    "from_tensors": (lambda: Dataset.from_tensors((1, None)), (INT, None), [(1, None)]),
    "slices": (
        lambda: Dataset.from_tensor_slices({"x": [1, 2], "y": None}),
        {"x": INT, "y": None},
        [{"x": 1, "y": None}, {"x": 2, "y": None}],
    ),
    "map": (pairs, (INT, None), [(0, None), (1, None), (2, None), (3, None)]),
    "filter": (lambda: pairs().filter(lambda x, none: none is None and x > 2), (INT, None), [(3, None)]),
    "batch": (lambda: pairs().batch(3), (BATCHED, None), [([0, 1, 2], None), ([3], None)]),
    "padded_batch": (lambda: pairs().padded_batch(4), (BATCHED, None), [([0, 1, 2, 3], None)]),
    "rebatch": (lambda: pairs().batch(2).rebatch(4), (BATCHED, None), [([0, 1, 2, 3], None)]),
    "unbatch": (lambda: pairs().batch(4).unbatch().skip(3), (INT, None), [(3, None)]),
    "concatenate": (lambda: pairs().take(1).concatenate(pairs().take(1)), (INT, None), [(0, None)] * 2),
    "enumerate": (lambda: pairs().enumerate().take(1), (INT, (INT, None)), [(0, (0, None))]),
    "zip": (lambda: Dataset.zip(pairs(), pairs()).take(1), ((INT, None), (INT, None)), [((0, None), (0, None))]),
    "window": (lambda: pairs().window(4).flat_map(lambda x, none: x.batch(4)), BATCHED, [[0, 1, 2, 3]]),
    "shuffle": (lambda: pairs().repeat(2).cache().shuffle(1).skip(7), (INT, None), [(3, None)]),
    "scan": (lambda: pairs().scan((0, None), lambda s, x: ((s[0] + 1, s[1]), x)).skip(3), (INT, None), [(3, None)]),
    "generator": (
        lambda: Dataset.from_generator(lambda: iter([(1, None)]), output_signature=(INT, None)),
        (INT, None),
        [(1, None)],
    ),
    "declared": (lambda: Dataset.range(1).map(lambda x: (x, None), output_spec=(INT, None)), (INT, None), [(0, None)]),
    "empty": (lambda: Dataset.range(1).map(lambda x: (None, (), {}, x)), (None, (), {}, INT), [(None, (), {}, 0)]),
    "map_batches": (lambda: pairs().map_batches(lambda x, none: (x * 2, none), 2).skip(3), (INT, None), [(6, None)]),
}


def test_elements_with_none() -> None:
    for name, (make, spec, expected) in WITH_NONE.items():
        for found in (make(), make().as_numpy_iterator()):
            assert [map_element(lambda leaf: leaf.tolist(), element) for element in found] == expected, name
        assert make().element_spec == spec, name


def test_saved_cached_and_reduced(tmp_path: Path) -> None:
    ds = Dataset.range(3).map(lambda x: {"x": x, "y": None, "z": (None, str(x))})
    ds.save(str(tmp_path / "saved"))
    loaded = Dataset.load(str(tmp_path / "saved"))
    assert loaded.element_spec == ds.element_spec
    assert list(loaded.as_numpy_iterator()) == list(ds.as_numpy_iterator())
    cached = ds.cache(str(tmp_path / "cache"))
    assert [list(cached.as_numpy_iterator()) for _ in range(2)] == [list(ds.as_numpy_iterator())] * 2
    assert pairs().reduce((0, None), lambda state, x: (state[0] + x[0], state[1])) == (6, None)


def test_none_may_stand_for_a_leaf_until_elements_are_joined() -> None:
    mixed = Dataset.range(3).map(lambda x: (x, None if x != 1 else x))
    assert [label for _, label in mixed] == [None, 1, None]
    with pytest.raises(SpecError, match=r"None\) and then \('\*', '\*'\)\. Put a value in the place of None"):
        list(mixed.batch(3))
    filled = mixed.map(lambda x, label: (x, 0 if label is None else label))
    assert [batch[1].tolist() for batch in filled.batch(3)] == [[0, 1, 0]]


def test_generators_keep_to_their_signature() -> None:
    signature = {"x": INT, "y": None}
    fitting = Dataset.from_generator(lambda: iter([{"x": 1, "y": None}]), signature)
    assert list(fitting.as_numpy_iterator()) == [{"x": 1, "y": None}]
    cases: list[tuple[Any, Any, str]] = [
        ({"x": 1, "y": 2}, signature, "elements of the structure .*'y': None.* got .*'y': 2"),
        ({"x": None, "y": None}, signature, "must yield elements of the structure .* got"),
        (None, signature, "must yield"),
        ({"x": None, "y": 1}, {"x": INT, "y": INT}, "must yield TensorSpec.* at 'x'.* got None"),
        ((1, 2), TensorSpec((2,), "int64"), "A tuple is a structure: yield a list for one tensor"),
    ]
    for value, declared, message in cases:
        with pytest.raises(SpecError, match=message):
            next(iter(Dataset.from_generator(lambda value=value: iter([value]), declared)))


def step(batch: Any) -> Any:
    x, none = batch
    assert none is None
    return x.sum()


@pytest.mark.ray
def test_batches_of_any_strategy_have_none_too(two: rd.MirroredStrategy) -> None:
    for strategy in (rd.OneDeviceStrategy("cpu"), two):
        batches = strategy.distribute_dataset(pairs().batch(2))
        assert batches.element_spec == (TensorSpec((None,), "int64"), None)
        sums = []
        for batch in batches:
            assert batch[1] is None
            sums.append(int(strategy.reduce("SUM", strategy.run(step, args=(batch,)))))
        assert sums == [1, 5]


RECORDS = Dataset.from_tensor_slices({"z": [1, 2, 3], "a": [4, 5, 6], "m": [7, 8, 9]})
ORDER = ["z", "a", "m"]


def swapped(element: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(element.items())) if element["z"] % 2 == 0 else element


SORTED = RECORDS.map(lambda element: dict(sorted(element.items())))
IN_ORDER: dict[str, Dataset] = {
    "slices": RECORDS,
    "map": RECORDS.map(lambda element: {key: value + 1 for key, value in element.items()}),
    "swapped": RECORDS.map(swapped),
    "on threads": RECORDS.map(swapped, num_parallel_calls=2),
    "batch": RECORDS.batch(2),
    "padded": RECORDS.padded_batch(2, {"a": None, "m": None, "z": None}, {"a": -1, "m": -2, "z": -3}),
    "shuffle": RECORDS.shuffle(3, seed=1),
    "window": RECORDS.window(2).flat_map(lambda w: Dataset.zip({"z": w["z"], "a": w["a"], "m": w["m"]})),
    "concatenate": RECORDS.concatenate(SORTED),
    "choose": Dataset.choose_from_datasets([RECORDS, SORTED], Dataset.range(6).map(lambda x: x % 2)),
    "interleave": RECORDS.interleave(lambda element: Dataset.from_tensors(swapped(element)), cycle_length=2),
    "cache": RECORDS.prefetch(1).cache().repeat(2),
    "filter": RECORDS.map(lambda element: element).filter(lambda element: element["a"] > 0).take(2),
    "zip": Dataset.zip({"z": Dataset.range(3), "a": Dataset.range(3), "m": Dataset.range(3)}),
    "scan": RECORDS.scan(0, lambda state, element: (state, element)),
}


def test_dicts_keep_the_order_of_the_first_element() -> None:
    for name, dataset in IN_ORDER.items():
        found = [list(element) for element in dataset.as_numpy_iterator()]
        assert found, name
        assert all(order == ORDER for order in found), name
        assert list(dataset.element_spec) == ORDER, name
        assert list(next(iter(dataset))) == ORDER, name
    (batch,) = RECORDS.batch(3).arrow_batches()
    assert batch.schema.names == ORDER
    assert batch.column("z").to_pylist() == [1, 2, 3]


def test_components_match_by_name_and_nested_dicts_have_orders_of_their_own() -> None:
    one, other = Dataset.from_tensors({"b": 1, "a": 2.5}), Dataset.from_tensors({"a": 3.5, "b": 4})
    (joined,) = one.concatenate(other).batch(2).as_numpy_iterator()
    assert [(name, leaf.tolist()) for name, leaf in joined.items()] == [("b", [1, 4]), ("a", [2.5, 3.5])]
    element = (1, {"y": {"d": 2, "c": np.ones(2)}, "x": 3})
    (found,) = Dataset.from_tensors(element).repeat(1).batch(1).map(lambda n, e: (n, e)).as_numpy_iterator()
    assert (list(found[1]), list(found[1]["y"])) == (["y", "x"], ["d", "c"])
    assert found[1]["y"]["d"].tolist() == [2]


def test_an_order_that_was_tampered_with_is_refused_and_a_long_one_not_kept() -> None:
    block = block_of_rows([{"b": 1, "a": 2}])
    for schema in ([[0, 0], [None, None]], [[1, 0], [None]], [["b"], [None, None]], 3):
        order = KeyOrder()
        order.restore(schema)
        with pytest.raises(InvalidArgumentError, match="order of keys"):
            order.of(block)
    order = KeyOrder()
    order.of(block_of_rows([dict.fromkeys(map(str, range(2000, 0, -1)), 0)]))
    assert order.schema() is None


# --- bfloat16 and float8 ----------------------------------------------------------------------------------------------

ON_DRIVER = InputOptions(num_input_workers=0)
NAMES = ["bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.fixture(params=["bfloat16", "float8_e4m3fn"])  # of two bytes and of one
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = getattr(torch, request.param)
    return found


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Powers of two, which all of these types have."""
    count = int(np.prod(shape))
    return (2.0 ** (torch.arange(count) % 8 - 3)).reshape(shape).to(dtype)


def same(found: Any, expected: torch.Tensor) -> bool:
    alike = found.dtype == expected.dtype and found.shape == expected.shape
    return alike and torch.equal(found.float(), expected.float())


def test_types_and_tensors_there_and_back_without_a_copy() -> None:
    for name in NAMES:
        dtype: torch.dtype = getattr(torch, name)
        found = as_dtype(dtype)
        assert found == as_dtype(name) == dtype_named(name) == as_dtype(getattr(ml_dtypes, name))
        assert (is_small_float(found), is_number(found), dtype_kind(found)) == (True, True, "f")
        assert repr(TensorSpec((2,), dtype)) == f"TensorSpec(shape=(2,), dtype={name})"
        assert as_bits(np.zeros(3, found)).dtype == f"u{found.itemsize}"
        for given in (tensor(dtype, 3, 2), tensor(dtype, 4)[2], tensor(dtype, 4, 2).T):
            array = array_of_tensor(given)
            back = tensor_of_array(array, torch.from_numpy)
            assert same(back, given), name
            assert back.data_ptr() == given.data_ptr()
    arrays = [np.zeros(3, as_dtype(name)) for name in NAMES]
    assert len({fingerprint(array) for array in arrays}) == len({fingerprint(array.dtype) for array in arrays}) == 6


def test_elements(dtype: torch.dtype) -> None:
    given = tensor(dtype, 6, 2)
    slices = Dataset.from_tensor_slices({"z": given, "a": torch.arange(6)})
    assert slices.element_spec["z"] == TensorSpec((2,), dtype)
    assert next(slices.as_numpy_iterator())["z"].dtype == as_dtype(dtype)
    (batch,) = slices.batch(6)
    assert same(batch["z"], given)
    for name, dataset in {
        "slices": slices,
        "map": slices.map(lambda e: {"z": e["z"], "a": e["a"]}),
        "calls": slices.map(lambda e: {"z": e["z"].copy(), "a": e["a"]}, num_parallel_calls=2),
        "cache": slices.cache(),
        "window": slices.window(2).flat_map(lambda w: Dataset.zip({"z": w["z"], "a": w["a"]})),
        "unbatch": slices.batch(4).unbatch(),
        "shuffle": slices.shuffle(4, seed=1),
        "global_shuffle": slices.global_shuffle(2),
    }.items():
        rows = list(dataset)
        assert len(rows) == 6, name
        assert all(same(row["z"], given[int(row["a"])]) for row in rows), name


def test_saved_elements(dtype: torch.dtype, tmp_path: Path) -> None:
    given = tensor(dtype, 5, 3)
    dataset = Dataset.from_tensor_slices((given, given[:, 0])).concatenate(
        Dataset.from_tensors((tensor(dtype, 7), tensor(dtype, 1)[0]))
    )
    for form in ("arrow", "parquet"):
        dataset.save(str(tmp_path / form), format=form)
        found = list(Dataset.load(str(tmp_path / form)))
        assert all(same(row[0], expected) for row, expected in zip(found, [*given, tensor(dtype, 7)], strict=True))
        assert same(found[1][1], given[1, 0])
    cached = Dataset.from_tensor_slices(given).cache(str(tmp_path / "cache"))
    for _ in range(2):
        assert same(torch.stack([x.float() for x in cached]), given.float())


def test_distributed(dtype: torch.dtype) -> None:
    given = tensor(dtype, 11, 2)
    dataset = Dataset.from_tensor_slices((given, given[:, 0])).batch(4)
    with fake_side(2) as side:
        batches = [(rows.values, scalars.values) for rows, scalars in distribute(dataset, side, ON_DRIVER)]
    for parts, expected in zip(zip(*batches, strict=True), (given, given[:, 0]), strict=True):
        assert torch.equal(torch.cat([part.float() for values in parts for part in values]), expected.float())
        assert {part.dtype for values in parts for part in values} == {dtype}
