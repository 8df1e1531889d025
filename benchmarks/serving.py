"""What serving adds to the module: latency beside a bare Ray Serve deployment, throughput beside no batches.

`python -m benchmarks.serving`, in two parts:

- 500 requests of one client, one row each, to a small MLP: the median beside that of a bare deployment of the module,
  which reads JSON and answers with JSON. Both are asked in turn.
- 32 clients at once and a model call of 20 ms, whatever its rows: answers a second beside `max_batch_size=1`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from typing import Any

import ray
import torch
from ray import serve
from torch import nn

import raydist as rd

WIDTH = 16
LATENCY_BAR = (1.2, 1.0)  # times the bare one, and milliseconds
THROUGHPUT_BAR = 3.0
BODY = json.dumps({"instances": [[0.5] * WIDTH]})


class Layers(nn.Module):
    """One small layer, applied many times: the time of a call hardly depends on its rows."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = torch.tanh(self.layer(x))
        return x


class Bare:
    """What one writes without raydist."""

    def __init__(self, count: int) -> None:
        self.module = Layers(count).eval()

    async def __call__(self, request: Any) -> dict[str, Any]:
        rows = torch.tensor((await request.json())["instances"])
        with torch.no_grad():
            return {"predictions": self.module(rows).tolist()}


class Client:
    """One connection."""

    def __init__(self, port: int, path: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.path = path

    def seconds(self) -> float:
        """Of one request."""
        began = time.perf_counter()
        self.connection.request("POST", self.path, BODY)
        response = self.connection.getresponse()
        response.read()
        assert response.status == 200, response.status
        return time.perf_counter() - began


def layers_for(seconds: float) -> int:
    """How many layers an exported program takes this long for, on one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        program = rd.load_exported(rd.Model(Layers(100)).export(folder, torch.zeros(1, WIDTH)))
        times = []
        for _ in range(20):
            began = time.perf_counter()
            program(torch.zeros(1, WIDTH))
            times.append(time.perf_counter() - began)
    return max(1, round(100 * seconds / statistics.median(times)))


def latency(port: int, paths: list[str], requests: int) -> list[float]:
    """Median milliseconds of each path, asked in turn."""
    clients = [Client(port, path) for path in paths]
    for client in clients:
        for _ in range(20):
            client.seconds()
    times = [[client.seconds() for client in clients] for _ in range(requests)]
    return [1e3 * statistics.median(each) for each in zip(*times, strict=True)]


def throughput(port: int, path: str, clients: int, seconds: float) -> float:
    """Answers a second for clients that each ask again once they have the answer."""
    counts = [0] * clients
    end = time.monotonic() + seconds

    def ask(number: int) -> None:
        client = Client(port, path)
        while time.monotonic() < end:
            client.seconds()
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def run(application: Any, name: str) -> str:
    serve.run(application, name=name, route_prefix=f"/{name}")
    return f"/{name}/v1/models/m:predict"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    requests, seconds = (5, 0.5) if chosen.smoke else (500, 8.0)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": chosen.port})
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        rd.Model(Layers(4)).export(small, torch.zeros(1, WIDTH))
        rd.Model(Layers(layers_for(0.02))).export(large, torch.zeros(1, WIDTH))

        bare_deployment = serve.deployment(max_ongoing_requests=100)(Bare)
        paths = [run(bare_deployment.bind(4), "bare"), run(rd.serve.app(small, "m"), "exported")]
        bare, ours = latency(chosen.port, paths, requests)
        most = LATENCY_BAR[0] * bare + LATENCY_BAR[1]
        print(f"p50: {ours:.2f} ms, bare {bare:.2f} ms (bar {most:.2f} ms)", flush=True)
        serve.delete("bare")
        serve.delete("exported")

        alone, together = (
            run(rd.serve.app(large, "m", max_batch_size=1), "alone"),
            run(rd.serve.app(large, "m"), "batch"),
        )
        rates = [throughput(chosen.port, path, 32, seconds) for path in (alone, together)]
        ratio = rates[1] / rates[0]
        print(f"32 clients: {rates[1]:.0f}/s, without batches {rates[0]:.0f}/s: {ratio:.1f} x (bar {THROUGHPUT_BAR})")
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
