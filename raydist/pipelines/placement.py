"""Where the stages of an iterator run: here, or on what a layer above registers under a name."""

from __future__ import annotations

from importlib import import_module

from raydist.options import Options
from raydist.pipelines.autotune.tuner import Tuner
from raydist.pipelines.executor import Executor, InlineExecutor
from raydist.pipelines.threads import ThreadExecutor
from raydist.pipelines.tuned_executor import TunedExecutor

__all__ = ["local_executor", "open_executor"]

# Makers of executors that this layer may not import: "module:function", called with the options of the pipeline.
_MAKERS = {"actors": "raydist.actors.pool:open_pool"}


def local_executor(options: Options, tuners: list[Tuner] | None = None) -> Executor:
    """The executor of this process that the options ask for: the autotuner's, or so many threads.

    Args:
        options: Of the pipeline.
        tuners: Where autotuners are kept between iterations over one pipeline.
    """
    threads = options.threading.private_threadpool_size
    if threads is None and options.autotune.enabled:
        return TunedExecutor(tuners)
    threads = min(threads or 1, options.autotune.cpu_budget or threads or 1)
    return InlineExecutor() if threads == 1 else ThreadExecutor(threads)


def open_executor(options: Options, tuners: list[Tuner] | None = None) -> Executor:
    """The executor of a plain iterator: a pool of `num_input_workers` actors, or this process. The caller closes it."""
    if options.num_input_workers == 0:
        return local_executor(options, tuners)
    module, _, name = _MAKERS["actors"].partition(":")
    executor: Executor = getattr(import_module(module), name)(options)
    return executor
