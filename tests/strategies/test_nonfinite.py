"""NaN and infinities in gradients, under every strategy: the same outcome, whatever runs underneath."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from tests.strategies.test_same_as_one_device import FEW_MAKERS, MAKERS

NAN, INF = float("nan"), float("inf")
SKIP, RAISE = rd.RunOptions(on_nonfinite="skip"), rd.RunOptions(on_nonfinite="raise")


@pytest.fixture(scope="module", params=[MAKERS[name] for name in FEW_MAKERS], ids=FEW_MAKERS)
def strategy(request: pytest.FixtureRequest) -> rd.Strategy:
    """A fixture of the module, so that Ray is up before a test begins."""
    made: rd.Strategy = request.param(request)
    return made


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x).tanh())


def data(bad: dict[int, float]) -> rd.Dataset:
    """Batches of four rows; `bad` says by row what stands in it."""
    rows = torch.randn(20, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for row, value in bad.items():
        rows[row] = value
    return rd.Dataset.from_tensor_slices(rows).batch(4)


def build(make: Callable[..., torch.optim.Optimizer]) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Net().double()
    return model, make(model.parameters())


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
]


@pytest.mark.parametrize(("make", "loop"), [(OPTIMIZERS[0], False), (OPTIMIZERS[1], True)], ids=["sgd", "adamw-loop"])
def test_skip_trains_as_if_the_bad_batches_were_not_there(
    strategy: rd.Strategy, make: Callable[..., torch.optim.Optimizer], loop: bool
) -> None:
    with strategy.scope():
        model, optimizer = build(make)
    step = step_of(model, optimizer)

    def all_steps(batches: Any) -> None:
        for batch in batches:
            step(batch)

    before = strategy.stats()
    batches = strategy.distribute_dataset(data({5: NAN, 14: INF}))  # in batch 1, and in batch 3
    if loop:
        strategy.run(all_steps, args=(iter(batches),), options=SKIP)
    else:
        for batch in batches:
            strategy.run(step, args=(batch,), options=SKIP)
    after = strategy.stats()

    plain, plain_optimizer = build(make)
    plain_step = step_of(plain, plain_optimizer)
    for number, batch in enumerate(data({})):
        if number not in (1, 3):
            plain_step(batch)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    mine, theirs = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    assert after.steps - before.steps == (1 if loop else 5)
    assert after.nonfinite_backwards - before.nonfinite_backwards == 2
    assert after.skipped_updates - before.skipped_updates == 2


def test_raise_names_who_and_what_and_pass_hands_it_to_all(strategy: rd.Strategy) -> None:
    with strategy.scope():
        model, optimizer = build(OPTIMIZERS[0])
    step = step_of(model, optimizer)
    batches = list(strategy.distribute_dataset(data({7: NAN})))
    strategy.local_results(strategy.run(step, args=(batches[0],), options=RAISE))
    before = copy.deepcopy({name: value.clone() for name, value in model.state_dict().items()})
    with pytest.raises(rd.FailedPreconditionError, match=r"Net.body.weight \(NaN\)") as caught:
        strategy.local_results(strategy.run(step, args=(batches[1],), options=RAISE))
    count = strategy.num_replicas_in_sync
    last = 3 // -(-4 // count)  # who has the last row of four; replicas after it have none
    assert f"from replica {last}: " in str(caught.value)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    strategy.local_results(strategy.run(step, args=(batches[2],), options=RAISE))
    assert not torch.equal(model.body.weight, before["body.weight"])
    found = strategy.stats().nonfinite_backwards
    strategy.run(step, args=(batches[1],))  # as by default
    there = strategy.local_results(strategy.run(lambda: model.head.bias.isnan().all().item()))
    assert there == (True,) * count
    assert strategy.stats().nonfinite_backwards == found


def test_a_step_of_the_optimizer_in_the_next_run_is_skipped_too(strategy: rd.Strategy) -> None:
    """Gradients of several global batches, one of them bad, meet in one update."""
    with strategy.scope():
        model, optimizer = build(OPTIMIZERS[1])

    def accumulate(x: torch.Tensor) -> None:
        model(x).square().mean().backward()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    before = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in strategy.distribute_dataset(data({0: INF})):
        strategy.run(accumulate, args=(batch,), options=SKIP)
    strategy.run(update, options=SKIP)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    for batch in strategy.distribute_dataset(data({})):
        strategy.run(accumulate, args=(batch,), options=SKIP)
    strategy.run(update, options=SKIP)
    assert not torch.equal(model.head.bias, before["head.bias"])
