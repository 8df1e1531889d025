"""How replicas exchange gradients and values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, final

from raydist.options.requirement import require

__all__ = ["CommunicationOptions"]

_IMPLEMENTATIONS = ("auto", "shm", "gloo", "nccl", "hierarchical")


@final
@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """How the replicas of a strategy exchange gradients and values.

    Attributes:
        bytes_per_pack: Size of one bucket of gradients, each an all-reduce of its own that runs beside the rest of
            backward; 0 for 25 MiB.
        timeout_seconds: How long a collective waits for the slowest replica; None for `Timeouts.collective_s`.
        implementation: What carries the data. "auto": NCCL between GPUs; between CPUs shared memory on one host,
            across hosts shared memory inside each and connections between them. "shm", "gloo", "nccl" and
            "hierarchical" ask for one, and are an error where it cannot serve.
        compression: Gradients of float32 parameters, sparse ones included, travel as "fp16" or "bf16": half the bytes.
            Each replica's share is rounded once, and the sum: once by shared memory, which adds up in float32, across
            hosts once on each and once between them, after each addition by gloo and NCCL. What is beyond 65504 becomes
            infinite as "fp16". Parameters, gradients of other dtypes and values of `ctx.all_reduce` stay as they are.
            None sends all as they are.

    Raises:
        InvalidArgumentError: A value is none of these.

    Source: tf.distribute.experimental.CommunicationOptions, with settings of its own.

    >>> CommunicationOptions(implementation="gloo").compression is None
    True
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: Literal["auto", "shm", "gloo", "nccl", "hierarchical"] = "auto"
    compression: Literal["fp16", "bf16"] | None = None

    def __post_init__(self) -> None:
        size, limit = self.bytes_per_pack, self.timeout_seconds
        require(isinstance(size, int) and size >= 0, "bytes_per_pack must be a number of bytes >= 0", size)
        in_time = limit is None or (isinstance(limit, int | float) and 0 < limit < float("inf"))
        require(in_time, "timeout_seconds must be a finite number of seconds > 0, or None", limit)
        known = self.implementation in _IMPLEMENTATIONS
        require(known, f"implementation must be one of {', '.join(_IMPLEMENTATIONS)}", self.implementation)
        require(
            self.compression in (None, "fp16", "bf16"), 'compression must be None, "fp16" or "bf16"', self.compression
        )

    def merged(self, other: CommunicationOptions) -> CommunicationOptions:
        """These options, but for what others set.

        Args:
            other: Whose values count where they are not the default.

        >>> CommunicationOptions(bytes_per_pack=4).merged(CommunicationOptions(implementation="gloo"))
        CommunicationOptions(bytes_per_pack=4, timeout_seconds=None, implementation='gloo', compression=None)
        """
        default = CommunicationOptions()
        chosen = {}
        for option in fields(self):
            mine, others = getattr(self, option.name), getattr(other, option.name)
            chosen[option.name] = mine if others == getattr(default, option.name) else others
        return CommunicationOptions(**chosen)
