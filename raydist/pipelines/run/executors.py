"""The choice of the executor, in this process, for the stages of an iterator."""

from __future__ import annotations

from raydist.options import Options
from raydist.pipelines.autotune.tuned_executor import TunedExecutor
from raydist.pipelines.autotune.tuner import Tuner
from raydist.pipelines.engine.executor import Executor, InlineExecutor
from raydist.pipelines.engine.threads import ThreadExecutor

__all__ = ["local_executor"]


def local_executor(options: Options, tuners: list[Tuner] | None = None) -> Executor:
    """Return the executor that the options ask for: the autotuner's, or a fixed number of threads.

    Args:
        options: Options of the pipeline.
        tuners: List that keeps autotuners between iterations over one pipeline.
    """
    threads = options.threading.private_threadpool_size
    if threads is None and options.autotune.enabled:
        return TunedExecutor(tuners)
    threads = min(threads or 1, options.autotune.cpu_budget or threads or 1)
    return InlineExecutor() if threads == 1 else ThreadExecutor(threads)
