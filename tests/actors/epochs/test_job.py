"""What follows from the options of an epoch."""

from __future__ import annotations

import pickle
from dataclasses import replace

from raydist.actors.epochs.job import InputJob
from raydist.core.values import AUTOTUNE
from raydist.options import InputOptions, Options, Timeouts

JOB = InputJob(
    label="epoch 0",
    ops=b"",
    dealt=False,
    num_replicas=2,
    seed=0,
    epoch=0,
    options=Options(),
    input_options=InputOptions(),
    timeouts=Timeouts(),
)


def test_as_many_places_are_kept_as_are_prefetched_and_one_in_use() -> None:
    assert JOB.capacity == 3  # by default one ready per replica
    assert replace(JOB, input_options=InputOptions(prefetch_batches=5)).capacity == 6


def test_the_input_options_say_how_many_workers_then_the_pipeline() -> None:
    three = replace(JOB, options=Options(num_input_workers=3))
    assert (JOB.num_workers, three.num_workers) == (AUTOTUNE, 3)
    assert replace(three, input_options=InputOptions(num_input_workers=0)).num_workers == 0


def test_a_job_travels() -> None:
    assert pickle.loads(pickle.dumps(JOB)) == JOB
