from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.mirroring.argument_forms import ArgumentForms, argument_form
from raydist.values import PerReplica


def test_batches_in_one_nest_have_one_form() -> None:
    first, second = PerReplica([1, 2]), PerReplica([3, 4])
    one = argument_form(((first, {"y": second}),), {"k": 1})
    two = argument_form(((second, {"y": first}),), {"k": 1})
    assert one is not None
    assert two is not None
    assert one[0] == two[0]
    assert (one[1], two[1]) == ((first, second), (second, first))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([1],), {}),
        ((np.zeros(1),), {}),
        ((1.0,), {}),
        ((object(),), {}),
        ((), {"a": {1, 2}}),
    ],
)
def test_what_cannot_be_compared_has_none(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert argument_form(args, kwargs) is None


def test_one_leaf_in_two_places_has_none() -> None:
    leaf = PerReplica([1, 2])
    assert argument_form((leaf, leaf), {}) is None


nests = st.recursive(
    st.one_of(st.integers(0, 1), st.booleans(), st.none(), st.text(max_size=1)),
    lambda inner: st.one_of(
        st.tuples(inner), st.tuples(inner, inner), st.dictionaries(st.sampled_from(["a", "b"]), inner)
    ),
)


@given(nests, nests)
def test_equal_forms_are_pickled_alike(one: Any, two: Any) -> None:
    first, second = argument_form((one,), {}), argument_form((two,), {})
    assert first is not None
    assert second is not None
    same = type(one) is type(two) and repr(one) == repr(two)
    assert (first[0] == second[0]) == same


def test_the_forms_used_last_are_kept() -> None:
    forms = ArgumentForms()
    for number in range(100):
        forms.remember(number, pickle.dumps(number))
        assert forms.pickle_of(0)
    assert forms.pickle_of(99) == pickle.dumps(99)
    assert forms.pickle_of(1) == b""
    assert forms.pickle_of("never seen") == b""
