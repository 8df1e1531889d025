"""Classify handwritten digits with `rd.Model`: compile, fit, evaluate.

python examples/digits_fit.py --strategy mirrored --replicas 2
python examples/digits_fit.py --checkpoint run --tensorboard run/logs            # stop it with Ctrl-C ...
python examples/digits_fit.py --checkpoint run --tensorboard run/logs --resume   # ... and it goes on where it was
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd
from chosen_strategy import add_strategy_flags, make_strategy
from digits_common import (
    LEARNING_RATE,
    NUM_CLASSES,
    Images,
    Stopwatch,
    build_network,
    load_images,
    make_parser,
    report,
    split,
    to_inputs,
)


class Laps(rd.Callback):
    """Stops the time of every epoch."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        self.stopwatch = stopwatch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.stopwatch.epoch_is_over()


def rows_of(images: Images) -> rd.Dataset:
    return rd.Dataset.from_tensor_slices((images.pixels, images.labels))


def main() -> None:
    parser = add_strategy_flags(make_parser(__doc__))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--checkpoint", help="where to save each epoch: a directory, or a URI such as s3://...")
    parser.add_argument("--resume", action="store_true", help="go on from what --checkpoint has")
    parser.add_argument("--tensorboard", help="a directory for curves")
    args = parser.parse_args()
    train, test = split(load_images(args.data), smoke=args.smoke)
    epochs = 1 if args.smoke else args.epochs

    with make_strategy(args.strategy, args.replicas) as strategy:
        print(f"{type(strategy).__name__}: {', '.join(strategy.worker_devices)}")
        torch.manual_seed(0)
        with strategy.scope():
            network = build_network(*train.pixels.shape[1:])
            model = rd.Model(network)
            model.compile(
                optimizer=torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE),
                loss=nn.CrossEntropyLoss(),
                metrics=[MulticlassAccuracy(NUM_CLASSES, average="micro")],
            )

        # Whole batches go through `to_inputs`: mapping after `batch` is the fast way.
        train_batches = rows_of(train).shuffle(len(train), seed=0).batch(args.batch_size).map(to_inputs)
        test_batches = rows_of(test).batch(args.batch_size).map(to_inputs)

        stopwatch = Stopwatch()
        callbacks: list[rd.Callback] = [Laps(stopwatch)]
        if args.tensorboard is not None:
            callbacks.append(rd.TensorBoard(args.tensorboard))
        model.fit(
            train_batches,
            epochs=epochs,
            validation_data=test_batches if args.tensorboard is not None else None,
            callbacks=callbacks,
            checkpoint=args.checkpoint,
            resume=args.resume,
        )
        results = model.evaluate(test_batches)
        report(results["multiclass_accuracy"], stopwatch.examples_per_s(len(train)), network)

    print("look next: examples/digits_raydist.py (a loop of your own), README.md (strategies, ways to run)")


if __name__ == "__main__":
    main()
