from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raydist.checkpoints import read_tensors as read_module
from raydist.checkpoints.read_tensors import read_pieces, read_slices, read_tensors
from raydist.checkpoints.tensor_file import NewFiles, RowRange, TensorFile, write_tensor_file, write_tensors
from raydist.core.errors import DataLossError
from raydist.pipelines.stored.directory_files import directory_files

TENSORS = {"a": torch.arange(100.0), "b": torch.arange(50, dtype=torch.int32)}


def flip(at: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[at] ^= 4
        return bytes(changed)

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (flip(0), "its header differs"),
        (flip(30), "its header differs"),
        (flip(-1), "tensor 'b' differs"),
        (flip(-201), "tensor 'a' differs"),
        (lambda content: content[:-1], "must have"),
        (lambda content: content + b"\0", "must have"),
        (lambda content: b"", "must have"),
    ],
)
def test_damage_names_file_and_tensor(damage: Callable[[bytes], bytes], told: str, tmp_path: Path) -> None:
    new = NewFiles(directory_files(str(tmp_path)))
    files = write_tensors(new, "model", TENSORS)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataLossError, match=told) as raised:
        read_tensors(new.files, files)
    assert raised.value.path == str(path)
    assert str(path) in str(raised.value)


def test_some_tensors_of_a_file(tmp_path: Path) -> None:
    new = NewFiles(directory_files(str(tmp_path)))
    rows = {"a": RowRange(100, 200, 300)}
    file = write_tensor_file(new, "model.safetensors", TENSORS, rows)
    found = read_slices(new.files, file, ["a"])
    assert list(found) == ["a"]
    assert torch.equal(found["a"], TENSORS["a"]), "the rows that are there"
    assert read_slices(new.files, file, []) == {}
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 4  # of b
    (tmp_path / "model.safetensors").write_bytes(content)
    assert torch.equal(read_slices(new.files, file, ["a"])["a"], TENSORS["a"])
    with pytest.raises(DataLossError, match="tensor 'b' differs"):
        read_slices(new.files, file, ["b"])
    content[9] ^= 4
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(DataLossError, match="its header differs"):
        read_slices(new.files, file, [])


def test_a_missing_file(tmp_path: Path) -> None:
    new = NewFiles(directory_files(str(tmp_path)))
    files = write_tensors(new, "model", TENSORS)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(DataLossError, match="model.safetensors' is missing"):
        read_tensors(new.files, files)


def test_files_of_two_steps_that_were_swapped(tmp_path: Path) -> None:
    files: list[tuple[TensorFile, ...]] = []
    for step in (1, 2):
        new = NewFiles(directory_files(str(tmp_path / str(step))))
        new.files.make()
        files.append(write_tensors(new, "model", {"a": torch.full((4,), float(step))}))
    with pytest.raises(DataLossError, match="tensor 'a' differs"):
        read_tensors(directory_files(str(tmp_path / "1")), files[1])


def test_what_is_not_there_gets_no_memory(tmp_path: Path) -> None:
    """A manifest may say that a tensor of a petabyte has most of its rows in a file that is missing."""
    new = NewFiles(directory_files(str(tmp_path)))
    (file,) = write_tensors(new, "model", {"a": torch.zeros(2)})
    place = file.tensors["a"]
    shape = (1 << 50,)
    here = dataclasses.replace(place, shape=shape, rows=(0, 2))
    there = dataclasses.replace(place, shape=shape, rows=(2, 1 << 50))
    claims = [dataclasses.replace(file, tensors={"a": here}), TensorFile("other", 1 << 52, 0, 0, 0, {"a": there})]
    with pytest.raises(DataLossError, match="is missing"):
        read_tensors(new.files, claims)


def test_tensors_are_ones_own(tmp_path: Path) -> None:
    new = NewFiles(directory_files(str(tmp_path)))
    files = write_tensors(new, "model", TENSORS)
    read_tensors(new.files, files)["a"].fill_(7)
    assert torch.equal(read_tensors(new.files, files)["a"], TENSORS["a"])


def test_rows_come_some_at_a_time_and_damage_is_told_behind_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "_PIECE_BYTES", 100)
    new = NewFiles(directory_files(str(tmp_path)))
    tensors = {"a": torch.arange(90.0).reshape(30, 3), "none": torch.empty(0, 3)}
    file = write_tensor_file(new, "model.safetensors", tensors)
    pieces = [rows for _, _, rows in read_pieces(new.files, file, ["a"])]
    assert [len(piece) for piece in pieces] == [8, 8, 8, 6]
    assert torch.equal(torch.cat(pieces), tensors["a"])
    assert list(read_pieces(new.files, file, ["none"])) == []
    path = tmp_path / "model.safetensors"
    path.write_bytes(flip(file.tensors["a"].begin)(path.read_bytes()))
    with pytest.raises(DataLossError, match=r"model.safetensors.*tensor 'a' differs"):
        list(read_pieces(new.files, file, ["a"]))


@pytest.mark.parametrize("piece_bytes", [7, 40, 1 << 20])
def test_pieces_of_tensors_say_where_they_belong(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "_PIECE_BYTES", piece_bytes)
    new = NewFiles(directory_files(str(tmp_path)))
    tensors = {**TENSORS, "s": torch.tensor(2.5), "none": torch.empty(0, 3), "thin": torch.empty(4, 0)}
    file = write_tensor_file(new, "model.safetensors", tensors, {"a": RowRange(100, 200, 300)})
    found: dict[str, list[torch.Tensor]] = {}
    at = {"a": 100}
    for key, begin, piece in read_pieces(new.files, file, ["a", "b", "s", "none", "thin"]):
        assert begin == at.get(key, 0)
        at[key] = begin + (len(piece) if piece.dim() else 0)
        found.setdefault(key, []).append(piece)
    assert torch.equal(torch.cat(found["a"]), TENSORS["a"])
    assert torch.equal(torch.cat(found["b"]), TENSORS["b"])
    assert [each.item() for each in found["s"]] == [2.5]
    assert len(found["a"]) == -(-400 // max(4, piece_bytes // 4 * 4))
    path = tmp_path / "model.safetensors"
    path.write_bytes(flip(file.tensors["s"].begin)(path.read_bytes()))
    with pytest.raises(DataLossError, match="tensor 's' differs"):
        list(read_pieces(new.files, file, ["s"]))
    assert list(read_pieces(new.files, file, ["b"])), "others are not looked at"
