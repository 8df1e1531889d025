"""Whether a step's result can be told from earlier ones: by key, or not at all."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from raydist.replicas.dispatching.nest_keys import nest_key
from raydist.values import PerReplica

X = torch.ones(1)


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


@dataclass
class Batch:
    x: Any


class Slotted:
    __slots__ = ()


class Trainer:
    held: Any

    def train(self) -> Any:
        return X

    def test(self) -> Any:
        return {"x": X}


class Net(torch.nn.Module):
    def train_step(self) -> Any:
        return X

    def test_step(self) -> Any:
        return {"x": X}


def enclosing(value: Any) -> Callable[[], Any]:
    def step() -> Any:
        return value

    return step


def with_default(value: Any) -> Callable[[], Any]:
    def step(default: Any = value) -> Any:
        return default

    return step


def with_named_default(value: Any) -> Callable[[], Any]:
    def step(*, default: Any = value) -> Any:
        return default

    return step


def partly(value: Any) -> Callable[[], Any]:
    return functools.partial(lambda given: given, value)


HOLDING = [enclosing, with_default, with_named_default, partly]

NET = Net()
DIFFERENT = [
    (("a",), ("b",)),
    (("a",), ("a", "b")),
    (1, 2),
    (1, True),
    (1, 1.0),
    (None, "none"),
    (("a", ("b",)), ("a", ("c",))),
    (Mode.TRAIN, Mode.TEST),
    (np.int64(1), np.int64(2)),
    (torch.float32, torch.float64),
    (NET.train_step, NET.test_step),
    (NET.train_step, Net().train_step),
    (enclosing(1), with_default(1)),
    (enclosing(1), enclosing(2)),
    (with_default(1), with_default(2)),
    (functools.partial(enclosing(1)), functools.partial(enclosing(2))),
    (torch.sum, torch.mean),
    (["a"], ["b"]),
    (["a"], ("a",)),
    ({"a": 1}, {"b": 1}),
    (Trainer, Net),
    (Batch((X,)), Batch(X)),
]


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_a_function_holds_is_told_apart(holding: Callable[[Any], Any], one: Any, other: Any) -> None:
    key = nest_key(holding(one), ())
    assert key is not None
    assert key == nest_key(holding(one), ())
    assert key != nest_key(holding(other), ())


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize(
    "value",
    [{"a"}, [{"a"}], [0] * 17, dict.fromkeys(range(17)), Slotted(), {}.get, ({"a"},), enclosing({"a"}), object()],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_told_apart_has_no_key(holding: Callable[[Any], Any], value: Any) -> None:
    assert nest_key(holding(value), ()) is None
    assert nest_key(enclosing(1), (value,)) is None or isinstance(value, dict)


def test_methods_of_an_object_are_told_apart_and_so_are_its_attributes() -> None:
    trainer, other = Trainer(), Trainer()
    key = nest_key(trainer.train, ())
    assert key is not None
    assert key == nest_key(trainer.train, ())
    assert key not in (nest_key(trainer.test, ()), nest_key(other.train, ()))
    for value in (1, ("a",), ["a"], ["b"], {"a": 1}, other, torch.nn.Linear(1, 1), Batch(X)):
        before = nest_key(trainer.train, ())
        trainer.held = value
        assert nest_key(trainer.train, ()) not in (None, before)
    trainer.held = [0] * 17
    assert nest_key(trainer.train, ()) is None


def test_an_object_may_hold_itself() -> None:
    trainer = Trainer()
    trainer.held = trainer
    assert nest_key(trainer.train, ()) == nest_key(trainer.train, ()) is not None


@pytest.mark.parametrize("holding", HOLDING)
def test_what_steps_compute_with_shapes_no_nest(holding: Callable[[Any], Any]) -> None:
    model = torch.nn.Linear(1, 1)

    def key() -> tuple[Any, ...] | None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        objects = (model, optimizer, scheduler, torch.amp.GradScaler("cpu"), torch.Generator(), torch, np.ones(2), X)
        return nest_key(holding((*objects, torch.nn.functional.mse_loss, torch.no_grad()(enclosing(1)))), ())

    assert key() == key() is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"u": X}, {"v": X}),
        ({"u": X}, X),
        ((X, X), (X,)),
        ((X,), X),
        (Batch(X), X),
        (Batch((X,)), Batch(X)),
        ("u", "v"),
    ],
    ids=str,
)
def test_the_nests_of_arguments_are_told_apart(one: Any, other: Any) -> None:
    step = enclosing(1)
    key = nest_key(step, (one,))
    assert key is not None
    assert key == nest_key(step, (one,))
    assert key != nest_key(step, (other,))


def test_numbers_are_kept_apart() -> None:
    for one, other in ((1, 2), (0.5, 0.25), (1j, 2j), (np.int64(7), np.int64(8)), (np.float32(0.1), np.float32(0.2))):
        key = nest_key(enclosing(one), (X, {"rate": other}))
        assert key is not None
        assert key.parts == parts_of(enclosing(other), X, {"rate": one})
        assert key.numbers == (one, other)
    assert parts_of(enclosing(True)) not in (parts_of(enclosing(False)), parts_of(enclosing(1)))


def parts_of(*args: Any) -> tuple[Any, ...]:
    key = nest_key(args[0], args[1:])
    assert key is not None
    return key.parts


def test_batches_of_one_nest_are_alike() -> None:
    def batch(rows: int) -> Mapping[str, Any]:
        return {"x": PerReplica([torch.ones(rows)] * 2), "y": (torch.ones(rows), Batch(np.ones(rows)))}

    assert nest_key(enclosing(1), (batch(1),)) == nest_key(enclosing(1), (batch(2),))


def test_cells_are_read_anew() -> None:
    names = ("a",)

    def step() -> Any:
        return names

    key = nest_key(step, ())
    names = ("b",)
    assert nest_key(step, ()) not in (None, key)


def test_a_function_may_enclose_itself_and_what_has_no_value_yet() -> None:
    def again(count: int) -> Any:
        return count and again(count - 1)

    assert nest_key(again, ()) == nest_key(again, ()) is not None

    def early() -> Any:
        return late

    assert nest_key(early, ()) is None
    late = 1
    assert nest_key(early, ()) is not None
