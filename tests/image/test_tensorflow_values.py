"""What TensorFlow 2.21 made of one small image (`tensorflow_values.json`), for functions that must give the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import raydist as rd
from tests.image.samples import PIXELS

BOXES = [[0, 0, 1, 1], [0.1, 0.2, 0.7, 0.9], [0.9, 0.8, 0.1, 0.2], [-0.2, -0.3, 1.2, 1.1], [0.33, 0.5, 0.33, 0.5]]
ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("tensorflow_values.json").read_text())


def test_values_are_tensorflows() -> None:
    """To the bit in integers, to the last bits in float32."""
    for row in ROWS:
        name, _, arguments = row["call"].partition("(")
        known = {"function": getattr(rd.image, name), "image": _image(row), "BOXES": BOXES}
        got = eval(f"function(image, {arguments}", known)
        expected = np.array(row["values"])
        assert got.shape == tuple(row.get("shape", expected.shape)), row["call"]
        if got.dtype.kind == "f":
            np.testing.assert_allclose(got.ravel().astype(np.float64), expected, atol=2e-5, err_msg=row["call"])
        else:
            assert got.ravel().tolist() == row["values"], row["call"]


def _image(row: dict[str, Any]) -> Any:
    if "of" in row:
        return np.array(row["of"], row["image"])
    if row["image"] == "batch":
        return PIXELS[np.newaxis]
    return PIXELS if row["image"] == "uint8" else (PIXELS / 255).astype(np.float32)
