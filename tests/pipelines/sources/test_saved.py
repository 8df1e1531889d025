from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from raydist.pipelines.formats.saved import DATA_FILE
from tests.contracts.op import check_op, collect, is_error, same

SOURCES: dict[str, rd.Dataset] = {
    "numbers": rd.Dataset.range(9),
    "nothing": rd.Dataset.range(0),
    "nests": rd.Dataset.from_tensor_slices(
        ({"x": np.eye(5), "b": np.eye(5) > 0}, ["a", "", "c", "d", "e"], [b"x"] * 5)
    ),
    "ragged": rd.Dataset.range(5).map(lambda n: (np.arange(n), np.array(["t"] * int(n), object))),
    "batches": rd.Dataset.from_tensor_slices(["a", "b", "c"]).batch(2),
    "complex": rd.Dataset.from_tensor_slices(np.array([1j, 2, 3 + 1j], np.complex64)),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_saved_is_loaded(tmp_path: Path, name: str) -> None:
    source = SOURCES[name]
    source.save(tmp_path / "x")
    loaded = rd.Dataset.load(tmp_path / "x")
    assert same(collect(loaded.as_numpy_iterator()), collect(source.as_numpy_iterator()))
    assert loaded.element_spec == source.element_spec
    if name != "ragged":
        check_op(lambda: rd.Dataset.load(tmp_path / "x"))
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_the_number_of_elements_is_known(tmp_path: Path) -> None:
    rd.Dataset.range(9).filter(lambda x: x > 2).save(tmp_path / "x")
    assert len(rd.Dataset.load(str(tmp_path / "x"))) == 6
    assert "load('" in rd.Dataset.load(tmp_path / "x").explain()


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        rd.Dataset.range(3).map(lambda x: 1 // (2 - int(x))).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_every_damage_is_found(tmp_path: Path) -> None:
    rd.Dataset.range(40).save(tmp_path / "x")
    file = tmp_path / "x" / DATA_FILE
    content = file.read_bytes()
    for at in range(0, len(content), 37):
        mutant = bytearray(content)
        mutant[at] ^= 1 << at % 8
        file.write_bytes(mutant)
        found = collect(rd.Dataset.load(tmp_path / "x").as_numpy_iterator())
        assert any(is_error(item) and item[0] == "DataLossError" for item in found)
        assert all(int(item) in range(40) for item in found if not is_error(item))
    for other in (content[:-1], content + b"x", b""):
        file.write_bytes(other)
        with pytest.raises(rd.DataLossError, match=f"must have the {len(content)} bytes of the manifest"):
            next(iter(rd.Dataset.load(tmp_path / "x")))


@pytest.mark.parametrize("manifest", [b"", b"{}", b"[1]", b'{"version": 2}', b'{"version": 1, "specs": [[[], "int"]]}'])
def test_a_damaged_manifest(tmp_path: Path, manifest: bytes) -> None:
    rd.Dataset.range(3).save(tmp_path / "x")
    (tmp_path / "x" / "manifest.json").write_bytes(manifest)
    with pytest.raises(rd.DataLossError, match="manifest of a saved dataset must be intact"):
        rd.Dataset.load(tmp_path / "x")


def test_bad_paths_and_elements(tmp_path: Path) -> None:
    dataset = rd.Dataset.range(3)
    with pytest.raises(rd.NotFoundError, match="must exist"):
        rd.Dataset.load(tmp_path / "missing")
    with pytest.raises(rd.FailedPreconditionError, match="does not exist yet"):
        dataset.save(tmp_path)
    with pytest.raises(rd.NotFoundError):
        dataset.save(tmp_path / "no" / "parent")
    with pytest.raises(rd.InvalidArgumentError, match="local path, got 's3://b/x'"):
        dataset.save("s3://b/x")
    numbered: Any = {1: np.arange(2)}
    with pytest.raises(rd.InvalidArgumentError, match="dicts with text keys can be saved"):
        rd.Dataset.from_tensor_slices(numbered).save(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
