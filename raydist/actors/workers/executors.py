"""Executors for the stages of a dataset's iterators: this process, or a pool of input workers. A pool loads Ray."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, final

from raydist.options import Options
from raydist.pipelines.autotune.tuned_executor import local_executor
from raydist.pipelines.autotune.tuner import Tuner
from raydist.pipelines.engine.executor import Executor

if TYPE_CHECKING:
    from raydist.actors.workers.epoch_pools import IteratorPools


def open_executor(options: Options) -> Executor:
    """Open the executor of a single iterator: see :class:`Executors`. The caller closes it."""
    return Executors().open(options)


@final
class Executors:
    """The executors of a dataset's iterators, one after the other.

    Keeps autotuner results and a pool of workers between iterators. The pool ends with this object or after idle time.
    """

    def __init__(self) -> None:
        self._tuners: list[Tuner] = []
        self._pools: IteratorPools | None = None

    def open(self, options: Options) -> Executor:
        """Return a pool of `num_input_workers` actors, or this process if that is 0. The caller closes the executor."""
        if options.num_input_workers == 0:
            return local_executor(options, self._tuners)
        if self._pools is None:
            from raydist.actors.workers.epoch_pools import (
                IteratorPools,  # loads Ray, which most iterators never need
            )

            self._pools = IteratorPools()
            # Not at exit: workers end with the process that started them.
            weakref.finalize(self, self._pools.close).atexit = False
        return self._pools.open(options)
