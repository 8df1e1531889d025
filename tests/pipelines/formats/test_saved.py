from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import raydist as rd
from raydist.pipelines.formats.saved import DATA_FILE, read_manifest, save_blocks
from raydist.pipelines.rows import block_of_rows
from tests.pipelines.formats.record_files import read_all


def test_manifest_and_records(tmp_path: Path) -> None:
    blocks = [block_of_rows([{"x": (1, "a")}, {"x": (2, "b")}]), block_of_rows([{"x": (3, "c")}])]
    spec = {"x": (rd.TensorSpec((), "int64"), rd.TensorSpec((), str))}
    save_blocks(tmp_path / "x", spec, blocks)
    manifest = read_manifest(tmp_path / "x")
    assert (manifest.structure, manifest.num_rows) == (blocks[0].structure, 3)
    assert manifest.specs == blocks[0].specs
    records, errors = read_all(tmp_path / "x" / DATA_FILE)
    assert (len(records), errors) == (2, [])
    assert manifest.num_bytes == sum(map(len, records)) + 32


def test_all_dtypes_come_back(tmp_path: Path) -> None:
    names = ["bool", "int8", "uint64", "float16", "float32", "complex128", "S", "U"]
    spec = {name: rd.TensorSpec((None, 3), np.dtype(name)) for name in names}
    save_blocks(tmp_path / "x", spec, [])
    assert dict(zip(sorted(names), read_manifest(tmp_path / "x").specs, strict=True)) == spec


def test_elements_of_another_structure(tmp_path: Path) -> None:
    with pytest.raises(rd.SpecError, match="All elements must have the structure"):
        save_blocks(tmp_path / "x", rd.TensorSpec((), "int64"), [block_of_rows([(1, 2)])])
    assert list(tmp_path.iterdir()) == []
