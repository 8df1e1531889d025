"""Small files in the formats of MNIST and CIFAR."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["idx_bytes", "write_cifar", "write_idx"]


def idx_bytes(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, prefix: str, count: int, suffix: str = "") -> tuple[Any, Any]:
    """Write images and labels, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), np.uint8)
    labels = (np.arange(count) * 7 % 10).astype(np.uint8)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        content = idx_bytes(array)
        path = folder / f"{prefix}-{name}-ubyte{suffix}"
        path.write_bytes(gzip.compress(content, mtime=0) if suffix == ".gz" else content)
    return images, labels


def write_cifar(path: Path, count: int, num_labels: int = 1) -> np.ndarray[Any, Any]:
    """Write records, and return them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = np.random.default_rng(count).integers(0, 256, (count, num_labels + 3072), np.uint8)
    records[:, :num_labels] = np.arange(count)[:, None] % 10
    path.write_bytes(records.tobytes())
    return records
