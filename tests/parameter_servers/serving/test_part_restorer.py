"""A server is asked to restore its part of a checkpoint, and has whoever reads it see and replace its tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.errors import InvalidArgumentError
from raydist.parameter_servers.requests import (
    BeginRestore,
    CommitRestore,
    CreateTable,
    DiscardRestore,
    ReadReport,
    RowState,
)
from raydist.parameter_servers.rows.row_table import RowTable
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec
from raydist.parameter_servers.serving.checkpointing import PartHolder, PartRestorer
from tests.parameter_servers.served import answer, servers

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


def test_a_server_without_one_says_so() -> None:
    with servers() as (server,), pytest.raises(InvalidArgumentError, match="got DiscardRestore"):
        answer(server, DiscardRestore())
