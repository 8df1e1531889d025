"""Options of `strategy.run` and of the communication between replicas, and all time limits."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, final

from raydist.core.values import ReduceOp
from raydist.options.requirement import require


@final
@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one `strategy.run`: gradients, empty batches and checks.

    Attributes:
        gradient_reduce_op: MEAN weights each replica by its share of the global batch's rows. SUM adds the gradients,
            for losses with a global denominator. None uses the scope's choice (MEAN by default). Gradients that a step
            assigns to `.grad` are reduced in the same way before `optimizer.step()`: with SUM, assign each replica's
            own part, not the result of `ctx.all_reduce`.
        empty_batch: "pad" runs a replica without rows on two padding rows from the same global batch, and drops the
            replica's results. "zero_rows" runs it on zero rows and keeps the results, as TensorFlow does. If several
            arguments are batches, the first one decides: a replica with rows of the first batch gets its parts of the
            others, even parts with zero rows. A global batch without any rows runs as on one device.
        on_nonfinite: Reaction to NaN or infinity in a gradient, the same on all replicas. "pass": none. "raise":
            `backward()` raises a FailedPreconditionError that names the replica and the parameter. "skip": while
            `.grad` contains such a value, `optimizer.step()` changes nothing (parameters, moments, counters), and
            `strategy.stats()` counts the call. "raise" and "skip" read all reduced gradients once per backward pass,
            and on a GPU wait for the device. A `GradScaler` has its own check: use "pass" or "skip" with it.
        param_sync_every: Number of batches after which the replicas compare parameters and optimizer states; 0 for
            never. A comparison computes checksums of both, at 6 GB/s.

    Raises:
        InvalidArgumentError: A value is invalid.

    Source: tf.distribute.RunOptions, with more settings.

    >>> RunOptions(gradient_reduce_op="sum").gradient_reduce_op
    <ReduceOp.SUM: 'SUM'>
    """

    gradient_reduce_op: ReduceOp | None = None
    empty_batch: Literal["pad", "zero_rows"] = "pad"
    on_nonfinite: Literal["pass", "raise", "skip"] = "pass"
    param_sync_every: int = 100

    def __post_init__(self) -> None:
        op = self.gradient_reduce_op
        if op is not None:
            object.__setattr__(self, "gradient_reduce_op", ReduceOp.parse(op))
            require(
                self.gradient_reduce_op in (ReduceOp.SUM, ReduceOp.MEAN), "gradient_reduce_op must be SUM or MEAN", op
            )
        require(
            self.empty_batch in ("pad", "zero_rows"),
            'empty_batch must be "pad" or "zero_rows"',
            self.empty_batch,
        )
        require(
            self.on_nonfinite in ("pass", "raise", "skip"),
            'on_nonfinite must be "pass", "raise" or "skip"',
            self.on_nonfinite,
        )
        every = self.param_sync_every
        require(isinstance(every, int) and every >= 0, "param_sync_every must be a number of batches, or 0", every)


_IMPLEMENTATIONS = ("auto", "shm", "gloo", "nccl", "hierarchical")


