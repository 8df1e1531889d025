"""The promises that hold for every pipeline: one order, nothing lost or doubled, resuming anywhere."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.dataset import Dataset
from raydist.pipelines.engine import shuffle_buffer
from raydist.pipelines.engine.threads import ThreadExecutor
from tests.chaos.extent import how_many
from tests.contracts.op import MakeExecutor, collect, is_error, iterate, same
from tests.pipelines import random_pipelines
from tests.pipelines.random_pipelines import Pipeline, pipelines
from tests.pipelines.storing_executor import StoringExecutor

LIMIT = 60
CASES = settings(max_examples=how_many(some=200, many=2000))
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


@settings(max_examples=how_many(some=250, many=2000))
@given(pipeline=pipelines(), saved_on=ways, loaded_on=ways, data=st.data())
def test_an_iterator_resumes_after_any_element(
    pipeline: Pipeline, saved_on: MakeExecutor, loaded_on: MakeExecutor, data: st.DataObject
) -> None:
    expected = elements_of(pipeline)
    breaks = sorted(data.draw(st.lists(st.integers(0, len(expected)), min_size=1, max_size=4)))
    state: str | None = None
    for begin, end in itertools.pairwise([0, *breaks, LIMIT]):
        iterator = iterate(pipeline.build(), saved_on if begin == 0 else loaded_on, epoch=99 if state else 0)
        if state is not None:
            iterator.load_state_dict(json.loads(state))
        assert same(collect(iterator, end - begin), expected[begin:end])
        state = json.dumps(iterator.state_dict())
        assert len(state) <= MOST_STATE_BYTES
        iterator.close()


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


# --- the operations on plain lists, for comparison with the engine ---


@final
@dataclass(frozen=True)
class Bad:
    """An element whose function raised."""


Items = list[Any]


@final
@dataclass(frozen=True)
class Step:
    """One operation, on datasets and on lists."""

    name: str
    on_dataset: Callable[[Dataset], Dataset]
    on_list: Callable[[Items], Items]


def mapped(fn: Callable[[Any], Any]) -> Step:
    def one(item: Any) -> Any:
        if isinstance(item, Bad):
            return item
        try:
            return fn(item)
        except ZeroDivisionError:
            return Bad()

    return Step("map", lambda ds: ds.map(fn), lambda items: [one(item) for item in items])


def filtered(fn: Callable[[Any], bool]) -> Step:
    return Step(
        "filter", lambda ds: ds.filter(fn), lambda items: [item for item in items if isinstance(item, Bad) or fn(item)]
    )


def batched(size: int, drop: bool) -> Step:
    """A batch and its parts: `unbatch` follows, so that elements stay numbers. A bad element spoils its batch."""

    def on_list(items: Items) -> Items:
        groups = [items[at : at + size] for at in range(0, len(items), size)]
        if drop and groups and len(groups[-1]) < size:
            groups.pop()
        return [item for group in groups for item in ([Bad()] if Bad() in group else group)]

    return Step("batch", lambda ds: ds.batch(size, drop).unbatch(), on_list)


def taken(count: int) -> Step:
    def on_list(items: Items) -> Items:
        kept: Items = []
        good = 0
        for item in items:
            if good == count:
                break
            good += not isinstance(item, Bad)
            kept.append(item)
        return kept

    return Step("take", lambda ds: ds.take(count), (lambda items: list(items)) if count < 0 else on_list)


def skipped(count: int) -> Step:
    def on_list(items: Items) -> Items:
        rest: Items = []
        left = count
        for item in items:
            if left and not isinstance(item, Bad):
                left -= 1
            else:
                rest.append(item)
        return rest

    return Step("skip", lambda ds: ds.skip(count), (lambda items: []) if count < 0 else on_list)


def repeated(count: int) -> Step:
    return Step("repeat", lambda ds: ds.repeat(count), lambda items: items * count)


def concatenated(count: int) -> Step:
    return Step("concatenate", lambda ds: ds.concatenate(Dataset.range(count)), lambda items: [*items, *range(count)])


def enumerated(start: int) -> Step:
    """Numbers, folded into the element, so that elements stay numbers. An error takes a number too."""
    return Step(
        "enumerate",
        lambda ds: ds.enumerate(start).map(lambda number, x: number * 100 + x),
        lambda items: [x if isinstance(x, Bad) else number * 100 + x for number, x in enumerate(items, start)],
    )


def taken_while(fn: Callable[[Any], bool]) -> Step:
    def on_list(items: Items) -> Items:
        return list(itertools.takewhile(lambda item: isinstance(item, Bad) or fn(item), items))

    return Step("take_while", lambda ds: ds.take_while(fn), on_list)


def sharded(num_shards: int, index: int) -> Step:
    """An error belongs to one shard, as an element does."""
    return Step("shard", lambda ds: ds.shard(num_shards, index), lambda items: items[index::num_shards])


def interleaved(cycle_length: int, block_length: int) -> Step:
    """Every number makes a dataset of up to four copies of itself."""

    def on_dataset(ds: Dataset) -> Dataset:
        return ds.interleave(lambda x: Dataset.from_tensors(x).repeat(x % 5), cycle_length, block_length)

    def on_list(items: Items) -> Items:
        waiting = [[item] if isinstance(item, Bad) else [item] * (item % 5) for item in items]
        slots: list[Items | None] = [None] * cycle_length
        result: Items = []
        turn = 0
        while waiting or any(slot is not None for slot in slots):
            slot = slots[turn]
            if slot is None and waiting:
                slot = slots[turn] = waiting.pop(0)
                if slot == [Bad()]:  # an error has no dataset: it leaves the slot empty
                    result.append(Bad())
                    slot = slots[turn] = None
            if slot is not None:
                result += slot[:block_length]
                slots[turn] = slot[block_length:] if len(slot) >= block_length else None
            turn = (turn + 1) % cycle_length
        return result

    return Step("interleave", on_dataset, on_list)


def windowed(size: int, shift: int, stride: int, drop: bool) -> Step:
    """Windows and their parts: `flat_map` follows, so that elements stay numbers. A bad element spoils its windows."""

    def on_list(items: Items) -> Items:
        windows = [items[at : at + (size - 1) * stride + 1 : stride] for at in range(0, len(items), shift)]
        kept = [window for window in windows if len(window) == size or not drop]
        return [item for window in kept for item in ([Bad()] if Bad() in window else window)]

    return Step("window", lambda ds: ds.window(size, shift, stride, drop).flat_map(lambda window: window), on_list)


def summed() -> Step:
    """Running sums."""

    def on_list(items: Items) -> Items:
        sums = itertools.accumulate(0 if isinstance(item, Bad) else item for item in items)
        return [item if isinstance(item, Bad) else total for item, total in zip(items, sums, strict=True)]

    return Step("scan", lambda ds: ds.scan(0, lambda total, x: (total + x, total + x)), on_list)


def made_unique() -> Step:
    def on_list(items: Items) -> Items:
        return [item for at, item in enumerate(items) if isinstance(item, Bad) or item not in items[:at]]

    return Step("unique", lambda ds: ds.unique(), on_list)


def without_errors() -> Step:
    return Step("ignore_errors", lambda ds: ds.ignore_errors(), lambda items: [x for x in items if x != Bad()])


def rebatched(size: int, sizes: tuple[int, ...]) -> Step:
    """Batches, batches of other sizes, and their parts. A bad element spoils a batch, and that the next one."""

    def on_list(items: Items) -> Items:
        rows = batched(size, drop=False).on_list(items)
        result: Items = []
        for one in itertools.cycle(sizes):
            if not rows:
                return result
            result += [Bad()] if Bad() in rows[:one] else rows[:one]
            rows = rows[one:]
        return result

    return Step("rebatch", lambda ds: ds.batch(size).rebatch(sizes).unbatch(), on_list)


def some_divide(x: Any) -> Any:
    if x % 5 == 3:
        raise ZeroDivisionError("bad element")
    return x + 1


LIST_STEPS = st.one_of(
    st.just(mapped(lambda x: x * 2)),
    st.just(mapped(some_divide)),
    st.just(filtered(lambda x: x % 3 != 0)),
    st.builds(batched, st.integers(1, 5), st.booleans()),
    st.builds(taken, st.integers(-1, 12)),
    st.builds(skipped, st.integers(-1, 6)),
    st.builds(repeated, st.integers(0, 3)),
    st.builds(concatenated, st.integers(0, 6)),
    st.builds(enumerated, st.integers(0, 3)),
    st.just(taken_while(lambda x: x % 7 != 6)),
    st.integers(1, 4).flatmap(lambda count: st.builds(sharded, st.just(count), st.integers(0, count - 1))),
    st.builds(interleaved, st.integers(1, 4), st.integers(1, 3)),
    st.builds(windowed, st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.booleans()),
    st.just(summed()),
    st.just(made_unique()),
    st.just(without_errors()),
    st.builds(rebatched, st.integers(1, 4), st.tuples(st.integers(1, 3), st.integers(0, 2))),
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
