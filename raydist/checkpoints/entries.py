"""The on-disk form of a `state_dict`: JSON values, and tensors next to them.

A value that JSON lacks is an object with one key that begins with `$`: `{"$tuple": [...]}`, `{"$bytes": "<base64>"}`,
`{"$float": "nan"}`, `{"$dict": [[key, value], ...]}`, `{"$tensor": "<name>"}`. No value names code.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from raydist.core.errors import InvalidArgumentError

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype."""
    return _NAMES[dtype]


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype of a safetensors name. Raise ValueError for an unknown name."""
    if name not in _DTYPES:
        raise ValueError(f"tensors of the type {name!r:.50} are unknown")
    return _DTYPES[name]


def torch_dtype(value: torch.Tensor | np.ndarray[Any, Any]) -> torch.dtype:
    """Return the dtype of a tensor, or the torch dtype that corresponds to an array's."""
    return value.dtype if isinstance(value, torch.Tensor) else torch.from_numpy(np.empty(0, value.dtype)).dtype


def is_storable_tensor(tensor: torch.Tensor) -> bool:
    """Return True for a plain dense tensor with a dtype that safetensors supports."""
    plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.dtype in _NAMES


def as_storable_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return a numpy array or scalar in native byte order; None if masked or of a type that safetensors lacks.

    >>> as_storable_array(np.float64(2.5)), as_storable_array(np.array(["a"]))
    (array(2.5), None)
    """
    if isinstance(value, np.ma.MaskedArray):
        return None
    array = np.asarray(value)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 8:
        return None
    return array


MAX_NESTING = 100
"""Maximum nesting of a state: packing and unpacking are recursive."""

_TENSORS = ("$tensor", "$array", "$scalar")
_MAX_BITS = 8192  # of an int: Python parses no number of more than 4,300 digits


@final
@dataclass(frozen=True, slots=True)
class Packed:
    """A state split into JSON and tensors."""

    values: Any  # JSON values; a tensor is represented by its name
    # tensors by name; the name is the path to the tensor, as in `state_dict`
    tensors: dict[str, torch.Tensor | np.ndarray[Any, Any]]


def pack_state(state: Any, owner: str = "") -> Packed:
    """Split a state into JSON values and tensors. Copies nothing.

    Args:
        state: Tensors, arrays, JSON values, bytes, and tuples, lists and dicts of such.
        owner: Name of the object that has the state, for messages.

    Raises:
        InvalidArgumentError: The state has another kind of value; the message names the entry.

    >>> packed = pack_state({"weight": torch.ones(2), "steps": (3, float("inf"))})
    >>> packed.values
    {'weight': {'$tensor': 'weight'}, 'steps': {'$tuple': [3, {'$float': 'inf'}]}}
    >>> list(packed.tensors)
    ['weight']
    """
    packer = _Packer(owner)
    return Packed(packer.encode(state, ()), packer.tensors)


def unpack_state(values: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the state that `pack_state` split into `values` and `tensors`. Raise ValueError for invalid values.

    >>> unpack_state({"a": {"$tuple": [1, {"$float": "nan"}]}}, {})
    {'a': (1, nan)}
    """
    return _Unpacker(tensors).decode(values, 0)


def names_of_tensors(values: Any) -> Iterator[tuple[str, bool]]:
    """Yield the name of each tensor in packed values, with True for a tensor and False for an array.

    >>> list(names_of_tensors([{"$tensor": "a"}, {"b": {"$array": "c"}}]))
    [('a', True), ('c', False)]
    """
    if isinstance(values, list):
        for part in values:
            yield from names_of_tensors(part)
    elif isinstance(values, dict):
        tag = next(iter(values)) if len(values) == 1 else ""
        if tag in _TENSORS:
            yield str(values[tag]), tag == "$tensor"
        else:
            yield from names_of_tensors(list(values.values()))


