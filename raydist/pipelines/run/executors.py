"""Where the stages of an iterator run: here, or on what a layer above registers under a name."""

from __future__ import annotations

import weakref
from importlib import import_module
from typing import Any, final

from raydist.options import Options
from raydist.pipelines.autotune.tuned_executor import TunedExecutor
from raydist.pipelines.autotune.tuner import Tuner
from raydist.pipelines.engine.executor import Executor, InlineExecutor
from raydist.pipelines.engine.threads import ThreadExecutor

__all__ = ["Executors", "local_executor", "open_executor"]

# This layer may not import Ray: it names what keeps pools of actors.
_POOLS = "raydist.actors.workers.pools_of_iterators:KeptPools"


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


def open_executor(options: Options) -> Executor:
    """The executor of a single iterator: see :class:`Executors`. The caller closes it."""
    return Executors().open(options)


@final
class Executors:
    """The executors of a dataset's iterators, one after the other. What costs much is kept between them.

    That is what autotuners learned, and a pool of workers; the pool ends with this object, or when it was idle long.
    """

    def __init__(self) -> None:
        self._tuners: list[Tuner] = []
        self._pools: Any = None

    def open(self, options: Options) -> Executor:
        """A pool of `num_input_workers` actors, or this process. The caller closes it."""
        if options.num_input_workers == 0:
            return local_executor(options, self._tuners)
        if self._pools is None:
            module, _, name = _POOLS.partition(":")
            self._pools = getattr(import_module(module), name)()
            # Not at exit: workers end with the process that started them.
            weakref.finalize(self, self._pools.close).atexit = False
        executor: Executor = self._pools.open(options)
        return executor
