"""Training steps on GPUs: raydist beside a bare PyTorch loop, in one run and in turns.

    .venv/bin/python -m benchmarks.gpu [--devices 1] [--steps 20] [--rounds 5]
    .venv/bin/python -m benchmarks.gpu --device cpu          # the same code with small sizes, to try it without a GPU

Two models in bfloat16 autocast: ResNet-50 (channels last, 128 images of 224 x 224) and a transformer of the size of
GPT-2 small (8 rows of 1,024 tokens). Each line is the median time of a step over the rounds, and its speed relative to
the bare loop on one GPU; with several devices every replica has a batch of that size. "waits" are synchronisations of
the host with the GPU that raydist's own code makes in a step, as `torch.cuda.set_sync_debug_mode` reports them.
"input" is a pipeline of images in bytes: rows a second that reach the device, and the share of the time that a step of
50 ms waits for them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import raydist as rd

Parts = tuple[nn.Module, torch.optim.Optimizer, nn.Module]
Many = Callable[[int], None]


class Bottleneck(nn.Module):
    """A block of ResNet-50 (He et al. 2016)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(images) + self.shortcut(images))


class Images(nn.Module):
    """A batch of images that stays on the device, and their classes."""

    def __init__(self, rows: int, side: int) -> None:
        super().__init__()
        images = torch.randn(rows, 3, side, side).contiguous(memory_format=torch.channels_last)
        self.register_buffer("images", images)
        self.register_buffer("labels", torch.randint(0, 1000, (rows,)))

    def loss(self, model: nn.Module) -> torch.Tensor:
        labels: torch.Tensor = self.labels  # type: ignore[assignment]  # a buffer
        return functional.cross_entropy(model(self.images), labels)


