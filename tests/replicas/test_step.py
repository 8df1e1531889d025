from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import Part, PerReplica
from raydist.mirroring.messages import StepPayload
from raydist.replicas.results import pack_result
from raydist.replicas.step import PartSource, StepHeader, address_parts, batch_rows, require_parts, resolve_parts
from raydist.replicas.step_message import GroupResult


class Stored(PerReplica):
    """A leaf whose parts lie in the store: `ref` names replica 0's object, `ref + 1` replica 1's."""

    def __init__(self, ref: int, leaf_index: int, rows: tuple[int, ...] | None = None) -> None:
        super().__init__(())
        self.ref = ref
        self.leaf_index = leaf_index
        self.rows = rows

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        return Part(
            ref=self.ref + rank + (100 if padding and self.rows and not self.rows[rank] else 0),
            leaf_index=self.leaf_index,
        )


class Batch:
    """Stored leaves; a new object each time one is asked for, as when tensors are copied out of the store."""

    absent = False

    def __init__(self, *leaves: str) -> None:
        self._leaves = leaves

    def leaf(self, index: int, place: int = 0) -> list[str]:
        return [self._leaves[index] + "'" * place]


def addressed(values: list[PerReplica], rank: int, *, padding: bool) -> tuple[tuple[PartSource, ...], tuple[Any, ...]]:
    refs: dict[Any, int] = {}
    return address_parts(values, rank, padding=padding, refs=refs), tuple(refs)


def test_a_nest_that_is_another_one_than_before_is_an_error() -> None:
    results: Any = GroupResult(tuple(pack_result(nest, absent=False) for nest in ({"a": 1, "b": 2}, {"b": 1, "c": 2})))
    source = PartSource(0, 0, nest="{'a': '*', 'b': '*'}")
    assert resolve_parts([source], [results]) == [1]
    with pytest.raises(
        InvalidArgumentError, match=r"got \{'a': '\*', 'b': '\*'\} before and \{'b': '\*', 'c': '\*'\} now\."
    ):
        resolve_parts([replace(source, place=1)], [results])


def test_each_object_travels_once() -> None:
    images, labels, other = Stored(10, 0), Stored(10, 1), Stored(20, 0)
    sources, refs = addressed([images, labels, PerReplica([5, 6]), other], 1, padding=True)
    assert refs == (11, 21)
    assert sources == (PartSource(0, 0), PartSource(0, 1), PartSource(None, value=6), PartSource(1, 0))


def test_a_replica_without_rows_gets_the_stand_in() -> None:
    batch = Stored(10, 0, rows=(2, 0))
    assert addressed([batch], 1, padding=True)[1] == (111,)
    assert addressed([batch], 1, padding=False)[1] == (11,)
    assert addressed([batch], 0, padding=True)[1] == (10,)


@pytest.mark.parametrize(
    ("rows", "padding", "expected"),
    [
        ((2, 0), True, [False, True]),
        ((2, 0), False, [False, False]),
        ((0, 0), True, [False, False]),  # nobody has rows to lend
        (None, True, [False, False]),
    ],
)
def test_who_works_on_others_rows(rows: tuple[int, ...] | None, padding: bool, expected: list[bool]) -> None:
    header = StepHeader(0, 0, StepPayload(), rows=rows, padding=padding)
    assert [header.is_padded(rank) for rank in range(2)] == expected


def test_rows_are_those_of_the_first_batch() -> None:
    assert batch_rows([PerReplica([1, 2]), Stored(1, 0, (2, 1)), Stored(2, 0, (3, 3))]) == (2, 1)
    assert batch_rows([PerReplica([1, 2])]) is None


def test_one_leaf_given_twice_is_one_value_beside_others() -> None:
    sources = (PartSource(0, 0), PartSource(0, 0), PartSource(0, 1), PartSource(None, value="v"))
    first, second, third, fourth = resolve_parts(sources, [Batch("a", "b")])
    assert first is second
    assert (third, fourth) == (["b"], "v")


def test_parts_come_from_objects_by_leaf_and_from_the_header_by_value() -> None:
    sources = [PartSource(1, 0), PartSource(None, value=7), PartSource(0, 1)]
    assert resolve_parts(sources, [Batch("a", "b"), Batch("c")]) == [["c"], 7, ["b"]]


def test_one_object_may_hold_several_steps() -> None:
    sources = [PartSource(0, 0), PartSource(0, 0, place=2), PartSource(0, 0, place=2)]
    first, third, again = resolve_parts(sources, [Batch("a")])
    assert (first, third) == (["a"], ["a''"])
    assert again is third


def test_the_place_in_an_object_travels_with_its_source() -> None:
    class Placed(Stored):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            return Part(ref=self.ref, leaf_index=self.leaf_index, place=3)

    assert addressed([Placed(10, 0), Stored(10, 1)], 0, padding=True) == (
        (PartSource(0, 0, place=3), PartSource(0, 1)),
        (10,),
    )


def test_a_header_travels() -> None:
    header = StepHeader(
        step=3, generation=1, payload=StepPayload(function=b"f"), sources=(PartSource(0, 1),), rows=(2, 0)
    )
    assert pickle.loads(pickle.dumps(header)) == header


def test_parts_are_moved_unless_they_are_to_stay_on_the_host() -> None:
    class OnHost(Stored):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            return replace(super().part_on(rank), on_host=True)

    values = [Stored(10, 0), OnHost(10, 0), PerReplica([["x"], ["y"]])]
    sources, _ = addressed(list(values), 0, padding=True)
    moved = resolve_parts(sources, [Batch("a")], lambda part: [*part, "moved"])
    assert moved == [["a", "moved"], ["a"], ["x", "moved"]]


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_value_of_another_number_of_replicas_is_no_argument(num_replicas: int) -> None:
    require_parts([PerReplica([5, 6])], 2)
    with pytest.raises(InvalidArgumentError, match=f"each of the {num_replicas} replicas, got one with 2"):
        require_parts([PerReplica([5] * num_replicas), PerReplica([5, 6])], num_replicas)
