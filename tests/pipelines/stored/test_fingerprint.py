from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydist.dataset import Dataset
from raydist.dataset.readers import FixedLengthRecordDataset, TextLineDataset, TFRecordDataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.stored.containers import Chunk
from raydist.pipelines.stored.fingerprint import fingerprint
from raydist.pipelines.stored.manifest import StoredFile
from raydist.pipelines.tf_example.features import FixedLenFeature, VarLenFeature
from raydist.pipelines.tf_example.ragged_features import RaggedFeature

SCALE = 2
TABLE = {"a": np.arange(3)}


def helper(x: Any) -> Any:
    return x * SCALE


def scaled(factor: Any) -> Callable[[Any], Any]:
    return lambda x: x * factor


class Scaler:
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.lock = threading.Lock()
        self.me = self

    def __call__(self, x: Any) -> Any:
        return x * self.factor

    def method(self, x: Any) -> Any:
        return x + self.factor


def with_default(x: Any, by: int = 3) -> Any:
    return x + by


SAME: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda x: helper(x) + TABLE["a"][0],
    "nested function": lambda: lambda x: [y * SCALE for y in (lambda: range(x))()],
    "closure": lambda: scaled(np.arange(4.0)),
    "partial": lambda: functools.partial(with_default, by=4),
    "object": lambda: Scaler(3),
    "method": lambda: Scaler(3).method,
    "set": lambda: {"a", "b", "c", "d"},
    "text": lambda: np.array(["a", "bc"], object),
    "tensor": lambda: torch.arange(3),
    "numbers": lambda: (1, 1.0, True, None, b"x", np.float32(1), np.dtype("int8"), {"k": [1]}),
    "spec": lambda: TensorSpec((None, 2), "str"),
    "library": lambda: (np.sqrt, np.linalg.norm, len, torch.nn.functional.relu),
    "graph": lambda: (
        Dataset.from_tensor_slices(np.arange(9)).shuffle(4).cache().map(helper).filter(lambda x: x > 2).batch(2)
    ),
    "dataset in a function": lambda: Dataset.range(3).flat_map(lambda n: Dataset.range(5).map(helper)),
}


def test_what_is_made_twice_is_the_same_in_every_process() -> None:
    for name, make in SAME.items():
        assert fingerprint(make()) == fingerprint(make()), name
    code = (
        "from tests.pipelines.stored.test_fingerprint import SAME, fingerprint\n"
        "for make in SAME.values(): print(fingerprint(make()))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=50, check=True
    )
    other = __import__("tests.pipelines.stored.test_fingerprint", fromlist=["SAME"])  # named as in that process
    assert done.stdout.split() == [fingerprint(make()) for make in other.SAME.values()]


DIFFERENT: list[tuple[Any, Any]] = [
    (lambda x: x + 1, lambda x: x + 2),
    (lambda x: x + 1, lambda x: x - 1),
    (lambda x: (lambda y: y + 1)(x), lambda x: (lambda y: y + 2)(x)),
    (lambda x: np.sin(x), lambda x: np.cos(x)),
    (scaled(2), scaled(3)),
    (scaled(np.arange(3)), scaled(np.arange(3.0))),
    (functools.partial(with_default, by=1), functools.partial(with_default, by=2)),
    (Scaler(1), Scaler(2)),
    (Scaler(1).method, Scaler(2).method),
    (1, True),
    ([1, 2], (1, 2)),
    ({"a": 1}, {"a": 2}),
    (np.zeros((2, 3)), np.zeros((3, 2))),
    (torch.zeros(2), torch.ones(2)),
    (Dataset.range(3), Dataset.range(4)),
    (Dataset.range(3).shuffle(2), Dataset.range(3).shuffle(2, seed=1)),
    (Dataset.range(3).batch(2), Dataset.range(3).batch(2, drop_remainder=True)),
    (Dataset.range(3).take(2).skip(1), Dataset.range(3).skip(1).take(2)),
]


def test_what_differs_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (first, second) in enumerate(DIFFERENT):
        assert fingerprint(first) != fingerprint(second), number
    before = fingerprint(lambda x: helper(x))
    monkeypatch.setitem(globals(), "SCALE", 5)
    assert fingerprint(lambda x: helper(x)) != before


# What the fingerprints were when snapshots could be made first: another one would make users' snapshots anew.
EARLIER: dict[str, tuple[Callable[[], Any], str]] = {
    "numbers": (
        lambda: Dataset.range(9).shuffle(4, seed=1).repeat(2).batch(3).skip(1).take(2).prefetch(1),
        "d65d6005f0b2799b8a0a670575ee0aed",
    ),
    "arrays": (
        lambda: Dataset.from_tensor_slices({"x": np.arange(4), "s": ["a", "b", "c", "d"]}).shard(2, 0).cache(),
        "bf8e7cd7492e58677a0c6382e85b6764",
    ),
    "records": (lambda: TFRecordDataset(["a", "b"], "GZIP", 2), "15800b9ea257f150cfcb678e9c062b4e"),
    "lines": (lambda: TextLineDataset("a"), "3ecee297773a9a05376a00db9748071a"),
    "fixed": (lambda: FixedLengthRecordDataset("a", 3, 2, 1), "e0c91effa523ef836b400b2e72146b7b"),
    "features": (
        lambda: (FixedLenFeature((2,), "float32", 0), VarLenFeature("int64"), RaggedFeature("int64")),
        "b1354258e14068b054903c8ef3c0556b",
    ),
    "saved": (lambda: StoredFile("part", 0, (Chunk(0, 1, 2, 3, 4),)), "74de0ae050c031f44e32a9514178ec0c"),
}


def test_it_is_that_of_earlier_versions() -> None:
    assert {name: fingerprint(make()) for name, (make, _) in EARLIER.items()} == {
        name: known for name, (_, known) in EARLIER.items()
    }
