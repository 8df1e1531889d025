"""Training steps: the time of one synchronous step, and from nothing to the first one: `python -m benchmarks.steps`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import raydist as rd

PIXELS = 28 * 28


def mlp(*hidden: int) -> nn.Module:
    sizes = (PIXELS, *hidden)
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10))


def cnn() -> nn.Module:
    body = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * 5 * 5, 10))


def random_images(num_rows: int, batch_size: int) -> rd.Dataset:
    draw = np.random.default_rng(0)
    pixels = draw.random((num_rows, 1, 28, 28), dtype=np.float32)
    return rd.Dataset.from_tensor_slices((pixels, draw.integers(0, 10, num_rows))).batch(batch_size).repeat()


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step, and seconds until the first one is done.

    Attributes:
        label: Which model.
        make_network: Builds it.
        batch_size: Rows of the global batch.
        replicas: 1 runs in this process, more are actors.
        num_steps: Steps that are timed.
    """

    label: str
    make_network: Callable[[], nn.Module]
    batch_size: int
    replicas: int
    num_steps: int = 200

    @property
    def name(self) -> str:
        """What is measured."""
        return f"{self.label}, G={self.batch_size}, replicas: {self.replicas}"

    def run(self, *, smoke: bool) -> str:
        """Train on random images; the clock runs while no value is read."""
        num_steps = 2 if smoke else self.num_steps
        began = time.perf_counter()
        with self.make_strategy() as strategy:
            with strategy.scope():
                network = self.make_network()
                optimizer = torch.optim.SGD(network.parameters(), lr=0.01)

            def train_step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
                pixels, labels = batch
                optimizer.zero_grad()
                loss = F.cross_entropy(network(pixels), labels)
                loss.backward()
                optimizer.step()
                return loss.detach()

            batches = iter(strategy.distribute_dataset(random_images(10 * self.batch_size, self.batch_size)))

            def train(steps: int) -> float:
                for _ in range(steps):
                    loss = strategy.run(train_step, args=(next(batches),))
                strategy.local_results(loss)  # waits for the last step
                return time.perf_counter()

            first = train(1)
            warm = train(num_steps // 10 + 1)
            milliseconds = 1000 * (train(num_steps) - warm) / num_steps
        return f"{milliseconds:.1f} ms a step, first step after {first - began:.1f} s"

    def make_strategy(self) -> rd.Strategy:
        return rd.OneDeviceStrategy("cpu") if self.replicas == 1 else rd.MirroredStrategy(self.replicas)


BENCHMARKS = tuple(
    StepTime(label, make_network, batch_size, replicas)
    for label, make_network, batch_size in (
        ("MLP of 1.9M parameters", lambda: mlp(1024, 1024), 256),
        ("CNN of 35k parameters", cnn, 256),
        ("MLP of 13k parameters", lambda: mlp(16), 128),
    )
    for replicas in (1, 2)
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description="Time of synchronous steps.")
    parser.add_argument("--smoke", action="store_true", help="few steps: to see that they run")
    args = parser.parse_args()
    print("| step | result |\n|---|---|")
    for benchmark in BENCHMARKS:
        print(f"| {benchmark.name} | {benchmark.run(smoke=args.smoke)} |", flush=True)


if __name__ == "__main__":
    main()
