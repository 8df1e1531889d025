"""Collectives that cannot go wrong silently: ranks first tell each other what they are about to call.

Without this a differing shape ends the process (gloo), hangs (NCCL) or passes unnoticed where the numbers of elements are
equal. The price is one small all-gather per call, so gradients, whose layout is agreed on otherwise, do without.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import final

import torch

from raydist.collectives.base import Communicator, Membership, Work
from raydist.errors import CollectiveMismatchError
from raydist.values import ReduceOp

__all__ = ["Call", "CheckedCommunicator", "exchange"]

# Room for a tensor of 60 dimensions or so; a longer description is cut, which only makes the check weaker.
_CALL_BYTES = 512


@final
@dataclass(frozen=True, slots=True)
class Call:
    """What a rank is about to do.

    Attributes:
        name: The collective and its arguments: "all_reduce(SUM)".
        dtype: Of the tensor: "torch.float32".
        shape: Of the tensor.
        number: How many calls this rank has made before.
        differentiable: Whether its result takes part in a backward pass; may differ between ranks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    number: int = 0
    differentiable: bool = False

    def __str__(self) -> str:
        return f"{self.name} of {self.dtype} {self.shape} as call {self.number}"

    def encode(self) -> torch.Tensor:
        data = json.dumps(asdict(self)).encode()[:_CALL_BYTES].ljust(_CALL_BYTES)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    @staticmethod
    def decode(row: torch.Tensor) -> Call:
        fields = json.loads(bytes(row.tolist()))
        return Call(**{**fields, "shape": tuple(fields["shape"])})


def exchange(communicator: Communicator, call: Call, *, device: torch.device, ragged_axis: int | None = None) -> list[Call]:
    """Every rank's call, after checking that they fit together.

    Args:
        communicator: Carries the descriptions.
        call: This rank's.
        device: Where the communicator's tensors are.
        ragged_axis: A dimension whose length may differ between ranks.

    Blocking: until all ranks have called, at most the communicator's limit.

    Raises:
        CollectiveMismatchError: On every rank alike, with every rank's call.
    """
    mine = call.encode().to(device)
    rows = [torch.empty_like(mine) for _ in range(communicator.world_size)]
    communicator.all_gather(rows, mine).wait()
    calls = [Call.decode(row.cpu()) for row in rows]
    if len({_essence(other, ragged_axis) for other in calls}) > 1:
        said = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(calls))
        raise CollectiveMismatchError(
            f"All replicas must call the same collectives with equal shapes and dtypes, got {said}. "
            "Look for a branch that only some replicas take."
        )
    return calls


def _essence(call: Call, ragged_axis: int | None) -> tuple[object, ...]:
    shape = list(call.shape)
    if ragged_axis is not None and -len(shape) <= ragged_axis < len(shape):
        shape[ragged_axis] = -1
    return call.name, call.dtype, tuple(shape), call.number


@final
class CheckedCommunicator(Communicator):
    """Another communicator whose collectives are checked. Send and receive check that the two sides fit.

    Args:
        inner: Does the work; it belongs to this object from now on.
        device: Where its tensors are.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._inner = inner
        self._device = device
        self._num_calls = 0

    @property
    def membership(self) -> Membership:  # type: ignore[override]  # a view of the inner one's
        return self._inner.membership

    @property
    def timeout_s(self) -> float:  # type: ignore[override]  # a view of the inner one's
        return self._inner.timeout_s
