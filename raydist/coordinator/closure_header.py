"""The header that a closure carries to the worker that runs it."""

from __future__ import annotations

import pickle

import torch

from raydist.context.seed_calls import num_seed_calls
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.replicas.step import StepHeader, batch_rows
from raydist.summary.recording import SummaryOrder
from raydist.torch_modes import TorchModes
from raydist.values import ReduceOp

__all__ = ["closure_header"]


def closure_header(
    payload: StepPayload,
    options: RunOptions,
    gradient_reduce_op: ReduceOp,
    summaries: SummaryOrder | None,
    number: int,
    *,
    looks_only: bool = False,
) -> bytes:
    """Return the pickle of a closure's `StepHeader`.

    Args:
        payload: The driver's changes and the arguments that the closure needs.
        options: Run options; `on_nonfinite` is used.
        gradient_reduce_op: How gradients of replicas are combined.
        summaries: Where the closure's summaries are written; None: nowhere.
        number: Number of the closure.
        looks_only: The closure changes no variable.
    """
    header = StepHeader(
        step=number,
        generation=0,
        payload=payload.of_step(),
        rows=batch_rows(payload.per_replica),
        gradient_reduce_op=gradient_reduce_op,
        padding=False,
        on_nonfinite=options.on_nonfinite,
        seed=(torch.initial_seed(), num_seed_calls()),
        summaries=summaries,
        looks_only=looks_only,
        modes=TorchModes.here(),
    )
    return pickle.dumps(header, pickle.HIGHEST_PROTOCOL)
