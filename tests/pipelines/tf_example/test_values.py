from __future__ import annotations

import numpy as np
import pytest

from raydist.pipelines.tf_example.values import Bytes, Floats, Integers, Values

RECORD = bytes.fromhex("ff 0000003f 0000803f ac02 05 ffffffffffffffffff01")
MATRIX = np.frombuffer(RECORD * 2, np.uint8).reshape(2, -1)


@pytest.mark.parametrize(
    ("values", "expected", "free"),
    [
        (Bytes(((0, 1), (9, 9), (9, 11))), [b"\xff", b"", b"\xac\x02"], "00 ffffffff ffffffff 0000 ff" + "ff" * 10),
        (Floats((1, 5)), [0.5, 1.0], "ff 00000000 00000000 ffff ff" + "ff" * 10),
        (Floats((5, 1)), [1.0, 0.5], "ff 00000000 00000000 ffff ff" + "ff" * 10),
        (Floats(()), [], "ff" * 22),
        (Integers((9, 11), (2, 1)), [300, 5], "ff" * 9 + "8080 80" + "ff" * 10),
        (Integers((12,), (10,)), [-1], "ff" * 12 + "80" * 9 + "fe"),
        (Integers((11,), (1,)), [5], "ff" * 11 + "80" + "ff" * 10),
        (Integers((), ()), [], "ff" * 22),
    ],
)
def test_values_and_their_free_bits(values: Values, expected: list[object], free: str) -> None:
    found = values.decode([RECORD, RECORD], MATRIX)
    assert found.tolist() == [expected, expected]
    assert len(values) == len(expected)
    mask = np.full(len(RECORD), 0xFF, np.uint8)
    values.free_bits(mask)
    assert mask.tobytes() == bytes.fromhex(free)
