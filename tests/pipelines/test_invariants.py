"""The promises that hold for every pipeline: one order, nothing lost or doubled, resuming anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.pipelines.engine import compaction
from raydist.pipelines.engine.threads import ThreadExecutor
from tests.contracts.op import MakeExecutor, collect, iterate, same
from tests.pipelines.random_pipelines import Pipeline, pipelines
from tests.pipelines.storing_executor import StoringExecutor

LIMIT = 60
CASES = settings(max_examples=300)
MOST_STATE_BYTES = 10_000

num_threads = st.integers(1, 4)


@pytest.fixture(autouse=True, scope="module")
def copies_of_few_rows() -> Iterator[None]:
    """Shuffles copy rows of blocks as soon as less than half of the rows are in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "_SPARE_BYTES", 0)
        yield


def threads(count: int) -> MakeExecutor:
    return lambda options: ThreadExecutor(count)


def elements_of(pipeline: Pipeline, epoch: int = 0) -> list[Any]:
    return collect(iterate(pipeline.build(), epoch=epoch), LIMIT)


@CASES
@given(pipeline=pipelines(), count=num_threads, epoch=st.integers(0, 3))
def test_the_order_depends_on_seed_and_epoch_alone(pipeline: Pipeline, count: int, epoch: int) -> None:
    expected = elements_of(pipeline, epoch)
    assert same(collect(iterate(pipeline.build(), threads(count), epoch), LIMIT), expected)
    assert same(collect(iterate(pipeline.then("prefetch", count).build(), threads(count), epoch), LIMIT), expected)


@CASES
@given(pipeline=pipelines(), epoch=st.integers(0, 3))
def test_row_ids_in_place_of_values_change_nothing(pipeline: Pipeline, epoch: int) -> None:
    expected = elements_of(pipeline, epoch)
    assert same(collect(iterate(pipeline.build(), StoringExecutor, epoch), LIMIT), expected)


@CASES
@given(pipeline=pipelines(), data=st.data())
def test_a_state_fits_whatever_holds_the_values(pipeline: Pipeline, data: st.DataObject) -> None:
    expected = elements_of(pipeline)
    done = data.draw(st.integers(0, len(expected)))
    ways: list[MakeExecutor] = [StoringExecutor, threads(1)]
    if data.draw(st.booleans()):
        ways.reverse()
    first = iterate(pipeline.build(), ways[0])
    assert same(collect(first, done), expected[:done])
    second = iterate(pipeline.build(), ways[1])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert same(collect(second, LIMIT - done), expected[done:])


@CASES
@given(pipeline=pipelines(), num_shards=st.integers(1, 4), count=num_threads)
def test_shards_hold_every_element_once(pipeline: Pipeline, num_shards: int, count: int) -> None:
    whole = elements_of(pipeline)
    shards = [pipeline.then("shard", num_shards, index).build() for index in range(num_shards)]
    parts = [collect(iterate(shard, threads(count)), LIMIT) for shard in shards]
    assert sum(map(len, parts)) >= len(whole)  # the whole stops at the limit
    for index, part in enumerate(parts):
        mine = whole[index::num_shards]
        assert same(part[: len(mine)], mine)
        assert len(whole) == LIMIT or len(part) == len(mine)


@CASES
@given(pipeline=pipelines(), saved_on=num_threads, loaded_on=num_threads, data=st.data())
def test_an_iterator_resumes_after_any_element(
    pipeline: Pipeline, saved_on: int, loaded_on: int, data: st.DataObject
) -> None:
    expected = elements_of(pipeline)
    done = data.draw(st.integers(0, len(expected)))
    first = iterate(pipeline.build(), threads(saved_on))
    assert same(collect(first, done), expected[:done])
    state = json.dumps(first.state_dict())
    first.close()
    assert len(state) <= MOST_STATE_BYTES
    second = iterate(pipeline.build(), threads(loaded_on), epoch=99)
    second.load_state_dict(json.loads(state))
    assert same(collect(second, LIMIT - done), expected[done:])
    second.close()


@settings(max_examples=200)
@given(pipeline=pipelines(), data=st.data())
def test_breaks_upon_breaks_change_nothing(pipeline: Pipeline, data: st.DataObject) -> None:
    """Saved, loaded, read a little, saved again: as a job does that is stopped again and again."""
    expected = elements_of(pipeline)
    got: list[Any] = []
    state: dict[str, Any] | None = None
    while len(got) < len(expected):
        iterator = iterate(pipeline.build())
        if state is not None:
            iterator.load_state_dict(json.loads(json.dumps(state)))
        got += collect(iterator, min(data.draw(st.integers(1, 9)), len(expected) - len(got)))
        state = iterator.state_dict()
        iterator.close()
    assert same(got, expected)
