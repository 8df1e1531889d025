"""In a process of its own: what torch pools with is changed for good."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from torch.nn import functional as F

torch.manual_seed(0)
WINDOWS = [
    dict(kernel_size=2),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=(2, 3), stride=(1, 2), dilation=2, ceil_mode=True),
    dict(kernel_size=3, stride=3, padding=(1, 0), ceil_mode=True),
]

def images(kind, *shape):
    x = torch.randn(shape)
    if kind == "ties":
        return x.round().relu()
    if kind == "odd":
        x[x > 1.5] = float("nan")
        x[x < -1.5] = -float("inf")
        x[(x > 1.2) & (x < 1.3)] = float("inf")
    return x

CASES = [
    (kind, images(kind, *shape), window)
    for kind in ("plain", "ties", "odd")
    for shape in ((16, 8, 23, 24), (5, 32, 28, 28), (70, 64, 7, 5))
    for window in WINDOWS
]
x = images("plain", 16, 16, 28, 28)
OTHERS = {
    "float64": x.double(),
    "few channels": images("ties", 64, 3, 28, 28),
    "small": images("ties", 1, 16, 8, 8),
    "without a batch": x[0],
    "channels last": x.contiguous(memory_format=torch.channels_last),
    "strided": x[:, :, ::2],
}

def pooled(x, window):
    x = x.detach().requires_grad_()
    values, places = F.max_pool2d(x, **window, return_indices=True)
    (values * torch.arange(values.numel()).view(values.shape)).sum().backward()
    return values.detach(), places, x.grad

def run():
    return [pooled(x, window) for _, x, window in CASES] + [pooled(x, WINDOWS[0]) for x in OTHERS.values()]

before = run()
from raydist import wide_pooling
wide_pooling.speed_up_pooling()
wide_pooling.speed_up_pooling()
taken = []
plain = wide_pooling._plain

def noted(x, *window):
    taken.append(x.is_contiguous(memory_format=torch.channels_last))
    return plain(x, *window)

wide_pooling._plain = noted
after = run()
for number, (one, other) in enumerate(zip(before, after, strict=True)):
    for was, now in zip(one, other, strict=True):
        assert torch.equal(was.nan_to_num(7.0), now.nan_to_num(7.0)), number
        assert torch.equal(was.isnan(), now.isnan()), number
        assert was.stride() == now.stride() and was.dtype is now.dtype, number
assert all(taken[: len(CASES)])
assert [name for name, wide in zip(OTHERS, taken[len(CASES) :], strict=True) if wide] == ["channels last"]
rows = torch.func.vmap(lambda one: F.max_pool2d(one, 2))(x.view(4, 4, 16, 28, 28))
assert torch.equal(rows.view(16, 16, 14, 14), F.max_pool2d(x, 2))
print("the same")
"""


def test_values_places_gradients_and_layouts_are_as_before() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "the same", done.stderr
