"""Classify handwritten digits in plain PyTorch on one device.

The twin of `digits_raydist.py`: compare the two to see what distribution adds.

    python examples/digits_torch.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.nn import functional as F

from digits_common import (
    LEARNING_RATE,
    Images,
    Stopwatch,
    build_network,
    count_correct,
    load_images,
    make_parser,
    report,
    split,
    to_inputs,
)

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(images: Images, batch_size: int, order: np.ndarray) -> Iterator[Batch]:
    for start in range(0, len(order), batch_size):
        rows = images.rows(order[start : start + batch_size])
        pixels, labels = to_inputs(rows.pixels, rows.labels)
        yield torch.from_numpy(pixels), torch.from_numpy(labels)


def main() -> None:
    args = make_parser(__doc__).parse_args()
    train, test = split(load_images(args.data), smoke=args.smoke)
    epochs = 1 if args.smoke else args.epochs

    torch.manual_seed(0)
    network = build_network(*train.pixels.shape[1:])
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)

    def train_step(batch: Batch) -> torch.Tensor:
        pixels, labels = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(network(pixels), labels)
        loss.backward()
        optimizer.step()
        return loss

    def test_step(batch: Batch) -> torch.Tensor:
        pixels, labels = batch
        with torch.no_grad():
            return count_correct(network(pixels), labels)

    shuffle = np.random.default_rng(0)
    stopwatch = Stopwatch()
    for epoch in range(epochs):
        losses = [train_step(batch) for batch in batches(train, args.batch_size, shuffle.permutation(len(train)))]
        stopwatch.epoch_is_over()
        print(f"epoch {epoch + 1}/{epochs}: loss {torch.stack(losses).mean():.4f}")

    correct = sum(int(test_step(batch)) for batch in batches(test, args.batch_size, np.arange(len(test))))
    report(correct / len(test), stopwatch.examples_per_s(len(train)), network)


if __name__ == "__main__":
    main()
