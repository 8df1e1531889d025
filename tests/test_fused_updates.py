"""In a process of its own: what torch's optimizers run is changed for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import copy, functools, importlib, itertools, warnings
import torch
from torch.optim import SGD, Adam, AdamW
from raydist.fused_updates import speed_up_updates

taken = []

def note(name):
    kernel = getattr(torch, name)

    @functools.wraps(kernel)
    def noting(*args, **kwargs):
        taken.append(name)
        return kernel(*args, **kwargs)

    setattr(torch, name, noting)

for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_"):
    note(name)

def parameters(dtype=torch.float32, shapes=((37, 5), (64,), (3, 1, 2), (0,))):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]

def give_gradients(params, seed):
    torch.manual_seed(seed)
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)

def trained(make, params, num_steps=4):
    optimizer = make(params)
    for number in range(num_steps):
        give_gradients(params, number)
        optimizer.step()
    return optimizer

def held(optimizer):
    return [value for state in optimizer.state.values() for value in state.values()]
"""

SAME = """
MAKES = [
    functools.partial(SGD, lr=0.1, momentum=momentum, weight_decay=decay, nesterov=nesterov, maximize=maximize)
    for momentum, decay, nesterov, maximize in itertools.product((0, 0.9), (0, 0.01), (False, True), (False, True))
    if momentum or not nesterov
] + [
    functools.partial(SGD, lr=torch.tensor(0.1), momentum=0.9, dampening=0.3),
    *(functools.partial(kind, lr=0.01, weight_decay=decay, amsgrad=amsgrad, maximize=maximize)
      for kind, decay, amsgrad, maximize in itertools.product((Adam, AdamW), (0, 0.1), (False, True), (False, True))),
]
CASES = list(itertools.product(MAKES, (torch.float32, torch.float64)))

def run():
    outcome = []
    for make, dtype in CASES:
        taken.clear()
        params = parameters(dtype)
        optimizer = trained(make, params)
        outcome.append((params, optimizer, len(taken)))
    return outcome

before = run()
speed_up_updates()
speed_up_updates()
after = run()
for (make, dtype), (was, plain, none), (now, fused, number) in zip(CASES, before, after, strict=True):
    one_pass = make.func is SGD and not make.keywords["momentum"] and not make.keywords["weight_decay"]
    assert none == 0 and number == (0 if one_pass else 4), (make, none, number)
    bound = 1e-6 if dtype is torch.float32 else 1e-15
    for one, other in zip(was + held(plain), now + held(fused), strict=True):
        if one is not None:
            assert one.dtype is other.dtype and one.stride() == other.stride(), make
            torch.testing.assert_close(one, other, rtol=bound, atol=bound, msg=str((make, dtype)))
    assert plain.state_dict()["param_groups"] == fused.state_dict()["param_groups"]
    fused.load_state_dict(copy.deepcopy(plain.state_dict()))
"""

