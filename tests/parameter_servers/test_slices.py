from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.parameter_servers import worker_copies as module
from raydist.parameter_servers.slices import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    PsSlice,
    VariablePartitioner,
    VariableSpec,
    plan_slices,
)
from raydist.parameter_servers.slicing import (
    cut_state,
    form_of,
    joined_state,
    rows_and_values,
)
from raydist.parameter_servers.worker_copies import (
    CopyStream,
    HostGradients,
    WorkerCopies,
    hash_of_bits,
)


def spec(handle: int, *shape: int, dtype: torch.dtype = torch.float32, partitioned: bool = True) -> VariableSpec:
    return VariableSpec(handle, f"v{handle}", shape, dtype, partitioned)


# What TensorFlow 2.21 gives for float32.
OF_TENSORFLOW: list[tuple[VariablePartitioner, tuple[int, ...], list[int]]] = [
    (FixedShardsPartitioner(8), (3, 2), [3, 1]),
    (FixedShardsPartitioner(2), (13,), [2]),
    (MinSizePartitioner(4, 2), (6, 1), [2, 1]),
    (MinSizePartitioner(), (6, 1), [1, 1]),
    (MinSizePartitioner(256 << 10, 8), (1024, 1024), [8, 1]),
    (MinSizePartitioner(10, 8), (6, 1), [3, 1]),
    (MaxSizePartitioner(4), (6, 1), [6, 1]),
    (MaxSizePartitioner(11), (7, 1), [4, 1]),
    (MaxSizePartitioner(3), (5, 2, 2), [5, 1, 1]),
    (MaxSizePartitioner(100), (100, 3), [13, 1]),
]


def test_partitioners_split_as_those_of_tensorflow() -> None:
    for partitioner, shape, expected in OF_TENSORFLOW:
        assert partitioner(shape, torch.float32) == expected, (partitioner, shape)


def test_partitioners_need_sound_numbers() -> None:
    makes: list[tuple[Callable[[], Any], str]] = [
        (lambda: rd.FixedShardsPartitioner(0), r"num_shards must be an int >= 1, got 0"),
        (lambda: rd.MinSizePartitioner(max_shards=0), r"max_shards must be an int >= 1, got 0"),
        (lambda: rd.MinSizePartitioner(0), r"min_shard_bytes must be an int >= 1, got 0"),
        (lambda: rd.MaxSizePartitioner(1.5), r"max_shard_bytes must be an int >= 1, got 1.5"),  # type: ignore[arg-type]
        (lambda: rd.MaxSizePartitioner(8, True), r"max_shards must be an int >= 1, got True"),
    ]
    for make, message in makes:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            make()
    answers: list[Any] = [None, 2, "21", [2], [2, 2], [0, 1], [-1, 1], [True, 1], [2.0, 1], [2, 1, 1]]
    for answer in answers:
        with pytest.raises(rd.InvalidArgumentError, match=r"list of 2 ints for v0 of shape \(4, 3\), \[k, 1, ...\]"):
            plan_slices([spec(0, 4, 3)], [0], functools.partial(lambda answer, shape, dtype: answer, answer), 0)


def parts(planned: list[PsSlice]) -> list[tuple[int, int, int, int]]:
    return [(each.number, each.server, each.begin, each.shape[0]) for each in planned]


def test_rows_are_divided_as_by_tensorflow() -> None:
    planned = plan_slices([spec(0, 13, 2)], [0, 0], FixedShardsPartitioner(2), 5)
    assert parts(planned) == [(5, 0, 0, 7), (6, 1, 7, 6)]
    assert [each.name for each in planned] == ["v0/part_0", "v0/part_1"]
    assert [each.shape[0] for each in plan_slices([spec(0, 10)], [0], FixedShardsPartitioner(4), 0)] == [3, 3, 2, 2]
    assert [each.shape[0] for each in plan_slices([spec(0, 3)], [0], lambda shape, dtype: (9,), 0)] == [1, 1, 1]


