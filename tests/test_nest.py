from __future__ import annotations

import operator
import pickle
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raydist.core import errors
from raydist.core.errors import InvalidArgumentError, RaydistError, SpecError
from raydist.core.exception_utils import (
    Carried,
    annotate,
    as_exception,
    collect_errors,
    message_of,
    shown,
    what_was_raised,
)
from raydist.core.nest import flatten, leaves_in, map_structure, unflatten
from raydist.core.values import InputContext, PerReplica, ReduceOp
from tests.odd_errors import Departure
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


# --- values of replicas -----------------------------------------------------------------------------------------------


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


# --- errors -----------------------------------------------------------------------------------------------------------

CLASSES = [cls for cls in (getattr(errors, name) for name in errors.__all__) if cls is not errors.Preempted]


def test_all_survive_pickling_and_show_their_message() -> None:
    for cls in CLASSES:
        error = cls("what must hold, what was got")
        error.add_note("map-2 (train.py:7), element 5, worker input-1")
        for dumps in (pickle.dumps, cloudpickle.dumps):
            copy = pickle.loads(dumps(error))
            assert (type(copy), str(copy)) == (cls, "what must hold, what was got")
            assert copy.__notes__ == error.__notes__
        shown = "".join(traceback.format_exception_only(cls("got 0")))
        assert issubclass(cls, RaydistError)
        assert shown.strip() == f"raydist.core.errors.{cls.__name__}: got 0"


def test_the_end_of_a_process_is_no_error_and_keeps_its_code() -> None:
    ended = errors.Preempted(7, "saved in ckpt-3")
    ended.add_note("replica 1")
    copy = pickle.loads(pickle.dumps(ended))
    assert isinstance(copy, SystemExit)
    assert not isinstance(copy, RaydistError | Exception)
    assert (copy.code, str(copy), copy.__notes__) == (7, "saved in ckpt-3", ["replica 1"])


class Mute(Exception):
    """Says nothing of itself."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class Closed(Exception):
    """Allows no notes."""

    @property
    def __notes__(self) -> Any:  # type: ignore[override]  # what users do
        raise RuntimeError("no notes")


class Stiff(Exception):
    """Cannot be written to, and has a method of its own in the place of Python's."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)

    def add_note(self, note: str) -> None:
        raise TypeError("not now")


def test_any_notes_take_one_more() -> None:
    cases: list[tuple[Any, list[Any]]] = [
        (None, ["new"]),
        ("old", ["old", "new"]),
        (("a", "b"), ["a", "b", "new"]),
        ([1, "b"], [1, "b", "new"]),
        ({"a": 1}, ["{'a': 1}", "new"]),
        (["new"], ["new"]),
    ]
    for notes, expected in cases:
        error = ValueError("bad")
        error.__notes__ = notes
        annotate(error, "new")
        assert error.__notes__ == expected
    annotate(Closed(), "new")  # takes none, and is left alone
    stiff = Stiff()
    annotate(stiff, "new")
    assert stiff.__notes__ == ["new"]


def test_notes_reach_what_is_carried() -> None:
    error = Departure("left")
    carried = as_exception(error)
    assert isinstance(carried, Carried)
    annotate(carried, "new")
    assert what_was_raised(carried) is error
    assert error.__notes__ == ["new"]


def test_what_cannot_say_its_message_is_described() -> None:
    assert message_of(ValueError("bad")) == "bad"
    assert "its __str__ raised RuntimeError" in message_of(Mute(3))
    assert "(3,)" in message_of(Mute(3))
    assert shown(Mute()) == "<Mute>"


def test_every_call_is_made_in_order_and_the_first_error_is_raised() -> None:
    made: list[int] = []

    def fail(number: int) -> None:
        made.append(number)
        raise ValueError(f"call {number}")

    with pytest.raises(ValueError, match="call 1"):
        collect_errors([lambda: fail(1), lambda: fail(2), lambda: made.append(3)])
    assert made == [1, 2, 3]
