"""A server writes and restores its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.parameter_servers.requests import (
    BeginRestore,
    BeginSave,
    CommitRestore,
    CreateSlices,
    CreateTable,
    DiscardRestore,
    ReadReport,
    RowState,
    SaveReport,
    ServerRequest,
)
from raydist.parameter_servers.rows.row_table import RowTable
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec
from raydist.parameter_servers.serving.checkpointing import PartHolder, PartRestorer, SliceHolder, SliceSaver
from tests.parameter_servers.examples import answer, servers, slice_of


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


@pytest.mark.parametrize("request_", [BeginSave("order"), DiscardRestore()])
def test_a_server_without_one_says_so(request_: ServerRequest) -> None:
    with servers() as (server,), pytest.raises(InvalidArgumentError, match=f"got {type(request_).__name__}"):
        answer(server, request_)


ROWS: dict[str, Any] = {"rows": torch.tensor([2]), "values": torch.ones(1, 3), "optimizers": {}}


class Restorer(PartRestorer):
    def __init__(self) -> None:
        self.tables: dict[int, RowTable] = {}
        self.told: list[str] = []

    def begin(self, order: int, held: PartHolder) -> None:
        self.tables = {order: held.table(order).anew()}
        self.tables[order].load([ROWS])

    def report(self, token: str) -> Any:
        return f"{token} is done"

    def commit(self, token: str, held: PartHolder) -> None:
        held.replace({**self.tables, **({9: self.tables[3]} if token == "more" else {})}, {}, {})

    def discard(self) -> None:
        self.told.append("discard")

    def close(self, within_s: float) -> None:
        self.told.append("close")


def test_a_server_has_what_was_read_once_that_is_committed() -> None:
    restorer = Restorer()
    with servers(restorer=restorer) as (server,):
        answer(server, CreateTable(3, EmbeddingTableSpec(8, 3)))
        answer(server, BeginRestore(3))
        assert answer(server, ReadReport("a")).value == "a is done"
        assert len(answer(server, RowState(3)).value["rows"]) == 0
        with pytest.raises(InvalidArgumentError, match="must be created before"):
            answer(server, CommitRestore("more"))
        assert len(answer(server, RowState(3)).value["rows"]) == 0, "all or none"
        answer(server, CommitRestore("a"))
        assert answer(server, RowState(3)).value["values"].tolist() == [[1.0, 1.0, 1.0]]
        answer(server, DiscardRestore())
        assert restorer.told == ["discard"]
    assert restorer.told == ["discard", "close"]
