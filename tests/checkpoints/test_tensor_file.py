from __future__ import annotations

import json
import pickle
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from raydist.checkpoints.new_files import NewFiles
from raydist.checkpoints.read_tensors import read_tensors
from raydist.checkpoints.tensor_file import RowRange, plan_parts, write_index, write_tensor_file, write_tensors
from raydist.failpoints import installed
from raydist.pipelines.stored.directory_files import directory_files

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "turned": torch.arange(12, dtype=torch.int16).reshape(3, 4).T,
    "view": torch.arange(10.0)[2:5],
    "half": torch.randn(5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "many": torch.arange(3_000_000, dtype=torch.float32),  # several pieces
    'odd "name"\né': torch.ones(1, requires_grad=True),
}


@pytest.fixture
def new(tmp_path: Path) -> NewFiles:
    return NewFiles(directory_files(str(tmp_path)))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value.detach()), name


def test_any_reader_of_safetensors_reads_it(new: NewFiles, tmp_path: Path) -> None:
    (file,) = write_tensors(new, "model", TENSORS)
    assert file.name == "model.safetensors"
    assert_equal(load_file(tmp_path / file.name), TENSORS)
    with safe_open(tmp_path / file.name, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_we_read_it(new: NewFiles) -> None:
    files = write_tensors(new, "model", TENSORS)
    assert_equal(read_tensors(new.files, files), TENSORS)
    assert_equal(read_tensors(new.files, files, lambda name: name == "view"), {"view": TENSORS["view"]})


def test_what_is_written_is_described(new: NewFiles, tmp_path: Path) -> None:
    (file,) = write_tensors(new, "model", TENSORS)
    content = (tmp_path / file.name).read_bytes()
    assert file.num_bytes == len(content)
    assert file.crc32c == google_crc32c.value(content)
    assert file.header_crc32c == google_crc32c.value(content[: file.header_bytes])
    place = file.tensors["view"]
    assert place.crc32c == google_crc32c.value(content[place.begin : place.end])
    assert content[place.begin : place.end] == TENSORS["view"].numpy().tobytes()
    for key, each in file.tensors.items():
        assert each.begin % TENSORS[key].element_size() == 0
    assert pickle.loads(pickle.dumps(file)) == file


def test_large_states_are_several_files_with_an_index(new: NewFiles, tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((100,), float(i)) for i in range(5)}
    files = write_tensors(new, "model", tensors, max_part_bytes=900)
    assert [file.name for file in files] == [
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / files[-1].name).read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert index["weight_map"]["layer.4"] == "model-00003-of-00003.safetensors"
    for key, name in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / name)[key], tensors[key])
    assert_equal(read_tensors(new.files, files), tensors)


def test_parts_are_filled_in_order() -> None:
    assert plan_parts({}, 5) == [[]]
    assert plan_parts({"a": 5, "b": 0, "c": 1}, 5) == [["a", "b"], ["c"]]
    assert plan_parts({"a": 50, "b": 50}, 5) == [["a"], ["b"]]


def test_slices_of_several_writers_make_a_whole(new: NewFiles, tmp_path: Path) -> None:
    whole = torch.arange(30.0).reshape(10, 3)
    parts = [(0, 4), (4, 4), (4, 10)]
    files = tuple(
        write_tensor_file(
            new,
            new.part_named("table", number, len(parts)),
            {"rows": whole[start:stop], f"own{number}": torch.tensor(number)},
            {"rows": RowRange(start, stop, 10)},
        )
        for number, (start, stop) in enumerate(parts)
    )
    files = (*files, write_index(new, "table", files))
    found = read_tensors(new.files, reversed(files))
    assert torch.equal(found["rows"], whole)
    assert int(found["own2"]) == 2
    plain = [load_file(tmp_path / file.name)[f"rows[{a}:{b}]"] for file, (a, b) in zip(files, parts, strict=False)]
    assert torch.equal(torch.cat(plain), whole)


def test_there_are_failpoints_within(new: NewFiles) -> None:
    passed: list[str] = []
    with installed(passed.append):
        write_tensors(new, "model", {"many": TENSORS["many"]})
    pieces = -(-TENSORS["many"].nbytes // 2**18)
    assert pieces > 3
    within = ["checkpoint.within_file"] * (1 + pieces)  # the header, too
    assert passed == [*within, "checkpoint.before_flush", "checkpoint.after_flush"]


def test_what_has_no_elements_wherever_it_comes_from(tmp_path: Path) -> None:
    new = NewFiles(directory_files(str(tmp_path)))
    tensors = {"a": torch.from_numpy(np.empty(3, np.int64)[:0].copy()), "b": torch.empty(0, 2)}
    write_tensor_file(new, "model.safetensors", tensors)
    found = load_file(tmp_path / "model.safetensors")
    assert {key: tensor.shape for key, tensor in found.items()} == {"a": (0,), "b": (0, 2)}
