"""What is trained, in numbers. Imported in every environment: the standard library and numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

LEARNING_RATE = 0.01
TABLE_ROWS, TABLE_COLUMNS = 1_000_000, 16
TWO_SERVERS = "_2_servers"

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Size:
    """A network, and the rows of a worker's batch.

    Attributes:
        width: Units of the hidden layers; 0: an embedding and one linear unit.
        rows: Of a batch; for the embedding, ids.
    """

    width: int
    rows: int


SIZES: Mapping[str, Size] = MappingProxyType(
    {"mlp16": Size(16, 64), "mlp1024": Size(1024, 128), "embedding": Size(0, 4096)}
)


def size_of(workload: str) -> Size:
    """What a workload trains, on however many servers."""
    return SIZES[workload.removesuffix(TWO_SERVERS)]


def images(folder: Path) -> Arrays:
    """Images (n, 784) in float32 and labels in int64."""
    pixels = np.load(folder / "mnist" / "images.npy").astype(np.float32).reshape(-1, 784) / 255
    return pixels, np.load(folder / "mnist" / "labels.npy").astype(np.int64)


def random_rows(num_batches: int = 200) -> Arrays:
    """Ids (n,), equally likely, and what is to be said of each: 0.0 or 1.0."""
    draw = np.random.default_rng(0)
    ids = draw.integers(0, TABLE_ROWS, num_batches * SIZES["embedding"].rows)
    return ids, (ids % 2).astype(np.float32)


def arrays_of(workload: str, folder: Path) -> Arrays:
    """The rows that a workload trains on, again and again."""
    return images(folder) if size_of(workload).width else random_rows()
