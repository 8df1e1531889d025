"""Which executor an iterator gets."""

from __future__ import annotations

from raydist.options import AutotuneOptions, Options, ThreadingOptions
from raydist.pipelines.autotune.tuned_executor import TunedExecutor
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.engine.threads import ThreadExecutor
from raydist.pipelines.run.executors import local_executor


def test_without_wishes_the_autotuner_decides() -> None:
    assert isinstance(local_executor(Options()), TunedExecutor)


def test_without_autotuning_the_thread_that_iterates_works() -> None:
    assert isinstance(local_executor(Options(autotune=AutotuneOptions(enabled=False))), InlineExecutor)
    assert isinstance(local_executor(Options(threading=ThreadingOptions(private_threadpool_size=0))), InlineExecutor)


def test_threads_are_bounded_by_the_budget() -> None:
    options = Options()
    options.threading.private_threadpool_size = 4
    executor = local_executor(options)
    assert isinstance(executor, ThreadExecutor)
    assert executor.window == 4
    options.autotune.cpu_budget = 1
    assert isinstance(local_executor(options), InlineExecutor)
