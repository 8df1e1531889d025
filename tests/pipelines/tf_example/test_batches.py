from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import InvalidArgumentError
from raydist.pipelines.tf_example.batches import ExampleLayout, fill_alike
from raydist.pipelines.tf_example.features import FixedLenFeature, VarLenFeature
from raydist.pipelines.tf_example.outputs import Feature, FeatureColumn, FixedColumn
from raydist.pipelines.tf_example.parse import parse_example, parse_single_example
from tests.pipelines.formats.record_files import example

FEATURES: dict[str, Feature] = {
    "id": FixedLenFeature((), "int64"),
    "pair": FixedLenFeature((2,), "float32"),
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
    records = [example(id=[i], pair=[float(len(n)), 0.5], name=[n], ids=ids or None) for i, n, ids in rows]
    parsed = parse_example(records, FEATURES)
    batch = [{name: np.asarray(parsed[name][i]).tolist() for name in FEATURES} for i in range(len(records))]
    assert batch == one_by_one(records)


def test_records_alike_are_filled_at_once_and_others_left() -> None:
    def columns(num_records: int) -> list[FeatureColumn]:
        return [FixedColumn("id", FixedLenFeature((), "int64"), num_records)]

    records = [example(id=[i]) for i in range(20)]
    records[3] = example(id=[3, 4])  # another number of values
    records[11] = b"x" * len(records[0])
    records[12] = example(ix=[])
    filled = columns(20)
    assert fill_alike(records, filled) == [3, 11, 12]
    assert filled[0].array()[[0, 4, 19]].tolist() == [0, 4, 19]
    assert fill_alike(records[:7], columns(7)) == list(range(7))
    assert fill_alike([*records[:9], None], columns(10)) == list(range(10))


def test_mutated_records_are_never_taken_for_others() -> None:
    draw = random.Random(5)
    intact = example(id=[70_000], pair=[0.5, 1.5], name=[b"ab"], ids=[1, 300])
    mutants = []
    for _ in range(600):
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
    assert 100 < sum(isinstance(one, str) for one in alone) < 500


def matrix(*records: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)


def layout_of(record: bytes) -> ExampleLayout:
    layout = ExampleLayout.of(record)
    assert layout is not None
    return layout


def test_values_differ_and_the_rest_agrees() -> None:
    record = example(a=[1.5, 2.5], b=[b"xy"], c=[300])
    layout = layout_of(record)
    alike, other_name = record.replace(b"xy", b"zz"), record.replace(b"\x01a", b"\x01d")
    found = {name: values.decode([record, alike], matrix(record, alike)) for name, values in layout.features.items()}
    assert {name: values.tolist() for name, values in found.items()} == {
        "a": [[1.5, 2.5]] * 2,
        "b": [[b"xy"], [b"zz"]],
        "c": [[300]] * 2,
    }
    assert layout.matches(matrix(record, alike, other_name)).tolist() == [True, True, False]
    wide, two = example(x=[300]), example(x=[3, 4])  # both two bytes of values
    assert layout_of(wide).matches(matrix(wide, two)).tolist() == [True, False]
    floats = bytes.fromhex("0a13 0a11 0a0178 120c 120a 0d0000003f 0d0000803f")  # not packed
    numbers = bytes.fromhex("0a0d 0a0b 0a0178 1206 1a04 0805 0806")
    for plain, expected in ((floats, [0.5, 1.0]), (numbers, [5, 6])):
        assert layout_of(plain).features["x"].decode([plain], matrix(plain)).tolist() == [expected]


def test_unusual_records_have_none() -> None:
    unusual = [
        b"",
        b"hello",
        example(x=[1])[:-1],
        example(x=[1]) + b"\x10\x01",  # an unknown field
        example(x=[1]) + example(y=[1]),  # two Features messages
        example(x=None),
        example(x=[1])[:2] + example(x=[1])[2:].replace(b"x", b"\xff"),  # a name that is no UTF-8
        bytes.fromhex("0a100a0e0a0178120912070a0501ffffff7f") + b"\0",
    ]
    assert [ExampleLayout.of(record) for record in unusual] == [None] * 8
