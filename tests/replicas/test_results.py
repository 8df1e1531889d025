"""Results of steps, the values of replicas, and the rows of batches."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from raydist.context.strategy_values import gather, local_results, reduce
from raydist.core.errors import InvalidArgumentError, SpecError
from raydist.core.nest import LEAF, NOTHING, flatten
from raydist.core.values import Part, PerReplica
from raydist.pickling.torch_objects import PendingTensor
from raydist.replicas import results
from raydist.replicas.batch_rows import BatchRows, MergedValue, value_on
from raydist.replicas.results import ResultLeaf, ReturnedStructures, StepResult, StepValues, pack_result


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


@pytest.mark.parametrize("dtype", ["int64", "object"])
def test_an_array_that_the_next_step_writes_to_is_this_steps(dtype: str) -> None:
    """Steps that share a message are all done before the first one's result travels."""
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


def test_an_expected_nest_waits_for_nothing() -> None:
    _, structure = flatten({"loss": 0, "n": 0})
    nest = StepValues(Outcome(None)).expected_nest(structure)
    assert isinstance(nest["loss"], ResultLeaf)
    assert nest["loss"]._values is None


def test_another_structure_than_expected_is_an_error_when_read() -> None:
    _, structure = flatten({"loss": 0})
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


@pytest.mark.parametrize(
    ("rows", "padding", "standing_in", "present"),
    [
        ((3, 1), True, (False, False), (True, True)),
        ((2, 0), True, (False, True), (True, False)),
        ((2, 0), False, (False, False), (True, True)),
        # Of a batch without rows there is nothing to work on: all count, as none does.
        ((0, 0), True, (True, True), (True, True)),
        (None, True, (False, False), (True, True)),
    ],
)
def test_who_has_no_rows_stands_in_and_does_not_count(
    rows: tuple[int, ...] | None, padding: bool, standing_in: tuple[bool, ...], present: tuple[bool, ...]
) -> None:
    batch = BatchRows.of(rows, 2, padding=padding)
    assert (batch.padding, batch.present, batch.all_present) == (standing_in, present, all(present))
