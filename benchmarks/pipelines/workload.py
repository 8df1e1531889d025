"""What has to be read, and who can do it."""

from __future__ import annotations

from dataclasses import dataclass

ROWS_PER_SECOND = "rows/s"


@dataclass(frozen=True)
class Workload:
    """One row of the benchmark.

    Attributes:
        name: What `--only` takes, and the name under which each contender keeps its pass.
        description: The pipeline in words.
        rows: Rows of one pass.
        smoke_rows: The same for `--smoke`.
        contenders: Labels of those who can do it, the one that the others are compared with first.
        data: Names of the generated data that it reads.
        unit: Rows a second are timed; of any other unit the pass itself gives the value.
        smaller_is_better: Of two values.
    """

    name: str
    description: str
    rows: int
    smoke_rows: int
    contenders: tuple[str, ...]
    data: tuple[str, ...] = ()
    unit: str = ROWS_PER_SECOND
    smaller_is_better: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether the clock gives the value."""
        return self.unit == ROWS_PER_SECOND

    def rows_for(self, *, smoke: bool) -> int:
        """How many rows a pass has."""
        return self.smoke_rows if smoke else self.rows
