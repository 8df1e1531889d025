"""Copies of variables on a worker. Fakes of torch.cuda replace the GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

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


def test_values_are_copied_beside_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, source = mock.MagicMock(), torch.zeros(1)
    side, current, target = cuda.Stream.return_value, cuda.current_stream.return_value, cuda.target
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    stream = CopyStream(torch.device("cuda:0"))
    cuda.reset_mock()
    stream.copy([(target, source)])
    assert cuda.mock_calls == [
        mock.call.current_stream(torch.device("cuda:0")),
        mock.call.Stream().wait_stream(current),
        mock.call.stream(side),
        mock.call.stream().__enter__(),
        mock.call.target.copy_(source, non_blocking=True),
        mock.call.target.record_stream(side),
        mock.call.stream().__exit__(None, None, None),
        mock.call.current_stream().wait_stream(side),
    ]
    cuda.reset_mock()
    stream.wait()
    stream.fetch([(target, source)])
    assert [name for name, _, _ in cuda.mock_calls] == [
        *("Stream().synchronize", "current_stream", "target.copy_", "current_stream().synchronize"),
    ]


class Away(torch.Tensor):
    """Says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")

    is_cpu = False


class CopiesAtOnce:
    """A device that is none: what is copied is there."""

    num_pinned = 0

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source.as_subclass(torch.Tensor))

    def wait(self) -> None: ...

    fetch = copy

    def pinned(self, like: torch.Tensor) -> torch.Tensor:
        self.num_pinned += 1
        return torch.empty_like(like.as_subclass(torch.Tensor))


def test_gradients_come_to_memory_that_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    side = CopiesAtOnce()
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
    assert side.num_pinned == 2


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


def copies_of(*made: Sequence[tuple[int, torch.Tensor]]) -> Iterator[tuple[WorkerCopies, list[tuple[int, Any]]]]:
    """Copies in mapped memory, and for a device; each with what `made` gives."""
    for make, side in zip(made, (None, CopiesAtOnce()), strict=True):
        found: Any = side
        copies = WorkerCopies(found)
        copies.add(make)
        yield copies, list(make)


def test_values_stay_and_pulled_ones_are_seen() -> None:
    for copies, made in copies_of(variables(), variables()):
        before, strides = zip(*((tensor.detach(), tensor.stride()) for _, tensor in variables()), strict=True)
        assert all(torch.equal(tensor, value) for (_, tensor), value in zip(made, before, strict=True))
        assert tuple(tensor.stride() for _, tensor in made) == strides
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


def test_what_is_written_by_hand_is_found_in_any_way() -> None:
    for copies, made in copies_of(variables(), variables()):
        tensors = dict(made)
        tensors[1].data.mul_(2)
        tensors[3].add_(1)
        tensors[6].data.copy_(torch.tensor([True, False]))  # what it was
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


def test_other_data_are_refused_once_and_all_is_back_in_place() -> None:
    three = [[(n, torch.nn.Parameter(torch.zeros(3))) for n in range(3)] for _ in range(2)]
    for copies, made in copies_of(*three):
        for bad in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
            made[1][1].data = bad
            made[2][1].data = torch.ones(3)
            with pytest.raises(
                rd.InvalidArgumentError, match=r"must keep their shape and dtype, but one of shape \(3,\)"
            ):
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


def test_what_is_forgotten_is_plain() -> None:
    for copies, made in copies_of(variables(), variables()):
        for handle, tensor in made:
            copies.forget(handle)
            copies.forget(handle)
            assert handle not in copies
            if tensor.numel():
                tensor.data.fill_(1)
        assert copies.written() == copies.written(parameters_only=True) == []


def test_hash_sees_one_changed_bit_whatever_the_dtype() -> None:
    dtypes = torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64
    for dtype, shape in itertools.product(dtypes, [(), (3,), (1023,), (2, 1024), (5, 700)]):
        tensor = torch.rand(shape).mul(100).to(dtype)
        changed = tensor.clone()
        changed.view(-1)[-1] = ~changed.view(-1)[-1] if dtype is torch.bool else changed.view(-1)[-1] + 1
        assert bool(hash_of_bits(tensor) == hash_of_bits(tensor.clone())), (dtype, shape)
        assert not bool(hash_of_bits(tensor) == hash_of_bits(changed)), (dtype, shape)


@given(st.integers(2, 5000), st.data())
def test_hash_sees_two_numbers_that_change_places(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 2))
    second = data.draw(st.integers(first + 1, size - 1))
    tensor = torch.arange(size, dtype=torch.float32)
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert not bool(hash_of_bits(tensor) == hash_of_bits(swapped))
