"""Raydist's own side of every workload, with little data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import raydist as rd
from benchmarks import autotune, batch_map
from benchmarks.pipelines import generate
from benchmarks.pipelines.contenders import CONTENDERS, RAYDIST
from benchmarks.pipelines.peers import raydist_distributed, raydist_itself
from benchmarks.pipelines.peers.raydist_passes import num_rows
from benchmarks.pipelines.scene import Scene
from benchmarks.pipelines.workload import Workload
from benchmarks.pipelines.workloads import WORKLOADS

BY_NAME = {workload.name: workload for workload in WORKLOADS}
ON_RAY = ("mnist_input_workers", "jpeg_input_workers", "object_store_queue", "prefetched_next", "input_worker_scaling")
IN_PROCESS = [workload for workload in WORKLOADS if workload.name not in ON_RAY]
ROWS_SEEN = {"filter": 1_000, "window": 296}  # others see all rows; how many a random filter keeps is not known here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def scene(folder: Path) -> Iterator[Scene]:
    scene = Scene(folder, rows=0)
    with scene.resources:
        yield scene


def prepared(workload: Workload, folder: Path, scene: Scene) -> Scene:
    for name in workload.data:
        generate.ensure(name, folder, smoke=True)
    return Scene(folder, workload.smoke_rows, resources=scene.resources)


@pytest.mark.parametrize("workload", IN_PROCESS, ids=lambda workload: workload.name)
def test_workloads_in_this_process(workload: Workload, folder: Path, scene: Scene) -> None:
    result = raydist_itself.PASSES[workload.name](prepared(workload, folder, scene))()
    if workload.name == "parquet":
        assert 0 < result < workload.smoke_rows
    elif workload.is_timed:
        assert result == ROWS_SEEN.get(workload.name, workload.smoke_rows)
    else:
        assert result > 0


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("ray_cluster")
def test_a_workload_on_input_workers(scene: Scene) -> None:
    read = raydist_itself.PASSES["input_worker_scaling"](Scene(scene.folder, rows=4, num_workers=1))
    assert read() == 4


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("ray_cluster")
def test_blocks_reach_a_replica(scene: Scene) -> None:
    read = raydist_itself.PASSES["object_store_queue"](Scene(scene.folder, rows=2, resources=scene.resources))
    assert read() > 0
    scene.resources.close()


def test_the_wait_for_a_batch_is_told_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raydist_distributed, "PAUSE_S", 0.0)
    batches = iter([torch.zeros(1)] * 3)
    assert 0 <= raydist_distributed.median_wait(batches) < 1_000


def test_every_contender_of_a_workload_is_known() -> None:
    assert {label for workload in WORKLOADS for label in workload.contenders} == set(CONTENDERS)
    assert all(workload.contenders[0].startswith(RAYDIST) for workload in WORKLOADS)
    assert len(BY_NAME) == len(WORKLOADS)


def test_raydist_does_every_workload() -> None:
    assert set(raydist_itself.PASSES) == set(BY_NAME)


def test_rows_are_counted_in_the_first_leaf() -> None:
    assert num_rows(({"x": [1, 2, 3]}, [4])) == 3


def test_data_is_made_once(tmp_path: Path) -> None:
    generate.ensure("mnist_tfrecords", tmp_path, smoke=True)
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    generate.ensure("mnist_tfrecords", tmp_path, smoke=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == first
    assert len(list((tmp_path / "mnist_tfrecords").iterdir())) == generate.NUM_SHARDS


@pytest.mark.parametrize("make", autotune.PIPELINES)
def test_pipelines_give_the_same_with_autotune_and_without(
    make: Callable[[autotune.Scene], rd.Dataset], tmp_path: Path
) -> None:
    autotune.write_files(tmp_path, rows=1000)
    plain = make(autotune.Scene(tmp_path, None, 0.001))
    tuned = make(autotune.Scene(tmp_path, rd.AUTOTUNE, 0.001)).prefetch(rd.AUTOTUNE)
    count = sum(1 for _ in plain)
    assert count == sum(1 for _ in tuned)
    assert count > 0
    assert f"| {make.__name__} |" in str(autotune.compare(make, tmp_path, rows=0.001, repeat=1))


def test_a_map_of_batches_costs_what_its_passes_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batch_map.Batches(np.ones((512, 256), np.float32), batch_bytes=128 << 10, num_rounds=3)
    results = [np.stack(list(dataset.as_numpy_iterator())) for dataset in (batches.mapped(), batches.tuned())]
    assert batches.count == 12
    assert all((result == 2.0).all() and result.shape == (12, 128, 256) for result in results)
    seconds = itertools.cycle([12e-6, 36e-6, 48e-6])
    monkeypatch.setattr(batch_map, "seconds_of_a_pass", lambda dataset: next(seconds))
    monkeypatch.setattr(batch_map.Batches, "function_s", lambda self: 12e-6)
    costs = batch_map.measure(batches, 2, wait=lambda: None)
    assert [round(value, 6) for value in (*costs.mapped, *costs.tuned)] == [1.0, 1.0, 2.0, 2.0]
    assert str(costs) == "| 128 KB | 1 | 1 | 2 |"
    assert str(batch_map.Costs(256 << 10, (5.0,), (31.0,), (30.0,))) == "| 256 KB | 5 | 31 (ABOVE 30) | 30 |"


def test_all_sizes_of_batches_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = batch_map.main(["--smoke"])
    assert [costs.batch_bytes for costs in found] == list(batch_map.SIZES)
    assert "| 1024 KB |" in capsys.readouterr().out
