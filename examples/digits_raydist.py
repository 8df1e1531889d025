"""Classify handwritten digits with a training loop of one's own, on any number of replicas.

The twin of `digits_torch.py`: the steps are the same lines; the strategy decides where they run.

    python examples/digits_raydist.py --strategy mirrored --replicas 2
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

import raydist as rd
from chosen_strategy import add_strategy_flags, make_strategy
from digits_common import (
    LEARNING_RATE,
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


def main() -> None:
    args = add_strategy_flags(make_parser(__doc__)).parse_args()
    train, test = split(load_images(args.data), smoke=args.smoke)
    epochs = 1 if args.smoke else args.epochs

    with make_strategy(args.strategy, args.replicas) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
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

        images = rd.Dataset.from_tensor_slices((train.pixels, train.labels)).shuffle(len(train), seed=0)
        batches = strategy.distribute_dataset(images.batch(args.batch_size).map(to_inputs))
        images = rd.Dataset.from_tensor_slices((test.pixels, test.labels))
        test_batches = strategy.distribute_dataset(images.batch(args.batch_size).map(to_inputs))

        stopwatch = Stopwatch()
        for epoch in range(epochs):
            losses = [strategy.run(train_step, args=(batch,)) for batch in batches]
            means = torch.stack([strategy.reduce(rd.ReduceOp.MEAN, loss) for loss in losses])
            stopwatch.epoch_is_over()
            print(f"epoch {epoch + 1}/{epochs}: loss {means.mean():.4f}")

        counts = [strategy.run(test_step, args=(batch,)) for batch in test_batches]
        correct = sum(int(strategy.reduce(rd.ReduceOp.SUM, count)) for count in counts)
        report(correct / len(test), stopwatch.examples_per_s(len(train)), network)


if __name__ == "__main__":
    main()
