"""Saved rows are those of each server, and are read when they are taken: some at a time, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.checkpoints import read_tensors
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint, open_checkpoint
from raydist.checkpoints.sharing.part_reader import StoredColumn, StoredRows
from raydist.pipelines.stored.directory_files import directory_files

TOUCHED = torch.arange(0, 500, 2)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[SavedCheckpoint, Any]:
    words = rd.ShardedEmbedding(500, 2)
    bag = torch.nn.ModuleDict({"words": words, "tags": rd.ShardedEmbedding(500, 1)})
    optimizer = torch.optim.Adam(words.parameters())
    words(TOUCHED).sum().backward()
    optimizer.step()
    rd.Checkpoint(bag=bag).save(tmp_path / "c")
    return open_checkpoint(directory_files(str(tmp_path / "c"))), words.export_rows()


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return torch.cat(list(value.pieces())) if isinstance(value, StoredColumn) else value


@pytest.mark.parametrize("piece_bytes", [7, 64, 1 << 20])
def test_it_is_what_the_table_had(
    piece_bytes: int, saved: tuple[SavedCheckpoint, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, exported = saved
    monkeypatch.setattr(read_tensors, "_PIECE_BYTES", piece_bytes)
    rows = StoredRows(checkpoint, "bag.embedding_rows")
    rows.open()
    states = rows.states("words")
    torch.testing.assert_close(whole(states[0]), exported[0], rtol=0, atol=0)
    assert states[0]["values"].shape == (250, 2)
    sizes = [len(piece) for piece in states[0]["values"].pieces()]
    assert max(sizes) <= max(1, piece_bytes // 8)
    assert rows.states("elsewhere") == []


def test_it_stops_where_nobody_wants_more(saved: tuple[SavedCheckpoint, Any]) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    rows = StoredRows(saved[0], "bag.embedding_rows", stop)
    rows.open()
    with pytest.raises(KeyboardInterrupt):
        whole(rows.states("words")[0])
