"""Copies of variables on a worker. Fakes of torch.cuda replace the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.parameter_servers import worker_copies as module
from raydist.parameter_servers.worker_copies import (
    CopyStream,
    HostGradients,
    WorkerCopies,
    hash_of_bits,
)


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class FakeTensor:
    """A tensor of a device, as far as copies use it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def copy_(self, source: Any, *, non_blocking: bool) -> None:
        self.log.append(f"copy, non-blocking {non_blocking}")

    def record_stream(self, stream: FakeStream) -> None:
        self.log.append(f"used by {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    current = FakeStream("current", told)

    @contextlib.contextmanager
    def within(stream: FakeStream) -> Iterator[None]:
        told.append(f"in {stream.name}")
        yield
        told.append(f"out of {stream.name}")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", told))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", within)
    return told


def test_values_are_copied_beside_what_is_computed(log: list[str]) -> None:
    stream = CopyStream(torch.device("cuda:0"))
    target: Any = FakeTensor(log)
    stream.copy([(target, torch.zeros(1))])
    assert log == [
        "side waits for current",
        "in side",
        "copy, non-blocking True",
        "used by side",
        "out of side",
        "current waits for side",
    ]
    log.clear()
    stream.wait()
    stream.fetch([(target, torch.zeros(1))])
    assert log == ["host waits for side", "copy, non-blocking True", "host waits for current"]


class Away(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    is_cpu = False


class Brings:
    def __init__(self) -> None:
        self.made = 0

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None: ...

    def wait(self) -> None: ...

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source.as_subclass(torch.Tensor))

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        self.made += 1
        return torch.empty(like.shape, dtype=like.dtype)


def test_gradients_come_to_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Brings()
    monkeypatch.setattr(module, "CopyStream", lambda device: side)
    staging = HostGradients()
    here = torch.ones(2)
    assert staging.bring([here])[0] is here
    away = torch.full((3,), 4.0).as_subclass(Away)
    first = staging.bring([here, away])
    assert first[0] is here
    assert first[1].tolist() == [4, 4, 4]
    assert staging.bring([here, away])[1] is first[1]
    assert staging.bring([here, torch.ones(5).as_subclass(Away)])[1].tolist() == [1] * 5
    assert side.made == 2


class CopiesAtOnce:
    """A device that is none: what is copied is there."""

    def __init__(self) -> None:
        self.copied = 0

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
        self.copied += len(pairs)

    def wait(self) -> None: ...

    def fetch(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.copy(pairs)

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)


def variables() -> list[tuple[int, torch.Tensor]]:
    odd = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    return [
        (1, torch.nn.Parameter(torch.ones(3, 2))),
        (2, torch.nn.Parameter(odd)),
        (3, torch.zeros((), dtype=torch.int64)),
        (4, torch.nn.Parameter(torch.empty(0, 4))),
        (5, torch.nn.Parameter(torch.tensor(2.5, dtype=torch.bfloat16))),
        (6, torch.tensor([True, False])),
    ]


@pytest.fixture(params=["mapped", "device"])
def side(request: pytest.FixtureRequest) -> Any:
    return CopiesAtOnce() if request.param == "device" else None


def test_values_stay_and_pulled_ones_are_seen(side: Any) -> None:
    made = variables()
    before = [tensor.detach().clone() for _, tensor in made]
    strides = [tensor.stride() for _, tensor in made]
    copies = WorkerCopies(side)
    copies.add(made)
    assert all(torch.equal(tensor, value) for (_, tensor), value in zip(made, before, strict=True))
    assert [tensor.stride() for _, tensor in made] == strides
    assert copies.written() == []
    versions = [tensor._version for _, tensor in made]
    copies.ready()
    for handle in (1, 2, 3, 4, 5):
        copies.target(handle).fill_(0)
    copies.show([1, 2, 3, 4, 5])
    assert all(not tensor.any() for handle, tensor in made if handle != 6)
    risen = [tensor._version > version for (_, tensor), version in zip(made, versions, strict=True)]
    assert risen == [True] * 5 + [False]
    assert copies.written() == []


