from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.optimizers import (
    has_fused_layout,
    may_fuse,
    require_elementwise,
    state_bytes_per_byte,
)
from raydist.parameter_servers.requests import OptimizerGroup, Push, PushKey, Sender
from raydist.parameter_servers.server_optimizer import PushedRows, ServerGradients, ServerOptimizer, read_gradients
from raydist.parameter_servers.server_slices import PsSlices
from tests.parameter_servers.examples import slice_of, slices_of_zeros


def test_one_pass_is_for_those_that_have_it_and_were_not_told_otherwise() -> None:
    class Own(torch.optim.SGD):
        pass

    free = {"fused": None, "foreach": None}
    for kind, options, dtype, expected in (
        (torch.optim.AdamW, free, torch.float64, True),
        (torch.optim.AdamW, free | {"fused": False}, torch.float64, False),
        (torch.optim.AdamW, free | {"foreach": True}, torch.float64, False),
        (torch.optim.AdamW, free, torch.bfloat16, False),
        (torch.optim.RMSprop, {"foreach": None}, torch.float32, False),
        (Own, free, torch.float32, False),
    ):
        assert may_fuse(kind, options, [dtype]) is expected, (kind, options, dtype)


def test_a_step_of_torchs_does_not_load_its_compiler() -> None:
    program = """
import sys, torch
from raydist.parameter_servers.optimizers import reason_not_elementwise
options = dict(lr=0.1, momentum=0.9, dampening=0, weight_decay=0.1, nesterov=False, maximize=False)
options |= dict(foreach=None, differentiable=False, fused=None)
print(reason_not_elementwise(torch.optim.SGD, options))
print([name for name in sys.modules if name == "torch._dynamo"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["None", "[]"]


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse()


@pytest.mark.parametrize(
    ("gradient", "state", "expected"),
    [
        (torch.ones(2, 3), {}, True),
        (torch.ones(2, 3), {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)}, True),
        (torch.ones(2, 3), {"momentum_buffer": None}, True),
        (torch.ones(3, 2).t(), {}, False),
        (rows_of(torch.ones(2, 3)), {}, False),
        (torch.ones(2, 3), {"exp_avg": torch.ones(3, 2).t()}, False),
        (torch.ones(2, 3), {"exp_avg": torch.ones(2, 3).double()}, False),
        (torch.ones(2, 3), {"exp_avg": torch.ones(3)}, False),
        (torch.ones(2, 3), {"exp_avg": torch.tensor(1.0)}, False),
        (torch.ones(2, 3), {"exp_avg": rows_of(torch.ones(2, 3))}, False),
        (torch.ones(2, 3), {"step": 3}, False),
    ],
)
def test_one_pass_is_for_what_lies_as_the_value_does(
    gradient: torch.Tensor, state: dict[str, Any], expected: bool
) -> None:
    assert has_fused_layout(torch.zeros(2, 3), gradient, state) is expected


Parameters = list[torch.nn.Parameter]

Make = Callable[[Parameters], torch.optim.Optimizer]

o = torch.optim

ELEMENTWISE: dict[str, Make] = {
    "SGD": lambda p: o.SGD(p, lr=0.1),
    "momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "maximize": lambda p: o.SGD(p, lr=0.1, maximize=True),
    "Adagrad": lambda p: o.Adagrad(p),
    "Adam": lambda p: o.Adam(p),
    "AdamW": lambda p: o.AdamW(p, weight_decay=0.1),
    "amsgrad": lambda p: o.Adam(p, amsgrad=True),
    "capturable": lambda p: o.Adam(p, capturable=True),
    "lr as tensor": lambda p: o.Adam(p, lr=torch.tensor(0.1)),
    "RMSprop": lambda p: o.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: o.Rprop(p),
    "NAdam": lambda p: o.NAdam(p),
    "RAdam": lambda p: o.RAdam(p),
    "Adamax": lambda p: o.Adamax(p),
    "Adadelta": lambda p: o.Adadelta(p),
    "ASGD": lambda p: o.ASGD(p),
    "SparseAdam": lambda p: o.SparseAdam(p),
}


class Lars(o.Optimizer):
    """Scales each variable's step by the ratio of two norms over all of it."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm()
                    parameter.add_(parameter.grad, alpha=-float(group["lr"] * ratio))


