"""Other kernels for torch's own operators on CPUs, in this process, for good."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["replace_kernels"]


def replace_kernels(kernels: Mapping[str, Callable[..., Any]]) -> torch.library.Library:
    """Have operators run these functions on CPUs, for as long as what is returned is held.

    What torch had there before cannot be called any more; an operator's form with `out` mostly does the same.

    Args:
        kernels: By the operators' names in ATen.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    return library
