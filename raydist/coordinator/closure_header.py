"""What a closure tells the worker that runs it."""

from __future__ import annotations

import pickle

import torch

from raydist.context.seed_calls import num_seed_calls
from raydist.mirroring.shipment import Shipment
from raydist.options import RunOptions
from raydist.replicas.step import StepHeader, batch_rows
from raydist.summaries.order import SummaryOrder
from raydist.torch_modes import TorchModes
from raydist.values import ReduceOp

__all__ = ["closure_header"]


def closure_header(
    shipment: Shipment,
    options: RunOptions,
    gradient_reduce_op: ReduceOp,
    summaries: SummaryOrder | None,
    number: int,
    *,
    looks_only: bool = False,
) -> bytes:
    """The pickle of a `StepHeader`.

    Args:
        shipment: What the closure needs.
        options: What gradients that are not finite do.
        gradient_reduce_op: How gradients meet.
        summaries: Where what it shows is written; None: nowhere.
        number: The closure's.
        looks_only: It changes nothing.
    """
    header = StepHeader(
        step=number,
        generation=0,
        shipment=shipment.of_step(),
        rows=batch_rows(shipment.per_replica),
        gradient_reduce_op=gradient_reduce_op,
        stand_in=False,
        on_nonfinite=options.on_nonfinite,
        seed=(torch.initial_seed(), num_seed_calls()),
        summaries=summaries,
        looks_only=looks_only,
        modes=TorchModes.here(),
    )
    return pickle.dumps(header, pickle.HIGHEST_PROTOCOL)
