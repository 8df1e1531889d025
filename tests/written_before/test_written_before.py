"""Files that an earlier version wrote still load: saved data sets, caches, snapshots, models and checkpoints.

`write.py` wrote `files/` with version 0.1.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import raydist as rd
from tests.written_before.models import Net

FILES = Path(__file__).parent / "files"


def refuse(x: np.int64) -> np.int64:
    raise AssertionError(f"{x} should have come from the files.")


@pytest.mark.parametrize("name", ["saved", "saved_parquet"])
def test_saved_elements(name: str) -> None:
    elements = list(rd.Dataset.load(FILES / name).as_numpy_iterator())
    assert [element["x"].tolist() for element in elements] == np.arange(12.0).reshape(6, 2).tolist()
    assert [str(element["text"]) for element in elements] == list("abcdef")


def test_a_cache(tmp_path: Path) -> None:
    shutil.copytree(FILES / "cache", tmp_path / "cache")
    cached = rd.Dataset.range(20).map(refuse).cache(str(tmp_path / "cache"))
    assert [int(x) for x in cached] == [-x for x in range(20)]


def test_a_snapshot_is_found_under_its_fingerprint(tmp_path: Path) -> None:
    shutil.copytree(FILES / "snapshot", tmp_path / "snapshot")
    before = sorted(path.name for path in (tmp_path / "snapshot").iterdir())
    snapshot = rd.Dataset.range(20).map(np.negative).snapshot(str(tmp_path / "snapshot"))
    assert [int(x) for x in snapshot] == [-x for x in range(20)]
    assert sorted(path.name for path in (tmp_path / "snapshot").iterdir()) == before


def test_a_model_of_a_users_class() -> None:
    model = rd.Model.load(FILES / "model.safetensors", module=Net(3))
    with torch.no_grad():
        prediction = model.module(torch.ones(1, 2))
    expected = json.loads((FILES / "model.json").read_text())["prediction"]
    assert prediction.tolist() == [pytest.approx(row, rel=3e-7) for row in expected]  # processors round otherwise


def test_a_checkpoint() -> None:
    model = Net(3)
    optimizer = torch.optim.Adam(model.parameters(), 0.5)
    progress = rd.State(epoch=0, best=0.0, seen=[])
    rd.Checkpoint(model=model, optimizer=optimizer, progress=progress, nets=[model]).restore(FILES / "checkpoint")
    expected = json.loads((FILES / "checkpoint.json").read_text())
    assert torch.rand(3).tolist() == expected["drawn"]
    with torch.no_grad():
        assert model(torch.ones(1, 2)).tolist() == expected["prediction"]
    assert optimizer.state[model.out.bias]["exp_avg"].tolist() == expected["moment"]
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert progress.state_dict() == {"epoch": 3, "best": float("inf"), "seen": [1, "a", None]}
