"""A training program that runs on a strategy and as a bare PyTorch loop over the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import raydist as rd


class Tied(nn.Module):
    """A model whose embedding and output layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 6)
        self.out = nn.Linear(6, 6, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.embed((x[:, 0].abs() * 3).long() % 6))[:, :2]


class PartlyUsed(nn.Module):
    """A model with one layer that is never used and one that is used only for some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 2)
        self.sometimes = nn.Linear(6, 2)
        self.never = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.used(x)
        positive = x[:, 0] > 0
        if bool(positive.any()):
            out = out + torch.where(positive[:, None], self.sometimes(x), torch.zeros((), dtype=x.dtype))
        return out


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3)
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(torch.relu(self.conv(x[:, None])).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)
        self.out = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(self.lstm(x.reshape(-1, 3, 2))[0][:, -1])


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "conv": Conv,
    "lstm": Recurrent,
    "tied": Tied,
    "unused": PartlyUsed,
}


@dataclass(frozen=True)
class Program:
    """A whole training run."""

    model: str
    optimizer: str
    num_rows: int
    batch_size: int
    clip: bool
    accumulate: int
    schedule: bool
    seed: int

    def data(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rng = np.random.default_rng(self.seed)
        return rng.normal(size=(self.num_rows, 6)), rng.integers(0, 2, self.num_rows)

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(self.seed)
        model = MODELS[self.model]().double()
        optimizer: torch.optim.Optimizer
        if self.optimizer == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    def make_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        program = self

        def step(batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
            x, y = batch
            if index % program.accumulate == 0:
                optimizer.zero_grad()
            losses = functional.cross_entropy(model(x), y, reduction="none")
            losses.mean().backward()
            if program.updates_after(index):
                if program.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            return losses.detach()

        return step

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = self.data()
        for start in range(0, self.num_rows, self.batch_size):
            rows = slice(start, start + self.batch_size)
            yield torch.from_numpy(x[rows]), torch.from_numpy(y[rows])

    def updates_after(self, index: int) -> bool:
        """Return True if the optimizer steps after batch `index`."""
        return (index + 1) % self.accumulate == 0 or index + 1 == self.num_steps

    @property
    def num_steps(self) -> int:
        return -(-self.num_rows // self.batch_size)


@dataclass(frozen=True)
class Trained:
    """The result of a program: parameters before and after, and the mean loss over the rows of every batch."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]
    losses: list[float]


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def train_alone(program: Program) -> Trained:
    """Run the program as a bare PyTorch loop, without raydist."""
    model, optimizer, scheduler = program.build()
    before = _state(model)
    step = program.make_step(model, optimizer)
    losses = []
    for index, batch in enumerate(program.batches()):
        losses.append(step(batch, index).mean().item())
        if program.schedule and program.updates_after(index):
            scheduler.step()
    return Trained(before, _state(model), losses)


def train_distributed(program: Program, strategy: rd.Strategy) -> Trained:
    """Run the program under a strategy."""
    with strategy.scope():
        model, optimizer, scheduler = program.build()
    before = _state(model)
    step = program.make_step(model, optimizer)
    dataset = rd.Dataset.from_tensor_slices(program.data()).batch(program.batch_size)
    per_row = []
    for index, batch in enumerate(strategy.distribute_dataset(dataset)):
        per_row.append(strategy.run(step, args=(batch, index)))
        if program.schedule and program.updates_after(index):
            scheduler.step()
    losses = [strategy.reduce(rd.ReduceOp.MEAN, values, axis=0).item() for values in per_row]
    return Trained(before, _state(model), losses)
