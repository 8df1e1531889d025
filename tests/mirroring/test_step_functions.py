from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raydist.mirroring.shipment import Shipment
from raydist.mirroring.step_functions import StepFunctions
from raydist.values import PerReplica


class Pickles:
    """Stands for a `Discovery`: pickles a function as its name."""

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


def sent(functions: StepFunctions, fn: Any) -> tuple[bytes, bytes, tuple[bytes, ...]]:
    """What a shipment with a function brings, which is dispatched."""
    found: Any = Pickles()
    function, digest = functions.pickle(found, fn)
    forget = functions.too_many(digest)
    functions.mark_sent(Shipment(function=function, digest=digest, forget=forget))
    return function, digest, forget


def test_a_function_is_sent_once() -> None:
    functions, step = StepFunctions(), named("step")
    function, digest, _ = sent(functions, step)
    assert function == b"step"
    assert sent(functions, step) == (b"", digest, ())


def test_what_was_not_dispatched_is_sent_again() -> None:
    functions, pickles = StepFunctions(), Pickles()
    found: Any = pickles
    step = named("step")
    assert functions.pickle(found, step) == functions.pickle(found, step)
    assert pickles.pickled == ["step"] * 2


def test_a_function_with_parts_of_its_own_is_another_one_in_every_step() -> None:
    found: Any = Pickles(PerReplica([1, 2]))
    assert StepFunctions().pickle(found, named("step")) == (b"step", b"")


def test_replicas_that_forgot_are_sent_it_again() -> None:
    functions, step = StepFunctions(), named("step")
    sent(functions, step)
    functions.forget()
    assert sent(functions, step)[0] == b"step"


def test_the_one_that_was_unused_for_longest_makes_room() -> None:
    functions = StepFunctions()
    steps = [named(f"step {number}") for number in range(65)]
    digests = [sent(functions, step)[1] for step in steps[:64]]
    sent(functions, steps[0])
    assert sent(functions, steps[64])[2] == (digests[1],)
    assert sent(functions, steps[1])[0] == b"step 1"
