"""What TensorFlow 2.21 made of one small image (`tensorflow_values.json`), for functions that must give the same."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import raydist as rd

__all__ = ["PIXELS", "check_call", "values_of"]

PIXELS = np.array(
    [
        [[0, 0, 0], [255, 255, 255], [200, 30, 90], [13, 250, 77]],
        [[5, 5, 250], [128, 127, 129], [250, 140, 20], [1, 2, 3]],
    ],
    np.uint8,
)
BOXES = [[0, 0, 1, 1], [0.1, 0.2, 0.7, 0.9], [0.9, 0.8, 0.1, 0.2], [-0.2, -0.3, 1.2, 1.1], [0.33, 0.5, 0.33, 0.5]]


@cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return rows


def values_of(*functions: str) -> list[Any]:
    """The calls of these functions that TensorFlow made, and what came out."""
    found = [row for row in _rows() if row["call"].partition("(")[0] in functions]
    assert {row["call"].partition("(")[0] for row in found} == set(functions)
    return found


def check_call(row: dict[str, Any]) -> None:
    """raydist gives the same: to the bit in integers, to the last bits in float32."""
    name, _, arguments = row["call"].partition("(")
    known = {"function": getattr(rd.image, name), "image": _image(row), "BOXES": BOXES}
    got = eval(f"function(image, {arguments}", known)
    expected = np.array(row["values"])
    assert got.shape == tuple(row.get("shape", expected.shape))
    if got.dtype.kind == "f":
        np.testing.assert_allclose(got.ravel().astype(np.float64), expected, atol=2e-5)
    else:
        assert got.ravel().tolist() == row["values"]


def _image(row: dict[str, Any]) -> Any:
    if "of" in row:
        return np.array(row["of"], row["image"])
    if row["image"] == "batch":
        return PIXELS[np.newaxis]
    return PIXELS if row["image"] == "uint8" else (PIXELS / 255).astype(np.float32)
