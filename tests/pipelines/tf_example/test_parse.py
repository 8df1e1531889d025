"""Serialized `tf.train.Example`s, one by one and many at once, and kinds of features."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.pipelines.tf_example.features import (
    FixedLenFeature,
    FixedLenSequenceFeature,
    SparseFeature,
    SparseTensorValue,
    VarLenFeature,
)
from raydist.pipelines.tf_example.outputs import Feature, row_lengths
from raydist.pipelines.tf_example.parse import parse_example, parse_single_example
from raydist.pipelines.tf_example.ragged_features import RaggedFeature, RaggedTensorValue
from tests.pipelines.formats.record_files import example


@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1),
            st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4),
            st.lists(st.binary(max_size=5), max_size=3),
        ),
        max_size=5,
    )
)
def test_what_was_written_is_parsed(rows: list[tuple[int, list[float], list[bytes]]]) -> None:
    features: dict[str, Feature] = {
        "i": FixedLenFeature((), "int64"),
        "f": FixedLenFeature((2, 2), "float32"),
        "n": FixedLenFeature((1,), bytes),
        "b": VarLenFeature(bytes),
        "s": VarLenFeature("float32"),
    }
    records = [example(i=[i], f=f, n=[b"n%d" % len(b)], b=b or None, s=f[: len(b)] or None) for i, f, b in rows]
    parsed = parse_example(np.array(records, object) if records else [], features)
    assert (parsed["i"].tolist(), parsed["i"].dtype) == ([i for i, _, _ in rows], np.int64)
    assert (parsed["f"].tolist(), parsed["f"].dtype) == ([[f[:2], f[2:]] for _, f, _ in rows], np.float32)
    assert (parsed["n"].tolist(), parsed["n"].shape) == ([[b"n%d" % len(b)] for _, _, b in rows], (len(rows), 1))
    assert [row.tolist() for row in parsed["b"]] == [b for _, _, b in rows]
    assert [(row.tolist(), row.dtype) for row in parsed["s"]] == [(f[: len(b)], np.float32) for _, f, b in rows]


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
    for wanted, held in numbers:
        with pytest.raises(
            InvalidArgumentError,
            match=rf"Feature 'x' must hold {np.prod(wanted, dtype=int)} values \(shape .*\), "
            rf"but record 0 holds {len(held)}\. Use VarLen",
        ):
            parse_example(example(x=held), {"x": FixedLenFeature(wanted, "int64", default_value=0)})
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


FEATURES: dict[str, Feature] = {
    "id": FixedLenFeature((), "int64"),
    "floats": FixedLenFeature((2,), "float32"),
    "name": FixedLenFeature((), bytes),
    "ids": VarLenFeature("int64"),
}


def one_by_one(records: Sequence[bytes]) -> list[Any]:
    """What every record gives by itself; the kind of its error where it has one."""
    found: list[Any] = []
    for record in records:
        try:
            found.append(
                {name: np.asarray(value).tolist() for name, value in parse_single_example(record, FEATURES).items()}
            )
        except InvalidArgumentError as error:
            found.append(str(error).replace("record 0", "a record"))
    return found


@given(
    st.lists(
        st.tuples(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=2), st.lists(st.integers(0, 300), max_size=2)),
        min_size=8,
        max_size=40,
    )
)
def test_many_records_give_what_each_gives_alone(rows: list[tuple[int, bytes, list[int]]]) -> None:
    records = [example(id=[i], floats=[float(len(n)), 0.5], name=[n], ids=ids or None) for i, n, ids in rows]
    parsed = parse_example(records, FEATURES)
    batch = [{name: np.asarray(parsed[name][i]).tolist() for name in FEATURES} for i in range(len(records))]
    assert batch == one_by_one(records)


def test_mutated_records_are_never_taken_for_others() -> None:
    draw = random.Random(5)
    intact = example(id=[70_000], floats=[0.5, 1.5], name=[b"ab"], ids=[1, 300])
    mutants = []
    for _ in range(300):
        content = bytearray(intact)
        for _ in range(draw.randrange(1, 3)):
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        mutants.append(bytes(content))
    alone = one_by_one(mutants)
    for number, (mutant, expected) in enumerate(zip(mutants, alone, strict=True)):
        batch = [intact] * 9 + [mutant]
        if isinstance(expected, str):
            with pytest.raises(InvalidArgumentError) as caught:
                parse_example(batch, FEATURES)
            assert str(caught.value).replace("record 9", "a record") == expected, number
        else:
            parsed = parse_example(batch, FEATURES)
            found = {name: np.asarray(parsed[name][9]).tolist() for name in FEATURES}
            assert str(found) == str(expected), number  # as text: NaN is not equal to itself
    assert 50 < sum(isinstance(one, str) for one in alone) < 280


def test_values_that_older_writers_did_not_pack() -> None:
    floats = bytes.fromhex("0a13 0a11 0a0178 120c 120a 0d0000003f 0d0000803f")
    numbers = bytes.fromhex("0a0d 0a0b 0a0178 1206 1a04 0805 0806")
    for record, dtype, expected in ((floats, "float32", [0.5, 1.0]), (numbers, "int64", [5, 6])):
        for count in (1, 20):
            found = parse_example([record] * count, {"x": FixedLenFeature((2,), dtype)})["x"]
            assert found.tolist() == [expected] * count


BAD_FEATURES: list[tuple[Callable[[], object], str]] = [
    (
        lambda: FixedLenFeature((2,), "int64", [1, 2, 3]),
        "default_value must be one .* value or an array of shape .*, got ",
    ),
    (lambda: FixedLenFeature((), "int64", 1.5), "default_value must be one"),
    (lambda: FixedLenFeature((), "int64", b"x"), "default_value must be one"),
    (lambda: FixedLenFeature((), bytes, "text"), "default_value must be one"),
    (lambda: FixedLenFeature((2,), bytes, [b"a", 1]), "default_value must be one"),
    (lambda: FixedLenFeature((None,), "int64"), "must hold only numbers >= 0, got .* Use VarLenFeature"),
    (lambda: FixedLenFeature((-1,), "int64"), "must hold only numbers >= 0"),
    (lambda: FixedLenFeature((2, "a"), "int64"), "must hold only numbers >= 0"),
    (lambda: FixedLenFeature(None, "int64"), "must hold only numbers >= 0"),
    (lambda: FixedLenSequenceFeature((), "int64"), "must have allow_missing=True"),
    (lambda: FixedLenSequenceFeature((None,), "int64", allow_missing=True), r"numbers >= 1, got \(None,\)"),
    (lambda: FixedLenSequenceFeature((0,), "int64", allow_missing=True), r"numbers >= 1, got \(0,\)"),
    (lambda: FixedLenSequenceFeature((), "int64", True, "x"), "default_value must be one int64 value"),
    (lambda: FixedLenSequenceFeature((), "float64", True), "must be int64, float32 or bytes"),
    (lambda: SparseFeature(["a", "b"], "v", "int64", 3), r"got 1 sizes \(3\) and 2 keys"),
    (lambda: SparseFeature([], "v", "int64", []), "got 0 sizes"),
    (lambda: SparseFeature("a", "v", "int64", -1), "numbers >= 1, got -1"),
    (lambda: SparseFeature("a", "v", "str", 1), "must be int64, float32 or bytes"),
    (lambda: RaggedFeature("int8"), "must be int64, float32 or bytes"),
    (lambda: RaggedFeature("int64", row_splits_dtype="uint8"), "must be int32 or int64, got 'uint8'"),
    (lambda: RaggedFeature("int64", partitions=["lengths"]), r"made by RaggedFeature.RowSplits.*got \['lengths'\]"),  # type: ignore[list-item]
    (lambda: RaggedFeature.UniformRowLength(0), "length >= 1, got 0"),
]


def test_bad_features() -> None:
    for make, message in BAD_FEATURES:
        with pytest.raises(InvalidArgumentError, match=message):
            make()
    others: list[Any] = ["float64", "int32", "bool", str, "str", "float16"]
    for dtype in others:
        for kind in (partial(FixedLenFeature, ()), VarLenFeature):
            with pytest.raises(InvalidArgumentError, match="int64, float32 or bytes .* got .*convert afterwards"):
                kind(dtype)


def test_they_pass_through_a_pipeline() -> None:
    records = [example(i=[n], v=[0.5] * 1, t=[n] * n) for n in range(1, 5)]
    features: dict[str, Feature] = {"s": rd.SparseFeature("i", "v", "float32", 9), "r": rd.RaggedFeature("int64", "t")}
    dataset = rd.Dataset.from_tensor_slices(records).batch(2).map(lambda batch: rd.parse_example(batch, features))
    first, second = dataset.as_numpy_iterator()
    assert isinstance(first["s"], rd.SparseTensorValue)
    assert first["s"].indices.tolist() == [[0, 1], [1, 2]]
    assert isinstance(second["r"], rd.RaggedTensorValue)
    assert second["r"].values.tolist() == [3, 3, 3, 4, 4, 4, 4]


def parse(records: Any, feature: Feature) -> Any:
    return parse_example(records, {"x": feature})["x"]


def test_sequences_are_padded_to_the_longest() -> None:
    records = [example(x=[1, 2, 3, 4]), example(), example(x=[5, 6])]
    pairs = FixedLenSequenceFeature((2,), "int64", allow_missing=True)
    found = parse(records, FixedLenSequenceFeature((2,), "int64", allow_missing=True, default_value=-1))
    assert found.tolist() == [[[1, 2], [3, 4]], [[-1, -1], [-1, -1]], [[5, 6], [-1, -1]]]
    texts = FixedLenSequenceFeature((), bytes, allow_missing=True)
    assert parse([example(x=[b"a"]), example()], texts).tolist() == [[b"a"], [b""]]
    assert parse(records[0], pairs).tolist() == [[1, 2], [3, 4]]
    assert parse([], pairs).shape == (0, 0, 2)
    with pytest.raises(InvalidArgumentError, match=r"a multiple of 2 values .*, but record 1 holds 3"):
        parse([b"", example(x=[1, 2, 3])], pairs)


def test_sparse_features() -> None:
    feature = SparseFeature("i", "v", "float32", 100)
    records = [example(i=[7, 3], v=[0.5, 1.5]), example(), example(i=[99], v=[2.5])]
    found = parse(records, feature)
    assert isinstance(found, SparseTensorValue)
    assert found.indices.tolist() == [[0, 3], [0, 7], [2, 99]]
    assert found.values.tolist() == [1.5, 0.5, 2.5]
    assert found.dense_shape.tolist() == [3, 100]
    alone = parse(records[0], feature)
    assert (alone.indices.tolist(), alone.dense_shape.tolist()) == ([[3], [7]], [100])
    as_given = parse(records[0], SparseFeature("i", "v", "float32", 100, already_sorted=True))
    assert as_given.values.tolist() == [0.5, 1.5]
    nothing = parse([], feature)
    assert (nothing.indices.shape, nothing.values.dtype, nothing.dense_shape.tolist()) == ((0, 2), np.float32, [0, 100])


def test_sparse_features_of_several_dimensions_and_those_that_do_not_fit() -> None:
    record = example(row=[1, 0, 1], column=[0, 2, 1], v=[b"c", b"a", b"d"])
    found = parse([record], SparseFeature(["row", "column"], "v", bytes, [2, 3]))
    assert found.indices.tolist() == [[0, 0, 2], [0, 1, 0], [0, 1, 1]]
    assert found.values.tolist() == [b"a", b"c", b"d"]
    assert found.dense_shape.tolist() == [1, 2, 3]
    wrong: list[tuple[list[Any], list[float], str]] = [
        ([1], [0.5, 1.5], "one index for each value, but record 1 holds 1 in 'i' and 2 values in 'v'"),
        ([4], [0.5], r"indices in \[0, 4\), but record 1 holds 4 .. 4 in 'i'"),
        ([-1], [0.5], r"indices in \[0, 4\), but record 1 holds -1"),
        ([0.5], [0.5], "Feature 'i' must hold int64 values"),
    ]
    for indices, values, message in wrong:
        with pytest.raises(InvalidArgumentError, match=message):
            parse([b"", example(i=indices, v=values)], SparseFeature("i", "v", "float32", 4))


def test_ragged_features() -> None:
    records = [example(x=[1, 2, 3]), example(), example(x=[4])]
    found = parse(records, RaggedFeature("int64"))
    assert isinstance(found, RaggedTensorValue)
    assert found.values.tolist() == [1, 2, 3, 4]
    assert (found.row_splits.tolist(), found.row_splits.dtype) == ([0, 3, 3, 4], np.int32)
    assert parse(records[0], RaggedFeature("int64")).tolist() == [1, 2, 3]
    assert parse([], RaggedFeature("int64", row_splits_dtype="int64")).row_splits.tolist() == [0]
    records = [example(v=[1, 2, 3, 4, 5], inner=[2, 0, 3], outer=[0, 1, 3]), example(), example(v=[6], inner=[1])]
    feature = RaggedFeature("int64", "v", [RaggedFeature.RowSplits("outer"), RaggedFeature.RowLengths("inner")])
    alone = parse(records[0], feature)
    assert (alone.row_splits.tolist(), alone.values.row_splits.tolist()) == ([0, 1, 3], [0, 2, 2, 5])
    assert alone.values.values.tolist() == [1, 2, 3, 4, 5]
    found = parse(records[:2], feature)
    assert (found.row_splits.tolist(), found.values.row_splits.tolist()) == ([0, 2, 2], [0, 1, 3])
    assert found.values.values.row_splits.tolist() == [0, 2, 2, 5]
    unfit = r"row_splits that fit its 1 values, but record 2 has \[\] in 'outer'"
    with pytest.raises(InvalidArgumentError, match=unfit):
        parse(records, feature)
    uniform = parse(records[0], RaggedFeature("int64", "outer", [RaggedFeature.UniformRowLength(3)]))
    assert (uniform.values.tolist(), uniform.row_splits.tolist()) == ([0, 1, 3], [0, 3])


def test_all_kinds_of_partitions_say_the_same() -> None:
    kinds = [
        (RaggedFeature.RowSplits("k"), [0, 2, 2, 5]),
        (RaggedFeature.RowLengths("k"), [2, 0, 3]),
        (RaggedFeature.RowStarts("k"), [0, 2, 2]),
        (RaggedFeature.RowLimits("k"), [2, 2, 5]),
        (RaggedFeature.ValueRowIds("k"), [0, 0, 2, 2, 2]),
    ]
    for partition, numbers in kinds:
        assert row_lengths(partition, np.array(numbers), 5).tolist() == [2, 0, 3]
        assert row_lengths(partition, np.array([], np.int64), 0).tolist() == []
        with pytest.raises(ValueError, match="they "):
            row_lengths(partition, np.array(numbers), 4 if partition.kind != "row_starts" else 1)
    assert row_lengths(RaggedFeature.UniformRowLength(2), np.array([]), 6).tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="they cover 4 values"):
        row_lengths(RaggedFeature.UniformRowLength(2), np.array([]), 5)
    wrong = [
        (RaggedFeature.RowSplits("k"), [1, 5], "first must be 0"),
        (RaggedFeature.RowSplits("k"), [0, 6, 5], "must ascend"),
        (RaggedFeature.RowLengths("k"), [-1, 6], "must ascend"),
        (RaggedFeature.ValueRowIds("k"), [1, 0, 0, 0, 0], "must be >= 0 and ascend"),
        (RaggedFeature.ValueRowIds("k"), [0, 0, 0, 0, 2**62], "too many empty ones"),
    ]
    for partition, numbers, message in wrong:
        with pytest.raises(ValueError, match=message):
            row_lengths(partition, np.array(numbers), 5)
