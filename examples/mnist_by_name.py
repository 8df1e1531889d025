"""Load handwritten digits by name, train a network on them with `fit`, and write curves for TensorBoard.

    python examples/mnist_by_name.py                                        # scikit-learn's digits
    python examples/mnist_by_name.py --name mnist --data-dir folder         # the folder of the idx files
    python examples/mnist_by_name.py --name mnist10k --data-dir folder      # the folder of mnist10k.npz
    tensorboard --logdir logs

`fashion_mnist` and `kmnist` are other names; if files are missing, the error says which, and where they come from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd
from chosen_strategy import add_strategy_flags, make_strategy
from digits_common import NUM_CLASSES, build_network


class Mnist10k(rd.DatasetBuilder):
    """A data set of one's own: the 10,000 images of the file `mnist10k.npz`, every fifth of them for tests."""

    name = "mnist10k"
    supervised_keys = ("image", "label")
    class_names: Mapping[str, tuple[str, ...]] = {"label": tuple("0123456789")}
    is_prepared = False  # it is read from the file, and not written anew

    def splits(self) -> Mapping[str, Callable[[], rd.Dataset]]:
        with np.load(Path(self.data_dir) / "mnist10k.npz") as arrays:
            images, labels = arrays["images"], arrays["labels"].astype(np.int64)
        is_test = np.arange(len(images)) % 5 == 4

        def rows(which: np.ndarray) -> rd.Dataset:
            return rd.Dataset.from_tensor_slices({"image": images[which], "label": labels[which]})

        return {"train": lambda: rows(~is_test), "test": lambda: rows(is_test)}


def to_inputs(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A batch as the network wants it: float32 [n, 1, height, width] in 0 .. 1."""
    largest = 255 if images.dtype == np.uint8 else 16
    return images.reshape(len(images), 1, *images.shape[1:3]).astype(np.float32) / largest, labels


def load(name: str, data_dir: Path | None, *, smoke: bool) -> tuple[rd.Dataset, rd.Dataset, rd.DatasetInfo]:
    """The data set's rows for training and for tests, of digits a fifth; a few of them for a smoke test."""
    splits = ["train[:80%]", "train[80%:]"] if name == "digits" else ["train", "test"]
    (train, test), info = rd.load(name, splits, as_supervised=True, with_info=True, data_dir=data_dir)
    return (train.take(200), test.take(50), info) if smoke else (train, test, info)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_strategy_flags(parser)
    parser.set_defaults(strategy="one_device")
    parser.add_argument("--name", default="digits", help="a name of rd.list_builders(), of images of ten classes")
    parser.add_argument("--data-dir", type=Path, help="the folder of the files; digits need none")
    parser.add_argument("--logs", default="logs", help="the folder of the curves")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--smoke", action="store_true", help="a few steps on a few images, to see that it runs")
    args = parser.parse_args()

    train, test, info = load(args.name, args.data_dir, smoke=args.smoke)
    print(f"{info.name}: {dict(info.splits)}, classes {', '.join(info.class_names['label'])}")
    batches: Any = train.shuffle(10_000, seed=0).batch(args.batch_size).map(to_inputs)
    test_batches: Any = test.batch(args.batch_size).map(to_inputs)
    height, width = info.features["image"].shape[:2]

    with make_strategy(args.strategy, args.replicas, args.consistency) as strategy:
        torch.manual_seed(0)
        with strategy.scope():
            network = build_network(height, width)
            model = rd.Model(network)
            model.compile(
                torch.optim.AdamW(network.parameters(), lr=2e-3),
                nn.CrossEntropyLoss(),
                metrics=[MulticlassAccuracy(NUM_CLASSES, average="micro")],
            )
        model.fit(
            batches,
            epochs=1 if args.smoke else args.epochs,
            validation_data=test_batches,
            callbacks=[rd.TensorBoard(args.logs)],
        )
        print(f"test accuracy: {model.evaluate(test_batches)['multiclass_accuracy']:.3f}")
    print(f"look at the curves: tensorboard --logdir {args.logs}")


if __name__ == "__main__":
    main()
