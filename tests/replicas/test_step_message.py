from __future__ import annotations

import pickle
from dataclasses import replace

import torch

from raydist.core.values import Part, PerReplica
from raydist.mirroring.messages import StepPayload
from raydist.replicas.results import pack_result
from raydist.replicas.step import PartSource, StepHeader
from raydist.replicas.step_message import GroupResult, PlannedStep, SentObjects, address_steps
from tests.summary.records import record_of


class Stored(PerReplica):
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
        planned(5, Stored("a", 0, 0), Stored("a", 1, 0)),
        planned(6, Stored("a", 0, 1)),
        planned(7, Stored("b", 0, 0)),
    ]
    (_, first), (message, second) = address_steps(steps, [SentObjects(), SentObjects()])
    assert (first, second) == (["a0", "b0"], ["a1", "b1"])
    assert message.sources == (
        (PartSource(0, 0), PartSource(0, 1)),
        (PartSource(0, 0, place=1),),
        (PartSource(1, 0),),
    )


def test_each_replica_reads_its_steps_in_order_with_its_sources() -> None:
    steps = [planned(5, PerReplica(["x", "y"])), planned(6)]
    messages = [
        pickle.loads(pickle.dumps(message)) for message, _ in address_steps(steps, [SentObjects(), SentObjects()])
    ]
    assert messages[0].headers == messages[1].headers
    headers = messages[1].steps()
    assert [header.step for header in headers] == [5, 6]
    assert headers[0] == replace(steps[0].header, sources=(PartSource(None, value="y"),))
    assert headers[1] == steps[1].header


def test_a_step_carries_values_that_lie_in_the_driver() -> None:
    assert not planned(0, Stored("a", 0, 0)).carries_values
    assert planned(0, Stored("a", 0, 0), PerReplica([1, 2])).carries_values


def test_every_part_is_asked_for_where_one_is_enough_to_know() -> None:
    """What is asked for is sent or waited for: not later, when its turn would be that of the step that uses it."""
    asked: list[str] = []

    class Asked(Stored):
        def part_on(self, rank: int, *, padding: bool = False) -> Part:
            asked.append(self.name)
            return super().part_on(rank, padding=padding)

    assert planned(0, Asked("a", 0, 0), PerReplica([1, 2]), Asked("b", 0, 0)).carries_values
    assert asked == ["a", "b"]


def test_the_results_of_a_group_are_leaves_at_places() -> None:
    results = tuple(pack_result((torch.tensor(float(i)), i), absent=False) for i in range(3))
    answer = pickle.loads(pickle.dumps(GroupResult(results, 0.5)))
    assert answer.leaf(0, 2).item() == 2.0
    assert answer.leaf(1, 1) == 1
    assert not answer.absent


def test_summaries_are_dropped_once_they_were_written() -> None:
    with_one = pack_result(1.0, absent=False, summaries=(record_of("loss", 0.5),))
    without = pack_result(1.0, absent=False)
    assert with_one.num_bytes > without.num_bytes
    assert with_one.without_summaries() == without
    assert without.without_summaries() is without
