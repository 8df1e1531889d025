"""The class of the InputPipeline actor, called in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from raydist.actors.epochs import input_pipeline
from raydist.actors.epochs.dynamic_sharding import InputSplit, SplitAssignments
from raydist.actors.epochs.epoch_producer import Credits
from raydist.actors.epochs.input_pipeline import InputPipeline, credits_of
from raydist.actors.epochs.job import InputJob
from raydist.actors.epochs.served_epoch import Poll, QueueEntry
from raydist.core.errors import CancelledError, InvalidArgumentError
from raydist.core.values import AUTOTUNE
from raydist.dataset import Dataset
from raydist.options import InputOptions, Options, Timeouts
from raydist.pipelines.engine.executor import InlineExecutor


def job_of(dataset: Dataset, **changes: Any) -> InputJob:
    job = InputJob(
        label="epoch 0",
        ops=cloudpickle.dumps((dataset._op,)),
        dealt=False,
        num_replicas=2,
        seed=0,
        epoch=0,
        options=dataset.options(),
        input_options=InputOptions(num_input_workers=0),
        timeouts=Timeouts(),
    )
    return replace(job, **changes)


def poll_at(start: int) -> Poll:
    return Poll(None, start, start, wait_s=10.0)


@pytest.fixture
def pipeline() -> Iterator[InputPipeline]:
    pipeline = InputPipeline("test", put=lambda piece: piece)
    yield pipeline
    for key in pipeline.open_epochs():
        assert pipeline.close(key, 5.0)


def test_epochs_are_independent_and_a_closed_one_answers_with_its_end(pipeline: InputPipeline) -> None:
    for key in ("a", "b"):
        pipeline.open(key, job_of(Dataset.range(4).batch(2)))
    assert pipeline.poll("a", poll_at(0))[0].number == 0
    assert pipeline.poll("a", poll_at(1))[0].number == 1
    assert pipeline.poll("b", poll_at(0))[0].number == 0
    assert pipeline.close("a", 5.0)
    assert pipeline.close("a", 5.0)
    assert pipeline.open_epochs() == ["b"]
    (entry,) = pipeline.poll("a", poll_at(0))
    assert entry.last
    assert entry.error is not None
    assert isinstance(entry.error.restore(), CancelledError)
    with pytest.raises(CancelledError, match="closed"):
        pipeline.reclaim("a")


class Pools:
    """Pools that lend executors of this process, and count the returned ones."""

    def __init__(self) -> None:
        self.lent: list[tuple[int, str, tuple[str, ...]]] = []
        self.returned = 0

    def borrow(self, num_workers: int, *, name: str, node_ids: Any, **others: Any) -> Any:
        self.lent.append((num_workers, name, node_ids))
        return InlineExecutor()

    def give_back(self, pool: Any, *, patience_s: float) -> None:
        self.returned += 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    pools = Pools()
    monkeypatch.setattr(input_pipeline, "EpochPools", lambda: pools)
    return pools


def test_workers_are_lent_for_one_epoch(pools: Pools) -> None:
    pipeline = InputPipeline("test", put=lambda piece: piece, node_id="here")
    two = InputOptions(num_input_workers=2)
    pipeline.open("a", job_of(Dataset.range(2).map(abs).batch(2), input_options=two))
    assert pools.lent.pop() == (2, "test", ("here",))
    assert pipeline.poll("a", poll_at(1))[0].last
    assert pools.returned == 1  # before the reader learns of the end
    assert pipeline.close("a", 5.0)
    assert pools.returned == 1
    job = job_of(Dataset.range(2).map(abs).batch(2), input_options=two, node_ids=("here", "there"))
    pipeline.open("b", job)
    assert pools.lent.pop() == (2, "test", ("here", "there")), "on all nodes that the epoch serves"
    own = replace(job, input_options=InputOptions(num_input_workers=2, resources_per_input_worker={"CPU": 1}))
    pipeline.open("c", own)
    assert pools.lent.pop() == (2, "test", ())
    for key in "bc":
        assert pipeline.close(key, 5.0)
    with pytest.raises(InvalidArgumentError):
        pipeline.open("d", job_of(Dataset.range(2).batch(2), input_options=two, state={"version": 0}))
    assert pools.returned == 4, "they come back when opening fails"
    pools.lent.clear()
    pipeline.open("e", job_of(Dataset.range(2).batch(2), input_options=InputOptions()))
    assert pools.lent == [], "AUTOTUNE leaves light pipelines where they are"
    assert pipeline.close("e", 5.0)


def test_options_say_how_many_batches_are_ahead_and_how_many_workers_make_them() -> None:
    plain = job_of(Dataset.range(2), input_options=InputOptions())
    assert credits_of(plain).capacity == 3
    asked = credits_of(replace(plain, input_options=InputOptions(prefetch_batches=7)))
    assert (asked.capacity, asked.spare_bytes) == (8, 0)
    three = replace(plain, options=Options(num_input_workers=3))
    assert (plain.num_workers, three.num_workers) == (AUTOTUNE, 3)
    assert replace(three, input_options=InputOptions(num_input_workers=0)).num_workers == 0


# --- credits ----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def allow(credit: Credits, ahead: int, held: int = 0, step: int = 0, pace_s: float | None = 0.001) -> bool:
    return credit.allow(ahead=ahead, held_bytes=held, step_bytes=step, pace_s=pace_s)


def test_what_the_user_asked_for_is_the_limit() -> None:
    credit = Credits.within(None, 6, 2, only_capacity=True)
    assert [allow(credit, ahead) for ahead in (5, 6, 7)] == [True, False, False]
    assert credit.group_steps(0.001) == 3  # the other half is in use meanwhile
    assert Credits(capacity=2).group_steps(0.001) == 1


def test_small_steps_may_be_further_ahead_of_a_quick_reader_but_not_of_an_unknown_one() -> None:
    credit = Credits.within(None, 3, 2, only_capacity=False)
    assert (credit.spare_bytes, credit.group_bytes) == (192 * MIB, 32 * MIB)
    assert allow(credit, 100, held=10 * MIB, step=MIB)
    assert not allow(credit, 100, held=192 * MIB, step=1)
    assert not allow(credit, 3 * 128)
    assert [allow(credit, ahead, pace_s=None) for ahead in (2, 3)] == [True, False]
    assert credit.group_steps(None) == 1


def test_a_group_is_half_a_second_of_work() -> None:
    credit = Credits.within(None, 3, 2, only_capacity=False)
    for pace_s, count in [(0.0, 128), (0.0001, 128), (0.01, 50), (0.3, 1), (10.0, 1)]:
        assert credit.group_steps(pace_s) == count
        assert allow(credit, 3 * count - 1, pace_s=pace_s)
        assert not allow(credit, max(3, 3 * count), pace_s=pace_s)


def test_a_small_object_store_is_not_filled() -> None:
    credit = Credits.within(80 * MIB, 9, 8, only_capacity=False)
    assert credit.spare_bytes == 10 * MIB
    assert credit.group_bytes * 8 * 3 <= 10 * MIB
    asked_for = Credits.within(80 * MIB, 99, 8, only_capacity=True)
    assert (asked_for.spare_bytes, asked_for.group_bytes) == (0, credit.group_bytes)


@given(
    capacity=st.integers(1, 100),
    replicas=st.integers(1, 16),
    ahead=st.integers(0, 300),
    held=st.integers(0, 1 << 31),
    step=st.integers(0, 1 << 31),
    pace_s=st.none() | st.floats(0, 10),
)
def test_memory_stays_put(capacity: int, replicas: int, ahead: int, held: int, step: int, pace_s: float | None) -> None:
    credit = Credits.within(None, capacity, replicas, only_capacity=False)
    if allow(credit, ahead, held, step, pace_s):
        assert ahead < capacity or held + step <= credit.spare_bytes
    if ahead < capacity:
        assert allow(credit, ahead, held, step, pace_s)


# --- dynamic sharding: no batch is lost, and none is used twice -------------------------------------------------------

WORKERS = st.integers(0, 2)


def batches_of(split: InputSplit) -> list[int]:
    return list(range(split.entry.number + split.begin, split.entry.end))


class Dealing(RuleBasedStateMachine):
    """Three workers that use their splits in order."""

    def __init__(self) -> None:
        super().__init__()
        self.splits = SplitAssignments()
        self.generations = [0, 0, 0]
        self.given: list[list[int]] = [[], [], []]  # since it was started
        self.used = [0, 0, 0]
        self.for_good: list[int] = []

    @rule(worker=WORKERS, size=st.integers(1, 4))
    def claim(self, worker: int, size: int) -> None:
        reader = worker, self.generations[worker]
        split = self.splits.assign_returned(reader)
        if split is None:
            place = self.splits.next_place
            split = self.splits.assign_next(reader, QueueEntry(place, ({},) * size))
        self.given[worker] += batches_of(split)

    @rule(worker=WORKERS, part=st.floats(0, 1))
    def use(self, worker: int, part: float) -> None:
        begin, end = self.used[worker], self.used[worker] + int(part * (len(self.given[worker]) - self.used[worker]))
        self.for_good += self.given[worker][begin:end]
        self.used[worker] = end

    @rule(worker=WORKERS)
    def confirm(self, worker: int) -> None:
        self.splits.confirm((worker, self.generations[worker]), self.used[worker])

    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        self.splits.return_splits((worker, self.generations[worker]), self.used[worker])
        self.generations[worker] += 1
        self.given[worker], self.used[worker] = [], 0

    def teardown(self) -> None:
        for worker in range(3):
            self.die(worker)
        while (split := self.splits.assign_returned((0, 99))) is not None:
            self.for_good += batches_of(split)
        assert sorted(self.for_good) == list(range(self.splits.next_place))


Dealing.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestDealing = Dealing.TestCase


def test_what_comes_or_is_asked_for_by_a_reader_that_has_died_is_for_the_next() -> None:
    entry = QueueEntry(0, ({}, {}))
    for died_first in (True, False):
        splits = SplitAssignments()
        if died_first:
            splits.return_splits((0, 0), 0)
            splits.assign_next((0, 0), entry)
        else:
            splits.assign_next((0, 0), entry)
            splits.return_splits((0, 0), 0)
            assert splits.assign_returned((0, 0)) is None, "its request arrives late"
        again = splits.assign_returned((1, 0))
        assert again is not None
        assert batches_of(again) == [0, 1]
