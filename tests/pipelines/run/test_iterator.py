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
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.build import build, chain_of, fuse, name_operations, plan_as_written, walk
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.run.plan import make_nested_plan, make_plan
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


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_dataset_inside_a_function_is_not_read_ahead() -> None:
    graph = Dataset.range(3).take(-1).map(abs)._op
    assert [op.name for op in walk(make_plan(graph, Options()).optimised)] == ["range", "map", "prefetch"]
    assert [op.name for op in walk(make_nested_plan(graph, Options()).optimised)] == ["range", "map"]


def test_names_do_not_change_with_what_follows() -> None:
    start = Dataset.range(3).shuffle(2)
    names = name_operations(start._op)
    longer = name_operations(Dataset.zip(start.map(abs), start)._op)
    assert names == {key: longer[key] for key in names}
    assert sorted(longer.values()) == ["map-2", "range-0", "shuffle-1", "zip-3"]


def test_dimensions_in_which_the_first_three_differ_are_none() -> None:
    calls: list[int] = []

    def grow(x: np.int64) -> dict[str, Any]:
        calls.append(int(x))
        return {"rows": np.zeros((2, x)), "same": np.zeros(3), "rank": np.zeros((1,) * int(x)), "text": "t"}

    dataset = Dataset.range(9).map(grow)
    assert dataset.element_spec == {
        "rows": TensorSpec((2, None), "float64"),
        "same": TensorSpec((3,), "float64"),
        "rank": TensorSpec(None, "float64"),
        "text": TensorSpec((), "U"),
    }
    assert calls == [0, 1, 2]
    assert dataset.batch(1).element_spec["rows"] == TensorSpec((None, 2, None), "float64")

    def odd(x: np.int64) -> Any:
        if x == 2:
            raise ValueError("only two")
        return np.zeros(3 if x < 5 else 7)

    later = Dataset.range(8).map(odd)
    assert later.element_spec == TensorSpec((3,), "float64")
    assert [len(x) for x in later.ignore_errors()] == [3, 3, 3, 3, 7, 7, 7], "later elements may differ and fail"
    mixed = Dataset.range(3).map(lambda x: np.zeros(2) if x < 2 else "text")
    assert mixed.element_spec == TensorSpec((2,), "float64")


def test_slow_functions_are_called_once() -> None:
    calls: list[int] = []

    def slow(x: np.int64) -> Any:
        calls.append(int(x))
        time.sleep(0.25)
        return x

    assert Dataset.range(9).map(slow).element_spec == TensorSpec((), "int64")
    assert calls == [0]


def noisy(x: float, *, rng: np.random.Generator) -> float:
    return float(rng.random())


def stages(dataset: Dataset, **flags: bool) -> list[list[str]]:
    options = Options(optimization=OptimizationOptions(**flags))
    names = name_operations(dataset._op)
    chain, _ = chain_of(dataset._op)
    ctx = IterContext(0, (0,), options, InlineExecutor(), names, build, plan_as_written)
    return [[names[id(op)] for op, _ in stage] for stage in fuse(chain, ctx)]


def test_neighbours_are_fused() -> None:
    numbers = Dataset.range(9)
    dataset = numbers.map(abs).filter(lambda x: True).map(abs)
    assert stages(dataset) == [["map-1", "filter-2", "map-3"]]
    assert stages(dataset, map_fusion=False) == [["map-1"], ["filter-2"], ["map-3"]]
    assert stages(dataset.map(abs), filter_fusion=False) == [["map-1"], ["filter-2"], ["map-3", "map-4"]]
    assert stages(numbers.map(noisy).map(noisy)) == [["map-1", "map-2"]]
    assert stages(numbers.filter(lambda x: True).map(noisy)) == [["filter-1"], ["map-2"]], "random, behind a filter"
    of_other_parallelism = numbers.map(abs).map(abs, num_parallel_calls=2).map(abs, num_parallel_calls=1)
    assert stages(of_other_parallelism) == [["map-1"], ["map-2"], ["map-3"]]


def test_the_three_views() -> None:
    dataset = Dataset.from_tensor_slices(np.zeros((9, 2))).shuffle(3, seed=1).map(abs, num_parallel_calls=1).skip(0)
    lines = dataset.map(lambda x: x, num_parallel_calls=4).batch(2).explain().splitlines()
    assert lines[0] == "as written:"
    assert lines[1] == "  batch-5: batch(2)"
    assert "          shuffle-1: shuffle(3, seed=1)" in lines
    changed = next(number for number, line in enumerate(lines) if line.startswith("as optimised (noop_elimination, "))
    optimised = lines[changed : lines.index("stages:")]
    assert not any("skip" in line for line in optimised)
    assert any("gather(" in line for line in optimised)
    stages = lines[lines.index("stages:") :]
    assert "  from_tensor_slices-0+map-2: in the consumer's thread" in stages
    assert "  map-4: on up to 4 threads or workers" in stages


def test_where_stages_will_run_with_these_options() -> None:
    ds = Dataset.range(9).map(lambda x: x, num_parallel_calls=1).map(lambda x: x).map(lambda x: x, 3)
    for workers, left_open, three in (
        (0, "on the iterator's executor", "on up to 3 threads or workers"),
        (1, "on 1 input worker", "on 1 input worker, up to 3 blocks at a time"),
        (4, "on 4 input workers", "on 4 input workers, up to 3 blocks at a time"),
    ):
        options = Options(num_input_workers=workers) if workers else Options()
        lines = ds.with_options(options).explain().partition("stages:\n")[2].splitlines()
        assert lines[1:4] == ["  map-1: in the consumer's thread", f"  map-2: {left_open}", f"  map-3: {three}"]
