"""Values of replicas, and other small things of the core."""

from __future__ import annotations

import gc
import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from raydist.core.errors import InvalidArgumentError
from raydist.core.values import InputContext, PerReplica, ReduceOp
from raydist.core.weak_class_cache import remembered_by_class


def test_a_reduction_is_parsed_from_itself_and_its_name() -> None:
    for op in ReduceOp:
        assert ReduceOp.parse(op) is ReduceOp.parse(op.name.lower()) is op
    names: list[Any] = ["average", "", "SUM ", 3, None]
    for name in names:
        with pytest.raises(InvalidArgumentError, match=r"one of SUM, MEAN, MIN, MAX, PRODUCT, got"):
            ReduceOp.parse(name)


class Remote(PerReplica):
    def __init__(self) -> None:
        self._values = None
        self.fetches = 0

    def _fetch(self) -> tuple[int, ...]:
        self.fetches += 1
        return (1, 2)


def test_printing_is_reading() -> None:
    value = Remote()
    assert (repr(value), str(value), f"{value}") == ("PerReplica(0: 1, 1: 2)",) * 3
    assert value.fetches == 1


def test_per_replica_is_no_number() -> None:
    uses: list[Callable[[Any], Any]] = [
        *(bool, float, int, complex, round, abs, operator.neg, operator.pos, "{:.3f}".format, torch.mean),
        *(lambda x: 1 + x, lambda x: x - 1, lambda x: 2 * x, lambda x: x / x, lambda x: x // 2, lambda x: x**2),
        *(lambda x: 2 % x, lambda x: sum([x, x]), lambda x: x < 1, lambda x: max(x, x), lambda x: x @ x),
        *(lambda x: torch.stack([x, x]), lambda x: torch.ones(2) + x, lambda x: torch.ones(2).add(x)),
        lambda x: np.float32(1) + x,
    ]
    for use in uses:
        with pytest.raises(InvalidArgumentError, match=r"strategy\.reduce.*strategy\.local_results"):
            use(PerReplica([1.0, 2.0]))
    for name in ("item", "numpy", "detach", "backward"):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}'.*strategy\.reduce.*strategy\.local_results"):
            getattr(PerReplica([1.0]), name)


def test_an_attribute_error_of_a_step_comes_out_of_values() -> None:
    class Failed(PerReplica):
        def _fetch(self) -> tuple[int, ...]:
            raise AttributeError("the step's own")

    value = Failed([])
    value._values = None
    for read in (lambda: value.values, lambda: value.num_parts, lambda: repr(value)):
        with pytest.raises(AttributeError, match="^the step's own$"):
            read()


def test_per_replica_batch_size() -> None:
    for size, replicas, expected in ((32, 4, 8), (4, 1, 4), (0, 3, 0)):
        assert InputContext(num_replicas_in_sync=replicas).get_per_replica_batch_size(size) == expected
    with pytest.raises(InvalidArgumentError, match=r"got 10 and 4. Use 8 or 12"):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(10)


def test_a_class_is_looked_at_once_and_forgotten_with_its_last_user() -> None:
    seen: list[str] = []

    @remembered_by_class
    def look(cls: type) -> int:
        seen.append(cls.__name__)
        return len(seen)

    for number in range(1, 4):
        cls = type(f"Made{number}", (), {})
        assert look(cls) == look(cls) == number
        gone = weakref.ref(cls)
        del cls
        gc.collect()
        assert gone() is None
    assert seen == ["Made1", "Made2", "Made3"]
