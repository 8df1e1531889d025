from __future__ import annotations

from hypothesis import find, given

from tests.contracts.op import collect, iterate, same
from tests.pipelines.random_pipelines import STEPS, Pipeline, evaluate, pipelines

LIMIT = 60


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
    skipped = find(pipelines(), lambda pipeline: pipeline.method == "skip")
    assert repr(skipped) == "Dataset.range(0).skip(0)"


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
