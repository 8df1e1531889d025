from __future__ import annotations

import pickle

import torch

from raydist.coordinator.closure_header import closure_header
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.replicas.step import StepHeader
from raydist.values import PerReplica, ReduceOp


def test_a_worker_gets_its_step_with_the_seed_of_the_program() -> None:
    torch.manual_seed(7)
    payload = StepPayload(digest=b"step", arguments=b"args", per_replica=(PerReplica([1]),))
    header = pickle.loads(
        closure_header(payload, RunOptions(on_nonfinite="skip"), ReduceOp.SUM, None, 5, looks_only=True)
    )
    assert isinstance(header, StepHeader)
    assert (header.step, header.generation, header.seed[0]) == (5, 0, 7)
    assert (header.gradient_reduce_op, header.on_nonfinite) == (ReduceOp.SUM, "skip")
    assert (header.padding, header.looks_only, header.summaries) == (False, True, None)
    assert header.payload == payload.of_step()
    assert header.payload.per_replica == (), "its parts travel apart"
