"""What a state is on disk."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from raydist.checkpoints import entries
from raydist.checkpoints.entries import (
    MAX_NESTING,
    as_storable_array,
    dtype_name,
    is_storable_tensor,
    pack_state,
    stored_dtype,
    unpack_state,
)
from raydist.core.errors import InvalidArgumentError


def test_names_are_those_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for dtype in entries._NAMES:
        save_file({"a": torch.zeros(4, dtype=torch.uint8).to(dtype)}, path)
        assert f'"dtype":"{dtype_name(dtype)}"'.encode() in path.read_bytes()
        assert load_file(path)["a"].dtype == stored_dtype(dtype_name(dtype)) == dtype


def test_others_are_none() -> None:
    with pytest.raises(ValueError, match="'F31'"):
        stored_dtype("F31")
    assert not is_storable_tensor(torch.zeros(2, dtype=torch.complex128))
    assert not is_storable_tensor(torch.ones(2).to_sparse())


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
STATES = st.recursive(
    PLAIN,
    lambda parts: (
        st.lists(parts, max_size=4)
        | st.tuples(parts, parts)
        | st.dictionaries(st.text(), parts, max_size=4)
        | st.dictionaries(KEYS, parts, max_size=4)
    ),
    max_leaves=8,
)


def round_trip(state: Any) -> Any:
    packed = pack_state(state, "it")
    tensors = {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(value.copy())
        for name, value in packed.tensors.items()
    }
    return unpack_state(json.loads(json.dumps(packed.values, allow_nan=False)), tensors)


def same_types(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(map(type, a)) == list(map(type, b)) and all(map(same_types, a.values(), b.values()))
    return type(a) is type(b) and (not isinstance(a, list | tuple) or all(map(same_types, a, b)))


@settings(max_examples=25)
@given(STATES)
def test_what_is_packed_comes_back(state: Any) -> None:
    found = round_trip(state)
    assert found == state
    assert same_types(found, state)


def test_floats_that_json_lacks() -> None:
    found = round_trip([float("nan"), float("inf"), -float("inf"), -0.0])
    assert math.isnan(found[0])
    assert found[1:3] == [float("inf"), -float("inf")]
    assert math.copysign(1, found[3]) == -1


def test_keys_that_look_like_tags() -> None:
    for state in ({"$tensor": "x"}, {"$tuple": [1]}, {"$": {"$bytes": "no"}}, {"a": {"$dict": 1, "b": 2}}):
        assert round_trip(state) == state


def test_other_mappings() -> None:
    assert round_trip(OrderedDict(a=1, b=2)) == {"a": 1, "b": 2}
    assert round_trip(defaultdict(list, {1: [2]})) == {1: [2]}
    assert round_trip(MappingProxyType({"a": 1})) == {"a": 1}
    found = round_trip({"milestones": Counter({5: 2, 7: 1})})["milestones"]
    assert type(found) is Counter
    assert sorted(found.elements()) == [5, 5, 7]


def test_tensors() -> None:
    for dtype in (torch.bool, torch.uint16, torch.int64, torch.bfloat16, torch.complex64, torch.float8_e5m2):
        for shape in ((), (0,), (2, 3)):
            tensor = torch.zeros(shape).to(dtype)
            packed = pack_state({"a": [tensor]})
            assert packed.values == {"a": [{"$tensor": "a.0"}]}
            assert packed.tensors["a.0"] is tensor


def test_arrays_and_scalars_stay_numpys() -> None:
    array, scalar = np.arange(6, dtype=np.uint16).reshape(2, 3), np.float32(2.5)
    found = round_trip({"a": array, "s": scalar, "big": np.arange(3, dtype=">i4")})
    assert isinstance(found["a"], np.ndarray)
    assert found["a"].dtype == np.uint16
    np.testing.assert_array_equal(found["a"], array)
    assert type(found["s"]) is np.float32
    assert found["s"] == 2.5
    np.testing.assert_array_equal(found["big"], [0, 1, 2])


def test_two_tensors_that_would_have_one_name() -> None:
    state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    found = round_trip(state)
    assert (int(found["a.b"]), int(found["a"]["b"])) == (1, 2)


def test_the_name_that_the_format_uses_itself() -> None:
    assert list(pack_state({"__metadata__": torch.ones(1)}).tensors) == ["__metadata__#2"]


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        print,
        lambda: 0,
        object(),
        int,
        1j,
        {1, 2},
        Pair(1, 2),
        torch.float32,
        torch.ones(2).to_sparse(),
        torch.ones(2, dtype=torch.complex128),
        np.array(["a"]),
        np.array([print]),
        np.datetime64("2020-01-01"),
        1 << 9000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_stored_is_named(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'model.state.3.fn'"):
        pack_state({"state": {3: {"fn": value}}}, "model")


def test_a_state_that_is_too_deep() -> None:
    state: Any = 1
    for _ in range(MAX_NESTING + 1):
        state = [state]
    with pytest.raises(InvalidArgumentError, match="levels deep"):
        pack_state(state, "model")
    assert round_trip(state[0]) == state[0]


@pytest.mark.parametrize(
    "values",
    [
        {"$tensor": "missing"},
        {"$tensor": 3},
        {"$what": 1},
        {"$float": "1e5"},
        {"$float": [1]},
        {"$bytes": "?"},
        {"$bytes": 3},
        {"$tuple": 3},
        {"$tuple": "ab"},
        {"$dict": [[1, 2, 3]]},
        {"$dict": [[{"a": 1}, 2]]},
        {"$dict": [3]},
        {"$counter": {"a": 1}},
    ],
)
def test_what_can_be_no_state_is_an_error(values: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        unpack_state(values, {})


def test_nesting_is_limited_when_it_is_read() -> None:
    values: Any = 1
    for _ in range(900):
        values = {"$tuple": [values]}
    with pytest.raises(ValueError, match="too deeply"):
        unpack_state(values, {})


def test_an_array_that_is_storable_is_not_copied() -> None:
    array = np.ones(3)
    assert as_storable_array(array) is array
