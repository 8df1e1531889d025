from __future__ import annotations

import numpy as np

from raydist.dataset import Dataset
from raydist.options import OptimizationOptions, Options
from raydist.pipelines.engine.build import build, name_operations, plan_as_written
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.fusion import chain_of, fuse
from raydist.pipelines.engine.op import IterContext


def noisy(x: float, *, rng: np.random.Generator) -> float:
    return float(rng.random())


def stages(dataset: Dataset, **flags: bool) -> list[list[str]]:
    options = Options(optimization=OptimizationOptions(**flags))
    names = name_operations(dataset._op)
    chain, _ = chain_of(dataset._op)
    ctx = IterContext(0, (0,), options, InlineExecutor(), names, build, plan_as_written)
    return [[names[id(op)] for op, _ in stage] for stage in fuse(chain, ctx)]


def test_neighbours_are_fused() -> None:
    dataset = Dataset.range(9).map(abs).filter(lambda x: True).map(abs)
    assert stages(dataset) == [["map-1", "filter-2", "map-3"]]
    assert stages(dataset, map_fusion=False) == [["map-1"], ["filter-2"], ["map-3"]]
    assert stages(dataset.map(abs), filter_fusion=False) == [["map-1"], ["filter-2"], ["map-3", "map-4"]]


def test_random_functions_behind_a_filter_start_a_stage() -> None:
    assert stages(Dataset.range(9).map(noisy).map(noisy)) == [["map-1", "map-2"]]
    assert stages(Dataset.range(9).filter(lambda x: True).map(noisy)) == [["filter-1"], ["map-2"]]


def test_another_parallelism_starts_a_stage() -> None:
    dataset = Dataset.range(9).map(abs).map(abs, num_parallel_calls=2).map(abs, num_parallel_calls=1)
    assert stages(dataset) == [["map-1"], ["map-2"], ["map-3"]]


def test_explain_shows_what_runs_together() -> None:
    dataset = Dataset.range(9).map(abs).filter(lambda x: True)
    assert "map-1+filter-2: on the iterator's executor" in dataset.explain()
    apart = Options(optimization=OptimizationOptions(filter_fusion=False))
    assert "  map-1: on the iterator's executor" in dataset.with_options(apart).explain().splitlines()
