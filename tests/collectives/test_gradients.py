from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from raydist.collectives.base import Work
from raydist.collectives.buckets.tail import Updates
from raydist.collectives.gradients import GradientReducer
from raydist.collectives.local import LocalGroup
from raydist.collectives.parameter_hooks import OwnHook
from raydist.errors import CollectiveMismatchError, FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp
from tests.collectives.models import (
    FEATURES,
    MODELS,
    Step,
    assert_equal_parameters,
    build,
    loss_of,
    pieces,
    rows,
    train_alone,
    train_together,
)
from tests.collectives.threads import begin_threads, run_ranks


def plain(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad()
    backward()
    descend(model)


def clipped(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad()
    backward()
    dense = [p for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    nn.utils.clip_grad_norm_(dense, 0.1)
    descend(model)


def accumulated(model: nn.Module, backward: Callable[[], None]) -> None:
    """Two backward passes a step, and gradients that are never zeroed."""
    backward()
    backward()
    descend(model)


def zeroed_in_place(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad(set_to_none=False)
    backward()
    descend(model)


def kept(model: nn.Module, backward: Callable[[], None]) -> None:
    """What `.grad` held in earlier steps is looked at later, as it is and through another tensor."""
    earlier = model.__dict__.setdefault("earlier", [])
    model.zero_grad()
    backward()
    descend(model)
    for parameter in model.parameters():
        if parameter.grad is not None and not parameter.grad.is_sparse:
            alias = parameter.grad.detach().view(-1) if len(earlier) % 3 == 0 else parameter.grad
            earlier.append((alias, alias.clone()))
    for tensor, then in earlier[-9:]:
        assert torch.equal(tensor, then)
    del earlier[:-9]


def now_and_then(model: nn.Module, backward: Callable[[], None]) -> None:
    """Gradients are dropped, kept, zeroed or detached, each by another parameter's number."""
    turn = model.__dict__.setdefault("turn", [0])
    turn[0] += 1
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is None or parameter.grad.is_sparse or (number + turn[0]) % 4 == 0:
            parameter.grad = None
        elif (number + turn[0]) % 4 == 1:
            parameter.grad.detach_().zero_()
        elif (number + turn[0]) % 4 == 2:
            parameter.grad.mul_(0.5)
    backward()
    descend(model)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.1)


def hooked(model: nn.Module, backward: Callable[[], None]) -> None:
    """A hook that is no linear function replaces each gradient; gradients are accumulated over two passes."""
    if model.__dict__.setdefault("is_hooked", []):
        model.zero_grad()
    else:
        model.__dict__["is_hooked"].append(True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * (1 + gradient.to_dense().abs().max().item()))
    backward()
    backward()
    descend(model)


def stepped_in_backward(model: nn.Module, backward: Callable[[], None]) -> None:
    """Each parameter is stepped, and its gradient dropped, as soon as it has one."""
    if not model.__dict__.setdefault("is_hooked", []):
        model.__dict__["is_hooked"].append(True)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient * 2)
                parameter.register_post_accumulate_grad_hook(step_one)
    backward()


def step_one(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.add_(parameter.grad, alpha=-0.1)  # gradient mode is off in hooks
    parameter.grad = None


STEPS: dict[str, Step] = {
    "plain": plain,
    "clipped": clipped,
    "accumulated": accumulated,
    "zeroed in place": zeroed_in_place,
    "kept": kept,
    "now and then": now_and_then,
    "hooked": hooked,
    "stepped in backward": stepped_in_backward,
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_replicas_train_like_one_process(name: str, world_size: int) -> None:
    start = build(name)
    batches = [rows(7, seed=1), rows(5, seed=2), rows(2, seed=3)]
    expected = train_alone(copy.deepcopy(start), batches, plain)
    assert_equal_parameters(expected, train_together(start, batches, plain, world_size=world_size), start=start)


# There torch calls hooks once for each segment that uses the parameter, here they are called once.
ONCE_A_SEGMENT = [("reentrant-checkpoint", hooked), ("reentrant-checkpoint", stepped_in_backward)]


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", ["tied", "checkpoint", "reentrant-checkpoint", "lookup"])
def test_ways_to_use_gradients(name: str, step: Step) -> None:
    if (name, step) in ONCE_A_SEGMENT:
        return
    start = build(name)
    batches = [rows(4, seed=1), rows(1, seed=2), rows(3, seed=3)]
    expected = train_alone(copy.deepcopy(start), batches, step)
    assert_equal_parameters(expected, train_together(start, batches, step, world_size=3), start=start)


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(MODELS)),
    step=st.sampled_from(sorted(STEPS)),
    world_size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    bucket_bytes=st.sampled_from([1, 64, 300, 1 << 20]),
)
def test_any_batches_and_buckets(name: str, step: str, world_size: int, sizes: list[int], bucket_bytes: int) -> None:
    assume((name, STEPS[step]) not in ONCE_A_SEGMENT)
    start = build(name)
    batches = [rows(size, seed=number) for number, size in enumerate(sizes)]
    expected = train_alone(copy.deepcopy(start), batches, STEPS[step])
    replicas = train_together(start, batches, STEPS[step], world_size=world_size, bucket_bytes=bucket_bytes)
    assert_equal_parameters(expected, replicas, start=start)


def on_two(start: nn.Module, body: Callable[[nn.Module, GradientReducer, int], None]) -> list[nn.Module]:
    """Run a body on two replicas of a model, each with a reducer in small buckets."""
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def main(group: LocalGroup) -> nn.Module:
        reducer = GradientReducer(group, bucket_bytes=128, first_bucket_bytes=64)
        reducer.attach(replicas[group.rank].parameters())
        body(replicas[group.rank], reducer, group.rank)
        return replicas[group.rank]

    return run_ranks(2, main)


def gradients_of(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def half(batch: tuple[torch.Tensor, torch.Tensor], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    piece = pieces(len(batch[0]), 2)[rank]
    return batch[0][piece], batch[1][piece]


def test_sum_adds_plain_gradients() -> None:
    start, batch = build("linear"), rows(5)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5, op=ReduceOp.SUM):
            features, targets = half(batch, rank)
            (nn.functional.mse_loss(model(features), targets, reduction="sum") / 5).backward()

    expected = train_alone(copy.deepcopy(start), [batch], lambda _, backward: backward())
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected), rtol=1e-12, atol=0)


def test_a_parameter_that_only_one_replica_uses() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        assert isinstance(model, nn.ModuleList)
        with reducer.step(weight=0.5):
            model[rank](torch.ones(1, 2)).sum().backward()

    start = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])
    for replica in on_two(start, body):
        first, second, third = (gradients_of(layer) for layer in replica.children())
        assert first[0] is not None
        assert first[0].tolist() == [[0.5, 0.5]]
        torch.testing.assert_close(first, second)
        assert third == [None, None]


