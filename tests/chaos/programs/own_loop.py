"""A loop of its own over three epochs, which saves after every other step and goes on inside an epoch.

own_loop.py STRATEGY [BUG]: `one_device`, or `mirrored` with two replicas on the Ray that RAY_ADDRESS names.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import raydist as rd
from tests.chaos.programs.planted_bugs import planted
from tests.resuming.journal import Journal, state_digest

EPOCHS, ROWS, BATCH_SIZE, SAVE_EVERY = 3, 29, 4, 2


def make_strategy(name: str) -> rd.Strategy:
    return rd.OneDeviceStrategy("cpu") if name == "one_device" else rd.MirroredStrategy(2)


def noisy(row: Any, features: Any, *, rng: np.random.Generator) -> Any:
    return row, features + rng.normal(size=features.shape) * 0.1


def dataset() -> rd.Dataset:
    features = np.random.default_rng(0).normal(size=(ROWS, 5))
    rows = rd.Dataset.from_tensor_slices((np.arange(ROWS), features))
    return rows.shuffle(20, seed=3).map(noisy).batch(BATCH_SIZE).with_options(rd.Options(seed=7))


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], torch.Tensor]:
    def train_step(batch: Any) -> torch.Tensor:
        _, features = batch
        optimizer.zero_grad()
        loss: torch.Tensor = (model(features) - features.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


class Run:
    """What the program trains, and how it is saved."""

    def __init__(self, strategy: rd.Strategy, journal: Journal) -> None:
        self.strategy, self.journal = strategy, journal
        torch.manual_seed(1)
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 1)).double()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=5, gamma=0.8)
        self.train_step = make_step(self.model, self.optimizer)
        self.data = strategy.distribute_dataset(dataset())
        self.progress = rd.State(step=0, epoch=0, losses=[])
        self.checkpoint = rd.Checkpoint(
            model=self.model,
            training=[self.optimizer, self.scheduler],
            data=self.data,
            progress=self.progress,
        )
        self.manager = rd.CheckpointManager(
            self.checkpoint, str(journal.folder), max_to_keep=2, checkpoint_interval=SAVE_EVERY
        )
        self.asked: list[tuple[int, Any]] = []

    def whole(self) -> None:
        """All epochs, from wherever the last life has come to."""
        self.manager.restore_or_initialize()
        self.journal.begins(self.progress.step)
        while self.progress.epoch < EPOCHS:
            for batch in self.data:
                self.step(batch)
            self.progress.epoch += 1
            self.save(check_interval=False)

    def step(self, batch: Any) -> None:
        loss = self.strategy.run(self.train_step, args=(batch,))
        self.scheduler.step()
        self.progress.step += 1
        self.progress.losses = [*self.progress.losses, float(self.strategy.reduce(rd.ReduceOp.MEAN, loss))][-5:]
        rows = [int(row) for part in self.strategy.local_results(batch[0]) for row in part]
        self.journal.saw(self.progress.step, rows)
        self.save(check_interval=True)

    def save(self, *, check_interval: bool) -> None:
        handle = self.manager.save(check_interval=check_interval)
        if handle is not None:
            self.asked.append((self.progress.step, handle))
        self.tell()

    def tell(self) -> None:
        """Note what is safe by now."""
        while self.asked and self.asked[0][1].done():
            step, handle = self.asked.pop(0)
            handle.wait()
            self.journal.acknowledged(step)

    def ends(self) -> None:
        self.manager.close()
        self.tell()
        states = [obj.state_dict() for obj in (self.model, self.optimizer, self.scheduler, self.progress)]
        self.journal.ends(state_digest([*states, torch.get_rng_state()]))


@contextlib.contextmanager
def resumed_run(name: str) -> Iterator[Run]:
    journal = Journal.of_environment()
    with make_strategy(name) as strategy:
        yield Run(strategy, journal)


def main() -> None:
    name, bug = sys.argv[1], "".join(sys.argv[2:])
    with resumed_run(name) as run, planted(bug, run):
        run.whole()
        run.ends()


if __name__ == "__main__":
    main()