LEFT_ALONE = """
speed_up_updates()

def is_taken(optimizer):
    taken.clear()
    optimizer.step()
    return bool(taken)

def of(kind=SGD, dtype=torch.float32, **how):
    params = parameters(dtype)
    give_gradients(params, 0)
    return kind(params, lr=torch.tensor(0.1) if how.get("differentiable") else 0.1, **how)

momentum = {"momentum": 0.9}
assert is_taken(of(**momentum)) and is_taken(of(Adam)) and is_taken(of(AdamW))
assert not is_taken(of(fused=False, **momentum)) and not is_taken(of(Adam, fused=False))
assert not is_taken(of(foreach=True, **momentum)) and not is_taken(of(foreach=False, **momentum))
assert is_taken(of(fused=True))  # by torch itself
assert not is_taken(of(weight_decay=torch.tensor(0.1), **momentum))
for kind in (SGD, Adam):  # torch would update a leaf, which autograd refuses
    with torch.no_grad():
        optimizer = of(kind, differentiable=True)
        optimizer.param_groups[0]["params"] = [
            torch.nn.Parameter(torch.ones(3), requires_grad=False) for _ in range(2)
        ]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(3)
        assert not is_taken(optimizer)
for dtype in (torch.bfloat16, torch.float16):
    assert not is_taken(of(dtype=dtype, **momentum)) and not is_taken(of(Adam, dtype=dtype))
assert not is_taken(of(Adam, dtype=torch.complex64))

# Another order in memory, of each of the tensors in turn.
def turned(tensor):
    return torch.empty(tensor.shape[::-1], dtype=tensor.dtype).copy_(tensor.t()).t()

for kind, how in ((SGD, momentum), (Adam, {})):
    for place in ("parameter", "gradient", "state"):
        outcome = []
        for fused in (None, False):
            params = parameters(shapes=((7, 5),))
            optimizer = kind(params, lr=0.1, fused=fused, **how)
            for number in range(3):
                give_gradients(params, number)
                if place == "parameter":
                    params[0].data = turned(params[0].data)
                if place == "gradient":
                    params[0].grad = turned(params[0].grad)
                if place == "state" and number:
                    state = optimizer.state[params[0]]
                    state.update({name: turned(value) for name, value in state.items() if value.dim() == 2})
                taken.clear()
                optimizer.step()
                assert not taken or place == "state" and not number
            outcome.append(params[0].detach())
        torch.testing.assert_close(*outcome, rtol=1e-6, atol=1e-6)

# A parameter whose gradient comes later has no momentum yet.
params = parameters()
optimizer = SGD(params, lr=0.1, momentum=0.9)
give_gradients(params[:2], 0)
assert is_taken(optimizer)
give_gradients(params, 1)
assert not is_taken(optimizer) and is_taken(optimizer)

# Rows of an embedding.
table = torch.nn.Embedding(5, 2, sparse=True)
table(torch.tensor([1])).sum().backward()
assert not is_taken(SGD(table.parameters(), lr=0.1, weight_decay=0.0, momentum=0.9))

# A model that was cast: the optimizer's state is of the type that it had.
cast = torch.nn.Parameter(torch.ones(3))
cast.grad = torch.ones(3)
optimizer = SGD([cast], lr=0.1, momentum=0.9)
assert is_taken(optimizer)
cast.data = cast.data.double()
cast.grad = torch.ones(3, dtype=torch.float64)
assert not is_taken(optimizer)

class Own(torch.Tensor):
    pass

own = torch.nn.Parameter(torch.ones(3).as_subclass(Own))
own.grad = torch.ones(3)
assert not is_taken(SGD([own], lr=0.1, momentum=0.9))
assert not is_taken(SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9))  # no gradient, nothing to do

# Autograd still sees that a parameter has changed.
weight = torch.nn.Parameter(torch.ones(3))
loss = (weight * weight).sum()
weight.grad = torch.ones(3)
assert is_taken(SGD([weight], lr=0.1, momentum=0.9))
try:
    loss.backward()
except RuntimeError as error:
    assert "modified by an inplace operation" in str(error)
else:
    raise AssertionError("the change was not seen")

# While a compiler looks.
looks, torch.compiler.is_compiling = torch.compiler.is_compiling, lambda: True
optimizer = of(**momentum)
with torch.no_grad(), warnings.catch_warnings():
    taken.clear()
    params = optimizer.param_groups[0]["params"]
    gradients, buffers = [parameter.grad for parameter in params], [None] * len(params)
    how = dict(weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False, maximize=False)
    update = importlib.import_module("torch.optim.sgd").sgd
    update(params, gradients, buffers, **how)
    assert not taken
torch.compiler.is_compiling = looks
with torch.no_grad():
    update(params, gradients, list(buffers), False, None, None, **how)
    assert not taken
    update(params, gradients, list(buffers), **how)
    assert taken
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("program", [SAME, LEFT_ALONE], ids=["same_outcome", "left_alone"])
def test_updates_in_one_pass(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
