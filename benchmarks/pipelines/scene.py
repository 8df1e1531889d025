"""What a contender gets, and what it makes of it. Imported in every environment: the standard library alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

Pass = Callable[[], float]
"""Reads everything once. Gives the number of rows seen; for workloads with another unit than rows/s, the value."""


@dataclass(frozen=True)
class Scene:
    """The place in which one contender does one workload.

    Attributes:
        folder: Where the generated data lies.
        rows: How many rows the workload has in this run.
        num_workers: Processes beside the consumer's that may do the work.
        num_calls: Calls at a time, set by hand; None leaves it to the library.
        resources: Closed after the last pass: servers, clusters, strategies.
    """

    folder: Path
    rows: int
    num_workers: int = 0
    num_calls: int | None = None
    resources: ExitStack = field(default_factory=ExitStack)


MakePass = Callable[[Scene], Pass]
