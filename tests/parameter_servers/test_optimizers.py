from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import raydist as rd
from raydist.parameter_servers.optimizers import (
    bare_optimizer,
    fits_one_pass,
    keeps_gradients,
    may_fuse,
    require_elementwise,
    server_options,
    state_bytes_per_byte,
    step_bare,
    why_not_elementwise,
)


def test_it_steps_as_one_that_was_constructed() -> None:
    one, other = torch.nn.Parameter(torch.ones(3)), torch.ones(3)
    constructed = torch.optim.Adagrad([one], lr=0.1, initial_accumulator_value=0.5)
    bare = bare_optimizer(torch.optim.Adagrad, [(constructed.param_groups[0], [other])])
    for _ in range(3):
        one.grad = torch.full((3,), 2.0)
        other.grad = torch.full((3,), 2.0)
        constructed.step()
        step_bare(bare)
    assert torch.equal(one, other)
    assert not other.requires_grad


def test_options_as_a_server_has_them() -> None:
    optimizer = torch.optim.Adam([("weight", torch.nn.Parameter(torch.ones(2)))], lr=torch.tensor(0.5), capturable=True)
    told = server_options(optimizer.param_groups[0])
    assert not {"params", "param_names"} & set(told)
    assert (told["lr"].item(), told["capturable"]) == (0.5, False)
    assert optimizer.param_groups[0]["capturable"]


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
from raydist.parameter_servers.optimizers import why_not_elementwise
options = dict(lr=0.1, momentum=0.9, dampening=0, weight_decay=0.1, nesterov=False, maximize=False)
options |= dict(foreach=None, differentiable=False, fused=None)
print(why_not_elementwise(torch.optim.SGD, options))
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
    assert fits_one_pass(torch.zeros(2, 3), gradient, state) is expected


def test_a_single_number_and_its_steps_are_one_pass() -> None:
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(()).double()}
    assert fits_one_pass(torch.zeros(()).double(), torch.zeros(()).double(), state)


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


class Remembering(o.SGD):
    """Steps by the gradient before this one too, which it has not copied."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            parameter.sub_(state.get("before", parameter.grad) + parameter.grad)
            state["before"] = parameter.grad


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
        r"but Adafactor steps the rows of a variable otherwise when they are apart",
    ),
    "Muon": (lambda p: o.Muon(p), r"but Muon steps the rows"),
    "LARS": (lambda p: Lars(p), r"but Lars steps the rows"),
    "LARS that warms up": (lambda p: Lars(p, lr=0.0), r"but Lars steps the rows"),
    "state of no parameter": (lambda p: Counting(p), r"but Counting remembers 'steps' of no parameter"),
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
    with pytest.raises(rd.InvalidArgumentError, match="LarsForSome steps"):
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


def test_what_is_remembered_must_be_elementwise_too() -> None:
    class Counting(o.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["norm"] = parameter.norm()

    options = o.SGD(parameters(), lr=0.1).param_groups[0]
    assert why_not_elementwise(Counting, options) == "remembers 'norm' otherwise when rows are apart"


def test_who_keeps_gradients_is_found_out() -> None:
    options = o.SGD(parameters(), lr=0.1, momentum=0.9).param_groups[0]
    assert not keeps_gradients(o.SGD, options)
    assert not keeps_gradients(o.SGD, options | {"momentum": 0.0}, "rows")
    assert keeps_gradients(Remembering, options)


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
