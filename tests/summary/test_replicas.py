"""Steps on several replicas show what one replica would; TensorBoard itself shows what was written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from tests.summary.reading import everything, loop, pixels, show_everything
from tests.training.toys import compiled, regression, small_net

Get = Callable[..., Any]


@contextmanager
def tensorboard(logdir: Path, output: Path) -> Iterator[Get]:
    """Runs it; gives what asks its routes."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0", "--host", "127.0.0.1"]
    with output.open("wb") as log:
        process = subprocess.Popen([*command, "--load_fast=false"], stdout=log, stderr=log, env=dict(os.environ))
    try:
        yield lambda route, **query: _get(f"{_address(output, process)}{route}?{urllib.parse.urlencode(query)}")
    finally:
        process.kill()
        process.wait(10)


def _address(output: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 50
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"at (http://127.0.0.1:\d+)/", output.read_text()):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(output.read_text())


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        data = answer.read()
        return json.loads(data) if "json" in answer.headers["Content-Type"] else data


def eventually(ask: Callable[[], Any], holds: Callable[[Any], bool]) -> Any:
    """Ask until the answer holds, because TensorBoard loads files in the background."""
    until = time.monotonic() + 30
    while not holds(found := ask()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


@pytest.mark.long
@pytest.mark.timeout(120)
def test_tensorboard_shows_it(tmp_path: Path) -> None:
    logdir = tmp_path / "logs"
    with rd.OneDeviceStrategy("cpu").scope():
        model = compiled(small_net())
    history = model.fit(regression(8, 4), epochs=2, callbacks=[rd.TensorBoard(logdir)], verbose=False).history
    with rd.summary.create_file_writer(logdir / "own") as writer, writer.as_default(step=0):
        rd.summary.histogram("values", torch.arange(10.0))
        rd.summary.image("picture", torch.full((1, 1, 2, 2), 0.2), max_outputs=1)
        rd.summary.audio("sound", torch.zeros(1, 8, 1), 8000, max_outputs=1)
        rd.summary.text("note", "it *works*")
        rd.summary.embedding("words", torch.eye(2), metadata=["a", "b"])
    with tensorboard(logdir, tmp_path / "output") as get:
        tags = eventually(lambda: get("/data/plugin/scalars/tags"), lambda tags: "epoch_loss" in tags.get("train", {}))
        assert {"epoch_loss", "epoch_learning_rate", "input/wait"} <= set(tags["train"])
        points = get("/data/plugin/scalars/scalars", run="train", tag="epoch_loss")
        assert [step for _, step, _ in points] == [2, 4]
        assert [value for _, _, value in points] == pytest.approx(history["loss"])
        eventually(lambda: get("/data/plugin/text/tags"), lambda tags: "note" in tags.get("own", ()))
        assert "works" in json.dumps(get("/data/plugin/text/text", run="own", tag="note"))
        assert (
            sum(bucket[2] for bucket in get("/data/plugin/histograms/histograms", run="own", tag="values")[0][2]) == 10
        )
        query = {"run": "own", "tag": "picture", "sample": 0}
        (image,) = get("/data/plugin/images/images", **query)
        assert pixels(get(f"/data/plugin/images/individualImage?{image['query']}&x=")) == [[51, 51], [51, 51]]
        assert get("/data/plugin/audio/audio", run="own", tag="sound", sample=0)[0]["contentType"] == "audio/wav"
        assert get("/data/plugin/graphs/info")["train"]["run_graph"]
        assert get("/data/plugin/projector/runs") == ["own"]
        (entry,) = get("/data/plugin/projector/info", run="own")["embeddings"]
        assert entry["tensorName"] == "words:00000"
        assert get("/data/plugin/projector/metadata", run="own", name="words:00000") == b"a\nb\n"


def shown(strategy: rd.Strategy, logdir: Path) -> dict[str, Any]:
    """Three batches of 5, 5 and 1 rows: with several replicas some have more rows than others, and some none."""
    data = strategy.distribute_dataset(rd.Dataset.range(11).batch(5))
    with rd.summary.create_file_writer(logdir) as writer:
        for step, batch in enumerate(data):
            with writer.as_default(step=step):
                strategy.run(show_everything, args=(batch,))
        with writer.as_default():
            strategy.run(loop, args=(iter(data),))
            rd.summary.scalar("of the driver", 0.5, step=2)
    return everything(logdir)


def test_one_replica_shows_the_rows(tmp_path: Path) -> None:
    found = shown(rd.OneDeviceStrategy("cpu"), tmp_path)
    assert found["scalars"] == {
        "mean": [(0, 2.0), (1, 7.0), (2, 10.0)],
        "rows": [(0, 5.0), (1, 5.0), (2, 1.0)],
        "in a loop": [(0, 2.0), (2, 10.0)],
        "of the driver": [(2, 0.5)],
    }
    assert sorted(found["images"]) == ["first", "rows/0", "rows/1", "rows/2"]
    assert found["images"]["rows/1"] == [(0, [[[13] * 3] * 4] * 2), (1, [[[77] * 3] * 4] * 2)]
    assert found["images"]["first"] == [(0, [[0]]), (1, [[5]]), (2, [[10]])]
    assert found["audio"]["rows/1"][0] == (0, (8000, 2, [round(32767 / 20)] * 16))
    assert found["texts"] == {"note": [(step, [b"said **once**"]) for step in range(3)]}
    assert [histogram.num for _, histogram in found["histograms"]["values"]] == [5, 5, 1]


@pytest.mark.ray
def test_two_replicas_and_closures_show_the_same(
    two: rd.MirroredStrategy, served: Callable[[int], rd.ParameterServerStrategy], tmp_path: Path
) -> None:
    alone = shown(rd.OneDeviceStrategy("cpu"), tmp_path / "one")
    assert shown(two, tmp_path / "two") == alone
    assert shown(served(1), tmp_path / "served") == alone


@pytest.mark.ray
@pytest.mark.long
def test_three_replicas_show_the_same(mirrored: Callable[[int], rd.MirroredStrategy], tmp_path: Path) -> None:
    assert shown(mirrored(3), tmp_path / "three") == shown(rd.OneDeviceStrategy("cpu"), tmp_path / "one")


@pytest.mark.ray
def test_a_step_may_hold_its_writer_and_counts_its_own_steps(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    with two.scope():
        rd.get_global_step().zero_()
    with rd.summary.create_file_writer(tmp_path) as writer:

        def step() -> None:
            with writer.as_default():
                rd.summary.scalar("rank", float(rd.get_replica_context().replica_id_in_sync_group))
            rd.get_global_step().add_(1)

        for _ in range(3):
            two.run(step)
        writer.flush()
        assert everything(tmp_path)["scalars"] == {"rank": [(0, 0.5), (1, 0.5), (2, 0.5)]}


@pytest.mark.ray
def test_what_came_before_a_step_that_failed_is_written(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    def step(number: int) -> None:
        rd.summary.scalar("number", float(number), step=number)
        if number == 2:
            raise ZeroDivisionError

    writer = rd.summary.create_file_writer(tmp_path)
    with writer.as_default():
        for number in range(3):
            two.run(step, args=(number,))
        with pytest.raises(ZeroDivisionError):
            writer.close()
    assert everything(tmp_path)["scalars"] == {"number": [(0, 0.0), (1, 1.0)]}


@pytest.mark.ray
def test_fit_shows_the_same_on_replicas(two: rd.MirroredStrategy, tmp_path: Path) -> None:
    found = []
    for name, strategy in (("one", rd.OneDeviceStrategy("cpu")), ("two", two)):
        with strategy.scope():
            rd.get_global_step().zero_()
            model = compiled(small_net())
        board = rd.TensorBoard(tmp_path / name, histogram_freq=1, update_freq=2)
        model.fit(regression(10, 4), epochs=2, callbacks=[board], verbose=False)
        found.append(everything(tmp_path / name / "train"))
    one, several = found
    for curve in ("epoch_loss", "batch_loss", "epoch_learning_rate"):
        assert [step for step, _ in several["scalars"][curve]] == [step for step, _ in one["scalars"][curve]]
        assert [v for _, v in several["scalars"][curve]] == pytest.approx([v for _, v in one["scalars"][curve]], 1e-6)
    assert "input/wait" in several["scalars"]
    assert [step for step, _ in several["texts"]["input/bottleneck"]] == [3, 6]
    assert several["histograms"].keys() == one["histograms"].keys()