def test_no_sync_keeps_gradients_local_until_the_next_backward() -> None:
    start, one, two = build("tied"), rows(5, seed=1), rows(3, seed=2)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=len(half(one, rank)[0]) / 5), reducer.no_sync():
            loss_of(model, half(one, rank)).backward()
            local = copy.deepcopy(start)
            loss_of(local, half(one, rank)).backward()
            torch.testing.assert_close(gradients_of(model), gradients_of(local))
        with reducer.step(weight=len(half(two, rank)[0]) / 3):
            loss_of(model, half(two, rank)).backward()

    expected = train_alone(copy.deepcopy(start), [one, two], lambda _, backward: backward())
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected), rtol=1e-12, atol=1e-15)


def test_no_sync_after_global_gradients_and_dropped_ones() -> None:
    start, batch = build("linear"), rows(4)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        def backward() -> None:
            loss_of(model, half(batch, rank)).backward()

        with reducer.step(weight=0.5):
            with reducer.no_sync():
                backward()
            model.zero_grad()  # these never count
            backward()
            with reducer.no_sync():
                backward()
                backward()
            backward()

    reference = copy.deepcopy(start)
    for _ in range(4):
        loss_of(reference, batch).backward()
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(reference), rtol=1e-12, atol=1e-15)


def test_hooks_see_the_global_gradient_and_what_was_there_before() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight = next(model.parameters())
        seen: list[tuple[str, float | None, float | None]] = []

        def before(gradient: torch.Tensor) -> None:
            earlier = weight.grad
            seen.append(("before", gradient.sum().item(), None if earlier is None else earlier.sum().item()))

        def after(parameter: torch.Tensor) -> None:
            seen.append(("after", parameter.grad.sum().item() if parameter.grad is not None else None, None))

        weight.register_hook(before)
        weight.register_post_accumulate_grad_hook(after)
        weight.register_hook(lambda gradient: gradient * 10)
        with reducer.step(weight=0.5):
            for _ in range(2):
                model(torch.full((1, 2), float(rank))).sum().backward()
        assert seen == [("before", 1.0, None), ("after", 10.0, None), ("before", 1.0, 10.0), ("after", 20.0, None)]

    on_two(nn.Linear(2, 1), body)


