"""Workers and servers in one process; `tests/actors/test_parameter_servers.py` has them in actors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import raydist as rd
from raydist.parameter_servers.consistency import SyncWithBackups
from raydist.parameter_servers.slices import FixedShardsPartitioner
from tests.replicas.ps.ps_workers import servers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True, momentum=0.5),
}


def make(kind: str = "sgd") -> Sequence[Any]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    return [model, OPTIMIZERS[kind](model.parameters())]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs = torch.randn(8, 5, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 3, (8,), generator=generator)


def train(model: Any, optimizer: Any, *, number: int) -> float:
    inputs, labels = batch(number)
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return float(loss.detach())


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(one, other, strict=True))


def test_one_worker_trains_as_a_bare_loop_does() -> None:
    for kind, count in zip(OPTIMIZERS, (1, 3, 2, 3, 2), strict=True):
        bare = make(kind)
        with servers(count) as made:
            worker = made.worker(functools.partial(make, kind), partitioner=FixedShardsPartitioner(count))
            model, optimizer = worker.objects
            addresses = [parameter.data_ptr() for parameter in model.parameters()]
            for number in range(8):
                if number == 5:
                    for each in (bare[1], optimizer):
                        each.param_groups[0]["lr"] = 0.03
                loss = worker.run(lambda *objects, number=number: train(*objects, number=number))
                assert loss == pytest.approx(train(*bare, number=number), rel=1e-9), kind
                assert close(values(model), values(bare[0])), kind
            assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
            assert not optimizer.state
            worker.rules.before_read(worker.held, states=True)
            mine, theirs = optimizer.state_dict()["state"], bare[1].state_dict()["state"]
            for name in theirs.get(0, {}):
                assert all(torch.allclose(mine[place][name], theirs[place][name]) for place in theirs), (kind, name)


def test_without_prefetch_every_closure_pulls() -> None:
    with servers() as made:
        one, two = made.worker(make), made.worker(make, prefetch_pulls=False)
        one.run(lambda *objects: train(*objects, number=0))
        two.run(lambda *objects: None)
        assert close(values(one.objects[0]), values(two.objects[0]))


def test_what_is_written_by_hand_is_everybodys() -> None:
    def clip(model: Any, optimizer: Any) -> None:
        model[0].weight.data.clamp_(-0.01, 0.01)
        with torch.no_grad():
            model[2].bias.fill_(4)
        model[2].weight.data = torch.ones(3, 7, dtype=torch.float64)

    with servers(2) as made:
        one, two = made.worker(make), made.worker(make)
        one.run(clip)
        two.run(lambda *objects: None, seen=one.rules.versions())
        assert two.objects[0][0].weight.abs().max() == 0.01
        assert two.objects[0][2].bias.tolist() == [4] * 3
        assert two.objects[0][2].weight.sum() == 21

        def clip_and_train(model: Any, optimizer: Any) -> None:
            clip(model, optimizer)
            train(model, optimizer, number=0)

        bare = make()
        clip_and_train(*bare)
        two.run(lambda model, optimizer: model.load_state_dict(make()[0].state_dict()) and None)
        two.run(clip_and_train)
        assert close(values(two.objects[0]), values(bare[0]))


def with_norm() -> Sequence[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)).double()
    return [model, torch.optim.SGD(model.parameters(), lr=0.1)]


def test_who_adds_to_a_counter_does_not_take_what_it_holds_for_what_it_is() -> None:
    def count(*objects: Any) -> None:
        objects[0][1].num_batches_tracked += 1

    with servers(2) as made:
        one, two = made.worker(with_norm), made.worker(with_norm)
        for worker in (one, two, one, two, two):
            worker.run(count)
        newest = [max(versions) for versions in zip(one.rules.versions(), two.rules.versions(), strict=True)]
        for worker in (one, two):
            worker.run(lambda *objects: None, seen=newest)
            assert worker.objects[0][1].num_batches_tracked == 5


def test_what_a_closure_wrote_that_runs_again_counts_once_for_its_worker_too() -> None:
    def double(model: Any, optimizer: Any) -> None:
        with torch.no_grad():
            model[0].bias.fill_(2.0).mul_(model[1].running_var)
            model[1].running_var.mul_(2.0)

    with servers() as made:
        one, two = made.worker(with_norm), made.worker(with_norm)
        one.run(double, closure=50)
        two.rules.before_read(two.held, states=False)
        two.run(double, closure=50)
        two.rules.before_read(two.held, states=False)
        assert two.objects[0][1].running_var.tolist() == [2.0] * 3
        assert two.objects[0][0].bias.tolist() == [2.0] * 3


def test_parameters_without_a_gradient_stay_as_they_are() -> None:
    def half(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model[0](torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        versions = [parameter._version for parameter in model[2].parameters()]
        optimizer.step()
        assert [parameter._version for parameter in model[2].parameters()] == versions
        optimizer.zero_grad()
        optimizer.step()

    bare = make("adamw")
    half(*bare)
    with servers(2) as made:
        worker = made.worker(lambda: make("adamw"))
        before = [parameter._version for parameter in worker.objects[0].parameters()]
        worker.run(half)
        assert close(values(worker.objects[0]), values(bare[0]))
        after = [parameter._version for parameter in worker.objects[0].parameters()]
        assert [now > then for now, then in zip(after, before, strict=True)] == [True, True, False, False]


def test_a_closure_that_runs_again_may_find_other_things_to_write() -> None:
    def rise_and_halve(model: Any, optimizer: Any) -> None:
        if model[2].bias.max() > 50:
            model[2].bias.data.mul_(0.5)
        model[2].bias.grad = torch.full_like(model[2].bias, -1000.0)
        optimizer.step()

    with servers(2) as made:
        one, two = made.worker(make), made.worker(make)
        one.run(rise_and_halve, closure=7)
        two.run(rise_and_halve, closure=7, seen=one.rules.versions())
        assert two.objects[0][2].bias.max() < 60  # the step, once, and halved


def test_what_cannot_be_served_is_told() -> None:
    def buffers(**found: torch.Tensor) -> Sequence[Any]:
        model = torch.nn.Module()
        for name, buffer in found.items():
            model.register_buffer(name, buffer)
        return [model]

    whole, layer = torch.zeros(4), torch.nn.Linear(2, 2)
    makes: list[tuple[Callable[[], Sequence[Any]], str]] = [
        (lambda: buffers(one=whole[:3], two=whole[1:]), r"one and two overlap"),
        (lambda: buffers(one=torch.eye(2).to_sparse()), r"dense tensors .* but one is of layout"),
        (lambda: [layer, torch.optim.LBFGS(layer.parameters())], r"LBFGS demands a closure"),
    ]
    for objects, message in makes:
        with servers() as made, pytest.raises(rd.InvalidArgumentError, match=message):
            made.worker(objects)
    with servers() as made:
        worker = made.worker(make)
        with pytest.raises(rd.InvalidArgumentError, match=r"SGD.step must be called without arguments"):
            worker.run(lambda model, optimizer: optimizer.step(lambda: 1.0))


def test_what_a_failed_closure_did_before_counts() -> None:
    def fail(model: Any, optimizer: Any) -> None:
        train(model, optimizer, number=0)
        model[0].weight.data.mul_(2)
        raise KeyError("bad")

    bare = make()
    with pytest.raises(KeyError):
        fail(*bare)
    with servers(2) as made:
        one, two = made.worker(make), made.worker(make)
        with pytest.raises(KeyError):
            one.run(fail)
        two.run(lambda *objects: None, seen=one.rules.versions())
        assert close(values(two.objects[0]), values(bare[0]))
        one.run(lambda *objects: train(*objects, number=1))
        train(*bare, number=1)
        assert close(values(one.objects[0]), values(bare[0]))


def test_a_look_that_fails_leaves_nothing_behind() -> None:
    with servers() as made:
        worker = made.worker(make)
        worker.run(lambda *objects: None)
        worker.rules.before_read(worker.held, states=False)
        worker.objects[0][0].weight.data.fill_(9)
        worker.rules.after_failure(worker.held)
        worker.run(lambda *objects: None)
        assert close(values(worker.objects[0]), values(make()[0]))


def in_threads(*bodies: Callable[[], Any]) -> None:
    with ThreadPoolExecutor(len(bodies)) as pool:
        for begun in [pool.submit(body) for body in bodies]:
            begun.result(60)


def test_steps_apply_the_mean_of_all_gradients() -> None:
    steps = 5
    bare = make()
    for number in range(steps):
        bare[1].zero_grad()
        for half in range(2):
            inputs, labels = batch(2 * number + half)
            (F.cross_entropy(bare[0](inputs), labels) / 2).backward()
        bare[1].step()

    with servers(2, SyncWithBackups(0)) as made:
        workers = [made.worker(make) for _ in range(2)]
        first = threading.Barrier(2)

        def body(rank: int) -> None:
            def all_steps(model: Any, optimizer: Any) -> None:
                first.wait(20)
                for number in range(steps):
                    inputs, labels = batch(2 * number + rank)
                    optimizer.zero_grad()
                    F.cross_entropy(model(inputs), labels).backward()
                    optimizer.step()

            workers[rank].run(all_steps)

        in_threads(lambda: body(0), lambda: body(1))
        for worker in workers:
            assert close(values(worker.objects[0]), values(bare[0]))
