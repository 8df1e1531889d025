from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.tf_example.features import FixedLenFeature, VarLenFeature
from raydist.pipelines.tf_example.outputs import Feature
from raydist.pipelines.tf_example.parse import example_class, parse_example, parse_single_example
from tests.pipelines.formats.record_files import example, read_all
from tests.real_data import real_file


def test_one_record() -> None:
    record = example(id=[7], pixels=[0.5, 1.5, 2.5, 3.5], name=[b"a\0"], tags=[b"x", b"y"], extra=[1])
    features: dict[str, Feature] = {
        "id": FixedLenFeature((), "int64"),
        "pixels": FixedLenFeature((2, 2), "float32"),
        "name": FixedLenFeature((), bytes),
        "tags": VarLenFeature(bytes),
    }
    for parse in (parse_example, parse_single_example):
        parsed = parse(record, features)
        assert list(parsed) == list(features)
        assert (parsed["id"], type(parsed["id"])) == (7, np.int64)
        assert (parsed["name"], type(parsed["name"])) == (b"a\0", bytes)
        assert parsed["pixels"].tolist() == [[0.5, 1.5], [2.5, 3.5]]
        assert parsed["pixels"].dtype == np.float32
        assert (parsed["tags"].tolist(), parsed["tags"].dtype) == ([b"x", b"y"], np.dtype(object))


def test_a_batch() -> None:
    records = np.array(
        [example(id=[i], pair=[i, -i], name=[b"n%d" % i], seen=[1.0] * i or None) for i in range(3)], object
    )
    parsed = parse_example(
        records,
        {
            "id": FixedLenFeature((), "int64"),
            "pair": FixedLenFeature((2,), "int64"),
            "name": FixedLenFeature((1,), bytes),
            "seen": VarLenFeature("float32"),
        },
    )
    assert (parsed["id"].tolist(), parsed["id"].dtype) == ([0, 1, 2], np.dtype(np.int64))
    assert parsed["pair"].tolist() == [[0, 0], [1, -1], [2, -2]]
    assert (parsed["name"].tolist(), parsed["name"].shape) == ([[b"n0"], [b"n1"], [b"n2"]], (3, 1))
    assert (parsed["seen"].shape, [row.tolist() for row in parsed["seen"]]) == ((3,), [[], [1.0], [1.0, 1.0]])
    assert all(row.dtype == np.float32 for row in parsed["seen"])


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3),
            st.lists(st.binary(max_size=5), max_size=3),
        ),
        max_size=5,
    )
)
def test_what_was_written_is_parsed(rows: list[tuple[int, list[float], list[bytes]]]) -> None:
    features: dict[str, Feature] = {
        "i": FixedLenFeature((), "int64"),
        "f": FixedLenFeature(3, "float32"),
        "b": VarLenFeature(bytes),
    }
    parsed = parse_example([example(i=[i], f=f, b=b or None) for i, f, b in rows], features)
    assert parsed["i"].tolist() == [i for i, _, _ in rows]
    assert parsed["f"].tolist() == [f for _, f, _ in rows]
    assert [row.tolist() for row in parsed["b"]] == [b for _, _, b in rows]


def test_a_missing_feature() -> None:
    fixed = FixedLenFeature((2,), "int64", default_value=[3, 4])
    for record in (b"", example(), example(other=[1]), example(x=None)):
        assert parse_example(record, {"x": fixed})["x"].tolist() == [3, 4]
        assert parse_example([record], {"x": FixedLenFeature((), bytes, b"d")})["x"].tolist() == [b"d"]
        assert parse_example(record, {"x": VarLenFeature("int64")})["x"].tolist() == []
        has = "other" if b"other" in record else "none"
        missing = rf"'x' must be in every record, but record 1 lacks it \(it has: {has}\)\. Give .* a default_value"
        with pytest.raises(InvalidArgumentError, match=missing):
            parse_example([example(x=[1]), record], {"x": FixedLenFeature((), "int64")})


