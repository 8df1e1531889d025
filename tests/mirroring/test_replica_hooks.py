"""Steps on a replica: what they must not do, noted optimizer steps, and warnings of changes to captured objects."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raydist.core.errors import FailedPreconditionError
from raydist.core.values import PerReplica
from raydist.mirroring.function_cache import ClosureMutationCheck
from raydist.mirroring.handles import ReplicaTable
from raydist.mirroring.replica_hooks import OptimizerLog, note_steps
from tests.mirroring.in_process import Mirror, linear


def test_new_parameters_and_modules_in_a_mirrored_module(mirror: Mirror) -> None:
    layer: Any = linear(mirror)
    other = linear(mirror)

    def step() -> int:
        own = nn.Sequential(nn.Linear(1, 1))
        layer.activation = nn.ReLU()
        layer.weight = other.weight
        layer.bias = None
        return len(list(own.parameters()))

    assert mirror.run(step) == [2, 2]
    assert layer.weight is other.weight
    with pytest.raises(FailedPreconditionError, match="a step registered 'head' in Linear"):
        mirror.run(lambda: layer.add_module("head", nn.Linear(1, 1)))
    with pytest.raises(FailedPreconditionError, match="a step registered 'bias' in Linear"):
        mirror.run(lambda: setattr(layer, "bias", nn.Parameter(torch.zeros(1))))


def test_a_module_that_a_step_moves_is_named_and_stays(mirror: Mirror, layer: nn.Linear) -> None:
    mirror.run(lambda: layer.training)
    for step in (lambda: nn.Sequential(layer).to("meta"), lambda: layer.to(torch.device("meta"))):
        with pytest.raises(FailedPreconditionError, match=r"\(cpu\); a step moves a Linear to meta. Leave out .to"):
            mirror.run(step)
    assert layer.weight.tolist() == [[1.0, 2.0]]
    mirror.run(lambda: layer.to("cpu"))
    mirror.run(lambda: nn.Sequential(nn.Linear(1, 1)).to("meta"))
    layer.to("cpu")
    assert nn.Linear(1, 1).to("meta").weight.is_meta


def test_a_scheduler_made_elsewhere_does_not_warn() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    steps: list[int] = []
    note_steps(optimizer, lambda: steps.append(1))
    note_steps(optimizer, lambda: steps.append(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert parameter.item() == 0.0
    assert optimizer._opt_called is True  # type: ignore[attr-defined]
    assert steps == [1]


def sgd() -> torch.optim.SGD:
    parameter = torch.ones(2, requires_grad=True)
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.5)


class Own(torch.optim.Optimizer):
    """One of a user's, which counts its steps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.steps += 100


def test_hooks_and_methods_of_the_program_are_called() -> None:
    optimizer = sgd()
    note_steps(optimizer, lambda: None)
    called: list[str] = []
    optimizer.step()
    optimizer.register_step_pre_hook(lambda *told: called.append("before"))
    optimizer.register_step_post_hook(lambda *told: called.append("after"))
    optimizer.step()
    assert called == ["before", "after"]
    assert optimizer.param_groups[0]["params"][0].tolist() == [0, 0]
    own = Own([torch.ones(2, requires_grad=True)])
    note_steps(own, lambda: None)
    own.step()
    own.zero_grad()
    assert own.steps == 101
    ghost = weakref.ref(own)
    del own
    gc.collect()
    assert ghost() is None


def test_gradients_are_cleared_as_torch_does_it_and_profiles_name_step_and_zero_grad() -> None:
    optimizer = sgd()
    (parameter,) = optimizer.param_groups[0]["params"]
    note_steps(optimizer, lambda: None)
    with torch.profiler.profile(acc_events=True) as profile:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert parameter.grad.tolist() == [0, 0]
    optimizer.zero_grad()
    assert parameter.grad is None
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= {
        event.key for event in profile.key_averages()
    }


def test_rates_of_every_group_of_every_optimizer() -> None:
    table = ReplicaTable()
    log = OptimizerLog(table)
    assert log.rates() == ()
    weight, bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups: list[dict[str, Any]] = [{"params": [weight], "lr": 0.5}, {"params": [bias]}]
    table.add(0, torch.optim.SGD(groups, lr=0.25))
    table.add(1, weight)
    adam = torch.optim.Adam([bias], lr=torch.tensor(2.0))
    table.add(2, adam)
    assert log.rates() == (0.5, 0.25, 2.0)
    adam.param_groups[0]["lr"] = 3.0
    assert log.rates() == (0.5, 0.25, 3.0)


COUNT = 0

