from __future__ import annotations

from typing import Any

import pytest
import torch

import raydist as rd
from raydist.channels.layout import MESSAGE_BYTES
from raydist.parameter_servers.lanes.area import ReadArea, WriteArea
from raydist.parameter_servers.lanes.message import pack_message, portable, unpack_message

TENSORS = [torch.arange(3), torch.ones((), dtype=torch.bfloat16), torch.empty(0, 2), torch.ones(2, 2, dtype=torch.bool)]


@pytest.mark.parametrize("content", [(1, "a"), b"x" * MESSAGE_BYTES, b"x" * (MESSAGE_BYTES - 50)])
@pytest.mark.parametrize("tensors", [[], TENSORS, [torch.full((1,), float(n)) for n in range(2_000)]])
def test_all_comes_as_it_went(content: Any, tensors: list[torch.Tensor]) -> None:
    writer, reader = WriteArea(), ReadArea()
    for _ in range(2):
        message = pack_message(content, tensors, writer)
        assert len(message) <= MESSAGE_BYTES
        told, values = unpack_message(message, reader)
        assert told == content
        assert [value.dtype for value in values] == [tensor.dtype for tensor in tensors]
        assert all(torch.equal(value, tensor) for value, tensor in zip(values, tensors, strict=True))
    writer.close()
    reader.close()


class OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_errors_travel_in_some_way() -> None:
    known = rd.InvalidArgumentError("no")
    assert portable(known) is known
    odd = portable(OddError(1, 2))
    assert isinstance(odd, rd.FailedPreconditionError)
    assert str(odd) == "A parameter server failed with OddError: 1 and 2"
