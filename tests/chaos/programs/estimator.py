"""`train_and_evaluate` with shuffling, noise and dropout; it saves and evaluates after every third step.

estimator.py STRATEGY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import raydist as rd
from tests.chaos.programs.own_loop import dataset, make_strategy
from tests.resuming.journal import Journal, state_digest

STEPS, SAVE_EVERY = 20, 3


def model_fn(features: torch.Tensor, labels: torch.Tensor, mode: str) -> rd.EstimatorSpec:
    net = rd.get_or_create("net", lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double())
    outputs = net(features)
    loss = F.mse_loss(outputs, labels)
    adam = rd.get_or_create("adam", lambda: torch.optim.Adam(net.parameters(), lr=0.01))
    decay = rd.get_or_create("decay", lambda: torch.optim.lr_scheduler.StepLR(adam, step_size=5, gamma=0.8))
    mean = rd.get_or_create("mean", rd.Mean)
    return rd.EstimatorSpec(
        mode, outputs, loss, optimizer=adam, scheduler=decay, eval_metric_ops={"mean": (mean, outputs)}
    )


def element(row: Any, features: Any) -> Any:
    return features, features.sum(-1, keepdims=True)


class Telling(rd.Callback):
    """Tells the journal where training begins."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        self.journal.begins(int(self.model.strategy._make_counter().value))


def main() -> None:
    journal = Journal.of_environment()
    with make_strategy(sys.argv[1]) as strategy:
        config = rd.RunConfig(
            str(journal.folder / "run"),
            tf_random_seed=1,
            train_distribute=strategy,
            save_checkpoints_steps=SAVE_EVERY,
            log_step_count_steps=None,
        )
        estimator = rd.Estimator(model_fn, config=config)
        training = rd.TrainSpec(lambda: dataset().map(element).repeat(), STEPS, [Telling(journal)])
        results = rd.train_and_evaluate(
            estimator, training, rd.EvalSpec(lambda: dataset().map(element), throttle_secs=0)
        )
        path = Path(str(estimator.latest_checkpoint())) / "model.safetensors"
        journal.ends(state_digest({"variables": load_file(path), "results": results}))


if __name__ == "__main__":
    main()
