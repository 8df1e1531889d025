from __future__ import annotations

import numpy as np
import pytest

from raydist.pipelines.tf_example.batches import ExampleLayout
from tests.pipelines.formats.record_files import example


def matrix(*records: bytes) -> np.ndarray:
    return np.frombuffer(b"".join(records), np.uint8).reshape(len(records), -1)


def test_values_differ_and_the_rest_agrees() -> None:
    record = example(a=[1.5, 2.5], b=[b"xy"], c=[300])
    layout = ExampleLayout.of(record)
    assert layout is not None
    assert {name: (values.kind, len(values)) for name, values in layout.features.items()} == {
        "a": ("float_list", 2),
        "b": ("bytes_list", 1),
        "c": ("int64_list", 1),
    }
    alike = record.replace(b"xy", b"zz")
    for values in layout.features.values():
        assert len(values.decode([record, alike], matrix(record, alike))) == 2
    assert layout.features["b"].decode([record, alike], matrix(record, alike)).tolist() == [[b"xy"], [b"zz"]]
    other_name = record.replace(b"\x01a", b"\x01d")
    assert layout.matches(matrix(record, alike, other_name)).tolist() == [True, True, False]


def test_numbers_of_other_widths_have_another_layout() -> None:
    wide, two = example(x=[300]), example(x=[3, 4])  # both two bytes of values
    layout = ExampleLayout.of(wide)
    assert layout is not None
    assert len(wide) == len(two)
    assert layout.matches(matrix(wide, two)).tolist() == [True, False]


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"hello",
        example(x=[1])[:-1],
        example(x=[1]) + b"\x10\x01",  # an unknown field
        example(x=[1]) + example(y=[1]),  # two Features messages
        example(x=None),
        example(x=[1])[:2] + example(x=[1])[2:].replace(b"x", b"\xff"),  # a name that is no UTF-8
        bytes.fromhex("0a100a0e0a0178120912070a0501ffffff7f") + b"\0",
    ],
)
def test_unusual_records_have_none(record: bytes) -> None:
    assert ExampleLayout.of(record) is None


def test_lists_that_are_not_packed() -> None:
    floats = bytes.fromhex("0a13 0a11 0a0178 120c 120a 0d0000003f 0d0000803f".replace(" ", ""))
    numbers = bytes.fromhex("0a0d 0a0b 0a0178 1206 1a04 0805 0806".replace(" ", ""))
    for record, expected in ((floats, [0.5, 1.0]), (numbers, [5, 6])):
        layout = ExampleLayout.of(record)
        assert layout is not None
        assert layout.features["x"].decode([record], matrix(record)).tolist() == [expected]
