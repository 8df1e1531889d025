"""What the three digits examples share: the images, the network, the flags."""

from __future__ import annotations

import argparse
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

NUM_CLASSES = 10
LEARNING_RATE = 4e-3


@dataclass(frozen=True)
class Images:
    """Grey images, uint8 [n, height, width], and what they show, int64 [n]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, which: slice | np.ndarray) -> Images:
        """Some of them."""
        return Images(self.pixels[which], self.labels[which])


def load_images(file: Path | None) -> Images:
    """`images` and `labels` of an .npz file; by default the 1,797 scanned digits that come with scikit-learn."""
    if file is not None:
        with np.load(file) as arrays:
            return Images(arrays["images"], arrays["labels"].astype(np.int64))
    from sklearn.datasets import load_digits

    digits = load_digits()
    return Images((digits.images * (255 / 16)).astype(np.uint8), digits.target.astype(np.int64))


def split(images: Images, *, smoke: bool = False) -> tuple[Images, Images]:
    """Four fifths for training, one fifth for testing, drawn once and for all; a handful of each for a smoke test."""
    order = np.random.default_rng(0).permutation(len(images))
    num_test = len(images) // 5
    test, train = images.rows(order[:num_test]), images.rows(order[num_test:])
    return (train.rows(slice(200)), test.rows(slice(50))) if smoke else (train, test)


def to_inputs(pixels: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A batch as the network wants it: float32 [n, 1, height, width] in 0 .. 1."""
    return pixels[:, None].astype(np.float32) / 255, labels


def build_network(height: int, width: int) -> nn.Module:
    """Two convolutions and two linear layers: 14,000 parameters for 8 x 8 digits, 106,000 for 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), 64),
        nn.ReLU(),
        nn.Linear(64, NUM_CLASSES),
    )


def fingerprint(network: nn.Module) -> str:
    """A short hash of all parameters: two runs that agree bit for bit print the same one."""
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of every digits example."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data", type=Path, help=".npz file with images (uint8 [n, h, w]) and labels; default: digits")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="rows of one step, all replicas together")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few images, to see that it runs")
    return parser


class Stopwatch:
    """Examples per second, the first of several epochs aside: while it runs, input processes start."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def epoch_is_over(self) -> None:
        self.times.append(time.perf_counter())

    def examples_per_s(self, examples_per_epoch: int) -> float:
        times = self.times[1:] if len(self.times) > 2 else self.times
        if len(times) < 2:
            return 0.0  # a run that had come to its end before
        return examples_per_epoch * (len(times) - 1) / (times[-1] - times[0])


def report(accuracy: float, examples_per_s: float, network: nn.Module) -> None:
    """Print what a run ends with: how good, how fast, and which parameters exactly."""
    print(f"test accuracy: {accuracy:.3f}")
    print(f"training speed: {examples_per_s:,.0f} examples/s (from the second epoch on)")
    print(f"parameters: {fingerprint(network)}")


def count_correct(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """How many rows are classified rightly."""
    return (logits.argmax(dim=1) == labels).sum()