def test_hooks_run_in_the_same_order_everywhere_also_for_what_only_others_use() -> None:
    def body(group: LocalGroup) -> list[int]:
        model, order = copy.deepcopy(start), []
        for number, parameter in enumerate(model.parameters()):
            note = functools.partial(lambda n, _: order.append(n), number)
            parameter.register_post_accumulate_grad_hook(note)
        reducer = GradientReducer(group, bucket_bytes=8, first_bucket_bytes=8)
        reducer.attach(model.parameters())
        for _ in range(2):
            with reducer.step(weight=0.5):
                used = model[:3] if group.rank else nn.Sequential(model[2], model[0])
                used(torch.ones(1, 2)).sum().backward()
        return order

    start = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(4)])
    first, second = run_ranks(2, body)
    assert first == second
    assert sorted(first) == [0, 0, 1, 1, 2, 2]


def test_hooks_of_several_parameters_and_those_that_remove_themselves() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight, bias = model.parameters()
        seen: list[object] = []
        register_multi_grad_hook(
            (weight, bias), lambda both: seen.append([float(g.sum()) for g in both if g is not None])
        )

        def once(gradient: torch.Tensor) -> None:
            seen.append(float(gradient.sum()))
            handle.remove()

        handle = weight.register_hook(once)
        with reducer.step(weight=0.5):
            for _ in range(2):
                model(torch.full((1, 2), float(rank))).sum().backward()
        assert sorted(map(str, seen)) == ["1.0", "[1.0, 1.0]", "[1.0, 1.0]"]

    on_two(nn.Linear(2, 1), body)


