"""What is said of each step, the same for every replica but for where its parts are."""

from __future__ import annotations

from typing import final

import torch

from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.context.seed_calls import num_seed_calls
from raydist.mirroring.shipment import Shipment
from raydist.options import RunOptions
from raydist.replicas.step import StepHeader, batch_rows
from raydist.summaries.order import SummaryOrder
from raydist.torch_modes import TorchModes
from raydist.values import ReduceOp

__all__ = ["StepHeaders"]


@final
class StepHeaders:
    """Numbers the steps of a strategy.

    Attributes:
        count: How many there were.
        looked: Whether some step did something about gradients that are not finite.
    """

    def __init__(self) -> None:
        self.count = 0
        self.looked = False
        self._random_restored = 0

    def following(
        self,
        shipment: Shipment,
        options: RunOptions,
        gradient_reduce_op: ReduceOp,
        *,
        generation: int,
        summaries: SummaryOrder | None,
    ) -> StepHeader:
        """The header of the next step.

        Args:
            shipment: What it needs.
            options: How it is run.
            gradient_reduce_op: How gradients meet.
            generation: Of the group.
            summaries: Where what it shows is written; None: nowhere.
        """
        self.count += 1
        self.looked |= options.on_nonfinite != "pass"
        return StepHeader(
            step=self.count - 1,
            generation=generation,
            shipment=shipment.without_parts(),
            rows=batch_rows(shipment.per_replica),
            gradient_reduce_op=gradient_reduce_op,
            stand_in=options.empty_batch == "stand_in",
            check_in_sync=options.check_in_sync,
            on_nonfinite=options.on_nonfinite,
            seed=(torch.initial_seed(), num_seed_calls()),
            summaries=summaries,
            random=self._restored_random(),
            modes=TorchModes.here(),
        )

    def _restored_random(self) -> tuple[tuple[bytes, ...], ...]:
        states = RESTORED_REPLICAS.since(self._random_restored)
        self._random_restored = RESTORED_REPLICAS.count
        return states
