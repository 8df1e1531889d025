from __future__ import annotations

import gc
import weakref
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.pickling.attribute_table import Identity, capture, changed
from raydist.pickling.witness import Witness, witness_of


class Handled:
    """Stands for what travels as a handle."""


def digest(value: Any) -> Hashable:
    if isinstance(value, Handled):
        return "handle", id(value)
    return Identity(value) if callable(value) else repr(value)


def witness(root: dict[str, Any], *skip: str) -> Witness | None:
    return witness_of(root, skip=skip, digest=digest)


def test_what_was_not_touched_is_the_same() -> None:
    root = {"lr": 0.1, "groups": [{"params": [Handled()], "fn": print}], "empty": {}, "betas": (0.9, 0.99)}
    seen = witness(root)
    assert seen is not None
    assert seen.same_attributes(root, ())


def test_keys_that_are_no_control_state_do_not_count() -> None:
    root: dict[str, Any] = {"lr": 0.1, "state": torch.zeros(2)}
    seen = witness(root, "state")
    assert seen is not None
    root["state"] = None
    assert seen.same_attributes(root, ("state",))
    root["lr"] = 0.2
    assert not seen.same_attributes(root, ("state",))


@pytest.mark.parametrize("value", [torch.zeros(2), {1, 2}, [torch.zeros(2)]])
def test_there_is_none_of_what_changes_inside(value: Any) -> None:
    assert witness({"value": value}) is None


def test_there_is_none_of_what_holds_itself() -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert witness({"circle": circle}) is None


def test_an_object_that_died_is_not_the_same() -> None:
    root: dict[str, Any] = {"held": Handled()}
    seen = witness(root)
    assert seen is not None
    gone = weakref.ref(root["held"])
    root["held"] = None
    gc.collect()
    assert gone() is None
    assert not seen.same_attributes(root, ())


plain = st.one_of(st.integers(0, 2), st.floats(0, 1), st.text(max_size=1), st.none(), st.tuples(st.integers(0, 1)))
states = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        plain, lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("xy"), inner))
    ),
)


@given(states, states)
def test_whoever_passes_has_no_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    seen = witness(before)
    assert seen is not None
    assert seen.same_attributes(before, ())
    if seen.same_attributes(after, ()):
        assert not changed(capture(before), capture(after))