@final
class _Packer:
    def __init__(self, owner: str) -> None:
        self.tensors: dict[str, torch.Tensor | np.ndarray[Any, Any]] = {}
        self._owner = owner

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > MAX_NESTING:
            raise InvalidArgumentError(
                f"A state may be nested {MAX_NESTING} levels deep, {self._owner!r} is deeper at {path[0]!r:.100}. Keep "
                "it flatter."
            )
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            return self._encode_tensor(value, path)
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if type(value) is list:
            return [self.encode(part, (*path, index)) for index, part in enumerate(value)]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):  # a namedtuple would name its class
            return {"$tuple": [self.encode(part, (*path, index)) for index, part in enumerate(value)]}
        return self._encode_plain(value, path)

    def _encode_mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        pairs = [(key, self.encode(part, (*path, key))) for key, part in value.items()]
        if isinstance(value, Counter):
            return {"$counter": [[self.encode(key, (*path, key)), part] for key, part in pairs]}
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [[self.encode(key, (*path, key)), part] for key, part in pairs]}

    def _encode_plain(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind is float and not math.isfinite(value):
            return {"$float": repr(value)}
        if value is None or kind in (bool, float, str) or (kind is int and value.bit_length() <= _MAX_BITS):
            return value
        if kind in (bytes, bytearray):
            return {"$bytes": base64.b64encode(value).decode()}
        raise self._refusal(value, path)

    def _encode_tensor(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            if not is_storable_tensor(value):
                raise self._refusal(value, path)
            return {"$tensor": self._named(value, path)}
        array = as_storable_array(value)
        if array is None:
            raise self._refusal(value, path)
        return {"$array" if isinstance(value, np.ndarray) else "$scalar": self._named(array, path)}

    def _named(self, value: torch.Tensor | np.ndarray[Any, Any], path: tuple[Any, ...]) -> str:
        plain = name = ".".join(map(str, path)) or "value"
        number = 1
        while name in self.tensors or name == "__metadata__":  # {"a.b": ..., "a": {"b": ...}}; reserved
            number += 1
            name = f"{plain}#{number}"
        self.tensors[name] = value
        return name

    def _refusal(self, value: Any, path: tuple[Any, ...]) -> InvalidArgumentError:
        name = ".".join(map(str, (self._owner, *path) if self._owner else path))
        kind = type(value)
        if isinstance(value, torch.Tensor):
            more = f" ({value.dtype}, {value.layout})"
        else:  # Python does not print numbers of more than 4,300 digits
            more = f" of {value.bit_length()} bits" if kind is int else f": {value!r:.100}"
        return InvalidArgumentError(
            "A checkpoint holds dense tensors and arrays (of the types of safetensors: no complex128, no float4), "
            "numbers, text, bytes, None, tuples, lists and dicts of them, "
            f"but the entry {name!r} is a {kind.__module__}.{kind.__qualname__}{more}. Keep it out of state_dict(), or "
            "give it there as one of these."
        )


@final
class _Unpacker:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def decode(self, value: Any, depth: int) -> Any:
        if depth > 4 * MAX_NESTING:  # a tag turns one level into up to three
            raise ValueError("its values are nested too deeply")
        if isinstance(value, list):
            return [self.decode(part, depth + 1) for part in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value)) if len(value) == 1 else ""
        if tag.startswith("$"):
            return self._decode_tagged(tag, value[tag], depth)
        return {key: self.decode(part, depth + 1) for key, part in value.items()}

    def _decode_tagged(self, tag: str, content: Any, depth: int) -> Any:
        if tag in _TENSORS:
            return self._decode_tensor(tag, content)
        if tag == "$bytes":
            return base64.b64decode(content, validate=True)
        if tag == "$float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if tag not in ("$tuple", "$dict", "$counter") or not isinstance(content, list):
            raise ValueError(f"there is no value of the kind {tag!r:.50}")
        parts = self.decode(content, depth + 1)
        if tag == "$tuple":
            return tuple(parts)
        pairs = dict(parts)
        return Counter(pairs) if tag == "$counter" else pairs

    def _decode_tensor(self, tag: str, name: Any) -> Any:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"the tensor {name!r:.100} is missing")
        tensor = self._tensors[name]
        if tag == "$tensor":
            return tensor
        array = tensor.numpy()
        return array if tag == "$array" else array[()]
