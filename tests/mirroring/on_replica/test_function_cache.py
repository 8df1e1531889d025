"""Steps that change what they captured."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydist.core.values import PerReplica
from raydist.mirroring.function_cache import ClosureMutationCheck
from tests.mirroring.in_process import Mirror, linear

COUNT = 0
RATE = 0.1


class Trainer:
    """Counts in Python attributes, one of them deep inside."""

    def __init__(self) -> None:
        self.count = 0
        self.seen = {"rows": [1, 2]}

    def step(self, how: str = "count") -> None:
        if how == "count":
            self.count += 1
        elif how == "deep":
            self.seen["rows"].append(3)


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0


def nobody(_: Any) -> bool:
    return False


def changes() -> dict[str, tuple[Callable[[], object], str]]:
    """Functions by what they change, each with the name of that."""
    losses: list[float] = []
    table: dict[str, Any] = {"n": 0}
    names: set[str] = set()
    recent: deque[int] = deque(maxlen=1)
    history, weights, trainer, number, slotted = np.zeros(3), torch.zeros(2), Trainer(), 0, Slotted()

    def rebind() -> None:
        nonlocal number
        number += 1

    def count() -> None:
        global COUNT
        COUNT += 1

    def keep(seen: list[int] = []) -> None:  # noqa: B006  # that is what is tested
        seen.append(1)

    return {
        "list": (lambda: losses.append(1.0), "losses"),
        "value": (lambda: table.update(n=table["n"] + 1), "table['n']"),
        "new key": (lambda: table.setdefault("m", 1), "table"),
        "set": (lambda: names.add("a"), "names"),
        "deque": (lambda: recent.append(1), "recent"),
        "array": (lambda: history.__setitem__(1, 2.0), "history"),
        "tensor": (lambda: weights.add_(1), "weights"),
        "attribute": (trainer.step, "self.count"),
        "deep": (functools.partial(trainer.step, "deep"), "self.seen['rows']"),
        "object": (lambda: trainer.step(), "trainer.count"),
        "slot": (lambda: setattr(slotted, "count", 1), "slotted.count"),
        "variable": (rebind, "number"),
        "global": (count, "COUNT"),
        "default": (keep, "seen"),
    }


@pytest.mark.parametrize("case", changes())
def test_what_was_changed_has_a_name(case: str) -> None:
    function, name = changes()[case]
    captures = ClosureMutationCheck(function, nobody)
    assert captures.changed() == ""
    function()
    assert captures.changed() == name


def test_what_is_read_or_replaced_by_itself_is_not_changed() -> None:
    losses, trainer, missing = [1.0, float("nan")], Trainer(), torch.zeros(2)

    def step() -> float:
        local = list(losses)
        local.append(RATE)
        return sum(local) + trainer.count + float(missing.sum())

    captures = ClosureMutationCheck(step, nobody)
    step()
    assert captures.changed() == ""


def test_shared_objects_libraries_and_imported_functions_are_passed_over() -> None:
    shared, loop = Trainer(), list[Any]()
    loop.append(loop)
    captures = ClosureMutationCheck(lambda: (shared, loop, nn.Linear, np, changes), lambda obj: obj is shared)
    shared.step()
    assert captures.changed() == ""


def test_looks_become_rare_and_one_warning_is_enough() -> None:
    seen: list[int] = []

    def step(number: int) -> None:
        if number > 5:
            seen.append(number)

    watch = ClosureMutationCheck(step, nobody)
    said = []
    for number in range(1, 200):
        step(number)
        said.append(watch.after_run())
    assert [number for number, text in enumerate(said, 1) if text] == [10]
    assert f"The step function 'step' ({__file__}:" in said[9]
    assert "changed seen: the program's own stays as it is" in said[9]


class Callee:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def test_an_object_that_is_called() -> None:
    step = Callee()
    watch = ClosureMutationCheck(step, nobody)
    step()
    assert "The step function, a Callee, changed calls:" in watch.after_run()


class Odd:
    """Whoever looks into it gets an error."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise ZeroDivisionError
        return super().__getattribute__(name)


def test_odd_objects_fail_no_step() -> None:
    odd = Odd()
    assert ClosureMutationCheck(lambda: odd, nobody).after_run() == ""
    later: list[Any] = []
    watch = ClosureMutationCheck(lambda: later, nobody)
    later.append(odd)
    assert "changed later" in watch.after_run()


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, "M8[s]"),
        np.zeros((2, 3))[:, ::2],
        np.array(1.0),
        np.zeros(0),
        np.zeros(2, [("a", int), ("b", "S3")]),
    ],
    ids=["dates", "strided", "scalar", "empty", "records"],
)
def test_arrays_of_every_kind(array: Any) -> None:
    captures = ClosureMutationCheck(lambda: array, nobody)
    assert captures.changed() == ""
    if array.size:
        array[...] = np.full(array.shape, 5).astype(array.dtype) if array.dtype.names is None else (1, b"x")
        assert captures.changed() == "array"


def test_replica_zero_tells_once(mirror: Mirror, layer: nn.Linear) -> None:
    losses: list[float] = []

    def step(scale: float) -> None:
        losses.append(scale * layer.weight.sum().item())

    for _ in range(3):
        mirror.run(step, PerReplica([1.0, 2.0]))
    assert losses == []
    remarks = mirror.replicas[0].take_remarks()
    assert len(remarks) == 1
    assert "'step'" in remarks[0]
    assert "changed losses" in remarks[0]
    assert [replica.take_remarks() for replica in mirror.replicas] == [(), ()]
    losses.append(0.0)  # another pickle of the same function
    mirror.run(step, PerReplica([1.0, 2.0]))
    assert mirror.replicas[0].take_remarks() == ()


def test_mirrored_objects_may_be_changed(mirror: Mirror) -> None:
    layer: Any = linear(mirror)
    layer.count = 0
    layer.seen = []

    def step() -> None:
        layer.count += 1
        layer.seen.append(1)
        layer.weight.data.add_(1)

    mirror.run(step)
    assert (layer.count, layer.seen) == (1, [1])
    assert mirror.replicas[0].take_remarks() == ()
