from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raydist.checkpoints.random_state import RESTORED_REPLICAS
from raydist.core.values import ReduceOp
from raydist.mirroring.messages import StepPayload
from raydist.options import RunOptions
from raydist.replicas.step import StepHeader, StepHeaders


def following(headers: StepHeaders, **options: Any) -> StepHeader:
    return headers.following(
        StepPayload(digest=b"step"), RunOptions(**options), ReduceOp.SUM, generation=2, summaries=None
    )


def test_steps_are_numbered_and_say_how_they_are_run() -> None:
    torch.manual_seed(11)
    headers = StepHeaders()
    first = following(headers)
    second = following(headers, empty_batch="zero_rows", param_sync_every=True)
    assert (first.step, second.step, headers.count) == (0, 1, 2)
    assert (first.padding, second.padding) == (True, False)
    assert (first.param_sync_every, second.param_sync_every) == (RunOptions().param_sync_every, True)
    assert (second.generation, second.gradient_reduce_op, second.seed[0]) == (2, ReduceOp.SUM, 11)


def test_steps_that_only_pass_gradients_on_need_no_count_of_them() -> None:
    headers = StepHeaders()
    following(headers)
    assert not headers.looked
    following(headers, on_nonfinite="skip")
    following(headers)
    assert headers.looked


@pytest.fixture
def _nothing_restored() -> Iterator[None]:
    """Afterwards: strategies of other tests in this process would go on from it."""
    yield
    RESTORED_REPLICAS.restore([])


@pytest.mark.usefixtures("_nothing_restored")
def test_random_states_that_were_restored_go_along_once() -> None:
    headers = StepHeaders()
    following(headers)
    RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
    assert following(headers).random == ((b"one",), (b"two",))
    assert following(headers).random == ()


@pytest.mark.usefixtures("_nothing_restored")
def test_a_program_that_seeds_torch_after_a_restore_begins_there() -> None:
    headers = StepHeaders()
    RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
    torch.manual_seed(torch.initial_seed())
    assert following(headers).random == ()
    RESTORED_REPLICAS.restore([[b"one"], [b"two"]])
    assert following(headers).random == ((b"one",), (b"two",))
