"""Which executor a dataset's iterators get."""

from __future__ import annotations

import subprocess
import sys

from raydist.actors.workers.executors import Executors, open_executor
from raydist.options import Options
from raydist.pipelines.autotune.tuned_executor import TunedExecutor


def test_without_workers_it_is_one_of_this_process() -> None:
    assert isinstance(open_executor(Options()), TunedExecutor)


def test_what_the_autotuner_learned_is_kept_for_the_next_iterator() -> None:
    executors = Executors()
    first = executors.open(Options())
    assert isinstance(first, TunedExecutor)
    first.close()
    second = executors.open(Options())
    assert isinstance(second, TunedExecutor)
    assert second._tuner is first._tuner


def test_iterating_without_workers_loads_no_ray() -> None:
    code = "import sys, raydist as rd; list(rd.Dataset.range(3).as_numpy_iterator()); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