def test_hooks_under_no_sync_wait_for_the_global_sum() -> None:
    start, batch = build("linear"), rows(4)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        seen: list[torch.Tensor] = []

        def triple(gradient: torch.Tensor) -> torch.Tensor:
            seen.append(gradient.clone())
            return gradient * 3

        next(model.parameters()).register_hook(triple)
        with reducer.step(weight=0.5):
            with reducer.no_sync():
                loss_of(model, half(batch, rank)).backward()
            assert not seen
            loss_of(model, half(batch, rank)).backward()
        torch.testing.assert_close(seen, [2 * alone], rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(next(model.parameters()).grad, 6 * alone, rtol=1e-12, atol=1e-15)

    reference = train_alone(copy.deepcopy(start), [batch], lambda _, backward: backward())
    alone = torch.cat([gradient for gradient in gradients_of(reference)[:1] if gradient is not None])
    on_two(start, body)


def test_hooks_with_a_graph_and_their_errors() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight = next(model.parameters())
        modes: list[bool] = []

        def double(gradient: torch.Tensor) -> torch.Tensor:
            modes.append(torch.is_grad_enabled())
            return gradient * 2

        handle = weight.register_hook(double)
        with reducer.step(weight=0.5):
            (weight.sum() ** 2).backward(create_graph=True)
            gradient = weight.grad
            assert gradient is not None
            weight.grad = None
            gradient.sum().backward()
            torch.testing.assert_close(weight.grad, torch.full_like(weight, 16.0))
            handle.remove()
            weight.register_hook(lambda gradient: weight.sum().backward())
            with pytest.raises(FailedPreconditionError, match=r"must not call backward\(\)"):
                weight.sum().backward()
        assert modes == [True, False]

    with pytest.warns(UserWarning, match="create_graph=True"):
        on_two(nn.Linear(2, 1).double(), body)


def test_changed_local_gradients_are_refused() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            with reducer.no_sync():
                loss_of(model, rows(2)).backward()
            for gradient in gradients_of(model):
                assert gradient is not None
                gradient.mul_(2.0)
            with pytest.raises(FailedPreconditionError, match="only be zeroed"):
                loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


def test_grad_stays_local_and_inputs_are_respected() -> None:
    start, batch = build("tied"), rows(4)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with reducer.step(weight=0.5):
            loss = loss_of(model, half(batch, rank))
            local = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
            assert gradients_of(model) == [None] * len(gradients_of(model))
            loss.backward(inputs=weights[:1], retain_graph=True)
            assert [p.grad is None for p in weights] == [False] + [True] * (len(weights) - 1)
            assert local[0] is not None
            assert weights[0].grad is not None
            assert not torch.allclose(local[0], weights[0].grad)
            weights[0].grad = None
            loss.backward()

    expected = train_alone(copy.deepcopy(start), [batch], lambda _, backward: backward())
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("op", [ReduceOp.MEAN, ReduceOp.SUM])
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")  # torch warns of a reference cycle
def test_second_derivatives_go_through_the_reduction(op: ReduceOp) -> None:
    """The penalty is a function of the global gradient; each replica weighs it by something of its own."""
    start, batch = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double(), rows(5)
    factors = [1.0, 3.0]
    sizes = [3, 2]

    def penalty(model: nn.Module, factor: float) -> torch.Tensor:
        return factor * torch.stack([(p.grad**3).sum() for p in model.parameters() if p.grad is not None]).sum()

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        features, targets = half(batch, rank)
        with reducer.step(weight=sizes[rank] / 5, op=op):
            loss = nn.functional.mse_loss(model(features), targets)
            (loss if op is ReduceOp.MEAN else loss * sizes[rank] / 5).backward(create_graph=True)
            after = penalty(model, factors[rank])
            model.zero_grad()
            after.backward()

    reference = copy.deepcopy(start)
    loss_of(reference, batch).backward(create_graph=True)
    weights = [0.6, 0.4] if op is ReduceOp.MEAN else [1.0, 1.0]
    total = penalty(reference, sum(w * f for w, f in zip(weights, factors, strict=True)))
    reference.zero_grad()
    total.backward()
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(reference), rtol=1e-9, atol=1e-14)


def test_mixed_dtypes_travel_in_their_own() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            torch.stack([(parameter * (rank + 1)).float().sum() for parameter in model.parameters()]).sum().backward()

    start = nn.ParameterList([torch.ones(5, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float32)])
    for replica in on_two(start, body):
        for parameter in replica.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.tolist() == [1.5] * 5


def test_memory_format_follows_the_parameter() -> None:
    start = nn.Conv2d(2, 3, 2)
    start.weight.data = start.weight.data.contiguous(memory_format=torch.channels_last)

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            model(torch.arange(32.0).reshape(1, 2, 4, 4) + rank).sum().backward()

    expected = copy.deepcopy(start)
    expected(torch.arange(32.0).reshape(1, 2, 4, 4) + 0.5).sum().backward()
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected))


