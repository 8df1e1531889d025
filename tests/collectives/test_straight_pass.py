"""Passes without an exchange: when they are, and that the way makes no difference."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raydist.collectives.buckets import exchanges
from raydist.collectives.buckets.exchange import BucketExchange
from raydist.collectives.gradients import GradientReducer
from raydist.collectives.local import LocalGroup
from raydist.collectives.straight_pass import StraightPass
from raydist.errors import CollectiveMismatchError, DeadlineExceededError
from tests.collectives.gradient_steps import gradients_of
from tests.collectives.threads import run_ranks

INPUTS = (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]))
LAYERS = 2


class Counted:
    """How many exchanges each thread has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._numbers = threading.local()

        def make(*args: Any, **kwargs: Any) -> BucketExchange:
            self._numbers.value = self.number + 1
            return BucketExchange(*args, **kwargs)

        monkeypatch.setattr(exchanges, "BucketExchange", make)

    @property
    def number(self) -> int:
        number: int = getattr(self._numbers, "value", 0)
        return number


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(2, 3) for _ in range(LAYERS)])


def loss(model: nn.ModuleList, rank: int, used: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    return torch.stack([model[index](INPUTS[rank]).sum() * (index + 1) for index in used]).sum()


def reducing(group: LocalGroup, model: nn.Module) -> GradientReducer:
    reducer = GradientReducer(group)
    reducer.attach(tuple(model.parameters()))
    return reducer


def usual(model: nn.ModuleList, reducer: GradientReducer, rank: int) -> None:
    model.zero_grad()
    with reducer.step(weight=0.5):
        loss(model, rank).backward()


def expected(used: tuple[tuple[int, ...], ...] = ((0, 1), (0, 1))) -> list[torch.Tensor | None]:
    model = layers()
    (0.5 * torch.stack([loss(model, rank, used[rank]) for rank in range(2) if used[rank]]).sum()).backward()
    return gradients_of(model)


def on_ranks(body: Callable[[nn.ModuleList, GradientReducer, int], None]) -> list[list[torch.Tensor | None]]:
    """Gradients of each rank after a first pass, which finds its layout, and then `body`."""

    def main(group: LocalGroup) -> list[torch.Tensor | None]:
        model = layers()
        reducer = reducing(group, model)
        usual(model, reducer, group.rank)
        body(model, reducer, group.rank)
        reducer.close()
        return gradients_of(model)

    return run_ranks(2, main)


def assert_all(found: list[list[torch.Tensor | None]], wanted: list[torch.Tensor | None]) -> None:
    for gradients in found:
        torch.testing.assert_close(gradients, wanted)


def test_a_usual_pass_makes_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)

    def body(model: nn.ModuleList, reducer: GradientReducer, rank: int) -> None:
        assert counted.number == 1
        for _ in range(3):
            usual(model, reducer, rank)
        assert counted.number == 1

    assert_all(on_ranks(body), expected())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("what", ["a hook", "what .grad holds", "a trace", "a graph", "no rows", "what is seen"])
def test_other_passes_make_one(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank, while the other one goes straight."""
    counted = Counted(monkeypatch)

    def body(model: nn.ModuleList, reducer: GradientReducer, rank: int) -> None:
        kept = [parameter.grad for parameter in model.parameters()]
        if what != "what .grad holds" or rank == 0:
            model.zero_grad()
        if what != "what is seen" or rank == 0:
            kept.clear()
        first: nn.Parameter = next(model.parameters())
        if rank == 1 and what == "a hook":
            first.register_post_accumulate_grad_hook(lambda _: None)
        with reducer.step(weight=0.5, empty=rank == 1 and what == "no rows"):
            if rank == 1 and what == "a trace":
                with torch.profiler.profile():
                    loss(model, rank).backward()
            else:
                loss(model, rank).backward(create_graph=rank == 1 and what == "a graph")
        assert counted.number == 1 + (rank == 1 or what == "no rows")

    found = on_ranks(body)
    wanted = expected()
    if what == "no rows":
        wanted = expected(((0, 1), ()))
    if what == "what .grad holds":
        torch.testing.assert_close(found[1], [None if one is None else 2 * one for one in wanted])
        found.pop()
    assert_all([[None if one is None else one.detach() for one in gradients] for gradients in found], wanted)


@pytest.mark.parametrize("used", [((0, 1), (0,)), ((0,), (0, 1)), ((0,), (0,)), ((0,), (1,))])
def test_a_gradient_is_missing(used: tuple[tuple[int, ...], tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has all gradients learns of it when they have been sent."""
    counted = Counted(monkeypatch)

    def body(model: nn.ModuleList, reducer: GradientReducer, rank: int) -> None:
        model.zero_grad()
        with reducer.step(weight=0.5):
            loss(model, rank, used[rank]).backward()
        torch.testing.assert_close(gradients_of(model), expected(used))
        assert counted.number == 2
        usual(model, reducer, rank)
        assert counted.number == 2

    assert_all(on_ranks(body), expected())


def test_one_that_fails_changes_no_gradient() -> None:
    def main(group: LocalGroup) -> None:
        model = layers()
        reducer = reducing(group, model)
        usual(model, reducer, group.rank)
        model.zero_grad()
        with (
            pytest.raises(CollectiveMismatchError, match="backward pass"),
            reducer.step(weight=0.5, index=group.rank),
        ):
            loss(model, group.rank).backward()
        assert gradients_of(model) == [None] * (2 * LAYERS)
        model.zero_grad()
        with reducer.step(weight=0.5, index=7):
            loss(model, group.rank).backward()
        torch.testing.assert_close(gradients_of(model), expected())

    run_ranks(2, main)


def test_one_whose_peers_never_come_changes_no_gradient() -> None:
    gone = threading.Event()

    def main(group: LocalGroup) -> None:
        model = layers()
        reducer = reducing(group, model)
        usual(model, reducer, group.rank)
        if group.rank == 1:
            gone.wait(20.0)
            return
        model.zero_grad()
        with reducer.step(weight=0.5):
            with pytest.raises(DeadlineExceededError):
                loss(model, 0).backward()
            assert gradients_of(model) == [None] * (2 * LAYERS)
            with pytest.raises(DeadlineExceededError):  # it waits for what it had sent, and says the same
                loss(model, 0).backward()
        gone.set()

    run_ranks(2, main, timeout_s=1.0)


def test_the_way_makes_no_difference_to_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(model: nn.ModuleList, reducer: GradientReducer, rank: int) -> None:
        for number in range(6):
            model.zero_grad()
            with reducer.step(weight=(0.3, 0.7)[rank]):
                (loss(model, rank) * (0.1 + number)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad, alpha=0.01)

    straight = on_ranks(train)
    monkeypatch.setattr(StraightPass, "buffer", lambda self: None)
    by_exchange = on_ranks(train)
    for one, other in zip(straight[0] + straight[1], by_exchange[0] + by_exchange[1], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
