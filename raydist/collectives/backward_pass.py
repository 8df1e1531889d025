"""One synchronised backward pass of one replica: from gradients as they appear to `.grad` values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from raydist.collectives.base import Communicator
from raydist.collectives.buckets.exchange import BucketExchange
from raydist.collectives.buckets.forms import GlobalGradient, StepWeight
from raydist.collectives.nonfinite.policy import fault_of
from raydist.values import ReduceOp

__all__ = ["BackwardPass"]


@final
class BackwardPass:
    """The gradients that one exchange brings, in the form in which `.grad` holds them.

    Args:
        communicator: For what follows the buckets (rows of sparse gradients, a second derivative).
        exchange: Sends the buckets.
        weight: This replica's part.
        create_graph: Keep the gradients differentiable, as in `backward(create_graph=True)`.
    """

    def __init__(
        self, communicator: Communicator, exchange: BucketExchange, weight: StepWeight, *, create_graph: bool
    ) -> None:
        self.exchange = exchange
        self._communicator = communicator
        self._weight = weight
        self._create_graph = create_graph

    def finish(self) -> dict[int, torch.Tensor]:
        """Parameter index -> new global gradient, for those that some replica has one for.

        Blocking: until all replicas have ended their pass, at most the communicator's limit.
        """
        self.exchange.finish()
        if self.exchange.complete and not self._create_graph:
            lent = dict(self.exchange.in_rows())
            for indices, values in self.exchange.lend():
                lent.update(zip(indices, values, strict=True))
            return lent
        reduced = self.exchange.gradients()
        outcome = {index: self._outcome(index, reduced[index]) for index in reduced} | self.exchange.in_rows()
        return {index: outcome[index] for index in sorted(outcome)}

    def is_finite(self) -> bool:
        """After `finish`: whether no gradient has NaN or infinities; the same answer on every replica."""
        return self.exchange.is_finite()

    def accuse(self) -> list[dict[int, int]]:
        """By replica: what is wrong with its own gradients, see `fault_of`.

        Blocking: until all replicas call it, at most the communicator's limit.
        """
        own = self.exchange.own_gradients()
        places = sorted(own)
        mine = torch.zeros(len(places), dtype=torch.uint8, device=self._communicator.device)
        for place, index in enumerate(places):
            for gradient in own[index]:
                mine[place] |= fault_of(gradient)
        everyones = [torch.empty_like(mine) for _ in range(self._communicator.world_size)]
        self._communicator.all_gather(everyones, mine).wait()
        rows = [zip(places, row.tolist(), strict=True) for row in everyones]
        return [{index: fault for index, fault in row if fault} for row in rows]

    def _outcome(self, index: int, reduced: GlobalGradient) -> torch.Tensor:
        number, position = self.exchange.layout.places[index]
        local = self.exchange.local[number][position]
        if reduced.sparse:
            return self._as_sparse(reduced.value, self.exchange.own_gradients()[index])
        if self._create_graph:
            value = reduced.value.clone()
            start = torch.zeros_like(value, requires_grad=True) if local is None else local
            apply: Any = _Connected.apply  # torch leaves it untyped
            connected: torch.Tensor = apply(start, value, self._communicator, self._weight)
            return connected
        return reduced.value

    def _as_sparse(self, value: torch.Tensor, own: Sequence[torch.Tensor]) -> torch.Tensor:
        """The touched rows of `value`: rows that any replica's sparse gradient names, zero ones included."""
        touched = torch.zeros(value.shape[0], dtype=torch.uint8, device=value.device)
        for gradient in own:
            if gradient.is_sparse:
                touched[gradient.coalesce().indices()[0]] = 1
            else:
                touched.fill_(1)
        self._communicator.all_reduce(touched, ReduceOp.MAX).wait()
        rows = touched.nonzero().view(1, -1)
        return torch.sparse_coo_tensor(rows, value[rows[0]], value.shape, is_coalesced=True, check_invariants=False)


class _Connected(torch.autograd.Function):
    """A global gradient with the derivative of the global objective to this replica's own gradient.

    G = sum of w_i g_i, and the objective is the sum of w_j L_j(G). The gradient of it to g_i is w_i sum of w_j dL_j/dG;
    the factor w_i is left out, since the pass that uses the result multiplies by it.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, value: torch.Tensor, communicator: Communicator, weight: StepWeight
    ) -> torch.Tensor:
        ctx.communicator = communicator
        ctx.weight = weight
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight: StepWeight = ctx.weight
        total = upstream * weight.scale if weight.counts else torch.zeros_like(upstream)
        ctx.communicator.all_reduce(total, ReduceOp.SUM).wait()
        return total, None, None, None
