"""Servers read the rows that they restore: each its own, nothing changes before all have, and the driver reads none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.checkpoints import contents
from raydist.checkpoints.capture import StagingBuffers
from raydist.checkpoints.checkpoint import contents_of, start_save
from raydist.parameter_servers.row_table import RowTable
from raydist.parameter_servers.sharded_embedding import SavedRows
from raydist.pipelines.stored.directory_files import directory_files
from tests.coordinator.ps_in_process import LocalStrategy, local_strategy, read
from tests.coordinator.test_saving import made_bag, opened, rows_of, train_bag

__all__ = ["read"]

EVERYTHING = torch.arange(120)  # of them from 90 on none was touched


class Run:
    """A program whose rows lie on servers."""

    def __init__(self, here: LocalStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
        self.here = here
        with here.mirror.scope():
            self.bag, self.optimizer, self.checkpoint = made_bag()
        monkeypatch.setattr(contents, "open_strategies", lambda: [self])

    def _find_restorer(self) -> Any:
        return self.here.restorer

    def train(self, numbers: range) -> None:
        train_bag(numbers, self.here, self.bag, self.optimizer)

    def rows(self) -> torch.Tensor:
        return rows_of(self.bag, EVERYTHING)

    def tables(self) -> list[RowTable]:
        """Return the table of each server."""
        (tables,) = zip(*(server._state.tables.values() for server in self.here.servers), strict=True)
        return [table for table in tables if isinstance(table, RowTable)]


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[int | None], tuple[Path, torch.Tensor]]:
    """Saves a run of three steps on so many servers, or in one process; says where, and its rows."""

    def save(num_servers: int | None) -> tuple[Path, torch.Tensor]:
        path = tmp_path / "c"
        if num_servers is None:
            bag, optimizer, checkpoint = made_bag()
            train_bag(range(3), None, bag, optimizer)
            checkpoint.save(path)
            return path, rows_of(bag, EVERYTHING)
        with local_strategy(1, num_servers) as here:
            with here.mirror.scope():
                bag, optimizer, checkpoint = made_bag()
            train_bag(range(3), here, bag, optimizer)
            checkpoint.save(path)
            return path, rows_of(bag, EVERYTHING)

    return save


@pytest.mark.parametrize(("before", "after", "num_steps"), [(None, 2, 0), (1, 3, 2), (3, 2, 2)])
def test_servers_read_the_rows_that_they_own(
    before: int | None,
    after: int,
    num_steps: int,
    saved: Callable[[int | None], tuple[Path, torch.Tensor]],
    read: Counter[tuple[str, str, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tables that were trained already, and those of a program that begins; training goes on as without a restart."""
    path, expected = saved(before)
    bare, optimizer, checkpoint = made_bag()
    checkpoint.restore(path)
    train_bag(range(3, 6), None, bare, optimizer)
    read.clear()
    with local_strategy(1, after) as here:
        run = Run(here, monkeypatch)
        run.train(range(40, 40 + num_steps))
        monkeypatch.setattr(SavedRows, "state_dict", None)
        monkeypatch.setattr(SavedRows, "load_state_dict", None)
        run.checkpoint.restore(path)
        tables = run.tables()
        assert sum(table.num_rows for table in tables) == 39, "those of the checkpoint, and no others"
        assert torch.equal(run.rows(), expected)
        rows = {name for name, _, _ in read if name.startswith("bag.embedding_rows") and "index" not in name}
        assert len(rows) == (before or 1)
        assert not any(name in rows and not by_server for name, _, by_server in read)
        run.train(range(3, 6))
        here.coordinator.join()
        torch.testing.assert_close(run.rows(), rows_of(bare, EVERYTHING), rtol=1e-5, atol=1e-6)


def damaged(path: Path, file: str, at: int = -3) -> None:
    content = bytearray((path / file).read_bytes())
    content[at] ^= 8
    (path / file).write_bytes(content)


Saved = Callable[[int | None], tuple[Path, torch.Tensor]]


