"""What a saved state of an iterator says, and which pipelines it fits."""

from __future__ import annotations

from functools import cached_property
from typing import final

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.items import IteratorState
from raydist.pipelines.elements.saved_state import require_pipelines, require_settings, require_state
from raydist.pipelines.engine.build import Plan
from raydist.pipelines.run.reopened import ReopenedEngine

__all__ = ["PipelineStates"]

_VERSION = 1


@final
class PipelineStates:
    """Makes states of one pipeline's iterations, and takes them back.

    Args:
        plan: The pipeline.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    @cached_property  # a state is asked for with every step of a distributed dataset
    def _fingerprint(self) -> str:
        return self._plan.fingerprint

    @cached_property
    def _order_settings(self) -> dict[str, str]:
        return self._plan.order_settings

    def state_of(self, engine: ReopenedEngine, at: IteratorState, skip: int) -> IteratorState:
        """The state of an iteration.

        Args:
            engine: Runs it.
            at: The engine's state before a block.
            skip: How many elements of that block, and of those behind it, were handed out.
        """
        orders = engine.orders.since(at)
        return {
            "version": _VERSION,
            "pipeline": self._fingerprint,
            "seed": engine.seed,
            "epoch": engine.epoch,
            "at": at,
            "skip": skip,
            **({"orders": orders} if orders else {}),
            **({"own_seeds": dict(engine.own_seeds)} if engine.own_seeds else {}),
            **({"settings": settings} if (settings := self._order_settings) else {}),
        }

    def require(self, state: IteratorState) -> None:
        """See that a state, which may be anything, is one of this pipeline, with its settings.

        Raises:
            InvalidArgumentError: It is not.
        """
        require_pipelines(require_state(state), 1)
        found = (state.get("version"), state.get("pipeline"))
        if found != (_VERSION, self._fingerprint):
            raise InvalidArgumentError(
                f"The state must be of this pipeline ({self._fingerprint}), got one of {state.get('pipeline')!r} "
                f"(version {state.get('version')!r}). Build the dataset as it was when the state was saved."
            )
        require_settings(state, self._order_settings)
