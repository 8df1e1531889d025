"""Exported models behind Ray Serve: TensorFlow Serving's REST, batches, and versions that replace each other."""

from __future__ import annotations

import base64
import http.client
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import raydist as rd
from raydist.serve.rest import read_inputs
from raydist.training.export import export_module
from tests.conftest import live_actors
from tests.ray_head import free_ports
from tests.refused import check_refused

pytestmark = pytest.mark.timeout(300)


class Server:
    """Applications of one Serve, one at a time."""

    def __init__(self, port: int) -> None:
        self.port = port

    def run(self, directory: Path, name: str = "m", **options: Any) -> None:
        from ray import serve

        serve.run(rd.serve.app(directory, name, **options), name="tested", route_prefix="/")

    def ask(self, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        """Return the status and the answer; a body that is no text is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, str | None) else json.dumps(body)
        connection.request(method or ("GET" if body is None else "POST"), path, content)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        return response.status, answer

    def predict(self, **body: Any) -> Any:
        status, answer = self.ask("/v1/models/m:predict", body)
        assert status == 200, answer
        return answer


@pytest.fixture(scope="module")
def serving(ray_cluster: None, shared_actors: set[str]) -> Iterator[Server]:
    """A Serve of the session's cluster."""
    from ray import serve

    (port,) = free_ports(1)
    before = live_actors()
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    shared_actors.update(live_actors() - before)
    yield Server(port)
    serve.shutdown()


@pytest.fixture
def server(serving: Server) -> Iterator[Server]:
    """The Serve, without an application afterwards."""
    from ray import serve

    yield serving
    serve.delete("tested")


class Two(nn.Module):
    """Two inputs, two outputs."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sum": x.sum(1) * scale, "double": 2 * x}


@pytest.mark.ray
def test_requests_and_answers_are_tensorflow_servings(tmp_path: Path, server: Server) -> None:
    export_module(Two(), tmp_path, (torch.zeros(1, 2), torch.zeros(1)))
    server.run(tmp_path)
    rows = [{"x": [1, 2], "scale": 1}, {"x": [3, 4.5], "scale": 2}]
    columns = {"x": [[1, 2], [3, 4.5]], "scale": [1, 2]}
    assert server.predict(instances=rows, signature_name="serving_default") == {
        "predictions": [{"double": [2, 4], "sum": 3}, {"double": [6, 9], "sum": 15}]
    }
    expected = {"outputs": {"double": [[2, 4], [6, 9]], "sum": [3, 15]}}
    assert server.predict(inputs=columns) == expected
    assert server.ask("/v1/models/m/versions/1:predict", {"inputs": columns}) == (200, expected)
    available = {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
    for path in ("/v1/models/m", "/v1/models/m/versions/1"):
        assert server.ask(path) == (200, {"model_version_status": [available]})
    status, answer = server.ask("/v1/models/m/metadata")
    (signature,) = answer["metadata"]["signature_def"]["signature_def"].values()
    assert (status, answer["model_spec"]["version"], list(signature["outputs"])) == (200, "1", ["double", "sum"])
    assert signature["inputs"]["x"] == {
        "dtype": "DT_FLOAT",
        "tensor_shape": {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False},
        "name": "x",
    }
    for path, body, method, code, message in [
        ("/v1/models/other:predict", {"inputs": columns}, None, 404, "Servable not found"),
        ("/v1/models/m/versions/2", None, None, 404, "Servable not found"),
        ("/v1/models/m:classify", {"inputs": columns}, None, 404, "Malformed request: POST"),
        ("/v1/models/m:predict", None, "GET", 404, "Malformed request: GET"),
        ("/v1/models/m:predict", "{", None, 400, "must be JSON"),
        ("/v1/models/m:predict", {"inputs": [1]}, None, 400, "by name"),
        ("/v1/models/m:predict", {"inputs": {**columns, "scale": [1]}}, None, 400, "one number of rows"),
        ("/v1/models/m:predict", {"instances": [{"x": [1], "scale": 1}]}, None, 400, "'x' must have the shape"),
        ("/v1/models/m:predict", {"instances": [{"x": ["a", "b"], "scale": 1}]}, None, 400, "array of numbers"),
    ]:
        status, answer = server.ask(path, body, method)
        assert (status, answer.keys()) == (code, {"error"}), (path, answer)
        assert message in answer["error"], (path, answer)


def test_bodies_that_are_no_requests_are_refused() -> None:
    check_refused(
        lambda body: read_inputs(json.dumps(body).encode(), ["x"]),
        [
            ([1], 'either "instances" or "inputs"'),
            ({}, 'either "instances" or "inputs"'),
            ({"instances": [1], "inputs": [1]}, 'either "instances" or "inputs"'),
            ({"instances": []}, "at least one row"),
            ({"instances": {"x": 1}}, "at least one row"),
            ({"instances": [{"x": 1}, {"y": 1}]}, "the same inputs"),
            ({"instances": [{"x": 1}, 1]}, "the same inputs"),
            ({"inputs": [1], "signature_name": "train"}, "must be \"serving_default\", got 'train'"),
            ({"inputs": [{"b64": "%"}]}, "must be JSON"),
        ],
    )
    with pytest.raises(rd.InvalidArgumentError, match="must be JSON"):
        read_inputs(b"[" * 100_000, ["x"])


@pytest.mark.ray
def test_raw_features_are_transformed_and_joined(tmp_path: Path, server: Server) -> None:
    """Requests of one batch have different numbers of words in a row."""
    words = rd.feature.categorical_column_with_hash_bucket("words", 100)
    space = rd.feature.FeatureSpace([rd.feature.numeric_column("age"), rd.feature.embedding_column(words, 3)])
    module = nn.Sequential(rd.DenseFeatures(space), nn.Linear(4, 2)).double()
    examples = {"age": [1.0, 2.0], "words": [["a"], ["b", "c"]]}
    rd.Model(module).export(tmp_path, examples, space)
    server.run(tmp_path, batch_wait_timeout_s=0.1)
    requests = [[{"age": i, "words": [f"w{j}" for j in range(i % 4)]} for i in range(n, n + 2)] for n in range(12)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda rows: server.predict(instances=rows), requests))
    for rows, answer in zip(requests, answers, strict=True):
        raw = space.transform({key: [row[key] for row in rows] for key in ("age", "words")})
        expected = module({name: torch.as_tensor(value) for name, value in raw.items()})
        np.testing.assert_allclose(answer["predictions"], expected.detach(), rtol=1e-9)
    encoded = {"b64": base64.b64encode(b"w0").decode()}
    assert server.predict(inputs={"age": [1], "words": [[encoded]]}) == {"outputs": answers[1]["predictions"][:1]}
    for columns in ({"age": [1]}, {"age": [1, 2], "words": [["a"], None]}, {"age": [[1, 2]], "words": [["a"]]}):
        status, answer = server.ask("/v1/models/m:predict", {"inputs": columns})
        assert (status, answer.keys()) == (400, {"error"}), columns


@pytest.mark.ray
def test_a_bad_request_of_a_batch_fails_alone(tmp_path: Path, server: Server) -> None:
    table = nn.Embedding(10, 2)
    rd.Model(table).export(tmp_path, torch.zeros(1, dtype=torch.long))
    server.run(tmp_path, max_batch_size=16, batch_wait_timeout_s=0.1)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: server.ask("/v1/models/m:predict", {"instances": [i]}), range(16)))
    assert [status for status, _ in found] == [200] * 10 + [400] * 6
    np.testing.assert_allclose([answer["predictions"][0] for _, answer in found[:10]], table.weight.detach())


def test_calls_of_one_version_run_as_one() -> None:
    from raydist.serve.model_server import run_all

    sizes: list[tuple[str, int]] = []

    def model(name: str) -> Any:
        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            sizes.append((name, len(tensors[0])))
            return [tensors[0] + 1]

        return mock.Mock(run=run)

    one, two = model("1"), model("2")
    results = run_all([(one, [torch.zeros(2)]), (two, [torch.full((1,), 5.0)]), (one, [torch.ones(3)])])
    assert sorted(sizes) == [("1", 5), ("2", 1)]
    assert [result[0].tolist() for result in results] == [[1, 1], [6], [2, 2, 2]]


class Constant(nn.Module):
    """Returns its version."""

    def __init__(self, version: float) -> None:
        super().__init__()
        self.version = nn.Parameter(torch.tensor(version))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0] * 0 + self.version


def until(condition: Callable[[], bool], within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.05)


@pytest.mark.ray
def test_no_request_fails_while_a_version_replaces_another(tmp_path: Path, server: Server) -> None:
    """F8: a thousand requests from eight clients, and more until the second version answers."""
    export_module(Constant(1.0), tmp_path, torch.zeros(1, 1))
    server.run(tmp_path)
    found: list[float] = []

    def client(number: int) -> None:
        done = 0
        while done < 125 or found[-1] != 2.0:
            found.append(server.predict(instances=[[number]])["predictions"][0])
            done += 1
            assert done < 20_000, "the second version never answered"

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, number) for number in range(8)]
        until(lambda: len(found) > 200)
        second = Path(export_module(Constant(2.0), tmp_path, torch.zeros(1, 1)))
        for each in clients:
            each.result()
    assert len(found) >= 1000
    assert set(found) == {1.0, 2.0}

    broken = tmp_path / ".3"
    shutil.copytree(second, broken)
    (broken / "program.pt2").write_bytes(b"")
    broken.rename(tmp_path / "3")

    def states() -> list[tuple[str, str]]:
        return [(each["version"], each["state"]) for each in server.ask("/v1/models/m")[1]["model_version_status"]]

    until(lambda: states() == [("2", "AVAILABLE"), ("3", "END")])
    assert server.predict(instances=[[0]]) == {"predictions": [2.0]}
    shutil.rmtree(tmp_path / "3")
    until(lambda: states() == [("2", "AVAILABLE")])


def test_the_error_says_what_to_install_or_to_change(tmp_path: Path) -> None:
    with (
        mock.patch.dict(sys.modules, {"ray.serve": None, "raydist.serve.model_server": None}),
        pytest.raises(rd.FailedPreconditionError, match=r"pip install 'raydist\[serve\]'"),
    ):
        rd.serve.app(tmp_path, "m")
    check_refused(
        lambda options: rd.serve.app(tmp_path, **options),
        [
            ({"name": "a/b"}, "got 'a/b'"),
            ({"name": "m", "max_batch_size": 0}, "max_batch_size must be >= 1"),
            ({"name": "m", "batch_wait_timeout_s": -1}, "batch_wait_timeout_s must be >= 0"),
        ],
    )
    assert rd.serve.app(tmp_path, "2026-model.v1") is not None
