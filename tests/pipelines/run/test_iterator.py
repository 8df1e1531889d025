"""One iterator: its end, its states, its threads, errors at their places."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from raydist.core.errors import FailedPreconditionError, OutOfRangeError
from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from tests.contracts.op import collect, is_error, iterate
from tests.odd_errors import Departure, Mute
from tests.pipelines.threads import in_threads, quick_switches

__all__ = ["quick_switches"]


def test_the_end_stays_the_end() -> None:
    iterator = Dataset.range(1).as_numpy_iterator()
    assert iterator.get_next() == 0
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="has ended"):
            iterator.get_next()
        assert next(iterator, None) is None
    other = Dataset.range(1).as_numpy_iterator()
    other.load_state_dict(iterator.state_dict())
    assert list(other) == []


def test_a_used_iterator_can_go_back_and_another_kind_may_follow() -> None:
    dataset = Dataset.range(10).shuffle(4, seed=1).prefetch(2)
    iterator = dataset.as_numpy_iterator()
    state = iterator.state_dict()
    elements = collect(iterator)
    iterator.load_state_dict(state)
    assert collect(iterator) == elements
    torch_iterator = iter(dataset)
    torch_iterator.load_state_dict(state)
    assert [int(x) for x in torch_iterator] == elements
    iterator.close()


def test_ctrl_c_in_a_function_loses_no_element() -> None:
    tries: list[int] = []

    def interrupted(x: int) -> int:
        if x == 2 and not tries:
            tries.append(1)
            raise KeyboardInterrupt
        return x

    iterator = iterate(Dataset.range(5).map(interrupted).batch(3))
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[0, 1, 2], [3, 4]]


def slow_identity(x: np.int64) -> np.int64:
    time.sleep(1e-5)
    return x


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize(
    "dataset",
    [
        Dataset.range(3000),
        Dataset.range(1000).map(slow_identity),
        Dataset.range(1000).shuffle(10).map(slow_identity).prefetch(3),
        Dataset.range(1000).map(slow_identity, num_parallel_calls=3),
        Dataset.range(600).map(lambda x: x + 0 * (1 // int(x % 10))),
    ],
)
def test_threads_that_share_an_iterator_get_each_element_or_error_once(dataset: Dataset) -> None:
    iterator = dataset.as_numpy_iterator()
    found: list[Any] = []
    in_threads(8, lambda: found.extend(collect(iterator)))
    assert len(found) == dataset.cardinality()
    assert sorted(int(x) for x in found if not is_error(x)) == sorted(int(x) for x in dataset.ignore_errors())


@pytest.mark.usefixtures("quick_switches")
def test_a_state_saved_beside_other_threads_is_one_between_two_elements() -> None:
    dataset = Dataset.range(400).shuffle(20, 1, False).map(slow_identity)
    order = [int(x) for x in dataset.as_numpy_iterator()]
    iterator = dataset.as_numpy_iterator()
    states: list[Any] = []

    def read() -> None:
        for _ in iterator:
            states.append(iterator.state_dict())

    in_threads(4, read)
    for state in states[:: len(states) // 20]:
        resumed = dataset.as_numpy_iterator()
        resumed.load_state_dict(state)
        rest = [int(x) for x in resumed]
        assert rest == order[len(order) - len(rest) :]


@pytest.mark.usefixtures("quick_switches")
def test_closing_beside_other_threads_ends_their_iteration() -> None:
    def read(iterator: Any, found: list[int]) -> None:
        with contextlib.suppress(FailedPreconditionError):
            for x in iterator:
                found.append(int(x))
                if len(found) > 50:
                    iterator.close()

    for _ in range(10):
        iterator = Dataset.range(100_000).map(slow_identity).prefetch(2).as_numpy_iterator()
        found: list[int] = []
        in_threads(4, partial(read, iterator, found))
        iterator.close()
        assert len(found) == len(set(found)) < 100_000
        with pytest.raises(FailedPreconditionError, match="closed"):
            next(iterator)


def test_closing_does_not_wait_for_an_element_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydist.pipelines.run.iterator._CLOSE_S", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def wait(x: np.int64) -> np.int64:
        begun.set()
        go_on.wait(20)
        return x

    iterator = Dataset.range(3).map(wait).as_numpy_iterator()
    outcome: list[Any] = []
    reader = threading.Thread(target=lambda: outcome.extend(collect(iterator, 2)))
    reader.start()
    begun.wait(20)
    iterator.close()
    go_on.set()
    reader.join(20)
    assert [kind for kind, _ in outcome] == ["FailedPreconditionError"] * 2


def test_any_error_of_an_element_is_raised_at_its_place_and_the_iterator_goes_on() -> None:
    for threads in (1, 3):
        for error in (Departure("left"), Mute(1, 2)):

            def fail(x: Any, error: BaseException = error) -> Any:
                if x == 2:
                    raise error
                return x

            iterator = iter(Dataset.range(5).map(fail, num_parallel_calls=threads))
            assert [int(next(iterator)) for _ in range(2)] == [0, 1]
            with pytest.raises(type(error)) as caught:
                next(iterator)
            assert caught.value is error
            assert "element 2 of its input." in "".join(error.__notes__)
            assert [int(x) for x in iterator] == [3, 4]

    def leaving() -> Any:
        yield 1
        raise Departure("left")

    generator = iter(Dataset.from_generator(leaving, output_signature=TensorSpec((), np.int64)))
    assert int(next(generator)) == 1
    with pytest.raises(Departure, match="left"):
        next(generator)
    assert list(generator) == [], "a generator that leaves has ended"


@pytest.mark.parametrize("width", [1, 50_000])
def test_an_element_that_cannot_be_converted_is_an_error_at_its_place(width: int) -> None:
    """Small elements share a block, large elements are blocks of their own."""

    def pair(x: np.int64) -> Any:
        return np.full((3, width), x), np.full(2 if x in (7, 8, 19) else 3, x)

    def drawn(iterator: Any) -> list[Any]:
        return [item if is_error(item) else int(item.column(1)[0].as_py()) for item in collect(iterator)]

    dataset = Dataset.range(20).map(pair)
    expected = [x for x in range(20) if x not in (7, 8, 19)]
    iterator = dataset.arrow_batches()
    items: list[Any] = []
    states = [iterator.state_dict()]
    for _ in range(20):
        items += collect(iterator, 1)
        states.append(iterator.state_dict())
    iterator.close()
    assert [x for x in map(str, items) if "Error" in x][0].startswith("('InvalidArgumentError', 'The leaves of a batch")
    assert [place for place, item in enumerate(items) if is_error(item)] == [7, 8, 19]
    for place in range(21):
        resumed = dataset.arrow_batches()
        resumed.load_state_dict(json.loads(json.dumps(states[place])))
        rest = drawn(resumed)
        assert len(rest) == 20 - place
        assert [x for x in rest if not is_error(x)] == [x for x in expected if x >= place]


def test_ctrl_c_while_elements_are_converted_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    iterator = Dataset.range(50).as_numpy_iterator()
    got = [int(next(iterator)) for _ in range(3)]
    convert, hits = iterator._convert, iter([True])

    def interrupted(block: Any) -> Any:
        if next(hits, False):
            raise KeyboardInterrupt
        return convert(block)

    monkeypatch.setattr(iterator, "_convert", interrupted)
    while True:
        try:
            got += [int(x) for x in iterator]
        except KeyboardInterrupt:
            continue
        break
    assert got == list(range(50))
