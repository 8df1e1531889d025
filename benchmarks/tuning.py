"""Epochs of a `fit` in a trial of Ray Tune, with a report and a checkpoint each, beside the same ones without Tune.

`python -m benchmarks.tuning`

A small network for digits, on two replicas: 45 steps an epoch, and a validation. Ways take turns. The time in which
processes start, and the first epoch, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import raydist as rd

LIMIT = 1.2
_SHARE = {"CPU": 0.1}
_WAYS = ("without", "with checkpoints, without Tune", "in a trial")


class Begins(rd.Callback):
    """Keeps the time at which each epoch begins."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any]) -> None:
        self.times.append(time.perf_counter())


def train(config: dict[str, Any], strategy: rd.Strategy) -> None:
    """Write the seconds of the second and each further epoch."""
    begins = Begins()
    rows = rd.load("digits", "train", as_supervised=True).map(
        lambda image, label: (image.astype("float32") / 16, label)
    )
    with strategy.scope():
        network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        model = rd.Model(network)
        metrics = [MulticlassAccuracy(10, average="micro")]
        model.compile(torch.optim.AdamW(network.parameters()), nn.CrossEntropyLoss(), metrics=metrics)
    model.fit(
        rows.skip(360).shuffle(2000, seed=0).batch(32),
        validation_data=rows.take(360).batch(128),
        epochs=config["epochs"],
        callbacks=[begins, *([rd.TuneReportCallback()] if config["way"] == "in a trial" else [])],
        checkpoint=config["folder"] if config["way"] == "with checkpoints, without Tune" else None,
        verbose=False,
    )
    ends = [*begins.times[2:], time.perf_counter()]
    seconds = [end - begin for begin, end in zip(begins.times[1:], ends, strict=True)]
    Path(config["folder"], "seconds.json").write_text(json.dumps(seconds))


def seconds_an_epoch(way: str, epochs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        config = {"way": way, "epochs": epochs, "folder": folder}
        if way == "in a trial":
            trainable = rd.tune.trainable(train, num_replicas=2, resources_per_replica=_SHARE, driver_resources=_SHARE)
            run = tune.RunConfig(storage_path=os.path.join(folder, "results"), verbose=0)
            found = tune.Tuner(trainable, param_space=config, run_config=run).fit()
            assert not found.errors, found.errors
        else:
            with rd.MirroredStrategy(2, resources_per_replica=_SHARE) as strategy:
                train(config, strategy)
        return float(statistics.median(json.loads(Path(folder, "seconds.json").read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    epochs, rounds = (3, 1) if parser.parse_args().smoke else (12, 5)
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    found = [[seconds_an_epoch(way, epochs) for way in _WAYS] for _ in range(rounds)]
    for place, way in enumerate(_WAYS):
        print(f"{way}: {1e3 * statistics.median(each[place] for each in found):.0f} ms an epoch")
    for place in (0, 1):
        ratio = statistics.median(each[2] / each[place] for each in found)
        print(f"in a trial / {_WAYS[place]}: {ratio:.2f} x (bar {LIMIT})")


if __name__ == "__main__":
    main()