def test_whole_variables_go_to_the_server_that_has_least() -> None:
    specs = [spec(0, 1), spec(1, 10), spec(2, 4), spec(3, 5), spec(4)]
    planned = plan_slices(specs, [0, 8], None, 0)
    assert [(each.handle, each.server) for each in planned] == [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0)]
    assert [each.name for each in planned] == ["v0", "v1", "v2", "v3", "v4"]
    whole = [spec(0), spec(1, 6, partitioned=False), spec(2, 0, 3), spec(3, 1)]
    planned = plan_slices(whole, [0, 0], FixedShardsPartitioner(2), 0)
    assert [each.shape for each in planned] == [(), (6,), (0, 3), (1,)]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3), st.booleans()), max_size=6),
    st.lists(st.integers(0, 500), min_size=1, max_size=5),
    st.integers(1, 7),
)
def test_every_row_lies_on_one_server(sizes: list[tuple[int, int, bool]], loads: list[int], shards: int) -> None:
    specs = [spec(handle, rows, columns, partitioned=split) for handle, (rows, columns, split) in enumerate(sizes)]
    planned = plan_slices(specs, loads, FixedShardsPartitioner(shards), 3)
    assert [each.number for each in planned] == list(range(3, 3 + len(planned)))
    for each in specs:
        mine = [part for part in planned if part.handle == each.handle]
        covered = [row for part in mine for row in range(part.begin, part.begin + part.shape[0])]
        assert covered == list(range(each.shape[0]))
        dealt = [sum(part.server == server for part in mine) for server in range(len(loads))]
        assert max(dealt) - min(dealt) <= 1
        assert all(part.shape[1:] == each.shape[1:] and 0 <= part.server < len(loads) for part in mine)


def part(number: int, begin: int, *shape: int, server: int = 0, handle: int = 1) -> PsSlice:
    return PsSlice(number, handle, "v", server, begin, shape, torch.float32)


HALVES = (part(4, 0, 3, 2), part(5, 3, 1, 2, server=1))


def test_what_is_sparse_in_another_way_is_sent_whole() -> None:
    odd = torch.eye(3).to_sparse()
    assert form_of(odd) == "dense"
    whole = rows_and_values(odd)
    assert isinstance(whole, torch.Tensor)
    assert torch.equal(whole, torch.eye(3))
    dense = torch.ones(2, requires_grad=True)
    kept = rows_and_values(dense)
    assert isinstance(kept, torch.Tensor)
    assert kept.data_ptr() == dense.data_ptr()
    assert not kept.requires_grad


def test_what_was_cut_is_joined_again_and_shares_nothing_that_can_change() -> None:
    state = {"step": torch.tensor(3.0), "momentum": torch.arange(8.0).view(4, 2), "list": [1], "none": None}
    cut = cut_state(state, (4, 2), HALVES)
    assert cut[5]["momentum"].tolist() == [[6, 7]]
    assert cut[4]["momentum"].data_ptr() != state["momentum"].data_ptr()  # type: ignore[attr-defined]
    joined = joined_state(cut, (4, 2), HALVES)
    assert torch.equal(joined["momentum"], state["momentum"])  # type: ignore[arg-type]
    assert (joined["step"].item(), joined["list"], joined["none"]) == (3, [1], None)
    cut[4]["list"].append(2)
    assert cut[5]["list"] == [1]
    joined["list"].clear()
    assert cut[4]["list"] == [1, 2]
    only = (part(1, 0),)
    scalars = {"step": torch.tensor(2.0), "square": torch.tensor(4.0)}
    assert joined_state(cut_state(scalars, (), only), (), only) == scalars
    assert joined_state({}, (), only) == joined_state({1: {}}, (), only) == {}


def test_momentum_of_rows_is_cut_too() -> None:
    dense = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]])
    for mine in (HALVES, (part(6, 0, 4, 2),)):
        momentum = dense.to_sparse(1)
        joined = joined_state(cut_state({"momentum": momentum}, (4, 2), mine), (4, 2), mine)["momentum"]
        assert joined.layout is torch.sparse_coo
        assert torch.equal(joined.to_dense(), dense)
        momentum._values().zero_()
        assert torch.equal(joined.to_dense(), dense)


# --- copies of variables on a worker; fakes of torch.cuda replace the GPU ---------------------------------------------


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


def test_hash_sees_one_changed_bit_whatever_the_dtype() -> None:
    dtypes = torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64
    for dtype, shape in itertools.product(dtypes, [(), (3,), (1023,), (2, 1024), (5, 700)]):
        tensor = torch.rand(shape).mul(100).to(dtype)
        changed = tensor.clone()
        changed.view(-1)[-1] = ~changed.view(-1)[-1] if dtype is torch.bool else changed.view(-1)[-1] + 1
        assert bool(hash_of_bits(tensor) == hash_of_bits(tensor.clone())), (dtype, shape)
        assert not bool(hash_of_bits(tensor) == hash_of_bits(changed)), (dtype, shape)
