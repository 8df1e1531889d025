from __future__ import annotations

import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.core.errors import SpecError
from raydist.core.nest import LEAF, flatten, leaves_in, map_structure, unflatten
from raydist.core.values import PerReplica
from tests.returned_classes import Encoding, Frozen, ModelOutput, Output, Pair


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Example:
    image: Any
    label: Any


leaves = st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)
nests = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Example, inner, inner),
    ),
    max_leaves=8,
)


@given(nests)
def test_unflatten_is_the_inverse_of_flatten(nest: Any) -> None:
    found, structure = flatten(nest)
    assert unflatten(structure, found) == nest
    assert structure.num_leaves == len(found) == len(structure.paths())
    assert leaves_in(nest) == found
    assert pickle.loads(pickle.dumps(structure)) == structure


@given(nests)
def test_map_structure_keeps_the_structure(nest: Any) -> None:
    pairs = map_structure(lambda a, b: [a, b], nest, nest)
    assert flatten(pairs) == ([[leaf, leaf] for leaf in flatten(nest)[0]], flatten(nest)[1])


def test_leaves() -> None:
    for leaf in (3, "ab", b"ab", [1, (2, 3)], None, Example, PerReplica([(1, 2)])):
        assert flatten(leaf) == ([leaf], LEAF), leaf


def test_a_mapping_is_a_dict_whose_order_does_not_matter() -> None:
    first, second = flatten(OrderedDict(b=2, a=1)), flatten({"a": 1, "b": 2})
    assert first == second == ([1, 2], first[1])
    assert flatten({1: "x", "a": "y"})[0] == ["x", "y"]  # keys of several types
    assert flatten({"a": "y", 1: "x"}) == flatten({1: "x", "a": "y"})


def test_a_dict_is_built_again_with_its_keys_in_their_order() -> None:
    nest = {"c": 1, "a": ({"z": 2, "y": 3}, 4), "b": 5}
    found, structure = flatten(nest)
    assert found == [3, 2, 4, 5, 1]
    assert repr(unflatten(structure, found)) == repr(nest)
    assert [found[place] for place in structure.places()] == [1, 2, 3, 4, 5]
    assert repr(unflatten(pickle.loads(pickle.dumps(structure)), found)) == repr(nest)
    assert repr(map_structure(lambda a, b: a + b, nest, unflatten(structure.by_key(), found))).startswith("{'c': 2,")
    assert structure.by_key() == structure
    assert hash(structure.by_key()) == hash(structure)
    assert (structure.is_sorted, structure.by_key().is_sorted) == (False, True)


VALUES: list[Any] = [
    *(Output(z=1, loss=2), ModelOutput(loss=1, text="a"), ModelOutput(logits=(1, 2)), Pair((1, 2)), Frozen(1.5)),
    *(Encoding({"b": 1, "a": (2, 3)}, 4), Counter("aab"), {"x": Output(b=1, a=None)}, (Pair((Output(loss=1),)),)),
    *(torch.max(torch.ones(1, 2), 1), torch.Size([2, 3])),
]


def test_objects_are_built_again_as_their_own_classes() -> None:
    for value in VALUES:
        leaves, structure = flatten(value)
        assert leaves == leaves_in(value)
        assert len(leaves) == structure.num_leaves == len(structure.paths())
        assert sorted(structure.places()) == list(range(len(leaves)))
        made = unflatten(pickle.loads(pickle.dumps(structure)), leaves)
        assert type(made) is type(value)
        assert repr(made) == repr(value)  # the order of the keys too
        assert getattr(made, "__dict__", None) == getattr(value, "__dict__", None)


def test_attributes_of_a_built_object_are_its_new_items() -> None:
    doubled = map_structure(lambda leaf: 2 * leaf, ModelOutput(loss=1, logits=(2, 3)))
    assert (doubled.loss, doubled["loss"], doubled.logits, doubled.cache) == (2, 2, (4, 6), None)
    assert type(map_structure(str, torch.Size([1]))) is tuple  # a Size of texts there cannot be
    assert str(flatten(ModelOutput(loss=1))[1]) == "ModelOutput(loss='*')"


def test_mappings_in_elements_of_datasets_are_dicts() -> None:
    assert type(unflatten(*reversed(flatten(Output(loss=1), classes=False)))) is dict
    assert type(map_structure(abs, Output(loss=1), classes=False)) is dict


def test_structures_that_differ_are_shown() -> None:
    with pytest.raises(SpecError, match=r"\('\*', '\*'\) and \{'a': '\*'\} differ"):
        map_structure(max, (1, 2), {"a": 1})
    with pytest.raises(SpecError, match="with 1 leaves was given 2"):
        unflatten(flatten((1,))[1], [1, 2])
