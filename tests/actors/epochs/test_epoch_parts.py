from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raydist.actors.epochs.input_pipeline import credits_of, executor_on, step_source_of
from raydist.actors.epochs.job import InputJob
from raydist.actors.workers.epoch_pools import SharedExecutor
from raydist.actors.workers.growing_executor import GrowingExecutor
from raydist.dataset import Dataset
from raydist.options import AutotuneOptions, InputOptions, Options, Timeouts
from raydist.pipelines.autotune.tuned_executor import local_executor
from raydist.pipelines.engine.executor import InlineExecutor
from raydist.pipelines.run.steps import DealtElements, GlobalBatches, WorkerBatches

JOB = InputJob("epoch 0", b"", False, 2, 0, 0, Options(), InputOptions(), Timeouts())
OPS = [Dataset.range(8).batch(4)._op]


@pytest.mark.parametrize(
    ("job", "kind"),
    [(JOB, GlobalBatches), (replace(JOB, dealt=True), DealtElements), (replace(JOB, num_pieces=4), WorkerBatches)],
)
def test_the_source_of_a_job(job: InputJob, kind: type) -> None:
    source = step_source_of(job, OPS, local_executor)
    assert type(source) is kind
    source.next_step()
    resumed = step_source_of(replace(job, state=source.state_dict()), OPS, local_executor)
    assert (resumed.step, resumed.state_dict()) == (1, source.state_dict())
    source.close()
    resumed.close()


def test_credits_hold_what_was_asked_for() -> None:
    assert credits_of(JOB).capacity == 3
    asked = credits_of(replace(JOB, input_options=InputOptions(prefetch_batches=7)))
    assert (asked.capacity, asked.spare_bytes) == (8, 0)


def test_a_pool_grows_where_its_size_was_chosen_for_one_iterator() -> None:
    pool: Any = InlineExecutor()
    assert isinstance(executor_on(pool, JOB, 1, Options()), GrowingExecutor)
    assert isinstance(executor_on(pool, JOB, 2, Options()), SharedExecutor)
    fixed = replace(JOB, input_options=InputOptions(num_input_workers=2))
    assert isinstance(executor_on(pool, fixed, 1, Options()), SharedExecutor)
    asleep = Options(autotune=AutotuneOptions(enabled=False))
    assert isinstance(executor_on(pool, JOB, 1, asleep), SharedExecutor)
