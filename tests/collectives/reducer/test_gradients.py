from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raydist.collectives.reducer.reducer import GradientReducer
from raydist.collectives.reducer.trailer import Updates
from raydist.core.errors import CollectiveMismatchError, FailedPreconditionError, InvalidArgumentError
from raydist.core.values import ReduceOp
from tests.cases import case
from tests.collectives.local_group import LocalGroup
from tests.collectives.models import (
    FEATURES,
    MODELS,
    ONCE_A_SEGMENT,
    STEPS,
    assert_equal_parameters,
    assert_gradients_of_one,
    build,
    gradients_of,
    half,
    loss_of,
    on_two,
    plain,
    rows,
    train_alone,
    train_together,
)
from tests.collectives.threads import begin_threads, run_ranks


@pytest.mark.parametrize("name", MODELS)
def test_replicas_train_like_one_process(name: str) -> None:
    """In float64 compression rounds nothing."""
    start = build(name)
    batches = [rows(7, seed=1), rows(1, seed=2), rows(2, seed=3)]
    for key, step in STEPS.items() if name in ("shared", "reentrant-checkpoint", "lookup") else [("plain", plain)]:
        if (name, step) not in ONCE_A_SEGMENT:
            expected = train_alone(copy.deepcopy(start), batches, step)
            for world_size in (1, 3) if step is plain else (3,):
                with case(f"{key} on {world_size}"):
                    compression: Literal["fp16"] | None = "fp16" if step is plain and world_size > 1 else None
                    together = train_together(start, batches, step, world_size=world_size, compression=compression)
                    assert_equal_parameters(expected, together, start=start)


def test_a_layer_that_a_second_checkpoint_begins_to_use() -> None:
    """Its gradient comes twice in a pass: its bucket must wait for both."""
    start, batch = nn.Sequential(*(nn.Linear(FEATURES, width) for width in (FEATURES, FEATURES, 1))).double(), rows(4)

    def backward(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], segments: int) -> None:
        first, shared, head = model.children()
        hidden = first(batch[0])
        for _ in range(segments):
            hidden = checkpoint(shared, hidden, use_reentrant=True)
        nn.functional.mse_loss(head(hidden), batch[1]).backward()

    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for segments in (1, 2):
            model.zero_grad()
            with reducer.step(weight=0.5):
                backward(model, half(batch, rank), segments)

    alone = copy.deepcopy(start)
    backward(alone, batch, 2)
    for replica in on_two(start, body):
        torch.testing.assert_close(gradients_of(replica), gradients_of(alone), rtol=1e-12, atol=1e-15)


def test_a_model_that_is_cast_and_resized_between_steps() -> None:
    def body(group: LocalGroup) -> list[Any]:
        model = nn.Linear(2, 1)
        reducer = GradientReducer(group, bucket_bytes=8)
        reducer.attach(tuple(model.parameters()))
        found = []
        for change in (lambda: None, model.double, lambda: setattr(model.weight, "data", torch.ones(1, 3).double())):
            model.zero_grad()
            change()
            weight = model.weight
            with reducer.step(weight=0.5):
                model(torch.full((1, weight.shape[1]), 1.0 + group.rank, dtype=weight.dtype)).sum().backward()
            assert weight.grad is not None
            found.append((weight.grad.dtype, weight.grad.tolist()))
        reducer.close()
        return found

    expected = [(torch.float32, [[1.5] * 2]), (torch.float64, [[1.5] * 2]), (torch.float64, [[1.5] * 3])]
    assert run_ranks(2, body) == [expected] * 2


def test_grad_stays_local_and_inputs_are_respected() -> None:
    start, batch = build("shared"), rows(4)

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

    assert_gradients_of_one(start, [batch], body)


def test_backward_outside_of_a_step_is_plain_and_bad_arguments_are_refused() -> None:
    model = build("linear")

    def body(group: LocalGroup) -> None:
        reducer = GradientReducer(group)
        reducer.attach(model.parameters())
        with reducer.step(weight=0.5):
            loss_of(model, rows(2)).backward()
        model.zero_grad()
        loss_of(model, rows(2)).backward()
        with pytest.raises(InvalidArgumentError, match="MAX"), reducer.step(op=ReduceOp.MAX):
            pass
        with pytest.raises(InvalidArgumentError, match="nan"), reducer.step(weight=float("nan")):
            pass
        with reducer.step(), pytest.raises(FailedPreconditionError, match="open already"), reducer.step():
            pass
        reducer.close()

    run_ranks(1, body)
    expected = train_alone(build("linear"), [rows(2)], lambda _, backward: backward())
    torch.testing.assert_close(gradients_of(model), gradients_of(expected), rtol=0, atol=0)


def test_a_thread_that_a_step_starts_must_not_run_backward_and_local_gradients_must_not_be_changed() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        with reducer.step(weight=0.5):
            loss = loss_of(model, rows(2))
            error = begin_threads({0: lambda: loss.backward()})()[0]
            assert isinstance(error, FailedPreconditionError)
            assert "called on the thread that runs the step" in str(error)
            with reducer.no_sync():
                loss_of(model, rows(2)).backward()
            for gradient in gradients_of(model):
                assert gradient is not None
                gradient.mul_(2.0)
            with pytest.raises(FailedPreconditionError, match="only be zeroed"):
                loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


def test_replicas_that_train_different_parameters_are_told() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        features = rows(2)[0].requires_grad_()
        for parameter in model.parameters():  # one is frozen on rank 1, then all are
            parameter.requires_grad_(rank == 0)
            with reducer.step(), pytest.raises(CollectiveMismatchError, match="layout"):
                model(features).sum().backward()

    on_two(build("linear"), body)


def test_a_frozen_layer_may_be_thawed_between_steps() -> None:
    start, batches = build("shared"), [rows(4, seed=1), rows(4, seed=2)]

    def thaw(model: nn.Module, backward: Callable[[], None]) -> None:
        plain(model, backward)
        model.get_submodule("frozen").requires_grad_(True)

    expected = train_alone(copy.deepcopy(start), batches, thaw)
    assert_equal_parameters(expected, train_together(start, batches, thaw, world_size=2), start=start)


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


def test_replicas_that_reduce_differently_are_told() -> None:
    def body(model: nn.Module, reducer: GradientReducer, rank: int) -> None:
        for _ in range(2):
            with (
                reducer.step(op=ReduceOp.SUM if rank else ReduceOp.MEAN),
                pytest.raises(CollectiveMismatchError, match=r"rank 0: .*op MEAN; rank 1: .*op SUM"),
            ):
                loss_of(model, rows(2)).backward()
            with reducer.step():
                loss_of(model, rows(2)).backward()

    on_two(build("linear"), body)


def test_replicas_that_updated_differently_are_told_at_the_next_backward() -> None:
    def main(group: LocalGroup, others: Updates) -> str:
        mine = [Updates(1, (0.1,)), others if group.rank == 1 else Updates(2, (0.1,))]
        reducer = GradientReducer(group, updates=lambda: mine.pop(0))
        weight = nn.Parameter(torch.ones(2))
        reducer.attach((weight,))
        with reducer.step():
            weight.sum().backward()
        with reducer.step(), pytest.raises(CollectiveMismatchError, match="the updates made before step 1") as caught:
            weight.sum().backward()
        return str(caught.value)

    for others in (Updates(3, (0.1,)), Updates(2, (0.2,))):
        first, second, third = run_ranks(3, functools.partial(main, others=others))
        assert first == second == third
        assert "rank 1 differs from the others" in first
