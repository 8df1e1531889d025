"""Copies to a device in two steps. Streams of a GPU are stood in for; on one, the last test runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.replicas.device_copies import Copying, DeviceCopies

CPU, META = torch.device("cpu"), torch.device("meta")


class Recorded:
    """Stands for `CudaStreams`: notes what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def copy(self, value: torch.Tensor) -> Copying:
        self.calls.append("copy")
        return Copying(value.to(META), event="there")

    def join(self, copying: Copying) -> torch.Tensor:
        self.calls.append(f"join {copying.event}")
        return copying.tensor


def test_a_copy_begins_early_and_is_joined_where_it_is_used() -> None:
    streams: Any = Recorded()
    copies = DeviceCopies(META, streams)
    begun = copies.begin(torch.ones(2))
    assert streams.calls == ["copy"]
    assert copies.finish(begun).device == META
    assert copies.finish(begun) is copies.finish(begun)
    assert streams.calls == ["copy", *["join there"] * 3]
    assert copies.overlap


def test_what_needs_no_copy_is_handed_through() -> None:
    streams: Any = Recorded()
    copies = DeviceCopies(META, streams)
    here = torch.ones(2, device=META)
    for value in (here, "text", 3):
        assert copies.finish(copies.begin(value)) is value
    assert streams.calls == []


def test_a_device_without_streams() -> None:
    copies = DeviceCopies.to(CPU)
    value = torch.ones(2)
    assert copies.finish(copies.begin(value)) is value
    assert not copies.overlap
    assert DeviceCopies(META).begin(value).device == META


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    copies = DeviceCopies.to(torch.device("cuda:0"))
    values = [torch.full((1 << 20,), float(number)) for number in range(8)]
    begun = [copies.begin(value) for value in values]
    assert [float(copies.finish(each).sum()) for each in begun] == [float(value.sum()) for value in values]
