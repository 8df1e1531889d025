"""The class of the InputPipeline actor, called in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import cloudpickle
import pytest

from raydist.actors.epochs import input_pipeline
from raydist.actors.epochs.input_pipeline import InputPipeline, credits_of
from raydist.actors.epochs.job import InputJob
from raydist.actors.epochs.served_epoch import Poll
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
