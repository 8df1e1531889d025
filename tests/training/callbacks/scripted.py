"""Trainings whose logged values are given."""

from __future__ import annotations

from typing import Any

import torch

import raydist as rd
from tests.training.toys import compiled, regression, small_net


class Logged(rd.Callback):
    """Puts the next value of a list into the logs as "score"."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def on_epoch_end(self, epoch: int, logs: dict[str, Any]) -> None:
        logs["score"] = self._values[epoch]


def history_of(values: list[float], *callbacks: rd.Callback, rate: float = 1.0) -> dict[str, list[Any]]:
    """The history of a training whose scores are `values`, one an epoch, with learning rate `rate`."""
    net = small_net()
    model = compiled(net, optimizer=torch.optim.SGD(net.parameters(), lr=rate))
    given = [Logged(values), *callbacks]
    return model.fit(regression(4, 4), epochs=len(values), callbacks=given, verbose=False).history
