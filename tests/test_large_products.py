"""Each in a process of its own: what torch's products run on is changed for good."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import raydist as rd
from raydist.errors import InvalidArgumentError
from raydist.large_products import VARIABLE, has_narrow_kernels, inherited

BUILD = "USE_MKL=ON, USE_MKLDNN=ON"
SMALL_PRODUCTS = """
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
x, weight, bias = torch.randn(32, 384), torch.randn(256, 384), torch.randn(256)
other, doubles = torch.randn(100, 100), torch.randn(256, 384).double()
wide = torch.ones(1, 1).expand(384, 256)
def products():
    return {
        "another weight": x[:, :100] @ other,
        "float64": x.double() @ doubles.t(),
        "a vector": x[:1] @ weight.t(),
        "few rows": x[:3] @ weight.t(),
        "not dense": x @ wide,
        "scaled": torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2),
        "added to a matrix": torch.addmm(torch.ones(32, 256), x, weight.t()),
        "added to one, many times": torch.addmm(torch.ones(1).expand(256), x, weight.t()),
        "added to one": torch.addmm(torch.ones(1), x, weight.t()),
        "out": torch.mm(x, weight.t(), out=torch.empty(32, 256)),
    }
before = products()
large = x @ weight.t()
from raydist.large_products import note_weight, speed_up_products
speed_up_products()
note_weight(weight)
"""
LARGE_PRODUCTS = """
def far(found, exact):
    return ((found.double() - exact).abs().max() / exact.abs().max()).item()
inputs = [value.clone().requires_grad_() for value in (x, weight, bias)]
exacts = [value.double().requires_grad_() for value in (x, weight, bias)]
found, exact = torch.nn.functional.linear(*inputs), torch.nn.functional.linear(*exacts)
assert found.dtype == torch.float32 and far(found, exact) < 1e-6
upstream = torch.randn(32, 256)
found.backward(upstream)
exact.backward(upstream.double())
for one, other in zip(inputs, exacts):
    assert one.grad.shape == other.grad.shape and far(one.grad, other.grad) < 1e-6
linear = torch.ops.mkldnn._linear_pointwise
assert torch.equal(found, linear(x, weight, bias, "none", [], ""))
assert torch.equal(x @ weight.t(), linear(x, weight, None, "none", [], ""))
assert torch.equal(inputs[1].grad, linear(upstream.t(), x.t(), None, "none", [], ""))
assert torch.equal(inputs[0].grad, linear(upstream, weight.t(), None, "none", [], ""))
batches = torch.func.vmap(lambda one: one @ weight.t())(x.view(4, 8, 384))
assert far(batches.reshape(32, 256), x.double() @ weight.double().t()) < 1e-6
torch._C._set_mkldnn_enabled(False)
assert torch.equal(x @ weight.t(), large)
"""
BAD_PRODUCTS = """
for wrong in (lambda: x @ weight, lambda: torch.mm(x[0], weight), lambda: torch.addmm(torch.ones(3), x, weight.t()),
              lambda: torch.mm(x, weight.t().double())):
    try:
        wrong()
    except RuntimeError as error:
        assert "mat" in str(error) or "size" in str(error) or "dtype" in str(error), error
    else:
        raise AssertionError("no error")
"""


def run(program: str, choice: str) -> None:
    environment = {**os.environ, VARIABLE: choice, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(120)
def test_products_with_large_weights_are_taken_over() -> None:
    run(SMALL_PRODUCTS + LARGE_PRODUCTS, "onednn")


@pytest.mark.timeout(120)
def test_all_others_are_bit_for_bit_what_they_were() -> None:
    run(
        SMALL_PRODUCTS + "for name, value in products().items(): assert torch.equal(value, before[name]), name",
        "onednn",
    )


@pytest.mark.timeout(120)
def test_what_cannot_be_multiplied_is_torchs_error() -> None:
    run(SMALL_PRODUCTS + BAD_PRODUCTS, "onednn")


@pytest.mark.timeout(120)
def test_nothing_is_changed_where_mkl_is_wanted() -> None:
    run(SMALL_PRODUCTS + "assert torch.equal(x @ weight.t(), large)", "mkl")


def test_another_choice_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be one of \('mkl', 'onednn'\) or unset, got 'blis'"):
        inherited({VARIABLE: "blis"})
    assert inherited({VARIABLE: ""}) == {}


@pytest.mark.parametrize(
    ("cpu", "build", "narrow"),
    [
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", BUILD, True),
        ("vendor_id : AuthenticAMD\nflags : avx2", BUILD, False),
        ("vendor_id : GenuineIntel\nflags : avx2 avx512f", BUILD, False),
        ("CPU implementer : 0x41\nFeatures : sve", BUILD, False),
        ("vendor_id : AuthenticAMD\nflags : avx2 avx512f", "USE_MKL=OFF, USE_MKLDNN=ON", False),
    ],
)
def test_where_torchs_kernels_are_narrow(cpu: str, build: str, narrow: bool) -> None:
    assert has_narrow_kernels(cpu, build) is narrow


@pytest.mark.ray
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("ray_cluster")
def test_replicas_take_the_drivers_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "onednn")
    with rd.MirroredStrategy(["cpu:0"]) as strategy:
        with strategy.scope():
            layer = torch.nn.Linear(384, 256)

        def product(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            linear = torch.ops.mkldnn._linear_pointwise
            return layer(x).detach(), linear(x, layer.weight.detach(), layer.bias.detach(), "none", [], "")

        found, expected = strategy.run(product, args=(torch.randn(32, 384),))
    assert torch.equal(found, expected)
