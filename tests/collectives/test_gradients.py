from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from raydist.collectives.gradients import GradientReducer
from raydist.collectives.local import LocalGroup
from raydist.collectives.parameter_hooks import OwnHook
from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.values import ReduceOp
from tests.collectives.gradient_steps import (
    ONCE_A_SEGMENT,
    STEPS,
    gradients_of,
    half,
    on_two,
    plain,
)
from tests.collectives.models import (
    FEATURES,
    MODELS,
    Step,
    assert_equal_parameters,
    build,
    loss_of,
    rows,
    train_alone,
    train_together,
)
from tests.collectives.threads import begin_threads, run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_replicas_train_like_one_process(name: str, world_size: int) -> None:
    start = build(name)
    batches = [rows(7, seed=1), rows(5, seed=2), rows(2, seed=3)]
    expected = train_alone(copy.deepcopy(start), batches, plain)
    assert_equal_parameters(expected, train_together(start, batches, plain, world_size=world_size), start=start)


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


def test_a_thread_that_a_step_starts_must_not_run_backward() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            loss = loss_of(model, rows(2))
            error = begin_threads({0: lambda: loss.backward()})()[0]
        assert isinstance(error, FailedPreconditionError)
        assert "called on the thread that runs the step" in str(error)

    on_two(build("linear"), body)
