from __future__ import annotations

import json
from functools import reduce
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from tests.contracts.op import EXECUTORS, collect, is_error, iterate, same
from tests.pipelines.model import (
    Bad,
    Step,
    batched,
    concatenated,
    enumerated,
    filtered,
    interleaved,
    made_unique,
    mapped,
    rebatched,
    repeated,
    sharded,
    skipped,
    summed,
    taken,
    taken_while,
    windowed,
    without_errors,
)


def some_divide(x: Any) -> Any:
    if x % 5 == 3:
        raise ZeroDivisionError("bad element")
    return x + 1


def jitter(x: Any, *, rng: np.random.Generator) -> Any:
    return x + rng.integers(0, 3)


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
RANDOM_STEPS = st.one_of(
    LIST_STEPS,
    st.builds(lambda size: Step("shuffle", lambda ds: ds.shuffle(size), lambda items: items), st.integers(1, 9)),
    st.just(Step("jitter", lambda ds: ds.map(jitter), lambda items: items)),
)


def apply_all(dataset: Dataset, steps: list[Step]) -> Dataset:
    return reduce(lambda ds, step: step.on_dataset(ds), steps, dataset)


@given(size=st.integers(0, 20), steps=st.lists(LIST_STEPS, max_size=5))
def test_elements_are_those_of_the_list_model(size: int, steps: list[Step]) -> None:
    expected = reduce(lambda items, step: step.on_list(items), steps, list[Any](range(size)))
    got = collect(iterate(apply_all(Dataset.range(size), steps)))
    assert [Bad() if is_error(item) else int(item) for item in got] == expected


@given(size=st.integers(0, 15), steps=st.lists(RANDOM_STEPS, max_size=5), data=st.data())
def test_same_seed_same_order_and_resume_anywhere(size: int, steps: list[Step], data: st.DataObject) -> None:
    dataset = apply_all(Dataset.range(size), steps)
    elements = collect(iterate(dataset), 60)
    threads = iterate(dataset, EXECUTORS[1])
    done = data.draw(st.integers(0, len(elements)))
    assert same(collect(threads, done), elements[:done])
    resumed = iterate(dataset, epoch=3)
    resumed.load_state_dict(json.loads(json.dumps(threads.state_dict())))
    assert same(collect(resumed, 60 - done), elements[done:])
    threads.close()
    resumed.close()


@given(
    size=st.integers(0, 15), steps=st.lists(RANDOM_STEPS, max_size=5), off=st.sampled_from(OptimizationOptions.names())
)
def test_no_optimisation_changes_an_element(size: int, steps: list[Step], off: str) -> None:
    dataset = apply_all(Dataset.from_tensor_slices(np.arange(size)), steps)
    options = Options()
    setattr(options.optimization, off, False)
    assert same(collect(iterate(dataset.with_options(options)), 60), collect(iterate(dataset), 60))
