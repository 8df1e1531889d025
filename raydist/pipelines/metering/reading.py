"""What one stage of an iteration has done so far, as plain data."""

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
        name: Its operations: "map-1+filter-2".
        label: What `explain()` shows for them.
        inputs: Names of the stages it reads.
        kind: "source", "stage", "exchange" (changes the order of elements) or "prefetch" (a queue and its thread).
        elements: Elements handed out.
        blocks: Blocks handed out.
        bytes: Bytes of these blocks; an estimate where elements are bytes, str or of varying shape.
        errors: Errors handed out in the place of elements.
        busy_s: Seconds its workers spent on its own work, without its inputs.
        cpu_s: CPU seconds of these, where they were measured.
        wait_s: Seconds in which its consumer's thread waited here for the inputs or for the workers.
        input_wait_s: Of `wait_s`, the seconds for the inputs; those of a "prefetch" work in another thread.
        handling_s: Of `busy_s`, the seconds in which its consumer's thread moved blocks to the workers and back.
        parallelism: Workers that it may use now.
        mean_parallelism: Workers that it could use on average so far; 0 for `parallelism`, all the time.
        buffered: Elements in its queue now.
        buffered_bytes: Bytes of these.
        buffer_limit: Elements for which the queue has room now; 0 for none.
        mean_buffered: Elements in its queue on average, of the moments when its consumer asked.
        place: "inline" (in its consumer's thread), "threads" or "actors".
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
        """Workers that it could use on average, >= 1."""
        return max(1.0, self.mean_parallelism or self.parallelism)
