"""The totals of one stage of an iteration, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

__all__ = ["StageKind", "StagePlace", "Reading"]

StageKind = Literal["source", "stage", "exchange", "prefetch"]
StagePlace = Literal["inline", "threads", "actors"]


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """Totals of one stage since the iteration began.

    Attributes:
        name: Names of the operations: "map-1+filter-2".
        label: The label of the operations in `explain()`.
        inputs: Names of the input stages.
        kind: "source", "stage", "exchange" (changes the order of elements) or "prefetch" (a queue and its thread).
        elements: Elements handed out.
        blocks: Blocks handed out.
        bytes: Bytes of these blocks; an estimate where elements are bytes, str or of varying shape.
        errors: Errors handed out in place of elements.
        busy_s: Seconds that the workers spent on the stage's own work, without its inputs.
        cpu_s: CPU seconds of that work, where measured.
        wait_s: Seconds that the consumer's thread waited here for the inputs or for the workers.
        input_wait_s: Of `wait_s`, the seconds for the inputs; the inputs of a "prefetch" work in another thread.
        handling_s: Of `busy_s`, the seconds that the consumer's thread spent on moving blocks to the workers and back.
        parallelism: Current number of workers.
        mean_parallelism: Mean number of workers so far; 0 if it has always been `parallelism`.
        buffered: Current number of elements in the queue.
        buffered_bytes: Bytes of these elements.
        buffer_limit: Current capacity of the queue in elements; 0 without a queue.
        mean_buffered: Mean number of elements in the queue when the consumer asked.
        place: "inline" (in the consumer's thread), "threads" or "actors".
    """

    name: str
    label: str
    inputs: tuple[str, ...] = ()
    kind: StageKind = "stage"
    elements: int = 0
    blocks: int = 0
    bytes: int = 0
    errors: int = 0
    busy_s: float = 0.0
    cpu_s: float = 0.0
    wait_s: float = 0.0
    input_wait_s: float = 0.0
    handling_s: float = 0.0
    parallelism: int = 1
    mean_parallelism: float = 0.0
    buffered: int = 0
    buffered_bytes: int = 0
    buffer_limit: int = 0
    mean_buffered: float = 0.0
    place: StagePlace = "inline"

    @property
    def workers(self) -> float:
        """Mean number of workers, >= 1."""
        return max(1.0, self.mean_parallelism or self.parallelism)
