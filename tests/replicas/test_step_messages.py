"""What travels between the driver and replicas: headers, parts of batches, objects that replicas keep, results."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.context.strategy_values import gather, local_results, reduce
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError, SpecError
from raydist.core.nest import LEAF, NOTHING, flatten
from raydist.core.values import Part, PerReplica, ReduceOp
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.pickling.torch_objects import PendingTensor
from raydist.replicas import results
from raydist.replicas.batch_rows import BatchRows, MergedValue, value_on
from raydist.replicas.results import ResultLeaf, ReturnedStructures, StepResult, StepValues, pack_result
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
    """A leaf whose parts lie in the store, one object a replica, which may hold several steps."""

    def __init__(self, name: str, leaf_index: int = 0, place: int = 0, rows: tuple[int, ...] = ()) -> None:
        super().__init__(())
        self.name, self.leaf_index, self.place, self.rows = name, leaf_index, place, rows

    def part_on(self, rank: int, *, padding: bool = False) -> Part:
        name = f"padding of {self.name}" if padding and self.rows and not self.rows[rank] else self.name
        return Part(ref=f"{name}{rank}", leaf_index=self.leaf_index, place=self.place)


def test_a_nest_that_is_another_one_than_before_is_an_error() -> None:
    results: Any = GroupResult(tuple(pack_result(nest, absent=False) for nest in ({"a": 1, "b": 2}, {"b": 1, "c": 2})))
    source = PartSource(0, 0, nest="{'a': '*', 'b': '*'}")
    assert resolve_parts([source], [results]) == [1]
    with pytest.raises(
        InvalidArgumentError, match=r"got \{'a': '\*', 'b': '\*'\} before and \{'b': '\*', 'c': '\*'\} now\."
    ):
        resolve_parts([replace(source, place=1)], [results])


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


def test_a_value_of_another_number_of_replicas_is_no_argument() -> None:
    require_parts([PerReplica([5, 6])], 2)
    for num_replicas in (1, 3):
        with pytest.raises(InvalidArgumentError, match=f"each of the {num_replicas} replicas, got one with 2"):
            require_parts([PerReplica([5] * num_replicas), PerReplica([5, 6])], num_replicas)


def planned(step: int, *parts: PerReplica) -> PlannedStep:
    return PlannedStep(StepHeader(step, 0, StepPayload(function=b"f")), parts)


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


def test_every_part_is_asked_for_where_one_is_enough_to_know() -> None:
    """Asking for a part sends or awaits it: before the step that uses it is sent."""
    asked: list[str] = []

    class Asked(Stored):
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


def test_replicas_without_rows_are_padded() -> None:
    for rows, padding, expected in (
        ((2, 0), True, [False, True]),
        ((2, 0), False, [False, False]),
        ((0, 0), True, [False, False]),  # nobody has rows to lend
        (None, True, [False, False]),
    ):
        header = StepHeader(0, 0, StepPayload(), rows=rows, padding=padding)
        assert [header.is_padded(rank) for rank in range(2)] == expected


def test_steps_are_numbered_and_say_how_they_are_run() -> None:
    torch.manual_seed(11)
    headers = StepHeaders()
    first = following(headers)
    second = following(headers, empty_batch="zero_rows", param_sync_every=True)
    assert (first.step, second.step, headers.count) == (0, 1, 2)
    assert (first.padding, second.padding) == (True, False)
    assert (first.param_sync_every, second.param_sync_every) == (RunOptions().param_sync_every, True)
    assert (second.generation, second.gradient_reduce_op, second.seed[0]) == (2, ReduceOp.SUM, 11)
    following(headers, on_nonfinite="skip")
    following(headers)
    assert headers.looked, "steps that only pass gradients on need no count of them"


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


def test_a_lost_message_is_noticed() -> None:
    sent, kept = SentObjects(), KeptObjects()
    sent.send("a")
    with pytest.raises(FailedPreconditionError, match=r"\[0\] are not here and 0 came along"):
        kept.receive(*sent.send("a"))
    sent.forget()
    assert kept.receive(*sent.send("a")) == ["a"]


@dataclass
class Outcome:
    """The outcome of a step on some replicas; None for a step that nobody may wait for."""

    found: Sequence[StepResult] | None
    num_replicas: int = 2

    def results(self) -> list[StepResult]:
        assert self.found is not None, "nothing may be fetched here"
        return list(self.found)

    def part(self, rank: int, leaf_index: int, nest: str) -> Part:
        return Part(ref=rank, leaf_index=leaf_index)


def values_of(*results: StepResult) -> StepValues:
    return StepValues(Outcome(results, len(results)))


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


def test_dtypes_without_a_numpy_name_travel_too() -> None:
    result = pack_result(torch.ones(2, dtype=torch.bfloat16), absent=False)
    assert result.leaf(0).dtype is torch.bfloat16
    (loaded,) = pickle.loads(pickle.dumps(pack_result(torch.ones(2).to(torch.float8_e5m2), absent=False))).leaves
    assert torch.equal(loaded.unpack().float(), torch.ones(2))


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(SpecError, match="got lock at 'b'"):
        pack_result({"a": 1, "b": threading.Lock()}, absent=False)


def test_results_weigh_by_the_rows_of_the_replicas_that_count() -> None:
    def weights(*results: StepResult) -> Any:
        return values_of(*results).nest().weights

    packed = [pack_result(1.0, absent=False, rows=3), pack_result(2.0, absent=False, rows=1)]
    assert weights(*packed) == (3, 1)
    assert weights(*packed, pack_result(3.0, absent=True, rows=0)) == (3, 1)
    assert weights(pack_result(1.0, absent=False), pack_result(2.0, absent=False)) is None


def test_none_everywhere_is_none() -> None:
    values = values_of(pack_result((1, None), absent=False), pack_result((2, None), absent=False))
    first, second = values.nest()
    assert first.values == (1, 2)
    assert second is None


def test_results_print_as_their_values_with_the_replicas_that_had_rows() -> None:
    values = values_of(pack_result(1, absent=True), pack_result(torch.ones(2), absent=False))
    _, structure = flatten(0)
    leaf = values.expected_nest(structure)
    assert f"{leaf}" == "PerReplica(1: tensor([1., 1.]))"


def test_replicas_must_return_one_structure_and_two_that_differ_are_shown() -> None:
    returned = [pack_result((1, 2), absent=index == 0) for index in range(4)] + [pack_result(1, absent=False)] * 3
    with pytest.raises(SpecError, match="one structure on all replicas") as raised:
        values_of(*returned).nest()
    assert "from replica 1 and " in str(raised.value)
    assert "from replica 4 (* is a value)." in str(raised.value)
    assert "replica 5" not in str(raised.value)


def test_an_expected_nest_waits_for_nothing_and_another_structure_is_an_error_when_read() -> None:
    _, structure = flatten({"loss": 0, "n": 0})
    nest = StepValues(Outcome(None)).expected_nest(structure)
    assert isinstance(nest["loss"], ResultLeaf)
    assert nest["loss"]._values is None
    values = values_of(pack_result(1, absent=False), pack_result(1, absent=False))
    with pytest.raises(InvalidArgumentError, match="same structure in every call"):
        values.expected_nest(structure)["loss"].values  # noqa: B018 - reading is what raises


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
    assert returned.expected(Step().declared) is NOTHING
    returned.learn(step.run, pack_result(None, absent=False))
    assert returned.expected(step.run) is NOTHING
    returned.learn(step.run, pack_result((1, None), absent=False))  # which may be a value next time
    assert returned.expected(step.run) is None


def test_functions_are_not_kept_alive_and_an_address_that_is_used_again_is_another_function() -> None:
    returned = ReturnedStructures()
    for number in range(3000):
        fn = eval("lambda: None")  # a new function each time
        assert returned.expected(fn) is None
        returned.learn(fn, pack_result(number, absent=False))
    assert len(returned._known) <= 1024
    assert returned.expected(fn) is LEAF


def test_replicas_without_rows_are_passed_over() -> None:
    merged = MergedValue([[1, 2], [3, 4], [1, 2]], [0, 1])
    assert reduce("SUM", merged, 0, 3) == 10
    assert reduce("MEAN", merged, 0, 3) == 2.5
    assert gather(merged, 0).tolist() == [1, 2, 3, 4]
    assert local_results(merged) == ([1, 2], [3, 4])
    assert str(merged) == "PerReplica(0: [1, 2], 1: [3, 4])"


def test_each_replica_gets_its_own_value_back() -> None:
    ranks = [0, 2]
    assert [value_on(MergedValue("abc", ranks), rank, ranks) for rank in range(3)] == ["a", "b", "c"]
    assert [value_on(PerReplica("ac"), rank, ranks) for rank in range(3)] == ["a", "a", "c"]
    assert [value_on(PerReplica("abc"), rank, ranks) for rank in range(3)] == ["a", "b", "c"]
    assert [value_on("all", rank, ranks) for rank in range(3)] == ["all"] * 3


def test_who_has_no_rows_stands_in_and_does_not_count() -> None:
    for rows, padding, standing_in, present in (
        ((3, 1), True, (False, False), (True, True)),
        ((2, 0), True, (False, True), (True, False)),
        ((2, 0), False, (False, False), (True, True)),
        # Of a batch without rows there is nothing to work on: all count, as none does.
        ((0, 0), True, (True, True), (True, True)),
        (None, True, (False, False), (True, True)),
    ):
        batch = BatchRows.of(rows, 2, padding=padding)
        assert (batch.padding, batch.present, batch.all_present) == (standing_in, present, all(present)), rows
