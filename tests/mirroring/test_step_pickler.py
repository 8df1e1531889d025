"""Pickling steps: what is found on the way, and which functions are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from raydist.core.values import PerReplica
from raydist.mirroring.handles import DriverTable
from raydist.mirroring.messages import StepPayload
from raydist.mirroring.scope import Scope, ScopeCheck
from raydist.mirroring.step_pickler import SentFunctions, StepPickler, is_candidate_class


def discovery(scope: Scope, table: DriverTable | None = None, **injected: Any) -> StepPickler:
    known = table or DriverTable()
    return StepPickler(known, ScopeCheck("TestStrategy", scope, lambda: (), known), injected)


def test_finds_what_is_reached_and_what_that_leads_to() -> None:
    scope = Scope()
    with scope.enter():
        layer = nn.BatchNorm1d(1)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    found = discovery(scope)
    found.pickle(lambda: optimizer, "it")
    assert [obj for _, obj in found.new] == [optimizer]
    assert found.bundle()
    assert {id(obj) for _, obj in found.new} == {id(optimizer), *(id(parameter) for parameter in layer.parameters())}
    found.pickle(lambda: layer, "it")
    found.bundle()
    assert {id(obj) for _, obj in found.new} >= {id(layer), *(id(buffer) for buffer in layer.buffers())}


def test_known_objects_are_not_new() -> None:
    scope, table = Scope(), DriverTable()
    with scope.enter():
        layer = nn.Linear(1, 1)
    table.add(layer, table.reserve())
    found = discovery(scope, table)
    found.pickle([layer, layer], "it")
    assert found.new == []
    assert found.bundle() == b""


def test_placeholders_in_order_of_appearance() -> None:
    one, other = PerReplica([1]), PerReplica([2])
    found = discovery(Scope())
    found.pickle((other, one, other), "it")
    assert found.per_replica == [other, one]


def test_externals_are_named() -> None:
    strategy = object()
    assert b"the_strategy" in discovery(Scope(), the_strategy=strategy).pickle([strategy], "it")


def test_ordinary_values_are_passed_over() -> None:
    assert [is_candidate_class(cls) for cls in (int, dict, object, torch.dtype)] == [False] * 4
    assert [is_candidate_class(cls) for cls in (nn.Linear, nn.Parameter, PerReplica, torch.optim.Adam)] == [True] * 4


class Pickles:
    """Stands for a `StepPickler`: pickles a function as its name."""

    def __init__(self, *per_replica: Any) -> None:
        self.per_replica = list(per_replica)
        self.pickled: list[str] = []

    def pickle_function(self, fn: Any) -> bytes:
        self.pickled.append(fn.__name__)
        return str(fn.__name__).encode()


def named(name: str) -> Callable[[], None]:
    def step() -> None: ...

    step.__name__ = name
    return step


def sent(functions: SentFunctions, fn: Any) -> tuple[bytes, bytes, tuple[bytes, ...]]:
    """Return the fields of a dispatched payload with a function."""
    found: Any = Pickles()
    function, digest = functions.pickle(found, fn)
    forget = functions.too_many(digest)
    functions.mark_sent(StepPayload(function=function, digest=digest, forget=forget))
    return function, digest, forget


def test_a_function_is_sent_once() -> None:
    functions, step = SentFunctions(), named("step")
    function, digest, _ = sent(functions, step)
    assert function == b"step"
    assert sent(functions, step) == (b"", digest, ())


def test_what_was_not_dispatched_is_sent_again() -> None:
    functions, pickles = SentFunctions(), Pickles()
    found: Any = pickles
    step = named("step")
    assert functions.pickle(found, step) == functions.pickle(found, step)
    assert pickles.pickled == ["step"] * 2


def test_a_function_with_parts_of_its_own_is_another_one_in_every_step() -> None:
    found: Any = Pickles(PerReplica([1, 2]))
    assert SentFunctions().pickle(found, named("step")) == (b"step", b"")


def test_replicas_that_forgot_are_sent_it_again() -> None:
    functions, step = SentFunctions(), named("step")
    sent(functions, step)
    functions.forget()
    assert sent(functions, step)[0] == b"step"


def test_the_one_that_was_unused_for_longest_makes_room() -> None:
    functions = SentFunctions()
    steps = [named(f"step {number}") for number in range(65)]
    digests = [sent(functions, step)[1] for step in steps[:64]]
    sent(functions, steps[0])
    assert sent(functions, steps[64])[2] == (digests[1],)
    assert sent(functions, steps[1])[0] == b"step 1"