def test_an_error_in_backward_leaves_the_reducer_clean() -> None:
    start, batch = build("linear"), rows(4)

    def explode(gradient: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        weight = next(model.parameters())
        weight.grad = torch.full_like(weight, 7.0)
        handle = weight.register_hook(explode)
        with pytest.raises(ZeroDivisionError), reducer.step(weight=0.5):
            loss_of(model, half(batch, rank)).backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 7.0))
        handle.remove()
        model.zero_grad()
        with reducer.step(weight=0.5):
            loss_of(model, half(batch, rank)).backward()

    expected = train_alone(copy.deepcopy(start), [batch], lambda _, backward: backward())
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(expected), rtol=1e-12, atol=1e-15)


def test_replicas_out_of_step_are_told() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for _ in range(rank):
            with reducer.step():
                pass
        with reducer.step(), pytest.raises(CollectiveMismatchError, match=r"rank 0: step 0.*rank 1: step 1"):
            loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


@pytest.mark.parametrize("num_frozen", [1, 2])
def test_replicas_that_train_different_parameters_are_told(num_frozen: int) -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for parameter in list(model.parameters())[:num_frozen]:
            parameter.requires_grad_(rank == 0)
        features = rows(2)[0].requires_grad_()
        with reducer.step(), pytest.raises(CollectiveMismatchError, match="layout"):
            model(features).sum().backward()

    on_two(build("linear"), body)


def test_a_frozen_layer_may_be_thawed_between_steps() -> None:
    start, batches = build("tied"), [rows(4, seed=1), rows(4, seed=2)]

    def thaw(model: nn.Module, backward: Callable[[], None]) -> None:
        plain(model, backward)
        model.get_submodule("frozen").requires_grad_(True)

    expected = train_alone(copy.deepcopy(start), batches, thaw)
    assert_equal_parameters(expected, train_together(start, batches, thaw, world_size=2), start=start)


def test_backward_outside_of_a_step_is_plain() -> None:
    model = build("linear")
    original = torch.autograd.backward

    def body(group: LocalGroup) -> None:
        reducer = GradientReducer(group)
        reducer.attach(model.parameters())
        with reducer.step(weight=0.5):
            loss_of(model, rows(2)).backward()
        model.zero_grad()
        loss_of(model, rows(2)).backward()

    run_ranks(1, body)
    assert torch.autograd.backward is original
    expected = train_alone(build("linear"), [rows(2)], lambda _, backward: backward())
    assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
    assert_equal(gradients_of(model), gradients_of(expected))


def test_bad_arguments() -> None:
    def body(group: LocalGroup) -> None:
        reducer = GradientReducer(group)
        with pytest.raises(InvalidArgumentError, match="MAX"), reducer.step(op=ReduceOp.MAX):
            pass
        with pytest.raises(InvalidArgumentError, match="nan"), reducer.step(weight=float("nan")):
            pass
        with reducer.step(), pytest.raises(FailedPreconditionError, match="open already"), reducer.step():
            pass

    run_ranks(1, body)


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


def test_a_step_allocates_no_memory_for_gradients() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        addresses = []
        with reducer.step(weight=0.5):
            for _ in range(4):
                model.zero_grad()
                loss_of(model, rows(2)).backward()
                addresses.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])
        # The first pass of several buckets finds the order of the others.
        assert addresses[1] == addresses[2] == addresses[3]

    on_two(nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh(), nn.Linear(3, 1)).double(), body)


def test_the_last_layers_travel_while_the_first_are_computed() -> None:
    start = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(4)]).double()

    def body(group: LocalGroup) -> list[tuple[int, int]]:
        """Layers whose gradients are computed, with the number of buckets on their way by then."""
        model, events = copy.deepcopy(start), []
        reducer = GradientReducer(group, bucket_bytes=400, first_bucket_bytes=400)
        reducer.attach(model.parameters())
        for number, layer in enumerate(model.children()):
            note = functools.partial(lambda n, _: events.append((n, group.num_calls)), number)
            layer.get_parameter("weight").register_hook(OwnHook(note))  # a program's would wait for global gradients
        for _ in range(2):
            with reducer.step(weight=0.5):
                events.clear()
                before = group.num_calls
                model(rows(2)[0]).sum().backward()
        return [(layer, calls - before) for layer, calls in events] + [(-1, group.num_calls - before)]

    assert run_ranks(2, body) == [[(3, 0), (2, 1), (1, 2), (0, 3), (-1, 4)]] * 2


