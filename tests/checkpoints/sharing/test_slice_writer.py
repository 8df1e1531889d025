"""A server copies what it is asked for at once, writes it later, and does an order once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from raydist.actors.portable_errors import PortableError
from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.sharing.shares import Share
from raydist.checkpoints.sharing.slice_orders import SaveOrder, SliceFile, SlicePlace
from raydist.checkpoints.sharing.slice_writer import SliceWriter
from raydist.checkpoints.tensor_file import RowRange
from raydist.pipelines.stored.directory_files import directory_files


class Held:
    """Two slices, of which one is remembered."""

    def __init__(self) -> None:
        self.values = {1: torch.arange(4.0).reshape(2, 2), 2: torch.zeros(2, 2)}

    def value(self, number: int) -> torch.Tensor:
        return self.values[number]

    def state(self, optimizer: int, number: int) -> Mapping[str, Any]:
        assert optimizer == 7
        moment = self.values[number] + 10
        return {"step": torch.tensor(3.0), "moment": moment, "flag": True} if number == 1 else {}

    def table_state(self, handle: int) -> Mapping[str, Any]:
        return {"rows": torch.tensor([handle])}


@pytest.fixture
def new(tmp_path: Path) -> NewFiles:
    files = directory_files(str(tmp_path / "c"))
    files.make()
    return NewFiles(files)


def report(writer: SliceWriter, token: str) -> Share:
    writer.close(10.0)
    found = writer.report(token)
    assert isinstance(found, Share), found
    return found


def test_values_are_those_of_the_moment_and_an_order_that_comes_again_is_done_once(
    new: NewFiles, tmp_path: Path
) -> None:
    writer, held, given = SliceWriter(), Held(), torch.ones(2)
    places = (SlicePlace("w", 1, RowRange(2, 4, 6)), SlicePlace("v", 2))
    order = SaveOrder("a", new, (SliceFile("model", 0, "model.safetensors", places, given=("extra",)),))
    writer.begin(order, [given], held)
    held.values[1].zero_()
    given.zero_()
    writer.begin(order, [given], held)
    share = report(writer, "a")
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert found["w[2:4]"].tolist() == [[0, 1], [2, 3]]
    assert found["extra"].tolist() == [1, 1]
    places_of = share.files["model", 0].tensors
    assert (places_of["w"].rows, places_of["w"].shape, places_of["v"].rows) == ((2, 4), (6, 2), None)


@pytest.mark.parametrize("start", [0, 2])
def test_what_belongs_to_a_whole_parameter_is_told_of_its_first_rows(start: int, new: NewFiles, tmp_path: Path) -> None:
    writer = SliceWriter()
    places = (SlicePlace("w", 1, RowRange(start, start + 2, 6)), SlicePlace("v", 2))
    files = (SliceFile("adam", 0, "adam.safetensors", places, optimizer=7),)
    writer.begin(SaveOrder("a", new, files), [], Held())
    share = report(writer, "a")
    found = set(load_file(tmp_path / "c" / "adam.safetensors"))
    if start:
        assert found == {"w.moment[2:4]"}
        assert share.entries == {}
    else:
        assert found == {"w.moment[0:2]", "w.step"}
        entry = {"step": {"$tensor": "w.step"}, "moment": {"$tensor": "w.moment"}, "flag": True}
        assert share.entries == {"adam": {"w": entry}}


def test_nothing_is_written_where_nothing_is_remembered_and_errors_are_told(new: NewFiles, tmp_path: Path) -> None:
    writer = SliceWriter()
    writer.begin(SaveOrder("a", new, (SliceFile("adam", 0, "x", (SlicePlace("v", 2),), optimizer=7),)), [], Held())
    assert report(writer, "a").files == {}
    assert list((tmp_path / "c").iterdir()) == []
    writer.begin(SaveOrder("b", new, (SliceFile("model", 0, "x", (SlicePlace("w", 99),)),)), [], Held())
    error = writer.report("b")
    assert isinstance(error, PortableError)
    assert isinstance(error.restore(), KeyError)


def test_rows_of_tables_are_told_by_their_entry(new: NewFiles, tmp_path: Path) -> None:
    writer = SliceWriter()
    files = (SliceFile("m.embedding_rows", 1, "rows.safetensors", tables=(("words/1", 4),)),)
    writer.begin(SaveOrder("a", new, files), [], Held())
    share = report(writer, "a")
    assert share.entries == {"m.embedding_rows": {"words/1": {"rows": {"$tensor": "words/1.rows"}}}}
    assert load_file(tmp_path / "c" / "rows.safetensors")["words/1.rows"].tolist() == [4]
