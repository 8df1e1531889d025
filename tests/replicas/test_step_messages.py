"""What travels between the driver and replicas: headers, parts of batches, objects that replicas keep, results."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.core.errors import SpecError
from raydist.core.nest import LEAF, NOTHING
from raydist.core.values import Part, PerReplica, ReduceOp
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.pickling.torch_objects import PendingTensor
from raydist.replicas import results
from raydist.replicas.results import ReturnedStructures, pack_result
from raydist.replicas.step import (
    PartSource,
    StepHeader,
    StepHeaders,
    address_parts,
    resolve_parts,
)
from raydist.replicas.step_message import GroupResult, KeptObjects, PlannedStep, SentObjects, address_steps


class Stored(PerReplica):
    """A leaf whose parts lie in the store, one object a replica, which may hold several steps."""

    def __init__(self, name: str, leaf_index: int = 0, place: int = 0, rows: tuple[int, ...] = ()) -> None:
        super().__init__(())
        self.name, self.leaf_index, self.place, self._rows = name, leaf_index, place, rows

    @property
    def rows(self) -> tuple[int, ...]:
        return self._rows

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        name = f"padding of {self.name}" if padding and self.rows and not self.rows[rank] else self.name
        return Part(ref=f"{name}{rank}", leaf_index=self.leaf_index, place=self.place)


def test_parts_are_moved_unless_they_are_to_stay_on_the_host() -> None:
    class OnHost(Stored):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            return replace(super().part_on(rank), on_host=True)

    refs: dict[Any, int] = {}
    values = [Stored("a"), OnHost("a"), PerReplica([["x"], ["y"]]), Stored("a"), Stored("b", rows=(0, 2))]
    sources = address_parts(values, 0, padding=True, refs=refs)
    assert refs == {"a0": 0, "padding of b0": 1}
    for rank, padding, expected in ((1, True, "b1"), (0, False, "b0")):
        others: dict[Any, int] = {}
        address_parts(values, rank, padding=padding, refs=others)
        assert expected in others
    stored: list[Any] = [GroupResult((pack_result(name, absent=False),)) for name in ("a", "b")]
    moved = resolve_parts(sources, stored, lambda part: [*part, "moved"])
    assert moved == [["a", "moved"], "a", ["x", "moved"], ["a", "moved"], ["b", "moved"]]
    assert moved[0] is moved[3], "one leaf given twice is one value"


def planned(step: int, *parts: PerReplica) -> PlannedStep:
    return PlannedStep(StepHeader(step, 0, StepPayload(function=b"f")), parts)


def test_every_part_is_asked_for_before_a_step_is_sent() -> None:
    asked: list[str] = []

    class Asked(Stored):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            asked.append(self.name)
            return super().part_on(rank, padding=padding)

    assert planned(0, Asked("a"), PerReplica([1, 2]), Asked("b")).carries_values
    assert asked == ["a", "b"]


def test_an_object_that_holds_several_steps_travels_once() -> None:
    steps = [
        planned(5, Stored("a", 0, 0), Stored("a", 1, 0)),
        planned(6, Stored("a", 0, 1)),
        planned(7, Stored("b", 0, 0)),
    ]
    (_, first), (message, second) = address_steps(steps, [SentObjects(), SentObjects()]).values()
    assert (first, second) == (["a0", "b0"], ["a1", "b1"])
    assert message.sources == (
        (PartSource(0, 0), PartSource(0, 1)),
        (PartSource(0, 0, place=1),),
        (PartSource(1, 0),),
    )


def following(headers: StepHeaders, **options: Any) -> StepHeader:
    return headers.following(
        StepPayload(digest=b"step"), RunOptions(**options), ReduceOp.SUM, generation=2, summaries=None
    )


def test_random_states_that_were_restored_go_along_once() -> None:
    headers = StepHeaders()
    following(headers)
    try:
        RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
        assert following(headers).random == ((b"one",), (b"two",))
        assert following(headers).random == ()
        RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
        torch.manual_seed(torch.initial_seed())  # a program that seeds torch after a restore begins there
        assert following(headers).random == ()
        RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
        assert following(headers).random == ((b"one",), (b"two",))
    finally:
        RESTORED_REPLICAS.restore([])  # strategies of other tests in this process would go on from it


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


def test_tensors_come_back_detached_private_and_equal() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    result = pack_result({"a": weight * 2, "b": (3, "x")}, absent=False)
    leaf = result.leaf(0)
    assert leaf.tolist() == [2.0, 4.0]
    assert not leaf.requires_grad
    leaf.zero_()
    assert result.leaf(0).tolist() == [2.0, 4.0]
    assert result.leaf(1) == 3


def test_an_array_that_the_next_step_writes_to_is_this_steps() -> None:
    """Steps that share a message are all done before the first one's result travels."""
    for dtype in ("int64", "object"):
        counts = np.zeros(2, dtype)
        result = pack_result(counts, absent=False)
        counts += 1
        assert result.leaf(0).tolist() == [0, 0]


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SpecError, match="got lock at 'b'"):
        pack_result({"a": 1, "b": threading.Lock()}, absent=False)


def test_the_host_waits_for_tensors_of_a_gpu_once_they_are_to_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    def begin(tensor: torch.Tensor) -> PendingTensor:
        def wait() -> torch.Tensor:
            read.append(tensor.item())
            return tensor

        return PendingTensor(wait)

    monkeypatch.setattr(results, "begin_packing", begin)
    sent = [pack_result({"loss": torch.tensor(float(step)), "step": step}, absent=False) for step in range(3)]
    assert read == []
    there = [result.arrived() for result in sent]
    assert read == [0.0, 1.0, 2.0]
    assert [result.leaf(0).item() for result in there] == [0.0, 1.0, 2.0]
    assert [result.leaf(1) for result in there] == [0, 1, 2]
    assert there[0].arrived() is there[0]


class Step:
    def run(self, x: int) -> Any: ...
    def declared(self) -> None: ...


def test_the_structure_of_the_last_result_of_a_function_is_expected_next() -> None:
    returned, step = ReturnedStructures(), Step()
    assert returned.expected(step.run) is None
    for nest in ({"a": 1}, (1, 2)):
        result = pack_result(nest, absent=False)
        returned.learn(step.run, result)
        assert returned.expected(step.run) == result.structure  # a bound method is another object each time
    assert returned.expected(Step().run) is None
    for declared in ("None", None):
        Step.declared.__annotations__["return"] = declared
        assert returned.expected(Step().declared) is NOTHING
    returned.learn(step.run, pack_result(None, absent=False))
    assert returned.expected(step.run) is NOTHING
    returned.learn(step.run, pack_result((1, None), absent=False))  # which may be a value next time
    assert returned.expected(step.run) is None


def test_functions_are_not_kept_alive_and_an_address_that_is_used_again_is_another_function() -> None:
    returned = ReturnedStructures()
    functions = [eval("lambda: None") for _ in range(1100)]  # new ones
    for fn in functions:
        returned.learn(fn, pack_result(1, absent=False))
    assert [returned.expected(fn) for fn in functions] == [None] * 76 + [LEAF] * 1024
    seen = weakref.ref(fn)
    del fn, functions
    assert seen() is None
    assert all(returned.expected(eval("lambda: None")) is None for _ in range(1100))
