"""Walking, comparing and patching control states."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.pickling.attribute_table import (
    Attribute,
    Identity,
    IdentitySnapshot,
    capture,
    changed,
    patch,
    seal,
    snapshot_of,
)

values = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=2) | st.tuples(st.integers(0, 1)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
    max_leaves=6,
)
states = st.dictionaries(st.sampled_from("abc"), values, max_size=3)


@given(states, states)
def test_patch_makes_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    mine = copy.deepcopy(one)
    patch(mine, changed(capture(one), capture(other)))
    assert mine == other
    assert repr(mine) == repr(other)  # the order of keys too


def test_containers_keep_their_identity_and_skipped_keys_are_neither_read_nor_dropped() -> None:
    state: dict[str, Any] = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
    group = state["groups"][0]
    patch(state, changed(capture(state), capture({"groups": [{"lr": 0.2, "betas": (0.9, 0.99)}, {"lr": 1.0}]})))
    assert state["groups"][0] is group
    assert group["lr"] == 0.2
    assert len(state["groups"]) == 2
    state = {"modules": {"0": 1, "1": 2}}
    patch(state, changed(capture(state), capture({"modules": OrderedDict([("0", 1)])})))
    assert state == {"modules": OrderedDict([("0", 1)])}
    assert type(state["modules"]) is OrderedDict
    state = {"state": "mine", "lr": 1}
    flat = capture({"state": "other", "lr": 2}, skip={"state"})
    patch(state, changed(capture(state, skip={"state"}), flat), skip={"state"})
    assert state == {"state": "mine", "lr": 2}
    loop: dict[str, Any] = {"n": 1}
    loop["self"] = loop
    assert changed(capture(loop), capture(loop)) == {}


def test_equal_values_of_other_types_differ() -> None:
    pairs: list[tuple[object, object]] = [(1, 1.0), (1, True), (0, False), ("a", b"a")]
    for one, other in pairs:
        assert not Attribute(one).same(Attribute(other)), (one, other)


def test_identity_does_not_keep_alive() -> None:
    thing = Handled()
    sealed = seal(capture({"x": thing}))
    ghost = weakref.ref(thing)
    del thing
    gc.collect()
    assert ghost() is None
    assert changed(sealed, capture({"x": Handled()}))


class Handled:
    """Stands for what travels as a handle."""


def digest(value: Any) -> Hashable:
    if isinstance(value, Handled):
        return "handle", id(value)
    return Identity(value) if callable(value) else repr(value)


def snapshot(root: dict[str, Any]) -> IdentitySnapshot | None:
    return snapshot_of(root, digest)


def test_mutable_objects_and_those_without_weak_references_have_no_snapshot() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (torch.zeros(2), {1, 2}, [torch.zeros(2)], circle):
        assert snapshot({"value": value}) is None
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert snapshot_of({"optimizer": weakref.ref(optimizer)}, Identity) is None


def test_a_snapshot_of_a_dead_object_does_not_match() -> None:
    root: dict[str, Any] = {"held": Handled()}
    seen = snapshot(root)
    assert seen is not None
    gone = weakref.ref(root["held"])
    root["held"] = None
    gc.collect()
    assert gone() is None
    assert not seen(root)


plain = st.one_of(st.integers(0, 2), st.floats(0, 1), st.text(max_size=1), st.none(), st.tuples(st.integers(0, 1)))
nested_states = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(
        plain,
        lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("xy"), inner)),
    ),
)


@given(nested_states, nested_states)
def test_matching_snapshots_mean_no_changes(before: dict[str, Any], after: dict[str, Any]) -> None:
    seen = snapshot(before)
    assert seen is not None
    assert seen(before)
    if seen(after):
        assert not changed(capture(before), capture(after))
