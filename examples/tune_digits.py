"""Tune a network for handwritten digits with Ray Tune: each trial trains on replicas of its own.

python examples/tune_digits.py                             # 8 trials of 2 replicas, as many at a time as there is room
python examples/tune_digits.py --trials 20 --replicas 4
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd


def to_inputs(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return images.astype(np.float32) / 16, labels


def train(config: dict[str, Any], strategy: rd.Strategy) -> None:
    """One trial: reports its accuracy after each epoch, and goes on from Tune's checkpoint if there is one."""
    images = rd.load("digits", "train", as_supervised=True).shuffle(2000, seed=0, reshuffle_each_iteration=False)
    held_out, rows = images.take(360), images.skip(360)
    torch.manual_seed(0)
    with strategy.scope():
        width = config["width"]
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        model = rd.Model(network)
        model.compile(
            torch.optim.AdamW(network.parameters(), lr=config["lr"]),
            nn.CrossEntropyLoss(),
            metrics=[MulticlassAccuracy(10, average="micro")],
        )
    model.fit(
        rows.shuffle(2000, seed=0).batch(config["batch_size"]).map(to_inputs),
        validation_data=held_out.batch(128).map(to_inputs),
        epochs=config["epochs"],
        callbacks=[rd.TuneReportCallback({"accuracy": "val_multiclass_accuracy"})],
        verbose=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=2, help="of each trial")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--results", help="a directory for results and checkpoints")
    parser.add_argument("--smoke", action="store_true", help="two trials of two epochs")
    args = parser.parse_args()
    epochs, trials = (2, 2) if args.smoke else (args.epochs, args.trials)
    small = {"CPU": 0.1}  # replicas of such a small network share the cores
    space = {
        "lr": tune.loguniform(1e-4, 3e-2),
        "width": tune.choice([32, 64, 128]),
        "batch_size": 32,
        "epochs": epochs,
    }
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            rd.tune.trainable(train, num_replicas=args.replicas, resources_per_replica=small, driver_resources=small),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=trials,
                scheduler=ASHAScheduler(max_t=epochs, grace_period=min(2, epochs)),
                max_concurrent_trials=2,
            ),
            run_config=tune.RunConfig(storage_path=args.results or folder, verbose=0),
        )
        results = tuner.fit()
    best = results.get_best_result()
    assert best.metrics is not None
    print(f"trials: {len(results)}, failed: {results.num_errors}")
    print(f"best: {best.config}")
    print(f"test accuracy: {best.metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
