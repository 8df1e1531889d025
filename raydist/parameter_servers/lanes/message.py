"""Requests and answers as messages: short ones go into a ring, longer ones into the area with the tensors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from raydist.channels.layout import MESSAGE_BYTES
from raydist.errors import FailedPreconditionError
from raydist.parameter_servers.lanes.area import AreaBlock, ReadArea, WriteArea

__all__ = ["pack_message", "portable", "unpack_message"]

_FEW = 200  # tensors; the layout of more tensors may be too long for a message
_IN_AREA = "in area"


def pack_message(
    content: Any, tensors: Sequence[torch.Tensor], area: WriteArea, dumps: Callable[[Any], bytes] = pickle.dumps
) -> bytes:
    """Return the message for some content, and copy the tensors into the area."""
    if len(tensors) <= _FEW:
        message = dumps((content, area.put(tensors) if tensors else None))
        if len(message) <= MESSAGE_BYTES:
            return message
        area.forget()  # the reader does not learn the layout that `put` has sent
    data = dumps(content)
    payload = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
    return dumps((_IN_AREA, area.put([*tensors, payload])))


def unpack_message(message: bytes, area: ReadArea) -> tuple[Any, list[torch.Tensor]]:
    """Return the content and tensors of a message; the tensors are views of the writer's memory."""
    block: AreaBlock | None
    content, block = pickle.loads(message)
    tensors = [] if block is None else area.views(block)
    if content != _IN_AREA:
        return content, tensors
    *tensors, payload = tensors
    return pickle.loads(payload.numpy().tobytes()), tensors


def portable(error: BaseException) -> BaseException:
    """Return the error if it can be pickled, else an error with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return FailedPreconditionError(f"A parameter server failed with {type(error).__name__}: {error}")
    return error
