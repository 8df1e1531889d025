from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from raydist.parameter_servers.optimizers import (
    bare_optimizer,
    fits_one_pass,
    may_fuse,
    server_options,
    step_bare,
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
