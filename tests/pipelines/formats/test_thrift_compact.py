from __future__ import annotations

import pytest

from raydist.pipelines.formats.thrift_compact import read_struct

END = b"\x00"


def field(step: int, kind: int, value: bytes = b"") -> bytes:
    return bytes([step << 4 | kind]) + value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (field(1, 1), {1: True}),
        (field(2, 2), {2: False}),
        (field(1, 5, b"\x0e"), {1: 7}),
        (field(1, 6, b"\x0f"), {1: -8}),
        (field(1, 4, b"\xac\x02"), {1: 150}),
        (bytes([5, 40]) + b"\x02", {20: 1}),  # a number of its own, not a step
        (field(1, 8, b"\x02ab"), {1: b"ab"}),
        (field(1, 7, bytes(8)) + field(1, 1), {1: None, 2: True}),
        (field(1, 9, b"\x25\x02\x04"), {1: [1, 2]}),
        (field(1, 9, b"\xf5\x10" + b"\x02" * 16), {1: [1] * 16}),
        (field(1, 9, b"\x21\x01\x02") + field(1, 1), {1: [None, None], 2: True}),
        (field(1, 12, field(3, 1) + END), {1: {3: True}}),
        (field(1, 11, b"\x01\x85\x01a\x02") + field(1, 1), {1: None, 2: True}),
        (field(1, 11, b"\x00"), {1: None}),
    ],
)
def test_values(value: bytes, expected: object) -> None:
    assert read_struct(value + END) == expected


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "too early"),
        (field(1, 5), "too early"),
        (field(1, 8, b"\x05ab") + END, "5 bytes"),
        (field(1, 9, b"\xf5\xff\xff\xff\x7f"), "bytes, but only"),  # 268 million numbers are not made
        (field(1, 5, b"\x02") + bytes([5, 2, 2]) + END, "twice"),
        (field(1, 14) + END, "unknown kind"),
        (field(1, 5, b"\xff" * 10 + b"\x01") + END, "64 bits"),
        (field(1, 12) * 100_000, "deep"),
        (field(1, 9, b"\x19" * 100_000), "deep"),
    ],
)
def test_what_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_struct(data)
