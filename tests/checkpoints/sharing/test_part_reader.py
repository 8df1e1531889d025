"""A server reads what it is told to once, holds it aside, and has it when it is told so; or forgets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.actors.portable_errors import PortableError
from raydist.checkpoints.read_tensors import read_rows
from raydist.checkpoints.saved_checkpoint import open_checkpoint
from raydist.checkpoints.sharing.part_reader import PartReader
from raydist.checkpoints.sharing.restore_orders import RestoreOrder, StoredTable
from raydist.checkpoints.sharing.restore_request import PreparedShare
from raydist.errors import CancelledError, FailedPreconditionError
from raydist.parameter_servers.rows.row_table import RowTable
from raydist.parameter_servers.rows.table_spec import EmbeddingTableSpec
from raydist.pipelines.stored.directory_files import directory_files

TOUCHED = torch.tensor([3, 5, 8])


class Held:
    """One table, of which a row was touched."""

    def __init__(self) -> None:
        self.tables: dict[int, Any] = {4: RowTable(EmbeddingTableSpec(10, 2, seed=7))}
        self.values: dict[int, torch.Tensor] = {8: torch.zeros(2, 2)}
        self.memories: dict[int, Any] = {}
        self.before = self.tables[4]
        self.before.pull(torch.tensor([1]))

    def table(self, handle: int) -> RowTable:
        found: RowTable = self.tables[handle]
        return found

    def value(self, number: int) -> torch.Tensor:
        return self.values[number]

    def state(self, optimizer: int, number: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.memories.get(optimizer, {}).get(number, {})
        return found

    def optimizer_kind(self, handle: int) -> type[torch.optim.Optimizer]:
        return torch.optim.SGD

    def replace(
        self,
        tables: Mapping[int, RowTable],
        values: Mapping[int, torch.Tensor],
        memories: Mapping[int, Mapping[int, Mapping[str, Any]]],
    ) -> None:
        self.tables.update(tables)
        self.values.update(values)
        self.memories.update(memories)


@pytest.fixture
def order(tmp_path: Path) -> RestoreOrder:
    bag = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(10, 2, seed=1)})
    bag["words"](TOUCHED)
    rd.Checkpoint(bag=bag).save(tmp_path / "c")
    checkpoint = open_checkpoint(directory_files(str(tmp_path / "c")))
    return RestoreOrder("a", checkpoint, (StoredTable(4, "bag.embedding_rows", "words"),))


def outcome(reader: PartReader, token: str = "a") -> Any:
    limit = time.monotonic() + 10
    while (found := reader.report(token)) is None:
        assert time.monotonic() < limit
        time.sleep(0.001)
    return found


def test_it_is_held_aside_until_it_is_committed(order: RestoreOrder) -> None:
    reader, held = PartReader(), Held()
    reader.begin(order, held)
    assert outcome(reader) == PreparedShare()
    assert held.tables[4] is held.before
    assert reader.report("b") is None
    reader.commit("a", held)
    assert held.tables[4].state()["rows"].tolist() == TOUCHED.tolist()
    with pytest.raises(FailedPreconditionError, match="must have read its part"):
        reader.commit("a", held)


def test_an_order_that_comes_again_is_carried_out_once(order: RestoreOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, held = PartReader(), Held()
    reader.begin(order, held)
    first = reader._reading
    reader.begin(order, held)
    assert reader._reading is first
    assert outcome(reader) == PreparedShare()


def test_what_was_not_read_well_cannot_be_committed(order: RestoreOrder, tmp_path: Path) -> None:
    file = tmp_path / "c" / "bag.embedding_rows.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    reader, held = PartReader(), Held()
    reader.begin(order, held)
    found = outcome(reader)
    assert isinstance(found, PortableError)
    with pytest.raises(rd.DataLossError, match=r"bag.embedding_rows.safetensors.*'words/0.values' differs"):
        raise found.restore()
    with pytest.raises(FailedPreconditionError, match="must have read its part"):
        reader.commit("a", held)
    file.unlink()
    reader.discard()
    reader.begin(order, held)
    assert outcome(reader) == PreparedShare(sees_files=False)
    with pytest.raises(FailedPreconditionError, match="must have read its part"):
        reader.commit("a", held)
    assert held.tables[4] is held.before


def test_who_is_told_to_forget_reads_no_further(order: RestoreOrder, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reader, held = threading.Event(), PartReader(), Held()
    original = read_rows

    def slow(*args: Any) -> Iterator[torch.Tensor]:
        assert gate.wait(10)
        return original(*args)

    monkeypatch.setattr("raydist.checkpoints.sharing.part_reader.read_rows", slow)
    reader.begin(order, held)
    reading = reader._reading
    assert reading is not None
    reader.discard()
    gate.set()
    reading.join(10)
    assert reader.report("a") is None
    found = reading.outcome
    assert isinstance(found, PortableError)
    assert isinstance(found.restore(), CancelledError)
    reader.begin(order, held)
    reader.close(10)
    assert not any(thread.name == "raydist-restore" for thread in threading.enumerate())