@final
@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of the exchange of gradients and values between the replicas of a strategy.

    Attributes:
        bytes_per_pack: Size of a gradient bucket; 0 for 25 MiB. Each bucket has its own all-reduce, which overlaps with
            the backward pass.
        timeout_seconds: Time that a collective waits for the slowest replica; None for `Timeouts.collective_s`.
        implementation: Transport. "auto": NCCL between GPUs; between CPUs shared memory on one host, and across hosts
            shared memory inside each host and connections between hosts. "shm", "gloo", "nccl" and "hierarchical"
            select a transport, and raise an error if the transport is not available.
        compression: Send gradients of float32 parameters, including sparse ones, as "fp16" or "bf16": half the bytes.
            Each replica's part is rounded once. Shared memory adds in float32 and rounds the sum once; across hosts,
            the sum is rounded once on each host and once between hosts; gloo and NCCL round after each addition. Values
            beyond 65504 become infinite in "fp16". Parameters, gradients of other dtypes and values of
            `ctx.all_reduce` are not compressed. None: no compression.

    Raises:
        InvalidArgumentError: A value is invalid.

    Source: tf.distribute.experimental.CommunicationOptions, with more settings.

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
            other: Options that override these where they differ from the default.

        >>> CommunicationOptions(bytes_per_pack=4).merged(CommunicationOptions(implementation="gloo"))
        CommunicationOptions(bytes_per_pack=4, timeout_seconds=None, implementation='gloo', compression=None)
        """
        default = CommunicationOptions()
        chosen = {}
        for option in fields(self):
            mine, others = getattr(self, option.name), getattr(other, option.name)
            chosen[option.name] = mine if others == getattr(default, option.name) else others
        return CommunicationOptions(**chosen)


@final
@dataclass(frozen=True, slots=True)
class Timeouts:
    """The limits of all waits of raydist, in seconds.

    Attributes:
        start_s: Start of Ray and of all actors, until every actor is placed and answers.
        collective_s: One collective, including the computation of the slowest rank, for which the others wait.
        step_s: One dispatched step, from dispatch to result, including queueing.
        input_s: The next element from an input pipeline.
        element_s: A user's function on one block, in a pool of input workers. A stuck worker is then killed.
        close_s: Shutdown on close. Processes that still run are then killed.
        idle_s: Idle time of a pool of input workers. The workers then stop and release their resources.
        poll_s: One long poll between actors. A wait repeats polls until one of the limits above ends the wait.

    Raises:
        InvalidArgumentError: A limit is not a finite number > 0.

    >>> Timeouts(step_s=60).step_s
    60
    """

    start_s: float = 120.0
    collective_s: float = 300.0
    step_s: float = 3600.0
    input_s: float = 600.0
    element_s: float = 600.0
    close_s: float = 10.0
    idle_s: float = 60.0
    poll_s: float = 5.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            require(
                isinstance(value, int | float) and 0 < value < float("inf"),
                f"Timeouts.{limit.name} must be a finite number of seconds > 0",
                value,
            )


@final
@dataclass(frozen=True, slots=True)
class Elastic:
    """Limits of the number of replicas: fewer after a loss, more when there is room again.

    If no process can take the place of a lost replica within `FailureOptions.replace_s`, training goes on with fewer
    replicas: the unfinished step ends with all of them, some beside others on one node, and the next step has fewer.
    While there are fewer than `max_replicas`, resources for another one are requested, which lets an autoscaler add a
    node; once they are there, the next step has one replica more. Each change pauses training as `resize` does.

    Attributes:
        min_replicas: With fewer, a loss is an UnavailableError.
        max_replicas: Upper limit. None: the number at the start.
        grow_after_s: Seconds after a change until resources for more replicas are requested.

    Raises:
        InvalidArgumentError: A value is invalid.

    Source: `--nnodes=MIN:MAX` of torchrun; Horovod's `min_np` and `max_np`.

    >>> FailureOptions(elastic=Elastic(min_replicas=2, max_replicas=8)).elastic.grow_after_s
    30.0
    """

    min_replicas: int = 1
    max_replicas: int | None = None
    grow_after_s: float = 30.0

    def __post_init__(self) -> None:
        least, most = self.min_replicas, self.max_replicas
        require(isinstance(least, int) and least >= 1, "min_replicas must be a number >= 1", least)
        fits = most is None or (isinstance(most, int) and most >= least)
        require(fits, "max_replicas must be None or a number >= min_replicas", most)
        require(0 < self.grow_after_s < float("inf"), "grow_after_s must be finite and > 0", self.grow_after_s)


@final
@dataclass(frozen=True, slots=True)
class FailureOptions:
    """Options for lost replicas of a synchronous strategy: replicas that die, or do not answer.

    For the lost servers of `ParameterServerStrategy`, `recover`, `max_failures`, `within_s` and `replace_s` apply.

    With `recover`, another process takes the place of a lost replica or input pipeline. The surviving replicas hold
    the same parameters and optimizer states, so the new replica takes over theirs, and the unfinished step runs
    again. With one replica, under CentralStorageStrategy, and in loops inside the replicas, all replicas go back to
    a copy of their state; so do those of ShardedStrategy and MeshStrategy, also after a step that failed. See the
    page "Failures" of the documentation for what is promised.

    Attributes:
        recover: Replace what is lost. False makes every lost replica an UnavailableError. None is True for replicas on
            CPUs, and False on GPUs and TPUs, where recovery has not run yet, and where replicas hold parts of a model.
        max_failures: Number of lost replicas within `within_s` seconds, beyond which the next is an UnavailableError.
        within_s: See `max_failures`.
        attempts_per_step: Number of times that a step may lose replicas before it is an UnavailableError: a step that
            kills its replica each time is to blame.
        replace_s: Seconds until a new replica must have started.
        spares: Number of processes that wait, with all modules imported, to take a lost replica's place: on CPUs, on
            the node of the first replica. Each takes about 400 MB.
        multi_update: Steps that exchange something after an update (a GAN, LBFGS) need a copy of parameters and
            optimizer states at the start of each step. "copy" makes it; with "checkpoint" a replica lost in such a step
            is an UnavailableError, and the program continues from its last checkpoint when it runs again.
        elastic: Go on with fewer replicas if no process can take a lost one's place, and with more later. None keeps
            the number.

    Raises:
        InvalidArgumentError: A value is invalid.

    >>> FailureOptions(recover=True, max_failures=3).attempts_per_step
    3
    """

    recover: bool | None = None
    max_failures: int = 20
    within_s: float = 3600.0
    attempts_per_step: int = 3
    replace_s: float = 120.0
    spares: int = 0
    multi_update: Literal["copy", "checkpoint"] = "copy"
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        for name in ("max_failures", "attempts_per_step", "spares"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 0, f"{name} must be a number >= 0", value)
        for name in ("within_s", "replace_s"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"{name} must be a finite number of seconds > 0", value)
        known = self.multi_update in ("copy", "checkpoint")
        require(known, 'multi_update must be "copy" or "checkpoint"', self.multi_update)
