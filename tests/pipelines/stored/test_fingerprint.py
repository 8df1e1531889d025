from __future__ import annotations

import functools
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydist.dataset import Dataset
from raydist.pipelines.elements.spec import TensorSpec
from raydist.pipelines.stored.fingerprint import _RAYDIST, _is_library, fingerprint

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


@pytest.mark.parametrize("name", SAME)
def test_what_is_made_twice_is_the_same(name: str) -> None:
    assert fingerprint(SAME[name]()) == fingerprint(SAME[name]())


def test_it_is_the_same_in_every_process() -> None:
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


@pytest.mark.parametrize(
    ("first", "second"),
    [
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
    ],
)
def test_what_differs_is_told_apart(first: Any, second: Any) -> None:
    assert fingerprint(first) != fingerprint(second)


def test_globals_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(lambda x: helper(x))
    monkeypatch.setitem(globals(), "SCALE", 5)
    assert fingerprint(lambda x: helper(x)) != before


def test_this_package_is_a_library_wherever_its_modules_lie() -> None:
    assert _RAYDIST.endswith("raydist")
    assert _is_library(types.FunctionType(fingerprint.__code__, {}))
