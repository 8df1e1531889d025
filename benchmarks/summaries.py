"""What summaries cost a training step: with and without, in turn: `python -m benchmarks.summaries`.

An MLP of 1.9 million parameters on two replicas, 10 scalars and one histogram in every step. The histogram is of one
tensor, largest first: what a step pays for it is counting its values.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import raydist as rd

LIMIT = 1.05  # times the step without


def make_step(what: str) -> tuple[Callable[[rd.Strategy], Callable[..., Any]], str]:
    """A step that shows 10 scalars, and a histogram of `what`."""

    def build(strategy: rd.Strategy) -> Callable[..., Any]:
        with strategy.scope():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

        def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            logits = net(x)
            loss = nn.functional.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            for number in range(10):
                rd.summary.scalar(f"loss/{number}", loss)
            if what == "logits":
                rd.summary.histogram("values", logits)
            elif what == "first layer":
                rd.summary.histogram("values", net[0].weight)

        return train_step

    return build, what


def seconds_a_step(
    strategy: rd.Strategy, step: Callable[..., Any], batch: Any, writer: Any, *, steps: int, first: int
) -> float:
    """Of some steps, with a writer or without one, until all have ended."""
    began = time.perf_counter()
    for number in range(first, first + steps):
        if writer is None:
            strategy.run(step, args=batch)
        else:
            with writer.as_default(step=number):
                strategy.run(step, args=batch)
    strategy.stats()
    return (time.perf_counter() - began) / steps


def measure(strategy: rd.Strategy, what: str, *, rows: int, steps: int, rounds: int) -> tuple[float, float, float]:
    """Milliseconds without and with, and the median of the ratios of neighbouring rounds."""
    build, _ = make_step(what)
    step = build(strategy)
    data = rd.Dataset.from_tensors((torch.randn(rows, 784), torch.randint(0, 10, (rows,))))
    batch = next(iter(strategy.distribute_dataset(data)))
    without, with_them = [], []
    with tempfile.TemporaryDirectory() as folder, rd.summary.create_file_writer(folder) as writer:
        seconds_a_step(strategy, step, batch, None, steps=steps, first=0)
        seconds_a_step(strategy, step, batch, writer, steps=steps, first=0)
        for number in range(1, rounds + 1):
            without.append(seconds_a_step(strategy, step, batch, None, steps=steps, first=0))
            with_them.append(seconds_a_step(strategy, step, batch, writer, steps=steps, first=number * steps))
    ratio = statistics.median(a / b for a, b in zip(with_them, without, strict=True))
    return 1e3 * statistics.median(without), 1e3 * statistics.median(with_them), ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--what", nargs="+", default=["logits", "first layer"])
    chosen = parser.parse_args()
    steps, rounds = (2, 1) if chosen.smoke else (20, 7)
    with rd.MirroredStrategy("cpu" if chosen.smoke else ["CPU:0", "CPU:1"]) as strategy:
        for what in chosen.what:
            without, with_them, ratio = measure(strategy, what, rows=chosen.rows, steps=steps, rounds=rounds)
            print(
                f"{what:12}  {without:7.2f} ms without, {with_them:7.2f} ms with: {ratio:.3f} x (bar {LIMIT})",
                flush=True,
            )


if __name__ == "__main__":
    main()