class Block(nn.Module):
    """A block of GPT-2 (Radford et al. 2019)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        parts = self.attention(self.first_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(x.shape))
        found: torch.Tensor = x + self.mlp(self.second_norm(x))
        return found


class Transformer(nn.Module):
    """A language model."""

    def __init__(self, terms: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(terms, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)], nn.LayerNorm(width))
        self.head = nn.Linear(width, terms, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.blocks(self.tokens(tokens) + self.places.weight))
        return found


class Text(nn.Module):
    """Rows of tokens that stay on the device."""

    def __init__(self, terms: int, rows: int, length: int) -> None:
        super().__init__()
        self.register_buffer("text", torch.randint(0, terms, (rows, length + 1)))

    def loss(self, model: nn.Module) -> torch.Tensor:
        text: torch.Tensor = self.text  # type: ignore[assignment]  # a buffer
        return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def resnet(kind: str) -> Parts:
    """ResNet-50, or a small one for a CPU."""
    rows, side, depths = (128, 224, (3, 4, 6, 3)) if kind == "cuda" else (4, 32, (1, 1, 1, 1))
    blocks, channels = list[nn.Module](), 64
    for number, depth in enumerate(depths):
        for place in range(depth):
            blocks.append(Bottleneck(channels, 64 << number, 2 if number and not place else 1))
            channels = 256 << number
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), Images(rows, side)


def gpt(kind: str) -> Parts:
    """A transformer of the size of GPT-2 small, or a small one for a CPU."""
    terms, rows, length, width, heads, depth = (
        (50304, 8, 1024, 768, 12, 12) if kind == "cuda" else (64, 2, 16, 32, 2, 2)
    )
    model = Transformer(terms, length, width, heads, depth)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), Text(terms, rows, length)


def step_of(parts: Parts, kind: str) -> Callable[[], torch.Tensor]:
    """A training step as for one device."""
    model, optimizer, batch = parts

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=torch.bfloat16):
            loss: torch.Tensor = batch.loss(model)  # type: ignore[operator]  # of both kinds of batches
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def synchronise(kind: str) -> None:
    """Wait for the device."""
    if kind == "cuda":
        torch.cuda.synchronize()


def waits_of(step: Callable[[], object]) -> list[str]:
    """The places in raydist where the host waits for the GPU during a step; runs in a replica."""
    found: list[str] = []

    def note(message: Any, *_: Any) -> None:
        own = [frame for frame in traceback.extract_stack()[:-1] if not _is_of_a_library(frame.filename)]
        if "synchroniz" in str(message) and own and "/raydist/" in own[-1].filename:
            found.append(f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # type: ignore[assignment]  # it takes what it is given
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


def _is_of_a_library(filename: str) -> bool:
    return "/torch/" in filename or filename.endswith(("/warnings.py", "/contextlib.py"))


class Ways:
    """The ways to run so many steps of a model.

    Args:
        name: Of the model.
        kind: "cuda" or "cpu".
        strategy: Runs the replicas.
    """

    def __init__(self, name: str, kind: str, strategy: rd.Strategy) -> None:
        parts = {"resnet": resnet, "gpt": gpt}[name]
        self._kind, self._strategy = kind, strategy
        with torch.device(kind):
            self._bare = step_of(parts(kind), kind)
        with strategy.scope():
            mirrored = parts(kind)
        self._step = step_of(mirrored, kind)
        self.all: dict[str, Many] = {
            "bare loop": self._run_bare,
            "loop in the replica": self._run_loop,
            "run": self._run_each,
            "run, every loss read": self._run_and_read,
        }

    def waits(self) -> tuple[list[str], ...]:
        """For each replica, where raydist waits in a step."""
        self._run_each(3)  # the first steps agree on layouts
        step = self._step
        shown = self._strategy.local_results(self._strategy.run(lambda: ", ".join(waits_of(step))))
        return tuple(each.split(", ") if each else [] for each in shown)

    def _run_bare(self, count: int) -> None:
        for _ in range(count):
            self._bare()
        synchronise(self._kind)

    def _run_each(self, count: int) -> None:
        kind = self._kind

        def settle() -> int:
            synchronise(kind)
            return 0

        for _ in range(count):
            self._strategy.run(self._step)
        self._strategy.local_results(self._strategy.run(settle))

    def _run_and_read(self, count: int) -> None:
        for _ in range(count):
            float(self._strategy.reduce("MEAN", self._strategy.run(self._step)))

    def _run_loop(self, count: int) -> None:
        step, kind = self._step, self._kind

        def loop() -> int:
            for _ in range(count):
                step()
            synchronise(kind)
            return 0

        self._strategy.local_results(self._strategy.run(loop))


def compare(name: str, kind: str, strategy: rd.Strategy, *, steps: int, rounds: int) -> None:
    """Print the time of a step in each way."""
    told = Ways(name, kind, strategy)
    if kind == "cuda":
        for rank, waits in enumerate(told.waits()):
            print(f"{name}: waits of raydist in a step, replica {rank}: {waits}")
    ways = told.all
    times: dict[str, list[float]] = {way: [] for way in ways}
    for many in ways.values():
        many(2)
    for _ in range(rounds):
        for way, many in ways.items():
            began = time.perf_counter()
            many(steps)
            times[way].append((time.perf_counter() - began) / steps * 1e3)
    base = statistics.median(times["bare loop"])
    for way, found in times.items():
        middle = statistics.median(found)
        print(
            f"{name}: {way}: {middle:.2f} ms a step ({min(found):.2f} to {max(found):.2f}), speed {base / middle:.3f}"
        )


def measure_input(kind: str, strategy: rd.Strategy, *, seconds: float) -> None:
    """Print how many rows of images reach the device, and how long a step of 50 ms waits for them."""
    side, rows = (224, 128) if kind == "cuda" else (32, 16)
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    made = rd.Dataset.range(rows * 64).map(lambda number: image).batch(rows).repeat()

    def read(batches: Any, busy_s: float, limit_s: float) -> tuple[int, float]:
        count, waited, began = 0, 0.0, time.perf_counter()
        while time.perf_counter() - began < limit_s:
            asked = time.perf_counter()
            batch = batches.get_next_as_optional().get_value()
            batch.float().mean()
            synchronise(kind)
            waited += time.perf_counter() - asked
            count += len(batch)
            time.sleep(busy_s)
        return count, waited / (time.perf_counter() - began)

    for busy_s in (0.0, 0.05):
        iterator = iter(strategy.distribute_dataset(made))
        found = strategy.local_results(strategy.run(read, args=(iterator, busy_s, seconds)))
        for rank, (count, share) in enumerate(found):
            speed = f"{count / seconds:.0f} rows/s, waits {share:.1%}"
            print(f"input: replica {rank}, steps of {busy_s * 1e3:.0f} ms: {speed}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["resnet", "gpt", "input"])
    given = parser.parse_args()
    kind: str = given.device
    if kind == "cuda" and torch.cuda.device_count() < given.devices:
        parser.error(f"needs {given.devices} GPUs, torch sees {torch.cuda.device_count()}; --device cpu tries the code")
    steps, rounds = (given.steps, given.rounds) if kind == "cuda" else (2, 2)
    devices = [f"{'GPU' if kind == 'cuda' else 'CPU'}:{number}" for number in range(given.devices)]
    with rd.MirroredStrategy(devices) as strategy:
        for name in ("resnet", "gpt"):
            if given.only in (None, name):
                compare(name, kind, strategy, steps=steps, rounds=rounds)
        if given.only in (None, "input"):
            measure_input(kind, strategy, seconds=10.0 if kind == "cuda" else 1.0)


if __name__ == "__main__":
    main()
