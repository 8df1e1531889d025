"""Coordinator, mirrored objects and parameter servers together, in one process: what a program sees."""

from __future__ import annotations

import copy
import gc
import time
from typing import Any

import pytest
import torch
from torch import nn

import raydist as rd
from raydist.parameter_servers.requests import Arrive, BeginClosure, Pull, PushKey, Sender
from tests.coordinator.ps_in_process import local_strategy


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)) for _ in range(count)]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, dtype=torch.float64), nn.Tanh(), nn.Linear(8, 2, dtype=torch.float64))


def test_one_worker_trains_as_a_bare_loop_does_with_what_the_driver_does_between_steps() -> None:
    bare = model_of()
    expected = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for number, (x, y) in enumerate(batches(12)):
        expected.param_groups[0]["lr"] = 0.01 / (1 + number)
        expected.zero_grad()
        (bare(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
        expected.step()
        if number == 5:
            with torch.no_grad():
                next(bare.parameters()).mul_(0.5)
    with local_strategy(1, 2) as here:
        with here.mirror.scope():
            model = model_of()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(x) - y).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return loss

        for number, (x, y) in enumerate(batches(12)):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            here.schedule(step, x, y)
            if number == 5:
                with torch.no_grad():
                    next(model.parameters()).mul_(0.5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, bare.state_dict()[name], rtol=1e-9, atol=0)
        remembered = copy.deepcopy(optimizer.state_dict())
    for number, state in expected.state_dict()["state"].items():
        torch.testing.assert_close(remembered["state"][number]["exp_avg"], state["exp_avg"], rtol=1e-9, atol=1e-15)


def test_every_update_of_two_workers_is_applied_once_though_one_dies() -> None:
    with local_strategy(2) as here:
        with here.mirror.scope():
            weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
            optimizer = torch.optim.SGD([weight], lr=1.0)

        def step(amount: float) -> float:
            weight.grad = torch.full_like(weight, -amount)
            optimizer.step()
            time.sleep(0.001)
            return amount

        values = [here.schedule(step, float(2**number % 1009)) for number in range(60)]
        values[5].get()
        here.port.kill(1)
        values += [here.schedule(step, float(2**number % 1009)) for number in range(60, 100)]
        assert sum(value.get() for value in values) == weight[0].item() == weight[2].item()
        assert here.port.num_replaced == 1


def test_steps_do_not_wait_for_what_a_dead_worker_was_to_push() -> None:
    with local_strategy(2, num_servers=2, consistency=rd.SyncWithBackups(0)) as here:
        client, worker = here.side._client, Sender(0, 0)
        client.ask(0, BeginClosure(worker, 0))
        assert client.ask(0, Arrive(worker, PushKey(0, 0), 0)).completes == 1
        here.side.fence(0, 0)
        assert [answer.step for answer in client.ask_all(Pull(()))] == [1, 1]


def test_rows_of_embeddings_are_those_of_torch_and_go_on_with_another_number_of_servers() -> None:
    """A sharded embedding beside torch's own sparse one, both on servers, both as in a bare loop."""
    rows, ids = torch.arange(30), torch.randint(0, 30, (12, 4, 3), generator=torch.Generator().manual_seed(0))
    first = rd.ShardedEmbedding(30, 2, dtype=torch.float64, seed=1)(rows).detach()
    bare = nn.EmbeddingBag(30, 2, mode="sum", sparse=True, _weight=first.clone())
    expected = torch.optim.Adagrad(bare.parameters(), lr=0.1)

    def bare_step(bags: torch.Tensor) -> None:
        expected.zero_grad()
        bare(bags).square().sum().backward()
        with torch.sparse.check_sparse_tensor_invariants():
            expected.step()

    exported = None
    for half, num_servers in ((ids[:6], 2), (ids[6:], 3)):
        for bags in half:
            bare_step(bags)
        with local_strategy(1, num_servers) as here:
            with here.mirror.scope():
                table = rd.ShardedEmbedding(30, 2, "sum", dtype=torch.float64, seed=1)
                optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)

            def step(
                bags: torch.Tensor, table: nn.Module = table, optimizer: torch.optim.Optimizer = optimizer
            ) -> None:
                optimizer.zero_grad()
                table(bags).square().sum().backward()
                optimizer.step()

            if exported is not None:
                table.import_rows(exported)
            for bags in half:
                here.schedule(step, bags)
            with torch.no_grad():
                torch.testing.assert_close(table(rows[:, None]), bare.weight.detach(), rtol=1e-9, atol=1e-12)
            exported = table.export_rows()
            assert len(exported) == num_servers
            twin = copy.deepcopy(table)  # a plain one, with the servers' rows
            assert torch.equal(twin(rows[:, None]), table(rows[:, None]))
            with pytest.raises(rd.FailedPreconditionError, match="must be computed where its strategy runs steps"):
                table(rows[:, None]).sum().backward()


