"""Graphs become plans: names, specs by probing, fused stages, `explain()`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.engine.build import build, chain_of, fuse, name_operations, plan_as_written, walk
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.run.plan import make_nested_plan, make_plan


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
