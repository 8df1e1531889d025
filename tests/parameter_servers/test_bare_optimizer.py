from __future__ import annotations

import subprocess
import sys

import torch

from raydist.parameter_servers.bare_optimizer import bare_optimizer, may_fuse, server_options, step_bare


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
from raydist.parameter_servers.elementwise import why_not_elementwise
options = dict(lr=0.1, momentum=0.9, dampening=0, weight_decay=0.1, nesterov=False, maximize=False)
options |= dict(foreach=None, differentiable=False, fused=None)
print(why_not_elementwise(torch.optim.SGD, options))
print([name for name in sys.modules if name == "torch._dynamo"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["None", "[]"]