def test_a_sparse_embedding_of_torch_is_served() -> None:
    kinds: list[Any] = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam]
    bare = [nn.Embedding(20, 3, sparse=True, dtype=torch.float64) for _ in kinds]
    first, ids = [table.weight.detach().clone() for table in bare], torch.randint(0, 20, (8, 5))

    def step(numbers: torch.Tensor, tables: Any, optimizers: Any) -> None:
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(numbers).square().sum().backward()
            with torch.sparse.check_sparse_tensor_invariants(False):
                optimizer.step()

    def optimizers_of(tables: list[nn.Embedding]) -> list[Any]:
        return [kind(table.parameters(), lr=0.1) for kind, table in zip(kinds, tables, strict=True)]

    expected = optimizers_of(bare)
    for numbers in ids:
        step(numbers, bare, expected)
    with local_strategy(1, 2, partitioner=rd.FixedShardsPartitioner(2)) as here:
        with here.mirror.scope():
            tables = [nn.Embedding(20, 3, sparse=True, _weight=weight) for weight in first]
            optimizers = optimizers_of(tables)
        for numbers in ids:
            here.schedule(lambda numbers: step(numbers, tables, optimizers), numbers)
        for table, other in zip(tables, bare, strict=True):
            torch.testing.assert_close(table.weight.detach(), other.weight.detach(), rtol=1e-9, atol=1e-12)


def test_servers_let_go_of_what_the_program_has_dropped_and_of_nothing_else() -> None:
    with local_strategy(2, 2) as here:
        with here.mirror.scope():
            kept = model_of()
            optimizer = torch.optim.Adam(kept.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            optimizer.zero_grad()
            (kept(x) - y).square().mean().backward()
            optimizer.step()

        def train_another() -> None:
            with here.mirror.scope():
                model = nn.Linear(4, 2, dtype=torch.float64)
                rows = rd.ShardedEmbedding(100, 2, dtype=torch.float64)
                other = torch.optim.Adam([*model.parameters(), *rows.parameters()], lr=0.01)

            def step(x: torch.Tensor, y: torch.Tensor) -> None:
                other.zero_grad()
                (model(x) + rows(torch.arange(8)) - y).square().mean().backward()
                other.step()

            for x, y in batches(4):
                here.schedule(step, x, y)
            here.coordinator.join()

        for x, y in batches(3):
            here.schedule(step, x, y)
        here.coordinator.join()
        before = [server.stats.bytes_held for server in here.servers]
        train_another()
        assert sum(server.stats.bytes_held for server in here.servers) > sum(before)
        gc.collect()
        for x, y in batches(3):
            here.schedule(step, x, y)
        here.coordinator.join()
        assert [server.stats.bytes_held for server in here.servers] == before
        assert sum(here.side._loads) == sum(each.numel() * 8 for each in kept.parameters())
        with pytest.raises(rd.InvalidArgumentError, match="must be created before"):
            here.servers[0].handle(Pull((99,)))
        for x, y in batches(2):
            here.schedule(step, x, y).get()


def test_a_parameter_that_is_dropped_leaves_its_optimizers_other_options_alone() -> None:
    with local_strategy(1) as here:
        with here.mirror.scope():
            first, second = (nn.Linear(2, 2, dtype=torch.float64) for _ in range(2))
            optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)

        def step(*models: nn.Module) -> None:
            optimizer.zero_grad()
            for model in models:
                model(torch.ones(1, 2, dtype=torch.float64)).square().sum().backward()
            optimizer.step()

        here.schedule(step, first, second)
        optimizer.param_groups[0]["lr"] = 0.5
        here.schedule(step, first, second)
        here.coordinator.join()
        before = here.servers[0].stats.bytes_held
        optimizer.param_groups[0]["params"] = list(first.parameters())
        for parameter in second.parameters():
            optimizer.state.pop(parameter, None)
        del second, parameter
        gc.collect()
        for _ in range(2):
            here.schedule(step, first)
            here.coordinator.join()
        assert here.servers[0].stats.bytes_held < before
        values = first.weight.detach().clone()
        here.schedule(step, first)
        assert float((first.weight.detach() - values).abs().max()) > 0.05  # steps of 0.5, not of 0.01


def test_what_is_refused_leaves_nothing_and_others_go_on() -> None:
    """As in a notebook: the cell is written anew and run again, whether its objects are still held or not."""

    def partitioner(shape: tuple[int, ...], dtype: Any) -> Any:
        return "half" if 3 in shape else [1] * len(shape)

    with local_strategy(2, partitioner=partitioner, memory=100_000) as here:

        def train(model: nn.Module, optimizer: Any) -> float:
            def step() -> float:
                model.zero_grad()
                model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
                optimizer.step()
                return next(model.parameters()).sum().item()

            found: float = here.schedule(step).get()
            return found

        def good() -> tuple[nn.Module, Any]:
            with here.mirror.scope():
                model = nn.Linear(2, 2, dtype=torch.float64)
                nn.init.ones_(model.weight)
                return model, torch.optim.SGD(model.parameters(), lr=0.5)

        def bad(sizes: tuple[int, int]) -> tuple[nn.Module, Any]:
            with here.mirror.scope():
                model = nn.Linear(*sizes, dtype=torch.float64)
                return model, torch.optim.LBFGS(model.parameters()) if sizes == (2, 2) else None

        before, held = good(), []
        assert train(*before) == 2.0
        for sizes, message, keep in (
            *(((2, 2), "LBFGS", True), ((2, 2), "LBFGS", False)),
            *(((2, 3), "half", False), ((1000, 1000), r"[\d,]+ bytes", True)),
        ):
            made = bad(sizes)
            with pytest.raises(rd.RaydistError, match=message):
                here.schedule(lambda made=made: (made[0].training, made[1] is None))
            held += [made] if keep else []
            del made
            gc.collect()
            assert train(*good()) == 2.0
        assert train(*before) == 0.0
