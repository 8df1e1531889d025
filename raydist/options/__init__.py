"""Options for users: of pipelines, distributed input, one `run`, and communication; time limits."""

from raydist.options.input import InputOptions, InputReplicationMode
from raydist.options.pipeline import (
    AutoShardPolicy,
    AutotuneOptions,
    DistributeOptions,
    OptimizationOptions,
    Options,
    ThreadingOptions,
)
from raydist.options.strategy import CommunicationOptions, Elastic, FailureOptions, RunOptions, Timeouts

__all__ = [
    "AutoShardPolicy",
    "AutotuneOptions",
    "CommunicationOptions",
    "DistributeOptions",
    "Elastic",
    "FailureOptions",
    "InputOptions",
    "InputReplicationMode",
    "OptimizationOptions",
    "Options",
    "RunOptions",
    "ThreadingOptions",
    "Timeouts",
]
