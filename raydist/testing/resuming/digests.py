"""One short text that two runs share if and only if all of their state is equal, bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from raydist.collectives.flat_bytes import flat_bytes
from raydist.errors import SpecError

__all__ = ["state_digest"]


def state_digest(state: Any) -> str:
    """The digest of a nest of dicts, lists, tuples, tensors, arrays and JSON values. Keys may come in any order.

    Raises:
        SpecError: Something else is in it.

    >>> import torch
    >>> one, other = {"a": torch.ones(2), "b": [1]}, {"b": [1], "a": torch.ones(2)}
    >>> state_digest(one) == state_digest(other), state_digest(one) == state_digest({"a": torch.ones(2), "b": [1.0]})
    (True, False)
    """
    digest = hashlib.sha256()
    for part in _parts(state):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()[:16]


def _parts(state: Any) -> Iterator[bytes]:
    """Kind, size and content of everything."""
    if isinstance(state, torch.Tensor):
        tensor = state.detach().cpu()
        yield f"tensor {tensor.dtype} {tuple(tensor.shape)}".encode()
        yield flat_bytes(tensor).numpy().tobytes()
    elif isinstance(state, np.ndarray | np.generic):
        array = np.asarray(state)
        yield f"array {array.dtype.str} {array.shape}".encode()
        yield array.tobytes()
    elif isinstance(state, Mapping):
        yield f"dict {len(state)}".encode()
        for key in sorted(state, key=repr):
            yield repr(key).encode()
            yield from _parts(state[key])
    elif isinstance(state, list | tuple):
        yield f"{'list' if isinstance(state, list) else 'tuple'} {len(state)}".encode()
        for each in state:
            yield from _parts(each)
    elif state is None or isinstance(state, bool | int | float | str | bytes):
        yield f"{type(state).__name__} {state!r}".encode()
    else:
        raise SpecError(
            f"A digest is of dicts, lists, tuples, tensors, arrays and JSON values, got {type(state).__name__}: "
            f"{state!r:.100}. Give its state_dict()."
        )
