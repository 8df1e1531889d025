from __future__ import annotations

import itertools
import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raydist as rd
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.sources.memory import TableRows
from tests.contracts.op import check_op


def test_slices_of_every_leaf() -> None:
    dataset = Dataset.from_tensor_slices({"x": np.arange(6).reshape(3, 2), "y": torch.arange(3), "t": ["a", "b", "c"]})
    assert len(dataset) == 3
    assert dataset.element_spec["x"] == TensorSpec((2,), np.int64)
    last = list(dataset)[-1]
    assert (last["x"].tolist(), int(last["y"]), last["t"]) == ([4, 5], 2, "c")


def test_what_cannot_be_sliced() -> None:
    cases: list[tuple[Any, str]] = [
        (3, "got a scalar: 3"),
        (([1], 2), "got a scalar '1': 2"),
        (("text", [1]), "got a scalar '0'"),
        (([1, 2], [1, 2, 3]), r"same first dimension, got \{'0': 2, '1': 3\}"),
        ((), "at least one tensor"),
    ]
    for tensors, message in cases:
        with pytest.raises(InvalidArgumentError, match=message):
            Dataset.from_tensor_slices(tensors)
    with pytest.raises(SpecError, match="rectangular"):
        Dataset.from_tensor_slices([[1], [1, 2]])
    with pytest.raises(SpecError, match="A leaf must be"):
        Dataset.from_tensors({1, 2})
    nothing = Dataset.from_tensor_slices(np.zeros((0, 3)))
    assert (len(nothing), list(nothing.batch(2))) == (0, [])
    assert nothing.element_spec == TensorSpec((3,), np.float64)


def test_arrays_are_not_copied_and_what_is_handed_out_is_not_the_source() -> None:
    makers: list[Any] = [Dataset.from_tensor_slices, lambda x: Dataset.from_tensors(x).unbatch()]
    for make in makers:
        for dataset in (make(np.zeros((4, 2))), pickle.loads(pickle.dumps(make(np.zeros((4, 2)))))):
            for row in dataset.repeat(2).as_numpy_iterator():
                assert not row.any()
                row[:] = 1
    source = np.zeros((4, 2))
    dataset = Dataset.from_tensor_slices(source)
    source[3] = 7
    assert list(dataset.as_numpy_iterator())[3].tolist() == [7, 7]


@pytest.fixture
def table() -> pa.Table:
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(40, dtype=np.int32).reshape(10, 2, 2))
    columns = {
        "t": tensors,
        "l": pa.array([[0.5] * i for i in range(10)], pa.list_(pa.float32())),
        "s": pa.array([str(i) for i in range(10)]),
        "n": pa.array(range(10), pa.uint8()),
    }
    whole = pa.table(columns)
    return pa.concat_tables([whole.slice(0, 3), whole.slice(3, 0), whole.slice(3)])


def elements() -> list[dict[str, Any]]:
    return [
        {
            "t": np.arange(4 * i, 4 * i + 4, dtype=np.int32).reshape(2, 2),
            "l": np.full(i, 0.5, np.float32),
            "s": str(i),
            "n": np.uint8(i),
        }
        for i in range(10)
    ]


def test_rows_are_dicts(table: pa.Table) -> None:
    dataset = rd.Dataset.from_arrow(table)
    for element in dataset:  # what is handed out may be written
        element["t"].zero_()
        element["l"].zero_()
    check_op(lambda: dataset, elements())
    check_op(lambda: rd.Dataset.from_arrow(table.slice(2, 5)), elements()[2:7])
    check_op(lambda: rd.Dataset.from_arrow(table.drop(["l"])).shuffle(4).batch(3))


def test_whatever_can_be_read_into_a_table(table: pa.Table) -> None:
    foreign = type("Foreign", (), {"__arrow_c_stream__": table.__arrow_c_stream__})()
    for source in (table.to_reader(), table.combine_chunks().to_batches()[0], foreign):
        dataset = rd.Dataset.from_arrow(source)
        assert len(dataset) == 10
        for _ in range(2):  # a reader too can be iterated again
            assert [element["s"] for element in dataset] == [str(i) for i in range(10)]
    batches = rd.Dataset.from_tensor_slices({"x": np.eye(3), "y": ["a", "b", "c"]}).batch(2).arrow_batches()
    found = rd.Dataset.from_arrow(pa.Table.from_batches(list(batches)))
    assert [row["x"].tolist() for row in found] == np.eye(3).tolist()
    with pytest.raises(rd.SpecError, match=r"needs a pyarrow Table.*got \[1, 2\] \(list\)"):
        rd.Dataset.from_arrow([1, 2])
    with pytest.raises(rd.SpecError, match="Column 'when' must hold numbers"):
        rd.Dataset.from_arrow(pa.table({"when": pa.array([(1, 2, 3)], pa.month_day_nano_interval())}))


def test_rows_of_many_batches() -> None:
    views = pa.array([f"text {i}" for i in range(40)], pa.string_view())  # Arrow cannot take rows of them
    contents = (pa.table({"x": range(40), "s": [f"{i}" for i in range(40)]}), pa.table({"x": range(40), "v": views}))
    for batch_rows, content in itertools.product((1, 3, 40), contents):
        batches = content.to_batches(max_chunksize=batch_rows)
        checked: list[int] = []
        rows = TableRows(content.schema, [*batches, *content.slice(0, 0).to_batches()], checked.append)
        for indices in ([], [7], [3, 4, 5], np.random.default_rng(1).integers(0, 40, 60).tolist()):
            found = rows.gather(np.array(indices, np.int64)).to_pylist()
            assert found == [content.to_pylist()[index] for index in indices]
        assert sorted(checked) == sorted({*checked})
        assert set(range(len(batches))) - {*checked} <= {index for index in range(len(batches)) if batch_rows < 40}


def test_nulls_are_found_at_once(table: pa.Table) -> None:
    with_null = pa.concat_tables([table.select(["n"]), pa.table({"n": pa.array([1, None], pa.uint8())})])
    with pytest.raises(rd.SpecError, match=r"column 'n' has one in row 11\. Give fill_null=.*null_masks=True"):
        rd.Dataset.from_arrow(with_null)
    check_op(lambda: rd.Dataset.from_arrow(with_null, fill_null=9), [{"n": np.uint8(n)} for n in [*range(10), 1, 9]])


def test_dates_are_whole_numbers_in_torch() -> None:
    table = pa.table(
        {"d": pa.array([1, 2, 3], pa.date32()), "t": pa.array([[4], [5, 6], []], pa.list_(pa.time64("us")))}
    )
    dataset = rd.Dataset.from_arrow(table)
    assert dataset.element_spec["d"] == rd.TensorSpec((), "datetime64[D]")
    assert [row["d"].dtype for row in dataset.as_numpy_iterator()] == [np.dtype("datetime64[D]")] * 3
    batch = next(iter(dataset.padded_batch(2)))
    assert (batch["d"].tolist(), batch["t"].tolist()) == ([1, 2], [[4, 0], [5, 6]])
    later = dataset.map(lambda row: {"d": row["d"] + np.timedelta64(1, "D"), "weekday": row["d"].astype(int) % 7})
    check_op(lambda: later.shuffle(3, seed=1).batch(2))
    (rows,) = later.batch(3).as_numpy_iterator()
    assert rows["d"].tolist() == np.array([2, 3, 4], "datetime64[D]").tolist()
    (arrow,) = later.batch(3).arrow_batches()
    assert arrow.column("d").to_pylist() == [2, 3, 4]
