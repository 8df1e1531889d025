from __future__ import annotations

import inspect
from pathlib import Path

from hypothesis import given

from raydist.dataset import Dataset
from tests.contracts.op import collect, iterate, same
from tests.pipelines import random_pipelines
from tests.pipelines.random_functions import fail_some
from tests.pipelines.random_pipelines import NUMBER, STEPS, Pipeline, evaluate, pipelines

LIMIT = 60
NOT_DRAWN = {
    **dict.fromkeys(
        ("from_csv", "from_json", "from_numpy", "from_parquet", "from_tar", "list_files", "load"), "reads files"
    ),
    "from_ray": "needs Ray",
    "snapshot": "keeps files, as the cache in a file that is drawn",
    "ragged_batch": "lists of arrays, which the steps do not take: tests/pipelines/ops/test_grouped.py draws them",
    "apply": "a call of the function, no operation",
}


def elements(pipeline: Pipeline, *, shared: bool = True) -> list[object]:
    iterator = iterate(pipeline.build(shared=shared))
    found = collect(iterator, LIMIT)
    iterator.close()
    return found


@given(pipelines())
def test_what_is_built_twice_is_the_same(pipeline: Pipeline) -> None:
    assert same(elements(pipeline), elements(pipeline))


@given(pipelines())
def test_its_repr_is_its_code(pipeline: Pipeline) -> None:
    written = iterate(evaluate(repr(pipeline)))
    assert same(collect(written, LIMIT), elements(pipeline, shared=False))
    written.close()


def test_repr_is_readable() -> None:
    found = Pipeline("range", (0,), {}, NUMBER).then("map", fail_some, num_parallel_calls=2).then("skip", 0)
    assert repr(found) == "Dataset.range(0).map(fail_some, num_parallel_calls=2).skip(0)"


def test_every_method_that_gives_a_dataset_is_drawn() -> None:
    source = Path(random_pipelines.__file__).read_text()
    methods = [name for name in dir(Dataset) if not name.startswith("_") and _gives_a_dataset(getattr(Dataset, name))]
    missing = [name for name in methods if f'"{name}"' not in source and name not in NOT_DRAWN]
    assert missing == [], "add a line for each of them to SOURCES or STEPS in tests/pipelines/random_pipelines.py"


def _gives_a_dataset(method: object) -> bool:
    return callable(method) and inspect.signature(method).return_annotation in ("Self", "Dataset")


def test_methods_of_many_kinds_are_drawn() -> None:
    seen: set[str] = set()

    @given(pipelines())
    def note(pipeline: Pipeline) -> None:
        step: Pipeline | None = pipeline
        while step is not None:
            seen.add(step.method)
            step = step.input

    note()
    assert len(seen) > len(STEPS) // 2
