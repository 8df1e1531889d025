"""Messages from the driver to replicas: headers, parts of batches, and objects that replicas keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.values import Part, PerReplica, ReduceOp
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.replicas.results import pack_result
from raydist.replicas.step import (
    PartSource,
    StepHeader,
    StepHeaders,
    address_parts,
    require_parts,
    resolve_parts,
)
from raydist.replicas.step_message import GroupResult, KeptObjects, PlannedStep, SentObjects, address_steps
from tests.summary.reading import record_of


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


def test_one_leaf_given_twice_is_one_value_beside_others() -> None:
    sources = (PartSource(0, 0), PartSource(0, 0), PartSource(0, 1), PartSource(None, value="v"))
    first, second, third, fourth = resolve_parts(sources, [Batch("a", "b")])
    assert first is second
    assert (third, fourth) == (["b"], "v")


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


class PlacedPart(PerReplica):
    """A leaf at a place of an object that holds several steps: one object a replica."""

    def __init__(self, name: str, leaf_index: int, place: int) -> None:
        super().__init__(())
        self.name, self.leaf_index, self.place = name, leaf_index, place

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        return Part(ref=f"{self.name}{rank}", leaf_index=self.leaf_index, place=self.place)


def planned(step: int, *parts: PerReplica) -> PlannedStep:
    return PlannedStep(StepHeader(step, 0, StepPayload(function=b"f")), parts)


def test_an_object_that_holds_several_steps_travels_once() -> None:
    steps = [
        planned(5, PlacedPart("a", 0, 0), PlacedPart("a", 1, 0)),
        planned(6, PlacedPart("a", 0, 1)),
        planned(7, PlacedPart("b", 0, 0)),
    ]
    (_, first), (message, second) = address_steps(steps, [SentObjects(), SentObjects()])
    assert (first, second) == (["a0", "b0"], ["a1", "b1"])
    assert message.sources == (
        (PartSource(0, 0), PartSource(0, 1)),
        (PartSource(0, 0, place=1),),
        (PartSource(1, 0),),
    )


def test_every_part_is_asked_for_where_one_is_enough_to_know() -> None:
    """Asking for a part sends or awaits it: before the step that uses it is sent."""
    asked: list[str] = []

    class Asked(PlacedPart):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            asked.append(self.name)
            return super().part_on(rank, padding=padding)

    assert planned(0, Asked("a", 0, 0), PerReplica([1, 2]), Asked("b", 0, 0)).carries_values
    assert asked == ["a", "b"]


def test_summaries_are_dropped_once_they_were_written() -> None:
    with_one = pack_result(1.0, absent=False, summaries=(record_of("loss", 0.5),))
    without = pack_result(1.0, absent=False)
    assert with_one.num_bytes > without.num_bytes
    assert with_one.without_summaries() == without
    assert without.without_summaries() is without


def following(headers: StepHeaders, **options: Any) -> StepHeader:
    return headers.following(
        StepPayload(digest=b"step"), RunOptions(**options), ReduceOp.SUM, generation=2, summaries=None
    )


@pytest.mark.parametrize(
    ("rows", "padding", "expected"),
    [
        ((2, 0), True, [False, True]),
        ((2, 0), False, [False, False]),
        ((0, 0), True, [False, False]),  # nobody has rows to lend
        (None, True, [False, False]),
    ],
)
def test_replicas_without_rows_are_padded(rows: tuple[int, ...] | None, padding: bool, expected: list[bool]) -> None:
    header = StepHeader(0, 0, StepPayload(), rows=rows, padding=padding)
    assert [header.is_padded(rank) for rank in range(2)] == expected


def test_steps_that_only_pass_gradients_on_need_no_count_of_them() -> None:
    headers = StepHeaders()
    following(headers)
    assert not headers.looked
    following(headers, on_nonfinite="skip")
    following(headers)
    assert headers.looked


def test_steps_are_numbered_and_say_how_they_are_run() -> None:
    torch.manual_seed(11)
    headers = StepHeaders()
    first = following(headers)
    second = following(headers, empty_batch="zero_rows", param_sync_every=True)
    assert (first.step, second.step, headers.count) == (0, 1, 2)
    assert (first.padding, second.padding) == (True, False)
    assert (first.param_sync_every, second.param_sync_every) == (RunOptions().param_sync_every, True)
    assert (second.generation, second.gradient_reduce_op, second.seed[0]) == (2, ReduceOp.SUM, 11)


@pytest.fixture
def _nothing_restored() -> Iterator[None]:
    """Afterwards: strategies of other tests in this process would go on from it."""
    yield
    RESTORED_REPLICAS.restore([])


@pytest.mark.usefixtures("_nothing_restored")
def test_random_states_that_were_restored_go_along_once() -> None:
    headers = StepHeaders()
    following(headers)
    RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
    assert following(headers).random == ((b"one",), (b"two",))
    assert following(headers).random == ()


@pytest.mark.usefixtures("_nothing_restored")
def test_a_program_that_seeds_torch_after_a_restore_begins_there() -> None:
    headers = StepHeaders()
    RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
    torch.manual_seed(torch.initial_seed())
    assert following(headers).random == ()
    RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
    assert following(headers).random == ((b"one",), (b"two",))


@given(st.lists(st.one_of(st.none(), st.lists(st.sampled_from("abcdef"), unique=True, max_size=5)), max_size=30))
def test_both_sides_agree_on_any_sequence_and_keep_little(messages: list[list[str] | None]) -> None:
    sent, kept = SentObjects(), KeptObjects()
    for refs in messages:
        if refs is None:
            sent.forget()
            continue
        numbers, objects = sent.send(refs)
        assert kept.receive(numbers, objects) == refs
        assert len(kept._objects) <= 2
        assert len(sent._numbers) <= 2


def test_a_lost_message_is_noticed() -> None:
    sent, kept = SentObjects(), KeptObjects()
    sent.send("a")
    with pytest.raises(FailedPreconditionError, match=r"\[0\] are not here and 0 came along"):
        kept.receive(*sent.send("a"))
    sent.forget()
    assert kept.receive(*sent.send("a")) == ["a"]
