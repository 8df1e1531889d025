"""A replica that is alone looks at its gradients as several look at theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raydist.collectives.reducer.checked_backward import CheckedBackward, parameters_under
from raydist.collectives.reducer.nonfinite import NonfinitePolicy, OnNonfinite
from raydist.errors import FailedPreconditionError
from tests.collectives.gradient_steps import ONCE_A_SEGMENT, STEPS
from tests.collectives.models import MODELS, build, loss_of, rows

NAN = float("nan")


def names(parameters: Iterable[torch.nn.Parameter]) -> Sequence[str]:
    return [f"p{parameter.numel()}" for parameter in parameters]


def in_a_run(choice: OnNonfinite, body: Callable[[CheckedBackward], Any]) -> NonfinitePolicy:
    policy = NonfinitePolicy(names)
    checked = CheckedBackward(policy)
    with policy.run(choice), checked.step():
        body(checked)
    return policy


@pytest.mark.parametrize("name", MODELS)
def test_the_walk_finds_what_backward_reaches(name: str) -> None:
    model = build(name)
    loss = loss_of(model, rows(4))
    found = parameters_under([loss])
    loss.backward()
    reached = {id(p) for p in model.parameters() if p.grad is not None}
    hidden = reached - {id(p) for p in found}
    assert len(found) == len({id(p) for p in found})
    assert not hidden or name == "reentrant-checkpoint"  # that one runs backward again inside


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", ["tied", "reentrant-checkpoint", "lookup"])
def test_looking_changes_nothing(name: str, step: Callable[..., None]) -> None:
    if (name, step) in ONCE_A_SEGMENT:
        return
    model, plain = build(name), build(name)
    batches = [rows(4, seed=1), rows(1, seed=2), rows(3, seed=3)]

    def body(checked: CheckedBackward) -> None:
        for batch in batches:
            step(model, lambda batch=batch: loss_of(model, batch).backward())

    assert in_a_run("raise", body).num_found == 0
    for batch in batches:
        step(plain, lambda batch=batch: loss_of(plain, batch).backward())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15)
        assert (mine.grad is None) == (theirs.grad is None)


def test_raise_names_the_parameter_and_leaves_gradients() -> None:
    layer = nn.Linear(3, 1)

    def body(checked: CheckedBackward) -> None:
        layer(torch.ones(1, 3)).sum().backward()
        with pytest.raises(FailedPreconditionError, match=r"backward pass 2 of the step from replica 0: p3 \(NaN\)"):
            (layer.weight * NAN).sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.tolist() == [[1.0, 1.0, 1.0]]

    in_a_run("raise", body)


def test_skip_until_the_next_pass_and_longer_where_gradients_are_bad() -> None:
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.1) for layer in (first, second)]

    def body(checked: CheckedBackward) -> None:
        def moves() -> tuple[bool, ...]:
            before = [layer.weight.detach().clone() for layer in (first, second)]
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
        with checked.no_sync():
            (first.weight * NAN).sum().backward()
        second.weight.sum().backward()
        assert moves() == (False, False)

    policy = in_a_run("skip", body)
    assert (policy.num_found, policy.num_skipped) == (2, 5)


def test_hooks_that_step_are_skipped_and_parameters_inside_of_checkpoints_seen() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = layer.weight.detach().clone()

    def body(checked: CheckedBackward) -> None:
        x = torch.full((1, 2), NAN, requires_grad=True)
        checkpoint(layer, x, use_reentrant=True).sum().backward()
        assert torch.equal(layer.weight, before)
        layer.zero_grad()
        checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=True).sum().backward()
        assert not torch.equal(layer.weight, before)

    assert in_a_run("skip", body).num_skipped == 1
