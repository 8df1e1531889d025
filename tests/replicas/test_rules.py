"""Rules of strategies, with replicas as threads; `tests/strategies/test_central_storage.py` has them in processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch

import raydist as rd
from raydist.collectives.base import Communicator
from raydist.collectives.differentiable import all_gather
from raydist.mirroring.replica import MirrorReplica
from raydist.replicas.central_variables import CentralVariables
from raydist.replicas.rules import VariablesView
from tests.collectives.threads import run_ranks

T = TypeVar("T")

Make = Callable[[], Sequence[Any]]


def gather_objects(communicator: Communicator, value: Any) -> list[Any]:
    """Every rank's value."""
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = all_gather(communicator, torch.tensor([len(payload)]), 0, None).tolist()
    parts = all_gather(communicator, payload, 0, None).split(sizes)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


def on_ranks(world_size: int, make: Make, body: Callable[..., T]) -> list[T]:
    """`body(variables, *objects)` on every rank, with what `make` gives, mirrored; results in rank order."""

    def main(communicator: Communicator) -> T:
        objects = make()
        mirror = MirrorReplica(communicator.rank)
        mirror._applier.add(list(enumerate(objects)), [], {})
        rows = (1,) * world_size
        view = VariablesView(communicator, mirror, lambda value: gather_objects(communicator, value), lambda: rows)
        return body(view, *objects)

    return run_ranks(world_size, main)


def make(cls: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> Sequence[Any]:
    """A layer, the same on all ranks, and its optimizer."""
    layer = torch.nn.Linear(3, 2).double()
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    return [layer, layer.weight, layer.bias, cls(layer.parameters(), lr=0.25, **options)]  # type: ignore[call-arg]


def step(optimizer: torch.optim.Optimizer, count: int, carry_out: Callable[..., Any] | None = None) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.full_like(parameter, float(count))
    plain = type(optimizer).step
    carry_out(optimizer, lambda *args: plain(optimizer, *args)) if carry_out else plain(optimizer)


def by_hand(layer: torch.nn.Linear) -> None:
    layer.weight.data.mul_(0.5)


def alone(make: Callable[[], Sequence[Any]]) -> list[float]:
    layer, _, _, optimizer = make()
    for count in range(1, 5):
        by_hand(layer)
        step(optimizer, count)
        by_hand(layer)
    found: list[float] = layer.weight.flatten().tolist()
    return found


@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.SGD, torch.optim.Rprop])
def test_updates_are_applied_once(cls: type[torch.optim.Optimizer]) -> None:
    stepped: list[int] = []

    def body(variables: VariablesView, layer: Any, _w: Any, _b: Any, optimizer: Any) -> tuple[list[float], int, int]:
        rules = CentralVariables()

        def carry_out(owner: Any, plain: Callable[..., Any], *args: Any) -> Any:
            def counted() -> Any:
                stepped.append(variables.rank)
                return plain()

            return rules.step_optimizer(variables, owner, counted, *args)

        version = layer.weight._version
        for count in range(1, 5):
            by_hand(layer)
            step(optimizer, count, carry_out)
            by_hand(layer)
        return layer.weight.flatten().tolist(), layer.weight._version - version, len(optimizer.state)

    results = on_ranks(3, lambda: make(cls), body)
    assert [values for values, _, _ in results] == [pytest.approx(alone(lambda: make(cls)), rel=1e-12)] * 3
    assert stepped == [0] * 4, "only the first steps"
    assert all(versions > 0 for _, versions, _ in results)
    assert [states for _, _, states in results][1:] == [0, 0], "only the first has a state"


def test_a_layout_without_rows_in_order_is_kept() -> None:
    def columns() -> Sequence[Any]:
        weight = torch.nn.Parameter(torch.arange(6.0).view(3, 2).t())
        return [weight, torch.optim.SGD([weight], lr=1.0)]

    def body(variables: VariablesView, weight: Any, optimizer: Any) -> Any:
        step(optimizer, 1, lambda owner, plain: CentralVariables().step_optimizer(variables, owner, plain))
        return weight.tolist(), weight.stride()

    assert on_ranks(2, columns, body) == [([[-1.0, 1.0, 3.0], [0.0, 2.0, 4.0]], (1, 2))] * 2


class Counting(torch.optim.SGD):
    """Remembers a number, a list, and gives something back."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["history"] = [*state.get("history", []), torch.tensor(float(state["count"]))]
        return "given back"


def test_all_get_what_the_step_returned() -> None:
    def body(variables: VariablesView, _l: Any, weight: Any, _b: Any, optimizer: Any) -> tuple[Any, ...]:
        results = []

        def carry_out(owner: Any, plain: Callable[..., Any]) -> None:
            results.append(CentralVariables().step_optimizer(variables, owner, plain))

        for count in range(1, 4):
            step(optimizer, count, carry_out)
        return results, optimizer.state[weight].get("count")

    expected = ["given back"] * 3
    assert on_ranks(2, lambda: make(Counting, momentum=0.5), body) == [(expected, 3), (expected, None)]


def test_a_closure_gives_every_replica_the_state() -> None:
    def body(variables: VariablesView, _l: Any, weight: Any, _b: Any, optimizer: Any) -> tuple[Any, ...]:
        rules = CentralVariables()
        step(optimizer, 1, lambda owner, plain: rules.step_optimizer(variables, owner, plain))
        step(optimizer, 2, lambda owner, plain: rules.step_optimizer(variables, owner, plain, lambda: None))
        return weight.tolist(), optimizer.state[weight]["exp_avg"].tolist(), optimizer.state[weight]["step"].item()

    one, other = on_ranks(2, make, body)
    assert one == other
    assert one[2] == 2


def test_replicas_that_step_different_optimizers_are_told() -> None:
    def two() -> Iterator[Any]:
        layer, weight, bias, adam = make()
        yield from (layer, weight, bias, adam, torch.optim.SGD([weight], lr=0.1))

    def body(variables: VariablesView, *objects: Any) -> None:
        rules = CentralVariables()
        rules.step_optimizer(variables, objects[3 + variables.rank], lambda: None)

    message = r"they called: replica 0: optimizer.step\(\) of Adam 0; replica 1: optimizer.step\(\) of SGD 1"
    with pytest.raises(rd.CollectiveMismatchError, match=message):
        on_ranks(2, lambda: list(two()), body)
