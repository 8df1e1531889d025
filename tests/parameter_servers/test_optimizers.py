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
)
from raydist.parameter_servers.requests import OptimizerGroup, Push, PushKey, Sender
from raydist.parameter_servers.server_optimizer import ServerGradients, ServerOptimizer, read_gradients
from raydist.parameter_servers.server_slices import PsSlices
from tests.parameter_servers.examples import slice_of, slices_of_zeros


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


def test_one_pass_is_for_those_that_have_it_and_what_lies_as_the_value_does() -> None:
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
    value, turned = torch.ones(2, 3), torch.ones(3, 2).t()
    cases: list[tuple[torch.Tensor, dict[str, Any], bool]] = [
        (value, {}, True),
        (value, {"step": torch.tensor(1.0), "exp_avg": torch.ones(2, 3)}, True),
        (value, {"momentum_buffer": None}, True),
        (turned, {}, False),
        (value.to_sparse(), {}, False),
        *(
            (value, {"exp_avg": bad}, False)
            for bad in (turned, value.double(), value[0], value[0, 0], value.to_sparse())
        ),
        (value, {"step": 3}, False),
    ]
    for gradient, state, expected in cases:
        assert has_fused_layout(torch.zeros(2, 3), gradient, state) is expected, (gradient, state)


Parameters = list[torch.nn.Parameter]

Make = Callable[[Parameters], torch.optim.Optimizer]

o = torch.optim

ELEMENTWISE: list[Make] = [
    lambda p: o.SGD(p, lr=0.1),
    lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: o.SGD(p, lr=0.1, maximize=True),
    o.Adagrad,
    lambda p: o.Adam(p, amsgrad=True),
    lambda p: o.Adam(p, capturable=True),
    lambda p: o.Adam(p, lr=torch.tensor(0.1)),
    lambda p: o.AdamW(p, weight_decay=0.1),
    lambda p: o.RMSprop(p, centered=True, momentum=0.5),
    *(o.Rprop, o.NAdam, o.RAdam, o.Adamax, o.Adadelta, o.ASGD, o.SparseAdam),
]


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


class LarsForSome(Lars):
    """Every group is tried, not the first alone."""

    def __init__(self, parameters: Any) -> None:
        super().__init__([{"params": parameters, "scaled": False}, {"params": new_parameters(), "scaled": True}])

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["scaled"]:
            super().step()


REFUSED: list[tuple[Make, str]] = [
    (o.LBFGS, r"but LBFGS demands a closure in step\(\). Use torch.optim.SGD"),
    (o.Adafactor, r"but Adafactor updates rows of a variable differently if they are on different servers"),
    (o.Muon, r"but Muon updates rows"),
    (Lars, r"but Lars updates rows"),
    (lambda p: Lars(p, lr=0.0), r"but Lars updates rows"),  # it warms up
    (LarsForSome, "but LarsForSome updates rows"),
    (Counting, r"but Counting keeps state 'steps' that belongs to no parameter"),
    (Scaled, r"Scaled could not step .* \(AttributeError: .*'scale'\)"),
]


def new_parameters() -> Parameters:
    return [torch.nn.Parameter(torch.randn(3, 2))]


def test_what_is_elementwise_is_taken_and_all_else_refused_with_the_reason() -> None:
    for make in ELEMENTWISE:
        require_elementwise(make(new_parameters()))
    for make, message in REFUSED:
        with pytest.raises(rd.InvalidArgumentError, match=message):
            require_elementwise(make(new_parameters()))


def test_the_trial_leaves_no_trace() -> None:
    optimizer = o.Adam(new_parameters())
    before = optimizer.state_dict()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    require_elementwise(optimizer)
    assert torch.equal(torch.rand(1), expected)
    assert optimizer.state_dict() == before
    assert optimizer.param_groups[0]["params"][0].grad is None


def doubles(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64)


def test_what_does_not_belong_together() -> None:
    cases: list[tuple[Any, list[torch.Tensor], str]] = [
        ("dense", [doubles(4, 2)] * 2, r"1 slices in 1 forms and 0 tables must bring 1 tensors, got 2"),
        ("rows", [doubles(4, 2)], r"must bring 2 tensors, got 1"),
        ("dense", [doubles(4)], r"gradient of variable0 must be torch.float64 of shape \(4, 2\), got .* shape \(4,\)"),
        ("dense", [doubles(4, 2).float()], r"must be torch.float64 .*, got torch.float32"),
        ("rows", [torch.tensor([1]), doubles(2, 2)], r"values of shape \(rows, 2\), got torch.int64 of shape \(1,\)"),
        ("rows", [torch.tensor([1]).int(), doubles(1, 2)], r"must be int64 rows"),
        ("rows", [torch.tensor([0, 4]), doubles(2, 2)], r"Rows of variable0 must be in \[0, 4\), got \[0, 4\]"),
        ("rows", [torch.tensor([-1]), doubles(1, 2)], r"must be in \[0, 4\), got \[-1, -1\]"),
    ]
    for form, tensors, message in cases:
        with slices_of_zeros(slice_of(0, 4, 2)) as values, pytest.raises(rd.InvalidArgumentError, match=message):
            read_gradients(Push(Sender(0, 0), PushKey(0, 0), 0, (0,), (form,)), tensors, values)


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
        with pytest.raises(rd.InvalidArgumentError, match=r"has 3 slices and not number 7"):
            optimizer.set_state({7: {}})