@pytest.mark.parametrize("at", [40, "values"])
def test_damage_changes_nothing_on_any_server(at: Any, saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever column of whatever server's rows; and of the header."""
    path, _ = saved(3)
    (file,) = [each for each in opened(path).files("bag.embedding_rows") if "00002-of" in each.name]
    place = file.tensors["words/1.values"].begin if at == "values" else at
    with local_strategy(2, 2) as here:
        run = Run(here, monkeypatch)
        run.train(range(2))
        before, weight = run.rows(), run.bag.out.weight.detach().clone()
        damaged(path, file.name, place)
        what = "header" if at == 40 else "tensor 'words/1..*"
        with pytest.raises(rd.DataLossError, match=rf"{file.name}.*{what} differs"):
            run.checkpoint.restore(path)
        assert torch.equal(run.rows(), before)
        assert torch.equal(run.bag.out.weight, weight)
        damaged(path, file.name, place)
        run.checkpoint.restore(path)
        assert not torch.equal(run.rows(), before)


def test_where_the_driver_fails_servers_forget_what_they_have_read(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, expected = saved(2)
    with local_strategy(1, 2) as here:
        run = Run(here, monkeypatch)
        run.train(range(2))
        before = run.rows()
        damaged(path, "bag.safetensors")
        with pytest.raises(rd.DataLossError, match=r"bag.safetensors"):
            run.checkpoint.restore(path)
        assert torch.equal(run.rows(), before)
        assert all(server._state._restorer._reading is None for server in here.servers)  # type: ignore[union-attr]
        damaged(path, "bag.safetensors")
        run.checkpoint.restore(path)
        assert torch.equal(run.rows(), expected)


def test_rows_of_another_table_are_refused_and_nothing_is_changed(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(2)
    with local_strategy(1, 2) as here:
        run = Run(here, monkeypatch)
        run.train(range(2))
        before = run.rows()
        for sizes, why in (
            ((1000, 4), r"'bag.words.weight' is reshaped \(\(0, 4\) here, \(0, 3\) saved\)"),
            ((20, 3), r"must be below 20 .*, got \d+ rows up to \d\d"),
        ):
            with here.mirror.scope():
                other = torch.nn.ModuleDict({"words": rd.ShardedEmbedding(*sizes)})
            with pytest.raises(rd.InvalidArgumentError, match=why):
                rd.Checkpoint(bag=other).restore(path, strict=False)
        with here.mirror.scope():
            named = torch.nn.ModuleDict({"letters": rd.ShardedEmbedding(1000, 3)})
        with pytest.raises(rd.InvalidArgumentError, match="embeddings, which are letters, got 'words'"):
            rd.Checkpoint(bag=named).restore(path, strict=False)
        assert torch.equal(run.rows(), before)


def test_what_can_be_no_rows_is_loss(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = saved(2)
    files, manifest = directory_files(str(path)), opened(path).manifest
    rows = manifest.objects["bag.embedding_rows"]
    whole = rows.values["words/0"]
    with local_strategy(1, 2) as here:
        run = Run(here, monkeypatch)
        run.train(range(2))
        before = run.rows()
        for part in ({}, 3, {**whole, "rows": 3}, {**whole, "optimizers": 3}, {**whole, "rows": {"$tensor": "no"}}):
            edited = {**manifest.objects, "bag.embedding_rows": replace(rows, values={**rows.values, "words/0": part})}
            files.replace("manifest.json", replace(manifest, objects=edited).to_bytes())
            with pytest.raises(rd.DataLossError, match="'bag.embedding_rows' (are|is) invalid"):
                run.checkpoint.restore(path)
        assert torch.equal(run.rows(), before)


def test_a_restore_comes_after_what_was_scheduled_and_before_what_comes_then(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = saved(2)
    bare, optimizer, checkpoint = made_bag()
    checkpoint.restore(path)
    train_bag(range(3, 6), None, bare, optimizer)
    with local_strategy(1, 2) as here:
        run = Run(here, monkeypatch)
        run.train(range(30))  # under way
        save = start_save(
            contents_of(run.checkpoint), directory_files(str(path.parent / "other")), {}, staging=StagingBuffers()
        )
        run.checkpoint.restore(path)
        run.train(range(3, 6))
        here.coordinator.join()
        torch.testing.assert_close(run.rows(), rows_of(bare, EVERYTHING), rtol=1e-5, atol=1e-6)
        save.write()
