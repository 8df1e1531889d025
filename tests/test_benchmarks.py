from __future__ import annotations

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.measuring import Throughput, seconds_of
from benchmarks.pipelines import BENCHMARKS as PIPELINES
from benchmarks.steps import StepTime


@pytest.mark.parametrize("benchmark", PIPELINES, ids=lambda benchmark: benchmark.name)
def test_pipeline_benchmarks_run(benchmark: Throughput) -> None:
    assert benchmark.run(smoke=True).endswith(" examples/s")


def test_step_benchmark_runs() -> None:
    (alone,) = [b for b in BENCHMARKS if isinstance(b, StepTime) and b.replicas == 1 and "13k" in b.name]
    assert "ms a step" in alone.run(smoke=True)


def test_a_pass_that_loses_examples_is_not_timed() -> None:
    with pytest.raises(AssertionError, match="10 expected, 9 seen"):
        seconds_of(lambda: 9, expected=10)


def test_names_differ() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names)