def test_what_is_written_by_hand_is_found_in_any_way(side: Any) -> None:
    made = variables()
    tensors = dict(made)
    copies = WorkerCopies(side)
    copies.add(made)
    tensors[1].data.mul_(2)
    tensors[3].add_(1)
    assert (copies.written(), copies.written(parameters_only=True)) == ([1, 3], [1])
    assert copies.own(1).sum() == 12
    assert copies.target(1).sum() == 6
    copies.keep_written(parameters_only=True)
    assert (copies.target(1).sum().item(), copies.written()) == (12, [3])
    copies.drop_written()
    assert (tensors[3].item(), copies.written()) == (0, [])
    address = tensors[2].data_ptr()
    tensors[2].data = torch.full((1, 2, 3, 4), 7.0)
    assert copies.written() == [2]
    assert tensors[2].data_ptr() == address
    assert (tensors[2] == 7).all()
    copies.keep_written()
    assert (copies.target(2) == 7).all()


def test_neighbours_of_what_was_written_are_not(side: Any) -> None:
    made = [(n, torch.nn.Parameter(torch.zeros(3))) for n in range(20)]
    copies = WorkerCopies(side)
    copies.add(made)
    with torch.no_grad():
        made[7][1].fill_(1)
        made[8][1].fill_(0)
    assert copies.written() == [7]


@pytest.mark.parametrize("given", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_other_data_are_refused_once_and_all_is_back_in_place(given: torch.Tensor, side: Any) -> None:
    made = [(n, torch.nn.Parameter(torch.zeros(3))) for n in range(3)]
    copies = WorkerCopies(side)
    copies.add(made)
    made[1][1].data = given
    made[2][1].data = torch.ones(3)
    with pytest.raises(rd.InvalidArgumentError, match=r"must keep their shape and dtype, but one of shape \(3,\)"):
        copies.written()
    assert copies.written() == [2]
    assert [(tuple(tensor.shape), tensor.dtype) for _, tensor in made] == [((3,), torch.float32)] * 3


def test_data_in_the_same_memory_are_noticed() -> None:
    values = torch.arange(4.0).reshape(2, 2)
    parameter = torch.nn.Parameter(values.clone())
    copies = WorkerCopies()
    copies.add([(1, parameter)])
    parameter.data = parameter.data.t()
    assert copies.written() == [1]
    assert torch.equal(parameter.detach(), values.t())
    assert parameter.is_contiguous()
    parameter.data = parameter.data[:1]
    with pytest.raises(rd.InvalidArgumentError, match=r"was given data of shape \(1, 2\)"):
        copies.written()


def test_what_is_forgotten_is_plain(side: Any) -> None:
    made = variables()
    copies = WorkerCopies(side)
    copies.add(made)
    for handle, tensor in made:
        copies.forget(handle)
        copies.forget(handle)
        assert handle not in copies
        if tensor.numel():
            tensor.data.fill_(1)
    assert copies.written() == []
    assert copies.written(parameters_only=True) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (1023,), (2, 1024), (5, 700)])
def test_hash_sees_one_changed_bit_whatever_the_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).mul(100).to(dtype)
    changed = tensor.clone()
    changed.view(-1)[-1] = ~changed.view(-1)[-1] if dtype is torch.bool else changed.view(-1)[-1] + 1
    assert bool(hash_of_bits(tensor) == hash_of_bits(tensor.clone()))
    assert not bool(hash_of_bits(tensor) == hash_of_bits(changed))


@given(st.integers(2, 5000), st.data())
def test_hash_sees_two_numbers_that_change_places(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 2))
    second = data.draw(st.integers(first + 1, size - 1))
    tensor = torch.arange(size, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert not bool(hash_of_bits(tensor) == hash_of_bits(swapped))
