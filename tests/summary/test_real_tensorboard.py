"""TensorBoard itself, on a free port of this machine, shows what was written."""

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
from tests.summary.every_kind import pixels
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
    """What is asked for, once it has been loaded."""
    until = time.monotonic() + 30
    while not holds(found := ask()) and time.monotonic() < until:
        time.sleep(0.2)
    return found


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
