"""A server is asked for its part of a checkpoint, and has whoever writes it see what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.requests import BeginSave, CreateSlices, SaveReport
from raydist.parameter_servers.serving.checkpointing import SliceHolder, SliceSaver
from tests.parameter_servers.served import answer, servers, slice_of


class Saver(SliceSaver):
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.closed = False

    def begin(self, order: Any, tensors: Sequence[torch.Tensor], held: SliceHolder) -> None:
        self.seen = [order, tensors[0].tolist(), held.value(3).tolist()]

    def report(self, token: str) -> Any:
        return f"{token} is done"

    def close(self, within_s: float) -> None:
        self.closed = True


def test_a_server_lets_it_see_what_it_has() -> None:
    saver = Saver()
    with servers(saver=saver) as (server,):
        answer(server, CreateSlices((slice_of(3, 2),)), torch.tensor([1.0, 2.0], dtype=torch.float64))
        answer(server, BeginSave("order"), torch.ones(1))
        assert saver.seen == ["order", [1.0], [1.0, 2.0]]
        assert answer(server, SaveReport("a")).value == "a is done"
        assert not saver.closed
    assert saver.closed


def test_a_server_without_one_says_so() -> None:
    with servers() as (server,), pytest.raises(InvalidArgumentError, match="got BeginSave"):
        answer(server, BeginSave("order"))
