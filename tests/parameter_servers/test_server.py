from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.parameter_servers.optimizers import step_bare
from raydist.parameter_servers.requests import (
    Assign,
    CreateSlices,
    FenceWorker,
    Pull,
    Push,
    PushKey,
    Sender,
    ServerRequest,
    Statistics,
)
from tests.parameter_servers.examples import OPTIMIZER, BareWorker, answer, ask, servers, slice_of

Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, step: Callable[[], object], steps: int = 20) -> None:
    """Clipped steps with a schedule of learning rates."""
    generator = torch.Generator().manual_seed(5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    for _ in range(steps):
        rows = torch.randn(8, 5, dtype=torch.float64, generator=generator)
        optimizer.zero_grad()
        (net(rows) - rows.sum(1, keepdim=True)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        step()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler asks for it
        scheduler.step()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_gets_the_parameters_of_a_bare_loop(name: str, count: int) -> None:
    bare, ours = model(), model()
    optimizer = OPTIMIZERS[name](bare.parameters())
    train(bare, optimizer, optimizer.step)
    mine = OPTIMIZERS[name](ours.parameters())
    with servers(count) as made:
        worker = BareWorker(made, list(ours.parameters()), mine, shards=count)
        train(ours, mine, worker.step)
    for one, other in zip(bare.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_sparse_gradients_of_an_embedding(kind: Callable[..., torch.optim.Optimizer]) -> None:
    def table() -> nn.Embedding:
        torch.manual_seed(1)
        return nn.Embedding(11, 3, sparse=True).double()

    def look_up(rows: nn.Embedding, step: Callable[[], object]) -> None:
        generator = torch.Generator().manual_seed(5)
        for _ in range(10):
            rows.zero_grad()
            rows(torch.randint(0, 11, (6,), generator=generator)).square().sum().backward()
            step()

    bare, ours = table(), table()
    optimizer = kind(bare.parameters(), lr=0.1)
    look_up(bare, lambda: step_bare(optimizer))
    mine = kind(ours.parameters(), lr=0.1)
    with servers(2) as made:
        look_up(ours, BareWorker(made, list(ours.parameters()), mine, shards=3).step)
    torch.testing.assert_close(bare.weight, ours.weight, rtol=1e-9, atol=1e-12)


def one_parameter(value: float = 0.0) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    parameters = [nn.Parameter(torch.full((2,), value, dtype=torch.float64))]
    return parameters, torch.optim.SGD(parameters, lr=1.0)


def push_of(worker: BareWorker, key: PushKey, sender: Sender | None = None, **fields: Any) -> Push:
    return Push(sender or worker.sender, key, OPTIMIZER, (0,), ("dense",), **fields)


GRADIENT = torch.ones(2, dtype=torch.float64)


def test_a_change_happens_once() -> None:
    with servers() as [server]:
        worker = BareWorker([server], *one_parameter())
        first, again = Sender(0, 0), Sender(1, 4)
        assert answer(server, push_of(worker, PushKey(3, 0), first), GRADIENT).verdict == "applied"
        told, values = ask(server, push_of(worker, PushKey(3, 0), again, pull=(0,)), GRADIENT)
        assert (told.verdict, values[0].tolist()) == ("known", [-1, -1])
        assert answer(server, push_of(worker, PushKey(3, 1), again), GRADIENT).verdict == "applied"
        assert answer(server, push_of(worker, PushKey(7, 0, finished_below=5)), GRADIENT).verdict == "applied"
        assert answer(server, push_of(worker, PushKey(4, 9)), GRADIENT).verdict == "known"
        worker.pull()
        assert worker.parameters[0].tolist() == [-3, -3]


def test_the_dead_change_nothing() -> None:
    with servers() as [server]:
        worker = BareWorker([server], *one_parameter())
        answer(server, FenceWorker(Sender(0, 1)))
        for sender in (Sender(0, 0), Sender(0, 1)):
            assert answer(server, push_of(worker, PushKey(1, 0), sender), GRADIENT).verdict == "fenced"
            written = Assign(sender, PushKey(1, 1), (0,), (False,))
            assert answer(server, written, GRADIENT).verdict == "fenced"
            told, tensors = ask(server, Pull((0,), sender))
            assert (told.verdict, tensors) == ("fenced", [])
        assert answer(server, push_of(worker, PushKey(1, 0), Sender(0, 2)), GRADIENT).verdict == "applied"
        stats = answer(server, Statistics()).value
        assert (stats.pushes, stats.fenced) == (1, 4)


def test_values_written_by_hand() -> None:
    with servers() as [server]:
        count = slice_of(1, dtype=torch.int64)
        answer(server, CreateSlices((slice_of(0, 2), count)), torch.zeros(2).double(), torch.tensor(5))
        sender = Sender(0, 0)
        written = Assign(sender, PushKey(1, 0), (0, 1), (False, True))
        for expected in ("applied", "known"):
            assert answer(server, written, GRADIENT * 7, torch.tensor(2)).verdict == expected
        assert [tensor.tolist() for tensor in ask(server, Pull((0, 1)))[1]] == [[7, 7], 7]
        with pytest.raises(rd.InvalidArgumentError, match=r"each of 2 slices, got 1 of them and 2 marks"):
            server.handle(Assign(sender, PushKey(1, 1), (0, 1), (False, True)), [GRADIENT])


def test_what_has_not_changed_is_not_sent() -> None:
    with servers() as [server]:
        worker = BareWorker([server], *one_parameter())
        told, tensors = ask(server, Pull((0,)))
        assert len(tensors) == 1
        assert ask(server, Pull((0,), unless=told.version))[1] == []
        answer(server, push_of(worker, PushKey(1, 0)), GRADIENT)
        assert len(ask(server, Pull((0,), unless=told.version))[1]) == 1


def test_what_it_did_is_counted() -> None:
    with servers() as [server]:
        worker = BareWorker([server], *one_parameter())
        worker.pull()
        for key in range(3):
            answer(server, push_of(worker, PushKey(key, 0), read_version=1), GRADIENT)
        answer(server, push_of(worker, PushKey(0, 0)), GRADIENT)
        stats = answer(server, Statistics()).value
        assert (stats.server, stats.pulls, stats.pushes, stats.repeated) == (0, 1, 3, 1)
        assert (stats.bytes_pulled, stats.bytes_pushed) == (16, 48)
        assert stats.staleness == {0: 1, 1: 1, 2: 1}
        assert stats.version == 4
        assert stats.bytes_held == 16
        assert 0 < stats.apply_seconds < math.inf


def test_memory_that_a_server_may_have() -> None:
    with servers(memory=100_000) as [server]:
        answer(server, CreateSlices((slice_of(0, 10_000),)), torch.zeros(10_000).double())
        with pytest.raises(rd.InvalidArgumentError, match=r"server 0 is to hold 40,000 bytes more .* too few"):
            server.handle(CreateSlices((slice_of(1, 5_000),)), [torch.zeros(5_000).double()])


class Unheard(ServerRequest):
    pass


def test_what_it_does_not_know() -> None:
    with servers() as [server]:
        with pytest.raises(rd.InvalidArgumentError, match=r"a ServerRequest that they know, got Unheard"):
            server.handle(Unheard())
        with pytest.raises(rd.InvalidArgumentError, match=r"not number 3"):
            server.handle(Pull((3,)))
        with pytest.raises(rd.InvalidArgumentError, match=r'consistency must be "async"'), servers(1, "sync"):  # type: ignore[arg-type]
            pass