def test_records_that_do_not_fit() -> None:
    for shape in ((), (1,), (0,)):
        for feature in (FixedLenFeature(shape, "float32", 0), VarLenFeature("float32")):
            for values in ([5], []):
                with pytest.raises(
                    InvalidArgumentError,
                    match=r"Feature 'x' must hold float32 values, as asked for, but record 0 holds int64\. Ask for",
                ):
                    parse_example(example(x=values), {"x": feature})
    numbers: list[tuple[tuple[int, ...], list[int]]] = [((), []), ((), [1, 2]), ((2, 2), [1, 2, 3]), ((0,), [1])]
    for shape, values in numbers:
        with pytest.raises(
            InvalidArgumentError,
            match=rf"Feature 'x' must hold {np.prod(shape, dtype=int)} values \(shape .*\), "
            rf"but record 0 holds {len(values)}\. Use VarLen",
        ):
            parse_example(example(x=values), {"x": FixedLenFeature(shape, "int64", default_value=0)})
    for record in (b"hello", b"\xff\xff", b"\x0b" * 10_000, example(x=[1])[:-1]):
        with pytest.raises(InvalidArgumentError, match=rf"a serialized tf.train.Example, but record 1 \({len(record)}"):
            parse_example([b"", record], {"x": FixedLenFeature((), "int64", 0)})
    records = [example(id=[i]) for i in range(20)]
    records[15], records[6] = b"\xff", example(id=[0.5])
    with pytest.raises(InvalidArgumentError, match="record 6 holds float32"):  # the first wrong one is named
        parse_example(records, {"id": FixedLenFeature((), "int64")})


def test_bad_arguments() -> None:
    no_bytes: list[Any] = ["text", 3, np.array([b"ab"]), np.empty((1, 1), object), [b"", "text"], [None]]
    for serialized in no_bytes:
        with pytest.raises(SpecError, match="bytes"):
            parse_example(serialized, {"x": VarLenFeature("int64")})
        with pytest.raises(SpecError, match="must get one record as bytes"):
            parse_single_example(serialized, {"x": VarLenFeature("int64")})
    no_features: list[Any] = [{}, None, {"x": "int64"}]
    for features in no_features:
        with pytest.raises(InvalidArgumentError, match="(at least one feature|SparseFeature or RaggedFeature), got"):
            parse_example(b"", features)


def test_parses_what_tensorflow_wrote() -> None:
    records, _ = read_all(real_file("criteo_sample.tr.tfrecords"))
    numbers: dict[str, Feature] = {f"I{i}": FixedLenFeature((), "float32") for i in range(1, 14)}
    categories: dict[str, Feature] = {f"C{i}": FixedLenFeature((), "int64") for i in range(1, 27)}
    parsed = parse_example(records, {"label": FixedLenFeature((), "float32"), **numbers, **categories})
    assert all(column.shape == (160,) for column in parsed.values())
    assert set(parsed["label"].tolist()) == {0.0, 1.0}
    assert parsed["I5"][0] == np.float32(0.005793039)
    assert parsed["C10"][0] == 30


# Example { features { feature { key: "k" value { X_list { value: ... } } } } }, by hand: field numbers and lengths.
INT64 = bytes.fromhex("0a0d 0a0b 0a016b 1206 1a04 0a02ac02")  # [300], packed
FLOAT = bytes.fromhex("0a0f 0a0d 0a016b 1208 1206 0a04 0000c03f")  # [1.5], packed
BYTES = bytes.fromhex("0a0c 0a0a 0a016b 1205 0a03 0a01ff")  # [b"\xff"]
UNPACKED = bytes.fromhex("0a0c 0a0a 0a016b 1205 1a03 08ac02")  # [300] as older writers store it


def test_bytes_by_hand_are_read() -> None:
    parse = example_class().FromString
    assert list(parse(INT64).features.feature["k"].int64_list.value) == [300]
    assert list(parse(UNPACKED).features.feature["k"].int64_list.value) == [300]
    assert list(parse(FLOAT).features.feature["k"].float_list.value) == [1.5]
    assert list(parse(BYTES).features.feature["k"].bytes_list.value) == [b"\xff"]
