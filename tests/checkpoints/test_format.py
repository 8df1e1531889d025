"""The form of a checkpoint on disk: values of a state, and the manifest."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from raydist.checkpoints import entries, manifest
from raydist.checkpoints.entries import MAX_NESTING, dtype_name, pack_state, stored_dtype, unpack_state
from raydist.checkpoints.manifest import CheckpointManifest, SavedObject
from raydist.checkpoints.tensor_file import FilePlace, TensorFile
from raydist.core.errors import DataLossError, InvalidArgumentError
from tests.refused import check_refused


def test_names_are_those_of_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for dtype in entries._NAMES:
        save_file({"a": torch.zeros(4, dtype=torch.uint8).to(dtype)}, path)
        assert f'"dtype":"{dtype_name(dtype)}"'.encode() in path.read_bytes()
        assert load_file(path)["a"].dtype == stored_dtype(dtype_name(dtype)) == dtype


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
def test_packed_values_are_unpacked_equal(state: Any) -> None:
    found = round_trip(state)
    assert found == state
    assert same_types(found, state)


def test_odd_values_come_back() -> None:
    found = round_trip([float("nan"), float("inf"), -float("inf"), -0.0])
    assert math.isnan(found[0])
    assert found[1:3] == [float("inf"), -float("inf")]
    assert math.copysign(1, found[3]) == -1
    for state in ({"$tensor": "x"}, {"$tuple": [1]}, {"$": {"$bytes": "no"}}, {"a": {"$dict": 1, "b": 2}}):
        assert round_trip(state) == state, "keys look like tags"
    assert round_trip(OrderedDict(a=1, b=2)) == {"a": 1, "b": 2}
    assert round_trip(defaultdict(list, {1: [2]})) == {1: [2]}
    assert round_trip(MappingProxyType({"a": 1})) == {"a": 1}
    found = round_trip({"milestones": Counter({5: 2, 7: 1})})["milestones"]
    assert type(found) is Counter
    assert sorted(found.elements()) == [5, 5, 7]
    found = round_trip({"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}})
    assert (int(found["a.b"]), int(found["a"]["b"])) == (1, 2), "two tensors have one name"
    assert list(pack_state({"__metadata__": torch.ones(1)}).tensors) == ["__metadata__#2"], "the name is reserved"


def test_numpy_arrays_and_scalars_keep_their_types() -> None:
    array, scalar = np.arange(6, dtype=np.uint16).reshape(2, 3), np.float32(2.5)
    found = round_trip({"a": array, "s": scalar, "big": np.arange(3, dtype=">i4")})
    assert isinstance(found["a"], np.ndarray)
    assert found["a"].dtype == np.uint16
    np.testing.assert_array_equal(found["a"], array)
    assert type(found["s"]) is np.float32
    assert found["s"] == 2.5
    np.testing.assert_array_equal(found["big"], [0, 1, 2])


Pair = namedtuple("Pair", "a b")


def test_values_that_cannot_be_stored_are_named() -> None:
    values: list[Any] = [
        *(print, lambda: 0, object(), int, 1j, {1, 2}, Pair(1, 2), torch.float32, torch.ones(2).to_sparse()),
        *(torch.ones(2, dtype=torch.complex128), np.array(["a"]), np.array([print]), np.datetime64("2020-01-01")),
        1 << 9000,
    ]
    told = r"'model.state.3.fn'"
    check_refused(lambda value: pack_state({"state": {3: {"fn": value}}}, "model"), [(each, told) for each in values])


def test_nesting_is_limited() -> None:
    state: Any = 1
    for _ in range(MAX_NESTING + 1):
        state = [state]
    with pytest.raises(InvalidArgumentError, match="levels deep"):
        pack_state(state, "model")
    assert round_trip(state[0]) == state[0]
    values: Any = 1
    for _ in range(900):
        values = {"$tuple": [values]}
    with pytest.raises(ValueError, match="too deeply"):
        unpack_state(values, {})


def test_invalid_packed_states_are_errors() -> None:
    values: list[Any] = [
        *({"$tensor": "missing"}, {"$tensor": 3}, {"$what": 1}, {"$float": "1e5"}, {"$float": [1]}, {"$bytes": "?"}),
        *({"$bytes": 3}, {"$tuple": 3}, {"$tuple": "ab"}, {"$dict": [[1, 2, 3]]}, {"$dict": [[{"a": 1}, 2]]}),
        *({"$dict": [3]}, {"$counter": {"a": 1}}),
    ]
    for each in values:
        with pytest.raises((ValueError, TypeError)):
            pytest.fail(f"{each}: {unpack_state(each, {})}")


FILE = TensorFile("model.safetensors", 40, 7, 16, 9, {"a": FilePlace("F32", (2, 3), 16, 40, 5)})

SLICES = tuple(
    TensorFile(f"table-{i}.safetensors", end, 1, 8, 2, {"t": FilePlace("F32", (5,), 8, end, 3, rows)})
    for i, (end, rows) in enumerate([(16, (0, 2)), (20, (2, 5))])
)

MANIFEST = CheckpointManifest(
    {
        "model": SavedObject("module", None, {"a": {"$tensor": "a"}}, (FILE.name,)),
        "again": SavedObject("module", same_as="model"),
        "table": SavedObject("optimizer", "Adam", {"t": {"$tensor": "t"}}, tuple(file.name for file in SLICES)),
        "progress": SavedObject("other", "State", {"epoch": 3}),
    },
    (FILE, *SLICES),
    random={"python": 1},
    details={"number": 500},
)


def sealed(content: Any) -> bytes:
    """With the checksum that it would have."""
    saved = json.dumps(content).encode()
    return b'{"crc32c": %d, "saved": %b}' % (google_crc32c.value(saved), saved)


def changed(change: Callable[[Any], None]) -> bytes:
    content = json.loads(MANIFEST.to_bytes())["saved"]
    change(content)
    return sealed(content)


def setting(*path: Any, to: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in path[:-1]:
            content = content[key]
        content[path[-1]] = copy.deepcopy(to)

    return change


def test_a_manifest_comes_back_if_its_version_is_known() -> None:
    data = MANIFEST.to_bytes()
    assert CheckpointManifest.of_bytes(data, "x") == MANIFEST
    assert json.loads(data)["saved"]["details"] == {"number": 500}
    assert CheckpointManifest.of_bytes(changed(lambda content: None), "x") == MANIFEST
    with pytest.raises(InvalidArgumentError, match="version 2, this raydist reads version 1"):
        CheckpointManifest.of_bytes(sealed({"version": 2, "new": "things"}), "x")


def test_every_changed_byte_is_detected() -> None:
    data = MANIFEST.to_bytes()
    for at in range(len(data)):
        with pytest.raises(DataLossError, match="'x/manifest.json'"):
            CheckpointManifest.of_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "x/manifest.json")
        with pytest.raises(DataLossError):
            CheckpointManifest.of_bytes(data[:at], "x")


HOSTILE_NAMES = (
    "../../etc/passwd", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "C:\\x", "a\0b", "x\n", "\u2024\u2024/x", "./x",
    ".hidden", "-rf", "$(id)", "file:///etc/passwd", "é", "a b", "%2e%2e%2f", "*", "\ud800", "x/", "x" * 201, " x",
)  # fmt: skip


def test_names_with_path_separators_are_errors() -> None:
    names: list[Any] = [*HOSTILE_NAMES, None, 3, ["a"], {"a": 1}]
    for name in names:
        with pytest.raises(DataLossError):
            pytest.fail(f"{name!r}: {CheckpointManifest.of_bytes(changed(setting('files', 0, 'name', to=name)), 'x')}")


WRONG = {
    "no version": lambda content: content.pop("version"),
    "no files": lambda content: content.pop("files"),
    "a file that is not there": setting("objects", "model", "files", to=["other.safetensors"]),
    "a file twice": lambda content: content["files"].append(content["files"][0]),
    "an object's file twice": setting("objects", "model", "files", to=[FILE.name, FILE.name]),
    "files that are text": setting("objects", "model", "files", to=FILE.name),
    "the same as nobody": setting("objects", "again", "same_as", to="nobody"),
    "a class that is none": setting("objects", "model", "class", to=["os", "system"]),
    "a size below 0": setting("files", 0, "num_bytes", to=-1),
    "a size that is true": setting("files", 0, "crc32c", to=True),
    "a gap": setting("files", 0, "tensors", "a", 2, to=17),
    "past the end": setting("files", 0, "tensors", "a", 3, to=44),
    "too few bytes": setting("files", 0, "tensors", "a", 1, to=[3, 3]),
    "a large shape": setting("files", 0, "tensors", "a", 1, to=[1 << 40, 1 << 40, 0]),
    "many dimensions": setting("files", 0, "tensors", "a", 1, to=[1] * 70),
    "a length below 0": setting("files", 0, "tensors", "a", 1, to=[-2, -3]),
    "an unknown type": setting("files", 0, "tensors", "a", 0, to="F33"),
    "too little said": setting("files", 0, "tensors", "a", to=["F32"]),
    "rows behind the last": setting("files", 2, "tensors", "t", 5, to=[3, 6]),
    "rows twice": setting("files", 2, "tensors", "t", 5, to=[1, 4]),
    "rows that are missing": setting("objects", "table", "files", to=["table-0.safetensors"]),
    "slices of two shapes": setting("files", 1, "tensors", "t", 1, to=[4]),
    "objects that are a list": setting("objects", to=[]),
    "an infinite size": setting("files", 0, "num_bytes", to=1e400),
}


def test_what_cannot_be_is_an_error() -> None:
    for what, change in WRONG.items():
        with pytest.raises(DataLossError, match="must be intact"):
            pytest.fail(f"{what}: {CheckpointManifest.of_bytes(changed(change), 'x')}")


def test_invalid_or_oversized_json(monkeypatch: pytest.MonkeyPatch) -> None:
    for saved in (b"[" * 100_000, b"1" * 10_000, b"\xff", b"{", b"3", b"null", b'"version"'):
        data = b'{"crc32c": %d, "saved": %b}' % (google_crc32c.value(saved), saved)
        with pytest.raises(DataLossError):
            pytest.fail(f"{saved[:20]!r}: {CheckpointManifest.of_bytes(data, 'x')}")
    monkeypatch.setattr(manifest, "_MOST_BYTES", 1000)
    large = SavedObject("other", None, {"$bytes": "A" * 1000})
    with pytest.raises(InvalidArgumentError, match="tensors or arrays"):
        CheckpointManifest({"x": large}).to_bytes()
