"""Buckets: layout, contents, and the memory of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raydist.collectives.base import Communicator, Membership
from raydist.collectives.reducer.buckets import (
    Bucket,
    BucketMemory,
    Buckets,
    LazyBucketMemory,
    ParameterSpec,
    plan_buckets,
)
from raydist.collectives.reducer.exchange import Exchange, StepWeight
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.trailer import encode_stamp
from raydist.core.errors import FailedPreconditionError
from tests.cases import case
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.collectives.models import build, gradients_of, loss_of, on_two, rows
from tests.collectives.threads import run_ranks

Kind = Callable[[Bucket, torch.Tensor], BucketMemory]
KINDS = (BucketMemory, LazyBucketMemory)


def memory_of(*parameters: torch.Tensor, kind: Kind, compression: torch.dtype | None = None) -> BucketMemory:
    """One bucket."""
    specs = [ParameterSpec.of(index, parameter) for index, parameter in enumerate(parameters)]
    (bucket,) = plan_buckets(specs, bucket_bytes=1 << 30, compression=compression)
    return kind(bucket, torch.full((bucket.numel + 3,), torch.nan, dtype=bucket.wire))


def reduced(memory: BucketMemory, factor: float = 1.0) -> list[torch.Tensor]:
    """As after a reduction that multiplies."""
    memory.pack()
    memory.flat.mul_(factor)
    memory.unpack()
    return list(memory.gradients())


def test_gradients_go_in_scaled_and_out_in_shape_and_missing_ones_are_zero() -> None:
    sizes = [(6, 1.0, torch.float64), (6, 0.25, torch.bfloat16), (1 << 18, 0.25, torch.float32)]
    for kind, (numel, scale, dtype) in itertools.product(KINDS, sizes):
        own = [torch.arange(numel, dtype=dtype).reshape(2, -1), torch.tensor(3.0, dtype=dtype)]
        memory = memory_of(*own, own[0], kind=kind)
        memory.fill([*own, None], scale)
        *found, missing = reduced(memory, 2.0)
        with case(f"{kind.__name__} {numel}"):
            for value, gradient in zip(found, own, strict=True):
                torch.testing.assert_close(value, gradient * scale * 2.0, rtol=0, atol=0)
            assert missing.unique().tolist() == [0.0]
            assert memory.is_finite()
            memory.fill([None, None, torch.full((2, numel // 2), torch.inf, dtype=dtype)], 0.5)
            memory.pack()
            memory.unpack()
            assert not memory.is_finite()


def test_a_gradient_lies_in_memory_as_its_parameter_does() -> None:
    images = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    gapped, nothing = torch.zeros(4, 6)[:, ::2], torch.zeros(0, 3)
    memory = memory_of(images, gapped, nothing, kind=BucketMemory)
    gradient = torch.randn(4, 3, 2, 2)
    memory.fill([gradient, torch.ones(4, 3), nothing], 1.0)
    values = memory.gradients()
    assert [value.stride() for value in values[:2]] == [images.stride(), (3, 1)]
    assert [value.shape for value in values] == [images.shape, gapped.shape, nothing.shape]
    assert torch.equal(values[0], gradient)


def test_memory_is_free_when_nothing_refers_to_it() -> None:
    derivations: list[Callable[[torch.Tensor], object]] = [
        lambda value: value,
        lambda value: value[:1],
        lambda value: value.detach().view(-1),
        lambda value: value.numpy(),
        lambda value: (value * torch.ones(2, requires_grad=True)).sum(),
        lambda value: [value.data],
    ]
    memory = memory_of(torch.zeros(2), torch.zeros(3), kind=BucketMemory)
    assert memory.is_free()
    for number, derive in enumerate(derivations):
        values = list(memory.gradients())
        derived = derive(values[0])
        values.clear()
        assert not memory.is_free(), number
        del derived
        assert memory.is_free(), number


CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def specs_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[ParameterSpec]:
    return [ParameterSpec(index, shape, dtype, CPU) for index, shape in enumerate(shapes)]


def indices(layout: Sequence[Bucket]) -> list[list[int]]:
    return [list(bucket.indices) for bucket in layout]


def test_the_first_bucket_is_sent_with_the_gradient_that_fills_it() -> None:
    shapes = specs_of((2,), (1,), (100,), (4,), (4,))  # as in a network whose last layer is small
    assert indices(plan_buckets(shapes, bucket_bytes=1000, first_bucket_bytes=40)) == [[0, 1, 2], [3, 4]]
    assert indices(plan_buckets(shapes, bucket_bytes=1000, first_bucket_bytes=12)) == [[0, 1], [2, 3, 4]]
    assert indices(plan_buckets(shapes, bucket_bytes=400, first_bucket_bytes=40)) == [[0, 1], [2], [3, 4]]
    assert indices(plan_buckets(shapes, bucket_bytes=1000, first_bucket_bytes=1000)) == [[0, 1, 2, 3, 4]]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from(DTYPES)), max_size=12),
    st.integers(1, 400),
)
def test_every_parameter_has_one_place(parameters: list[tuple[int, torch.dtype]], bucket_bytes: int) -> None:
    specs = [ParameterSpec(index, (numel,), dtype, CPU) for index, (numel, dtype) in enumerate(parameters)]
    layout = plan_buckets(specs, bucket_bytes=bucket_bytes)
    assert sorted(index for bucket in indices(layout) for index in bucket) == list(range(len(specs)))
    for bucket in layout:
        ends = [offset + spec.numel for offset, spec in zip(bucket.offsets, bucket.specs, strict=True)]
        assert list(bucket.offsets) == [0, *ends[:-1]]
        assert bucket.numel == ends[-1]
        assert {spec.dtype for spec in bucket.specs} == {bucket.dtype}
        assert len(bucket.specs) == 1 or bucket.numel * bucket.dtype.itemsize <= bucket_bytes


def test_gradients_stay_the_tensors_that_they_are() -> None:
    """As without replicas: what is added to a gradient is seen by whoever holds it."""

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        def backward() -> None:
            loss_of(model, rows(2)).backward()

        with reducer.step(weight=0.5):
            backward()
            held = gradients_of(model)
            seen = [gradient.view(-1) for gradient in held if gradient is not None]
            first = [gradient.clone() for gradient in seen]
            backward()
            assert all(now is before for now, before in zip(gradients_of(model), held, strict=True))
            torch.testing.assert_close(seen, [2 * gradient for gradient in first])
            del held
            backward()
            torch.testing.assert_close(seen, [3 * gradient for gradient in first])

    on_two(build("linear"), body)


def test_a_model_that_was_dropped_travels_no_more() -> None:
    def body(group: LocalGroup) -> None:
        models = [build("linear"), build("linear")]
        reducer = GradientReducer(group)
        for model in models:
            reducer.attach(tuple(model.parameters()))
            with reducer.step(weight=0.5):
                loss_of(model, rows(2)).backward()
        with reducer.step(weight=0.5):
            loss_of(models[0], rows(2)).backward()
        local, reduced = build("linear"), gradients_of(models[1])
        loss_of(local, rows(2)).backward()
        torch.testing.assert_close(reduced, gradients_of(local))
        torch.testing.assert_close(gradients_of(models[0]), [2 * g for g in gradients_of(local) if g is not None])

    run_ranks(2, body)


# --- the exchange of one pass -----------------------------------------------------------------------------------------


class Rank:
    """Runs passes over parameters of two elements, in buckets of one each."""

    def __init__(self, communicator: Communicator, num_parameters: int = 3, *, bucket_bytes: int = 1) -> None:
        self.parameters = {number: nn.Parameter(torch.zeros(2)) for number in range(num_parameters)}
        self.buckets = Buckets(communicator, bucket_bytes=bucket_bytes, first_bucket_bytes=bucket_bytes)
        self.communicator = communicator
        self.num_passes = 0

    def open(self, trained: tuple[int, ...], scale: float = 1.0, hold_with: tuple[int, ...] = ()) -> Exchange:
        self.num_passes += 1
        kinds = tuple((index, torch.float32, torch.Size([2])) for index in trained)
        plan = self.buckets.begin_pass(kinds, self.parameters, step=0, backward=self.num_passes)
        stamp = encode_stamp(0, self.num_passes)
        weight = StepWeight(scale, counts=True)
        return Exchange(self.communicator, self.buckets, plan, stamp, None, weight, hold_with=hold_with)

    def run(self, trained: tuple[int, ...], order: tuple[int, ...] | None = None) -> dict[int, torch.Tensor]:
        exchange = self.open(trained)
        for index in trained if order is None else order:
            exchange.put(index, value(index))
        return self.end(exchange)

    def end(self, exchange: Exchange) -> dict[int, torch.Tensor]:
        exchange.finish()
        found = exchange.gradients()
        self.order = list(found)
        return found


def value(number: float) -> torch.Tensor:
    return torch.full((2,), float(number))


def alone() -> Rank:
    """A rank that has had its first pass, with buckets in the order 2, 1, 0."""
    rank = Rank(LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start())
    rank.run((0, 1, 2), (2, 1, 0))
    return rank


def test_a_gradient_that_comes_again_after_it_was_sent_is_an_error() -> None:
    rank = alone()
    exchange = rank.open((0, 1, 2))
    exchange.put(2, value(1))
    with pytest.raises(FailedPreconditionError, match=r"parameter 2 has come again.*use_reentrant=False"):
        exchange.put(2, value(1))
    # What was sent in a pass that failed is waited for before its memory is used again.
    values = rank.run((0, 1, 2), tuple(rank.order))
    assert [values[index].tolist() for index in range(3)] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


def test_buckets_wait_where_gradients_may_come_twice() -> None:
    rank = alone()
    exchange = rank.open((0, 1, 2), 0.5, hold_with=(1,))
    for index in (2, 1, 0, 1):
        exchange.put(index, value(2))
    assert rank.end(exchange)[1].tolist() == [2.0, 2.0]
    assert exchange.repeated == {1}
    exchange = rank.open((0, 1, 2))
    exchange.hold()  # a segment of a checkpoint begins
    for index in (2, 1, 0, 2):
        exchange.put(index, value(2))
    assert rank.end(exchange)[2].tolist() == [4.0, 4.0]


def test_every_bucket_is_a_range_in_a_trace() -> None:
    rank = alone()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        rank.run((0, 1, 2))
    names = {event.key for event in profile.key_averages()}
    assert {"raydist::bucket 0", "raydist::bucket 1", "raydist::bucket 2"} | {"raydist::wait for bucket 2"} <= names


def test_a_pass_costs_its_buckets_alone() -> None:
    def body(group: LocalGroup) -> list[int]:
        rank, counts = Rank(group), []
        for trained in [(0, 1), (0, 1), (0,), (0, 1), (0,), (), ()]:
            before = group.num_calls
            rank.run(trained, trained[::-1])
            counts.append(group.num_calls - before)
        return counts

    # An exchange on the host takes two: an agreement on the parameters, and in their first pass on a layout.
    assert run_ranks(2, body) == [[2 + 2 + 2, 2, 2 + 2 + 1, 2 + 2, 2 + 1, 2, 0]] * 2


def test_buckets_are_laid_out_in_the_order_in_which_the_first_rank_saw_gradients() -> None:
    def body(group: LocalGroup) -> list[list[int]]:
        rank = Rank(group, 4)
        layouts = []
        for order in [(1, 3, 0, 1), (0, 1, 3)]:
            rank.run((0, 1, 2, 3), order if group.rank == 0 else (3, 2, 1, 0))
            layouts.append(rank.order)
        values = rank.run((0, 1, 2, 3))
        assert {index: value[0].item() for index, value in values.items()} == {0: 0, 1: 2, 2: 4, 3: 6}
        return layouts

    assert run_ranks(2, body) == [[[3, 0, 1, 2]] * 2] * 2


def test_memory_is_kept_and_gradients_that_somebody_holds_are_left_alone() -> None:
    def body(group: LocalGroup) -> None:
        rank = Rank(group)
        addresses, held = [], []
        for round_ in range(5):
            values = rank.run((1,))
            addresses.append(values[1].data_ptr())
            if round_ in (1, 2):
                held.append(values[1])
            del values
        own, other = addresses[0], addresses[2]
        assert addresses == [own, own, other, addresses[3], addresses[3]]
        assert len({own, other, addresses[3]}) == 3
        assert [value.tolist() for value in held] == [[2.0, 2.0]] * 2
        held.clear()
        assert rank.run((1,))[1].data_ptr() == own

    run_ranks(2, body)
