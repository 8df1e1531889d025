"""Three epochs of `fit` with all that may go wrong: shuffling, noise, dropout, metrics, validation, curves.

fit.py STRATEGY [BUG]: it saves after every other batch, and goes on inside an epoch.
"""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchmetrics import MeanSquaredError

import raydist as rd
from tests.chaos.programs.own_loop import make_strategy, noisy
from tests.chaos.programs.planted_bugs import planted
from tests.resuming.journal import Journal, state_digest

EPOCHS, ROWS, BATCH_SIZE, SAVE_EVERY = 3, 30, 4, 2


class Net(nn.Module):
    """Counts in which rows it was trained on; they come with the features."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(ROWS, dtype=torch.float64))
        rd.set_aggregation(self, "seen", aggregation="sum")

    def forward(self, rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.index_add_(0, rows, torch.ones(len(rows), dtype=torch.float64))
        predicted: torch.Tensor = self.layers(features)
        return predicted


class Telling(rd.Callback):
    """Tells the journal where training begins, and which rows were seen in the epochs that count."""

    def __init__(self, journal: Journal, net: Net, step: torch.Tensor) -> None:
        super().__init__()
        self.journal, self.net, self.step = journal, net, step

    def on_train_begin(self, logs: dict[str, Any]) -> None:
        self.journal.begins(int(self.step))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        self.journal.saw(int(self.step), [int(count) for count in self.net.seen])


def rows() -> rd.Dataset:
    features = np.random.default_rng(0).normal(size=(ROWS, 5))
    return rd.Dataset.from_tensor_slices((np.arange(ROWS), features))


def element(row: Any, features: Any) -> Any:
    return (row, features), features.sum(-1, keepdims=True)


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)  # that nothing is left to train
    journal, bug = Journal.of_environment(), "".join(sys.argv[2:])
    with make_strategy(sys.argv[1]) as strategy:
        torch.manual_seed(1)
        with strategy.scope():
            net, step = Net().double(), rd.get_global_step()
            model = rd.Model(net)
            optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
            model.compile(optimizer, nn.MSELoss(), metrics=[MeanSquaredError()], scheduler=scheduler)
        training = rows().shuffle(20, seed=3).map(noisy).map(element).batch(BATCH_SIZE).with_options(rd.Options(seed=7))
        data = strategy.distribute_dataset(training)
        manager = rd.CheckpointManager(
            rd.Checkpoint(net=net), str(journal.folder / "kept"), max_to_keep=2, checkpoint_interval=SAVE_EVERY
        )
        callbacks = [
            Telling(journal, net, step),
            rd.TensorBoard(str(journal.folder / "logs"), update_freq="batch"),
            rd.CSVLogger(str(journal.folder / "log.csv"), append=True),
            rd.ReduceLROnPlateau(monitor="loss", patience=1),
        ]
        with planted(bug, SimpleNamespace(data=data)):
            history = model.fit(
                data,
                epochs=EPOCHS,
                validation_data=rows().map(element).batch(8),
                callbacks=callbacks,
                checkpoint=manager,
                verbose=False,
            )
        manager.close()
        states = [net.state_dict(), optimizer.state_dict(), scheduler.state_dict(), torch.get_rng_state()]
        journal.ends(state_digest({"states": states, "history": history.history, "epochs": history.epoch}))


if __name__ == "__main__":
    main()
