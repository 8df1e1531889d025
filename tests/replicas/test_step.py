from __future__ import annotations

import pickle

from raydist.replicas.step import PartSource, StepHeader, resolve_parts


class Batch:
    """Stored leaves; a new object each time one is asked for, as when tensors are copied out of the store."""

    absent = False

    def __init__(self, *leaves: str) -> None:
        self._leaves = leaves

    def leaf(self, index: int) -> list[str]:
        return [self._leaves[index]]


def test_parts_come_from_objects_by_leaf_and_from_the_header_by_value() -> None:
    sources = [PartSource(1, 0), PartSource(None, value=7), PartSource(0, 1)]
    assert resolve_parts(sources, [Batch("a", "b"), Batch("c")]) == [["c"], 7, ["b"]]


def test_one_leaf_given_twice_is_one_object() -> None:
    first, second, other = resolve_parts([PartSource(0, 0), PartSource(0, 0), PartSource(0, 1)], [Batch("a", "a")])
    assert first is second
    assert first is not other


def test_a_header_travels() -> None:
    header = StepHeader(step=3, generation=1, shipment=b"f", sources=(PartSource(0, 1),), rows=(2, 0))
    assert pickle.loads(pickle.dumps(header)) == header
