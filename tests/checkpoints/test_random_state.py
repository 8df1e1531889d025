from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from raydist.checkpoints.entries import pack_state, unpack_state
from raydist.checkpoints.random_state import RestoredReplicas, random_states, set_random_states


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    states = random_states()
    yield
    set_random_states(states)


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), torch.randn(2).tolist(), random.random(), random.gauss(), *np.random.randn(3)]


def test_what_follows_is_the_same() -> None:
    draws()
    states = random_states()
    expected = draws()
    draws()
    packed = pack_state(states)
    assert packed.tensors == {}
    set_random_states(unpack_state(packed.values, {}))
    assert draws() == expected


def test_others_are_an_error() -> None:
    with pytest.raises((ValueError, TypeError, KeyError, RuntimeError)):
        set_random_states({"torch": b"123", "python": (3, b"", None)})


def test_a_program_that_seeds_after_a_restore_begins_where_it_says() -> None:
    restored = RestoredReplicas()
    restored.restore([[b"1"], [b"2"]])
    assert restored.since(0) == ((b"1",), (b"2",))
    torch.manual_seed(3)
    assert restored.since(0) == ()
