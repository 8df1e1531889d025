"""Products with large float32 weights, by the library that has the widest kernels for this processor.

torch multiplies matrices by Intel's MKL, which takes kernels of AVX2 on other makers' processors, also where there is
AVX-512: 2.9 ms for 128 x 1024 by 1024 x 1024 on one core of a Zen 5. oneDNN, which torch has for convolutions and
TensorFlow for everything, goes by what the processor can do: 1.35 ms. Both compute in float32 and round about alike.

A product is taken over if a weight of `LARGE_NUMEL` elements or more may be in it, going by sizes alone: never by what
is fastest at the moment, so that the same program rounds the same way each time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch

from raydist.cpu_kernels import replace_kernels
from raydist.errors import InvalidArgumentError

__all__ = ["LARGE_NUMEL", "VARIABLE", "has_narrow_kernels", "inherited", "note_weight", "speed_up_products"]

VARIABLE = "RAYDIST_FLOAT32_PRODUCTS"
"""Whose kernels multiply large float32 matrices on replicas: "mkl" (torch's choice) or "onednn"; else by processor."""
LARGE_NUMEL = 1 << 16
"""Elements of a weight from which on it pays: below, both need about the same, and each product 3 us more."""
_FEW_ROWS = 4  # MKL has fast kernels for vectors; from here on oneDNN is faster in all three products of a layer
_CHOICES = ("mkl", "onednn")


def has_narrow_kernels(cpu: str, torch_build: str) -> bool:
    """Whether torch's matrix products use less than this processor has.

    Args:
        cpu: What `/proc/cpuinfo` says.
        torch_build: What `torch.__config__.show()` says.

    >>> has_narrow_kernels("vendor_id : AuthenticAMD\\nflags : fpu avx2 avx512f\\n", "USE_MKL=ON, USE_MKLDNN=ON")
    True
    >>> has_narrow_kernels("vendor_id : GenuineIntel\\nflags : fpu avx2 avx512f\\n", "USE_MKL=ON, USE_MKLDNN=ON")
    False
    """
    words = set(cpu.split())
    has_both = "USE_MKL=ON" in torch_build and "USE_MKLDNN=ON" in torch_build
    return has_both and "AuthenticAMD" in words and "avx512f" in words


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a driver's environment says of it, for its replicas.

    Raises:
        InvalidArgumentError: It is neither of the two.

    >>> inherited({"HOME": "/root", "RAYDIST_FLOAT32_PRODUCTS": "mkl"})
    {'RAYDIST_FLOAT32_PRODUCTS': 'mkl'}
    """
    chosen = environment.get(VARIABLE)
    if not chosen:
        return {}
    if chosen not in _CHOICES:
        raise InvalidArgumentError(f"The variable {VARIABLE} must be one of {_CHOICES} or unset, got {chosen!r}.")
    return {VARIABLE: chosen}


def speed_up_products() -> None:
    """Have this process use oneDNN for products with weights that :func:`note_weight` is told, where that is faster.

    For processes that train and do nothing else: it changes what `torch.mm` and `torch.addmm` run on CPUs.
    """
    chosen = inherited(os.environ).get(VARIABLE)
    _PRODUCTS.allowed = chosen == "onednn" or (chosen is None and _is_narrow())


def note_weight(weight: torch.Tensor) -> None:
    """Products with matrices of this size are large ones from now on, if it is one. Else this takes 0.3 us."""
    if weight.dtype is torch.float32 and weight.dim() == 2 and weight.numel() >= LARGE_NUMEL:  # a matrix
        _PRODUCTS.add(weight.numel())


def _is_narrow() -> bool:
    try:
        return has_narrow_kernels(Path("/proc/cpuinfo").read_text(), torch.__config__.show())
    except OSError:
        return False


@final
class _Products:
    """The products of this process.

    Attributes:
        allowed: Whether it may take any over.
    """

    def __init__(self) -> None:
        self.allowed = False
        self._sizes: frozenset[int] = frozenset()
        self._library: torch.library.Library | None = None
        self._lock = threading.Lock()
        self._linear: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # torch's stubs know no operators
        self._mm: Any = torch.ops.aten.mm.out
        self._addmm: Any = torch.ops.aten.addmm.out

    def add(self, numel: int) -> None:
        """A weight of so many elements is there."""
        if not self.allowed or self._linear is None or numel in self._sizes:
            return
        with self._lock:
            self._sizes |= {numel}
            if self._library is None:
                self._library = replace_kernels({"mm": self._multiply, "addmm": self._multiply_and_add})

    # Other products go to the forms with `out`: see `replace_kernels`.

    def _multiply(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype is torch.float32 and self._is_large(left, right):
            product: torch.Tensor = self._linear(left, right.t(), None, "none", [], "")
        else:
            product = self._mm(left, right, out=left.new_empty(0))
        return product

    def _multiply_and_add(
        self, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        plain = beta == 1 and alpha == 1 and added.dim() == 1 and added.dtype is torch.float32
        plain = plain and added.is_contiguous()
        if plain and left.dtype is torch.float32 and self._is_large(left, right) and added.shape[0] == right.shape[1]:
            product: torch.Tensor = self._linear(left, right.t(), added, "none", [], "")
        else:
            product = self._addmm(added, left, right, beta=beta, alpha=alpha, out=left.new_empty(0))
        return product

    def _is_large(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether a large weight is a factor, or the result is as large as one: that is its gradient."""
        if not left.dim() == right.dim() == 2:
            return False
        (rows, inner), (height, columns) = left.shape, right.shape
        if inner != height:
            return False
        if inner * columns in self._sizes:
            many = rows >= _FEW_ROWS
        else:
            many = rows * columns in self._sizes and inner >= _FEW_ROWS
        return many and right.dtype is torch.float32 and _lies_dense(right) and torch._C._get_mkldnn_enabled()


def _lies_dense(matrix: torch.Tensor) -> bool:
    return matrix.is_contiguous() or matrix.t().is_contiguous()


# One per process, as torch's kernels are.
_PRODUCTS = _Products()