def test_replicas_with_different_numbers_of_backward_passes_are_told() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        def backward() -> None:
            loss_of(model, rows(2)).backward()

        with reducer.step():
            backward()
            if rank == 1:
                with pytest.raises(CollectiveMismatchError, match=said):
                    backward()
        if rank == 0:
            with reducer.step(), pytest.raises(CollectiveMismatchError, match=said):
                backward()

    said = "rank 0: step 1, backward pass 1, op MEAN; rank 1: step 0, backward pass 2, op MEAN"
    on_two(build("linear"), body)


@pytest.mark.parametrize("num_before", [0, 1])
def test_replicas_that_reduce_differently_are_told(num_before: int) -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for _ in range(num_before):
            with reducer.step():
                loss_of(model, rows(2)).backward()
        with (
            reducer.step(op=ReduceOp.SUM if rank else ReduceOp.MEAN),
            pytest.raises(CollectiveMismatchError, match=r"rank 0: .*op MEAN; rank 1: .*op SUM"),
        ):
            loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


def test_a_thread_that_a_step_starts_must_not_run_backward() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            loss = loss_of(model, rows(2))
            error = begin_threads({0: lambda: loss.backward()})()[0]
        assert isinstance(error, FailedPreconditionError)
        assert "called on the thread that runs the step" in str(error)

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


@pytest.mark.parametrize("others", [Updates(3, (0.1,)), Updates(2, (0.2,))])
def test_replicas_that_updated_differently_are_told_at_the_next_backward(others: Updates) -> None:
    def main(group: LocalGroup) -> str:
        mine = [Updates(1, (0.1,)), Updates(1, (0.1,))]
        reducer = GradientReducer(group, updates=lambda: mine.pop(0))
        weight = nn.Parameter(torch.ones(2))
        reducer.attach((weight,))
        with reducer.step():
            weight.sum().backward()
        mine[0] = others if group.rank == 1 else Updates(2, (0.1,))
        with reducer.step(), pytest.raises(CollectiveMismatchError, match="what came before step 1") as caught:
            weight.sum().backward()
        return str(caught.value)

    first, second, third = run_ranks(3, main)
    assert first == second == third
    assert "rank 1 differs from the others" in first


# --- gradients that travel in half the bytes --------------------------------------------------------------------------

ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}
Compression = Literal["fp16", "bf16"]


def compressed(
    start: nn.Module, compression: Compression | None, backward: Callable[[nn.Module, int], None], world_size: int = 3
) -> list[tuple[nn.Module, int]]:
    """Replicas after two steps, of which the second one's traffic is counted."""
    replicas = [copy.deepcopy(start) for _ in range(world_size)]

    def main(group: LocalGroup) -> tuple[nn.Module, int]:
        model, sent, all_reduce = replicas[group.rank], [0], group.all_reduce

        def counted(tensor: torch.Tensor, op: ReduceOp) -> Work:
            sent.append(tensor.nbytes)
            return all_reduce(tensor, op)

        group.all_reduce = counted  # type: ignore[method-assign]  # the reducer is given bytes to send here alone
        reducer = GradientReducer(group, bucket_bytes=1 << 10, first_bucket_bytes=256, compression=compression)
        reducer.attach(tuple(model.parameters()))
        for _ in range(2):
            sent.clear()
            model.zero_grad()
            with reducer.step(weight=1 / world_size):
                backward(model, group.rank)
        return model, sum(sent)

    return run_ranks(world_size, main)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_are_rounded_equal_and_half_as_large(compression: Compression) -> None:
    start = nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 1))

    def backward(model: nn.Module, rank: int) -> None:
        features, targets = rows(4, seed=rank)
        nn.functional.mse_loss(model(features.float()), targets.float()).backward()

    plain, plain_bytes = compressed(start, None, backward)[0]
    own = []
    for rank in range(3):
        alone = copy.deepcopy(start)
        backward(alone, rank)
        own.append([torch.zeros(()) if p.grad is None else p.grad for p in alone.parameters()])
    replicas = compressed(start, compression, backward)
    for replica, num_bytes in replicas:
        assert num_bytes * 2 == plain_bytes
        for number, (parameter, expected) in enumerate(zip(replica.parameters(), plain.parameters(), strict=True)):
            assert parameter.grad is not None
            assert expected.grad is not None
            assert parameter.grad.dtype is torch.float32
            # Each replica's share is rounded once, their sum once more; below 2**-24 float16 has no finer steps.
            size = sum(gradients[number].abs() for gradients in own) / 3
            bound = 2.01 * ROUNDING[compression] * size + 3 * 2.0**-25
            assert bool(((parameter.grad - expected.grad).abs() <= bound).all())
            assert not torch.equal(parameter.grad, expected.grad)
        mine, first = gradients_of(replica), gradients_of(replicas[0][0])
        assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True) if a is not None and b is not None)


