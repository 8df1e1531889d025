from __future__ import annotations

import pickle

import torch

from raydist.actors.portable_errors import pack_error
from raydist.core.nest import flatten
from raydist.core.values import PerReplica
from raydist.mirroring.messages import StepPayload
from raydist.replicas.ps.work_message import (
    ClosureResult,
    LogEntry,
    PlannedWork,
    WorkMessage,
    WorkResult,
    address_work,
)
from raydist.replicas.results import StepResult
from raydist.replicas.step import StepHeader
from raydist.replicas.step_message import SentObjects


class Odd:
    """A class that only this process knows."""


def work(number: int, *parts: PerReplica) -> PlannedWork:
    return PlannedWork(number, pickle.dumps(StepHeader(number, 0, StepPayload(arguments=b"args"))), parts, seen=(7,))


def test_a_message_says_of_each_closure_what_it_is_and_what_comes_before_it() -> None:
    entry = LogEntry(StepPayload(writes=b"lr"), plan=["slices"]).packed()
    works = [(work(4, PerReplica([torch.ones(2)])), [entry]), (work(5), [])]
    message, refs = address_work(works, SentObjects(), finished_below=3, used={"iterator": 2})
    there: WorkMessage = pickle.loads(pickle.dumps(message))
    assert refs == []
    first, second = there.items
    assert (first.label.number, first.label.finished_below, first.label.seen) == (4, 3, (7,))
    assert LogEntry.unpacked(first.entries[0]).plan == ["slices"]
    assert second.entries == ()
    header = first.step(generation=9)
    assert (header.step, header.generation, header.payload.arguments) == (4, 9, b"args")
    assert torch.equal(header.sources[0].value, torch.ones(2))
    assert there.used == {"iterator": 2}


def test_an_answer_has_results_and_errors_side_by_side() -> None:
    leaves, structure = flatten(torch.ones(1).numpy())
    good = ClosureResult(StepResult(structure, tuple(leaves)))
    bad = ClosureResult(error=pack_error(ValueError("bad")))
    answer = WorkResult((good, bad, ClosureResult(cancelled=True)), told=(3,), drawn={"i": 1})
    there: WorkResult = pickle.loads(pickle.dumps(answer))
    assert there.results[0].result is not None
    assert there.results[1].error is not None
    assert str(there.results[1].error.restore()) == "bad"
    assert there.results[2].cancelled
    assert (there.told, dict(there.drawn)) == ((3,), {"i": 1})
