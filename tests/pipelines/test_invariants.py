"""The promises that hold for every pipeline: one order, nothing lost or doubled, resuming anywhere."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.dataset import Dataset
from raydist.pipelines.engine import shuffle_buffer
from raydist.pipelines.engine.threads import ThreadExecutor
from tests.contracts.op import MakeExecutor, collect, is_error, iterate, same
from tests.pipelines import model, random_pipelines
from tests.pipelines.model import Bad, Step
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
        patch.setattr(shuffle_buffer, "_SPARE_BYTES", 0)
        yield


def threads(count: int) -> MakeExecutor:
    return lambda options: ThreadExecutor(count)


ways: st.SearchStrategy[MakeExecutor] = st.one_of(st.just(StoringExecutor), num_threads.map(threads))
"""Where stages run; with the first, row ids stand in the place of values."""


def elements_of(pipeline: Pipeline, epoch: int = 0) -> list[Any]:
    return collect(iterate(pipeline.build(), epoch=epoch), LIMIT)


@CASES
@given(pipeline=pipelines(), count=num_threads, epoch=st.integers(0, 3))
def test_the_order_depends_on_seed_and_epoch_alone(pipeline: Pipeline, count: int, epoch: int) -> None:
    expected = elements_of(pipeline, epoch)
    assert same(collect(iterate(pipeline.build(), threads(count), epoch), LIMIT), expected)
    assert same(collect(iterate(pipeline.build(), StoringExecutor, epoch), LIMIT), expected)
    assert same(collect(iterate(pipeline.then("prefetch", count).build(), threads(count), epoch), LIMIT), expected)


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


@settings(max_examples=450)
@given(pipeline=pipelines(), saved_on=ways, loaded_on=ways, data=st.data())
def test_an_iterator_resumes_after_any_element(
    pipeline: Pipeline, saved_on: MakeExecutor, loaded_on: MakeExecutor, data: st.DataObject
) -> None:
    expected = elements_of(pipeline)
    done = data.draw(st.integers(0, len(expected)))
    first = iterate(pipeline.build(), saved_on)
    assert same(collect(first, done), expected[:done])
    state = json.dumps(first.state_dict())
    first.close()
    assert len(state) <= MOST_STATE_BYTES
    second = iterate(pipeline.build(), loaded_on, epoch=99)
    second.load_state_dict(json.loads(state))
    assert same(collect(second, LIMIT - done), expected[done:])
    second.close()


@settings(max_examples=200)
@given(pipeline=pipelines(), data=st.data())
def test_breaks_upon_breaks_change_nothing(pipeline: Pipeline, data: st.DataObject) -> None:
    """A job that is stopped again and again saves, loads, and reads a little."""
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


NOT_DRAWN = {
    **dict.fromkeys(
        ("from_csv", "from_json", "from_numpy", "from_parquet", "from_tar", "list_files", "load"), "reads files"
    ),
    "from_ray": "needs Ray",
    "snapshot": "keeps files, as the cache in a file that is drawn",
    "ragged_batch": "lists of arrays, which the steps do not take: tests/pipelines/ops/test_grouped.py draws them",
    "apply": "a call of the function, no operation",
}


def test_every_method_that_gives_a_dataset_is_drawn() -> None:
    source = Path(random_pipelines.__file__).read_text()
    methods = [name for name in dir(Dataset) if not name.startswith("_") and _gives_a_dataset(getattr(Dataset, name))]
    missing = [name for name in methods if f'"{name}"' not in source and name not in NOT_DRAWN]
    assert missing == [], "add a line for each of them to SOURCES or STEPS in tests/pipelines/random_pipelines.py"


def _gives_a_dataset(method: object) -> bool:
    return callable(method) and inspect.signature(method).return_annotation in ("Self", "Dataset")


def some_divide(x: Any) -> Any:
    if x % 5 == 3:
        raise ZeroDivisionError("bad element")
    return x + 1


LIST_STEPS = st.one_of(
    st.just(model.mapped(lambda x: x * 2)),
    st.just(model.mapped(some_divide)),
    st.just(model.filtered(lambda x: x % 3 != 0)),
    st.builds(model.batched, st.integers(1, 5), st.booleans()),
    st.builds(model.taken, st.integers(-1, 12)),
    st.builds(model.skipped, st.integers(-1, 6)),
    st.builds(model.repeated, st.integers(0, 3)),
    st.builds(model.concatenated, st.integers(0, 6)),
    st.builds(model.enumerated, st.integers(0, 3)),
    st.just(model.taken_while(lambda x: x % 7 != 6)),
    st.integers(1, 4).flatmap(lambda count: st.builds(model.sharded, st.just(count), st.integers(0, count - 1))),
    st.builds(model.interleaved, st.integers(1, 4), st.integers(1, 3)),
    st.builds(model.windowed, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans()),
    st.just(model.summed()),
    st.just(model.made_unique()),
    st.just(model.without_errors()),
    st.builds(model.rebatched, st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(0, 2))),
    st.just(Step("cache", lambda ds: ds.cache(), lambda items: items)),
    st.just(Step("prefetch", lambda ds: ds.prefetch(2), lambda items: items)),
)


def apply_all(dataset: Dataset, steps: list[Step]) -> Dataset:
    return reduce(lambda ds, step: step.on_dataset(ds), steps, dataset)


@given(size=st.integers(0, 20), steps=st.lists(LIST_STEPS, max_size=5))
def test_elements_are_those_of_the_list_model(size: int, steps: list[Step]) -> None:
    expected = reduce(lambda items, step: step.on_list(items), steps, list[Any](range(size)))
    got = collect(iterate(apply_all(Dataset.range(size), steps)))
    assert [Bad() if is_error(item) else int(item) for item in got] == expected
