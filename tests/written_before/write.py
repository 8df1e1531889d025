"""Writes what `test_written_before.py` reads, run by the version whose files are to be kept.

`PYTHONPATH=<root of the older version>:<root of this one> python tests/written_before/write.py <directory>`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import raydist as rd
from tests.written_before.models import Net


def write_saved(root: Path) -> None:
    rows = rd.Dataset.from_tensor_slices({"x": np.arange(12.0).reshape(6, 2), "text": list("abcdef")})
    rows.save(root / "saved")
    rows.save(root / "saved_parquet", compression="ZSTD", format="parquet")
    list(rd.Dataset.range(20).map(np.negative).cache(str(root / "cache")))
    list(rd.Dataset.range(20).map(np.negative).snapshot(str(root / "snapshot")))


def write_model(root: Path) -> None:
    torch.manual_seed(0)
    model = rd.Model(Net(3), config={"width": 3})
    model.compile(torch.optim.Adam(model.module.parameters(), 0.01), torch.nn.functional.mse_loss)
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    model.fit(rd.Dataset.from_tensor_slices((x, x[:, :1])).batch(2), epochs=1)
    model.save(root / "model.safetensors")
    with torch.no_grad():
        prediction = model.module(torch.ones(1, 2))
    (root / "model.json").write_text(json.dumps({"prediction": prediction.tolist()}))


def write_checkpoint(root: Path) -> None:
    torch.manual_seed(0)
    model = Net(3)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    progress = rd.State(epoch=3, best=float("inf"), seen=[1, "a", None])
    rd.Checkpoint(model=model, optimizer=optimizer, progress=progress, nets=[model]).save(root / "checkpoint")
    with torch.no_grad():
        prediction = model(torch.ones(1, 2))
    moment = optimizer.state[model.out.bias]["exp_avg"]
    drawn = torch.rand(3)
    expected = {"prediction": prediction.tolist(), "moment": moment.tolist(), "drawn": drawn.tolist()}
    (root / "checkpoint.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    directory = Path(sys.argv[1]).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    write_saved(directory)
    write_model(directory)
    write_checkpoint(directory)