RATE = 0.1


class Trainer:
    """Counts in Python attributes, one of them deep inside."""

    def __init__(self) -> None:
        self.count = 0
        self.seen = {"rows": [1, 2]}

    def step(self, how: str = "count") -> None:
        if how == "count":
            self.count += 1
        elif how == "deep":
            self.seen["rows"].append(3)


@dataclasses.dataclass(slots=True)
class Slotted:
    count: int = 0


def nobody(_: Any) -> bool:
    return False


def changes() -> dict[str, tuple[Callable[[], object], str]]:
    """Functions by what they change, each with the name of that."""
    losses: list[float] = []
    table: dict[str, Any] = {"n": 0}
    names: set[str] = set()
    recent: deque[int] = deque(maxlen=1)
    history, weights, trainer, number, slotted = np.zeros(3), torch.zeros(2), Trainer(), 0, Slotted()

    def rebind() -> None:
        nonlocal number
        number += 1

    def count() -> None:
        global COUNT
        COUNT += 1

    def keep(seen: list[int] = []) -> None:  # noqa: B006  # that is what is tested
        seen.append(1)

    return {
        "list": (lambda: losses.append(1.0), "losses"),
        "value": (lambda: table.update(n=table["n"] + 1), "table['n']"),
        "new key": (lambda: table.setdefault("m", 1), "table"),
        "set": (lambda: names.add("a"), "names"),
        "deque": (lambda: recent.append(1), "recent"),
        "array": (lambda: history.__setitem__(1, 2.0), "history"),
        "tensor": (lambda: weights.add_(1), "weights"),
        "attribute": (trainer.step, "self.count"),
        "deep": (functools.partial(trainer.step, "deep"), "self.seen['rows']"),
        "object": (lambda: trainer.step(), "trainer.count"),
        "slot": (lambda: setattr(slotted, "count", 1), "slotted.count"),
        "variable": (rebind, "number"),
        "global": (count, "COUNT"),
        "default": (keep, "seen"),
    }


def test_changed_objects_are_named() -> None:
    for case, (function, name) in changes().items():
        captures = ClosureMutationCheck(function, nobody)
        assert captures.changed() == "", case
        function()
        assert captures.changed() == name, case


def test_objects_that_are_read_shared_or_imported_are_not_changed() -> None:
    losses, trainer, missing = [1.0, float("nan")], Trainer(), torch.zeros(2)

    def step() -> float:
        local = list(losses)
        local.append(RATE)
        return sum(local) + trainer.count + float(missing.sum())

    captures = ClosureMutationCheck(step, nobody)
    step()
    assert captures.changed() == ""
    shared, loop = Trainer(), list[Any]()
    loop.append(loop)
    captures = ClosureMutationCheck(lambda: (shared, loop, nn.Linear, np, changes), lambda obj: obj is shared)
    shared.step()
    assert captures.changed() == ""


def test_checks_become_rare_and_warn_once() -> None:
    seen: list[int] = []

    def step(number: int) -> None:
        if number > 5:
            seen.append(number)

    watch = ClosureMutationCheck(step, nobody)
    said = []
    for number in range(1, 200):
        step(number)
        said.append(watch.after_run())
    assert [number for number, text in enumerate(said, 1) if text] == [10]
    assert f"The step function 'step' ({__file__}:" in said[9]
    assert "changed seen: the program's own stays as it is" in said[9]


class Odd:
    """Whoever looks into it gets an error."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise ZeroDivisionError
        return super().__getattribute__(name)


def test_odd_objects_fail_no_step() -> None:
    odd = Odd()
    assert ClosureMutationCheck(lambda: odd, nobody).after_run() == ""
    later: list[Any] = []
    watch = ClosureMutationCheck(lambda: later, nobody)
    later.append(odd)
    assert "changed later" in watch.after_run()


def test_replica_zero_reports_once(mirror: Mirror, layer: nn.Linear) -> None:
    losses: list[float] = []

    def step(scale: float) -> None:
        losses.append(scale * layer.weight.sum().item())

    for _ in range(3):
        mirror.run(step, PerReplica([1.0, 2.0]))
    assert losses == []
    remarks = mirror.replicas[0].take_remarks()
    assert len(remarks) == 1
    assert "'step'" in remarks[0]
    assert "changed losses" in remarks[0]
    assert [replica.take_remarks() for replica in mirror.replicas] == [(), ()]
    losses.append(0.0)  # another pickle of the same function
    mirror.run(step, PerReplica([1.0, 2.0]))
    assert mirror.replicas[0].take_remarks() == ()