def test_only_float32_is_compressed() -> None:
    def backward(model: nn.Module, rank: int) -> None:
        torch.stack([(p * (1 + 2.0**-12)).double().sum() for p in model.parameters()]).sum().backward()

    dtypes = (torch.float64, torch.bfloat16, torch.float32)
    start = nn.ParameterList([torch.ones(5, dtype=dtype) for dtype in dtypes])
    (replica, _), *_ = compressed(start, "fp16", backward, world_size=2)
    double, half, single = (p.grad for p in replica.parameters())
    assert double is not None
    assert half is not None
    assert single is not None
    assert double.tolist() == [1 + 2.0**-12] * 5
    assert half.dtype is torch.bfloat16
    assert single.tolist() == [1.0] * 5


def test_what_does_not_fit_into_float16_is_infinite_everywhere() -> None:
    def backward(model: nn.Module, rank: int) -> None:
        (next(model.parameters()) * (3e5 if rank else 1.0)).sum().backward()

    for compression, expected in (("fp16", torch.inf), ("bf16", 2e5)):
        for replica, _ in compressed(nn.Linear(2, 1, bias=False), compression, backward):  # type: ignore[arg-type]
            (gradient,) = gradients_of(replica)
            assert gradient is not None
            torch.testing.assert_close(gradient, torch.full_like(gradient, expected), rtol=1e-2, atol=0)


@settings(max_examples=15)
@given(
    name=st.sampled_from(sorted(MODELS)),
    step=st.sampled_from(sorted(STEPS)),
    world_size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    bucket_bytes=st.sampled_from([1, 64, 300, 1 << 20]),
    compression=st.sampled_from(["fp16", "bf16"]),
)
def test_compression_works_with_all_ways_to_use_gradients(
    name: str, step: str, world_size: int, sizes: list[int], bucket_bytes: int, compression: Compression
) -> None:
    """In float64 nothing is rounded; in float32 all replicas hold the same bits, near those of one process."""
    assume((name, STEPS[step]) not in ONCE_A_SEGMENT)
    start = build(name)
    batches = [rows(size, seed=number) for number, size in enumerate(sizes)]
    together = functools.partial(train_together, world_size=world_size, bucket_bytes=bucket_bytes)
    expected = train_alone(copy.deepcopy(start), batches, STEPS[step])
    assert_equal_parameters(expected, together(start, batches, STEPS[step], compression=compression), start=start)
    narrow = [(features.float(), targets.float()) for features, targets in batches]
    rounded = together(copy.deepcopy(start).float(), narrow, STEPS[step], compression=compression)
    for (key, value), reference in zip(rounded[0].state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value, reference.float(), rtol=0.1, atol=0.1)
        assert all(torch.equal(replica.state_dict()[key], value) for replica in rounded)
