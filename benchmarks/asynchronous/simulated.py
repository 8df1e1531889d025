"""Steps whose compute is simulated by sleeping, on workers that are slow at times."""

from __future__ import annotations

import fcntl
import functools
import os
import random
import time
from collections.abc import Callable

import torch
from torch import nn

STEP_S = 0.04
SLOWER = 5.0
OFTEN = 0.1
"""The share of a worker's steps that are slow where any may be."""

Slowness = Callable[[], float]
"""How many times longer the present step takes."""


@functools.cache
def _locked(file: str) -> bool:
    """Whether this process was the first to lock the file. It never closes it, so others never are."""
    opened = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return False
    return True


def one_is_slow(file: str) -> Slowness:
    """One worker always is: the one that is the first to ask, whatever numbers a strategy gives its workers."""
    return lambda: SLOWER if _locked(file) else 1.0


def each_is_slow_at_times() -> float:
    """Every worker is, in a random tenth of its steps."""
    return SLOWER if random.SystemRandom().random() < OFTEN else 1.0


class Counter(nn.Module):
    """A weight whose gradient is always 1: by SGD with a learning rate of 1 it counts updates, downwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.weight * rows).mean()

    def updates(self) -> int:
        return round(-float(self.weight.detach()))


def make_step(counter: Counter, slowness: Slowness, step_s: float = STEP_S) -> Callable[[torch.Tensor], None]:
    """A step on rows of ones."""
    optimizer = torch.optim.SGD(counter.parameters(), lr=1.0)

    def step(rows: torch.Tensor) -> None:
        time.sleep(step_s * slowness())
        optimizer.zero_grad()
        counter(rows).backward()
        optimizer.step()

    return step
