"""A rank without peers checks its gradients as several ranks do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raydist.collectives.base import Membership
from raydist.collectives.reducer.nonfinite import NonfinitePolicy, OnNonfinite
from raydist.collectives.reducer.reducer import GradientReducer
from raydist.errors import FailedPreconditionError
from tests.collectives.gradient_steps import ONCE_A_SEGMENT, STEPS
from tests.collectives.local_group import LocalGroup, LocalHub
from tests.collectives.models import build, loss_of, rows

NAN = float("nan")


def names(parameters: Iterable[torch.nn.Parameter]) -> Sequence[str]:
    return [f"p{parameter.numel()}" for parameter in parameters]


def in_a_run(choice: OnNonfinite, model: nn.Module, body: Callable[[GradientReducer], Any]) -> NonfinitePolicy:
    policy = NonfinitePolicy(names)
    group = LocalGroup(LocalHub(), Membership("g", 0, 0, 1), timeout_s=5.0).start()
    reducer = GradientReducer(group, policy=policy)
    reducer.attach(model.parameters())
    with policy.run(choice), reducer.step():
        body(reducer)
    return policy


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", ["tied", "reentrant-checkpoint", "lookup"])
def test_looking_changes_nothing(name: str, step: Callable[..., None]) -> None:
    if (name, step) in ONCE_A_SEGMENT:
        return
    model, plain = build(name), build(name)
    batches = [rows(4, seed=1), rows(1, seed=2), rows(3, seed=3)]

    def body(_: GradientReducer) -> None:
        for batch in batches:
            step(model, lambda batch=batch: loss_of(model, batch).backward())

    assert in_a_run("raise", model, body).num_found == 0
    for batch in batches:
        step(plain, lambda batch=batch: loss_of(plain, batch).backward())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
        assert (mine.grad is None) == (theirs.grad is None)


def test_raise_names_the_parameter_and_leaves_gradients() -> None:
    layer = nn.Linear(3, 1)

    def body(_: GradientReducer) -> None:
        layer(torch.ones(1, 3)).sum().backward()
        with pytest.raises(FailedPreconditionError, match=r"backward pass 2 of batch 0 from replica 0: p3 \(NaN\)"):
            (layer.weight * NAN).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[1.0, 1.0, 1.0]]

    in_a_run("raise", layer, body)


def test_gradients_made_by_hand_add_up_with_others() -> None:
    layer = nn.Linear(2, 1, bias=False)

    def body(_: GradientReducer) -> None:
        layer.weight.grad = torch.ones(1, 2)
        layer(torch.ones(1, 2)).sum().backward()
        layer.weight.grad.mul_(3)
        layer(torch.ones(1, 2)).sum().backward()
        assert layer.weight.grad.tolist() == [[7.0, 7.0]]

    in_a_run("raise", layer, body)


def test_skip_until_the_next_pass_and_longer_where_gradients_are_bad() -> None:
    first, second = layers = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.1) for layer in layers]

    def body(reducer: GradientReducer) -> None:
        def moves() -> tuple[bool, ...]:
            before = [layer.weight.detach().clone() for layer in layers]
            for optimizer in optimizers:
                optimizer.step()
            return tuple(not torch.equal(*pair) for pair in zip(before, (first.weight, second.weight), strict=True))

        (first.weight * NAN).sum().backward()
        assert moves() == (False, False)
        second.weight.sum().backward()
        assert moves() == (False, True)
        first.zero_grad()
        first.weight.sum().backward()
        assert moves() == (True, True)
        with reducer.no_sync():
            (first.weight * NAN).sum().backward()
        second.weight.sum().backward()
        assert moves() == (False, False)

    policy = in_a_run("skip", nn.ModuleList(layers), body)
    assert (policy.num_found, policy.num_skipped) == (2, 5)


def test_hooks_that_step_are_skipped_and_parameters_inside_of_checkpoints_seen() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = copy.deepcopy(layer.weight.data)

    def body(_: GradientReducer) -> None:
        x = torch.full((1, 2), NAN, requires_grad=True)
        checkpoint(layer, x, use_reentrant=True).sum().backward()
        assert torch.equal(layer.weight, before)
        layer.zero_grad()
        checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum().backward()
        assert not torch.equal(layer.weight, before)

    assert in_a_run("skip", layer, body).num_skipped == 1
