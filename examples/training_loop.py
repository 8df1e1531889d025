"""The loop that the examples of recommending and of text share. Nothing in it knows which strategy it runs on."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any

import torch

import raydist as rd
from chosen_strategy import add_strategy_flags


def make_parser(description: str | None, *, epochs: int, batch_size: int) -> argparse.ArgumentParser:
    """The flags of these examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch-size", type=int, default=batch_size, help="rows of one step")
    parser.add_argument("--smoke", action="store_true", help="one epoch on a few rows, to see that it runs")
    return add_strategy_flags(parser)


def train(strategy: rd.Strategy, step: Callable[[Any], torch.Tensor], batches: Iterable[Any], num_epochs: int) -> None:
    """Run a step on every batch, and print each epoch's mean loss."""
    for epoch in range(num_epochs):
        losses = [strategy.run(step, args=(batch,)) for batch in batches]
        means = torch.stack([torch.as_tensor(strategy.reduce(rd.ReduceOp.MEAN, loss)) for loss in losses])
        print(f"epoch {epoch + 1}/{num_epochs}: loss {means.mean():.4f}")


def total(strategy: rd.Strategy, step: Callable[[Any], torch.Tensor], batches: Iterable[Any]) -> torch.Tensor:
    """The sum of what a step gives for every batch."""
    parts = [strategy.run(step, args=(batch,)) for batch in batches]
    return torch.stack([torch.as_tensor(strategy.reduce(rd.ReduceOp.SUM, part)) for part in parts]).sum(0)