class Scaled(o.Optimizer):
    """Has an attribute that no pickle of an optimizer keeps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale = 2.0

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-self.scale)


class Counting(o.SGD):
    """Counts its steps beside the parameters, not with one."""

    def step(self, closure: Any = None) -> Any:
        state: Any = self.state
        state["steps"] = {"number": state["steps"].get("number", 0) + 1}
        return super().step(closure)


REFUSED: dict[str, tuple[Make, str]] = {
    "LBFGS": (lambda p: o.LBFGS(p), r"but LBFGS demands a closure in step\(\). Use torch.optim.SGD"),
    "Adafactor": (
        lambda p: o.Adafactor(p),
        r"but Adafactor updates rows of a variable differently if they are on different servers",
    ),
    "Muon": (lambda p: o.Muon(p), r"but Muon updates rows"),
    "LARS": (lambda p: Lars(p), r"but Lars updates rows"),
    "LARS that warms up": (lambda p: Lars(p, lr=0.0), r"but Lars updates rows"),
    "state of no parameter": (lambda p: Counting(p), r"but Counting keeps state 'steps' that belongs to no parameter"),
    "more than a pickle keeps": (lambda p: Scaled(p), r"Scaled could not step .* \(AttributeError: .*'scale'\)"),
}


def parameters() -> Parameters:
    return [torch.nn.Parameter(torch.randn(3, 2))]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_is_elementwise_is_taken(name: str) -> None:
    require_elementwise(ELEMENTWISE[name](parameters()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_refused_with_the_reason(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(rd.InvalidArgumentError, match=message):
        require_elementwise(make(parameters()))


def test_every_group_is_tried() -> None:
    class LarsForSome(Lars):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["scaled"]:
                super().step()

    groups = [{"params": parameters(), "scaled": False}, {"params": parameters(), "scaled": True}]
    with pytest.raises(rd.InvalidArgumentError, match="LarsForSome updates rows"):
        require_elementwise(LarsForSome(groups))


def test_the_trial_leaves_no_trace() -> None:
    optimizer = o.Adam(parameters())
    before = optimizer.state_dict()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    require_elementwise(optimizer)
    assert torch.equal(torch.rand(1), expected)
    assert optimizer.state_dict() == before
    assert optimizer.param_groups[0]["params"][0].grad is None


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (lambda p: o.SGD(p, lr=0.1), 0),
        (lambda p: o.Adam(p, amsgrad=True), 3),
        (lambda p: o.Adagrad(p), 1),
        (lambda p: o.SparseAdam(p), 2),
        (lambda p: Scaled(p), 0),
    ],
)
def test_what_is_remembered_for_each_byte(make: Make, share: float) -> None:
    optimizer = make(parameters())
    assert state_bytes_per_byte(type(optimizer), optimizer.param_groups[0]) == share


def push_of(*forms: Any, tables: tuple[int, ...] = ()) -> Push:
    return Push(Sender(0, 0), PushKey(0, 0), 0, tuple(range(len(forms))), forms, tables=tables)


def doubles(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def test_gradients_are_used_where_they_lie() -> None:
    rows = torch.tensor([3, 3])
    tensors = [doubles(4, 2), rows, doubles(2, 2), torch.tensor([7]), doubles(1, 5)]
    with slices_of_zeros(slice_of(0, 4, 2), slice_of(1, 4, 2)) as values:
        found = read_gradients(push_of("dense", "rows", tables=(9,)), tensors, values)
    assert found.slices[0] is tensors[0]
    some = found.slices[1]
    assert isinstance(some, PushedRows)
    assert some.values is tensors[2]
    assert some.sparse((4, 2)).to_dense().tolist() == [[0, 0], [0, 0], [0, 0], [2, 2]]
    assert found.tables[9].rows is tensors[3]


@pytest.mark.parametrize(
    ("form", "tensors", "message"),
    [
        ("dense", [doubles(4, 2), doubles(4, 2)], r"1 slices in 1 forms and 0 tables must bring 1 tensors, got 2"),
        ("rows", [doubles(4, 2)], r"must bring 2 tensors, got 1"),
        ("dense", [doubles(4)], r"gradient of variable0 must be torch.float64 of shape \(4, 2\), got .* shape \(4,\)"),
        ("dense", [doubles(4, 2).float()], r"must be torch.float64 .*, got torch.float32"),
        ("rows", [torch.tensor([1]), doubles(2, 2)], r"values of shape \(rows, 2\), got torch.int64 of shape \(1,\)"),
        ("rows", [torch.tensor([1]).int(), doubles(1, 2)], r"must be int64 rows"),
        ("rows", [torch.tensor([0, 4]), doubles(2, 2)], r"Rows of variable0 must be in \[0, 4\), got \[0, 4\]"),
        ("rows", [torch.tensor([-1]), doubles(1, 2)], r"must be in \[0, 4\), got \[-1, -1\]"),
    ],
)
def test_what_does_not_belong_together(form: str, tensors: list[torch.Tensor], message: str) -> None:
    with slices_of_zeros(slice_of(0, 4, 2)) as values, pytest.raises(rd.InvalidArgumentError, match=message):
        read_gradients(push_of(form), tensors, values)


SLICES = slice_of(0, 2), slice_of(1, 3), slice_of(2, 2)


def options_of(kind: Any, **options: Any) -> dict[str, Any]:
    return {**kind([torch.nn.Parameter(torch.ones(1))], **options).defaults}


def adam(values: PsSlices) -> ServerOptimizer:
    options = options_of(torch.optim.Adam, lr=0.1)
    groups = OptimizerGroup(options, (0,)), OptimizerGroup(options | {"lr": 0.2}, (1,))
    return ServerOptimizer(torch.optim.Adam, groups, values, {})


def step(optimizer: ServerOptimizer, values: PsSlices, **gradients: Any) -> None:
    tensors = {int(number.strip("s")): torch.tensor(each, dtype=torch.float64) for number, each in gradients.items()}
    with values.changing():
        optimizer.step(ServerGradients(tensors, {}))


def test_what_is_remembered_stays_while_a_slice_is_in_no_group() -> None:
    with slices_of_zeros(*SLICES) as values:
        optimizer, options = adam(values), options_of(torch.optim.Adam, lr=0.1)
        both = OptimizerGroup(options, (0,)), OptimizerGroup(options, (1,))
        without = OptimizerGroup(options, (0,)), OptimizerGroup(options)
        step(optimizer, values, s0=[1.0, 1.0], s1=[1.0, 1.0, 1.0])
        optimizer.change_groups(without)
        assert optimizer.num_bytes == (2 + 3) * 16 + 2 * 4
        optimizer.change_groups(both)
        step(optimizer, values, s1=[1.0, 1.0, 1.0])
        states = optimizer.state()
        assert states[1]["step"] == 2
        optimizer.change_groups(without)
        optimizer.set_state({0: states[0]})  # all that there is: nothing of the other
        optimizer.change_groups(both)
        assert list(optimizer.state()) == [0]
        optimizer.set_state(states)
        optimizer.change_groups(without)
        optimizer.drop([1, 7], ())
        assert list(optimizer.state()) == [0]
        assert optimizer.num_bytes == 2 * 16 + 4
        assert optimizer.known == {0}


def test_what_is_remembered_goes_and_comes() -> None:
    with slices_of_zeros(*SLICES) as values, slices_of_zeros(*SLICES) as others:
        one, other = adam(values), adam(others)
        step(one, values, s0=[1.0, 2.0])
        states = one.state()
        step(one, values, s0=[1.0, 2.0])
        assert states[0]["step"] == 1  # a copy
        other.set_state(states)
        step(other, others, s0=[1.0, 2.0])
        torch.testing.assert_close(other.state()[0]["exp_avg_sq"], one.state()[0]["exp_avg_sq"], rtol=0, atol=0)
        assert other.num_bytes == 2 * 16 + 4
        other.set_state({})
        assert other.state() == {}
        with pytest.raises(rd.InvalidArgumentError, match=r"has 3 slices and not number 7"):
            other.set_state({7: {}})


def test_gradients_that_an_optimizer_keeps_are_copied() -> None:
    class Remembering(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    parameter.sub_(state.get("before", torch.zeros_like(parameter)))
                    state["before"] = parameter.grad

    with slices_of_zeros(*SLICES) as values:
        group = OptimizerGroup(options_of(torch.optim.SGD, lr=1.0), (0,))
        optimizer = ServerOptimizer(Remembering, [group], values, {})
        gradient = torch.ones(2, dtype=torch.float64)
        for _ in range(2):
            with values.changing():
                optimizer.step(ServerGradients({0: gradient}, {}))
            gradient.fill_(torch.nan)
        assert values.value(0).tolist() == [-1, -1]


def test_what_does_not_belong_to_it_is_refused() -> None:
    with slices_of_zeros(*SLICES) as values:
        optimizer = adam(values)
        with pytest.raises(rd.InvalidArgumentError, match=r"groups of the Adam that applies them, got \[2\]"):
            optimizer.require_known(ServerGradients({0: torch.ones(2), 2: torch.ones(2)}, {}))
        with pytest.raises(rd.InvalidArgumentError, match=r"each of the 2 groups of a Adam, got 1"):
            optimizer.change_options([{}])


def test_rows_and_whole_gradients_by_one_optimizer() -> None:
    """Torch passes over memory once for those, and cannot for these."""
    with slices_of_zeros(*SLICES) as values:
        options = options_of(torch.optim.Adagrad, lr=1.0)
        optimizer = ServerOptimizer(torch.optim.Adagrad, [OptimizerGroup(options, (0,))], values, {})
        some = PushedRows(torch.tensor([1]), torch.full((1,), 2.0, dtype=torch.float64))
        for gradient in (torch.ones(2, dtype=torch.float64), some, torch.ones(2, dtype=torch.float64)):
            with values.changing():
                optimizer.step(ServerGradients({0: gradient}, {}))
        bare = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        constructed = torch.optim.Adagrad([bare], lr=1.0)
        for each in ([1.0, 1.0], [0.0, 2.0], [1.0, 1.0]):
            bare.grad = torch.tensor(each, dtype=torch.float64)
            constructed.step()
        torch.testing.assert_close(values.value(0), bare.detach(), rtol=1e-9, atol=0)


def sgd(values: PsSlices) -> ServerOptimizer:
    options = options_of(torch.optim.SGD, lr=1.0, momentum=0.5)
    return ServerOptimizer(torch.optim.SGD, [OptimizerGroup(options, (0, 2))], values, {})


def test_momentum_of_some_slices_only() -> None:
    with slices_of_zeros(*SLICES) as values:
        optimizer = sgd(values)
        step(optimizer, values, s0=[1.0, 1.0])
        step(optimizer, values, s0=[1.0, 1.0], s2=[1.0, 1.0])
        assert values.value(0).tolist() == [-2.5, -2.5]
        assert values.value(2).tolist() == [-1, -1]


def test_momentum_of_rows_is_counted() -> None:
    with slices_of_zeros(*SLICES) as values:
        optimizer = sgd(values)
        rows = PushedRows(torch.tensor([1, 1]), torch.ones(2, dtype=torch.float64))
        with values.changing():
            optimizer.step(ServerGradients({0: rows}, {}))
        assert optimizer.state()[0]["momentum_buffer"].is_sparse
        assert optimizer.num_bytes in (16, 2 * 16)  # an index and a value; torch may have added them up
