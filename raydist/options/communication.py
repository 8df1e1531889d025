"""Options of the communication between replicas."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, final

from raydist.options.requirement import require

_IMPLEMENTATIONS = ("auto", "shm", "gloo", "nccl", "hierarchical")


@final
@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of the exchange of gradients and values between the replicas of a strategy.

    Attributes:
        bytes_per_pack: Size of a gradient bucket; each bucket has its own all-reduce, which overlaps with backward; 0
            for 25 MiB.
        timeout_seconds: Time that a collective waits for the slowest replica; None for `Timeouts.collective_s`.
        implementation: Transport. "auto": NCCL between GPUs; between CPUs shared memory on one host, and across hosts
            shared memory inside each host and connections between hosts. "shm", "gloo", "nccl" and "hierarchical"
            select one, and are an error if it is not available.
        compression: Send gradients of float32 parameters, including sparse ones, as "fp16" or "bf16": half the bytes.
            Each replica's part is rounded once, and the sum: once by shared memory, which adds in float32, across
            hosts once on each and once between them, after each addition by gloo and NCCL. Values beyond 65504 become
            infinite in "fp16". Parameters, gradients of other dtypes and values of `ctx.all_reduce` are not
            compressed. None: no compression.

    Raises:
        InvalidArgumentError: A value is invalid.

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
        """Return these options, overridden by the options that `other` sets.

        Args:
            other: Options whose values count if they differ from the default.

        >>> CommunicationOptions(bytes_per_pack=4).merged(CommunicationOptions(implementation="gloo"))
        CommunicationOptions(bytes_per_pack=4, timeout_seconds=None, implementation='gloo', compression=None)
        """
        default = CommunicationOptions()
        chosen = {}
        for option in fields(self):
            mine, others = getattr(self, option.name), getattr(other, option.name)
            chosen[option.name] = mine if others == getattr(default, option.name) else others
        return CommunicationOptions(**chosen)
